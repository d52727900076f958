"""What Python does before a call's graph is launched, when the GPU has nothing to do yet: few function calls."""

import functools
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from fusedvit.checks.checked_tower import CheckedTower
from tests.support.graphs_on_cpu import GRID, Case, case, unpatched
from tests.support.towers import Call

__all__ = ["case", "unpatched"]  # fixtures
MOST = 20  # torch's own and ours; a call of Python is 0.1 us, cold 1 us


def test_few_function_calls_before_the_replay(case: Case) -> None:
    tower, _, graphs = case
    pixels, grid = Call.of(tower, GRID).pixels, torch.tensor(GRID)
    call = functools.partial(tower, pixels, grid_thw=grid)
    for _ in range(3):
        call()
    seen = counted(graphs.encoder, graphs.manager.graph(16), call)
    ours = [name for name in seen if name not in ("load_inputs", "replay")]  # those stand for launches
    assert "begin" in ours and len(ours) <= MOST, ours
    assert graphs.manager.stats.replays == {16: 4} and graphs.manager.stats.mispredictions == 0


class Slow(nn.Parameter):
    """As vLLM's: each fact that it tells runs a function of Python."""

    asked = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_parameters_are_compared_without_code_of_their_class(case: Case) -> None:
    tower, handle, _ = case
    for parameter in tower.parameters():
        parameter.__class__ = Slow
    snapshot, asked = CheckedTower(tower, handle.family, handle.spec).snapshot(), Slow.asked
    assert parameter.dtype == torch.float32 and Slow.asked == asked + 1
    assert snapshot.in_place() and snapshot.unchanged() and not snapshot.trained()
    assert Slow.asked == asked + 1


def counted(program: Any, graph: Any, call: Callable[[], object]) -> list[str]:
    """Names of the Python functions called until `graph` is replayed, less what stands for a launch of a kernel."""
    seen: list[str] = []
    real = program._ops

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    def load_inputs(*arguments: Any) -> torch.Tensor:
        sys.setprofile(None)
        out = real.load_inputs(*arguments)
        sys.setprofile(note)
        return out

    def replay() -> None:
        sys.setprofile(None)
        run()

    run = graph.replay
    ops = SimpleNamespace(**{name: getattr(real, name) for name in vars(real)} | {"load_inputs": load_inputs})
    with mock.patch.object(program, "_ops", ops), mock.patch.object(graph, "replay", replay):
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return seen
