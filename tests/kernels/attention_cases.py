"""Packed ragged attention: tensors, segments with spare room, and the formula written out."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from einops import rearrange

from fusedvit.kernels.attention import Segments, query_scale
from fusedvit.kernels.tile_configs import AttentionConfig
from tests.kernels.support import NAN, count, random

HEADS = 2


def packed(
    lengths: Sequence[int], head_dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0, heads: int = HEADS
) -> torch.Tensor:
    """q | k | v of all segments, `[sum(lengths), 3 * heads * head_dim]`, q scaled; scores are of order 1."""
    qkv = random(sum(lengths), 3 * heads * head_dim, seed=seed, device=device)
    qkv[:, : heads * head_dim] *= query_scale(head_dim)
    return qkv.to(dtype)


def with_room(t: torch.Tensor, rows: int) -> torch.Tensor:
    """`t` and `rows` rows of NaN."""
    return torch.cat([t, t.new_full((rows, t.shape[1]), NAN)])


def segments(
    lengths: Sequence[int], block_m: int, device: torch.device, room: int = 0, above: int = 0, up_to: int = 2**31 - 1
) -> Segments:
    """Segments of these lengths, with `room` tiles past the count that would overwrite the first rows if they ran.

    Tiles of those of more than `above` tokens only, and at most `up_to`.
    """
    cu = [0, *accumulate(lengths)]
    spans = [(b, e) for b, e in zip(cu, cu[1:], strict=False) if above < e - b <= up_to]
    tiles = [(b, e, row, 0) for b, e in spans for row in range(b, e, block_m)]
    poison = [(0, cu[-1], 0, 0)] * room
    return Segments(
        torch.tensor(cu + cu[-1:] * room, dtype=torch.int32, device=device),
        torch.tensor(tiles + poison, dtype=torch.int32, device=device).reshape(-1, 4),
        count(len(tiles), device),
        block_m,
        above,
        up_to,
    )


def plain(qkv: torch.Tensor, lengths: Sequence[int], head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Segment by segment as Hugging Face's eager attention: products round to `dtype`, softmax is fp32 or wider."""
    out = []
    for rows in qkv.to(dtype).split(list(lengths)):
        q, k, v = rearrange(rows, "t (three h d) -> three h t d", three=3, d=head_dim)
        scores = q @ k.transpose(1, 2) * math.log(2)
        weights = scores.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        out.append(rearrange(weights @ v, "h t d -> t (h d)"))
    return torch.cat(out)


def run(
    op: Callable[..., torch.Tensor],
    qkv: torch.Tensor,
    segs: Segments,
    head_dim: int,
    config: AttentionConfig,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """`op`'s output in a buffer of NaN."""
    heads = qkv.shape[1] // (3 * head_dim)
    out = torch.full((qkv.shape[0], heads * head_dim), NAN, dtype=qkv.dtype, device=qkv.device)
    return op(qkv, segs, out, heads, head_dim, config, clip)
