"""accelerate's hooks: those that only move inputs run fused, put before or after `fuse`, changed or taken off."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.checks import fallback
from tests.support.towers import (
    GRIDS,
    Call,
    assert_bitwise,
    assert_same,
    copy_of,
    fused_and_original,
    fused_tower,
    outcome,
    prompt,
    ran_fused,
    tiny_model,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)


accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")


def dispatched(model: Any, **options: Any) -> Any:
    """As `device_map="auto"` leaves a model that it spreads, its tower whole on one device."""
    devices = {"model.visual": "cpu", "model.language_model": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, devices, force_hooks=True, main_device="cpu", **options)


@pytest.mark.parametrize("when", ["before fuse", "after fuse", "after a call"])
def test_a_tower_hooked_for_one_device_runs_fused(when: str) -> None:
    model = tiny_model().requires_grad_(False)
    original, inputs = copy_of(model), prompt(model.model.visual, GRIDS["images"])
    if when == "before fuse":
        dispatched(model)
    handle = fusedvit.fuse(model, STRICT)
    with torch.no_grad():
        if when == "after a call":
            model(**inputs)
        if when != "before fuse":
            dispatched(model)
        assert "forward" in vars(model.model.visual.blocks[0].attn.qkv)
        for _ in range(2):
            assert torch.allclose(model(**inputs).logits, original(**inputs).logits, atol=1e-4)
        before = handle.stats()["refreshes"]
        model(**inputs)
    ran_fused(handle, calls=3 + (when == "after a call"))
    assert handle.stats()["refreshes"] == before


def align(module: Any, **options: Any) -> None:
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(**options))


def custom(module: Any) -> None:
    class Doubling(hooks.ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return 2 * output

    hooks.add_hook_to_module(module, hooks.SequentialHook(hooks.AlignDevicesHook("cpu"), Doubling()))


STEPS = ["add fuse", "fuse add", "add remove fuse", "add fuse remove", "fuse add remove"]


@pytest.mark.parametrize("steps", STEPS)
def test_a_hook_on_the_tower(steps: str) -> None:
    """accelerate puts a `forward` on the instance, which a class swap alone would leave in charge; taking a hook off
    leaves one there, bound to the class that the tower had before."""
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    act: dict[str, Callable[[], Any]] = {
        "add": lambda: align(tower, execution_device="cpu", io_same_device=True),
        "remove": lambda: hooks.remove_hook_from_module(tower),
        "fuse": lambda: fusedvit.fuse(tower, STRICT),
    }
    for step in steps.split():
        act[step]()
    handle = fusedvit.fuse(tower, STRICT)
    assert_same(call.run(tower), expected)
    ran_fused(handle, calls=1)
    fusedvit.unfuse(tower)
    assert_bitwise(call.run(tower), expected)
    ran_fused(handle, calls=1)
    act["remove"]()
    assert_bitwise(call.run(tower), expected)


HOOKED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "one device": (lambda t: align(t.blocks[0], execution_device="cpu"), True),
    "none named": (lambda t: align(t.blocks[0].mlp, io_same_device=True), True),
    "the tower itself": (lambda t: align(t, execution_device="cpu", io_same_device=True), True),
    "twice": (lambda t: [align(t.merger, execution_device="cpu") for _ in range(2)], True),
    "offloaded": (lambda t: align(t.blocks[0].mlp.linear_fc1, execution_device="cpu", offload=True), False),
    "a hook that computes": (lambda t: custom(t.blocks[1].attn.proj), False),
}


@pytest.mark.parametrize("name", HOOKED)
def test_accelerates_hooks(name: str) -> None:
    tower, handle, call, original = fused_and_original()
    change, fused = HOOKED[name]
    call.run(tower)
    for t in (tower, original):
        change(t)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 1 + fused, handle.stats()["original"]
    if not fused:
        assert "blocks." in handle.report()


def test_a_hook_that_changes_afterwards() -> None:
    tower, handle, call = fused_tower()
    align(tower.blocks[0], execution_device="cpu")
    call.run(tower)
    tower.blocks[0]._hf_hook.execution_device = "meta"
    outcome(call.run, tower)  # accelerate sends its input there
    assert handle.stats()["original"] == {fallback.MODIFIED: 1} and "blocks.0" in handle.report()


def test_parameters_put_where_others_are_offloaded() -> None:
    """What the hook loads at each call counts, not what the module has in between."""
    tower, handle, call, original = fused_and_original()
    for t in (tower, original):
        layer = t.blocks[1].attn.proj
        other = {name: 2 * p.detach() for name, p in layer.named_parameters()}
        align(layer, execution_device="cpu", offload=True)
        layer.load_state_dict(other, assign=True)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 0 and "blocks.1.attn.proj" in handle.report()


def test_unhooked_again() -> None:
    tower, handle, call, original = fused_and_original(config=STRICT)
    align(tower.blocks[0].mlp, execution_device="cpu")
    call.run(tower)
    hooks.remove_hook_from_module(tower, recurse=True)
    assert_same(call.run(tower), call.run(original))
    ran_fused(handle, calls=2)


def _halved(hook: Any, module: Any, output: Any) -> Any:
    return output / 2


def _scaled(hook: Any, module: Any, *arguments: Any, **named: Any) -> Any:
    return tuple(a / 2 for a in arguments), named


RUN = {"pre_forward": _scaled, "post_forward": _halved}


def _put(where: str, name: str, hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another function in the place of what accelerate's hook runs."""
    cls = type(hook)
    if where == "the class":
        monkeypatch.setattr(cls, name, RUN[name])
    elif where == "the instance":
        setattr(hook, name, RUN[name].__get__(hook))
    else:
        hook.__class__ = type(cls.__name__, (cls,), {name: RUN[name], "__module__": cls.__module__})


