"""Softmax of the Hopper attention kernel: a row's exponentials with a fixed offset, and how its sum ends.

    p = 2^(s - m)          s = q . k, q scaled for it

With m fixed the loop has no maximum, no rescaling and no shuffle, and any m gives the same softmax: the factor 2^-m
cancels. m is the maximum over the first block of keys; where that is `NEAR` 0 in all rows of a consumer's tile, m is 0,
and nothing need be subtracted. It fails only where p or a sum overflows, which the row's sum shows; such tiles are
redone (attention_redo.py). bf16 holds p up to 2^93; fp16 only 2^15, so there m is HEADROOM more, never 0: what that
costs in small p, which are subnormal below 2^-8 of the largest, is less than the answer's own rounding.

Where scores are `SHIFTED`, -m is three columns of q, and ones are three of k, from the second block on: the product
subtracts. Queries' further columns are in registers.
"""

from fusedvit.kernels.hopper.attention_parts import ROWS, SHIFT, SUMS, Sizes, of_threads, store_rows, subtracted
from fusedvit.kernels.hopper.attention_spare import with_offset
from fusedvit.kernels.hopper.compat import gl, gluon

HEADROOM = gl.constexpr(6.0)
NEARLY = gl.constexpr(32.0)  # of 0, in powers of 2: small beside the 93 that sums may grow to
EVERY_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # what a reduction takes no other warp for
SUMS_OF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS.value, 16]))  # [ROWS, SUMS] of a product


@gluon.jit
def mask_keys(scores, keys, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores of keys from `keys` on become -inf; full blocks skip it."""
    if keys < BLOCK_N:
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(gl.expand_dims(column < keys, 0), scores, float("-inf"))
    return scores


@gluon.jit
def partial_sum(p, WIDTH: gl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, 8]: what one thread holds of a row, summed."""
    return gl.sum(gl.reshape(p, [ROWS, WIDTH // 8, 8]), 1)


@gluon.jit
def rounded(p, s: Sizes):
    """Now, or late: by whoever multiplies, under the next Q K and straight into the registers that P V reads. Rounded
    now it lies in others until the last product has read those, and is moved."""
    return p if s.LATE else p.to(s.DTYPE)


@gluon.jit
def all_of(flags):
    """Any row's bits, of `of_threads`. Every warp is handed all: a reduction across warps spills a word in `LONG`."""
    return gl.reduce_or(gl.convert_layout(flags, EVERY_WARP), 0)


@gluon.jit
def start_rows(scores, rows, keys, tail, s: Sizes, LAYOUT: gl.constexpr):
    """Softmax of a tile's first block: (P, offset of each row as later scores want it, what is known of their sums,
    whether any offset may be other than 0). The first `rows` of the consumer's are the frame's."""
    scores = mask_keys(scores, keys, s.BLOCK_N, LAYOUT)
    offset = gl.max(scores, 1)
    far = True
    if s.NEAR:
        mine = gl.arange(0, ROWS, offset.type.layout) < rows
        far = gl.where(mine & (gl.abs(offset) > NEARLY), 1, 0)
        far = (all_of(of_threads(far)) != 0) | (keys <= s.BLOCK_N)
        offset = gl.where(far, offset, 0.0)
    if gl.float16 == s.DTYPE:
        offset += HEADROOM
    p = gl.exp2(scores - gl.expand_dims(offset, 1))
    if s.SHIFTED:
        QUERIES: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
        offset = subtracted(gl.zeros([ROWS, SHIFT], s.DTYPE, QUERIES), offset, 0, s, QUERIES)
    if s.SPARE:
        offset = with_offset(tail, offset, s)
    sums = gl.zeros([ROWS, SUMS], gl.float32, SUMS_OF) if s.ONES or s.SPARE or s.SUMMED else partial_sum(p, s.BLOCK_N)
    return rounded(p, s), offset, sums, far


@gluon.jit
def finish_rows(
    out_ptr, acc, acc_tail, sums, first, end, head, s: Sizes, LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr
):
    """Normalises and stores; returns which rows overflowed, in the exponentials or in the accumulator."""
    LIMIT: gl.constexpr = 1e28 if gl.bfloat16 == s.DTYPE else 32768.0
    if s.SPARE:
        column = gl.expand_dims(gl.arange(0, s.TAIL, gl.SliceLayout(0, TAIL_LAYOUT)), 0)
        sums = partial_sum(gl.where(column < 8, acc_tail * 0.0, acc_tail), s.TAIL)
    sums += gl.convert_layout(partial_sum(acc * 0.0, s.HEAD), sums.type.layout)  # 0, or NaN
    if s.TAIL > 0 and not s.SPARE:
        sums += gl.convert_layout(partial_sum(acc_tail * 0.0, s.TAIL), sums.type.layout)
    total = gl.sum(sums, 1)
    if s.ONES or s.SPARE or s.SUMMED:
        total /= SUMS  # of equal ones, exactly
    total = gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))
    store_rows(out_ptr, acc, acc_tail, total, first, end, head, s, LAYOUT, TAIL_LAYOUT)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return (rows < end) & ((total < LIMIT) == 0)
