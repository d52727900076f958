"""What a call costs beside its graph: wall time over a replay's own, and when each of the host's steps begins.

A step's clock is the host's. Until the graph is launched the GPU has next to nothing to do: that is what a call adds to
its graph, with the copies out. What comes later runs beside the GPU, unless a call's graph is shorter than its host.
"""

import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from fusedvit import fused_encoder
from fusedvit.bench.timing import gpu_ms
from fusedvit.bench.workloads import Grid
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.runtime import speculative_replay
from fusedvit.runtime.readback import PendingRead

CASES: dict[str, Grid] = {
    "1 x 224 px": [(1, 14, 14)],
    "1 x 448 px": [(1, 28, 28)],
    "32 x 128 px": [(1, 8, 8)] * 32,
}
PLACES = ("cpu", "cuda")
DEVICE = torch.device("cuda")
MORE = "1 x 448 px"  # the case that is timed in other ways, too
ROUNDS, COLD_ROUNDS = 60, 20


def host(tower: nn.Module, encoder: FusedEncoder, pixels_for: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Microseconds of wall time beyond the graph's own, by case, calls and replays in turns; "steps": where they go.

    "cold": of calls before each of which the host does other things, as another model's Python. "nobody watching":
    without the look at the weights, which runs beside the graph.
    """
    found: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for case, grid in CASES.items():
        pixels = pixels_for(grid, torch.bfloat16)
        for where in PLACES:
            call = functools.partial(tower, pixels, grid_thw=torch.tensor(grid, device=where))
            replay = replay_of(encoder, grid, call)
            name = f"{case}, grid on {where}"
            found[name] = in_turns(call, replay)
            if case == MORE:
                found[f"{name}, cold"] = in_turns(call, replay, _something_else, COLD_ROUNDS)
                found[f"{name}, nobody watching"] = _unwatched(encoder, call, replay)
            steps[name] = timeline(encoder, call)
    return found | {"steps": steps}


def replay_of(encoder: FusedEncoder, grid: Grid, call: Callable[[], Any]) -> Callable[[], None]:
    """The graph that `call` replays, its content in place."""
    manager = encoder.graphs().manager
    before = dict(manager.stats.replays)
    call()
    (budget,) = (b for b, n in manager.stats.replays.items() if n != before.get(b, 0))
    encoder.graphs().encoder.load_grid(budget, tuple(grid))
    return manager.graph(budget).replay


def _unwatched(encoder: FusedEncoder, call: Callable[[], Any], replay: Callable[[], None]) -> float:
    with mock.patch.object(encoder, "config", dataclasses.replace(encoder.config, watch_data=False)):
        return in_turns(call, replay)


def _something_else() -> None:
    """Some tens of milliseconds that leave the CPU's caches full of other code and data."""
    json.loads(json.dumps([{str(i): [i, float(i)]} for i in range(5000)]))
    torch.ones(2**24).sum()  # 64 MiB


def in_turns(
    call: Callable[[], Any],
    replay: Callable[[], None],
    before: Callable[[], None] = lambda: None,
    count: int = ROUNDS,
) -> float:
    """Microseconds by which a call, waited for, takes longer than a replay between two events; medians.

    Args:
        before: runs ahead of each call.
    """
    walls, graphs = [], []
    for i in range(count + 5):
        before()
        torch.cuda.synchronize()
        begun = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        wall = time.perf_counter_ns() - begun
        graph = 1e3 * gpu_ms(replay, DEVICE)
        if i >= 5:  # the first ones warm up
            walls.append(wall / 1e3)
            graphs.append(graph)
    return statistics.median(walls) - statistics.median(graphs)


def timeline(encoder: FusedEncoder, call: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """By step: microseconds from the call's begin to its first run, and those of all its runs, medians.

    Steps hold one another: "begin" holds "load_inputs" and "replay", "done" holds "true" if the walk is under it. Each clock
    adds some half a microsecond to what holds it.
    """
    rounds: list[dict[str, list[tuple[int, int]]]] = []
    for i in range(ROUNDS + 5):
        seen: dict[str, list[tuple[int, int]]] = {}
        with _watched(encoder, seen):
            _wait()
            begun = time.perf_counter_ns()
            call()
            done = time.perf_counter_ns()
            _wait()
            waited = time.perf_counter_ns()
        seen |= {"call": [(begun, done)], "waiting for the GPU": [(done, waited)]}
        if i >= 5:
            rounds.append({name: [(a - begun, b - begun) for a, b in spans] for name, spans in seen.items()})
    names = sorted(rounds[-1], key=lambda name: rounds[-1][name][0][0])
    return {name: _medians([seen[name] for seen in rounds if name in seen]) for name in names}


def _medians(rounds: list[list[tuple[int, int]]]) -> dict[str, float]:
    return {
        "at_us": statistics.median(spans[0][0] for spans in rounds) / 1e3,
        "us": statistics.median(sum(b - a for a, b in spans) for spans in rounds) / 1e3,
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _watched(encoder: FusedEncoder, seen: dict[str, list[tuple[int, int]]]) -> Iterator[None]:
    """Notes when each step begins and ends, within."""
    graphs = encoder.graphs()
    manager, captured, weights = graphs.manager, graphs.encoder, encoder.weights
    steps: list[tuple[Any, str]] = [
        (speculative_replay, "begin"), (weights, "mark"), (captured, "load"), (captured, "store"),
        (manager._capture, "before_use"), (manager._capture, "after_use"), (fused_encoder.fallback, "reason_of_call"),
        (fused_encoder, "check_inputs"), (fused_encoder, "run"), (weights, "read_back"), (weights, "_unchanged"),
        (PendingRead, "wait"), (speculative_replay.SpeculativeReplay, "accept"),
    ]  # fmt: skip

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter_ns()
            try:
                return run(*arguments, **named)
            finally:
                seen.setdefault(name, []).append((begun, time.perf_counter_ns()))

        return step

    with contextlib.ExitStack() as stack:
        for owner, name in steps:
            stack.enter_context(mock.patch.object(owner, name, timed(name, getattr(owner, name))))
        replays = {b: _Replay(timed("replay", graph.replay)) for b, graph in manager._graphs.items()}
        stack.enter_context(mock.patch.dict(manager._graphs, replays))
        yield


class _Replay:
    """A graph whose replay is timed."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay
