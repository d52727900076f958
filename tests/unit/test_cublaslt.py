"""An encoder part of which is in the cublaslt form: its bits depend on the rows of the buffers, so that eager runs and
replays have as many."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedvit.bench.poison import poison_buffers
from fusedvit.graphs.limits import check_limits
from fusedvit.kernels import cublaslt
from fusedvit.kernels.cublaslt import CublasLtConfig
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.merger_overlap import priced
from fusedvit.model.ops import TORCH, Ops
from fusedvit.model.plan import EncoderPlan, chosen_for, plan_for, tasks
from fusedvit.runtime import runner
from fusedvit.runtime.ahead_of_time import QWEN3_VL_8B
from fusedvit.runtime.captured_encoder import EncoderProgram
from fusedvit.runtime.runner import Tower, run_eager
from tests.support.encoding import Encoder
from tests.support.towers import Grid, assert_bitwise, items_of, patches_of, pixels_for, twin, vision_tower

CPU, BF16 = torch.device("cpu"), torch.bfloat16
LADDER, UNIT = (4, 16, 64), 4
LIBRARY = CublasLtConfig()


def planned(*arguments: Any) -> EncoderPlan:
    return replace(plan_for(*arguments), merger_fc2=LIBRARY)


class Watched:
    """Operations on the CPU, the library's product in its own form; notes how many rows that is asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ops: Ops = replace(TORCH, linear=self._linear)

    def _linear(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if arguments[-1] != LIBRARY:
            return TORCH.linear(x, *arguments)
        self.rows.append(x.shape[0])
        return cublaslt.linear(x, *arguments)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(twin(vision_tower(), BF16), TORCH)


@pytest.fixture
def eager(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, torch.Tensor]]:
    """(watched operations, grid, pixels, planner) -> an eager run's outputs."""

    def run(watch: Watched, grid: Grid, pixels: torch.Tensor, plan: Any = planned) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(runner, "plan_for", plan)
        monkeypatch.setattr(runner, "ops_for", lambda device: watch.ops)
        weights: Any = SimpleNamespace(get=lambda: encoder.weights)
        out = run_eager(Tower(encoder.spec, weights, CPU, BF16, LADDER), pixels, items_of(grid))
        return {"hidden": out.hidden, "merged": out.merged}

    return run


def replayed(encoder: Encoder, watch: Watched, grid: Grid, pixels: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """What the graph of `size` merged tokens runs, every buffer poisoned."""
    program = EncoderProgram(encoder.spec, watch.ops, BF16, CPU, lambda: encoder.weights, planner=planned)
    program.allocate(check_limits(LADDER, 4, 8))
    tokens = patches_of(grid)
    poison_buffers(program.whole())
    program.load_grid(size, tuple(grid))
    part = program.buffers(size)
    part.pixels[:tokens] = pixels
    program.run(size)
    return {"hidden": part.hidden[:tokens], "merged": part.merged[:, : tokens // UNIT]}


@pytest.mark.parametrize(
    "grid, size",
    [([(1, 2, 2)], 4), ([(1, 8, 4), (1, 2, 10)], 16), ([(1, 8, 8)], 16), ([(3, 4, 6)], 64)],
    ids=["smallest", "two", "full", "video"],
)
def test_eager_runs_have_a_replays_bits(encoder: Encoder, eager: Any, grid: Grid, size: int) -> None:
    pixels, ours, theirs = pixels_for(vision_tower(), grid).to(BF16), Watched(), Watched()
    got = eager(ours, grid, pixels)
    assert_bitwise(got, replayed(encoder, theirs, grid, pixels, size))
    assert set(ours.rows) == set(theirs.rows) == {size}
    for t in got.values():
        assert t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes, "the caller's, and no more"


def test_past_the_ladder_rows_are_those_of_the_budget(encoder: Encoder, eager: Any) -> None:
    grid: Grid = [(1, 18, 18)]
    pixels, watch, usual = pixels_for(vision_tower(), grid), Watched(), Watched()
    got = eager(watch, grid, pixels)
    assert set(watch.rows) == {budget(324) // UNIT} == {96}
    plain = eager(usual, grid, pixels, plan_for)
    assert not usual.rows and [t.shape for t in plain.values()] == [t.shape for t in got.values()]
    torch.testing.assert_close(got, plain, rtol=0.02, atol=0.02)


def test_other_plans_run_on_exactly_enough(encoder: Encoder, eager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = runner.allocate
    monkeypatch.setattr(
        runner, "allocate", lambda spec, capacity, *a: made.append(capacity.tokens) or real(spec, capacity, *a)
    )
    grid: Grid = [(1, 8, 4)]
    eager(Watched(), grid, pixels_for(vision_tower(), grid), plan_for)
    eager(Watched(), grid, pixels_for(vision_tower(), grid))
    assert made == [32, 64]


H200 = Target(name="NVIDIA H200")


@pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
@pytest.mark.parametrize("rows", [256, 896])
def test_mergers_beside_others_stay_there(rows: int, on_hopper: None) -> None:
    """In Hopper's form: a last merger alone is the library's then, and those that are in line."""
    key = next(task.key for task in tasks(QWEN3_VL_8B, rows, BF16) if task.name == "merger_fc2")
    table = Table({key: LIBRARY})
    ours, usual = (plan_for(QWEN3_VL_8B, rows, BF16, H200, t) for t in (table, Table()))
    assert ours.merger_fc2 == LIBRARY and ours.beside == usual.beside and ours.paired == usual.paired
    assert (usual.beside is not None) == (rows == 256) == (usual.paired is None)
    chosen = [chosen_for(QWEN3_VL_8B, rows, BF16, H200, t) for t in (table, Table())]
    assert priced(chosen[0], BF16, H200) == chosen[1] == priced(chosen[1], BF16, H200)
