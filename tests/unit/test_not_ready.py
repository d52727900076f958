"""Calls while kernels are compiled: the original code, then fused, never anything in between. On the CPU, with graphs
that stand in and a compiler that is told when it is done."""

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.api import fuse
from fusedvit.config import FuseConfig
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.kernels import launch
from fusedvit.kernels.launch import KernelFailed, KernelMissing
from fusedvit.runtime.captured_encoder import CapturedEncoder, TowerGraphs
from fusedvit.runtime.kernel_loader import KernelLoader, Run
from tests.support.fake_compiler import FakeCompiler
from tests.support.graphs_on_cpu import GRID, LIMITS, answer, close, same
from tests.support.towers import Call, tiny_tower
from tests.unit.graphs.stand_in import graphs_on_cpu
from tests.unit.test_kernel_loader import compiler, kernels_of, until

__all__ = ["compiler"]  # a fixture
NOT_READY = "kernels not ready"
TWO_BATCHES = [(1, 16, 16), (1, 4, 6)]  # 64 merged tokens and 6


class Fused:
    """A fused tower whose kernels `compiler` compiles."""

    def __init__(self, compiler: FakeCompiler, graphs: TowerGraphs | None, handle: FusedEncoder, now: bool) -> None:
        runtime = handle.prepared.runtime
        assert runtime is not None
        self.tower, self.handle, self.graphs = handle.tower, handle, graphs
        ladder = () if graphs is None else LIMITS.token_budgets
        self.loader = KernelLoader(compiler.launch, handle.weights.get, ladder, compiler)
        limits = {} if graphs is not None else {"graphs": None, "no_graphs": "graphs off", "limits": None}
        handle.prepared.runtime = replace(runtime, kernels=self.loader, compile_now=now, **limits)

    def counts(self) -> tuple[int, int]:
        """Calls that ran fused, and calls that waited for kernels in the original code."""
        stats = self.handle.stats()
        return stats["fused"], stats["original"].get(NOT_READY, 0)

    def ready(self) -> set[int]:
        """Budgets whose graphs have their kernels."""
        return {run.graph_budget for run in self.loader.ready if run.graph_budget}


@contextlib.contextmanager
def launching(compiler: FakeCompiler) -> Iterator[None]:
    """Within it a capture launches the kernels that its run has."""
    run = CapturedEncoder.run

    def launched(encoder: CapturedEncoder, budget: int) -> None:
        if launch.from_cache() is not None:
            compiler.launch(Run((0,), graph_budget=budget), None)
        run(encoder, budget)

    with mock.patch.object(CapturedEncoder, "run", launched):
        yield


@pytest.fixture
def fused(compiler: FakeCompiler, request: pytest.FixtureRequest) -> Iterator[Fused]:
    options: dict[str, Any] = dict(getattr(request, "param", {}))
    with_graphs, now = options.pop("graphs", True), options.pop("now", False)
    tower = tiny_tower()
    handle = fuse(tower, FuseConfig(**options))
    handle.refresh()
    with torch.inference_mode(), graphs_on_cpu(handle, LIMITS) as graphs:
        yield Fused(compiler, graphs if with_graphs else None, handle, now)


def test_original_until_it_is_ready_then_fused_and_the_same_bits(
    compiler: FakeCompiler, fused: Fused, caplog: pytest.LogCaptureFixture
) -> None:
    pixels = Call.of(fused.tower, GRID).pixels
    with caplog.at_level(logging.WARNING, "fusedvit"):
        before = [answer(fused.tower, pixels, GRID) for _ in range(3)]
    assert fused.counts() == (0, 3) and fused.graphs is not None and fused.graphs.manager.stats.captures == 0
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and said[0].startswith("fusedvit: ") and NOT_READY in said[0]
    assert f"original code, 3 calls: {NOT_READY}" in fused.handle.report()
    until(lambda: "own 16 True" in compiler.names())
    compiler.finish_all()
    until(lambda: 16 in fused.ready())
    after = [answer(fused.tower, pixels, GRID) for _ in range(3)]
    assert fused.counts() == (3, 3)
    assert all(same(after[0], outputs) for outputs in after)
    assert all(close(after[0], outputs) for outputs in before)


def test_the_first_call_is_fused_where_the_cache_has_its_kernels(compiler: FakeCompiler, fused: Fused) -> None:
    compiler.cached.update(kernels_of(Run((0,), graph_budget=16)))
    pixels = Call.of(fused.tower, GRID).pixels
    with launching(compiler):
        answers = [answer(fused.tower, pixels, GRID) for _ in range(2)]
        assert fused.counts() == (2, 0) and not compiler.sent and same(*answers)
        other = [(1, 16, 16)]
        answer(fused.tower, Call.of(fused.tower, other).pixels, other)
    assert fused.counts() == (2, 1)
    until(lambda: "own 64 True" in compiler.names())
    assert not set(compiler.names()) & compiler.cached


def test_a_call_of_two_budgets_captures_one_at_a_time(compiler: FakeCompiler, fused: Fused) -> None:
    assert fused.graphs is not None
    compiler.at_once = True
    pixels = Call.of(fused.tower, TWO_BATCHES).pixels
    answer(fused.tower, pixels, TWO_BATCHES)
    until(lambda: fused.ready() >= {16, 64})
    captures = []
    while not fused.counts()[0]:
        answer(fused.tower, pixels, TWO_BATCHES)
        captures.append(fused.graphs.manager.stats.captures)
        assert len(captures) < 9
    assert captures == [1, 2]


