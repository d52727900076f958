"""Tails of heads of 72 in the Hopper attention kernel: the 8 columns that they leave of an instruction's 16 work, too.

    [q | -m] . [k | 1] = q . k - m        p [v | 1] = [p v | sum of p]

so that shifting scores and summing rows take no products of their own. The copy engine writes a box of 8 columns
densely, which is a column of an unswizzled matrix: blocks of 8 x 8, 128 bytes each. The other column is one block of
ones for all stages; a descriptor of a matrix says how far it is. Gluon has no such products, so they are written here
as text, and find their operands by address: the memory that they are in lies where shared memory begins, as
`sass.misplaced_ring` makes sure.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from fusedvit.kernels.hopper import attention_places
from fusedvit.kernels.hopper.attention_parts import ROWS, Memory, Sizes, halves, of_product, subtracted
from fusedvit.kernels.hopper.compat import barrier, gl, gluon
from fusedvit.kernels.hopper.records import reinterpret

COLUMNS = gl.constexpr(16)  # of a tail's product, of which a head has half
TAIL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # of [ROWS, COLUMNS]
SLOT = gl.constexpr(attention_places.SPARE_UNIT)
# Of a matrix of blocks without a swizzle: 128 bytes from 8 rows (keys) to the next ones, in units of 16.
BLOCK = 128 >> 4


@gluon.jit
def one_array(q_desc, q_tail_desc, kv_desc, kv_tail_desc, s: Sizes):
    """Queries, keys, values and their tails, all of it in one array: views that `Sizes` says the beginnings of."""
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
    """Scores first, then queries' tails (a place each 16 keys, all alike, of which the first is read), then the stage.

    Keys lie along: from columns to ones is the leading distance, from keys to keys the stride.
    """
    held = keys // 2
    sums = ", ".join(f"${i}" for i in range(held))
    queries = ", ".join(f"${held + i}" for i in range(4))
    stage = f"${held + held // 2}"
    onward = SLOT.value >> 4  # from stage to stage; ones are as much nearer
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
    """Sums first, then P, 16 keys at a time, then the stage. Keys lie across: `_scores_text`, the other way round."""
    held = 8
    sums = ", ".join(f"${i}" for i in range(held))
    stage = f"${2 * held + 4 * steps}"
    onward = SLOT.value >> 4
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
    """This consumer's block of ones, before its first product."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    block = m.k_tail.index(s.ONES_AT + C).reshape((s.BLOCK_N, 8))
    block.store(gl.full([s.BLOCK_N, 8], 1.0, s.DTYPE, LINES))
    fence_async_shared()
    barrier()


@gluon.jit
def query_tail(m: Memory, buffer, s: Sizes, C: gl.constexpr):
    """Queries' last 8 columns, and zeros where minus their offsets will be."""
    tail = gl.zeros([ROWS, COLUMNS], s.DTYPE, TAIL)
    if s.SPARE:
        column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, TAIL)), 0)
        tail = gl.where(column < 8, m.q_tail.index(s.Q_TAIL_AT + buffer * s.CONSUMERS + C).load(TAIL), tail)
    return tail


@gluon.jit
def with_offset(tail, offset, s: Sizes):
    """`tail` with minus each row's offset beside it."""
    return subtracted(tail, offset, 8, s, TAIL)


@gluon.jit
def tail_scores(tail, stage, s: Sizes, LAYOUT: gl.constexpr, C: gl.constexpr):
    """[q | -m] . [k | 1], in flight."""
    wide = tail
    for _ in gl.static_range(2):
        both = gl.permute(gl.join(wide, wide), (0, 2, 1))
        wide = gl.reshape(both, (ROWS, both.shape[1] * both.shape[2]))
    wide = gl.convert_layout(wide, LAYOUT, assert_trivial=True)
    EACH: gl.constexpr = s.BLOCK_N // 2
    KIND: gl.constexpr = "bf16" if gl.bfloat16 == s.DTYPE else "f16"
    TEXT: gl.constexpr = _scores_text(s.BLOCK_N, s.STAGES, C, KIND)
    REGISTERS: gl.constexpr = of_product(EACH, 0, EACH // 2 + EACH)
    return gl.inline_asm_elementwise(TEXT, REGISTERS, [wide, stage], dtype=gl.float32, is_pure=False, pack=EACH)


@gluon.jit
def add_tail_values(sums, p, stage, s: Sizes, C: gl.constexpr):
    """sums + P [v | 1], in flight."""
    left, right = halves(p)
    a, b = halves(left)
    c, d = halves(right)
    a = gl.convert_layout(a, TAIL, assert_trivial=True)
    b = gl.convert_layout(b, TAIL, assert_trivial=True)
    c = gl.convert_layout(c, TAIL, assert_trivial=True)
    d = gl.convert_layout(d, TAIL, assert_trivial=True)
    KIND: gl.constexpr = "bf16" if gl.bfloat16 == s.DTYPE else "f16"
    TEXT: gl.constexpr = _values_text(4, s.STAGES, C, KIND)
    REGISTERS: gl.constexpr = of_product(8, 8, 16 + 8)
    return gl.inline_asm_elementwise(
        TEXT, REGISTERS, [sums, a, b, c, d, stage], dtype=gl.float32, is_pure=False, pack=8
    )
