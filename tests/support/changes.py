"""Changes to the tiny tower of Qwen3-VL, each with the reason that the original code must run for, word by word."""

import contextlib
import copy
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations

from fusedvit.checks import fallback
from fusedvit.checks.change_detection import HANDLE

Tower = Any


class Change(NamedTuple):
    """One change to a tower.

    Attributes:
        apply: makes it.
        kind, detail: of the reason; no kind where the changed tower runs fused.
        before_fuse: the reason's detail where the change is older than `fuse`.
        matters: whether the tower's answer changes.
    """

    apply: Callable[[Tower], object]
    kind: str
    detail: str
    before_fuse: str
    matters: bool


CHANGES: list[Change] = []


def change(
    detail: str = "", kind: str = fallback.MODIFIED, before_fuse: str = "", matters: bool = True
) -> Callable[[Callable[[Tower], None]], Callable[[Tower], None]]:
    """Lists the function that it decorates in `CHANGES`; without `detail`, as one that leaves a tower fused."""

    def listed(apply: Callable[[Tower], None]) -> Callable[[Tower], None]:
        CHANGES.append(Change(apply, kind if detail else "", detail, before_fuse or detail, matters))
        return apply

    return listed


_TORCH, _QWEN3 = "torch.nn.modules", "transformers.models.qwen3_vl.modeling_qwen3_vl"
_PARAMETRIZED = "torch.nn.utils.parametrize.Parametrized"
_CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper"