@pytest.mark.parametrize("fused", [{"graphs": False}], indirect=True)
def test_without_graphs_too(compiler: FakeCompiler, fused: Fused) -> None:
    pixels = Call.of(fused.tower, GRID).pixels
    answer(fused.tower, pixels, GRID)
    assert fused.counts() == (0, 1)
    until(lambda: len(compiler.names()) == 3)
    assert [name for name in compiler.names() if name.startswith("own")] == ["own 64 False"]
    compiler.finish_all()
    until(lambda: any(not run.graph_budget for run in fused.loader.ready))
    answer(fused.tower, pixels, GRID)
    assert fused.counts() == (1, 1)


@pytest.mark.parametrize("fused", [{"now": True}], indirect=True)
def test_now_waits(compiler: FakeCompiler, fused: Fused) -> None:
    compiler.at_once = True
    answer(fused.tower, Call.of(fused.tower, GRID).pixels, GRID)
    assert fused.counts() == (1, 0) and all(request.urgent for request in compiler.sent)
    assert set(compiler.names()) == set(kernels_of(Run((0,), graph_budget=16)))


@pytest.mark.parametrize("cached", [0, 1, len(LIMITS.token_budgets)])
def test_warmup_waits_for_kernels_that_are_missing(compiler: FakeCompiler, fused: Fused, cached: int) -> None:
    """Where all are there, nothing is listed or sent: captures take them from the cache."""
    compiler.at_once, budgets = True, sorted(LIMITS.token_budgets)
    there = {name for budget in budgets[len(budgets) - cached :] for name in kernels_of(Run((0,), graph_budget=budget))}
    compiler.cached.update(there)
    listed = []

    def lists(of: Run, weights: Any) -> None:
        listed.append(of)
        compiler.launch(of, weights)

    with launching(compiler), mock.patch.object(fused.loader, "_launch", lists):
        fused.handle.warmup(progress=iter)
    assert fused.ready() == set(budgets)
    assert fused.graphs is not None and fused.graphs.manager.stats.captures == len(budgets)
    assert len(listed) == (0 if cached == len(budgets) else len(budgets))
    assert not there & set(compiler.names()) and bool(compiler.sent) == bool(listed)


def test_why_nothing_can_be_compiled_is_in_the_report(compiler: FakeCompiler, fused: Fused) -> None:
    compiler.give_up("OSError: No space left on device")
    answer(fused.tower, Call.of(fused.tower, GRID).pixels, GRID)
    assert fused.counts() == (0, 1) and "No space left on device" in fused.handle.report()


@pytest.mark.parametrize("fused", [{"now": True}], indirect=True)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), UnicodeEncodeError("ascii", "\xe9", 0, 1, "no name of a cache")]
)
def test_who_waits_where_no_compiler_has_room_runs_the_original_code(
    error: Exception, compiler: FakeCompiler, fused: Fused, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk the program is given up, and a launch that compiles here has no more room than it. So it is with a
    cache that cannot be named in the locale."""
    compiler.give_up("no room")
    launched = []

    def full(encoder: CapturedEncoder, budget: int) -> None:
        launched.append(budget)
        raise KernelMissing if launch.from_cache() is not None else error

    pixels = Call.of(fused.tower, GRID).pixels
    with mock.patch.object(CapturedEncoder, "run", full), caplog.at_level(logging.WARNING, "fusedvit"):
        for _ in range(3):
            assert all(rows.isfinite().all() for rows in answer(fused.tower, pixels, GRID))
        assert fused.counts() == (0, 3) and launched == [16], "it is tried once"
        assert [NOT_READY in record.getMessage() for record in caplog.records].count(True) == 1
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            fused.handle.warmup(progress=iter)
    assert str(error) in fused.handle.report()


def test_a_kernel_that_no_backend_compiles_leaves_the_original_code(compiler: FakeCompiler, fused: Fused) -> None:
    compiler.at_once = True
    pixels = Call.of(fused.tower, GRID).pixels
    answer(fused.tower, pixels, GRID)
    until(lambda: 16 in fused.ready())
    with mock.patch("fusedvit.runtime.runner._launch_steps", side_effect=KernelFailed("ptxas: no")):
        answer(fused.tower, pixels, GRID)
    assert fused.counts() == (0, 2) and "ptxas: no" in fused.handle.report()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    "device, options, expected", [("cuda", {}, 1), ("cuda", {"compile": "now"}, 0), ("cpu", {}, 0)]
)
def test_on_a_gpu_the_code_is_read_when_a_tower_is_fused(
    device: str, options: Any, expected: int, cached: bool
) -> None:
    """The first call need not, nor collect what the imports left, nor hash Triton's files to look into its cache, for
    which a call waits only if there is something in it."""
    tower = tiny_tower()
    handle, parameter = fuse(tower, FuseConfig(**options)), SimpleNamespace(device=torch.device(device))
    with (
        mock.patch.object(handle.weights, "first_parameter", lambda: parameter),
        mock.patch("fusedvit.fused_encoder.collect_garbage") as collect,
        mock.patch("fusedvit.fused_encoder.hash_compiler") as hashed,
        mock.patch("fusedvit.runtime.compile_service.CompileService.hash_early") as begun,
        mock.patch("fusedvit.runtime.compile_service.CompileService.is_idle_with_cache", lambda self: cached),
        mock.patch("fusedvit.checks.checked_tower.CheckedTower.reason") as reason,
    ):
        handle.check_early()
    assert (reason.call_count, collect.call_count) == (expected, expected)
    assert (hashed.call_count, begun.call_count) == (expected * cached, expected * (not cached))