@pytest.mark.parametrize("used", [False, True], ids=["not called", "called"])
@pytest.mark.parametrize("where", ["the class", "the instance", "a class of that name"])
@pytest.mark.parametrize("name", RUN)
def test_what_accelerates_hook_runs(name: str, where: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    for t in (tower, original):
        align(t.blocks[0].mlp, execution_device="cpu")
    handle = fusedvit.fuse(tower)
    if used:
        call.run(tower)
    for t in (tower, original):
        _put(where, name, t.blocks[0].mlp._hf_hook, monkeypatch)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == used
    assert "blocks.0.mlp" in handle.report()


def test_what_accelerates_hooks_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, handle, call = fused_tower()
    align(tower.blocks[0].mlp, execution_device="cpu")
    call.run(tower)
    monkeypatch.setattr(hooks, "send_to_device", lambda tensors, *arguments, **named: tensors)
    assert "blocks.0.mlp" in handle.report()
    call.run(tower)
    assert handle.stats()["original"] == {fallback.MODIFIED: 1}


def _kept_elsewhere(self: Any, module: Any, *arguments: Any, **named: Any) -> Any:
    return tuple(a * 1.5 for a in arguments), named


def _other_compiled(wrapper: Any) -> None:
    wrapper._compiled_fn = _kept_elsewhere


def _other_disabled(wrapper: Any) -> None:
    wrapper._compiled_fn = torch.compiler.disable(_kept_elsewhere)


def _other_inside_compiled(wrapper: Any) -> None:
    wrapper._compiled_fn = torch.compiler.disable(wrapper.__wrapped__)
    cells = dict(zip(wrapper._compiled_fn.__code__.co_freevars, wrapper._compiled_fn.__closure__, strict=True))
    cells["fn"].cell_contents = _kept_elsewhere


COMPILED = {f.__name__: f for f in (_other_compiled, _other_disabled, _other_inside_compiled)}


@pytest.fixture
def wrapper() -> Any:
    found = hooks.AlignDevicesHook.pre_forward
    if "_compiled_fn" not in found.__code__.co_names:
        pytest.skip("accelerate before 1.13 has no such wrapper")
    return found


@pytest.mark.parametrize("used", [False, True], ids=["before fuse", "after a call"])
@pytest.mark.parametrize("name", COMPILED)
def test_what_a_wrapper_of_accelerates_keeps_to_run(
    name: str, used: bool, wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper runs what it finds in an attribute of itself."""
    monkeypatch.setattr(wrapper, "_compiled_fn", torch.compiler.disable(wrapper.__wrapped__), raising=False)
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    for t in (tower, original):
        align(t.blocks[0].mlp, execution_device="cpu")
    handle = None
    if used:
        handle = fusedvit.fuse(tower)
        call.run(tower)
    COMPILED[name](wrapper)
    handle = handle or fusedvit.fuse(tower)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == used and "blocks.0.mlp" in handle.report()


def test_a_wrapper_of_accelerates_that_runs_for_the_first_time(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what it makes then; that is no change, of the tower or of what a record waits for."""
    monkeypatch.setattr(wrapper, "_compiled_fn", None, raising=False)  # put back afterwards, if there was one
    monkeypatch.delattr(wrapper, "_compiled_fn")
    tower = tiny_tower()
    align(tower.blocks[0].mlp, execution_device="cpu")
    handle, call = fusedvit.fuse(tower, STRICT), Call.of(tower, GRIDS["mix"])
    records = [call.record(tower, output_hidden_states=True) for _ in range(2)]
    assert all(len(record.hidden_states) > 1 for record in records)
    call.run(tower)
    ran_fused(handle, calls=3)
    assert handle.stats()["refreshes"] == 1


def test_a_wrapper_of_accelerates_that_would_keep_something_else(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "_compiled_fn", None, raising=False)
    monkeypatch.delattr(wrapper, "_compiled_fn")
    monkeypatch.setattr(torch.compiler, "disable", lambda function: _kept_elsewhere)
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    for t in (tower, original):
        align(t.blocks[0].mlp, execution_device="cpu")
    handle = fusedvit.fuse(tower)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 0
