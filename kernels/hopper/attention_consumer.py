"""A consumer warpgroup of the Hopper attention kernel: products, softmax under them, and the order of both.

    p = 2^(s - m)          s = q . k, q scaled for it; m fixed per row: the maximum over the first block of keys

With m fixed the loop has no maximum, no rescaling and no shuffle, and any m gives the same softmax: the factor 2^-m
cancels. It fails only where p or a sum overflows, which the row's sum shows; such tiles are redone (attention_redo.py).
bf16 holds p up to 2^93 times the first block's largest; fp16 only 2^15, so there m is HEADROOM more: what that costs in
small p, which are subnormal below 2^-8 of the largest, is less than the answer's own rounding.

Where scores are `SHIFTED`, -m is three columns of q, and ones are three of k, from the second block on: the product
subtracts, and a fifth of the loop's instructions are gone. Queries' further columns are in registers.
"""

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from fusedvit.kernels.hopper.attention_parts import (
    ROWS,
    SHIFT,
    SUMS,
    Memory,
    Sizes,
    first_item,
    following_item,
    of_threads,
    place,
    program_again,
    store_rows,
    subtracted,
    work_item,
)
from fusedvit.kernels.hopper.attention_redo import redo_tile
from fusedvit.kernels.hopper.attention_spare import add_tail_values, prepare_ones, query_tail, tail_scores, with_offset
from fusedvit.kernels.hopper.compat import barrier, gl, gluon

HEADROOM = gl.constexpr(6.0)
FLAGS = gl.constexpr(30)  # tiles of a CTA that are noted one by one; the last flag stands for all the others


