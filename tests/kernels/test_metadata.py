"""The metadata kernel against its torch twin over random grids, and the twin against Hugging Face's own helpers."""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedvit.kernels.configs import LinearConfig
from fusedvit.kernels.epilogue import Epilogue, Taps
from fusedvit.kernels.linear import linear
from fusedvit.kernels.metadata import FRAMES, MERGED, TILES, TOKENS, Metadata, vision_metadata
from fusedvit.kernels.reference.metadata import vision_metadata as vision_metadata_ref
from tests.kernels.metadata_cases import Grid, fill, frames_of, grids
from tests.kernels.support import count, padded

EXAMPLES = 25


def assert_same(ours: Metadata, twin: Metadata, tokens: int) -> None:
    """Integers exactly, fractions and angles to fp32's last places; all padding that is ever read included."""
    assert torch.equal(ours.counts[:, 0], twin.counts[:, 0])
    assert torch.equal(ours.cu_seqlens, twin.cu_seqlens)
    assert torch.equal(ours.tiles, twin.tiles)
    assert torch.equal(ours.tap_index[:tokens], twin.tap_index[:tokens])
    torch.testing.assert_close(ours.tap_weight[:tokens], twin.tap_weight[:tokens], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.rope[:tokens], twin.rope[:tokens], rtol=0, atol=2e-6)
    for field in (ours.rope, ours.tap_weight):
        assert field[tokens:].isnan().all(), "written past the tokens"


def assert_padding(meta: Metadata, grid: Grid, block_m: int) -> None:
    frames = frames_of(grid)
    tokens, tiles = sum(frames), sum(-(-n // block_m) for n in frames)
    counts = [int(meta.count(which)) for which in (TOKENS, FRAMES, TILES)]
    assert counts == [tokens, len(frames), tiles]
    assert (meta.cu_seqlens.diff() >= 0).all() and (meta.cu_seqlens[len(frames) :] == tokens).all()
    assert (meta.tiles[tiles:] == 0).all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(grids(2, 8), st.sampled_from([16, 64]), st.integers(0, 200))
@example([], 16, 0)
@example([], 16, 3)  # nothing in room for something
@example([(1, 2, 2)], 16, 0)  # one merged token
@example([(1, 8, 16)], 64, 0)  # 128 tokens: a program's block exactly
@example([(0, 4, 4)], 16, 1)  # a video without frames
@example([(1, 2, 2)] * 16, 16, 0)  # items are looked up 16 at a time: a chunk exactly
@example([(1, 2, 2)] * 31 + [(3, 4, 6), (1, 6, 2)], 16, 5)  # a video at the end of a chunk, an image in a third
@example([(0, 0, 0)] * 40 + [(2, 4, 2)], 16, 5)  # a chunk of nothing first
@example([(70, 2, 2), (1, 4, 2)], 16, 0)  # more frames than tokens of a frame
@example([(130, 2, 2)], 16, 0)  # frames and tiles past a program's block of 128
def test_kernel_is_its_twin(device: torch.device, grid: Grid, block_m: int, room: int) -> None:
    ours = fill(vision_metadata, grid, device, block_m=block_m, room=room)
    twin = fill(vision_metadata_ref, grid, device, block_m=block_m, room=room)
    assert_same(ours, twin, sum(frames_of(grid)))
    assert_padding(ours, grid, block_m)
    assert int(ours.count(MERGED)) * 4 == sum(frames_of(grid))


@pytest.mark.parametrize("merge, head_dim, side", [(1, 32, 7), (3, 72, 48), (2, 80, 1), (2, 128, 0)])
def test_kernel_is_its_twin_in_other_towers(merge: int, head_dim: int, side: int, device: torch.device) -> None:
    """Merge 1 and 3, a quarter head of 18 (no power of two), a position table of one entry, and none."""
    grid = [(1, 3 * merge, merge), (2, merge, 4 * merge), (1, 17 * merge, 5 * merge)]
    options = {"merge": merge, "head_dim": head_dim, "side": side, "block_m": 64, "room": 9}
    ours, twin = (fill(op, grid, device, **options) for op in (vision_metadata, vision_metadata_ref))
    assert_same(ours, twin, sum(frames_of(grid)))
    assert_padding(ours, grid, 64)


@settings(max_examples=EXAMPLES, deadline=None)
@given(grids(2, 40))
@example([(1, 2, 2)] * 33)
def test_twin_is_hugging_face(grid: Grid) -> None:
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
    twin = fill(vision_metadata_ref, grid, device)
    torch.testing.assert_close(ours.rope, twin.rope, rtol=0, atol=2e-6)
