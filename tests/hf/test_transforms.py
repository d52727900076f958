"""Who looks at a call's operations themselves gets what Hugging Face's tower gives: `torch.func`, forward-mode AD,
dispatch modes, `torch.compile(fullgraph=True)` and export."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusedvit
from fusedvit.checks import fallback, transforms
from fusedvit.checks.as_built import Built
from fusedvit.graphs.limits import check_limits
from tests.support.families import BY_GRID, INSTALLED, each_of, family_tower
from tests.support.towers import (
    Call,
    assert_same,
    copy_of,
    fused_and_original,
    fused_tower,
    outputs_of,
    precomputed,
    ran_fused,
    ran_original,
    tiny_tower,
)
from tests.unit.graphs.stand_in import graphs_on_cpu

SMALL = [(1, 4, 4), (1, 8, 4)]
Answer = Any


def rows(tower: Any, call: Call) -> Callable[[torch.Tensor], torch.Tensor]:
    def answer(pixels: torch.Tensor) -> torch.Tensor:
        out = tower(pixels, grid_thw=call.grid)
        found: torch.Tensor = out.last_hidden_state
        return found

    return answer


def vmapped(tower: Any, call: Call) -> Answer:
    return func.vmap(rows(tower, call), randomness="error")(torch.stack([call.pixels, 2 * call.pixels]))


def jvp(tower: Any, call: Call) -> Answer:
    return func.jvp(rows(tower, call), (call.pixels,), (torch.ones_like(call.pixels),))


def vjp(tower: Any, call: Call) -> Answer:
    out, back = func.vjp(rows(tower, call), call.pixels)
    return out, back(torch.ones_like(out))


def gradient(tower: Any, call: Call) -> Answer:
    return func.grad(lambda x: rows(tower, call)(x).square().sum())(call.pixels)


def gradient_of_parameters(tower: Any, call: Call) -> Answer:
    parameters = {name: p.detach() for name, p in tower.named_parameters()}

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        out = func.functional_call(tower, given, (call.pixels,), {"grid_thw": call.grid})
        found: torch.Tensor = out.last_hidden_state.square().sum()
        return found

    return tuple(func.grad(loss)(parameters).values())


def other_parameters(tower: Any, call: Call) -> Answer:
    given = {name: 1.1 * p.detach() for name, p in tower.named_parameters()}
    return func.functional_call(tower, given, (call.pixels,), {"grid_thw": call.grid}).last_hidden_state


def dual(tower: Any, call: Call) -> Answer:
    with forward_ad.dual_level():
        pixels = forward_ad.make_dual(call.pixels, torch.ones_like(call.pixels))
        return tuple(forward_ad.unpack_dual(rows(tower, call)(pixels)))


def dual_parameters(tower: Any, call: Call) -> Answer:
    with forward_ad.dual_level():
        given = {n: forward_ad.make_dual(p.detach(), torch.ones_like(p)) for n, p in tower.named_parameters()}
        out = func.functional_call(tower, given, (call.pixels,), {"grid_thw": call.grid}).last_hidden_state
        return tuple(forward_ad.unpack_dual(out))


def linearized(tower: Any, call: Call) -> Answer:
    out, push = func.linearize(rows(tower, call), call.pixels)
    return out, push(torch.ones_like(call.pixels))


def counted(tower: Any, call: Call) -> Answer:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        out = rows(tower, call)(call.pixels)
    return out, torch.tensor(counter.get_total_flops())


class Seen(TorchDispatchMode):
    """Sees every operation, and changes one."""

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        return 2 * out if op is torch.ops.aten.gelu.default else out


def seen(tower: Any, call: Call) -> Answer:
    with Seen():
        return rows(tower, call)(call.pixels)


class Twice(TorchFunctionMode):
    """Sees every function of torch, and changes one."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return 2 * out if function is torch.nn.functional.gelu else out


def twice(tower: Any, call: Call) -> Answer:
    with Twice():
        return rows(tower, call)(call.pixels)


TRANSFORMS = [
    vmapped,
    jvp,
    vjp,
    gradient,
    gradient_of_parameters,
    other_parameters,
    dual,
    dual_parameters,
    linearized,
    counted,
    seen,
    twice,
]


