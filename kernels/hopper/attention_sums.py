"""Rows of P summed by the last product with values in the Hopper attention kernel: heads of 64 and 80.

    p [v | 1] = [p v | sum of p]

in 72 columns an instruction, or 24 of a tail of 16: a product of its own with 8 columns of ones takes as long as one of
27. Gluon has no such widths, so that they are written here as text, and find their operands by address: the memory that
they are in lies where shared memory begins, as `sass.misplaced_ring` makes sure.
"""

from fusedvit.kernels.hopper import attention_places
from fusedvit.kernels.hopper.attention_parts import ROWS, Sizes, halves, of_product
from fusedvit.kernels.hopper.compat import gl, gluon
from fusedvit.kernels.hopper.records import reinterpret

DEEP = gl.constexpr(16)  # keys of an instruction
UNIT, TAIL_UNIT = gl.constexpr(attention_places.UNIT), gl.constexpr(attention_places.TAIL_UNIT)
EIGHT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))  # of [ROWS, 8]


@gluon.jit
def one_array_with_ones(q_desc, q_tail_desc, kv_desc, kv_tail_desc, s: Sizes):
    """Queries, keys, values, their tails and ones in one array: views that `Sizes` says the beginnings of."""
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
def _text(columns, values, unit, ones, kind):
    """Sums of values' columns, then of 8 ones, then P, 8 keys at a time, then the stage, four times.

    Values lie across, in swizzled lines of all their columns: the leading distance is that to the columns behind them,
    which are ones wherever these are; the stride is that from 8 keys to the next. Bytes; `unit`: of a stage.
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
    """Of 16 columns, 8 at a time."""
    left, right = halves(x)
    return gl.convert_layout(left, EIGHT, assert_trivial=True), gl.convert_layout(right, EIGHT, assert_trivial=True)


@gluon.jit
def _eighths(x):
    """Of 64 columns, 8 at a time."""
    left, right = halves(x)
    a, b = halves(left)
    c, d = halves(right)
    return _pair(a) + _pair(b) + _pair(c) + _pair(d)


@gluon.jit
def _beside(left, right):
    """The reverse of `halves`."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@gluon.jit
def add_values_and_sums(acc, sums, p, stage, s: Sizes, LAYOUT: gl.constexpr):
    """acc + P V of one block, of a head of 64, and sums + P 1, in flight."""
    KIND: gl.constexpr = "bf16" if gl.bfloat16 == s.DTYPE else "f16"
    TEXT: gl.constexpr = _text(64, s.V_AT * UNIT, UNIT, s.ONES_AT * TAIL_UNIT, KIND)
    REGISTERS: gl.constexpr = of_product(36, 36, 16 + 4)
    a0, a1, a2, a3, a4, a5, a6, a7 = _eighths(acc)
    p0, p1, p2, p3, p4, p5, p6, p7 = _eighths(p)
    a0, a1, a2, a3, a4, a5, a6, a7, sums = gl.inline_asm_elementwise(
        TEXT, REGISTERS, [a0, a1, a2, a3, a4, a5, a6, a7, sums, p0, p1, p2, p3, p4, p5, p6, p7, stage],
        dtype=(gl.float32,) * 9, is_pure=False, pack=4,
    )  # fmt: skip
    left = _beside(_beside(a0, a1), _beside(a2, a3))
    right = _beside(_beside(a4, a5), _beside(a6, a7))
    return gl.convert_layout(_beside(left, right), LAYOUT, assert_trivial=True), sums


@gluon.jit
def add_tail_and_sums(acc, sums, p, stage, s: Sizes, LAYOUT: gl.constexpr):
    """The same of the tail of a head of 80."""
    KIND: gl.constexpr = "bf16" if gl.bfloat16 == s.DTYPE else "f16"
    TEXT: gl.constexpr = _text(16, s.V_TAIL_AT * TAIL_UNIT, TAIL_UNIT, s.ONES_AT * TAIL_UNIT, KIND)
    REGISTERS: gl.constexpr = of_product(12, 12, 16 + 4)
    a0, a1 = _pair(acc)
    p0, p1, p2, p3, p4, p5, p6, p7 = _eighths(p)
    a0, a1, sums = gl.inline_asm_elementwise(
        TEXT, REGISTERS, [a0, a1, sums, p0, p1, p2, p3, p4, p5, p6, p7, stage],
        dtype=(gl.float32,) * 3, is_pure=False, pack=4,
    )  # fmt: skip
    return gl.convert_layout(_beside(a0, a1), LAYOUT, assert_trivial=True), sums
