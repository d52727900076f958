"""The metadata kernel against its reference over random grids, and the reference against Hugging Face's own helpers."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedvit.kernels.epilogue import Epilogue, Taps
from fusedvit.kernels.linear import linear
from fusedvit.kernels.metadata import (
    FRAMES,
    MERGED,
    SHORT_TILES,
    TILES,
    TOKENS,
    WINDOW_TILES,
    WINDOWS,
    Metadata,
    vision_metadata,
)
from fusedvit.kernels.reference.metadata import vision_metadata as vision_metadata_ref
from fusedvit.kernels.tile_configs import LinearConfig
from tests.kernels.metadata_cases import Grid, fill, frames_of, grids, tiles_of, windows_of
from tests.kernels.support import count, padded

EXAMPLES = 25
IN_THE_INTERPRETER = EXAMPLES if torch.cuda.is_available() else 10  # a second each


def assert_same(ours: Metadata, ref: Metadata, tokens: int) -> None:
    """Integers exactly, fractions and angles to fp32's last places; all padding that is ever read included."""
    kinds = [TOKENS, MERGED, FRAMES, TILES] + [WINDOWS, WINDOW_TILES] * bool(len(ours.order))
    assert torch.equal(ours.counts[kinds, 0], ref.counts[kinds, 0])
    assert torch.equal(ours.short_tiles, ref.short_tiles)
    assert torch.equal(ours.window_cu_seqlens, ref.window_cu_seqlens)
    assert torch.equal(ours.window_tiles, ref.window_tiles)
    assert torch.equal(ours.order, ref.order), "padding included: neither writes there"
    assert torch.equal(ours.cu_seqlens, ref.cu_seqlens)
    assert torch.equal(ours.tiles, ref.tiles)
    assert torch.equal(ours.tap_index[:tokens], ref.tap_index[:tokens])
    torch.testing.assert_close(ours.tap_weight[:tokens], ref.tap_weight[:tokens], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.rope[:tokens], ref.rope[:tokens], rtol=0, atol=3e-7)
    for field in (ours.rope, ours.tap_weight):
        assert field[tokens:].isnan().all(), "written past the tokens"


