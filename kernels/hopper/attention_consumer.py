"""A consumer warpgroup of the Hopper attention kernel: products, and the softmax that runs under them.

Softmax with a fixed offset m a row:

    p = 2^(s - m)          s = q . k, q scaled for it

The loop then has no maximum, no rescaling and no shuffle, and any m gives the same softmax: the factor 2^-m cancels.
m is the maximum over the first block of keys. It fails only where p or a sum overflows, which the row's sum shows;
such tiles are computed again with a running maximum (`redo_tile`). bf16 holds p up to 2^93; fp16 only 2^15, so there
m is HEADROOM more: what that costs in small p, which are subnormal below 2^-8 of the largest, is less than the
rounding of the output. With `NEAR`, in bf16, m is 0 where the first maxima of all rows of a consumer's tile are near 0,
and nothing is subtracted.

Shifted scores. -m is three columns of q, and ones are three of k, from the second block on: the product subtracts.

Sums of rows of P come out of products where there is room for columns of ones, by WGMMAs of widths that Gluon does not
have. They are inline PTX and find their operands by address, in an array at the beginning of shared memory, which
`gluon_compat.misplaced_operands` makes sure of.

    heads of 72 (SPARE)            [q | -m] . [k | 1] = q . k - m        p [v | 1] = [p v | sum of p]
    heads of 64 and 80 (SUMMED)                                          p [v | 1] = [p v | sum of p]

The tail of a head of 72 has 8 columns of the 16 of a WGMMA. The TMA unit writes a block of 8 columns densely, which
is a column of an unswizzled matrix: blocks of 8 x 8, 128 bytes each. The other column is one block of ones for all
stages; a matrix descriptor says how far it is. Of heads of 64 and 80 the last product with values has 8 columns of
ones more, 72 or 24 in all: a product of its own with 8 columns takes as long as one of 27.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from fusedvit.kernels.hopper import attention_configs
from fusedvit.kernels.hopper.attention_smem import (
    ROWS,
    SHIFT,
    SUMS,
    Memory,
    Sizes,
    arrive,
    await_phase,
    barriers_address,
    first_item,
    following_item,
    halves,
    of_threads,
    reread_program_id,
    store_rows,
    subtracted,
    tile_and_head,
    wgmma_constraints,
    work_item,
)
from fusedvit.kernels.hopper.gluon_compat import barrier, gl, gluon, indexed, reinterpret

COLUMNS = gl.constexpr(16)  # of the product of a tail, half of them spare
TAIL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # of [ROWS, COLUMNS]
TAIL_STAGE = gl.constexpr(attention_configs.SPARE_UNIT)
# In a matrix of 8 x 8 blocks without a swizzle: 128 bytes from 8 rows (keys) to the next, in units of 16.
BLOCK = 128 >> 4


@gluon.jit
def allocate_with_spare_tails(q_desc, q_tail_desc, kv_desc, kv_tail_desc, s: Sizes):
    """Queries, keys, values and their tails as views of one array, which a `SmemLayout` gives the offsets in."""
    UNITS: gl.constexpr = s.UNITS
    KEYS: gl.constexpr = kv_desc.layout
    SLIM: gl.constexpr = q_tail_desc.layout
    COLUMN: gl.constexpr = kv_tail_desc.layout
    q = gl.allocate_shared_memory(s.DTYPE, [UNITS, ROWS, s.HEAD], q_desc.layout)
    k = reinterpret(q, s.DTYPE, [UNITS, 1, s.BLOCK_N, s.HEAD], KEYS)
    q_tail = reinterpret(q, s.DTYPE, [4 * UNITS, ROWS, s.TAIL], SLIM)
    k_tail = reinterpret(q, s.DTYPE, [8 * UNITS, 1, s.BLOCK_N, 8], COLUMN)
    return q, q_tail, k, k_tail, k, k_tail


@gluon.constexpr_function
def _scores_text(keys, stages, consumer, kind):
    """PTX of [q | -m] . [k | 1]. Operands: scores, tails of queries (repeated every 16 keys, the first is read), stage.

    Keys are K-major: the leading distance leads from columns to ones, the stride from keys to keys.
    """
    held = keys // 2
    sums = ", ".join(f"${i}" for i in range(held))
    queries = ", ".join(f"${held + i}" for i in range(4))
    stage = f"${held + held // 2}"
    onward = TAIL_STAGE.value >> 4  # from stage to stage; the ones are as much nearer
    ones = (2 * stages + consumer) * onward
    return f"""{{ .reg .b32 at, low, high; .reg .b64 k; .reg .pred more;
        setp.ne.u32 more, 0, 0;
        mov.u32 at, global_smem; shr.u32 at, at, 4; add.u32 at, at, {ones << 16};
        mad.lo.u32 low, {stage}, {(onward - (onward << 16)) & 0xFFFFFFFF}, at;
        mov.u32 high, {BLOCK}; mov.b64 k, {{low, high}};
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{kind}.{kind} {{{sums}}}, {{{queries}}}, k, more, 1, 1, 0;
        wgmma.commit_group.sync.aligned; }}"""


@gluon.constexpr_function
def _values_text(steps, stages, consumer, kind):
    """PTX of sums + P [v | 1]. Operands: sums, P in steps of 16 keys, stage. Values are MN-major: distances swap."""
    held = 8
    sums = ", ".join(f"${i}" for i in range(held))
    stage = f"${2 * held + 4 * steps}"
    onward = TAIL_STAGE.value >> 4
    text = f"""{{ .reg .b32 low, high, at; .reg .b64 v; .reg .pred more;
        setp.eq.u32 more, 0, 0;
        mov.u32 at, global_smem; shr.u32 at, at, 4; add.u32 at, at, {stages * onward + (BLOCK << 16)};
        mad.lo.u32 low, {stage}, {onward}, at;
        mul.lo.u32 high, {stage}, {-onward & 0xFFFFFFFF}; add.u32 high, high, {(stages + consumer) * onward};
        mov.b64 v, {{low, high}};
        wgmma.fence.sync.aligned;"""
    for step in range(steps):
        p = ", ".join(f"${2 * held + 4 * step + i}" for i in range(4))
        text += f"""
        wgmma.mma_async.sync.aligned.m64n16k16.f32.{kind}.{kind} {{{sums}}}, {{{p}}}, v, more, 1, 1, 1;
        add.u64 v, v, {2 * BLOCK};"""
    return text + " wgmma.commit_group.sync.aligned; }"


@gluon.jit
def prepare_ones(m: Memory, s: Sizes, C: gl.constexpr):
    """Writes this consumer's block of ones, before its first product."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    block = m.k_tail.index(s.ONES_AT + C).reshape((s.BLOCK_N, 8))
    block.store(gl.full([s.BLOCK_N, 8], 1.0, s.DTYPE, LINES))
    fence_async_shared()
    barrier()


@gluon.jit
def query_tail(m: Memory, buffer, s: Sizes, C: gl.constexpr):
    """The last 8 columns of queries, and zeros where minus their offsets will be."""
    tail = gl.zeros([ROWS, COLUMNS], s.DTYPE, TAIL)
    if s.SPARE:
        column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, TAIL)), 0)
        held = indexed(m.q_tail, s.Q_TAIL_AT, 2 * s.CONSUMERS, buffer * s.CONSUMERS + C)
        tail = gl.where(column < 8, held.load(TAIL), tail)
    return tail


