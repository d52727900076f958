"""A `forward` put on the tower itself: where it leads past the fused encoder we say so, else calls run fused."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.checks import fallback
from fusedvit.checks.as_built import Built
from fusedvit.checks.own_forward import bypass
from tests.support.families import BY_GRID, INSTALLED, each_of, family_tower
from tests.support.towers import GRIDS, Call, assert_bitwise, copy_of, fused_tower, ran_fused, tiny_tower

STRICT = fusedvit.FuseConfig(strict=True)
Put = Callable[[Any], None]


@pytest.fixture(autouse=True)
def accelerate_anew() -> Iterator[None]:
    """Its options hold for a process, and another test may have chosen others."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


def prepared(tower: Any) -> None:
    from accelerate import Accelerator

    assert Accelerator(mixed_precision="bf16", cpu=True).prepare(tower) is tower


def compiled(tower: Any) -> None:
    tower.forward = torch.compile(tower.forward, backend="eager")


def closure(tower: Any) -> None:
    inner = tower.forward

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    tower.forward = outer


def bound(tower: Any) -> None:
    inner = type(tower).forward
    tower.forward = types.MethodType(lambda self, *args, **kwargs: inner(self, *args, **kwargs), tower)


def partial(tower: Any) -> None:
    tower.forward = functools.partial(type(tower).forward, tower)


