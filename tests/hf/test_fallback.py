"""What cannot run fused runs the original code: the same answer, a counted reason, one warning; strict raises."""

import functools
import logging
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.checks import fallback
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_alike,
    assert_bitwise,
    assert_same,
    copy_of,
    expected_of,
    fused_and_original,
    fused_tower,
    outcome,
    outputs_of,
    precomputed,
    prompt,
    ran_fused,
    ran_original,
    tiny_model,
    tiny_tower,
)

Tower = Any


class Case(NamedTuple):
    """Arguments of a call, and the reason that they must be counted under."""

    reason: str
    arguments: Callable[[Tower, Call], dict[str, Any]]


def _precomputed(name: str) -> Callable[[Tower, Call], dict[str, Any]]:
    return lambda tower, call: {name: precomputed(tower, call)[name]}


CASES = {
    "output_attentions": Case(fallback.ATTENTIONS, lambda t, c: {"output_attentions": True}),
    "an argument that attention reads": Case(
        fallback.UNKNOWN_ARGUMENTS, lambda t, c: {"position_bias": torch.zeros(1, 1, 1, 1)}
    ),
    **{name: Case(fallback.PRECOMPUTED, _precomputed(name)) for name in ("cu_seqlens", "max_seqlen", "position_ids")},
    "taps": Case(
        fallback.PRECOMPUTED, lambda t, c: {n: v for n, v in precomputed(t, c).items() if n.startswith("interp")}
    ),
    "all of them": Case(fallback.PRECOMPUTED, precomputed),
}
BY_NAME = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def warnings_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fusedvit")  # the command line, run before in this process, lowers it


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("fusedvit") and r.levelno >= logging.WARNING]


