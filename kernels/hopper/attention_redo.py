"""One tile of attention with a running maximum: for rows whose fixed offset overflowed. Right for any finite input.

Slow and rare: a consumer that noted such a tile runs it after all others, 32 keys at a time, loading through pointers
into the space of its own queries, which nobody needs any more.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from fusedvit.kernels.hopper.attention_parts import ROWS, Memory, Sizes, store_rows
from fusedvit.kernels.hopper.compat import barrier, gl, gluon

STEP = gl.constexpr(32)  # keys


@gluon.jit
def _copy(qkv_ptr, box, first, end, col, limit, s: Sizes, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """Rows of q | k | v into shared memory, zeros past `end` and past `limit` columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    offs = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    rows = first + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    pitch: gl.constexpr = 3 * s.HEADS * s.HEAD_DIM
    ptrs = qkv_ptr + gl.expand_dims(rows.to(gl.int64) * pitch, 1) + gl.expand_dims(col + offs, 0)
    mask = gl.expand_dims(rows < end, 1) & gl.expand_dims(offs < limit, 0)
    box.store(gl.load(ptrs, mask=mask, other=0.0))


@gluon.jit
def _copy_head(qkv_ptr, box, box_tail, first, end, section, head, s: Sizes, COUNT: gl.constexpr):
    barrier()  # nobody reads what lies there
    col = (section * s.HEADS + head) * s.HEAD_DIM
    _copy(qkv_ptr, box, first, end, col, s.HEAD, s, COUNT, s.HEAD)
    if s.TAIL > 0:
        _copy(qkv_ptr, box_tail, first, end, col + s.HEAD, s.HEAD_DIM - s.HEAD, s, COUNT, s.TAIL)
    fence_async_shared()
    barrier()


@gluon.jit
def _rescale(acc, factor, LAYOUT: gl.constexpr):
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def redo_tile(m: Memory, qkv_ptr, out_ptr, begin, end, first, head, s: Sizes, C: gl.constexpr):
    """Queries `first` to `first + ROWS` of one head, online softmax."""
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
    store_rows(
        out_ptr, acc, acc_tail, gl.convert_layout(total, gl.SliceLayout(1, WIDE)), first, end, head, s, WIDE, SLIM
    )