@gluon.jit
def with_offset(tail, offset, s: Sizes):
    """`tail` with minus each row's offset in its spare columns."""
    return subtracted(tail, offset, 8, s, TAIL)


@gluon.jit
def tail_scores(tail, stage, s: Sizes, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Issues [q | -m] . [k | 1]."""
    wide = tail
    for _ in gl.static_range(2):
        both = gl.permute(gl.join(wide, wide), (0, 2, 1))
        wide = gl.reshape(both, (ROWS, both.shape[1] * both.shape[2]))
    wide = gl.convert_layout(wide, LAYOUT, assert_trivial=True)
    EACH: gl.constexpr = s.BLOCK_N // 2
    KIND: gl.constexpr = "bf16" if gl.bfloat16 == s.DTYPE else "f16"
    TEXT: gl.constexpr = _scores_text(s.BLOCK_N, s.STAGES, C, KIND)
    REGISTERS: gl.constexpr = wgmma_constraints(EACH, 0, EACH // 2 + EACH)
    return gl.inline_asm_elementwise(TEXT, REGISTERS, [wide, stage], dtype=gl.float32, is_pure=False, pack=EACH)


@gluon.jit
def add_tail_values(sums, p, stage, s: Sizes, C: gl.constexpr):
    """Issues sums + P [v | 1]."""
    left, right = halves(p)
    a, b = halves(left)
    c, d = halves(right)
    a = gl.convert_layout(a, TAIL, assert_trivial=True)
    b = gl.convert_layout(b, TAIL, assert_trivial=True)
    c = gl.convert_layout(c, TAIL, assert_trivial=True)
    d = gl.convert_layout(d, TAIL, assert_trivial=True)
    KIND: gl.constexpr = "bf16" if gl.bfloat16 == s.DTYPE else "f16"
    TEXT: gl.constexpr = _values_text(4, s.STAGES, C, KIND)
    REGISTERS: gl.constexpr = wgmma_constraints(8, 8, 16 + 8)
    return gl.inline_asm_elementwise(
        TEXT, REGISTERS, [sums, a, b, c, d, stage], dtype=gl.float32, is_pure=False, pack=8
    )


DEEP = gl.constexpr(16)  # keys of an instruction
UNIT, TAIL_UNIT = gl.constexpr(attention_configs.UNIT), gl.constexpr(attention_configs.TAIL_UNIT)
EIGHT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))  # of [ROWS, 8]


@gluon.jit
def allocate_with_ones(q_desc, q_tail_desc, kv_desc, kv_tail_desc, s: Sizes):
    """Queries, keys, values, their tails and ones as views of one array, which a `SmemLayout` gives the offsets in."""
    UNITS: gl.constexpr = s.UNITS
    QUERIES: gl.constexpr = q_desc.layout
    KEYS: gl.constexpr = kv_desc.layout
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q = gl.allocate_shared_memory(s.DTYPE, [UNITS, ROWS, s.HEAD], QUERIES)
    k = reinterpret(q, s.DTYPE, [UNITS, 1, s.BLOCK_N, s.HEAD], KEYS)
    q_tail, k_tail = q, k
    if s.TAIL > 0:
        SLIM: gl.constexpr = q_tail_desc.layout
        SLIM_KEYS: gl.constexpr = kv_tail_desc.layout
        q_tail = reinterpret(q, s.DTYPE, [4 * UNITS, ROWS, 1, s.TAIL], SLIM)
        k_tail = reinterpret(q, s.DTYPE, [4 * UNITS, 1, s.BLOCK_N, s.TAIL], SLIM_KEYS)
    ones = reinterpret(q, s.DTYPE, [4 * UNITS, DEEP, s.HEAD], QUERIES)
    ones.index(s.ONES_AT).store(gl.full([DEEP, s.HEAD], 1.0, s.DTYPE, LINES))
    return q, q_tail, k, k_tail, k, k_tail


@gluon.constexpr_function
def _values_and_ones_text(columns, values, unit, ones, kind):
    """PTX of [acc | sums] + P [v | 1]. Operands: sums of `columns` columns, of 8 ones, P in steps of 8 keys, stage.

    Values are MN-major in swizzled lines: the leading distance leads to the ones, the stride from 8 keys to the next.

    Args:
        values, ones: offsets in bytes.
        unit: bytes of a stage.
    """
    held, line = columns // 2 + 4, columns * 2
    sums = ", ".join(f"${i}" for i in range(held))
    stage = f"${2 * held + 16}"
    onward, deep = unit >> 4, DEEP.value * line >> 4
    mode = {128: 1, 32: 3}[line]
    text = f"""{{ .reg .b32 low, high, at; .reg .b64 v; .reg .pred more;
        setp.eq.u32 more, 0, 0;
        mov.u32 at, global_smem; shr.u32 at, at, 4;
        add.u32 at, at, {(values >> 4) + (ones - values >> 4 << 16)};
        mad.lo.u32 low, {stage}, {(onward - (onward << 16)) & 0xFFFFFFFF}, at;
        mov.u32 high, {mode << 30 | 8 * line >> 4};
        wgmma.fence.sync.aligned;"""
    for step in range(4):
        p = ", ".join(f"${2 * held + 4 * step + i}" for i in range(4))
        text += f"""
        mov.b64 v, {{low, high}};
        wgmma.mma_async.sync.aligned.m64n{columns + 8}k16.f32.{kind}.{kind} {{{sums}}}, {{{p}}}, v, more, 1, 1, 1;
        add.u32 low, low, {(deep - (deep << 16)) & 0xFFFFFFFF};"""
    return text + " wgmma.commit_group.sync.aligned; }"


@gluon.jit
def _pair(x):
    """[ROWS, 16] -> two of 8 columns."""
    left, right = halves(x)
    return gl.convert_layout(left, EIGHT, assert_trivial=True), gl.convert_layout(right, EIGHT, assert_trivial=True)


@gluon.jit
def _eighths(x):
    """[ROWS, 64] -> eight of 8 columns."""
    left, right = halves(x)
    a, b = halves(left)
    c, d = halves(right)
    return _pair(a) + _pair(b) + _pair(c) + _pair(d)


@gluon.jit
def _concat_columns(left, right):
    """The reverse of `halves`."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@gluon.jit
def add_values_and_sums(acc, sums, p, stage, s: Sizes, LAYOUT: gl.constexpr):
    """Issues acc + P V of one block of a head of 64, and sums + P 1."""
    KIND: gl.constexpr = "bf16" if gl.bfloat16 == s.DTYPE else "f16"
    TEXT: gl.constexpr = _values_and_ones_text(64, s.V_AT * UNIT, UNIT, s.ONES_AT * TAIL_UNIT, KIND)
    REGISTERS: gl.constexpr = wgmma_constraints(36, 36, 16 + 4)
    a0, a1, a2, a3, a4, a5, a6, a7 = _eighths(acc)
    p0, p1, p2, p3, p4, p5, p6, p7 = _eighths(p)
    a0, a1, a2, a3, a4, a5, a6, a7, sums = gl.inline_asm_elementwise(
        TEXT, REGISTERS, [a0, a1, a2, a3, a4, a5, a6, a7, sums, p0, p1, p2, p3, p4, p5, p6, p7, stage],
        dtype=(gl.float32,) * 9, is_pure=False, pack=4,
    )  # fmt: skip
    left = _concat_columns(_concat_columns(a0, a1), _concat_columns(a2, a3))
    right = _concat_columns(_concat_columns(a4, a5), _concat_columns(a6, a7))
    return gl.convert_layout(_concat_columns(left, right), LAYOUT, assert_trivial=True), sums


@gluon.jit
def add_tail_and_sums(acc, sums, p, stage, s: Sizes, LAYOUT: gl.constexpr):
    """`add_values_and_sums` of the tail of a head of 80."""
    KIND: gl.constexpr = "bf16" if gl.bfloat16 == s.DTYPE else "f16"
    TEXT: gl.constexpr = _values_and_ones_text(16, s.V_TAIL_AT * TAIL_UNIT, TAIL_UNIT, s.ONES_AT * TAIL_UNIT, KIND)
    REGISTERS: gl.constexpr = wgmma_constraints(12, 12, 16 + 4)
    a0, a1 = _pair(acc)
    p0, p1, p2, p3, p4, p5, p6, p7 = _eighths(p)
    a0, a1, sums = gl.inline_asm_elementwise(
        TEXT, REGISTERS, [a0, a1, sums, p0, p1, p2, p3, p4, p5, p6, p7, stage],
        dtype=(gl.float32,) * 3, is_pure=False, pack=4,
    )  # fmt: skip
    return gl.convert_layout(_concat_columns(a0, a1), LAYOUT, assert_trivial=True), sums


HEADROOM = gl.constexpr(6.0)  # powers of 2 that fp16 offsets are above the first maximum
NEAR_LIMIT = gl.constexpr(32.0)  # powers of 2 between a maximum near 0 and 0: few of the 93 that bf16 holds
EVERY_WARP = gl.constexpr(
    gl.BlockedLayout([1], [32], [4], [0])
)  # each warp holds all of it: a reduction needs no other warp
SUMS_OF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS.value, 16]))  # [ROWS, SUMS] of a product