@BY_NAME
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_original_code_runs(case: Case, used: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The very bits of Hugging Face's answer, counted; warned of once in three calls. The next call is fused again:
    hooks that output_hidden_states leaves on the blocks for good must not count."""
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    expected = call.run(original, **case.arguments(original, call))
    handle = fusedvit.fuse(tower)
    plain = call.run(tower) if used else call.run(copy_of(tower))
    for _ in range(3):
        assert_bitwise(call.run(tower, **case.arguments(tower, call)), expected)
    ran_original(handle, case.reason, calls=3)
    messages = warnings_of(caplog)
    begin = f"fusedvit: Qwen3VLVisionModel runs its original code: {case.reason}"
    assert len(messages) == 1 and messages[0].startswith(begin)
    assert case.reason in handle.report()
    assert_bitwise(call.run(tower), plain)
    assert handle.stats()["fused"] == 1 + used
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    with pytest.raises(RuntimeError, match=f"^fusedvit: Qwen3VLVisionModel cannot run fused: {case.reason}"):
        call.run(tower, **case.arguments(tower, call))


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_on_every_module_fire(register: str) -> None:
    """Hooks for all modules of the process, as profilers set them."""
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
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


def _lying(module: Any, arguments: Any, output: Any) -> Any:
    return 2 * output


class _Lying:
    """What shows a function of transformers as the one that it calls."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, module: Any, arguments: Any, output: Any) -> Any:
        return 2 * output


@pytest.mark.parametrize("kind", ["its module", "what it wraps", "its func", "its func's module"])
def test_hooks_that_say_they_are_transformers(kind: str) -> None:
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    hook: Any = types.FunctionType(_lying.__code__, globals())
    if kind == "its module":
        hook.__module__ = capturing.__name__
    elif kind == "what it wraps":
        hook = functools.wraps(capturing.maybe_install_capturing_hooks)(hook)
    elif kind == "its func":
        hook = _Lying(capturing.maybe_install_capturing_hooks)
    else:
        hook.__module__ = capturing.__name__
        hook = functools.partial(hook)
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    call.run(tower)
    for t in (tower, original):
        t.blocks[0].mlp.register_forward_hook(hook)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["original"] == {fallback.HOOKS: 1}


def test_weights_written_while_a_hook_was_on() -> None:
    """Without a check of the content: what was prepared before a fallback is not used after it."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(watch_data=False))
    call = Call.of(tower, GRIDS["mix"])
    call.run(tower)
    hook = tower.blocks[0].register_forward_hook(lambda module, arguments, output: None)
    call.run(tower)
    tower.merger.linear_fc2.weight.data.mul_(2)
    hook.remove()
    assert not handle.weights.host_unchanged()  # a GPU goes by that alone, a CPU by the content as well
    assert_same(call.run(tower), expected_of(tower, call))


def test_a_dtype_viewed_in_place() -> None:
    """The same parameter at the same address, of the same version: other numbers."""
    tower, handle, call = fused_tower(tiny_tower().half(), GRIDS["smallest"], fusedvit.FuseConfig(watch_data=False))
    call.run(tower)
    weight = tower.blocks[1].norm2.weight
    weight.data = weight.data.view(torch.bfloat16)
    with pytest.raises(RuntimeError, match="mixed dtype"):  # Hugging Face's own answer
        call.run(tower)
    ran_original(handle, fallback.DTYPES)


def test_hooks_on_the_tower_itself_are_compatible() -> None:
    tower, handle, call, original = fused_and_original(config=fusedvit.FuseConfig(strict=True))
    expected = call.run(original)
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
    tower, handle, call = fused_tower(config=fusedvit.FuseConfig(strict=True))
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


def test_parameters_that_have_no_shape_yet() -> None:
    tower, handle, call = fused_tower()
    tower.blocks[0].mlp.linear_fc1.weight = nn.parameter.UninitializedParameter(requires_grad=False)
    assert "blocks.0.mlp.linear_fc1.weight" in handle.report() and "UninitializedParameter" in handle.report()
    with pytest.raises(ValueError, match="uninitialized"):  # torch's own
        call.run(tower)
    assert handle.stats()["original"] == {fallback.MODIFIED: 1}


def test_a_tower_without_its_config() -> None:
    tower, handle, call = fused_tower()
    del tower.config
    assert "config" in handle.report()
    with pytest.raises(AttributeError, match="config"):  # transformers' own
        tower(call.pixels, grid_thw=call.grid)


def test_a_tower_that_cannot_run_fused_takes_what_its_original_code_takes() -> None:
    """Inputs are checked once the tower may run fused, not before: integer pixels are refused only there."""
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    handle, whole = fusedvit.fuse(tower), call.pixels.mul(4).long()
    hook = tower.blocks[0].register_forward_hook(lambda *given: None)
    assert_bitwise(outputs_of(tower(whole, call.grid)), outputs_of(original(whole, call.grid)))
    ran_original(handle, fallback.HOOKS)
    hook.remove()
    with pytest.raises(TypeError, match="pixel_values must be normalised floats"):
        tower(whole, call.grid)


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
    tower, _, call, original = fused_and_original(family_tower(name), [(1, 8, 4), (1, 2, 10)])
    for argument in ("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"):
        expected, found = (outcome(call.run, t, **{argument: None}) for t in (original, tower))
        assert_alike(found, expected)
        assert not isinstance(expected, Exception) or str(found) == str(expected), argument


@pytest.mark.parametrize("pre", [False, True], ids=["forward", "pre"])
def test_a_hook_on_every_module_is_named(pre: bool) -> None:
    """Also by who asks the handle, which must not say that the tower runs fused."""
    tower, handle, call = fused_tower()
    register = "register_module_forward_pre_hook" if pre else "register_module_forward_hook"
    hook = getattr(nn.modules.module, register)(lambda *given: None)
    try:
        call.run(tower)
        reason = handle.reason()
        assert reason is not None and reason.kind == fallback.HOOKS and "on every module" in reason.detail
        assert handle.stats()["details"][fallback.HOOKS] == reason.detail
        assert str(reason) in repr(handle) and ": original code: hooks" in handle.report()
    finally:
        hook.remove()
    assert handle.reason() is None
