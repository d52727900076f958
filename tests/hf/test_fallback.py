"""What cannot run fused runs the original code: the same answer, a counted reason, one warning; strict raises."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fusedvit
from fusedvit.checks import fallback
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_bitwise,
    assert_same,
    copy_of,
    precomputed,
    prompt,
    ran_fused,
    ran_original,
    tiny_model,
    tiny_tower,
)

Tower = Any


@dataclass(frozen=True)
class Case:
    """A change to a tower, or arguments of its call, and the reason that they must be counted under."""

    name: str
    reason: str
    change: Callable[[Tower], Any] = lambda tower: None
    arguments: Callable[[Tower, Call], dict[str, Any]] = lambda tower, call: {}


def _precomputed(name: str) -> Callable[[Tower, Call], dict[str, Any]]:
    return lambda tower, call: {name: precomputed(tower, call)[name]}


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def subclass_of_linear(tower: Tower) -> None:
    tower.blocks[1].attn.qkv.__class__ = Doubled


def forward_on_an_instance(tower: Tower) -> None:
    tower.blocks[1].norm1.forward = lambda x: x


def another_block(tower: Tower) -> None:
    class Block(type(tower.blocks[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return hidden_states + 1

    tower.blocks[1].__class__ = Block


def parametrized(tower: Tower) -> None:
    parametrizations.weight_norm(tower.blocks[0].mlp.linear_fc1)


def parametrized_table(tower: Tower) -> None:
    nn.utils.parametrize.register_parametrization(tower.pos_embed, "weight", Twice())


def another_activation(tower: Tower) -> None:
    tower.blocks[1].mlp.act_fn = nn.ReLU()


def another_epsilon(tower: Tower) -> None:
    tower.blocks[1].norm1 = nn.LayerNorm(48, eps=0.5).requires_grad_(False)


def epsilon_changed_in_place(tower: Tower) -> None:
    tower.blocks[1].norm2.eps = 0.5


def without_a_bias(tower: Tower) -> None:
    tower.blocks[0].attn.qkv.bias = None


def fewer_blocks(tower: Tower) -> None:
    tower.blocks = tower.blocks[:2]


def blocks_swapped_for_one(tower: Tower) -> None:
    tower.blocks[2] = tower.blocks[1]


def tied_weights(tower: Tower) -> None:
    tower.blocks[1].mlp.linear_fc1.weight = tower.blocks[0].mlp.linear_fc1.weight


def another_deepstack(tower: Tower) -> None:
    tower.deepstack_visual_indexes = [1, 2]


def position_table_of_another_size(tower: Tower) -> None:
    tower.pos_embed = nn.Embedding.from_pretrained(tower.pos_embed.weight[:25].clone())
    tower.num_grid_per_side = 5


def mlp_skipped(tower: Tower) -> None:
    tower.blocks[0].mlp = nn.Identity()


def sequential_around_a_linear(tower: Tower) -> None:
    tower.blocks[0].mlp.linear_fc2 = nn.Sequential(tower.blocks[0].mlp.linear_fc2, Twice())


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


def quantised(tower: Tower, kind: type[Int8Linear] = Int8Linear) -> None:
    for block in tower.blocks:
        block.attn.qkv = kind(block.attn.qkv)
        block.mlp.linear_fc2 = kind(block.mlp.linear_fc2)


def quantised_by_transformers(tower: Tower) -> None:
    quantised(tower, TransformersInt8Linear)


def parameter_subclass(tower: Tower) -> None:
    class Mine(nn.Parameter):
        pass

    linear = tower.blocks[0].attn.proj
    linear.weight = Mine(linear.weight.detach(), requires_grad=False)


def every_other_row_of_a_table(tower: Tower) -> None:
    linear = tower.blocks[0].attn.proj
    linear.weight.data = linear.weight.detach().repeat_interleave(2, 0)[::2]


def forward_hook(tower: Tower) -> None:
    tower.blocks[1].register_forward_hook(lambda module, arguments, output: output + 1)


def forward_pre_hook(tower: Tower) -> None:
    tower.merger.linear_fc1.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))


def hook_with_named_arguments(tower: Tower) -> None:
    tower.blocks[0].attn.register_forward_hook(lambda module, a, named, output: output * 2, with_kwargs=True)


CASES = [
    Case("output_attentions", fallback.ATTENTIONS, arguments=lambda t, c: {"output_attentions": True}),
    Case(
        "an argument that attention reads",
        fallback.UNKNOWN_ARGUMENTS,
        arguments=lambda t, c: {"position_bias": torch.zeros(1, 1, 1, 1)},
    ),
    *(
        Case(name, fallback.PRECOMPUTED, arguments=_precomputed(name))
        for name in ("cu_seqlens", "max_seqlen", "position_ids")
    ),
    Case(
        "taps",
        fallback.PRECOMPUTED,
        arguments=lambda t, c: {n: v for n, v in precomputed(t, c).items() if n.startswith("interp")},
    ),
    Case("all of them", fallback.PRECOMPUTED, arguments=precomputed),
    *(Case(change.__name__, fallback.HOOKS, change) for change in (forward_hook, forward_pre_hook)),
    Case("hook_with_named_arguments", fallback.HOOKS, hook_with_named_arguments),
    *(
        Case(change.__name__, fallback.MODIFIED, change)
        for change in (
            subclass_of_linear,
            forward_on_an_instance,
            another_block,
            parametrized,
            parametrized_table,
            mlp_skipped,
            sequential_around_a_linear,
            quantised,
            quantised_by_transformers,
            parameter_subclass,
        )
    ),
]
# Towers whose class says one thing and whose modules another: fused or not, the answer must be right.
ODD_TOWERS = [
    another_activation,
    another_epsilon,
    epsilon_changed_in_place,
    without_a_bias,
    fewer_blocks,
    blocks_swapped_for_one,
    tied_weights,
    every_other_row_of_a_table,
    another_deepstack,
    position_table_of_another_size,
]
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def warnings_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fusedvit")  # the command line, run before in this process, lowers it


def changed_tower(case: Case) -> Tower:
    tower = tiny_tower()
    case.change(tower)
    return tower


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("fusedvit") and r.levelno >= logging.WARNING]


@BY_NAME
@pytest.mark.parametrize("when", ["before fuse", "after fuse", "after a call"])
def test_original_code_runs(case: Case, when: str, caplog: pytest.LogCaptureFixture) -> None:
    """The very bits of Hugging Face's answer, counted; warned of once in three calls."""
    original = changed_tower(case)
    call = Call.of(original, GRIDS["mix"])
    expected = call.run(original, **case.arguments(original, call))

    tower = tiny_tower()
    if when == "before fuse":
        case.change(tower)
    handle = fusedvit.fuse(tower)
    if when == "after a call":
        call.run(tower)
    if when != "before fuse":
        case.change(tower)
    for _ in range(3):
        assert_bitwise(call.run(tower, **case.arguments(tower, call)), expected)
    ran_original(handle, case.reason, calls=3)
    messages = warnings_of(caplog)
    begin = f"fusedvit: Qwen3VLVisionModel runs its original code: {case.reason}"
    assert len(messages) == 1 and messages[0].startswith(begin)
    assert case.reason in handle.report()


