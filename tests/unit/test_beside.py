"""Deepstack mergers beside the blocks: which, on what memory, and that their place in time changes nothing. The latter
also of one beside the last merger.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.graphs.limits import check_limits
from fusedvit.graphs.manager import GraphManager
from fusedvit.graphs.packing import Batch
from fusedvit.graphs.side_stream import NoSideStream
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.buffers import EncoderBuffers
from fusedvit.model.merger_overlap import _best
from fusedvit.model.ops import TORCH
from fusedvit.model.plan import EncoderPlan, chosen_for, plan_for
from fusedvit.runtime.ahead_of_time import QWEN3_VL_8B
from fusedvit.runtime.captured_encoder import EncoderProgram
from tests.support.branches import A100, H200, Late, Watch, beside_of, buffers_for, outputs, planned
from tests.support.encoding import Encoder, Outputs
from tests.support.towers import GRIDS, Grid, assert_bitwise, patches_of, pixels_for, vision_tower
from tests.unit.graphs.stand_in import CpuCapture

CPU = torch.device("cpu")
DEEPSTACK = [3, 0, 2, 4]  # of five blocks, not in their order; after the last one nothing is left to be beside of
Apart = tuple[tuple[int, ...], int | None]  # mergers beside the blocks, and the one beside the last
APART: dict[str, Apart] = {
    "all": ((1, 2, 0), None),
    "one": ((2,), None),
    "all, one at the end": ((1, 2), 0),
    "one at the end": ((), 2),
}


def planner(apart: Apart) -> Callable[..., EncoderPlan]:
    return lambda spec, tokens, dtype, target: beside_of(plan_for(spec, tokens, dtype, target), *apart)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(vision_tower(depth=5, deepstack_visual_indexes=DEEPSTACK), TORCH)


@pytest.mark.parametrize("grid", [GRIDS["mix"], GRIDS["one row"]], ids=["mix", "one row"])
@pytest.mark.parametrize("name", APART)
def test_when_a_merger_runs_changes_no_bit(encoder: Encoder, name: str, grid: Grid) -> None:
    """At once, one fork behind, or at the very end: all between these is what a GPU may do. And in line."""
    plan = beside_of(encoder.plan(patches_of(grid)), *APART[name])
    pixels = pixels_for(vision_tower(), grid)
    answers = []
    for branch in (NoSideStream(), Late(1), Late()):
        for room in (len(plan.apart), 0):  # without memory of their own they are in line, whatever the branch
            buffers = buffers_for(encoder, grid, room)
            encoder.load(buffers, grid, pixels)
            answers.append(outputs(encoder, buffers, plan, branch))
        assert isinstance(branch, NoSideStream) or branch.forks == len(plan.apart)
    assert all(bool(answer["merged"].isfinite().all()) for answer in answers)
    for answer in answers[1:]:
        assert_bitwise(answer, answers[0])


# memory


def watched(encoder: Encoder, apart: Apart, spoil: Callable[[EncoderBuffers], EncoderBuffers]) -> list[str]:
    grid = GRIDS["mix"]
    plan = beside_of(encoder.plan(patches_of(grid)), *apart)
    buffers, watch = spoil(buffers_for(encoder, grid, len(plan.apart))), Watch()
    encoder.load(buffers, grid, pixels_for(vision_tower(), grid))
    outputs(encoder, buffers, plan, watch, watch.ops)
    assert not watch.open, "joined"
    return watch.conflicts


@pytest.mark.parametrize("name", APART)
def test_what_is_concurrent_shares_no_memory(encoder: Encoder, name: str) -> None:
    assert watched(encoder, APART[name], lambda buffers: buffers) == []


@pytest.mark.parametrize(
    ("name", "apart"), [("hidden", "all"), ("stats", "all"), ("inner", "all"), ("inner", "one at the end")]
)
def test_shared_memory_would_be_seen(encoder: Encoder, name: str, apart: str) -> None:
    def spoil(b: EncoderBuffers) -> EncoderBuffers:
        assert b.apart is not None
        common = {"hidden": b.hidden.expand(3, *b.hidden.shape), "stats": b.stats.expand(3, -1), "inner": b.wide}
        return replace(b, apart=replace(b.apart, **{name: common[name]}))

    assert watched(encoder, APART[apart], spoil) != []


# in a graph


@pytest.mark.parametrize("name", ["all", "all, one at the end"])
def test_graphs_of_several_budgets_in_the_same_buffers(encoder: Encoder, name: str) -> None:
    """On the stand-in for capture; whose replays come late, as on a GPU, and are none the worse for it."""
    branch, spec = Late(), encoder.spec
    programs = [EncoderProgram(spec, TORCH, torch.float32, CPU, lambda: encoder.weights, branch, planner(APART[name]))]
    programs.append(EncoderProgram(spec, TORCH, torch.float32, CPU, lambda: encoder.weights))
    managers = [GraphManager(check_limits((4, 16, 64), 4, 8), program, CpuCapture()) for program in programs]
    grids: list[Grid] = [[(1, 8, 8)], [(1, 2, 2)], [(3, 4, 6)], [(1, 4, 4)], [(1, 16, 16)], [(1, 2, 4)]]
    for seed, grid in enumerate(grids):
        tokens = patches_of(grid)
        budget = next(b for b in (4, 16, 64) if 4 * b >= tokens)
        got = []
        for program, manager in zip(programs, managers, strict=True):

            def load(budget: int, program: EncoderProgram = program) -> None:
                program.load_grid(budget, tuple(grid))  # noqa: B023
                program.buffers(budget).pixels[:tokens] = pixels_for(vision_tower(), grid, seed=seed)  # noqa: B023

            def unload(budget: int, program: EncoderProgram = program) -> None:
                part = program.buffers(budget)
                merged = part.merged[:, : tokens // 4].clone()  # noqa: B023
                got.append({"hidden": part.hidden[:tokens].clone(), "merged": merged})  # noqa: B023

            assert manager.replay(Batch(budget, ()), load, unload)
        assert_close(*got)
    assert branch.forks == 3 * (len(grids) + 2 * 3), "each budget's rehearsal and capture too"
    more = managers[0].held_bytes() - managers[1].held_bytes()
    whole = programs[0].whole()
    assert whole.apart is not None and whole.apart.hidden.shape == (3, 256, spec.hidden_size)
    assert more == sum(t.nbytes for t in vars(whole.apart).values()) > 3 * whole.hidden.nbytes
    assert programs[0].buffers(4).apart is not None and programs[1].whole().apart is None


def assert_close(a: Outputs, b: Outputs) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4)


# what is planned


@pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
@pytest.mark.parametrize("rows", [256, 448, 704, 768])
def test_small_budgets_of_a_deepstack_tower_have_mergers_beside(rows: int, on_hopper: None) -> None:
    plan = planned(rows)
    assert plan.beside is not None and plan.beside.mergers[0] == 0
    narrow = plan.narrowed()
    for name, config in plan.beside.chain:
        assert getattr(narrow, name) == config
        if "attention" in name:
            assert config.block_m == getattr(plan, name).block_m, "one list of tiles"
            assert config.max_programs <= config.ctas * (H200.num_sms - plan.beside.sms)
        elif isinstance(config, HopperSwapABConfig):
            tiles = config.tiles(rows, {"qkv": 3456, "proj": 1152, "fc1": 4352, "fc2": 1152}[name])
            assert tiles <= H200.num_sms - plan.beside.sms, "one wave"
        elif config.splits == 1:
            assert config.max_programs <= H200.num_sms - plan.beside.sms
    for config in (plan.beside.fc1, plan.beside.fc2):
        assert config.max_programs == plan.beside.sms and config.splits == 1 and not config.pdl
    assert plan == planned(rows) and plan.choices() == replace(plan, beside=None).choices()
    ends = [QWEN3_VL_8B.deepstack[m] + 1 + n for m, n in zip(plan.beside.mergers, plan.beside.blocks, strict=True)]
    assert all(end <= QWEN3_VL_8B.depth for end in ends)


@pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
def test_mergers_that_would_be_beside_many_blocks_are_in_line(on_hopper: None) -> None:
    """At 784 patches six SMs are left, on which a merger takes nine blocks: an H200 lost what it gained by two."""
    assert planned(784).beside is None
    with mock.patch("fusedvit.model.merger_overlap.MEANWHILE", 0.0):
        chosen = chosen_for(QWEN3_VL_8B, 784, torch.bfloat16, H200, Table())
        found = _best.__wrapped__(QWEN3_VL_8B, tuple(chosen.items()), torch.bfloat16, H200)
    assert found is not None and found.sms == 6 and sum(found.blocks) > 15


@pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
@pytest.mark.parametrize(
    "other",
    [
        {"rows": 4096},
        {"spec": replace(QWEN3_VL_8B, deepstack=())},
        {"spec": replace(QWEN3_VL_8B, deepstack=(26,))},
        {"dtype": torch.float32},
        {"target": A100},
    ],
    ids=["many rows", "no deepstack", "after the last block", "fp32", "another GPU"],
)
def test_else_all_are_in_line(other: dict[str, Any], on_hopper: None) -> None:
    plan = planned(**({"rows": 256} | other))
    assert plan.beside is None and plan.paired is None and plan.apart == () and plan.narrowed() is plan
