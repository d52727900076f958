"""What plain Triton does with a tile's sums between the product and rounding: see linear.py for the formula."""

import triton
import triton.language as tl


@triton.jit
def _activate(x, ACT: tl.constexpr):
    """The activation on fp32 values. gelu_tanh(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))."""
    if ACT == "gelu_tanh":
        return x / (1.0 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "quick_gelu":
        return x / (1.0 + tl.exp2(-2.45546696 * x))
    else:
        return x


@triton.jit
def _gate_pairs(acc, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] of (gate, up) pairs -> silu(gate) up, [BLOCK_M, BLOCK_N / 2]."""
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + tl.exp2(-1.4426950408889634 * gate)) * up


@triton.jit
def _unpack(word):
    """(cos, sin) from the halves u of a word: u / 32768 - 1, exact in fp32. As the mantissa of 2^23, u makes 2^23 + u
    without the unit that makes integers floats, a quarter as wide as others: by that one words were 5 % slower."""
    cos = ((word & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
    sin = (((word >> 16) & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
    return cos * (1.0 / 32768) - 257.0, sin * (1.0 / 32768) - 257.0


@triton.jit
def _rotate_pairs(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    rope_ptr,  # [T, WORDS] int32: cos and sin of a pair (see rope_words.py); or [T, 2, HEAD_DIM / 2] fp32
    rows,  # [BLOCK_M] int64
    mask_m,
    col0,
    ROPE_COLS: tl.constexpr,  # q and k columns; the rest (v) is left alone
    HEAD_DIM: tl.constexpr,
    WORDS: tl.constexpr,  # 0: factors in fp32
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    a, b = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
    pair = col0 // 2 + tl.arange(0, BLOCK_N // 2)
    turned = (pair < ROPE_COLS // 2)[None, :]
    mask = mask_m[:, None] & turned
    if WORDS > 0:
        word = tl.load(rope_ptr + rows[:, None] * WORDS + (pair % (HEAD_DIM // 2))[None, :], mask=mask, other=0)
        cos, sin = _unpack(word)
        if ROPE_COLS % BLOCK_N != 0:
            cos, sin = tl.where(turned, cos, 1.0), tl.where(turned, sin, 0.0)
    else:
        ptrs = rope_ptr + rows[:, None] * HEAD_DIM + (pair % (HEAD_DIM // 2))[None, :]
        cos = tl.load(ptrs, mask=mask, other=1.0)
        sin = tl.load(ptrs + HEAD_DIM // 2, mask=mask, other=0.0)
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK_M, BLOCK_N))


@triton.jit
def _add_taps(
    acc, table_ptr, tap_index_ptr, tap_weight_ptr, rows, mask_m, cols, mask_n, N: tl.constexpr, TAPS: tl.constexpr
):
    for i in tl.static_range(TAPS):
        index = tl.load(tap_index_ptr + rows * TAPS + i, mask=mask_m, other=0).to(tl.int64)  # [BLOCK_M]
        weight = tl.load(tap_weight_ptr + rows * TAPS + i, mask=mask_m, other=0.0)
        mask = mask_m[:, None] & mask_n[None, :]
        row = tl.load(table_ptr + index[:, None] * N + cols[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_N]
        acc += weight[:, None] * row.to(tl.float32)
    return acc
