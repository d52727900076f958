"""A frozen tower under gradient checkpointing runs fused, and its outputs take part in autograd as Hugging Face's do.

`gradient_checkpointing_enable` marks what the patch embedding gives for gradients, where the tower's class names it.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedvit
from fusedvit.checks import fallback
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.data_parallel import DataParallelEncoder
from tests.support.families import INSTALLED, class_of, each_of, family_tower
from tests.support.towers import Call, Grid, assert_same, bits, copy_of, outcome, outputs_of, ran_fused, ran_original

STRICT = fusedvit.FuseConfig(strict=True)
MIX: Grid = [(1, 4, 6), (1, 2, 2)]
NAME = "Qwen2VisionTransformerPretrainedModel"
MARKED = [name for name in INSTALLED if getattr(class_of(name), "_input_embed_layer", "") == "patch_embed"]


def pair(name: str = NAME, config: fusedvit.FuseConfig | None = STRICT) -> tuple[Any, Any, Any, Call]:
    """A fused tower, its copy that is not, the handle and a call. Both are marked for gradients."""
    tower = family_tower(name).train()
    tower.enable_input_require_grads()
    original = copy_of(tower)
    return tower, original, fusedvit.fuse(tower, config), Call.of(tower, MIX)


def planes(record: Any) -> dict[str, torch.Tensor]:
    return {name: plane for name, plane in outputs_of(record).items() if plane is not None}


def facts(plane: torch.Tensor) -> tuple[object, ...]:
    return plane.shape, plane.dtype, plane.requires_grad, plane.is_leaf, plane._is_view(), plane.is_inference()


def test_classes_that_are_marked() -> None:
    assert {NAME, "Qwen2_5_VisionTransformerPretrainedModel"} <= {*MARKED}


@each_of(MARKED)
def test_outputs_require_gradients(name: str) -> None:
    tower, original, handle, call = pair(name)
    ours, theirs = planes(call.record(tower)), planes(call.record(original))
    assert_same(ours, theirs)
    assert {n: facts(p) for n, p in ours.items()} == {n: facts(p) for n, p in theirs.items()}
    assert all(plane.requires_grad for plane in ours.values())
    assert len({plane.untyped_storage().data_ptr() for plane in ours.values()}) == len(ours)
    ran_fused(handle, calls=1)


@each_of(MARKED)
def test_inference_mode_with_gradients_on(name: str) -> None:
    """Autograd records nothing there, whatever `enable_grad` says."""
    tower, original, handle, call = pair(name)

    def run(module: Any) -> dict[str, torch.Tensor]:
        with torch.inference_mode(), torch.enable_grad():
            return planes(module(call.pixels, grid_thw=call.grid, return_dict=True))

    ours, theirs = run(tower), run(original)
    assert_same(ours, theirs)
    assert not any(plane.requires_grad for plane in (*ours.values(), *theirs.values()))
    ran_fused(handle, calls=1)


@each_of(["Qwen3VLVisionModel", "Glm4vVisionModel"])
def test_a_class_that_names_no_embedding(name: str) -> None:
    tower = family_tower(name).train()
    tower.enable_input_require_grads()
    handle, call = fusedvit.fuse(tower, STRICT), Call.of(tower, MIX)
    assert not any(plane.requires_grad for plane in planes(call.record(tower)).values())
    ran_fused(handle, calls=1)


@each_of(["Qwen3VLVisionModel"])
def test_deepstack_features(name: str) -> None:
    """A mark on the patch embedding of a class that does not name it: transformers' own function, set by hand."""
    tower = family_tower(name)
    tower._input_embed_layer = "patch_embed"
    tower.enable_input_require_grads()
    original = copy_of(tower)
    handle, call = fusedvit.fuse(tower, STRICT), Call.of(tower, MIX)
    ours, theirs = planes(call.record(tower)), planes(call.record(original))
    assert_same(ours, theirs)
    assert "deepstack_features[0]" in ours and all(plane.requires_grad for plane in ours.values())
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable[[], Any]) -> None:
    tower, original, handle, call = pair()
    with context():
        ours, theirs = planes(call.record(tower)), planes(call.record(original))
    assert {n: facts(p) for n, p in ours.items()} == {n: facts(p) for n, p in theirs.items()}
    assert not any(plane.requires_grad for plane in ours.values())
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("asked", [True, [0, 2]])
@pytest.mark.parametrize("name", [NAME, "Qwen2_5_VisionTransformerPretrainedModel"])
def test_hidden_states(name: str, asked: Any) -> None:
    tower, original, handle, call = pair(name)
    ours, theirs = (call.record(each, output_hidden_states=asked) for each in (tower, original))
    assert ours.last_hidden_state.requires_grad
    if asked is True:
        unread = [t.to(torch.float64) for t in dict(ours.items())["hidden_states"]]  # deferred
        assert all(t.requires_grad and not t.is_leaf for t in unread)
    pairs = [*zip(ours.hidden_states, theirs.hidden_states, strict=True)]
    assert any(mine is not None for mine, _ in pairs)
    for mine, other in pairs:
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.requires_grad and other.requires_grad and not mine.is_leaf
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    if asked is True:
        assert all(u.requires_grad and bits(u.float()).equal(bits(t)) for u, (t, _) in zip(unread, pairs, strict=True))
        last = [record.hidden_states[-1] is record.last_hidden_state for record in (ours, theirs)]
        assert last[0] == last[1]
    ran_fused(handle, calls=1)