def default(tower: Any) -> None:
    def outer(*args: Any, inner: Any = tower.forward, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    tower.forward = outer


def called_object(tower: Any) -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.held = {"inner": [inner]}

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.held["inner"][0](*args, **kwargs)

    tower.forward = Wrapper(tower.forward)


def slotted_object(tower: Any) -> None:
    class Wrapper:  # as NNCF's
        __slots__ = ("inner",)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    tower.forward = Wrapper(tower.forward)


def hook_on_a_wrapper(tower: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    closure(tower)
    add_hook_to_module(tower, ModelHook())


def wrapper_of_a_hook(tower: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(tower, ModelHook())
    closure(tower)


PUTS = [prepared, compiled, closure, bound, partial, default, called_object, slotted_object, hook_on_a_wrapper]


def bf16_tower() -> Any:
    return tiny_tower().bfloat16()


@pytest.mark.parametrize("put", PUTS, ids=lambda put: put.__name__)
def test_put_before_fuse_is_told_of(put: Put, caplog: pytest.LogCaptureFixture) -> None:
    tower = bf16_tower()
    call = Call.of(tower, GRIDS["mix"])
    put(tower)
    own, cls, expected = dict(vars(tower)), type(tower), call.run(tower)
    with pytest.raises(RuntimeError, match=f"{fallback.BYPASSED}.*`forward`.*remove it, call fuse"):
        fusedvit.fuse(tower, STRICT)
    assert type(tower) is cls and vars(tower) == own
    handle = fusedvit.fuse(tower)
    assert [fallback.BYPASSED in r.getMessage() for r in caplog.records if r.name == "fusedvit"] == [True]
    assert_bitwise(call.run(tower), expected)
    reason = handle.reason()
    assert reason is not None and reason.kind == fallback.BYPASSED
    assert str(reason) in repr(handle) and str(reason) in handle.report() and "runs fused" not in repr(handle)
    with pytest.raises(RuntimeError, match=fallback.BYPASSED):
        fusedvit.fuse(tower, STRICT)
    fusedvit.unfuse(tower)
    assert type(tower) is cls and vars(tower) == own
    assert_bitwise(call.run(tower), expected)


@pytest.mark.parametrize("put", [*PUTS, wrapper_of_a_hook], ids=lambda put: put.__name__)
def test_put_after_fuse_runs_fused(put: Put) -> None:
    tower, handle, call = fused_tower(bf16_tower(), config=STRICT)
    put(tower)
    assert handle.reason() is None and "runs fused" in repr(handle)
    call.run(tower)
    ran_fused(handle, calls=1)
    assert fusedvit.fuse(tower, STRICT) is handle
    fusedvit.unfuse(tower)
    call.run(tower)
    ran_fused(handle, calls=1)


def test_wrapper_of_a_hook_put_before_fuse_runs_fused() -> None:
    """accelerate's wrapper looks up what it calls, which `fuse` replaces, whatever is around it."""
    tower = bf16_tower()
    wrapper_of_a_hook(tower)
    handle = fusedvit.fuse(tower, STRICT)
    Call.of(tower, GRIDS["mix"]).run(tower)
    ran_fused(handle, calls=1)


@each_of(BY_GRID)
def test_original_forward_put_after_fuse_is_told_of(name: str) -> None:
    tower = family_tower(name)
    original, call = type(tower).forward, Call.of(tower, [(1, 4, 6), (1, 6, 4)])
    expected = call.run(tower)
    handle = fusedvit.fuse(tower)
    assert bypass(tower) is None
    for put in (types.MethodType(original, tower), lambda *args, **kwargs: original(tower, *args, **kwargs)):
        tower.forward = put
        reason = handle.reason()
        assert reason is not None and reason.kind == fallback.BYPASSED and str(reason) in handle.report()
        assert "wrapper" not in reason.detail
        assert name in reason.detail or "<lambda>" in reason.detail
        assert_bitwise(call.run(tower), expected)
    del tower.forward
    assert handle.reason() is None


def test_forward_put_on_the_class_after_fuse_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that reduce tokens patch `type(model.visual)`, which is the class that `fuse` gave."""
    tower = tiny_tower()
    original, call = type(tower).forward, Call.of(tower, GRIDS["mix"])
    expected, handle = call.run(tower), fusedvit.fuse(tower)
    fused = type(tower).forward
    monkeypatch.setattr(type(tower), "forward", wrapped(fused))
    call.run(tower)
    ran_fused(handle, calls=1)
    assert handle.reason() is None
    monkeypatch.setattr(type(tower), "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    reason = handle.reason()
    assert reason is not None and reason.kind == fallback.BYPASSED and str(reason) in handle.report()
    assert reason.detail.startswith("its class's `forward` is ") and reason.detail.endswith("<lambda>")
    assert_bitwise(call.run(tower), expected)
    with pytest.raises(RuntimeError, match=fallback.BYPASSED):
        fusedvit.fuse(tower, STRICT)
    monkeypatch.setattr(type(tower), "forward", fused)
    assert handle.reason() is None


def test_the_original_class_put_after_fuse_is_told_of() -> None:
    """A library that sets a class of its own, and then the one that it expects to have been there."""
    tower = tiny_tower()
    original, call = type(tower), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    tower.__class__ = type("Pruning", (original,), {})
    reason = handle.reason()
    assert reason is not None and reason.kind == fallback.FOREIGN_CODE and "Pruning" in reason.detail
    tower.__class__ = original
    call.run(tower)
    reason = handle.reason()
    assert handle.stats()["calls"] == 0 and reason is not None and reason.kind == fallback.BYPASSED
    assert "__class__" in reason.detail and str(reason) in handle.report() and "runs fused" not in repr(handle)
    again = fusedvit.fuse(tower, STRICT)
    call.run(tower)
    ran_fused(again, calls=1)
    assert handle.state() == "unfused" and again.reason() is None
    fusedvit.unfuse(tower)
    assert again.reason() is None


def test_a_wrapper_is_not_called_the_original() -> None:
    """It bears the name of what it wraps."""
    for wrap, said in ((torch.compile, "is torch.compile of "), (wrapped, f"is a wrapper, by {__name__}, around ")):
        tower = family_tower("Qwen3VLVisionModel")
        tower.forward = wrap(tower.forward)
        reason = fusedvit.fuse(tower).reason()
        assert reason is not None and said in reason.detail and reason.detail.endswith("Qwen3VLVisionModel.forward")


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return call


def test_accelerates_unwrapping_leads_to_the_fused_encoder() -> None:
    """It sets the last function that `__wrapped__` leads to as the tower's `forward`."""
    from accelerate import Accelerator

    tower = bf16_tower()
    handle, call = fusedvit.fuse(tower, STRICT), Call.of(tower, GRIDS["mix"])
    expected, accelerator = call.run(tower), Accelerator(mixed_precision="bf16", cpu=True)
    assert accelerator.unwrap_model(accelerator.prepare(tower), keep_fp32_wrapper=False) is tower
    assert "forward" in vars(tower)
    assert_bitwise(call.run(tower), expected)
    assert fusedvit.fuse(tower) is handle and handle.reason() is None
    ran_fused(handle, calls=2)
    fusedvit.unfuse(tower)
    assert "forward" not in vars(tower)


@each_of(INSTALLED)
def test_signature_and_names_of_forward(name: str) -> None:
    tower = family_tower(name)
    before, signature = type(tower).forward, inspect.signature(tower.forward)
    fusedvit.fuse(tower)
    after = type(tower).forward
    assert after is not before and inspect.signature(tower.forward) == signature
    assert inspect.unwrap(after) is after  # past it lies the original code
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(after, attribute) == getattr(before, attribute)


def test_fusing_again_tells_of_a_forward_that_was_put_since(caplog: pytest.LogCaptureFixture) -> None:
    tower = bf16_tower()
    original = type(tower).forward
    handle = fusedvit.fuse(tower)
    tower.forward = functools.partial(original, tower)
    assert fusedvit.fuse(tower) is handle
    assert [fallback.BYPASSED in r.getMessage() for r in caplog.records if r.name == "fusedvit"] == [True]
    del tower.forward
    fusedvit.fuse(tower, STRICT)
    tower.forward = functools.partial(original, tower)
    for config in (None, STRICT):
        with pytest.raises(RuntimeError, match=fallback.BYPASSED):
            fusedvit.fuse(tower, config)


def test_fusing_again_removes_the_method_that_a_wrapper_left() -> None:
    """A library that takes its wrapper off puts back the method that it found, which was the original one."""
    tower = bf16_tower()
    found = tower.forward
    tower.forward = wrapped(found)
    handle = fusedvit.fuse(tower)
    assert handle.reason() is not None
    tower.forward = found
    assert fusedvit.fuse(tower, STRICT) is handle and "forward" not in vars(tower)
    Call.of(tower, GRIDS["mix"]).run(tower)
    ran_fused(handle, calls=1)


def test_an_engines_forward_leads_no_further() -> None:
    tower = tiny_tower()
    known, signature = fusedvit.fuse(copy_of(tower)), inspect.signature(tower.forward)
    fusedvit.fuse_tower(
        tower, known.family, known.spec, built=Built.of(tower), call=lambda handle, tower, *args, **kwargs: None
    )
    after = type(tower).forward
    assert inspect.unwrap(after) is after and inspect.signature(tower.forward) == signature
    assert after.__qualname__ == "Qwen3VLVisionModel.forward"


def test_strict_is_refused_where_calls_go_past(caplog: pytest.LogCaptureFixture) -> None:
    """By the handle as by `fuse`, and the options stay."""
    tower = tiny_tower()
    own = tower.forward
    tower.forward = lambda *given, **named: own(*given, **named)
    handle, strict = fusedvit.fuse(tower), fusedvit.FuseConfig(strict=True)
    for act in (handle.reconfigure, lambda config: fusedvit.fuse(tower, config)):
        with pytest.raises(RuntimeError, match=fallback.BYPASSED):
            act(strict)
        assert handle.config == fusedvit.FuseConfig()
    caplog.clear()
    handle.reconfigure(fusedvit.FuseConfig(graphs=False))
    assert [fallback.BYPASSED in record.getMessage() for record in caplog.records] == [True]