@gluon.jit
def _mask_keys(scores, keys, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores of keys from `keys` on become -inf; full blocks skip it."""
    if keys < BLOCK_N:
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(gl.expand_dims(column < keys, 0), scores, float("-inf"))
    return scores


@gluon.jit
def _partial_sum(p, WIDTH: gl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, 8]: what one thread holds of a row, summed."""
    return gl.sum(gl.reshape(p, [ROWS, WIDTH // 8, 8]), 1)


@gluon.jit
def _scores(m: Memory, buffer, stage, tail, s: Sizes, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Q K of one block, in flight. `tail` is queries' own, with minus their offsets or zeros, and read if `SPARE`."""
    q = m.q.index(s.Q_AT + buffer * s.CONSUMERS + C)
    k = m.k.index(s.K_AT + stage).reshape((s.BLOCK_N, s.HEAD)).permute((1, 0))
    if s.SPARE:
        scores = warpgroup_mma(q, k, tail_scores(tail, stage, s, LAYOUT, C), is_async=True)
    else:
        zeros = gl.zeros([ROWS, s.BLOCK_N], gl.float32, LAYOUT)
        scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        if s.TAIL > 0:
            q_tail = m.q_tail.index(buffer * s.CONSUMERS + C).reshape((ROWS, s.TAIL))
            k_tail = m.k_tail.index(stage).reshape((s.BLOCK_N, s.TAIL)).permute((1, 0))
            scores = warpgroup_mma(q_tail, k_tail, scores, is_async=True)
    return scores


@gluon.jit
def _shifted_scores(m: Memory, buffer, stage, offset, s: Sizes, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The same of a tile's later blocks, less their rows' offsets if `SHIFTED` or `SPARE`."""
    scores = _scores(m, buffer, stage, offset, s, LAYOUT, C)
    if s.SHIFTED:
        scores = warpgroup_mma(offset, m.one_keys.index(C).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _add_values(
    acc, acc_tail, sums, p, m: Memory, stage, s: Sizes, LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr, C: gl.constexpr
):
    """acc + P V of one block, and sums + P 1, in flight; and P in the registers that the products read."""
    p = p.to(s.DTYPE)
    if s.ONES:
        p_ones = gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 2))
        sums = warpgroup_mma(p_ones, m.ones.index(C).permute((1, 0)), sums, is_async=True)
    p_head = gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 2))
    v = m.v.index(s.V_AT + stage).reshape((s.BLOCK_N, s.HEAD))
    acc = warpgroup_mma(p_head, v, acc, is_async=True)
    p_tail = p_head
    if s.SPARE:
        acc_tail = add_tail_values(acc_tail, p, stage, s, C)
    elif s.TAIL > 0:
        p_tail = gl.convert_layout(p, gl.DotOperandLayout(0, TAIL_LAYOUT, 2))
        v_tail = m.v_tail.index(stage).reshape((s.BLOCK_N, s.TAIL))
        acc_tail = warpgroup_mma(p_tail, v_tail, acc_tail, is_async=True)
    return acc, acc_tail, sums, p_head, p_tail


@gluon.jit
def _await_scores(scores, s: Sizes):
    """Leaves P V and P 1 in flight."""
    LATER: gl.constexpr = 1 + (1 if s.TAIL > 0 else 0) + (1 if s.ONES else 0)
    return warpgroup_mma_wait(LATER, deps=(scores,))


@gluon.jit
def _await_values(acc, acc_tail, sums, p_head, p_tail, s: Sizes):
    """The three sums. The next block's P is rounded behind this wait, into the registers that these have read."""
    if s.TAIL > 0:
        acc, acc_tail, p_head, p_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail, p_head, p_tail))
    else:
        acc, p_head = warpgroup_mma_wait(0, deps=(acc, p_head))
    if s.ONES:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    return acc, acc_tail, sums


@gluon.jit
def _my_turn(m: Memory, slot, s: Sizes, C: gl.constexpr):
    """There is a turn for each slot from 1 on."""
    if s.PING_PONG:
        if C == 0:
            mbarrier.wait(m.turn.index(0), slot & 1)
        else:
            mbarrier.wait(m.turn.index(C), (slot & 1) ^ 1)


@gluon.jit
def _next_turn(m: Memory, s: Sizes, C: gl.constexpr):
    if s.PING_PONG:
        mbarrier.arrive(m.turn.index((C + 1) % s.CONSUMERS), count=1)


@gluon.jit
def _round(p, s: Sizes):
    """Now, or late: by `_add_values`, under the next Q K and straight into the registers that P V reads. Rounded now
    it lies in others until the last product has read those, and is moved."""
    return p if s.LATE else p.to(s.DTYPE)


@gluon.jit
def _start_rows(scores, keys, tail, s: Sizes, LAYOUT: gl.constexpr):
    """Softmax of a tile's first block: (P, offset of each row as later scores want it, what is known of their sums)."""
    scores = _mask_keys(scores, keys, s.BLOCK_N, LAYOUT)
    offset = gl.max(scores, 1)
    if gl.float16 == s.DTYPE:
        offset += HEADROOM
    p = gl.exp2(scores - gl.expand_dims(offset, 1))
    if s.SHIFTED:
        QUERIES: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
        offset = subtracted(gl.zeros([ROWS, SHIFT], s.DTYPE, QUERIES), offset, 0, s, QUERIES)
    if s.SPARE:
        offset = with_offset(tail, offset, s)
    if s.ONES or s.SPARE:
        sums = gl.zeros([ROWS, SUMS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 16]))
    else:
        sums = _partial_sum(p, s.BLOCK_N)
    return _round(p, s), offset, sums


@gluon.jit
def _finish_rows(
    out_ptr, acc, acc_tail, sums, first, end, head, s: Sizes, LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr
):
    """Normalises and stores; returns which rows overflowed, in the exponentials or in the accumulator."""
    LIMIT: gl.constexpr = 1e28 if gl.bfloat16 == s.DTYPE else 32768.0
    if s.SPARE:
        column = gl.expand_dims(gl.arange(0, s.TAIL, gl.SliceLayout(0, TAIL_LAYOUT)), 0)
        sums = _partial_sum(gl.where(column < 8, acc_tail * 0.0, acc_tail), s.TAIL)
    sums += gl.convert_layout(_partial_sum(acc * 0.0, s.HEAD), sums.type.layout)  # 0, or NaN
    if s.TAIL > 0 and not s.SPARE:
        sums += gl.convert_layout(_partial_sum(acc_tail * 0.0, s.TAIL), sums.type.layout)
    total = gl.sum(sums, 1)
    if s.ONES or s.SPARE:
        total /= SUMS  # of equal ones, exactly
    total = gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))
    store_rows(out_ptr, acc, acc_tail, total, first, end, head, s, LAYOUT, TAIL_LAYOUT)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return (rows < end) & ((total < LIMIT) == 0)


@gluon.jit
def _consume(m: Memory, qkv_ptr, out_ptr, tiles_ptr, num_tiles, begin, end, first, s: Sizes, C: gl.constexpr):
    """Every tile of this CTA, ROWS of its queries; the first of them is given."""
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.BLOCK_N, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.HEAD, 16])
    SLIM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.TAIL if s.TAIL > 0 else 16, 16])
    work = num_tiles * s.HEADS
    mbarrier.wait(m.q_full.index(0), 0)
    mbarrier.wait(m.full.index(0), 0)
    tail = query_tail(m, 0, s, C)
    scores = warpgroup_mma_wait(0, deps=(_scores(m, 0, 0, tail, s, KEYS, C),))
    mbarrier.arrive(m.empty.index(0), count=1)
    p, offset, sums = _start_rows(scores, end - begin, tail, s, KEYS)
    flags = of_threads(gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, WIDE)))
    slot = 1
    nth = 0
    mbarrier.wait(m.full.index(1 % s.STAGES), (1 // s.STAGES) & 1)
    for index in range(program_again(num_tiles), work, gl.num_programs(0)):
        after = index + gl.num_programs(0)
        next_begin, next_end, next_first, _ = following_item(index, tiles_ptr, num_tiles, s)
        first += C * ROWS
        blocks = (end - begin + s.BLOCK_N - 1) // s.BLOCK_N
        steps = gl.where(first < end, blocks, 1)
        acc = gl.zeros([ROWS, s.HEAD], gl.float32, WIDE)
        acc_tail = gl.zeros([ROWS, s.TAIL if s.TAIL > 0 else 16], gl.float32, SLIM)
        for step in range(1, steps):
            stage = slot % s.STAGES
            _my_turn(m, slot, s, C)
            scores = _shifted_scores(m, nth & 1, stage, offset, s, KEYS, C)
            acc, acc_tail, sums, p_head, p_tail = _add_values(acc, acc_tail, sums, p, m, stage, s, WIDE, SLIM, C)
            _next_turn(m, s, C)
            scores = _await_scores(scores, s)
            scores = _mask_keys(scores, end - begin - step * s.BLOCK_N, s.BLOCK_N, KEYS)
            e = gl.exp2(scores) if s.SHIFTED or s.SPARE else gl.exp2(scores - gl.expand_dims(offset, 1))
            if not s.ONES and not s.SPARE:
                sums += _partial_sum(e, s.BLOCK_N)
            p = _round(e, s)
            slot += 1
            # Waited for here, though needed by the next step: only the border of a basic block keeps ptxas from moving
            # the wait for P V above the exponentials.
            mbarrier.wait(m.full.index(slot % s.STAGES), (slot // s.STAGES) & 1)
            acc, acc_tail, sums = _await_values(acc, acc_tail, sums, p_head, p_tail, s)
            mbarrier.arrive(m.empty.index(stage), count=1)
        for _ in range(steps, blocks):  # no query of this consumer lies inside the frame
            _my_turn(m, slot, s, C)
            _next_turn(m, s, C)
            mbarrier.arrive(m.empty.index(slot % s.STAGES), count=1)
            slot += 1
            mbarrier.wait(m.full.index(slot % s.STAGES), (slot // s.STAGES) & 1)

        stage = slot % s.STAGES
        next_sums = sums
        if after < work:  # this tile's last P V beside the next tile's first Q K
            mbarrier.wait(m.q_full.index((nth + 1) & 1), ((nth + 1) >> 1) & 1)
            tail = query_tail(m, (nth + 1) & 1, s, C)
            _my_turn(m, slot, s, C)
            scores = _scores(m, (nth + 1) & 1, stage, tail, s, KEYS, C)
            acc, acc_tail, sums, p_head, p_tail = _add_values(acc, acc_tail, sums, p, m, stage, s, WIDE, SLIM, C)
            _next_turn(m, s, C)
            scores = _await_scores(scores, s)
            mbarrier.arrive(m.q_empty.index(nth & 1), count=1)
            p, offset, next_sums = _start_rows(scores, next_end - next_begin, tail, s, KEYS)
            mbarrier.wait(m.full.index((slot + 1) % s.STAGES), ((slot + 1) // s.STAGES) & 1)
            acc, acc_tail, sums = _await_values(acc, acc_tail, sums, p_head, p_tail, s)
        else:
            acc, acc_tail, sums, p_head, p_tail = _add_values(acc, acc_tail, sums, p, m, stage, s, WIDE, SLIM, C)
            acc, acc_tail, sums = _await_values(acc, acc_tail, sums, p_head, p_tail, s)
        mbarrier.arrive(m.empty.index(stage), count=1)
        slot += 1
        _, head = place(index, num_tiles, s)  # worked out here: kept through a tile's blocks it takes a register
        overflowed = _finish_rows(out_ptr, acc, acc_tail, sums, first, end, head, s, WIDE, SLIM)
        flags = flags | of_threads(gl.where(overflowed, 1 << gl.minimum(nth, FLAGS), 0))
        begin, end, first, sums = next_begin, next_end, next_first, next_sums
        nth += 1

    # Every warp is handed all flags: a reduction across warps costs LONG a spilled word.
    redo = gl.reduce_or(gl.convert_layout(flags, gl.BlockedLayout([1], [32], [4], [0])), 0)
    if redo != 0:
        nth = 0
        for index in range(gl.program_id(0), work, gl.num_programs(0)):
            if ((redo >> gl.minimum(nth, FLAGS)) & 1) != 0:
                begin, end, first, head = work_item(index, tiles_ptr, num_tiles, s)
                redo_tile(m, qkv_ptr, out_ptr, begin, end, first + C * ROWS, head, s, C)
            nth += 1


@gluon.jit
def consumer(m: Memory, qkv_ptr, out_ptr, tiles_ptr, num_tiles_ptr, s: Sizes, C: gl.constexpr):
    num_tiles = gl.load(num_tiles_ptr)
    begin, end, first, _ = first_item(tiles_ptr, num_tiles, s)
    if s.ONES:
        LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        m.ones.index(C).store(gl.full([SUMS, s.BLOCK_N], 1.0, s.DTYPE, LINES))
    if s.SHIFTED:
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        m.one_keys.index(C).store(gl.full([s.BLOCK_N, SHIFT], 1.0, s.DTYPE, PAIRS))
    if s.SPARE:
        prepare_ones(m, s, C)
    if s.ONES or s.SHIFTED:
        fence_async_shared()
        barrier()
    gdc_wait()
    if gl.program_id(0) < num_tiles * s.HEADS:
        _consume(m, qkv_ptr, out_ptr, tiles_ptr, num_tiles, begin, end, first, s, C)