def trained(tower: nn.Module, call: Call, use: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a layer that takes the tower's rows, and what a hook on the rows got."""
    head, seen = nn.Linear(40, 3, bias=False), []
    nn.init.constant_(head.weight, 0.1)
    rows = call.record(tower).pooler_output
    rows.register_hook(seen.append)
    head(use(rows)).square().sum().backward()
    assert rows.is_leaf is False and rows.grad_fn is not None
    return [head.weight.grad, *seen]


def in_place(rows: torch.Tensor) -> torch.Tensor:
    rows.mul_(3.0)
    rows[0] = 1.0
    return rows


def scattered(rows: torch.Tensor) -> torch.Tensor:
    embeddings = torch.zeros(len(rows) + 2, rows.shape[1])
    mask = torch.arange(len(embeddings)).ge(2)[:, None].expand_as(embeddings)
    return embeddings.masked_scatter(mask, torch.cat(torch.split(rows, [2, len(rows) - 2])))


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they are": lambda rows: rows,
    "written in place": in_place,
    "scattered into embeddings": scattered,
    "reentrant checkpoint": lambda rows: checkpoint(torch.tanh, rows, use_reentrant=True),
    "checkpoint": lambda rows: checkpoint(torch.tanh, rows, use_reentrant=False),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_gradients_behind_the_tower(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tower, original, handle, call = pair()
    for mine, other in zip(trained(tower, call, use), trained(original, call, use), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    assert all(p.grad is None for p in tower.parameters())
    ran_fused(handle, calls=1)


def test_a_second_backward() -> None:
    tower, original, handle, call = pair()
    for each in (tower, original):
        loss = call.record(each).pooler_output.sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    ran_fused(handle, calls=1)


def test_a_mark_that_comes_and_goes() -> None:
    tower, _, handle, call = pair()
    for _ in range(2):
        tower.disable_input_require_grads()
        assert not call.record(tower).pooler_output.requires_grad
        tower.enable_input_require_grads()
        assert call.record(tower).pooler_output.requires_grad
    ran_fused(handle, calls=4)


def test_what_needs_gradients_through_the_tower() -> None:
    tower, original, handle, call = pair(config=None)
    taken = []
    for each in (tower, original):
        pixels = call.pixels.clone().requires_grad_()
        each(pixels, grid_thw=call.grid).pooler_output.sum().backward()
        each.merger.requires_grad_(True)
        call.record(each).pooler_output.sum().backward()
        taken.append([pixels.grad, *(p.grad for p in each.merger.parameters())])
    assert len(taken[0]) == 1 + len([*tower.merger.parameters()])
    for mine, other in zip(*taken, strict=True):
        assert bits(mine).equal(bits(other))
    ran_original(handle, fallback.GRADIENTS, calls=2)


def a_users_own() -> Any:
    def make_inputs_require_grads(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    return make_inputs_require_grads


def on_another_module(tower: Any) -> None:
    """transformers' own function, where it marks some of the outputs only."""
    (mark,) = tower.patch_embed._forward_hooks.values()
    tower.disable_input_require_grads()
    tower.merger.register_forward_hook(mark)


OTHER_HOOKS: dict[str, Callable[[Any], object]] = {
    "another function of the same name": lambda tower: tower.patch_embed.register_forward_hook(a_users_own()),
    "on another module": on_another_module,
    "on a part of the embedding": lambda tower: tower.patch_embed.proj.register_forward_hook(
        next(iter(tower.patch_embed._forward_hooks.values()))
    ),
}


@pytest.mark.parametrize("change", OTHER_HOOKS.values(), ids=OTHER_HOOKS)
def test_other_hooks(change: Callable[[Any], object]) -> None:
    tower, original, handle, call = pair(config=None)
    call.record(tower)
    change(tower)
    change(original)
    ours, theirs = planes(call.record(tower)), planes(call.record(original))
    assert {n: facts(p) for n, p in ours.items()} == {n: facts(p) for n, p in theirs.items()}
    ran_original(handle, fallback.HOOKS)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_tower_inside_a_checkpoint(reentrant: bool) -> None:
    """One that is not reentrant counts saved tensors. Each of its two runs may find kernels that are not ready."""
    tower, original, handle, call = pair(config=None)

    def run(each: Any) -> list[torch.Tensor]:
        factor = torch.ones(1, requires_grad=True)
        rows = checkpoint(lambda x: call.record(each).pooler_output * x, factor, use_reentrant=reentrant)
        rows.square().sum().backward()
        return [rows, factor.grad]

    for mine, other in zip(run(tower), run(original), strict=True):
        assert mine.requires_grad == other.requires_grad
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    if reentrant:
        ran_fused(handle, calls=2)
    else:
        ran_original(handle, fallback.GRADIENTS, calls=2)


def test_saved_tensors_that_are_offloaded() -> None:
    tower, _, handle, call = pair()
    with torch.autograd.graph.save_on_cpu():
        call.record(tower).pooler_output.sum().backward()
    ran_fused(handle, calls=1)


def test_saved_tensors_that_are_quantised() -> None:
    """The largest value of an empty tensor would raise."""
    tower, original, handle, call = pair()

    def quantise(saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = saved.abs().max().clamp(min=1e-9) / 127
        return (saved / scale).round().to(torch.int8), scale

    for module in original, tower:
        weight = torch.ones((), requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(quantise, lambda kept: kept[0] * kept[1]):
            loss = (call.record(module).pooler_output * weight).sum()
    loss.backward()
    ran_fused(handle, calls=1)


def test_data_parallel_rows() -> None:
    tower, _, _, call = pair()
    encoder = DataParallelEncoder(tower, ["cpu", "cpu"], STRICT)
    rows = encoder(call.pixels, call.grid)
    assert rows.requires_grad and not rows.is_leaf
    rows.mul_(2).sum().backward()
    with torch.no_grad():
        assert not encoder(call.pixels, call.grid).requires_grad
    encoder.close()


def test_a_deep_copy_keeps_the_mark() -> None:
    tower, _, _, call = pair()
    copied = copy.deepcopy(tower)
    assert call.record(copied).pooler_output.requires_grad
    ran_fused(fusedvit.fuse(copied), calls=1)


def mine(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args) * 1.5


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("this is not for print")


def on_one_block(tower: Any) -> None:
    tower.blocks[1].gradient_checkpointing, tower.blocks[1]._gradient_checkpointing_func = True, mine


def with_contexts(tower: Any) -> None:
    def contexts() -> tuple[Any, Any]:
        return torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16)

    tower.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


OWN_CHECKPOINTS: dict[str, Callable[[Any], object]] = {
    "a function": lambda tower: tower._set_gradient_checkpointing(True, mine),
    "what cannot be printed": lambda tower: tower._set_gradient_checkpointing(
        True, functools.partial(mine, a=Silent())
    ),
    "a partial function": lambda tower: tower._set_gradient_checkpointing(True, functools.partial(mine, a=1)),
    "another of torch's": lambda tower: tower._set_gradient_checkpointing(True, torch.utils.checkpoint.noop_context_fn),
    "on one block": on_one_block,
    "contexts": with_contexts,
}


@pytest.mark.parametrize("change", OWN_CHECKPOINTS.values(), ids=OWN_CHECKPOINTS)
@pytest.mark.parametrize("name", [NAME, "Qwen3VLVisionModel"])
def test_a_checkpointing_function_of_ones_own(name: str, change: Callable[[Any], object]) -> None:
    """It runs as in Hugging Face's tower; in evaluation nothing runs it, and with torch's the tower is fused again."""
    tower = family_tower(name).train()
    original, handle, call = copy_of(tower), fusedvit.fuse(tower), Call.of(tower, MIX)
    call.record(tower)
    ran_fused(handle, calls=1)
    change(tower)
    change(original)
    expected, found = (outcome(lambda each: planes(call.record(each)), each) for each in (original, tower))
    if isinstance(expected, dict):
        assert_same(found, expected)
    else:
        assert type(found) is type(expected)
    assert handle.stats()["fused"] == 1 and "_gradient_checkpointing_func is" in str(handle.reason())
    tower.eval()
    call.record(tower)
    tower.train()
    tower.gradient_checkpointing_enable()
    call.record(tower)
    assert handle.stats()["fused"] == 3 and handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}


def wrapped(tower: Any) -> None:
    """As training libraries replace torch's function, with its name."""

    @functools.wraps(torch.utils.checkpoint.checkpoint)
    def checkpoint(*args: Any, **options: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(*args, **options)

    tower._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (wrapped, f"a wrapper, by {__name__}, around torch.utils.checkpoint.checkpoint, expected"),
        (with_contexts, "is torch.utils.checkpoint.checkpoint, with context_fn, expected"),
    ],
)
def test_the_reason_tells_a_checkpointing_function_from_torchs(change: Callable[[Any], object], named: str) -> None:
    """And what it advises for a frozen tower helps."""
    tower = family_tower(NAME).train()
    handle, call = fusedvit.fuse(tower), Call.of(tower, MIX)
    change(tower)
    call.record(tower)
    ran_original(handle, fallback.FOREIGN_CODE)
    reason = str(handle.reason())
    assert named in reason and "switch gradient checkpointing off" in reason
    tower.gradient_checkpointing_disable()
    call.record(tower)
    assert handle.stats()["fused"] == 1


def test_a_checkpointing_function_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = family_tower(NAME).train()
    handle, call = fusedvit.fuse(tower), Call.of(tower, MIX)
    call.record(tower)
    cls = type(tower.blocks[0])
    monkeypatch.setattr(cls, "_gradient_checkpointing_func", staticmethod(mine), raising=False)
    monkeypatch.setattr(cls, "gradient_checkpointing", True)
    call.record(tower)
    ran_original(handle, fallback.FOREIGN_CODE)


@pytest.mark.parametrize("offload", [False, True])
def test_transformers_own_checkpointing(offload: bool) -> None:
    """Switched off and on again, as trainers do around evaluations, it is not judged again."""
    tower = family_tower(NAME).train()
    enable = getattr(tower, "activation_checkpointing_enable", tower.gradient_checkpointing_enable)
    if offload and "offload" not in inspect.signature(enable).parameters:
        pytest.skip("this release of transformers does not offload what a checkpoint keeps")
    tower._set_gradient_checkpointing(False)
    handle, call = fusedvit.fuse(tower, STRICT), Call.of(tower, MIX)
    call.record(tower)
    with mock.patch.object(CheckedTower, "reason", side_effect=AssertionError("judged again")):
        for _ in range(2):
            enable(**({"offload": True} if offload else {}))
            call.record(tower)
            tower._set_gradient_checkpointing(False)
            call.record(tower)
    ran_fused(handle, calls=5)
