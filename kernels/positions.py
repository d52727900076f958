"""What a token's place in its frame gives: rotary cos and sin, and taps into the learned position table.

angle   = row f | col f,  f = theta^(-2i / (head_dim / 2)), i < head_dim / 4     2-D rotary, arXiv:2409.12191
4 taps  : bilinear, aligned corners                     F.interpolate(align_corners=True)
16 taps : bicubic (Keys, a = -0.75), half pixels, taps past the border clamped to it
                                                        F.grid_sample(align_corners=False, padding_mode="border")
"""

import triton
import triton.language as tl

# ── rope words ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Rotary factors in the form that a copy engine brings to the Hopper GEMM's epilogue: a word of 32 bits a pair.
#
#     word[t, j] = u(cos) | u(sin) << 16,   u(v) = min(round((v + 1) 32768), 65535),   of pair j mod (head_dim / 2)
#
# Off by 3e-5 at most, an eighth of what fp16 rounds near 1. A chunk of 64 columns has 32 pairs from any on:
# the first 32 are repeated at a row's end, so that they are neighbours wherever a chunk begins. One word instead of two
# floats, brought as a box instead of loaded value by value, made the epilogue of qkv four times cheaper on an H200.

CHUNK = 32  # pairs


def width(head_dim: int) -> int:
    """Words of a row for heads of `head_dim` channels: rows start at multiples of 16 bytes."""
    pairs = head_dim // 2
    return pairs if pairs % CHUNK == 0 else -(-(pairs + CHUNK) // 4) * 4


@triton.jit
def _fixed(v):
    return tl.minimum(v * 32768.0 + 32768.5, 65535.0).to(tl.int32)


@triton.jit
def _word(cos, sin):
    """int32 words of fp32 factors."""
    return _fixed(cos) | (_fixed(sin) << 16)


# ── positions ─────────────────────────────────────────────────────────────────────────────────────────────────────────

STEP = tl.constexpr(8)  # pairs at a time, in a loop: it is to fetch their code that takes time, not to run it


@triton.jit
def _axis_taps(index, size, SIDE: tl.constexpr):
    """Bilinear taps of one axis with aligned corners: (lower index, upper index, upper weight)."""
    source = tl.math.div_rn(index.to(tl.float32) * (SIDE - 1), tl.maximum(size - 1, 1).to(tl.float32))
    lower = tl.floor(source)
    low = lower.to(tl.int32)
    return low, tl.minimum(low + 1, SIDE - 1), source - lower


@triton.jit
def _cos_sin(angle):
    """(cos, sin) of fp32 angles from 0 to 16384 radians, off by 1.2e-7 at most.

    Cody and Waite's reduction by multiples of pi / 2 = HI + MID + LO, HI of 8 bits and MID of 10, so that their
    products by a multiple of 14 bits are exact, with the polynomials of Cephes' sinf and cosf. libdevice's functions
    take any angle at ten times the instructions.
    """
    HI: tl.constexpr = 1.5703125
    MID: tl.constexpr = 0.000483989715576171875
    LO: tl.constexpr = -1.6292068e-07
    SHIFT: tl.constexpr = 12582912.0  # 1.5 * 2^23: a float of this size has its integer in its last bits
    # fma: left to the compiler, the product that the angle is might be fused, and the angle never rounded
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
def _frequencies(inv_freq_ptr, start, PAIRS: tl.constexpr):
    """[STEP] fp32 of the pairs from `start` on: rows', then columns'."""
    pair = start + tl.arange(0, STEP)
    index = tl.where(pair < PAIRS // 2, pair, pair - PAIRS // 2)
    return tl.load(inv_freq_ptr + index, mask=pair < PAIRS, other=0.0)


@triton.jit
def _store_rope(
    rope_ptr, words_ptr, inv_freq_ptr, inv_freq, offs, row, col, mask, num_pairs,
    PAIRS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The words of a row (see packed_cos_sin.py), or without any its cos and sin.

    Args:
        inv_freq: of the first STEP pairs.
        num_pairs: PAIRS, without the compiler's knowing.
    """
    place = (row.to(tl.int64) << 32 | col.to(tl.int64))[:, None]  # in one: that other threads get both takes a barrier
    row, col = (place >> 32).to(tl.int32).to(tl.float32), place.to(tl.int32).to(tl.float32)
    offs, mask = offs.to(tl.int64)[:, None], mask[:, None]
    for start in tl.range(0, num_pairs, STEP):
        pair = (start + tl.arange(0, STEP))[None, :]
        cos, sin = _cos_sin(tl.where(pair < PAIRS // 2, row, col) * inv_freq[None, :])  # [BLOCK, STEP]
        if WORDS > 0:
            word = _word(cos, sin)
            for repeat in tl.static_range(0, WORDS, PAIRS):
                there = mask & (pair < PAIRS) & (pair < WORDS - repeat)
                tl.store(words_ptr + offs * WORDS + (pair + repeat), word, mask=there)
        else:
            ptrs = rope_ptr + offs * (2 * PAIRS) + pair
            tl.store(ptrs, cos, mask=mask & (pair < PAIRS))
            tl.store(ptrs + PAIRS, sin, mask=mask & (pair < PAIRS))
        inv_freq = _frequencies(inv_freq_ptr, start + STEP, PAIRS)


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