def tensors_in(answer: Answer) -> tuple[torch.Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


def attempt(act: Callable[[], Answer]) -> tuple[str, Answer]:
    try:
        return "", tensors_in(act())
    except Exception as error:  # compared by its type
        return type(error).__name__, ()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad], ids=["grad", "no grad"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_transforms(transform: Callable[[Any, Call], Answer], graphs: bool, mode: Any) -> None:
    tower, handle, call, original = fused_and_original(grid=SMALL)
    handle.refresh()
    with graphs_on_cpu(handle, check_limits((4, 16, 64), 4, 8)) if graphs else contextlib.nullcontext():
        call.run(tower)
        with mode():
            kind, expected = attempt(lambda: transform(original, call))
            got_kind, got = attempt(lambda: transform(tower, call))
        assert got_kind == kind and len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            if theirs is None:
                assert ours is None, "a tangent that is not there"
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        if not kind:
            reasons = set(handle.stats()["original"])
            assert reasons <= {fallback.TRANSFORM, fallback.GRADIENTS, fallback.MODIFIED} and reasons
        fused = handle.stats()["fused"]
        call.run(tower)
        assert handle.stats()["fused"] == fused + 1, "afterwards it runs fused again"


@each_of(INSTALLED)
@pytest.mark.parametrize("transform", [jvp, dual, gradient_of_parameters, seen], ids=lambda f: f.__name__)
def test_transforms_of_every_family(transform: Callable[[Any, Call], Answer], name: str) -> None:
    tower, _, call, original = fused_and_original(family_tower(name), SMALL)
    call.run(tower)
    kind, expected = attempt(lambda: transform(original, call))
    got_kind, got = attempt(lambda: transform(tower, call))
    assert got_kind == kind
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_reason_names_the_transform() -> None:
    tower, _, call = fused_tower(grid=SMALL, config=fusedvit.FuseConfig(strict=True))
    for transform, name in (
        (jvp, "torch.func"),
        (dual, "forward-mode AD"),
        (seen, "the dispatch mode Seen"),
        (twice, "the function mode Twice"),
    ):
        with pytest.raises(RuntimeError, match=f"fusedvit: Qwen3VLVisionModel cannot run fused: .*{name}"):
            transform(tower, call)


@pytest.mark.parametrize("name", BY_GRID[:2])
def test_a_batch_of_the_older_vmap(name: str) -> None:
    """Its tensors are of the plain type, and have no memory."""
    tower, handle, call, original = fused_and_original(family_tower(name), SMALL)
    given = torch.stack([call.pixels, 2 * call.pixels])
    found, expected = (torch._vmap_internals._vmap(rows(t, call))(given) for t in (tower, original))
    torch.testing.assert_close(found, expected)
    ran_original(handle, fallback.TRANSFORM)
    assert "pixel_values is batched" in handle.report()


class Shifted(TorchDispatchMode):
    """Changes what is copied, as weights are while they are prepared."""

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        return out + 1 if op is torch.ops.aten.clone.default else out


class ShiftedFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out + 1 if function is torch.Tensor.clone else out


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("act", [fusedvit.FusedEncoder.refresh, fusedvit.FusedEncoder.warmup], ids=lambda f: f.__name__)
@pytest.mark.parametrize("context", [Shifted, ShiftedFunctions, forward_ad.dual_level])
def test_no_weights_are_prepared_under_a_transform(context: Any, act: Callable[[Any], None], used: bool) -> None:
    tower, handle, call, original = fused_and_original(grid=SMALL)
    expected = call.run(original)
    if used:
        call.run(tower)
    with context(), pytest.raises(RuntimeError, match=r"^fusedvit: Qwen3VLVisionModel cannot run fused: transform: "):
        act(handle)
    assert_same(call.run(tower), expected)
    ran_fused(handle, calls=1 + used)
    act(handle)
    assert_same(call.run(tower), expected)


class Marked(torch.Tensor):
    """As many libraries' tensors: what is computed from them is of their class."""


class Twofold(torch.Tensor):
    """Sees the operations on it, and changes one."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(function, kinds, args, kwargs or {})
        return 2 * out if function is torch.nn.functional.gelu else out


@pytest.mark.parametrize("cls", [Marked, Twofold])
@pytest.mark.parametrize("argument", ["pixel_values", "grid_thw"])
@pytest.mark.parametrize("name", BY_GRID[:2])
def test_inputs_of_a_class_that_sees_operations(name: str, argument: str, cls: type[torch.Tensor]) -> None:
    tower, handle, call, original = fused_and_original(family_tower(name), SMALL)
    pixels, grid = call.pixels, call.grid
    if argument == "pixel_values":
        pixels = pixels.as_subclass(cls)
    else:
        grid = grid.as_subclass(cls)
    found, expected = (outputs_of(t(pixels, grid_thw=grid)) for t in (tower, original))
    assert_same(found, expected)
    assert list(map(type, found.values())) == list(map(type, expected.values()))
    ran_original(handle, fallback.TRANSFORM)
    assert f"{argument} is a {cls.__name__}" in handle.report()
    tower(torch.nn.Parameter(call.pixels, requires_grad=False), grid_thw=call.grid)
    assert handle.stats()["fused"] == 1


def test_modes_that_change_no_operation_run_fused() -> None:
    tower, handle, call = fused_tower(grid=SMALL, config=fusedvit.FuseConfig(strict=True))
    for mode in (torch.inference_mode, torch.no_grad, lambda: torch.device("cpu"), contextlib.nullcontext):
        with mode():
            tower(call.pixels, grid_thw=call.grid)
    assert handle.stats()["fused"] == 4 and transforms.active(call.pixels) is None


# compiled and exported


def exported(strict: bool) -> Callable[[Any, Call, dict[str, Any]], dict[str, torch.Tensor]]:
    def run(tower: Any, call: Call, more: dict[str, Any]) -> dict[str, torch.Tensor]:
        program = torch.export.export(tower, (call.pixels,), {"grid_thw": call.grid, **more}, strict=strict)
        return outputs_of(program.module()(call.pixels, grid_thw=call.grid, **more))

    return run


def fullgraph(tower: Any, call: Call, more: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(tower, backend="eager", fullgraph=True)
    return outputs_of(compiled(call.pixels, grid_thw=call.grid, **more))


def traced(tower: Any, call: Call, more: dict[str, Any]) -> dict[str, torch.Tensor]:
    def answer(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = tower(pixels, grid_thw=grid).pooler_output
        return found

    made = torch.jit.trace(answer, (call.pixels, call.grid), check_trace=False)
    return {"pooler_output": made(call.pixels, call.grid)}


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize(
    "way", [exported(True), exported(False), fullgraph, traced], ids=["strict export", "export", "fullgraph", "trace"]
)
def test_whole_graphs(way: Callable[[Any, Call, dict[str, Any]], dict[str, torch.Tensor]], used: bool) -> None:
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, [(1, 4, 6)])
    more = precomputed(original, call)
    handle = fusedvit.fuse(tower)
    if used:
        call.run(tower)
    with torch.no_grad():
        expected = way(original, call, more)
        assert_same(way(tower, call, more), expected)
    call.run(tower)
    assert handle.stats()["fused"] == 1 + used


@pytest.mark.parametrize(
    "way", [exported(True), exported(False), fullgraph], ids=["strict export", "export", "fullgraph"]
)
def test_whole_graphs_of_a_strict_tower_are_refused(
    way: Callable[[Any, Call, dict[str, Any]], dict[str, torch.Tensor]],
) -> None:
    tower = tiny_tower()
    call = Call.of(tower, [(1, 4, 6)])
    more = precomputed(tower, call)
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"fusedvit: Qwen3VLVisionModel .*: compiling"):
        way(tower, call, more)
    call.run(tower)
    assert handle.stats()["fused"] == 1


def test_a_compiled_call_is_refused_once_its_tower_is_strict() -> None:
    tower = tiny_tower()
    call = Call.of(tower, [(1, 4, 6)])
    more, handle = precomputed(tower, call), fusedvit.fuse(tower)
    torch._dynamo.reset()
    compiled = torch.compile(tower, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(call.pixels, grid_thw=call.grid, **more)
        handle.reconfigure(fusedvit.FuseConfig(strict=True))
        with pytest.raises(RuntimeError, match=r"cannot run fused inside torch\.compile\(fullgraph=True\)"):
            compiled(call.pixels, grid_thw=call.grid, **more)


def test_an_engines_strict_tower_is_not_compiled() -> None:
    tower = tiny_tower()
    call, known = Call.of(tower, [(1, 4, 6)]), fusedvit.fuse(copy_of(tower))
    more, strict = precomputed(tower, call), fusedvit.FuseConfig(strict=True)
    fusedvit.fuse_tower(
        tower, known.family, known.spec, strict, built=Built.of(tower), call=lambda *given, **more: None
    )
    with torch.no_grad(), pytest.raises(RuntimeError, match="fusedvit: Qwen3VLVisionModel .*: compiling"):
        fullgraph(tower, call, more)