@gluon.jit
def mask_keys(scores, keys, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Sets scores of keys from `keys` on to -inf; full blocks skip it."""
    if keys < BLOCK_N:
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(gl.expand_dims(column < keys, 0), scores, float("-inf"))
    return scores


@gluon.jit
def partial_sum(p, WIDTH: gl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, 8]: sums of the columns that one thread holds."""
    return gl.sum(gl.reshape(p, [ROWS, WIDTH // 8, 8]), 1)


@gluon.jit
def rounded(p, s: Sizes):
    """P rounded now; with `LATE` by `_add_values`, under the next Q K and straight into the registers that P V reads.

    Rounded now, P lies in other registers until the last product has read those, and is moved then.
    """
    return p if s.LATE else p.to(s.DTYPE)


@gluon.jit
def all_of(flags):
    """The union of flags. Every warp gets all of them: a reduction across warps would spill in `LONG`."""
    return gl.reduce_or(gl.convert_layout(flags, EVERY_WARP), 0)


@gluon.jit
def start_rows(scores, rows, keys, tail, s: Sizes, LAYOUT: gl.constexpr):
    """Softmax of a tile's first block, of whose rows the first `rows` are in the frame.

    Returns (P, each row's offset as later scores take it, sums so far, whether any offset may differ from 0).
    """
    scores = mask_keys(scores, keys, s.BLOCK_N, LAYOUT)
    offset = gl.max(scores, 1)
    far = True
    if s.NEAR:
        inside = gl.arange(0, ROWS, offset.type.layout) < rows
        far = gl.where(inside & (gl.abs(offset) > NEAR_LIMIT), 1, 0)
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
    sums = gl.zeros([ROWS, SUMS], gl.float32, SUMS_OF) if s.SPARE or s.SUMMED else partial_sum(p, s.BLOCK_N)
    return rounded(p, s), offset, sums, far


@gluon.jit
def finish_rows(
    out_ptr, clip_ptr, acc, acc_tail, sums, first, end, head, s: Sizes,
    LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Normalises and stores the tile. Returns which rows overflowed, in the exponentials or in the accumulator."""
    LIMIT: gl.constexpr = 1e28 if gl.bfloat16 == s.DTYPE else 32768.0
    if s.SPARE:
        column = gl.expand_dims(gl.arange(0, s.TAIL, gl.SliceLayout(0, TAIL_LAYOUT)), 0)
        sums = partial_sum(gl.where(column < 8, acc_tail * 0.0, acc_tail), s.TAIL)
    sums += gl.convert_layout(partial_sum(acc * 0.0, s.HEAD), sums.type.layout)  # 0, or NaN
    if s.TAIL > 0 and not s.SPARE:
        sums += gl.convert_layout(partial_sum(acc_tail * 0.0, s.TAIL), sums.type.layout)
    total = gl.sum(sums, 1)
    if s.SPARE or s.SUMMED:
        total /= SUMS  # of equal ones, exactly
    total = gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))
    store_rows(out_ptr, clip_ptr, acc, acc_tail, total, first, end, head, s, LAYOUT, TAIL_LAYOUT)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return (rows < end) & ((total < LIMIT) == 0)


STEP = gl.constexpr(32)  # keys


@gluon.jit
def _copy(qkv_ptr, dst, first, end, col, limit, s: Sizes, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """Copies rows of q | k | v into shared memory, zeros past row `end` and column `limit`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    offs = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    rows = first + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    pitch: gl.constexpr = 3 * s.HEADS * s.HEAD_DIM
    ptrs = qkv_ptr + gl.expand_dims(rows.to(gl.int64) * pitch, 1) + gl.expand_dims(col + offs, 0)
    mask = gl.expand_dims(rows < end, 1) & gl.expand_dims(offs < limit, 0)
    dst.store(gl.load(ptrs, mask=mask, other=0.0))


@gluon.jit
def _copy_head(qkv_ptr, dst, dst_tail, first, end, section, head, s: Sizes, COUNT: gl.constexpr):
    barrier()  # every thread has read what is overwritten
    col = (section * s.HEADS + head) * s.HEAD_DIM
    _copy(qkv_ptr, dst, first, end, col, s.HEAD, s, COUNT, s.HEAD)
    if s.TAIL > 0:
        _copy(qkv_ptr, dst_tail, first, end, col + s.HEAD, s.HEAD_DIM - s.HEAD, s, COUNT, s.TAIL)
    fence_async_shared()
    barrier()


@gluon.jit
def _rescale(acc, factor, LAYOUT: gl.constexpr):
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def redo_tile(m: Memory, qkv_ptr, out_ptr, clip_ptr, begin, end, first, head, s: Sizes, C: gl.constexpr):
    """Queries `first` to `first + ROWS` of one head with online softmax, for rows whose fixed offset overflowed.

    Slow and rare, right for any finite input. It runs after all other tiles, STEP keys at a time, and loads through
    pointers into the memory of the consumer's own queries, which is free then.
    """
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.HEAD, 16])
    SLIM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.TAIL if s.TAIL > 0 else 16, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, KEYS)
    q = m.q.index(s.Q_AT + C)
    x = m.q.index(s.Q_AT + s.CONSUMERS + C).slice(0, STEP)
    q_tail, x_tail = q, x
    if s.TAIL > 0:
        q_tail = m.q_tail.index(s.Q_TAIL_AT + C).reshape((ROWS, s.TAIL))
        x_tail = m.q_tail.index(s.Q_TAIL_AT + s.CONSUMERS + C).reshape((ROWS, s.TAIL)).slice(0, STEP)
    _copy_head(qkv_ptr, q, q_tail, first, end, 0, head, s, ROWS)
    largest = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.full([ROWS], 0.0, gl.float32, ROW)
    acc = gl.zeros([ROWS, s.HEAD], gl.float32, WIDE)
    acc_tail = gl.zeros([ROWS, s.TAIL if s.TAIL > 0 else 16], gl.float32, SLIM)
    column = gl.arange(0, STEP, gl.SliceLayout(0, KEYS))
    for row in range(begin, end, STEP):
        _copy_head(qkv_ptr, x, x_tail, row, end, 1, head, s, STEP)
        scores = warpgroup_mma(q, x.permute((1, 0)), gl.zeros([ROWS, STEP], gl.float32, KEYS), use_acc=False)
        if s.TAIL > 0:
            scores = warpgroup_mma(q_tail, x_tail.permute((1, 0)), scores)
        scores = gl.where(gl.expand_dims(row + column < end, 0), scores, float("-inf"))
        larger = gl.maximum(largest, gl.max(scores, 1))
        e = gl.exp2(scores - gl.expand_dims(larger, 1))
        factor = gl.exp2(largest - larger)
        largest = larger
        total = total * factor + gl.sum(e, 1)
        p = e.to(s.DTYPE)
        _copy_head(qkv_ptr, x, x_tail, row, end, 2, head, s, STEP)
        acc = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, WIDE, 2)), x, _rescale(acc, factor, WIDE))
        if s.TAIL > 0:
            p_tail = gl.convert_layout(p, gl.DotOperandLayout(0, SLIM, 2))
            acc_tail = warpgroup_mma(p_tail, x_tail, _rescale(acc_tail, factor, SLIM))
    total = gl.convert_layout(total, gl.SliceLayout(1, WIDE))
    store_rows(out_ptr, clip_ptr, acc, acc_tail, total, first, end, head, s, WIDE, SLIM)


