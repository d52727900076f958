"""One graph for floats, bytes of all frames and bytes of still images, in any order; on graphs that need no GPU."""

from typing import Any

import pytest
import torch

from fusedvit.kernels.load_inputs import BYTES, FLOATS, STILL_BYTES
from fusedvit.model.normalization import Normalization
from fusedvit.pixels.byte_pixels import BytePixels
from tests.support.graphs_on_cpu import BAD, GRID, Case, answer, case, close, eager, same, speculated, unpatched
from tests.support.towers import patches_of, poison

__all__ = ["case", "unpatched"]  # fixtures
NORMALIZATION = Normalization(1 / 255, (0.48, 0.45, 0.4), (0.27, 0.26, 0.28), patch=4)
KINDS = {"floats": FLOATS, "bytes": BYTES, "still": STILL_BYTES}


def pixels_of(kind: int, grid: Any = GRID, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (patches_of(grid), NORMALIZATION.width(kind == STILL_BYTES)), generator=generator)
    pixels = BytePixels.mark(rows.to(torch.uint8), NORMALIZATION, kind == STILL_BYTES)
    return pixels.pixels() if kind == FLOATS else pixels


def eager_of(case: Case, pixels: Any, grid: Any = GRID) -> list[torch.Tensor]:
    return eager(case[1], pixels.unmarked() if isinstance(pixels, BytePixels) else pixels, grid)


def test_one_graph_serves_all_kinds_in_any_order(case: Case) -> None:
    for kind in KINDS.values():
        answer(case[0], pixels_of(kind), GRID)  # weights take the kind from here on, and graphs are captured again
    answer(case[0], pixels_of(FLOATS), GRID)
    assert case[1].stats()["refreshes"] == 3 and case[1].stats()["graphs"]["replays"] == 4
    notes, captures = speculated(case), case[2].manager.stats.captures
    for seed, kind in enumerate((0, 0, 1, 1, 2, 2, 0, 2, 1, 0)):  # each after each
        poison(case[2].encoder)
        pixels = pixels_of(kind, seed=seed)
        found = answer(case[0], pixels, GRID)
        assert close(found, eager_of(case, pixels)), seed
        assert close(found, eager_of(case, pixels.pixels() if kind else pixels)), seed
    assert all(notes) and len(notes) == 10
    assert case[2].manager.stats.captures == captures and case[2].manager.stats.mispredictions == 0


@pytest.mark.parametrize("kind", [BYTES, STILL_BYTES], ids=["bytes", "still"])
def test_a_new_kind_after_parameters_moved(case: Case, kind: int) -> None:
    """Graphs of before know nothing of it."""
    for seed in range(3):
        answer(case[0], pixels_of(FLOATS, seed=seed), GRID)
        for p in case[0].parameters():
            p.data = p.data.clone()
        poison(case[2].encoder)
        pixels = pixels_of(kind, seed=seed)
        found = answer(case[0], pixels, GRID)
        assert close(found, eager_of(case, pixels.pixels())), seed


@pytest.mark.parametrize("kind", [BYTES, STILL_BYTES], ids=["bytes", "still"])
def test_split_videos_and_calls_over_every_budget(case: Case, kind: int) -> None:
    for grid in ([(9, 2, 2)], [(1, 2, 2), (11, 4, 2), (1, 4, 4)], [(1, 18, 16)], [(2, 20, 20), (1, 2, 2)]):
        for pixels in (pixels_of(kind, grid), pixels_of(FLOATS, grid)):
            assert close(answer(case[0], pixels, grid), eager_of(case, pixels, grid)), grid


@pytest.mark.parametrize("grid", BAD.values(), ids=BAD)
def test_bad_grids_run_no_rows(case: Case, grid: Any) -> None:
    tower, _, graphs = case
    pixels = pixels_of(STILL_BYTES)
    want = answer(tower, pixels, GRID)
    with pytest.raises(ValueError, match=r"grid_thw"):
        answer(tower, pixels, grid)
    assert not graphs.encoder.buffers(16).row_counts[:, 0].any()
    assert same(answer(tower, pixels, GRID), want)


def test_unmarked_bytes_begin_no_replay(case: Case) -> None:
    for kind in (BYTES, STILL_BYTES):
        answer(case[0], pixels_of(kind), GRID)
        notes = speculated(case)
        with pytest.raises(TypeError, match="normalised floats"):
            answer(case[0], pixels_of(kind).unmarked(), GRID)
        assert notes == [False]


def test_layouts_of_bytes_that_no_kernel_loads(case: Case) -> None:
    """Strided rows, and rows that begin anywhere."""
    for kind in (BYTES, STILL_BYTES):
        pixels = pixels_of(kind)
        want = answer(case[0], pixels, GRID)
        strided = BytePixels.mark(
            torch.zeros(112, pixels.shape[1], dtype=torch.uint8)[::2], NORMALIZATION, pixels.still
        )
        strided.unmarked().copy_(pixels.unmarked())
        odd = torch.zeros(pixels.numel() + 1, dtype=torch.uint8)[1:].view(pixels.shape).copy_(pixels.unmarked())
        for other in (strided, BytePixels.mark(odd, NORMALIZATION, pixels.still), pixels[None]):
            assert same(answer(case[0], other, GRID), want)