@pytest.mark.parametrize("change", ODD_TOWERS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before fuse", "after fuse", "after a call"])
def test_never_a_wrong_answer(change: Callable[[Tower], None], when: str) -> None:
    original = tiny_tower()
    call = Call.of(original, GRIDS["mix"])
    change(original)
    expected = call.run(original)

    tower = tiny_tower()
    if when == "before fuse":
        change(tower)
    handle = fusedvit.fuse(tower)
    if when == "after a call":
        call.run(tower)
    if when != "before fuse":
        change(tower)
    ours = call.run(tower)
    assert_same(ours, expected)
    if handle.stats()["original"]:
        assert_bitwise(ours, expected)


@BY_NAME
def test_strict_raises(case: Case) -> None:
    tower = tiny_tower()
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    call = Call.of(tower, GRIDS["mix"])
    call.run(tower)
    case.change(tower)
    with pytest.raises(RuntimeError, match=case.reason):
        call.run(tower, **case.arguments(tower, call))


ARGUMENTS_ONLY = [case for case in CASES if case.change.__name__ == "<lambda>"]


@pytest.mark.parametrize("case", ARGUMENTS_ONLY, ids=lambda case: case.name)
def test_the_next_call_is_fused_again(case: Case) -> None:
    """output_hidden_states leaves Hugging Face's own hooks on the blocks for good: they must not count."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    call.run(tower, **case.arguments(tower, call))
    assert_bitwise(call.run(tower), expected)
    stats = handle.stats()
    assert (stats["fused"], stats["original"]) == (2, {case.reason: 1})


def test_removed_hook_and_restored_module_are_fused_again() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    hook = tower.blocks[0].register_forward_hook(lambda module, arguments, output: output)
    call.run(tower)
    hook.remove()
    assert_bitwise(call.run(tower), expected)
    plain = tower.blocks[0].mlp.linear_fc1
    tower.blocks[0].mlp.linear_fc1 = Doubled(48, 70).requires_grad_(False)
    call.run(tower)
    tower.blocks[0].mlp.linear_fc1 = plain
    assert_bitwise(call.run(tower), expected)
    stats = handle.stats()
    assert (stats["fused"], stats["original"]) == (3, {fallback.HOOKS: 1, fallback.MODIFIED: 1})


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_on_every_module_fire(register: str) -> None:
    """Hooks for all modules of the process, as profilers set them."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    call = Call.of(tower, GRIDS["smallest"])
    call.run(tower)
    seen: list[str] = []
    hook = getattr(nn.modules.module, register)(lambda module, *rest: seen.append(type(module).__name__))
    try:
        call.run(tower)
    finally:
        hook.remove()
    assert "Qwen3VLVisionAttention" in seen
    ran_original(handle, fallback.HOOKS)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("registry", ["_forward_hooks", "_forward_pre_hooks"])
def test_hooks_in_a_registry_that_was_replaced(registry: str, used: bool) -> None:
    """As recipes that remove all hooks do it: for every kind of module that is called."""
    plain = tiny_tower()
    call = Call.of(plain, GRIDS["mix"])
    paths = {type(module): path for path, module in plain.named_modules() if path and path != "blocks"}
    for path in paths.values():
        tower = copy_of(plain)
        handle = fusedvit.fuse(tower)
        if used:
            call.run(tower)
        seen: list[str] = []
        for module in tower.modules():
            setattr(module, registry, OrderedDict())
        module = tower.get_submodule(path)
        register = module.register_forward_hook if registry == "_forward_hooks" else module.register_forward_pre_hook
        register(lambda *rest, seen=seen: seen.append("fired"))  # type: ignore[misc]
        call.run(tower)
        if isinstance(module, nn.ModuleList):  # it is never called
            ran_fused(handle, calls=1 + used)
        else:
            assert seen, path
            ran_original(handle, fallback.HOOKS)


def test_weights_written_while_a_hook_was_on() -> None:
    """Without a check of the content: what was prepared before a fallback is not used after it."""
    tower = tiny_tower()
    fusedvit.fuse(tower, fusedvit.FuseConfig(watch_data=False))
    call = Call.of(tower, GRIDS["mix"])
    call.run(tower)
    hook = tower.blocks[0].register_forward_hook(lambda module, arguments, output: None)
    call.run(tower)
    tower.merger.linear_fc2.weight.data.mul_(2)
    hook.remove()
    original = fusedvit.unfuse(copy_of(tower))
    assert_same(call.run(tower), call.run(original))


def test_a_dtype_viewed_in_place() -> None:
    """The same parameter at the same address, of the same version: other numbers."""
    tower = tiny_tower().half()
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(watch_data=False))
    call = Call.of(tower, GRIDS["smallest"])
    call.run(tower)
    weight = tower.blocks[1].norm2.weight
    weight.data = weight.data.view(torch.bfloat16)
    with pytest.raises(RuntimeError, match="mixed dtype"):  # Hugging Face's own answer
        call.run(tower)
    ran_original(handle, fallback.DTYPES)


