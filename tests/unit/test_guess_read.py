"""Replays begun for grids on the host before the call is checked: nothing is guessed there, and nothing waits."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.checks import fallback
from fusedvit.config import FuseConfig
from fusedvit.runtime import speculative_replay as guesses
from tests.support.guessing import BAD, GRID, Case, begun, case, close, eager, noted, unpatched
from tests.support.towers import Call

__all__ = ["case", "unpatched"]  # fixtures


@pytest.fixture
def on_the_host(case: Case) -> Iterator[Case]:
    """Where grids are read before a replay; tensors count as the GPU's in `graphs_on_cpu`, lists do not."""
    tower, _, graphs = case
    graphs.manager.warmup()
    with mock.patch("fusedvit.fused_encoder.lies_on_gpu", lambda grid: False):
        tower(Call.of(tower, GRID).pixels, grid_thw=GRID)
        yield case


def test_what_a_grid_on_the_host_says_is_begun_before_any_check(on_the_host: Case) -> None:
    tower, handle, graphs = on_the_host
    order = noted(
        (graphs.manager, "replay_if_captured"),
        (guesses, "begin"),
        (handle.prepared, "look"),
        (fallback, "reason_of_call"),
    )
    for grid in (GRID, [(1, 6, 4), (2, 4, 4)], [(1, 2, 2)], GRID):
        pixels = Call.of(tower, grid).pixels
        order.clear()
        out = tower(pixels, grid_thw=grid)
        assert order == ["begin", "replay_if_captured", "reason_of_call", "look"]
        assert close([out.last_hidden_state, out.pooler_output, *out.deepstack_features], eager(handle, pixels, grid))
    for grid in ([(9, 2, 2)], [(0, 4, 4), *GRID]):  # two batches; an item without frames
        pixels = Call.of(tower, grid).pixels
        order.clear()
        out = tower(pixels, grid_thw=grid)
        assert order[:3] == ["begin", "reason_of_call", "replay_if_captured"] and order[-1] == "look"
        assert close([out.pooler_output], eager(handle, pixels, grid)[1:2])
    assert graphs.manager.stats.mispredictions == 0


@pytest.mark.parametrize("grid", [*BAD.values(), [(1, 4)], [(1, 4, 6.0)], "a grid", None], ids=str)
def test_bad_grids_on_the_host_begin_nothing(on_the_host: Case, grid: Any) -> None:
    tower, _, graphs = on_the_host
    pixels, notes = Call.of(tower, GRID).pixels, begun(on_the_host)
    with pytest.raises((TypeError, ValueError), match="grid_thw"):
        tower(pixels, grid_thw=grid)
    assert notes == [] and graphs.manager.stats.mispredictions == 0


def test_a_call_with_a_grid_on_the_host_that_cannot_run_fused_is_dropped(on_the_host: Case) -> None:
    tower, handle, graphs = on_the_host
    pixels = Call.of(tower, GRID).pixels
    replays = dict(graphs.manager.stats.replays)
    with pytest.raises(RuntimeError, match="strict"):
        tower(pixels, grid_thw=GRID, colour=1)
    assert graphs.manager.stats.mispredictions == 1 and graphs.manager.stats.replays == replays


@pytest.mark.parametrize("watch", [True, False])
def test_nobody_looks_where_nothing_is_watched(on_the_host: Case, watch: bool) -> None:
    tower, handle, _ = on_the_host
    handle.config = FuseConfig(strict=True, watch_data=watch)
    with mock.patch.object(handle.prepared, "mark", wraps=handle.prepared.mark) as mark:
        tower(Call.of(tower, GRID).pixels, grid_thw=GRID)
    assert mark.call_count == watch


def test_weights_that_change_under_a_grid_on_the_host(on_the_host: Case) -> None:
    tower, handle, _ = on_the_host
    pixels = Call.of(tower, GRID).pixels
    before = tower(pixels, grid_thw=GRID).pooler_output.clone()
    with torch.inference_mode(False):
        tower.blocks[0].norm1.weight.data.mul_(1.5)
    after = tower(pixels, grid_thw=GRID).pooler_output
    assert not close([after], [before]) and close([after], eager(handle, pixels, GRID)[1:2])
    assert handle.stats()["refreshes"] == 2


def test_more_layouts_than_there_is_room_for(on_the_host: Case) -> None:
    """A place for a table is used again; the tables in it before are forgotten."""
    tower, handle, graphs = on_the_host
    program = graphs.program
    program._slots = program._slots[:2].clone()
    program._tables = {}
    for grid in 2 * [GRID, [(1, 6, 4), (2, 4, 4)], [(1, 2, 2)], [(1, 4, 14)], GRID]:
        pixels = Call.of(tower, grid).pixels
        assert close([tower(pixels, grid_thw=grid).pooler_output], eager(handle, pixels, grid)[1:2])
        assert len(program._tables) <= 2


def test_grids_on_the_host_are_known_by_their_content(on_the_host: Case) -> None:
    _, handle, graphs = on_the_host
    assert handle._last is not None
    table = torch.tensor(GRID)
    forms = [table, table.int(), table.T.contiguous().T, GRID, [list(row) for row in GRID]]
    want = (56, tuple(GRID), 16)
    assert all(guesses._read(form, 56, handle._last) == want for form in forms)
    with mock.patch.object(guesses, "check_items", side_effect=AssertionError):
        assert all(guesses._read(form, 56, handle._last) == want for form in forms)
        assert all(guesses._read(form, 55, handle._last) is None for form in forms)
    others = [
        table.flatten(),
        table.T,
        table.float(),
        table.to("meta"),
        table > 0,
        tuple(GRID),
        [[[1], [2], [3]]],
        "146",
    ]
    assert all(guesses._read(other, 56, handle._last) is None for other in others)
    assert guesses._read([(1, 14, 4)], 56, handle._last) == (56, ((1, 14, 4),), 16) and len(graphs.read) == 4