FLAGS = gl.constexpr(30)  # tiles of a CTA with a flag of their own; the last flag stands for all others


@gluon.jit
def _scores(m: Memory, buffer, stage, tail, s: Sizes, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Issues Q K of one block. `tail`, read if `SPARE`: of queries, with minus their offsets or zeros."""
    q = indexed(m.q, s.Q_AT, 2 * s.CONSUMERS, buffer * s.CONSUMERS + C)
    k = indexed(m.k, s.K_AT, s.STAGES, stage).reshape((s.BLOCK_N, s.HEAD)).permute((1, 0))
    if s.SPARE:
        scores = warpgroup_mma(q, k, tail_scores(tail, stage, s, LAYOUT, C), is_async=True)
    else:
        zeros = gl.zeros([ROWS, s.BLOCK_N], gl.float32, LAYOUT)
        scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        if s.TAIL > 0:
            q_tail = indexed(m.q_tail, s.Q_TAIL_AT, 2 * s.CONSUMERS, buffer * s.CONSUMERS + C).reshape((ROWS, s.TAIL))
            k_tail = indexed(m.k_tail, s.K_TAIL_AT, s.STAGES, stage).reshape((s.BLOCK_N, s.TAIL)).permute((1, 0))
            scores = warpgroup_mma(q_tail, k_tail, scores, is_async=True)
    return scores


@gluon.jit
def _shifted_scores(
    m: Memory, buffer, stage, offset, s: Sizes, LAYOUT: gl.constexpr, C: gl.constexpr, FAR: gl.constexpr
):
    """`_scores` of a tile's later blocks, less their rows' offsets if `SHIFTED` or `SPARE`; 0 unless `FAR`."""
    scores = _scores(m, buffer, stage, offset, s, LAYOUT, C)
    if s.SHIFTED and FAR:
        scores = warpgroup_mma(offset, m.one_keys.index(C).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _add_values(
    acc, acc_tail, sums, p, m: Memory, stage, s: Sizes, LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr, C: gl.constexpr
):
    """Issues acc + P V of one block and sums + P 1. Returns also P in the registers that the products read."""
    p = p.to(s.DTYPE)
    p_head = gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 2))
    p_tail = p_head
    if s.SUMMED and s.TAIL == 0:
        acc, sums = add_values_and_sums(acc, sums, p, stage, s, LAYOUT)
    else:
        v = indexed(m.v, s.V_AT, s.STAGES, stage).reshape((s.BLOCK_N, s.HEAD))
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
    """Waits for Q K; P V stays in flight."""
    LATER: gl.constexpr = 1 + (1 if s.TAIL > 0 else 0)
    return warpgroup_mma_wait(LATER, deps=(scores,))


@gluon.jit
def _await_values(acc, acc_tail, sums, p_head, p_tail, s: Sizes):
    """Waits for P V. The next P is rounded behind this wait, into the registers that the products have read."""
    if s.SUMMED and s.TAIL > 0:
        acc, acc_tail, sums, p_head = warpgroup_mma_wait(0, deps=(acc, acc_tail, sums, p_head))
    elif s.SUMMED:
        acc, sums, p_head = warpgroup_mma_wait(0, deps=(acc, sums, p_head))
    elif s.TAIL > 0:
        acc, acc_tail, p_head, p_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail, p_head, p_tail))
    else:
        acc, p_head = warpgroup_mma_wait(0, deps=(acc, p_head))
    return acc, acc_tail, sums


@gluon.jit
def _await_order(m: Memory, slot, barriers, s: Sizes, C: gl.constexpr):
    """Ping-pong: waits until this consumer may issue the products of `slot`, which counts from 1."""
    if s.PING_PONG:
        if C == 0:
            await_phase(m, "order", 0, slot & 1, barriers, s)
        else:
            await_phase(m, "order", C, (slot & 1) ^ 1, barriers, s)


@gluon.jit
def _release_order(m: Memory, barriers, s: Sizes, C: gl.constexpr):
    """Ping-pong: lets the next consumer issue its products."""
    if s.PING_PONG:
        arrive(m, "order", (C + 1) % s.CONSUMERS, barriers, s)


@gluon.jit
def _stage_of(slot, stage, s: Sizes):
    """The stage of a slot; counted with `BY_WARP`."""
    return stage if s.BY_WARP else slot % s.STAGES


@gluon.jit
def _await_next(m: Memory, slot, later, parity, barriers, s: Sizes):
    """Waits for the operands of the next slot."""
    if s.BY_WARP:
        await_phase(m, "full", later, parity, barriers, s)
    else:
        await_phase(m, "full", (slot + 1) % s.STAGES, ((slot + 1) // s.STAGES) & 1, barriers, s)


@gluon.jit
def _onward(slot, stage, later, parity, s: Sizes):
    """The next slot, its stage, the stage after that, and the parity of that one's round.

    With `BY_WARP` they are counted a step ahead: no warpgroup barrier would hide a division, which takes as long as
    some products.
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
    """All blocks of a tile but the first: scores of each, and P V of the one before."""
    for step in range(1, steps):
        stage = _stage_of(slot, stage, s)
        _await_order(m, slot, barriers, s, C)
        scores = _shifted_scores(m, buffer, stage, offset, s, KEYS, C, FAR)
        acc, acc_tail, sums, p_head, p_tail = _add_values(acc, acc_tail, sums, p, m, stage, s, WIDE, SLIM, C)
        _release_order(m, barriers, s, C)
        scores = _await_scores(scores, s)
        scores = mask_keys(scores, keys - step * s.BLOCK_N, s.BLOCK_N, KEYS)
        e = gl.exp2(scores) if s.SHIFTED or s.SPARE else gl.exp2(scores - gl.expand_dims(offset, 1))
        if not s.SPARE and not s.SUMMED:
            sums += partial_sum(e, s.BLOCK_N)
        p = rounded(e, s)
        # This wait is for the next step. It stands here since only the border of a basic block keeps ptxas from moving
        # the wait for P V above the exponentials.
        _await_next(m, slot, later, parity, barriers, s)
        acc, acc_tail, sums = _await_values(acc, acc_tail, sums, p_head, p_tail, s)
        arrive(m, "empty", stage, barriers, s)
        slot, stage, later, parity = _onward(slot, stage, later, parity, s)
    return p, acc, acc_tail, sums, slot, stage, later, parity


@gluon.jit
def _consume(m: Memory, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles, begin, end, first, s: Sizes, C: gl.constexpr):
    """All tiles of this CTA, ROWS queries of each; `begin`, `end`, `first`: its first tile."""
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.BLOCK_N, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.HEAD, 16])
    SLIM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.TAIL if s.TAIL > 0 else 16, 16])
    work = num_tiles * s.HEADS
    barriers = barriers_address(num_tiles, s)
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
    for index in range(reread_program_id(num_tiles), work, gl.num_programs(0)):
        after = index + gl.num_programs(0)
        next_begin, next_end, next_first, _ = following_item(index, tiles_ptr, num_tiles, s)
        first += C * ROWS
        blocks = (end - begin + s.BLOCK_N - 1) // s.BLOCK_N
        steps = gl.where(first < end, blocks, 1)
        acc = gl.zeros([ROWS, s.HEAD], gl.float32, WIDE)
        acc_tail = gl.zeros([ROWS, s.TAIL if s.TAIL > 0 else 16], gl.float32, SLIM)
        if s.SUMMED:  # zeroed here: elsewhere ptxas serialises the products (C7511)
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
        for _ in range(steps, blocks):  # no query of this consumer is inside the frame
            _await_order(m, slot, barriers, s, C)
            _release_order(m, barriers, s, C)
            arrive(m, "empty", _stage_of(slot, stage, s), barriers, s)
            _await_next(m, slot, later, parity, barriers, s)
            slot, stage, later, parity = _onward(slot, stage, later, parity, s)

        stage = _stage_of(slot, stage, s)
        next_sums = sums
        if after < work:  # the last P V of this tile, overlapped with the first Q K of the next
            await_phase(m, "q_full", (nth + 1) & 1, ((nth + 1) >> 1) & 1, barriers, s)
            tail = query_tail(m, (nth + 1) & 1, s, C)
            _await_order(m, slot, barriers, s, C)
            scores = _scores(m, (nth + 1) & 1, stage, tail, s, KEYS, C)
            acc, acc_tail, sums, p_head, p_tail = _add_values(acc, acc_tail, sums, p, m, stage, s, WIDE, SLIM, C)
            _release_order(m, barriers, s, C)
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
        _, head = tile_and_head(index, num_tiles, s)  # here: kept through a tile's blocks it would take a register
        overflowed = finish_rows(out_ptr, clip_ptr, acc, acc_tail, sums, first, end, head, s, WIDE, SLIM)
        flags = flags | of_threads(gl.where(overflowed, 1 << gl.minimum(nth, FLAGS), 0))
        begin, end, first, sums = next_begin, next_end, next_first, next_sums
        nth += 1

    redo = all_of(flags)
    if redo != 0:
        nth = 0
        for index in range(gl.program_id(0), work, gl.num_programs(0)):
            if ((redo >> gl.minimum(nth, FLAGS)) & 1) != 0:
                begin, end, first, head = work_item(index, tiles_ptr, num_tiles, s)
                redo_tile(m, qkv_ptr, out_ptr, clip_ptr, begin, end, first + C * ROWS, head, s, C)
            nth += 1


@gluon.jit
def consumer(m: Memory, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles_ptr, s: Sizes, C: gl.constexpr):
    num_tiles = gl.load(num_tiles_ptr)
    begin, end, first, _ = first_item(tiles_ptr, num_tiles, s)
    if s.SHIFTED:
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        m.one_keys.index(C).store(gl.full([s.BLOCK_N, SHIFT], 1.0, s.DTYPE, PAIRS))
    if s.SPARE:
        prepare_ones(m, s, C)
    if s.SHIFTED:
        fence_async_shared()
        barrier()
    gdc_wait()
    if gl.program_id(0) < num_tiles * s.HEADS:
        _consume(m, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles, begin, end, first, s, C)
