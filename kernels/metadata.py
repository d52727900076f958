"""Everything the encoder needs to know about a batch, from grid_thw, in one launch on the device.

    tokens  : rotary cos and sin of (row, col), and the position table's taps and weights    one row a token
    frames  : cu_seqlens                                                                     one entry a frame
    tiles   : attention's query tiles                                                        one row a tile
    counts  : how many there are of each

Tokens of a frame come in merge-block order: (block row, block col, row in block, col in block). Angles are
`row * f` and `col * f` with `f = theta^(-2i / (head_dim / 2))`, i < head_dim / 4 (2-D rotary embedding of Qwen2-VL,
arXiv:2409.12191); taps are bilinear with aligned corners, as `F.interpolate(align_corners=True)`.
A grid row of zeros is an empty item, so a table padded with zeros needs no count of its own.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TOKENS, MERGED, FRAMES, TILES = range(4)
BLOCK = 128


@dataclass(frozen=True)
class Metadata:
    """Device-side facts of one batch, filled by `vision_metadata`. Padding is stated beside each field.

    Attributes:
        counts: `[4, 4]` int32; column 0 holds tokens, merged tokens, frames, tiles (rows 16 bytes apart, so that a
            pointer to any of them is equally aligned).
        rope: `[tokens, 2, head_dim / 2]` fp32, cos and sin. Past the count: undefined, never read.
        tap_index: `[tokens, taps]` int32 rows of the position table. Past the count: undefined, never read.
        tap_weight: `[tokens, taps]` fp32. Past the count: undefined, never read.
        cu_seqlens: `[frames + 1]` int32. Past the count: the total, so that it is monotone.
        tiles: `[tiles, 4]` int32, see `attention.Segments`. Past the count: zeros.
    """

    counts: torch.Tensor
    rope: torch.Tensor
    tap_index: torch.Tensor
    tap_weight: torch.Tensor
    cu_seqlens: torch.Tensor
    tiles: torch.Tensor

    def count(self, which: int) -> torch.Tensor:
        """`[1]` int32 view of one count (`TOKENS`, `MERGED`, `FRAMES`, `TILES`)."""
        return self.counts[which, :1]


@triton.jit
def _locate(offs, grid_ptr, num_items, KIND: tl.constexpr, BLOCK_Q: tl.constexpr, ITEMS: tl.constexpr):
    """Which item each of `offs` belongs to, counting tokens (KIND 0), frames (2) or tiles (3).

    Returns, for each: its offset within the item, the item's first token, height, width; and the totals.
    """
    total = 0
    total_tokens = 0
    within = offs * 0
    first = offs * 0
    height = offs * 0
    width = offs * 0
    for start in tl.range(0, num_items, ITEMS):
        item = start + tl.arange(0, ITEMS)
        mask = item < num_items
        t = tl.load(grid_ptr + 3 * item, mask=mask, other=0)
        h = tl.load(grid_ptr + 3 * item + 1, mask=mask, other=0)
        w = tl.load(grid_ptr + 3 * item + 2, mask=mask, other=0)
        tokens = t * h * w
        if KIND == 0:
            size = tokens
        elif KIND == 2:
            size = t
        else:
            size = t * ((h * w + BLOCK_Q - 1) // BLOCK_Q)
        begin = total + tl.cumsum(size, 0) - size  # [ITEMS]
        begin_tokens = total_tokens + tl.cumsum(tokens, 0) - tokens
        here = (offs[:, None] >= begin[None, :]) & (offs[:, None] < (begin + size)[None, :])  # one a row at most
        within += tl.sum(tl.where(here, offs[:, None] - begin[None, :], 0), 1)
        first += tl.sum(tl.where(here, begin_tokens[None, :], 0), 1)
        height += tl.sum(tl.where(here, h[None, :], 0), 1)
        width += tl.sum(tl.where(here, w[None, :], 0), 1)
        total += tl.sum(size, 0)
        total_tokens += tl.sum(tokens, 0)
    return within, first, height, width, total, total_tokens


@triton.jit
def _axis_taps(index, size, SIDE: tl.constexpr):
    """Bilinear taps of one axis with aligned corners: (lower index, upper index, upper weight)."""
    source = tl.math.div_rn(index.to(tl.float32) * (SIDE - 1), tl.maximum(size - 1, 1).to(tl.float32))
    lower = tl.floor(source)
    low = lower.to(tl.int32)
    return low, tl.minimum(low + 1, SIDE - 1), source - lower


@triton.jit
def _store_rope(rope_ptr, inv_freq_ptr, offs, row, col, mask, HEAD_DIM: tl.constexpr, FREQS: tl.constexpr):
    QUARTER: tl.constexpr = HEAD_DIM // 4
    f = tl.arange(0, FREQS)
    inv_freq = tl.load(inv_freq_ptr + f, mask=f < QUARTER, other=0.0)
    ptrs = rope_ptr + offs.to(tl.int64)[:, None] * HEAD_DIM + f[None, :]
    mask = mask[:, None] & (f < QUARTER)[None, :]
    angle = row.to(tl.float32)[:, None] * inv_freq[None, :]  # [BLOCK, FREQS]
    tl.store(ptrs, tl.cos(angle), mask=mask)
    tl.store(ptrs + 2 * QUARTER, tl.sin(angle), mask=mask)
    angle = col.to(tl.float32)[:, None] * inv_freq[None, :]
    tl.store(ptrs + QUARTER, tl.cos(angle), mask=mask)
    tl.store(ptrs + 3 * QUARTER, tl.sin(angle), mask=mask)


@triton.jit
def _store_taps(index_ptr, weight_ptr, offs, row, col, height, width, mask, SIDE: tl.constexpr):
    top, bottom, down = _axis_taps(row, height, SIDE)
    left, right, across = _axis_taps(col, width, SIDE)
    base = 4 * offs.to(tl.int64)
    tl.store(index_ptr + base, top * SIDE + left, mask=mask)
    tl.store(index_ptr + base + 1, top * SIDE + right, mask=mask)
    tl.store(index_ptr + base + 2, bottom * SIDE + left, mask=mask)
    tl.store(index_ptr + base + 3, bottom * SIDE + right, mask=mask)
    tl.store(weight_ptr + base, (1.0 - down) * (1.0 - across), mask=mask)
    tl.store(weight_ptr + base + 1, (1.0 - down) * across, mask=mask)
    tl.store(weight_ptr + base + 2, down * (1.0 - across), mask=mask)
    tl.store(weight_ptr + base + 3, down * across, mask=mask)


@triton.jit
def _store_tokens(
    offs, grid_ptr, num_items, counts_ptr, rope_ptr, index_ptr, weight_ptr, inv_freq_ptr,
    MERGE: tl.constexpr, HEAD_DIM: tl.constexpr, FREQS: tl.constexpr, SIDE: tl.constexpr, BLOCK_Q: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    within, first, height, width, total, _ = _locate(offs, grid_ptr, num_items, 0, BLOCK_Q, ITEMS)
    mask = offs < total
    h = tl.maximum(height, 1)
    w = tl.maximum(width, MERGE)
    within = within % (h * w)
    block = within // (MERGE * MERGE)
    row = block // (w // MERGE) * MERGE + within // MERGE % MERGE
    col = block % (w // MERGE) * MERGE + within % MERGE
    _store_rope(rope_ptr, inv_freq_ptr, offs, row, col, mask, HEAD_DIM, FREQS)
    if SIDE > 0:
        _store_taps(index_ptr, weight_ptr, offs, row, col, h, w, mask, SIDE)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, total)
        tl.store(counts_ptr + 4, total // (MERGE * MERGE))


@triton.jit(do_not_specialize=["num_items", "token_programs", "frame_programs", "num_cu", "num_tiles"])
def _metadata_kernel(
    grid_ptr,  # [items, 3] int32, (t, h, w)
    inv_freq_ptr,  # [HEAD_DIM / 4] fp32
    counts_ptr,  # [4, 4] int32
    rope_ptr,  # [T, 2, HEAD_DIM / 2] fp32
    index_ptr,  # [T, 4] int32
    weight_ptr,  # [T, 4] fp32
    cu_ptr,  # [num_cu] int32
    tiles_ptr,  # [num_tiles, 4] int32
    num_items,
    token_programs,
    frame_programs,
    num_cu,
    num_tiles,
    MERGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FREQS: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < token_programs:
        offs = pid * BLOCK + tl.arange(0, BLOCK)
        _store_tokens(
            offs, grid_ptr, num_items, counts_ptr, rope_ptr, index_ptr, weight_ptr, inv_freq_ptr,
            MERGE, HEAD_DIM, FREQS, SIDE, BLOCK_Q, ITEMS,
        )  # fmt: skip
    elif pid < token_programs + frame_programs:
        offs = (pid - token_programs) * BLOCK + tl.arange(0, BLOCK)
        within, first, height, width, total, tokens = _locate(offs, grid_ptr, num_items, 2, BLOCK_Q, ITEMS)
        tl.store(cu_ptr + offs, tl.where(offs < total, first + within * height * width, tokens), mask=offs < num_cu)
        if pid == token_programs:
            tl.store(counts_ptr + 8, total)
    else:
        offs = (pid - token_programs - frame_programs) * BLOCK + tl.arange(0, BLOCK)
        within, first, height, width, total, _ = _locate(offs, grid_ptr, num_items, 3, BLOCK_Q, ITEMS)
        size = height * width
        per_frame = tl.maximum((size + BLOCK_Q - 1) // BLOCK_Q, 1)
        begin = first + within // per_frame * size
        ptrs = tiles_ptr + 4 * offs
        mask = offs < num_tiles
        tl.store(ptrs, begin, mask=mask)
        tl.store(ptrs + 1, begin + size, mask=mask)
        tl.store(ptrs + 2, begin + within % per_frame * BLOCK_Q, mask=mask)
        tl.store(ptrs + 3, offs * 0, mask=mask)
        if pid == token_programs + frame_programs:
            tl.store(counts_ptr + 12, total)


def vision_metadata(
    grid: torch.Tensor,
    inv_freq: torch.Tensor,
    out: Metadata,
    merge: int,
    head_dim: int,
    side: int,
    block_m: int,
) -> Metadata:
    """Fills `out` from `grid`; capacities are the shapes of `out`.

    Args:
        grid: `[items, 3]` int32 (t, h, w) on the device, rows of zeros for no item.
        inv_freq: `[head_dim / 4]` fp32.
        merge: spatial merge size; h and w are multiples of it.
        head_dim: channels of a head, a multiple of 4.
        side: side of the square position table, 0 for none.
        block_m: queries of an attention tile.
    """
    num_cu, num_tiles = out.cu_seqlens.shape[0], out.tiles.shape[0]
    token_programs = max(1, triton.cdiv(out.rope.shape[0], BLOCK))
    frame_programs = triton.cdiv(num_cu, BLOCK)
    _metadata_kernel[(token_programs + frame_programs + max(1, triton.cdiv(num_tiles, BLOCK)),)](
        grid,
        inv_freq,
        out.counts,
        out.rope,
        out.tap_index,
        out.tap_weight,
        out.cu_seqlens,
        out.tiles,
        grid.shape[0],
        token_programs,
        frame_programs,
        num_cu,
        num_tiles,
        MERGE=merge,
        HEAD_DIM=head_dim,
        FREQS=triton.next_power_of_2(head_dim // 4),
        SIDE=side,
        BLOCK_Q=block_m,
        BLOCK=BLOCK,
        ITEMS=16,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