@contextlib.contextmanager
def undone(tower: Tower) -> Iterator[None]:
    """Gives `tower` back, on the way out, all that it and its config had: attributes, classes, tensors' content."""
    holders = [*tower.modules(), tower.config]
    attributes = [(vars(h), dict(vars(h)), type(h)) for h in holders]
    held = [value for own, *_ in attributes for value in own.values()]
    dictionaries = [(value, value.copy()) for value in held if isinstance(value, dict)]
    lists = [(value, value.copy()) for value in held if isinstance(value, list)]
    tensors = [(t, t.data, t.detach().clone()) for t in (*tower.parameters(), *tower.buffers())]
    yield
    for holder, (own, then, cls) in zip(holders, attributes, strict=True):
        if type(holder) is not cls and holder is not tower:  # a tower's is what `fuse` has given it meanwhile
            holder.__class__ = cls
        ours = {HANDLE: own[HANDLE]} if HANDLE in own else {}
        own.clear()
        own.update(then | ours)
    for registry, entries in dictionaries:
        registry.clear()
        registry.update(entries)
    for changed, then in lists:
        changed[:] = then
    for tensor, data, content in tensors:
        tensor.data = data
        data.copy_(content)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Wrapper(nn.Module):
    """A module that cannot be called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Int8Linear(nn.Module):
    """As quantisation libraries make them: buffers for parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scale = nn.Buffer(weight.abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Buffer((weight / self.scale).round().to(torch.int8))
        self.bias = nn.Buffer(linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class TransformersInt8Linear(Int8Linear):
    __module__ = "transformers.integrations.some_quantiser"  # where such classes of transformers' own live


def _quantise(tower: Tower, kind: type[Int8Linear]) -> None:
    for block in tower.blocks:
        block.attn.qkv = kind(block.attn.qkv)
        block.mlp.linear_fc2 = kind(block.mlp.linear_fc2)


class Mine(nn.Parameter):
    pass


class Unpacking(nn.Linear):
    """Its weight is one column, as bitsandbytes packs 4 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.reshape(self.out_features, self.in_features), self.bias)


class Registry(dict[str, Any]):
    """As libraries that offload put in the place of a module's parameters."""


# code


def _own(function: str) -> str:
    return f"a forward of its own, {__name__}.{function}.<locals>.<lambda>"


@change(f"blocks.1.attn.qkv is {__name__}.Doubled, expected {_TORCH}.linear.Linear")
def subclass_of_linear(tower: Tower) -> None:
    tower.blocks[1].attn.qkv.__class__ = Doubled


@change(f"blocks.1.norm1 has {_own('forward_of_a_norm')}, expected that of {_TORCH}.normalization.LayerNorm")
def forward_of_a_norm(tower: Tower) -> None:
    tower.blocks[1].norm1.forward = lambda x: x


@change(f"blocks.1.mlp has {_own('forward_of_an_mlp')}, expected that of {_QWEN3}.Qwen3VLVisionMLP")
def forward_of_an_mlp(tower: Tower) -> None:
    tower.blocks[1].mlp.forward = lambda x: x


@change(f"blocks.1 is {__name__}.another_block.<locals>.Block, expected {_QWEN3}.Qwen3VLVisionBlock")
def another_block(tower: Tower) -> None:
    class Block(type(tower.blocks[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return hidden_states + 1

    tower.blocks[1].__class__ = Block


@change(f"blocks.2.mlp.act_fn is {_TORCH}.activation.ReLU, expected transformers.activations.GELUTanh")
def another_activation(tower: Tower) -> None:
    tower.blocks[2].mlp.act_fn = nn.ReLU()


@change(f"blocks.0.mlp is {_TORCH}.linear.Identity, expected a module with linear_fc1")
def mlp_skipped(tower: Tower) -> None:
    tower.blocks[0].mlp = nn.Identity()


@change(
    f"parameter blocks.0.mlp.linear_fc2.weight is missing: blocks.0.mlp.linear_fc2 is {_TORCH}.container.Sequential"
)
def sequential_around_a_linear(tower: Tower) -> None:
    tower.blocks[0].mlp.linear_fc2 = nn.Sequential(tower.blocks[0].mlp.linear_fc2, Twice())


@change(f"merger is {__name__}.Wrapper, expected a module with norm")
def wrapped_merger(tower: Tower) -> None:
    tower.merger = Wrapper(tower.merger)


@change(f"blocks.0 is {_CHECKPOINT}, expected a module with norm1", matters=False)
def checkpointed_blocks(tower: Tower) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    checkpoint_wrapper.apply_activation_checkpointing(tower, check_fn=lambda m: m in list(tower.blocks))


@change(f"blocks.1.mlp is {_CHECKPOINT}, expected a module with linear_fc1", matters=False)
def checkpointed_mlp(tower: Tower) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    tower.blocks[1].mlp = checkpoint_wrapper.checkpoint_wrapper(tower.blocks[1].mlp)


# numbers


@change("blocks.1.norm2.eps is 0.5, expected 1e-06")
def epsilon(tower: Tower) -> None:
    tower.blocks[1].norm2.eps = 0.5


@change("blocks.1.norm1.eps is 0.5, expected 1e-06")
def norm_of_another_epsilon(tower: Tower) -> None:
    tower.blocks[1].norm1 = nn.LayerNorm(48, eps=0.5).requires_grad_(False)


@change("merger.act_fn.approximate is tanh, expected none")
def approximation(tower: Tower) -> None:
    tower.merger.act_fn.approximate = "tanh"


@change(
    "its config's num_heads is 4, expected 2, as fuse() read it (unfuse() and fuse() read it anew)",
    before_fuse="blocks.0.attn.num_heads is 2, expected 4",
    matters=False,
)
def heads_of_the_config(tower: Tower) -> None:
    tower.config.num_heads = 4


@change("deepstack_visual_indexes is [1, 2], expected [0, 1]")
def another_deepstack(tower: Tower) -> None:
    tower.deepstack_visual_indexes = [1, 2]


@change("buffer rotary_pos_emb.inv_freq does not hold the rotary frequencies of base 10000")
def frequencies(tower: Tower) -> None:
    tower.rotary_pos_emb.inv_freq.mul_(2)


# blocks


@change("parameter blocks.3.attn.proj.bias is not expected")
def appended(tower: Tower) -> None:
    tower.blocks.append(copy.deepcopy(tower.blocks[0]))


@change("parameter blocks.3.attn.proj.bias is not expected")
def extended(tower: Tower) -> None:
    tower.blocks.extend([copy.deepcopy(block) for block in tower.blocks])


@change("parameter blocks.3.attn.proj.bias is not expected")
def inserted(tower: Tower) -> None:
    tower.blocks.insert(0, copy.deepcopy(tower.blocks[1]))


@change("parameter blocks.2.norm1.weight is missing")
def deleted(tower: Tower) -> None:
    del tower.blocks[0]


@change("parameter blocks.2.norm1.weight is missing")
def fewer_blocks(tower: Tower) -> None:
    tower.blocks = tower.blocks[:2]


@change()
def blocks_swapped_for_one(tower: Tower) -> None:
    tower.blocks[2] = tower.blocks[1]


@change("what blocks holds is ['1', '2', '0'], expected ['0', '1', '2']")
def reordered(tower: Tower) -> None:
    tower.blocks._modules["0"] = tower.blocks._modules.pop("0")


@change("what blocks holds is ['2', '1', '0'], expected ['0', '1', '2']")
def registries_replaced(tower: Tower) -> None:
    tower.blocks._modules = dict(reversed(list(tower.blocks._modules.items())))


@change("blocks is an attribute of the instance, expected what is registered")
def hidden_blocks(tower: Tower) -> None:
    vars(tower)["blocks"] = list(tower.blocks)[:1]


@change("blocks.0.norm2 is an attribute of the instance, expected what is registered")
def hidden_module(tower: Tower) -> None:
    vars(tower.blocks[0])["norm2"] = nn.Identity()


@change()
def child_replaced(tower: Tower) -> None:
    tower.blocks[1].norm1 = copy.deepcopy(tower.blocks[1].norm2)


# parameters and buffers


@change(
    f"parameter blocks.0.mlp.linear_fc1.weight is missing: blocks.0.mlp.linear_fc1 is {_PARAMETRIZED}Linear",
    matters=False,
)
def parametrized(tower: Tower) -> None:
    parametrizations.weight_norm(tower.blocks[0].mlp.linear_fc1)


@change("blocks.0.attn.qkv.weight is a buffer, expected a parameter", matters=False)
def parametrization_removed(tower: Tower) -> None:
    """Of a frozen weight, which torch then registers as a buffer."""
    layer = tower.blocks[0].attn.qkv
    parametrizations.weight_norm(layer).requires_grad_(False)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")


@change(f"parameter pos_embed.weight is missing: pos_embed is {_PARAMETRIZED}Embedding")
def parametrized_table(tower: Tower) -> None:
    nn.utils.parametrize.register_parametrization(tower.pos_embed, "weight", Twice())


@change("parameter blocks.0.attn.qkv.bias is missing")
def without_a_bias(tower: Tower) -> None:
    tower.blocks[0].attn.qkv.bias = None


@change()
def tied_weights(tower: Tower) -> None:
    tower.blocks[1].mlp.linear_fc1.weight = tower.blocks[0].mlp.linear_fc1.weight


@change("the shape of merger.linear_fc2.weight is (24, 192), expected (40, 192)")
def narrow(tower: Tower) -> None:
    linear = tower.merger.linear_fc2
    linear.weight, linear.bias = (nn.Parameter(p[:24].clone(), requires_grad=False) for p in linear.parameters())


@change("the shape of pos_embed.weight is (25, 48), expected (36, 48)")
def position_table_of_another_size(tower: Tower) -> None:
    tower.pos_embed = nn.Embedding.from_pretrained(tower.pos_embed.weight[:25].clone())
    tower.num_grid_per_side = 5


@change("blocks.0.attn.proj is torch.jit._script.RecursiveScriptModule, compiled by TorchScript", matters=False)
def scripted_linear(tower: Tower) -> None:
    tower.blocks[0].attn.proj = torch.jit.script(tower.blocks[0].attn.proj)


@change("the class of blocks.0.norm1.weight is builtins.float, expected torch.nn.Parameter")
def number_for_a_parameter(tower: Tower) -> None:
    tower.blocks[0].norm1._parameters["weight"] = 1.0


@change("blocks.0.attn.qkv.weight is a buffer, expected a parameter")
def quantised(tower: Tower) -> None:
    _quantise(tower, Int8Linear)


@change("blocks.0.attn.qkv.weight is a buffer, expected a parameter")
def quantised_by_transformers(tower: Tower) -> None:
    _quantise(tower, TransformersInt8Linear)


@change(f"the class of blocks.0.attn.proj.weight is {__name__}.Mine, expected torch.nn.Parameter", matters=False)
def parameter_subclass(tower: Tower) -> None:
    linear = tower.blocks[0].attn.proj
    linear.weight = Mine(linear.weight.detach(), requires_grad=False)


@change(f"the class of blocks.0.attn.proj.weight is {__name__}.Mine, expected torch.nn.Parameter", matters=False)
def packed_weight(tower: Tower) -> None:
    linear = tower.blocks[0].attn.proj
    linear.__class__, linear.weight = Unpacking, Mine(linear.weight.detach().reshape(-1, 1), requires_grad=False)


@change(f"a registry of blocks.0.attn.proj is {__name__}.Registry, expected a dict", matters=False)
def registry_of_another_class(tower: Tower) -> None:
    tower.blocks[0].attn.proj._parameters = Registry(tower.blocks[0].attn.proj._parameters)


@change("blocks.0.attn.proj.weight is not dense in memory", matters=False)
def every_other_row_of_a_table(tower: Tower) -> None:
    linear = tower.blocks[0].attn.proj
    linear.weight.data = linear.weight.detach().repeat_interleave(2, 0)[::2]


@change("blocks.0.norm1.weight is a plain tensor, expected a parameter", matters=False)
def joined_parameters(tower: Tower) -> None:
    """As FSDP leaves them without `use_orig_params`, where it wraps the tower or what holds it."""
    norm = tower.blocks[0].norm1
    weight = norm._parameters.pop("weight")
    norm.weight = weight.detach()


@change()
def parameters_replaced(tower: Tower) -> None:
    module = tower.blocks[0].attn.proj
    module._parameters = {n: nn.Parameter(p * 2, requires_grad=False) for n, p in module._parameters.items()}


@change("blocks.1.norm1.weight is an attribute of the instance, expected what is registered")
def hidden_parameter(tower: Tower) -> None:
    vars(tower.blocks[1].norm1)["weight"] = 2 * tower.blocks[1].norm1.weight


@change("buffer rotary_pos_emb.inv_freq is missing")
def buffer_dropped(tower: Tower) -> None:
    tower.rotary_pos_emb.inv_freq = None


@change("buffer rotary_pos_emb.inv_freq is missing")
def buffer_as_an_attribute(tower: Tower) -> None:
    vars(tower.rotary_pos_emb)["inv_freq"] = 2 * tower.rotary_pos_emb._buffers.pop("inv_freq")


@change("rotary_pos_emb.inv_freq is an attribute of the instance, expected what is registered")
def hidden_buffer(tower: Tower) -> None:
    vars(tower.rotary_pos_emb)["inv_freq"] = 2 * tower.rotary_pos_emb.inv_freq


# dtypes and devices


@change("blocks.1.mlp.linear_fc1.weight is torch.float16, patch_embed.proj.weight torch.float32", fallback.DTYPES)
def half(tower: Tower) -> None:
    tower.blocks[1].mlp.half()


@change("blocks.1.mlp.linear_fc1.weight", fallback.META)
def on_meta(tower: Tower) -> None:
    tower.blocks[1].mlp.linear_fc1.to("meta")


@change("patch_embed.proj.weight, which accelerate offloads", fallback.META, matters=False)
def offloaded_to_the_cpu(tower: Tower) -> None:
    from accelerate import cpu_offload

    cpu_offload(tower, execution_device="cpu")


@change("patch_embed.proj.weight, which accelerate offloads", fallback.META, matters=False)
def offloaded_to_disk(tower: Tower) -> None:
    from accelerate import disk_offload

    folder = tempfile.TemporaryDirectory()
    weakref.finalize(tower, folder.cleanup)
    disk_offload(tower, folder.name, execution_device="cpu")


# hooks


@change("on blocks.1", fallback.HOOKS)
def forward_hook(tower: Tower) -> None:
    tower.blocks[1].register_forward_hook(lambda module, arguments, output: output + 1)


@change("on merger.linear_fc1", fallback.HOOKS)
def forward_pre_hook(tower: Tower) -> None:
    tower.merger.linear_fc1.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))


@change("on blocks.0.attn", fallback.HOOKS)
def hook_with_named_arguments(tower: Tower) -> None:
    tower.blocks[0].attn.register_forward_hook(lambda module, a, named, output: output * 2, with_kwargs=True)
