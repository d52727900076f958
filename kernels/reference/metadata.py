"""Reference of `kernels.metadata`, item by item on the host."""

from itertools import accumulate

import torch
import torch.nn.functional as F
from einops import rearrange, repeat

from fusedvit.kernels.metadata import (
    FRAMES,
    MERGED,
    SHORT_TILES,
    TILES,
    TOKENS,
    WINDOW_TILES,
    WINDOWS,
    Layout,
    Metadata,
)
from fusedvit.kernels.reference.positions import packed_cos_sin


def _positions(h: int, w: int, merge: int) -> torch.Tensor:
    """The raster index of a frame's tokens in merge-block order, `[h * w]` int64."""
    index = torch.arange(h * w, device="cpu").view(h, w)
    return rearrange(index, "(bh mh) (bw mw) -> (bh bw mh mw)", mh=merge, mw=merge)


def _windows(h: int, w: int, side: int) -> tuple[torch.Tensor, list[int]]:
    """Merged tokens of an h x w frame window by window: their indices, and how many each window holds."""
    index = F.pad(torch.arange(h * w, device="cpu").view(h, w), (0, -w % side, 0, -h % side), value=-1)
    cut = rearrange(index, "(ih sh) (iw sw) -> (ih iw) (sh sw)", sh=side, sw=side)
    return cut[cut >= 0], (cut >= 0).sum(1).tolist()


def _linear_taps(index: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bilinear taps of one axis with aligned corners: indices and weights, each `[n, 2]`."""
    source = index.float() * (side - 1) / max(size - 1, 1)
    low = source.floor().long()
    up = source - low
    return torch.stack([low, (low + 1).clamp(max=side - 1)], 1), torch.stack([1 - up, up], 1)


def _cubic_taps(index: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bicubic taps of one axis with half-pixel centres, clamped to the border: indices and weights, each `[n, 4]`."""
    source = (index.float() + 0.5) * side / size - 0.5
    low, tap = source.floor().long(), torch.arange(-1, 3, device="cpu")
    d = (source[:, None] - low[:, None] - tap).abs()
    near = (1.25 * d - 2.25) * d * d + 1
    far = ((-0.75 * d + 3.75) * d - 6) * d + 3
    return (low[:, None] + tap).clamp(0, side - 1), torch.where(tap.sub(0.5).abs() < 1, near, far)


def _taps(row: torch.Tensor, col: torch.Tensor, h: int, w: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    if layout.taps == 2:
        return torch.stack([col, layout.side + row], 1).int(), torch.ones(len(row), 2, device="cpu")
    axis = _linear_taps if layout.taps == 4 else _cubic_taps
    rows, row_weights = axis(row, h, layout.side)
    cols, col_weights = axis(col, w, layout.side)
    index = rows[:, :, None] * layout.side + cols[:, None, :]
    weight = row_weights[:, :, None] * col_weights[:, None, :]
    return rearrange(index, "n r c -> n (r c)").int(), rearrange(weight, "n r c -> n (r c)")


def _rope(row: torch.Tensor, col: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """`[n, 2, head_dim / 2]` fp32."""
    angle = torch.cat([row[:, None].float() * inv_freq, col[:, None].float() * inv_freq], dim=1)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def vision_metadata(grid: torch.Tensor, inv_freq: torch.Tensor, out: Metadata, layout: Layout) -> Metadata:
    """See `fusedvit.kernels.metadata.vision_metadata`."""
    frames: list[int] = []
    windows: list[int] = []
    token, unit = 0, layout.merge**2
    for t, h, w in grid.tolist():
        tokens = slice(token, token + t * h * w)
        token = tokens.stop
        frames += [h * w] * t
        if t * h * w == 0:
            continue
        raster = _positions(h, w, layout.merge)
        if layout.window:
            order, sizes = _windows(h // layout.merge, w // layout.merge, layout.window // layout.merge)
            raster = raster.view(-1, unit)[order].flatten()
            starts = torch.arange(tokens.start // unit, tokens.stop // unit, len(order), device="cpu")
            out.order[tokens.start // unit : tokens.stop // unit] = (starts[:, None] + order).flatten().to(out.order)
            windows += [size * unit for size in sizes] * t
        row, col = raster // w, raster % w
        out.rope[tokens] = repeat(_rope(row, col, inv_freq.cpu()), "n c f -> (t n) c f", t=t).to(out.rope)
        if layout.taps:
            index, weight = _taps(row, col, h, w, layout)
            out.tap_index[tokens] = repeat(index, "n k -> (t n) k", t=t).to(out.tap_index)
            out.tap_weight[tokens] = repeat(weight, "n k -> (t n) k", t=t).to(out.tap_weight)
    _segments(frames, out.cu_seqlens, out.count(FRAMES))
    _tiles(frames, layout.block_m, layout.short, max(frames, default=0), out.tiles, out.count(TILES))
    if layout.short:
        _tiles(frames, layout.short_block_m, 0, layout.short, out.short_tiles, out.count(SHORT_TILES))
    if layout.window:
        _segments(windows, out.window_cu_seqlens, out.count(WINDOWS))
        side = layout.window**2
        _tiles(windows, layout.window_block_m, 0, side, out.window_tiles, out.count(WINDOW_TILES))
    out.counts[TOKENS, 0], out.counts[MERGED, 0] = token, token // unit
    if out.packed_cos_sin.shape[1]:
        packed_cos_sin(out.rope, out.count(TOKENS), out.packed_cos_sin)
    return out


def _segments(lengths: list[int], cu: torch.Tensor, count: torch.Tensor) -> None:
    ends = torch.tensor([0, *lengths], device="cpu").cumsum(0)
    cu[: len(ends)] = ends.to(cu)
    cu[len(ends) :] = int(ends[-1])
    count.fill_(len(lengths))


def _tiles(lengths: list[int], block_m: int, above: int, up_to: int, table: torch.Tensor, count: torch.Tensor) -> None:
    """Tiles of segments of more than `above` tokens, and at most `up_to`."""
    starts = zip(accumulate(lengths, initial=0), lengths, strict=False)
    rows = [(b, b + n, r, 0) for b, n in starts if above < n <= up_to for r in range(b, b + n, block_m)]
    table.zero_()
    if rows:
        table[: len(rows)] = torch.tensor(rows, device="cpu").to(table)
    count.fill_(len(rows))
