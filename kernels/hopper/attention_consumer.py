"""A consumer warpgroup of the Hopper attention kernel: products, softmax under them, and the order of both."""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from fusedvit.kernels.hopper.attention_barriers import address_of_barriers, arrive, await_phase
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
    work_item,
)
from fusedvit.kernels.hopper.attention_redo import redo_tile
from fusedvit.kernels.hopper.attention_softmax import (
    SUMS_OF,
    all_of,
    finish_rows,
    mask_keys,
    partial_sum,
    rounded,
    start_rows,
)
from fusedvit.kernels.hopper.attention_spare import add_tail_values, prepare_ones, query_tail, tail_scores
from fusedvit.kernels.hopper.attention_sums import add_tail_and_sums, add_values_and_sums
from fusedvit.kernels.hopper.compat import barrier, gl, gluon

FLAGS = gl.constexpr(30)  # tiles of a CTA that are noted one by one; the last flag stands for all the others


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
            q_tail = m.q_tail.index(s.Q_TAIL_AT + buffer * s.CONSUMERS + C).reshape((ROWS, s.TAIL))
            k_tail = m.k_tail.index(s.K_TAIL_AT + stage).reshape((s.BLOCK_N, s.TAIL)).permute((1, 0))
            scores = warpgroup_mma(q_tail, k_tail, scores, is_async=True)
    return scores


@gluon.jit
def _shifted_scores(
    m: Memory, buffer, stage, offset, s: Sizes, LAYOUT: gl.constexpr, C: gl.constexpr, FAR: gl.constexpr
):
    """The same of a tile's later blocks, less their rows' offsets if `SHIFTED` or `SPARE`; these are 0 unless `FAR`."""
    scores = _scores(m, buffer, stage, offset, s, LAYOUT, C)
    if s.SHIFTED and FAR:
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
    p_tail = p_head
    if s.SUMMED and s.TAIL == 0:
        acc, sums = add_values_and_sums(acc, sums, p, stage, s, LAYOUT)
    else:
        v = m.v.index(s.V_AT + stage).reshape((s.BLOCK_N, s.HEAD))
        acc = warpgroup_mma(p_head, v, acc, is_async=True)
    if s.SPARE:
        acc_tail = add_tail_values(acc_tail, p, stage, s, C)
    elif s.SUMMED and s.TAIL > 0:
        acc_tail, sums = add_tail_and_sums(acc_tail, sums, p, stage, s, TAIL_LAYOUT)
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
    if s.SUMMED and s.TAIL > 0:
        acc, acc_tail, sums, p_head = warpgroup_mma_wait(0, deps=(acc, acc_tail, sums, p_head))
    elif s.SUMMED:
        acc, sums, p_head = warpgroup_mma_wait(0, deps=(acc, sums, p_head))
    elif s.TAIL > 0:
        acc, acc_tail, p_head, p_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail, p_head, p_tail))
    else:
        acc, p_head = warpgroup_mma_wait(0, deps=(acc, p_head))
    if s.ONES:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    return acc, acc_tail, sums


@gluon.jit
def _my_turn(m: Memory, slot, barriers, s: Sizes, C: gl.constexpr):
    """There is a turn for each slot from 1 on."""
    if s.PING_PONG:
        if C == 0:
            await_phase(m, "turn", 0, slot & 1, barriers, s)
        else:
            await_phase(m, "turn", C, (slot & 1) ^ 1, barriers, s)


@gluon.jit
def _next_turn(m: Memory, barriers, s: Sizes, C: gl.constexpr):
    if s.PING_PONG:
        arrive(m, "turn", (C + 1) % s.CONSUMERS, barriers, s)


@gluon.jit
def _stage_of(slot, stage, s: Sizes):
    """The stage of a slot, which is known where stages are counted."""
    return stage if s.BY_WARP else slot % s.STAGES