def assert_padding(meta: Metadata, grid: Grid, block_m: int) -> None:
    frames = frames_of(grid)
    tokens, tiles = sum(frames), sum(-(-n // block_m) for n in frames)
    counts = [int(meta.count(which)) for which in (TOKENS, FRAMES, TILES)]
    assert counts == [tokens, len(frames), tiles]
    assert (meta.cu_seqlens.diff() >= 0).all() and (meta.cu_seqlens[len(frames) :] == tokens).all()
    assert (meta.tiles[tiles:] == 0).all()


@settings(max_examples=IN_THE_INTERPRETER, deadline=None)
@given(grids(2, 8), st.sampled_from([16, 64]), st.integers(0, 200))
@example([], 16, 0)
@example([], 16, 3)  # nothing in room for something
@example([(1, 2, 2)], 16, 0)  # one merged token
@example([(1, 4, 8)], 64, 0)  # 32 tokens: a program's block exactly
@example([(0, 4, 4)], 16, 1)  # a video without frames
@example([(1, 2, 2)] * 64, 64, 0)  # items are searched 64 at a time: one iteration exactly
@example([(1, 2, 2)] * 63 + [(3, 4, 6), (1, 6, 2)], 16, 5)  # a video at the end of an iteration, an image in the next
@example([(0, 0, 0)] * 80 + [(2, 4, 2)] + [(0, 0, 0)] * 60, 16, 5)  # an iteration of nothing first, and one behind
@example([(0, 0, 0), (1, 2, 4)] * 20 + [(1, 4, 2), (0, 0, 0)] * 20, 16, 0)  # one of a lane's two items is empty
@example([(1, 2, 4)] + [(0, 2, 2)] * 130 + [(1, 4, 2)], 16, 0)  # nothing in between, for longer than an iteration
@example([(70, 2, 2), (1, 4, 2)], 16, 0)  # more frames than tokens of a frame
@example([(130, 2, 2)], 16, 0)  # frames and tiles past a program's block of 32
def test_kernel_matches_the_reference(device: torch.device, grid: Grid, block_m: int, room: int) -> None:
    ours = fill(vision_metadata, grid, device, block_m=block_m, room=room)
    ref = fill(vision_metadata_ref, grid, device, block_m=block_m, room=room)
    assert_same(ours, ref, sum(frames_of(grid)))
    assert_padding(ours, grid, block_m)
    assert int(ours.count(MERGED)) * 4 == sum(frames_of(grid))


@pytest.mark.parametrize("merge, head_dim, side", [(1, 32, 7), (3, 72, 48), (2, 80, 1), (2, 128, 0)])
def test_kernel_matches_the_reference_in_other_towers(
    merge: int, head_dim: int, side: int, device: torch.device
) -> None:
    """Merge 1 and 3, a quarter head of 18 (no power of two), a position table of one entry, and none."""
    grid = [(1, 3 * merge, merge), (2, merge, 4 * merge), (1, 17 * merge, 5 * merge)]
    options = {"merge": merge, "head_dim": head_dim, "side": side, "block_m": 64, "room": 9}
    ours, ref = (fill(op, grid, device, **options) for op in (vision_metadata, vision_metadata_ref))
    assert_same(ours, ref, sum(frames_of(grid)))
    assert_padding(ours, grid, 64)


@settings(max_examples=EXAMPLES, deadline=None)
@given(grids(2, 40))
@example([(1, 2, 2)] * 33)
def test_reference_is_hugging_face(grid: Grid) -> None:
    vision_utils = pytest.importorskip("transformers.vision_utils")
    grid = [g for g in grid if g[1]]  # rows of zeros are ours alone
    meta = fill(vision_metadata_ref, grid, torch.device("cpu"), side=7)
    if not frames_of(grid):
        return
    thw = torch.tensor(grid)
    assert torch.equal(meta.cu_seqlens, vision_utils.get_vision_cu_seqlens(thw))
    positions = vision_utils.get_vision_position_ids(thw, 2)  # [tokens, 2]
    inv_freq = 10000.0 ** -(torch.arange(0, 12, 2) / 12)
    angle = (positions[:, :, None] * inv_freq).flatten(1)  # rows' frequencies, then columns'
    torch.testing.assert_close(meta.rope, torch.stack([angle.cos(), angle.sin()], 1), rtol=0, atol=2e-6)
    index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
        thw, 7, "bilinear", align_corners=True, spatial_merge_size=2
    )
    table = torch.randn(49, 8)  # compared by what they pick: a tap of weight 0 may point anywhere
    picked = (table[meta.tap_index.long()] * meta.tap_weight[:, :, None]).sum(1)
    torch.testing.assert_close(picked, (table[index] * weight[:, :, None]).sum(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("h, w", [(2, 2), (14, 14), (2, 20), (24, 8)])  # the table's 7 x 7 shrunk, doubled, stretched
def test_taps_are_bilinear_interpolation(h: int, w: int, device: torch.device) -> None:
    """Kernel upon kernel: the positions that the patch embedding adds to nothing are `F.interpolate` of the table."""
    table = torch.randn(7, 7, 24, device=device)
    wanted = F.interpolate(rearrange(table, "h w c -> 1 c h w"), (h, w), mode="bilinear", align_corners=True)
    wanted = rearrange(wanted, "1 c (bh mh) (bw mw) -> (bh bw mh mw) c", mh=2, mw=2)
    meta = fill(vision_metadata, [(2, h, w)], device)
    x, weight = torch.zeros(2 * h * w, 16, device=device), torch.zeros(24, 16, device=device)
    out = padded(torch.zeros(2 * h * w, 24, device=device), 2 * h * w)
    epilogue = Epilogue(taps=Taps(table.reshape(49, 24), meta.tap_index, meta.tap_weight))
    linear(x, weight, count(2 * h * w, device), out, epilogue, LinearConfig(64, 32, 16, 4, 2))
    torch.testing.assert_close(out, repeat(wanted, "n c -> (t n) c", t=2), rtol=0, atol=2e-5)


def test_far_positions_keep_their_angles(device: torch.device) -> None:
    """A 4096-pixel side: angles of 255 radians, whose cosine a low-precision instruction would miss."""
    grid = [(1, 2, 256)]
    ours = fill(vision_metadata, grid, device)
    ref = fill(vision_metadata_ref, grid, device)
    torch.testing.assert_close(ours.rope, ref.rope, rtol=0, atol=3e-7)


WINDOWED = {"window": 8, "head_dim": 16, "side": 0}


@settings(max_examples=IN_THE_INTERPRETER, deadline=None)
@given(grids(2, 6), st.sampled_from([16, 64, 128]), st.integers(0, 40))
@example([], 64, 0)
@example([], 64, 3)
@example([(1, 8, 8)], 64, 0)  # one window exactly
@example([(1, 2, 2)], 16, 0)  # one merged token
@example([(1, 10, 8), (1, 8, 10), (1, 6, 6)], 16, 0)  # cut below, at the right, at both and narrower than a window
@example([(2, 18, 26)], 16, 1)  # tiles of 16: four of a whole window, one to three of a cut one
@example([(10, 10, 10), (0, 4, 4), (1, 2, 40)], 64, 40)  # more windows than a program's block of 32
@example([(1, 2, 2)] * 62 + [(2, 10, 2), (0, 0, 0), (1, 10, 10)], 64, 0)  # more items than are searched at a time
def test_windows_match_the_reference(device: torch.device, grid: Grid, block_m: int, room: int) -> None:
    options = WINDOWED | {"window_block_m": block_m, "room": room}
    ours, ref = (fill(op, grid, device, **options) for op in (vision_metadata, vision_metadata_ref))
    assert_same(ours, ref, sum(frames_of(grid)))
    windows = windows_of(grid, 8)
    tiles = sum(-(-n // block_m) for n in windows)
    assert [int(ours.count(which)) for which in (WINDOWS, WINDOW_TILES)] == [len(windows), tiles]
    assert ours.window_cu_seqlens[: len(windows) + 1].diff().tolist() == windows
    assert (ours.window_cu_seqlens[len(windows) :] == sum(windows)).all() and (ours.window_tiles[tiles:] == 0).all()


@settings(max_examples=IN_THE_INTERPRETER, deadline=None)
@given(grids(2, 8), st.sampled_from([16, 64]), st.sampled_from([1, 4, 24, 10**6]), st.integers(0, 40))
@example([(1, 4, 6), (1, 4, 8), (2, 2, 2)], 16, 24, 0)  # a frame of the limit, one past it
@example([(1, 2, 2)] * 20 + [(3, 10, 10)] * 20, 16, 24, 3)  # more of both than a program's block of 32
@example([(1, 2, 2), (0, 0, 0), (1, 4, 8)] * 23, 64, 24, 0)  # more items than are searched at a time
@example([(1, 10, 10)], 16, 24, 0)  # no short frame
@example([], 64, 24, 5)
def test_short_frames_have_their_own_list(
    device: torch.device, grid: Grid, block_m: int, short: int, room: int
) -> None:
    options = {"block_m": 48, "short": short, "short_block_m": block_m, "room": room}
    ours, ref = (fill(op, grid, device, **options) for op in (vision_metadata, vision_metadata_ref))
    frames = frames_of(grid)
    assert_same(ours, ref, sum(frames))
    counts = [int(ours.count(which)) for which in (FRAMES, TILES, SHORT_TILES)]
    assert counts == [len(frames), tiles_of(frames, 48, above=short), tiles_of(frames, block_m, up_to=short)]
    listed = torch.cat([ours.tiles[: counts[1]], ours.short_tiles[: counts[2]]])
    assert sorted(set(map(tuple, listed[:, :2].tolist()))) == [
        (b, b + n) for b, n in zip(accumulate(frames, initial=0), frames, strict=False) if n
    ]
    assert (ours.tiles[counts[1] :] == 0).all() and (ours.short_tiles[counts[2] :] == 0).all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(grids(2, 8))
@example([(1, 8, 8)])
@example([(3, 10, 22), (1, 2, 2), (1, 40, 6)])
def test_windows_are_those_of_hugging_face(grid: Grid) -> None:
    vision_utils = pytest.importorskip("transformers.vision_utils")
    grid = [g for g in grid if g[0] * g[1]]
    if not grid:
        return
    meta = fill(vision_metadata_ref, grid, torch.device("cpu"), **WINDOWED)
    index, cu_seqlens = vision_utils.get_vision_window_index(torch.tensor(grid), 2, 112, 14)
    assert meta.order.tolist() == index.tolist()
    assert meta.window_cu_seqlens.tolist() == cu_seqlens.tolist()


@settings(max_examples=IN_THE_INTERPRETER, deadline=None)
@given(grids(2, 4))
@example([(1, 48, 2), (1, 6, 40)])
def test_bicubic_taps_match_the_reference(device: torch.device, grid: Grid) -> None:
    ours, ref = (fill(op, grid, device, taps=16, room=5) for op in (vision_metadata, vision_metadata_ref))
    tokens = sum(frames_of(grid))
    table = torch.randn(49, 8, device=device)  # by what they pick: half pixels may fall to either side of an entry
    picked = [(table[m.tap_index[:tokens].long()] * m.tap_weight[:tokens, :, None]).sum(1) for m in (ours, ref)]
    torch.testing.assert_close(*picked, rtol=0, atol=1e-5)
    assert ours.tap_weight[tokens:].isnan().all(), "written past the tokens"


@pytest.mark.parametrize("h, w", [(2, 2), (14, 14), (2, 20), (24, 8), (40, 6)])
def test_bicubic_taps_are_grid_sample(h: int, w: int, device: torch.device) -> None:
    table = torch.randn(7, 7, 24, device=device)
    rows, cols = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    at = torch.stack([(cols + 0.5) / w * 2 - 1, (rows + 0.5) / h * 2 - 1], -1)[None]
    image = rearrange(table, "h w c -> 1 c h w")
    wanted = F.grid_sample(image, at, mode="bicubic", align_corners=False, padding_mode="border")
    wanted = rearrange(wanted, "1 c (bh mh) (bw mw) -> (bh bw mh mw) c", mh=2, mw=2)
    meta = fill(vision_metadata, [(1, h, w)], device, taps=16)
    picked = (table.reshape(49, 24)[meta.tap_index.long()] * meta.tap_weight[:, :, None]).sum(1)
    torch.testing.assert_close(picked, wanted, rtol=0, atol=2e-5)
