"""What a token's place in its frame gives: rotary cos and sin, and taps into the learned position table.

angle   = row f | col f,  f = theta^(-2i / (head_dim / 2)), i < head_dim / 4     2-D rotary, arXiv:2409.12191
4 taps  : bilinear, aligned corners                     F.interpolate(align_corners=True)
16 taps : bicubic (Keys, a = -0.75), half pixels, taps past the border clamped to it
                                                        F.grid_sample(align_corners=False, padding_mode="border")
"""

import triton
import triton.language as tl


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
def _store_bilinear(index_ptr, weight_ptr, offs, row, col, height, width, mask, SIDE: tl.constexpr):
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
def _cubic_axis(index, size, SIDE: tl.constexpr):
    """(index below, distance from it) of one axis with half-pixel centres."""
    source = tl.math.div_rn((index.to(tl.float32) + 0.5) * SIDE, size.to(tl.float32)) - 0.5
    lower = tl.floor(source)
    return lower.to(tl.int32), source - lower


@triton.jit
def _cubic_weight(distance, TAP: tl.constexpr):
    """Weight of tap TAP (0 to 3, at -1 to 2 from the index below) by Keys' kernel with a = -0.75."""
    if TAP == 0:
        d = distance + 1.0
    elif TAP == 1:
        d = distance
    elif TAP == 2:
        d = 1.0 - distance
    else:
        d = 2.0 - distance
    if TAP == 1 or TAP == 2:
        return (1.25 * d - 2.25) * d * d + 1.0
    else:
        return ((-0.75 * d + 3.75) * d - 6.0) * d + 3.0


@triton.jit
def _store_bicubic(index_ptr, weight_ptr, offs, row, col, height, width, mask, SIDE: tl.constexpr):
    top, down = _cubic_axis(row, height, SIDE)
    left, across = _cubic_axis(col, width, SIDE)
    base = 16 * offs.to(tl.int64)
    for i in tl.static_range(4):
        at_row = tl.minimum(tl.maximum(top + (i - 1), 0), SIDE - 1) * SIDE
        row_weight = _cubic_weight(down, i)
        for j in tl.static_range(4):
            at = at_row + tl.minimum(tl.maximum(left + (j - 1), 0), SIDE - 1)
            tl.store(index_ptr + base + (4 * i + j), at, mask=mask)
            tl.store(weight_ptr + base + (4 * i + j), row_weight * _cubic_weight(across, j), mask=mask)