@gluon.jit
def _await_next(m: Memory, slot, later, parity, barriers, s: Sizes):
    """Waits for what the slot after this one needs."""
    if s.BY_WARP:
        await_phase(m, "full", later, parity, barriers, s)
    else:
        await_phase(m, "full", (slot + 1) % s.STAGES, ((slot + 1) // s.STAGES) & 1, barriers, s)


@gluon.jit
def _onward(slot, stage, later, parity, s: Sizes):
    """The next slot, its stage, the stage after that, and the parity of that one's round.

    Counted, and a step ahead, where no barrier of a warpgroup's hides it: a division takes as long as some products.
    """
    if s.BY_WARP:
        last = later == s.STAGES - 1
        stage = later
        later = gl.where(last, 0, later + 1)
        parity = gl.where(last, parity ^ 1, parity)
    return slot + 1, stage, later, parity


@gluon.jit
def _steps(
    p, acc, acc_tail, sums, slot, stage, later, parity, m: Memory, barriers, buffer, steps, keys, offset, s: Sizes,
    KEYS: gl.constexpr, WIDE: gl.constexpr, SLIM: gl.constexpr, C: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """A tile's blocks of keys but the first: scores of each, and P V of the one before."""
    for step in range(1, steps):
        stage = _stage_of(slot, stage, s)
        _my_turn(m, slot, barriers, s, C)
        scores = _shifted_scores(m, buffer, stage, offset, s, KEYS, C, FAR)
        acc, acc_tail, sums, p_head, p_tail = _add_values(acc, acc_tail, sums, p, m, stage, s, WIDE, SLIM, C)
        _next_turn(m, barriers, s, C)
        scores = _await_scores(scores, s)
        scores = mask_keys(scores, keys - step * s.BLOCK_N, s.BLOCK_N, KEYS)
        e = gl.exp2(scores) if s.SHIFTED or s.SPARE else gl.exp2(scores - gl.expand_dims(offset, 1))
        if not s.ONES and not s.SPARE and not s.SUMMED:
            sums += partial_sum(e, s.BLOCK_N)
        p = rounded(e, s)
        # Waited for here, though needed by the next step: only the border of a basic block keeps ptxas from moving the
        # wait for P V above the exponentials.
        _await_next(m, slot, later, parity, barriers, s)
        acc, acc_tail, sums = _await_values(acc, acc_tail, sums, p_head, p_tail, s)
        arrive(m, "empty", stage, barriers, s)
        slot, stage, later, parity = _onward(slot, stage, later, parity, s)
    return p, acc, acc_tail, sums, slot, stage, later, parity


@gluon.jit
def _consume(m: Memory, qkv_ptr, out_ptr, tiles_ptr, num_tiles, begin, end, first, s: Sizes, C: gl.constexpr):
    """Every tile of this CTA, ROWS of its queries; the first of them is given."""
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.BLOCK_N, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.HEAD, 16])
    SLIM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.TAIL if s.TAIL > 0 else 16, 16])
    work = num_tiles * s.HEADS
    barriers = address_of_barriers(num_tiles, s)
    await_phase(m, "q_full", 0, 0, barriers, s)
    await_phase(m, "full", 0, 0, barriers, s)
    tail = query_tail(m, 0, s, C)
    scores = warpgroup_mma_wait(0, deps=(_scores(m, 0, 0, tail, s, KEYS, C),))
    arrive(m, "empty", 0, barriers, s)
    p, offset, sums, far = start_rows(scores, end - first - C * ROWS, end - begin, tail, s, KEYS)
    flags = of_threads(gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, WIDE)))
    slot, stage, later, parity = 1, 1, 2 % s.STAGES, (2 // s.STAGES) & 1
    nth = 0
    await_phase(m, "full", 1 % s.STAGES, (1 // s.STAGES) & 1, barriers, s)
    for index in range(program_again(num_tiles), work, gl.num_programs(0)):
        after = index + gl.num_programs(0)
        next_begin, next_end, next_first, _ = following_item(index, tiles_ptr, num_tiles, s)
        first += C * ROWS
        blocks = (end - begin + s.BLOCK_N - 1) // s.BLOCK_N
        steps = gl.where(first < end, blocks, 1)
        acc = gl.zeros([ROWS, s.HEAD], gl.float32, WIDE)
        acc_tail = gl.zeros([ROWS, s.TAIL if s.TAIL > 0 else 16], gl.float32, SLIM)
        if s.SUMMED:  # here, as ptxas serialises products of sums that are not begun where values' are (C7511)
            sums = gl.zeros([ROWS, SUMS], gl.float32, SUMS_OF)
        if s.NEAR:
            if far:
                p, acc, acc_tail, sums, slot, stage, later, parity = _steps(
                    p, acc, acc_tail, sums, slot, stage, later, parity, m, barriers, nth & 1, steps, end - begin,
                    offset, s, KEYS, WIDE, SLIM, C, True,
                )  # fmt: skip
            else:
                p, acc, acc_tail, sums, slot, stage, later, parity = _steps(
                    p, acc, acc_tail, sums, slot, stage, later, parity, m, barriers, nth & 1, steps, end - begin,
                    offset, s, KEYS, WIDE, SLIM, C, False,
                )  # fmt: skip
        else:
            p, acc, acc_tail, sums, slot, stage, later, parity = _steps(
                p, acc, acc_tail, sums, slot, stage, later, parity, m, barriers, nth & 1, steps, end - begin,
                offset, s, KEYS, WIDE, SLIM, C, True,
            )  # fmt: skip
        for _ in range(steps, blocks):  # no query of this consumer lies inside the frame
            _my_turn(m, slot, barriers, s, C)
            _next_turn(m, barriers, s, C)
            arrive(m, "empty", _stage_of(slot, stage, s), barriers, s)
            _await_next(m, slot, later, parity, barriers, s)
            slot, stage, later, parity = _onward(slot, stage, later, parity, s)

        stage = _stage_of(slot, stage, s)
        next_sums = sums
        if after < work:  # this tile's last P V beside the next tile's first Q K
            await_phase(m, "q_full", (nth + 1) & 1, ((nth + 1) >> 1) & 1, barriers, s)
            tail = query_tail(m, (nth + 1) & 1, s, C)
            _my_turn(m, slot, barriers, s, C)
            scores = _scores(m, (nth + 1) & 1, stage, tail, s, KEYS, C)
            acc, acc_tail, sums, p_head, p_tail = _add_values(acc, acc_tail, sums, p, m, stage, s, WIDE, SLIM, C)
            _next_turn(m, barriers, s, C)
            scores = _await_scores(scores, s)
            arrive(m, "q_empty", nth & 1, barriers, s)
            rows = next_end - next_first - C * ROWS
            p, offset, next_sums, far = start_rows(scores, rows, next_end - next_begin, tail, s, KEYS)
            _await_next(m, slot, later, parity, barriers, s)
            acc, acc_tail, sums = _await_values(acc, acc_tail, sums, p_head, p_tail, s)
        else:
            acc, acc_tail, sums, p_head, p_tail = _add_values(acc, acc_tail, sums, p, m, stage, s, WIDE, SLIM, C)
            acc, acc_tail, sums = _await_values(acc, acc_tail, sums, p_head, p_tail, s)
        arrive(m, "empty", stage, barriers, s)
        slot, stage, later, parity = _onward(slot, stage, later, parity, s)
        _, head = place(index, num_tiles, s)  # worked out here: kept through a tile's blocks it takes a register
        overflowed = finish_rows(out_ptr, acc, acc_tail, sums, first, end, head, s, WIDE, SLIM)
        flags = flags | of_threads(gl.where(overflowed, 1 << gl.minimum(nth, FLAGS), 0))
        begin, end, first, sums = next_begin, next_end, next_first, next_sums
        nth += 1

    redo = all_of(flags)
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
