"""Replays begun before the grid is read: right ones stand, wrong ones are run again, bad grids leave nothing behind."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.config import FuseConfig
from fusedvit.runtime.inputs import check_items
from fusedvit.runtime.readback import LEAST_ROOM, Content, Look, Place
from tests.support.guessing import BAD, GRID, Case, answer, begun, case, close, eager, noted, right, same, unpatched
from tests.support.towers import Call

__all__ = ["case", "unpatched"]  # fixtures


def test_only_what_is_captured_is_begun_unread(case: Case) -> None:
    notes = begun(case)
    assert all(right(case, GRID) for _ in range(3))
    assert notes == [False, True, True]
    stats = case[2].manager.stats
    assert stats.replays == {16: 3} and stats.items == 6 and stats.tokens == 42 and stats.mispredictions == 0
    assert case[1].stats()["fused"] == case[1].stats()["calls"] == 3


def test_other_layouts_of_the_same_totals_and_new_totals(case: Case) -> None:
    case[2].manager.warmup(only=[16])
    notes = begun(case)
    for grid in ([(1, 6, 4), (2, 4, 4)], [(2, 4, 4), (1, 4, 6)], [(1, 14, 4)], [(1, 4, 4)], GRID, [(5, 2, 2)]):
        assert right(case, grid)
    assert notes == [True, True, True, False, True, True], "a budget of 4 is not captured yet"
    assert case[2].manager.stats.mispredictions == 0


def test_a_plan_that_shapes_decide_is_a_misprediction_once(case: Case) -> None:
    """Nine frames are over the limit of eight: as many tokens as an image that goes whole."""
    case[2].manager.warmup(only=[16, 4])
    notes = begun(case)
    video, image = [(9, 2, 2)], [(1, 2, 18)]
    assert right(case, video) and right(case, video)
    assert notes == [True, False]
    stats = case[2].manager.stats
    assert stats.mispredictions == 1 and stats.items == 4, "two pieces a call"
    assert right(case, image) and right(case, image) and notes == [True, False, False, True]
    assert right(case, video) and stats.mispredictions == 2


def test_items_without_frames_are_never_taken_over(case: Case) -> None:
    case[2].manager.warmup(only=[16])
    for grid in ([(0, 4, 4), *GRID], [(0, 2**40, 2), *GRID]):
        assert right(case, grid) and right(case, grid)
    assert case[2].manager.stats.mispredictions == 1


@pytest.mark.parametrize("grid", BAD.values(), ids=BAD)
def test_bad_grids_right_after_a_good_call(case: Case, grid: Any) -> None:
    tower, handle, graphs = case
    pixels = Call.of(tower, GRID).pixels
    want = answer(tower, pixels, GRID)
    notes = begun(case)
    with pytest.raises(ValueError, match=r"grid_thw") as ours:
        answer(tower, pixels, grid)
    with pytest.raises(ValueError) as plain:
        check_items([list(row) for row in grid], len(pixels), 2)
    assert str(ours.value) == str(plain.value) and notes == [True]
    assert not graphs.program.buffers(16).grid.any(), "the replay had no items"
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
        tower.blocks[0].norm2.weight.mul_(1.5)  # seen by its version
    assert not same(answer(tower, pixels, GRID), after) and right(case, GRID)


def test_weights_made_anew_by_another_thread_meanwhile(case: Case) -> None:
    _, handle, _ = case
    assert right(case, GRID)
    notes, made = begun(case), handle.prepared.made
    real = handle.prepared.look

    def look(*arguments: Any) -> Any:
        if handle.prepared.made == made:
            handle.prepared.make()
        return real(*arguments)

    mock.patch.object(handle.prepared, "look", look).start()
    assert right(case, GRID)
    assert notes == [True, True], "the first run may have used either"


@pytest.mark.parametrize("grid", [GRID, [(9, 2, 2)], [(1, 20, 20)]], ids=["one batch", "two batches", "eager"])
def test_one_host_read_a_call(case: Case, grid: Any) -> None:
    tower, handle, _ = case
    assert right(case, grid)
    with mock.patch.object(handle.prepared, "look", wraps=handle.prepared.look) as look:
        answer(tower, Call.of(tower, grid).pixels, grid)
    assert look.call_count == 1


@pytest.mark.parametrize(
    "grid, wanted",
    [
        (GRID, ["replay_if_captured", "look", "true"]),
        ([(9, 2, 2)], ["look", "replay_if_captured", "replay_if_captured", "true"]),
        ([(1, 20, 20)], ["look", "true"]),
    ],
    ids=["one batch", "two batches", "eager"],
)
def test_the_walk_over_the_tower_is_under_the_gpus_work(case: Case, grid: Any, wanted: list[str]) -> None:
    """And, where that is begun by then, under the look at weights and grid."""
    tower, handle, graphs = case
    assert right(case, grid)
    prepared = handle.prepared
    order = noted((graphs.manager, "replay_if_captured"), (prepared, "look"), (prepared, "true"))
    answer(tower, Call.of(tower, grid).pixels, grid)
    assert order == wanted


@pytest.mark.parametrize("fails", [False, True])
def test_a_look_is_waited_for_after_the_walk_whatever_becomes_of_that(fails: bool) -> None:
    order: list[str] = []

    class Side:
        def synchronize(self) -> None:
            order.append("waited")
            found.copy_(torch.tensor([1, 2]))

    def walk() -> bool:
        order.append("walked")
        if fails:
            raise AttributeError("no such module")
        return True

    found, side, places = torch.zeros(2, dtype=torch.int32), Side(), list[Place]()
    place, made = Place(found, torch.tensor([*GRID, (9, 9, 9)])), torch.tensor([1, 2], dtype=torch.int32)
    look = Look(side, place, made, len(GRID), places)  # type: ignore[arg-type]
    with pytest.raises(AttributeError) if fails else contextlib.nullcontext():
        assert look.done(walk) == (True, [list(row) for row in GRID], True)
    assert order == ["walked", "waited"]
    assert places == [] if fails else places[0] is place, "what is filled is used again once it has been read"


def test_memory_that_is_looked_into_is_nobody_elses() -> None:
    """Places are used again, by one look at a time, and are as large as their grid."""
    content = Content.of([torch.ones(3)])
    first, second = (content._place(items) for items in (2, LEAST_ROOM + 1))
    assert first.rows.shape[0] == LEAST_ROOM and second.rows.shape[0] == 2 * LEAST_ROOM
    content.places.append(first)
    assert content._place(LEAST_ROOM) is first and content._place(1) is not first and content.places == []
    content.places.append(first)
    assert content._place(LEAST_ROOM + 1) is not first


def test_a_place_of_one_mode_is_used_again_in_another() -> None:
    content, grid = Content.of([torch.ones(3)]), torch.tensor(GRID)
    for mode in (torch.inference_mode(), contextlib.nullcontext(), torch.no_grad()):
        with mode:
            assert content.look(None, True, grid).done() == (True, [list(row) for row in GRID], None)
    assert len(content.places) == 1


def test_outputs_are_the_callers(case: Case) -> None:
    tower, _, _ = case
    pixels = Call.of(tower, GRID).pixels
    first = answer(tower, pixels, GRID)
    kept = [t.clone() for t in first]
    answer(tower, pixels * 2, GRID)
    assert same(first, kept) and all(t.is_contiguous() for t in first)


def test_integers_of_other_widths_are_read_first(case: Case) -> None:
    tower, handle, _ = case
    pixels = Call.of(tower, GRID).pixels
    want = answer(tower, pixels, GRID)
    notes = begun(case)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        out = tower(pixels, grid_thw=torch.tensor(GRID, dtype=dtype))
        assert torch.equal(out.pooler_output, want[1])
    assert notes == [True, False, False]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tower, pixels, grid: tower(pixels, grid_thw=grid, output_hidden_states=True),
        lambda tower, pixels, grid: tower(pixels, grid_thw=grid, colour=1),
        lambda tower, pixels, grid: tower(pixels, grid_thw=grid, output_attentions=True),
    ],
)
def test_a_call_that_cannot_run_fused_drops_what_was_begun(case: Case, spoil: Any) -> None:
    tower, handle, graphs = case
    pixels, grid = Call.of(tower, GRID).pixels, torch.tensor(GRID)
    want = answer(tower, pixels, GRID)
    notes = begun(case)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="strict"):
            spoil(tower, pixels, grid)
    assert notes == [True], "the next such call begins nothing"
    assert graphs.manager.stats.mispredictions == 1 and graphs.manager.stats.replays == {16: 1}
    assert same(answer(tower, pixels, GRID), want) and same(answer(tower, pixels, GRID), want)
    assert graphs.manager.stats.mispredictions == 1 and handle.stats()["fused"] == 3


@pytest.mark.parametrize(
    "form",
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
def test_pixels_of_other_forms_after_a_good_call(case: Case, form: Any) -> None:
    tower, handle, graphs = case
    pixels = Call.of(tower, GRID).pixels
    want = answer(tower, pixels, GRID)
    notes = begun(case)
    with contextlib.suppress(TypeError, ValueError):
        assert same(answer(tower, form(pixels), GRID), want)
        assert isinstance(form(pixels), torch.nn.Parameter)
    assert len(notes) <= 1 and same(answer(tower, pixels, GRID), want)
    assert graphs.manager.stats.mispredictions <= 1


def test_pixels_that_want_gradients_leave_no_trace_in_the_buffers(case: Case) -> None:
    tower, _, graphs = case
    pixels = Call.of(tower, GRID).pixels
    with torch.inference_mode(False):
        answer(tower, pixels.clone(), GRID)
        notes = begun(case)
        with pytest.raises(RuntimeError, match="gradients"):
            answer(tower, pixels.clone().requires_grad_(), GRID)
    assert notes == [] and not graphs.program.buffers(16).pixels.requires_grad


def test_other_options_and_released_graphs_begin_nothing(case: Case) -> None:
    tower, handle, graphs = case
    assert right(case, GRID) and right(case, GRID)
    notes = begun(case)
    graphs.manager.release()
    assert right(case, GRID) and right(case, GRID) and notes == [False, True]
    handle.prepared.make()
    graphs.manager.drop_graphs()
    assert right(case, GRID) and notes == [False, True, False]


def test_compiled_calls_among_fused_ones_begin_nothing_and_compile_once(case: Case) -> None:
    tower, handle, graphs = case
    handle.config = FuseConfig()
    pixels, grid = Call.of(tower, GRID).pixels, torch.tensor(GRID)
    torch.compiler.reset()
    compiled = torch.compile(lambda p: tower(p, grid_thw=grid).pooler_output, backend="eager")
    with torch.inference_mode(False), torch.no_grad():
        notes = begun(case)
        answer(tower, pixels, GRID)
        want = compiled(pixels.clone())
        assert handle.stats()["original"] == {"compiling": 1}
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(3):
                answer(tower, pixels, GRID)
                assert torch.equal(compiled(pixels.clone()), want)
    assert notes == [False, *[True] * 3] and graphs.manager.stats.mispredictions == 0
