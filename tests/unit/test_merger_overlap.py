"""Deepstack mergers overlapped with blocks: which, in what memory, and that their order in time changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedvit.bench.towers import cast_parameters_
from fusedvit.graphs.limits import check_limits
from fusedvit.graphs.manager import GraphManager
from fusedvit.graphs.packing import Batch
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from fusedvit.model.buffers import EncoderBuffers
from fusedvit.model.encoder import encode
from fusedvit.model.merger_overlap import MERGER_SHARE
from fusedvit.model.ops import TORCH, Ops
from fusedvit.model.plan import EncoderPlan, plan_for
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import UNFOLDED
from fusedvit.runtime.captured_encoder import CapturedEncoder
from tests.support.encoding import Encoder, Outputs
from tests.support.overlaps import A100, H200, Late, Recorder, buffers_for, outputs, overlapping, planned
from tests.support.specs import QWEN3_VL_4B, QWEN3_VL_8B
from tests.support.towers import GRIDS, Grid, assert_bitwise, patches_of, pixels_for, vision_tower
from tests.unit.graphs.stand_in import CpuCapture

CPU = torch.device("cpu")
DEEPSTACK = [
    3,
    0,
    2,
    4,
]  # of five blocks, not in their order; after the last one there is no block left to overlap with
OVERLAPS: dict[str, tuple[int, ...]] = {"all": (1, 2, 0), "one": (2,), "two": (1, 2)}


def planner(mergers: tuple[int, ...]) -> Callable[..., EncoderPlan]:
    return lambda spec, tokens, dtype, target: overlapping(plan_for(spec, tokens, dtype, target), mergers)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    """In bf16 a merger's norm is folded into its first layer, in fp32 it is not."""
    tower = vision_tower(depth=5, deepstack_visual_indexes=DEEPSTACK)
    cast_parameters_(tower, request.param)
    return Encoder(tower, TORCH)


@pytest.mark.parametrize("grid", [GRIDS["mix"], GRIDS["one row"]], ids=["mix", "one row"])
@pytest.mark.parametrize("name", OVERLAPS)
def test_when_a_merger_runs_changes_no_bit(encoder: Encoder, name: str, grid: Grid) -> None:
    """At once, one fork behind, or at the very end: all between these is what a GPU may do. And in line."""
    plan = overlapping(encoder.plan(patches_of(grid)), OVERLAPS[name])
    pixels = pixels_for(vision_tower(), grid)
    answers = []
    for side in (None, Late(1), Late()):
        for room in (len(plan.overlapped), 0):  # without memory of their own they are in line, whatever the stream
            buffers = buffers_for(encoder, grid, room)
            encoder.load(buffers, grid, pixels)
            answers.append(outputs(encoder, buffers, plan, side))
        assert side is None or side.forks == len(plan.overlapped)
    assert all(bool(answer["merged"].isfinite().all()) for answer in answers)
    for answer in answers[1:]:
        assert_bitwise(answer, answers[0])


@pytest.mark.parametrize("deepstack", [[2], [2, 8], [0, 1, 8], [5, 3]], ids=str)
def test_a_rehearsal_launches_what_all_blocks_do(deepstack: list[int]) -> None:
    """A block behind overlapped ones reads statistics in parts of their width, for which there are other kernels."""
    tower = vision_tower(depth=10, deepstack_visual_indexes=deepstack)
    cast_parameters_(tower, torch.bfloat16)
    encoder, grid = Encoder(tower, TORCH), GRIDS["one row"]
    plan = encoder.plan(patches_of(grid))
    plan = overlapping(replace(plan, fc2=replace(plan.fc2, block_n=64)), tuple(range(len(deepstack))))
    assert plan.overlap is not None
    blocks = (*plan.overlap.blocks, ("qkv", replace(plan.qkv, max_programs=1)))
    plan = replace(plan, overlap=replace(plan.overlap, blocks=blocks))

    def launched(rehearsal: bool) -> set[Any]:
        found = set()

        def note(*given: Any) -> None:
            e, config = given[-2:]
            found.add((config, e.norm and e.norm.stats.width, e.stats and e.stats.width))

        noted = Ops(**dict.fromkeys(vars(TORCH), lambda *_: None) | {"linear": note})
        buffers = buffers_for(encoder, grid, len(deepstack))
        encode(encoder.spec, encoder.weights, buffers, noted, plan, rehearsal=rehearsal)
        return found

    assert launched(rehearsal=True) == launched(rehearsal=False)


# memory


def conflicts(
    encoder: Encoder, mergers: tuple[int, ...], spoil: Callable[[EncoderBuffers], EncoderBuffers]
) -> list[str]:
    grid = GRIDS["mix"]
    plan = overlapping(encoder.plan(patches_of(grid)), mergers)
    buffers, recorder = spoil(buffers_for(encoder, grid, len(plan.overlapped))), Recorder()
    encoder.load(buffers, grid, pixels_for(vision_tower(), grid))
    outputs(encoder, buffers, plan, recorder, recorder.ops)
    assert not recorder.open, "joined"
    return recorder.conflicts


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_is_concurrent_shares_no_memory(encoder: Encoder, name: str) -> None:
    assert conflicts(encoder, OVERLAPS[name], lambda buffers: buffers) == []


