"""Torch twin of `kernels.metadata`, item by item."""

import torch
from einops import rearrange, repeat

from fusedvit.kernels.metadata import FRAMES, MERGED, TILES, TOKENS, Metadata


def _positions(h: int, w: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, col) of a frame's tokens in merge-block order, each `[h * w]` int64."""
    index = torch.arange(h * w).view(h, w)
    order = rearrange(index, "(bh mh) (bw mw) -> (bh bw mh mw)", mh=merge, mw=merge)
    return order // w, order % w


def _axis_taps(index: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bilinear taps of one axis with aligned corners: indices and weights, each `[n, 2]`."""
    source = index.float() * (side - 1) / max(size - 1, 1)
    low = source.floor().long()
    up = source - low
    return torch.stack([low, (low + 1).clamp(max=side - 1)], 1), torch.stack([1 - up, up], 1)


def _taps(row: torch.Tensor, col: torch.Tensor, h: int, w: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, row_weights = _axis_taps(row, h, side)
    cols, col_weights = _axis_taps(col, w, side)
    index = rows[:, :, None] * side + cols[:, None, :]
    weight = row_weights[:, :, None] * col_weights[:, None, :]
    return rearrange(index, "n r c -> n (r c)").int(), rearrange(weight, "n r c -> n (r c)")


def _rope(row: torch.Tensor, col: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """`[n, 2, head_dim / 2]` fp32."""
    angle = torch.cat([row[:, None].float() * inv_freq, col[:, None].float() * inv_freq], dim=1)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def vision_metadata(
    grid: torch.Tensor,
    inv_freq: torch.Tensor,
    out: Metadata,
    merge: int,
    head_dim: int,
    side: int,
    block_m: int,
) -> Metadata:
    """See `fusedvit.kernels.metadata.vision_metadata`."""
    lengths: list[int] = []
    token = 0
    for t, h, w in grid.tolist():
        tokens = slice(token, token + t * h * w)
        token = tokens.stop
        lengths += [h * w] * t
        if t * h * w == 0:
            continue
        row, col = _positions(h, w, merge)
        out.rope[tokens] = repeat(_rope(row, col, inv_freq.cpu()), "n c f -> (t n) c f", t=t).to(out.rope)
        if side:
            index, weight = _taps(row, col, h, w, side)
            out.tap_index[tokens] = repeat(index, "n k -> (t n) k", t=t).to(out.tap_index)
            out.tap_weight[tokens] = repeat(weight, "n k -> (t n) k", t=t).to(out.tap_weight)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    out.cu_seqlens[: len(ends)] = ends.to(out.cu_seqlens)
    out.cu_seqlens[len(ends) :] = token
    tiles = [(b, b + n, r, 0) for b, n in zip(ends.tolist(), lengths, strict=False) for r in range(b, b + n, block_m)]
    out.tiles.zero_()
    if tiles:
        out.tiles[: len(tiles)] = torch.tensor(tiles).to(out.tiles)
    for which, count in ((TOKENS, token), (MERGED, token // merge**2), (FRAMES, len(lengths)), (TILES, len(tiles))):
        out.counts[which, 0] = count
    return out