def test_hooks_on_the_tower_itself_are_compatible() -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    shapes: list[torch.Size] = []
    tower.register_forward_pre_hook(lambda module, arguments: shapes.append(arguments[0].shape))
    tower.register_forward_hook(lambda module, arguments, output: shapes.append(output.pooler_output.shape))
    assert_same(call.run(tower), expected)
    assert shapes == [call.pixels.shape, expected["pooler_output"].shape]
    ran_fused(handle, calls=1)


def test_option_of_the_config() -> None:
    tower = tiny_tower()
    original = copy_of(tower)
    for module in (tower, original):
        module.set_attn_implementation("eager")
        module.config.output_attentions = True
    handle = fusedvit.fuse(tower)
    call = Call.of(tower, GRIDS["mix"])
    assert_bitwise(call.run(tower), call.run(original))
    ran_original(handle, fallback.ATTENTIONS)
    assert_same(call.run(tower, output_attentions=False), call.run(original, output_attentions=False))
    assert handle.stats()["fused"] == 1


def test_flags_that_are_off_or_empty_are_harmless() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    call = Call.of(tower, GRIDS["mix"])
    call.run(tower, output_hidden_states=False, output_attentions=None, cu_seqlens=None, use_cache=True)
    ran_fused(handle, calls=1)


