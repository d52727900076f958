"""Replays begun before the grid is read: right ones are accepted, wrong ones run again, bad grids leave no trace."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.checks import fallback
from fusedvit.config import FuseConfig
from fusedvit.runtime import runner, speculative_replay
from fusedvit.runtime.inputs import check_items
from tests.support.graphs_on_cpu import (
    BAD,
    GRID,
    Case,
    answer,
    case,
    close,
    eager,
    noted,
    right,
    same,
    speculated,
    unpatched,
)
from tests.support.towers import Call

__all__ = ["case", "unpatched"]  # fixtures


@pytest.mark.parametrize(("calls", "text"), [(1, "1 replay ("), (2, "2 replays (")])
def test_the_report_counts_replays(case: Case, calls: int, text: str) -> None:
    assert all(right(case, GRID) for _ in range(calls))
    assert text in case[1].report()


def test_only_captured_budgets_are_replayed_before_the_grid_is_read(case: Case) -> None:
    notes = speculated(case)
    assert all(right(case, GRID) for _ in range(3))
    assert notes == [False, True, True]
    stats = case[2].manager.stats
    assert stats.replays == {16: 3} and stats.pieces == 6 and stats.merged_tokens == 42 and stats.mispredictions == 0
    assert case[1].stats()["fused"] == case[1].stats()["calls"] == 3


def test_other_layouts_of_the_same_totals_and_new_totals(case: Case) -> None:
    case[2].manager.ready(16)
    notes = speculated(case)
    for grid in ([(1, 6, 4), (2, 4, 4)], [(2, 4, 4), (1, 4, 6)], [(1, 14, 4)], [(1, 4, 4)], GRID, [(5, 2, 2)]):
        assert right(case, grid)
    assert notes == [True, True, True, False, True, True], "a budget of 4 is not captured yet"
    assert case[2].manager.stats.mispredictions == 0


def test_a_video_over_the_frame_budget_is_a_misprediction(case: Case) -> None:
    """Nine frames are over the limit of eight: as many tokens as an image that goes whole."""
    case[2].manager.ready(16)
    case[2].manager.ready(4)
    video, image = [(9, 2, 2)], [(1, 2, 18)]
    assert right(case, video)
    stats = case[2].manager.stats
    assert stats.mispredictions == 1 and stats.pieces == 2
    assert right(case, image) and stats.mispredictions == 1
    assert not case[2].encoder.buffers(4).grid.any() or right(case, video)


def test_a_replay_of_another_budget_than_the_plan_is_dropped(case: Case) -> None:
    graphs, outputs = case[2], mock.sentinel.outputs
    items = check_items([(1, 4, 4)], 16, 2)
    taken = []
    for budget in graphs.manager.limits.token_budgets:
        replay = speculative_replay.SpeculativeReplay(graphs, 4, 16, budget, None, 0, outputs)
        taken.append(replay.accept(items))
    assert taken == [outputs, *[None] * (len(taken) - 1)] and len(taken) > 1


def test_items_without_frames_are_mispredictions_and_right(case: Case) -> None:
    case[2].manager.ready(16)
    for grid in ([(0, 4, 4), *GRID], [(0, 2**40, 2), *GRID]):
        assert right(case, grid)
    assert case[2].manager.stats.mispredictions == 2


@pytest.mark.parametrize("grid", BAD.values(), ids=BAD)
def test_bad_grids_right_after_a_good_call(case: Case, grid: Any) -> None:
    tower, handle, graphs = case
    pixels = Call.of(tower, GRID).pixels
    want = answer(tower, pixels, GRID)
    notes = speculated(case)
    with pytest.raises(ValueError, match=r"grid_thw") as ours:
        answer(tower, pixels, grid)
    with pytest.raises(ValueError) as plain:
        check_items([list(row) for row in grid], len(pixels), 2)
    assert str(ours.value) == str(plain.value) and notes == [True]
    assert not graphs.encoder.buffers(16).grid.any(), "the replay had no items"
    assert same(answer(tower, pixels, GRID), want)
    assert graphs.manager.stats.mispredictions == 1 and graphs.manager.stats.replays == {16: 2}
    assert handle.stats()["fused"] == 2 and handle.stats()["calls"] == 3


def test_weights_that_change_meanwhile(case: Case) -> None:
    tower, handle, _ = case
    pixels = Call.of(tower, GRID).pixels
    before = [t.clone() for t in answer(tower, pixels, GRID)]
    with torch.inference_mode(False):
        tower.blocks[0].norm1.weight.data.mul_(1.5)
    after = answer(tower, pixels, GRID)
    assert not close(after, before) and close(after, eager(handle, pixels, GRID))
    assert handle.stats()["refreshes"] == 2
    with torch.inference_mode(False), torch.no_grad():
        tower.blocks[0].norm2.weight.mul_(1.5)  # noticed by its version
    assert not same(answer(tower, pixels, GRID), after) and right(case, GRID)


def test_weights_prepared_by_another_thread_meanwhile(case: Case) -> None:
    _, handle, _ = case
    assert right(case, GRID)
    notes, version = speculated(case), handle.weights.version
    real = handle.weights.read_back
    reads = []

    def read_back(*arguments: Any) -> Any:
        reads.append(handle.weights.version)
        if handle.weights.version == version:
            assert handle.weights.prepare() is None
        return real(*arguments)

    mock.patch.object(handle.weights, "read_back", read_back).start()
    assert right(case, GRID)
    assert notes == [True] and reads == [version, version + 1], "the first run may have used either"


@pytest.mark.parametrize("grid", [GRID, [(9, 2, 2)], [(1, 20, 20)]], ids=["one batch", "two batches", "eager"])
def test_one_host_read_a_call(case: Case, grid: Any) -> None:
    tower, handle, _ = case
    assert right(case, grid)
    with mock.patch.object(handle.weights, "read_back", wraps=handle.weights.read_back) as read:
        answer(tower, Call.of(tower, grid).pixels, grid)
    assert read.call_count == 1


@pytest.mark.parametrize("others", [[], GRID], ids=["alone", "with what is replayed"])
def test_what_overflows_runs_item_by_item(case: Case, others: Any) -> None:
    """One large batch would take other memory, and give other bits than the same items elsewhere."""
    tower, handle, _ = case
    grid = [(1, 20, 20), (1, 18, 20), *others]
    with mock.patch("fusedvit.runtime.runner.run_eager", wraps=runner.run_eager) as run:
        assert right(case, grid)
    assert [len(call.args[2]) for call in run.call_args_list] == [1, 1]
    stats, replays = handle.stats(), len(others) > 0
    assert stats["eager_runs"] == {"token budget": 2} and stats["graphs"]["replays"] == replays
    assert stats["graphs"]["hit_rate"] == replays / (replays + 2)


@pytest.mark.parametrize(
    "grid",
    [GRID, [(9, 2, 2)], [(1, 4, 4), (9, 2, 2)], [(1, 16, 16), (1, 4, 4), (1, 12, 12), (1, 2, 2)]],
    ids=["one batch", "a video in two", "with an image", "batches that alternate"],
)
def test_planned_replays_store_their_outputs_in_a_launch_a_span(case: Case, grid: Any) -> None:
    """As those of speculative replays are, bit for bit."""
    tower, handle, graphs = case
    pixels = Call.of(tower, grid).pixels
    answer(tower, pixels, grid)  # captures, which launches one of each budget
    stored = mock.Mock(wraps=graphs.encoder._ops.store_outputs)
    encoder_ops = replace(graphs.encoder._ops, store_outputs=stored)
    with (
        mock.patch.object(graphs.encoder, "_ops", encoder_ops),
        mock.patch.object(speculative_replay, "begin", lambda *given: None),
    ):
        planned = answer(tower, pixels, grid)
    steps = runner.plan_steps(tuple(check_items([*map(list, grid)], len(pixels), 2)), 4, graphs.limits)
    assert stored.call_count == sum(len(step.spans) for step in steps)
    assert same(planned, answer(tower, pixels, grid)) and close(planned, eager(handle, pixels, grid))


def test_the_call_is_checked_under_its_replay(case: Case) -> None:
    tower, handle, graphs = case
    assert right(case, GRID)
    order = noted(
        (graphs.manager, "replay_if_captured"),
        (fallback, "reason_of_call"),
        (handle.weights, "read_back"),
        (handle.weights, "host_unchanged"),
    )
    answer(tower, Call.of(tower, GRID).pixels, GRID)
    assert order == ["replay_if_captured", "reason_of_call", "read_back", "host_unchanged"]


@pytest.mark.parametrize("grid", [GRID, torch.tensor(GRID), torch.tensor(GRID).int()], ids=["list", "int64", "int32"])
def test_a_grid_on_the_host_is_run_before_the_call_is_checked(case: Case, grid: Any) -> None:
    """There is nothing to predict, and nothing waits; a batch of one is run before the weights are read."""
    tower, handle, graphs = case
    pixels = Call.of(tower, GRID).pixels
    with mock.patch("fusedvit.runtime.inputs.is_on_gpu", lambda grid: False):
        tower(pixels, grid_thw=grid)
        order = noted(
            (graphs.manager, "replay_if_captured"),
            (graphs.manager, "replay"),
            (fallback, "reason_of_call"),
            (handle.weights, "read_back"),
        )
        outs = [tower(pixels, grid_thw=grid), tower(pixels[None], grid_thw=grid)]
    begun = ["replay_if_captured", "reason_of_call", "read_back"]
    assert order == [*begun, "reason_of_call", "replay", "replay_if_captured", "read_back"]
    assert graphs.manager.stats.mispredictions == 0 and graphs.manager.stats.replays == {16: 3}
    assert all(close([out.pooler_output], eager(handle, pixels, GRID)[1:2]) for out in outs)


@pytest.mark.parametrize("checked", [True, False])
def test_nothing_is_read_where_nothing_is_checked(case: Case, checked: bool) -> None:
    tower, handle, _ = case
    handle.prepared.config = FuseConfig(strict=True, watch_data=checked)
    with (
        mock.patch("fusedvit.runtime.inputs.is_on_gpu", lambda grid: False),
        mock.patch.object(handle.weights, "mark", wraps=handle.weights.mark) as mark,
    ):
        tower(Call.of(tower, GRID).pixels, grid_thw=GRID)
    assert mark.call_count == checked


@pytest.mark.parametrize("grid", [*BAD.values(), [(1, 4)], [(1, 4, 6.0)], "a grid", None], ids=str)
def test_bad_grids_on_the_host_launch_nothing(case: Case, grid: Any) -> None:
    tower, _, graphs = case
    pixels = Call.of(tower, GRID).pixels
    answer(tower, pixels, GRID)
    replays = dict(graphs.manager.stats.replays)
    with (
        mock.patch("fusedvit.runtime.inputs.is_on_gpu", lambda grid: False),
        pytest.raises((TypeError, ValueError), match="grid_thw"),
    ):
        tower(pixels, grid_thw=grid)
    assert graphs.manager.stats.mispredictions == 0 and graphs.manager.stats.replays == replays


def test_more_grids_than_there_is_room_for(case: Case) -> None:
    """A slot for a grid is used again; the grids in it before are forgotten."""
    tower, handle, graphs = case
    handle.warmup(iter)
    encoder = graphs.encoder
    encoder._grid_slots = encoder._grid_slots[:2].clone()
    encoder._grids = {}
    with mock.patch("fusedvit.runtime.inputs.is_on_gpu", lambda grid: False):
        for grid in 2 * [GRID, [(1, 6, 4), (2, 4, 4)], [(1, 2, 2)], [(1, 4, 14)], GRID]:
            pixels = Call.of(tower, grid).pixels
            assert close([tower(pixels, grid_thw=grid).pooler_output], eager(handle, pixels, grid)[1:2])
            assert len(encoder._grids) <= 2


def test_integers_of_other_widths_are_read_first(case: Case) -> None:
    tower, _, _ = case
    pixels = Call.of(tower, GRID).pixels
    want = answer(tower, pixels, GRID)
    notes = speculated(case)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        out = tower(pixels, grid_thw=torch.tensor(GRID, dtype=dtype))
        assert torch.equal(out.pooler_output, want[1])
    assert notes == [True, False, False]


@pytest.mark.parametrize("argument", ["output_attentions", "cu_seqlens"])
def test_a_call_that_cannot_run_fused_drops_its_replay(case: Case, argument: str) -> None:
    tower, handle, graphs = case
    pixels, grid = Call.of(tower, GRID).pixels, torch.tensor(GRID)
    want = answer(tower, pixels, GRID)
    with pytest.raises(RuntimeError, match="fusedvit: .* cannot run fused"):
        tower(pixels, grid_thw=grid, **{argument: True})
    assert graphs.manager.stats.mispredictions == 1 and graphs.manager.stats.replays == {16: 1}
    assert same(answer(tower, pixels, GRID), want) and handle.stats()["fused"] == 2


@pytest.mark.parametrize(
    "variant",
    [
        lambda p: p[:, :-1],
        lambda p: p.to(torch.uint8),
        lambda p: p[None],
        lambda p: p[:-1],
        lambda p: torch.nn.Parameter(p, requires_grad=False),
        lambda p: p.numpy(),
    ],
    ids=["narrower", "integers", "three dimensions", "a row less", "a subclass", "no tensor"],
)
def test_other_pixels_after_a_good_call(case: Case, variant: Any) -> None:
    tower, _, graphs = case
    pixels = Call.of(tower, GRID).pixels
    want = answer(tower, pixels, GRID)
    notes = speculated(case)
    with contextlib.suppress(TypeError, ValueError):
        assert same(answer(tower, variant(pixels), GRID), want)
        assert isinstance(variant(pixels), torch.nn.Parameter) or variant(pixels).ndim == 3
    assert notes == [False] and same(answer(tower, pixels, GRID), want)
    assert graphs.manager.stats.mispredictions == 0


def test_who_takes_the_original_code_again_and_again_wastes_one_replay(case: Case) -> None:
    tower, handle, graphs = case
    pixels = Call.of(tower, GRID).pixels
    answer(tower, pixels, GRID)
    handle.prepared.config = FuseConfig()
    notes = speculated(case)
    for _ in range(4):
        tower(pixels, grid_thw=torch.tensor(GRID), output_attentions=True)
    for _ in range(3):
        answer(tower, pixels, GRID)
    assert notes == [True, False, False, False, False, True, True]
    assert graphs.manager.stats.mispredictions == 1 and handle.stats()["fused"] == 4


def test_nothing_is_replayed_in_a_step_of_training(case: Case) -> None:
    tower, handle, graphs = case
    pixels = Call.of(tower, GRID).pixels
    answer(tower, pixels, GRID)
    handle.prepared.config, before = FuseConfig(), graphs.manager.stats.as_dict()
    with torch.inference_mode(False), torch.enable_grad():
        notes = speculated(case)
        for trained in (True, False, False):
            tower.blocks[1].norm1.weight.requires_grad_(trained)
            assert answer(tower, pixels.clone(), GRID)[1].requires_grad == trained
    assert notes == [False, False, True] and graphs.manager.stats.mispredictions == before["mispredictions"]
    assert handle.stats()["original"] == {fallback.GRADIENTS: 1}


def test_pixels_that_want_gradients_leave_no_trace_in_the_buffers(case: Case) -> None:
    tower, _, graphs = case
    pixels = Call.of(tower, GRID).pixels
    with torch.inference_mode(False):
        answer(tower, pixels.clone(), GRID)
        notes = speculated(case)
        with pytest.raises(RuntimeError, match="gradients"):
            answer(tower, pixels.clone().requires_grad_(), GRID)
    assert notes == [False] and not graphs.encoder.buffers(16).pixels.requires_grad


def test_released_and_dropped_graphs_replay_nothing(case: Case) -> None:
    _, handle, graphs = case
    assert right(case, GRID) and right(case, GRID)
    notes = speculated(case)
    graphs.manager.release()
    assert right(case, GRID) and right(case, GRID) and notes == [False, True]
    assert handle.weights.prepare() is None
    graphs.manager.drop_graphs()
    assert right(case, GRID) and notes == [False, True, False]


def test_compiled_calls_among_fused_ones_replay_too_and_compile_once(case: Case) -> None:
    tower, handle, graphs = case
    handle.prepared.config = FuseConfig()
    pixels, grid = Call.of(tower, GRID).pixels, torch.tensor(GRID)
    torch.compiler.reset()
    compiled = torch.compile(lambda p: tower(p, grid_thw=grid).pooler_output, backend="eager")
    with torch.inference_mode(False), torch.no_grad():
        notes = speculated(case)
        answer(tower, pixels, GRID)
        want = compiled(pixels.clone())
        assert handle.stats()["original"] == {} and handle.stats()["fused"] == 2, "the graph breaks around the tower"
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(3):
                answer(tower, pixels, GRID)
                assert torch.equal(compiled(pixels.clone()), want)
    assert notes == [False, *[True] * 7] and graphs.manager.stats.mispredictions == 0


def test_a_prediction_needs_whole_merged_tokens(case: Case) -> None:
    tower, handle, graphs = case
    assert right(case, GRID)
    pixels, grid = Call.of(tower, GRID).pixels, torch.tensor(GRID)
    assert speculative_replay.begin(handle.prepared.runtime, pixels[:-1], grid) is None
    assert speculative_replay.begin(None, pixels, grid) is None
    assert graphs.manager.stats.mispredictions == 0


OTHER_MEMORY = {  # value and memory differ
    "negative": lambda x: torch._neg_view(-x),
    "imaginary": lambda x: torch.complex(x.float(), -x.float()).conj().imag.to(x.dtype),
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "overlapping": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("which", ["pixels", "grid"])
@pytest.mark.parametrize("kind", OTHER_MEMORY)
def test_kernels_get_memory_that_holds_the_values(case: Case, kind: str, which: str, graphs: bool) -> None:
    """They go by addresses: a negative view would be read unnegated, zeros without memory nowhere."""
    tower, handle, captured = case
    captured.manager.ready(16)
    pixels, grid = Call.of(tower, GRID).pixels, torch.tensor(GRID)
    given = {"pixels": pixels, "grid": grid} | {which: OTHER_MEMORY[kind](pixels if which == "pixels" else grid)}
    if (which, kind) in (("grid", "zeros"), ("grid", "overlapping")):
        with pytest.raises(ValueError, match=r"^fusedvit: grid_thw"):
            tower(given["pixels"], grid_thw=given["grid"])
        return
    notes, seen = speculated(case), list[torch.Tensor]()
    note_inputs(captured, seen)
    with contextlib.nullcontext() if graphs else mock.patch.object(handle.prepared, "runtime", without_graphs(handle)):
        ours = tower(given["pixels"], grid_thw=given["grid"])
    right_one = eager(handle, given["pixels"].clone() + 0.0, GRID)
    assert close([ours.last_hidden_state, ours.pooler_output, *ours.deepstack_features], right_one)
    assert seen and not any(each.is_neg() or each._is_zerotensor() for each in seen)
    assert notes == [graphs and (kind, which) != ("negative", "grid")]  # of pixels a copy of torch's is replayed


def without_graphs(handle: Any) -> Any:
    return replace(handle.prepared.runtime, graphs=None, no_graphs="graphs off")


def note_inputs(captured: Any, seen: list[torch.Tensor]) -> None:
    """Notes the caller's tensors as kernels get them from now on: of replays, and of eager runs."""

    def load_inputs(*given: Any) -> Any:
        seen.extend(each for each in given if isinstance(each, torch.Tensor))
        return real(*given)

    def aligned(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(pixels)
        found = real_aligned(pixels)
        seen.append(found)
        assert found.stride(0) >= found.shape[1], "tensor descriptors take no rows that overlap"
        return found

    real, real_aligned, program = captured.encoder._ops.load_inputs, runner._aligned, captured.encoder
    ops = SimpleNamespace(**vars(program._ops) | {"load_inputs": load_inputs})
    mock.patch.object(program, "_ops", ops).start()
    mock.patch.object(runner, "_aligned", aligned).start()


@pytest.mark.parametrize("which", [0, 1], ids=["pixels", "grid"])
@pytest.mark.parametrize(
    "change",
    [torch.Tensor.to_sparse, lambda x: torch.nested.nested_tensor([*x]), lambda x: x.to("meta")],
    ids=["sparse", "nested", "meta"],
)
def test_no_replay_is_begun_for_what_has_no_addresses(case: Case, change: Any, which: int) -> None:
    tower, _, captured = case
    captured.manager.ready(16)
    notes, given = speculated(case), [Call.of(tower, GRID).pixels, torch.tensor(GRID)]
    given[which] = change(given[which].clone())
    with pytest.raises(ValueError, match=r"^fusedvit: (pixel_values|grid_thw) must"):
        tower(*given)
    assert notes == [False] and captured.manager.stats.mispredictions == 0