@pytest.mark.parametrize("name", ["hidden", "statistics or norm", "inner"])
def test_shared_memory_would_be_noticed(encoder: Encoder, name: str) -> None:
    if name == "statistics or norm":
        name = "normalised" if encoder.dtype in UNFOLDED else "stats"

    def spoil(b: EncoderBuffers) -> EncoderBuffers:
        assert b.overlap is not None
        common = {"hidden": b.hidden.expand(3, *b.hidden.shape), "stats": b.stats.expand(3, -1), "inner": b.wide}
        common["normalised"] = b.context
        return replace(b, overlap=replace(b.overlap, **{name: common[name]}))

    assert conflicts(encoder, OVERLAPS["all"], spoil) != []


# in a graph


@pytest.mark.parametrize("name", ["all"])
def test_graphs_of_several_budgets_in_the_same_buffers(encoder: Encoder, name: str) -> None:
    """On the stand-in for capture; whose replays come late, as on a GPU, and are none the worse for it."""
    side, spec = Late(), encoder.spec
    programs = [
        CapturedEncoder(spec, TORCH, torch.float32, CPU, lambda: encoder.weights, side, planner(OVERLAPS[name]))
    ]
    programs.append(CapturedEncoder(spec, TORCH, torch.float32, CPU, lambda: encoder.weights))
    managers = [GraphManager(check_limits((4, 16, 64), 4, 8), program, CpuCapture()) for program in programs]
    grids: list[Grid] = [[(1, 8, 8)], [(1, 2, 2)], [(3, 4, 6)], [(1, 4, 4)], [(1, 16, 16)], [(1, 2, 4)]]
    for seed, grid in enumerate(grids):
        tokens = patches_of(grid)
        budget = next(b for b in (4, 16, 64) if 4 * b >= tokens)
        got = []
        for program, manager in zip(programs, managers, strict=True):

            def load(budget: int, program: CapturedEncoder = program) -> None:
                pixels = pixels_for(vision_tower(), grid, seed=seed)  # noqa: B023
                program.load(budget, program.grid(tuple(grid)), pixels)  # noqa: B023

            def unload(budget: int, program: CapturedEncoder = program) -> None:
                part = program.buffers(budget)
                merged = torch.stack([plane[: tokens // 4] for plane in part.merged])  # noqa: B023
                got.append({"hidden": part.hidden[:tokens].clone(), "merged": merged})  # noqa: B023

            assert manager.replay(Batch(budget, ()), load, unload)
        assert_close(*got)
    assert side.forks == 3 * (len(grids) + 2 * 3), "each budget's rehearsal and capture too"
    more = managers[0].held_bytes() - managers[1].held_bytes()
    whole = programs[0].whole()
    assert whole.overlap is not None and whole.overlap.hidden.shape == (3, 256, spec.hidden_size)
    assert more == sum(t.nbytes for t in vars(whole.overlap).values()) > 3 * whole.hidden.nbytes
    assert programs[0].buffers(4).overlap is not None and programs[1].whole().overlap is None


def assert_close(a: Outputs, b: Outputs) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4)


# what is planned


@pytest.mark.parametrize(
    ("spec", "rows"), [(QWEN3_VL_8B, 64), (QWEN3_VL_8B, 704), (QWEN3_VL_4B, 256), (QWEN3_VL_4B, 784)]
)
def test_few_rows_overlap_mergers(spec: VisionSpec, rows: int, on_hopper: None) -> None:
    plan = planned(rows, spec)
    overlap, few = plan.overlap, H200.num_sms // MERGER_SHARE
    assert overlap is not None and overlap.mergers == (0, 1, 2)
    block = plan.of_overlapped_block()
    for name, config in overlap.blocks:
        assert getattr(block, name) == config
        if "attention" in name:
            assert config.block_m == getattr(plan, name).block_m, "one list of tiles"
            assert config.max_programs <= config.ctas * (H200.num_sms - few)
        elif not isinstance(config, HopperSwapABConfig):  # that has a program a tile
            assert config.max_programs <= H200.num_sms - few
    for config in (overlap.fc1, overlap.fc2):
        assert config.max_programs == few and not config.pdl
    assert plan.of_deepstack(1).merger_fc1 == overlap.fc1 and plan == planned(rows, spec)


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 784},
        {"rows": 4096},
        {"spec": replace(QWEN3_VL_8B, deepstack=())},
        {"spec": replace(QWEN3_VL_8B, deepstack=(26,))},
        {"dtype": torch.float32},
        {"target": A100},
    ],
    ids=["more rows", "many rows", "no deepstack", "after the last block", "fp32", "another GPU"],
)
def test_otherwise_all_mergers_run_in_line(other: dict[str, Any], on_hopper: None) -> None:
    plan = planned(**({"rows": 256} | other))
    assert plan.overlap is None and plan.overlapped == () and plan.of_overlapped_block() is plan
