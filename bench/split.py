"""Where a run's time goes: the GPU's own record of every kernel, put to the operations that launched them.

The encoder runs eagerly on a table of operations that launches a marker before each; kernels between two markers are
the first one's, however many an operation takes. Kernel for kernel it is what a replay runs, without its overlap.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from fusedvit.bench.workloads import Grid
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.model.ops import Ops, ops_for
from fusedvit.model.weights import EncoderWeights, LinearWeights
from fusedvit.runtime.captured_encoder import CapturedEncoder

Times = list[tuple[str, float]]


@dataclass(frozen=True)
class Split:
    """Milliseconds, and how often each operation ran; by kernel name where markers were not found again."""

    ms: dict[str, float]
    runs: dict[str, int]


def kernel_times(run: Callable[[], Any]) -> Times:
    """(kernel, microseconds) of one call in the order they started, copies left out. Needs a GPU."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    events = [e for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    return [(e.name, e.time_range.elapsed_us()) for e in sorted(events, key=lambda e: e.time_range.start)]


def linear_names(weights: EncoderWeights) -> dict[int, str]:
    """Every linear layer by its weight's address, named as in `plan.EncoderPlan`."""
    parts: list[tuple[str, Any]] = [("", weights), *(("", block) for block in weights.blocks)]
    parts += [("merger_", merger) for merger in (weights.merger, *weights.deepstack)]
    found = {}
    for prefix, record in parts:
        for name, layer in ((f.name, getattr(record, f.name)) for f in fields(record)):
            if isinstance(layer, LinearWeights):
                found[layer.weight.data_ptr()] = name if name == "downsample" else prefix + name
    return found


def watched(ops: Ops, weights: EncoderWeights, begin: Callable[[str], None]) -> Ops:
    """`ops`, with `begin(operation)` called before each."""
    linears = linear_names(weights)

    def before(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            begin(linears[arguments[1].data_ptr()] if name == "linear" else name)
            return run(*arguments, **named)

        return call

    names = [f.name for f in fields(Ops) if f.name != "name"]
    return Ops(f"{ops.name}, watched", *(before(name, getattr(ops, name)) for name in names))


def by_operation(times: Times, begun: Sequence[str]) -> Split:
    """`times` with a marker's kernel first and before each operation of `begun`; nothing of no times."""
    marker = times[0][0] if times else ""
    if sum(name == marker for name, _ in times) != len(begun):
        by_name = [name for name, _ in times]
        return Split(_summed(by_name, times), dict(Counter(by_name)))
    places = itertools.accumulate(name == marker for name, _ in times)
    named = [(begun[place - 1], time) for place, time in zip(places, times, strict=True) if time[0] != marker]
    return Split(_summed([name for name, _ in named], [time for _, time in named]), dict(Counter(begun)))


def _summed(names: Sequence[str], times: Times) -> dict[str, float]:
    """Milliseconds by name."""
    found = dict.fromkeys(names, 0.0)
    for name, (_, us) in zip(names, times, strict=True):
        found[name] += us / 1e3
    return found


def of_run(handle: FusedEncoder, budget: int, grid: Grid, pixels: torch.Tensor) -> Split:
    """The split of a run of `grid` on the kernels and buffers of `budget` (merged tokens). Needs a GPU."""
    begun: list[str] = []
    marker = torch.zeros(1, device=pixels.device)

    def begin(name: str) -> None:
        begun.append(name)
        marker.add_(1)

    weights = handle.weights.get
    ops = watched(ops_for(pixels.device), weights(), begin)
    program = CapturedEncoder(handle.spec, ops, pixels.dtype, pixels.device, weights)
    program.allocate(handle.graphs().limits)
    program.load_grid(budget, tuple(grid))
    program.buffers(budget).pixels[: pixels.shape[0]].copy_(pixels)

    def run() -> None:
        begun.clear()
        program.run(budget)

    return by_operation(kernel_times(run), begun)
