"""From a token's row and column in its frame: rotary cos and sin, and taps into the learned position table.

    angle   = row f | col f,  f = theta^(-2i / (head_dim / 2)), i < head_dim / 4     2-D rotary, arXiv:2409.12191
    4 taps  : bilinear, aligned corners               F.interpolate(align_corners=True)
    16 taps : bicubic (Keys, a = -0.75), half-pixel centres, taps past the border clamped to it
                                                      F.grid_sample(align_corners=False, padding_mode="border")

For operands of 16 bits cos and sin of a pair are packed into one int32, and TMA loads these as a tile in the epilogue
of Hopper's GEMM: on an H200 that takes a quarter of the time of loading two floats value by value.

    packed[t, j] = u(cos) | u(sin) << 16,   u(v) = min(round((v + 1) 32768), 65535),   of pair j mod (head_dim / 2)

The error is at most 3e-5, an eighth of fp16's rounding error near 1. The epilogue reads 32 pairs (64 columns) at a
time, from any pair on. So a row repeats its first 32 pairs at its end: the 32 are neighbours wherever they begin.

These are jit functions of the metadata kernel (metadata.py).
"""

import triton
import triton.language as tl

PAIRS_AT_A_TIME = 32  # pairs that an epilogue reads at once
STEP = tl.constexpr(8)  # pairs per iteration of a loop: fetching unrolled code takes longer than running it


def packed_width(head_dim: int) -> int:
    """int32 columns of packed cos/sin for heads of `head_dim` channels; rows start at multiples of 16 bytes."""
    pairs = head_dim // 2
    return pairs if pairs % PAIRS_AT_A_TIME == 0 else -(-(pairs + PAIRS_AT_A_TIME) // 4) * 4


# ── rotary embedding ──────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _fixed_point(v):
    """u(v) of fp32 in -1 .. 1."""
    return tl.minimum(v * 32768.0 + 32768.5, 65535.0).to(tl.int32)


@triton.jit
def _pack(cos, sin):
    return _fixed_point(cos) | (_fixed_point(sin) << 16)


@triton.jit
def cos_sin(angle):
    """(cos, sin) of fp32 angles from 0 to 16384 radians, off by 1.2e-7 at most.

    Cody and Waite's reduction by multiples of pi / 2 = HI + MID + LO: HI has 8 bits and MID 10, so that their products
    by a 14-bit multiple are exact. Then the polynomials of Cephes' sinf and cosf. libdevice's functions take any angle,
    at ten times the instructions.
    """
    HI: tl.constexpr = 1.5703125
    MID: tl.constexpr = 0.000483989715576171875
    LO: tl.constexpr = -1.6292068e-07
    SHIFT: tl.constexpr = 12582912.0  # 1.5 * 2^23: a float of this size has its integer in its last bits
    # An explicit fma: the compiler might else fuse the product that `angle` comes from, and never round it.
    shifted = tl.fma(angle, 0.6366197723675814, SHIFT)
    multiple = shifted - SHIFT
    r = tl.fma(multiple, -LO, tl.fma(multiple, -MID, tl.fma(multiple, -HI, angle)))
    z = r * r
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * (z * r) + r
    cos = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * (z * z) + (1.0 - 0.5 * z)
    quadrant = shifted.to(tl.int32, bitcast=True)
    swapped = (quadrant & 1) != 0
    cos, sin = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    return tl.where(((quadrant + 1) & 2) != 0, -cos, cos), tl.where((quadrant & 2) != 0, -sin, sin)


@triton.jit
def frequencies(inv_freq_ptr, start, PAIRS: tl.constexpr):
    """[STEP] fp32, of the pairs from `start` on: the first half rotates by row, the second by column."""
    pair = start + tl.arange(0, STEP)
    index = tl.where(pair < PAIRS // 2, pair, pair - PAIRS // 2)
    return tl.load(inv_freq_ptr + index, mask=pair < PAIRS, other=0.0)


@triton.jit
def store_rope(
    rope_ptr, packed_ptr, inv_freq_ptr, inv_freq, offs, row, col, mask, num_pairs,
    PAIRS: tl.constexpr, PACKED_COLS: tl.constexpr,
):  # fmt: skip
    """Stores packed cos/sin of tokens; if PACKED_COLS is 0, fp32 cos and sin instead.

    Args:
        inv_freq: of the first STEP pairs.
        num_pairs: PAIRS as a runtime value, so that the loop is not unrolled.
    """
    both = (row.to(tl.int64) << 32 | col.to(tl.int64))[:, None]  # one exchange between threads, one barrier
    row, col = (both >> 32).to(tl.int32).to(tl.float32), both.to(tl.int32).to(tl.float32)
    offs, mask = offs.to(tl.int64)[:, None], mask[:, None]
    for start in tl.range(0, num_pairs, STEP):
        pair = (start + tl.arange(0, STEP))[None, :]
        cos, sin = cos_sin(tl.where(pair < PAIRS // 2, row, col) * inv_freq[None, :])  # [BLOCK, STEP]
        if PACKED_COLS > 0:
            packed = _pack(cos, sin)
            for repeat in tl.static_range(0, PACKED_COLS, PAIRS):
                valid = mask & (pair < PAIRS) & (pair < PACKED_COLS - repeat)
                tl.store(packed_ptr + offs * PACKED_COLS + (pair + repeat), packed, mask=valid)
        else:
            ptrs = rope_ptr + offs * (2 * PAIRS) + pair
            tl.store(ptrs, cos, mask=mask & (pair < PAIRS))
            tl.store(ptrs + PAIRS, sin, mask=mask & (pair < PAIRS))
        inv_freq = frequencies(inv_freq_ptr, start + STEP, PAIRS)


# ── learned positions ─────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def store_axes(index_ptr, weight_ptr, offs, row, col, mask, SIDE: tl.constexpr):
    """Stores the 2 taps of tokens: an entry of the columns' table, and one of the rows' table behind it."""
    base = 2 * offs.to(tl.int64)
    tl.store(index_ptr + base, col, mask=mask)
    tl.store(index_ptr + base + 1, SIDE + row, mask=mask)
    tl.store(weight_ptr + base, 1.0, mask=mask)
    tl.store(weight_ptr + base + 1, 1.0, mask=mask)


@triton.jit
def _linear_axis(index, size, SIDE: tl.constexpr):
    """Bilinear taps of one axis with aligned corners: (lower index, upper index, upper weight)."""
    source = tl.math.div_rn(index.to(tl.float32) * (SIDE - 1), tl.maximum(size - 1, 1).to(tl.float32))
    lower = tl.floor(source)
    low = lower.to(tl.int32)
    return low, tl.minimum(low + 1, SIDE - 1), source - lower


@triton.jit
def store_bilinear(index_ptr, weight_ptr, offs, row, col, height, width, mask, SIDE: tl.constexpr):
    """Stores the 4 taps of tokens, indices of a SIDE x SIDE table and weights."""
    top, bottom, down = _linear_axis(row, height, SIDE)
    left, right, across = _linear_axis(col, width, SIDE)
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
def store_bicubic(index_ptr, weight_ptr, offs, row, col, height, width, mask, SIDE: tl.constexpr):
    """Stores the 16 taps of tokens, indices of a SIDE x SIDE table and weights."""
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