def test_precomputed_metadata_through_the_model() -> None:
    model = tiny_model()
    inputs = prompt(model.model.visual, GRIDS["images"])
    original = copy_of(model)
    handle = fusedvit.fuse(model)
    made = precomputed(model.model.visual, Call(inputs["pixel_values"], inputs["image_grid_thw"]))
    arguments = {f"image_{name}": made[name] for name in ("cu_seqlens", "position_ids")}
    with torch.no_grad():
        ours, ref = (
            m.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], **arguments).pooler_output
            for m in (model, original)
        )
    assert all(a.equal(b) for a, b in zip(ours, ref, strict=True))
    ran_original(handle, fallback.PRECOMPUTED)


def test_gradients_in_strict_mode() -> None:
    tower = tiny_tower().requires_grad_(True)
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    call = Call.of(tower, GRIDS["smallest"])
    with pytest.raises(RuntimeError, match="gradients.*no_grad"):
        tower(call.pixels, grid_thw=call.grid)


def test_several_dtypes() -> None:
    tower = tiny_tower().half()
    tower.pos_embed.float()
    original = copy_of(tower)
    handle = fusedvit.fuse(tower)
    call = Call.of(tower, GRIDS["mix"])
    assert_bitwise(call.run(tower), call.run(original))
    ran_original(handle, fallback.DTYPES)


@pytest.mark.parametrize("pixels", ["cpu", "meta"])
def test_meta_parameters(pixels: str) -> None:
    """Without offloading hooks Hugging Face cannot run them either: its own error comes through."""
    tower = tiny_tower()
    original = copy_of(tower).to("meta")
    handle = fusedvit.fuse(tower)
    call = Call.of(tower, GRIDS["smallest"])
    call.run(tower)
    tower.to("meta")
    call = Call(call.pixels.to(pixels), call.grid)
    with pytest.raises((RuntimeError, NotImplementedError)) as theirs:
        call.run(original)
    with pytest.raises(theirs.type) as ours:
        call.run(tower)
    assert str(ours.value) == str(theirs.value)
    ran_original(handle, fallback.META)
    assert fallback.META in handle.report()
    with pytest.raises(RuntimeError, match=fallback.META):
        handle.refresh()


def test_a_model_on_the_meta_device_can_be_fused() -> None:
    with torch.device("meta"):
        tower = tiny_tower()
    state = tiny_tower(seed=4)
    call = Call.of(state, GRIDS["mix"])
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    tower.load_state_dict(state.state_dict(), assign=True)
    assert_same(call.run(tower), call.run(state))
    ran_fused(handle, calls=1)


def test_several_devices() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    tower.blocks[1].to("meta")
    call = Call.of(tower, GRIDS["smallest"])
    with pytest.raises((RuntimeError, NotImplementedError)):  # Hugging Face's own answer
        call.run(tower)
    assert set(handle.stats()["original"]) <= {fallback.META, fallback.DEVICES} != set()


@pytest.mark.parametrize("probe", ["compiler.is_compiling", "jit.is_tracing"])
def test_compilers_see_the_original_code(probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["images"])
    home, name = probe.split(".")
    monkeypatch.setattr(getattr(torch, home), name, lambda: True)
    assert fallback.reason_of_call(tower, call.pixels, call.grid, {}) == (fallback.COMPILING, "")


def test_every_reason_has_advice() -> None:
    names = {value for name, value in vars(fallback).items() if name.isupper() and isinstance(value, str)}
    assert names == set(fallback.ADVICE)
    assert all(fallback.ADVICE.values())


def test_warnings_are_per_tower(caplog: pytest.LogCaptureFixture) -> None:
    for tower in (tiny_tower(), tiny_tower("qwen3_5")):
        fusedvit.fuse(tower)
        call = Call.of(tower, GRIDS["smallest"])
        for arguments in (
            {"output_attentions": True},
            {"position_bias": torch.zeros(1, 1, 1, 1)},
            {"output_attentions": True},
        ):
            call.run(tower, **arguments)
    assert len(warnings_of(caplog)) == 4


@each_of(INSTALLED)
def test_arguments_that_would_be_given_twice(name: str) -> None:
    """A keyword that the code itself gives to attention is one too many there, None or not."""
    tower = family_tower(name)
    original, call = copy_of(tower), Call.of(tower, [(1, 8, 4), (1, 2, 10)])
    fusedvit.fuse(tower)
    for argument in ("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"):
        found = []
        for each in (original, tower):
            try:
                found.append(call.run(each, **{argument: None}))
            except TypeError as error:
                found.append(str(error))
        if isinstance(found[0], str):
            assert found[1] == found[0], argument
        else:
            assert_same(found[1], found[0])
