"""What the warpgroups of the Hopper attention kernel share: sizes, shared memory, the walk over tiles."""

from fusedvit.kernels.hopper import configs
from fusedvit.kernels.hopper.compat import gl, gluon
from fusedvit.kernels.hopper.records import record

ROWS = gl.constexpr(64)  # queries of a consumer
SUMS, SHIFT = gl.constexpr(configs.SUMS), gl.constexpr(configs.SHIFT)


@record
class Sizes:
    """Everything known when the kernel is compiled."""

    HEADS: gl.constexpr
    HEAD_DIM: gl.constexpr
    HEAD: gl.constexpr  # the power-of-two part of head_dim
    TAIL: gl.constexpr  # box of the rest, 0 if none
    CONSUMERS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    PING_PONG: gl.constexpr
    TOGETHER: gl.constexpr
    LATE: gl.constexpr
    ONES: gl.constexpr
    SHIFTED: gl.constexpr
    NEAR: gl.constexpr  # whether nothing is shifted where a tile's first scores are small: see attention_softmax.py
    SPARE: gl.constexpr  # whether what a tail leaves of its box holds ones: see attention_spare.py
    SUMMED: gl.constexpr  # whether values' product sums P's rows as well: see attention_sums.py
    BY_WARP: gl.constexpr  # whether each warp arrives for itself: see attention_barriers.py
    DTYPE: gl.constexpr
    # Where each begins in its array (attention_places.py): 0 where it has one of its own.
    Q_AT: gl.constexpr
    Q_TAIL_AT: gl.constexpr
    K_AT: gl.constexpr
    K_TAIL_AT: gl.constexpr
    V_AT: gl.constexpr
    V_TAIL_AT: gl.constexpr
    ONES_AT: gl.constexpr
    BARRIERS_AT: gl.constexpr
    UNITS: gl.constexpr


@record
class Memory:
    """Shared memory of a CTA. `full` and `empty` belong to the same index of what is loaded; see attention.py.

    Where `SPARE` or `SUMMED`, queries, keys, values and tails are views of one array; where `BY_WARP`, `full` is one of
    all of it, in which barriers of every kind are.
    """

    q: gl.shared_memory_descriptor  # [2 * CONSUMERS, ROWS, HEAD]
    q_tail: gl.shared_memory_descriptor  # [2 * CONSUMERS, ROWS, 1, TAIL]
    k: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, HEAD]
    k_tail: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, TAIL]
    v: gl.shared_memory_descriptor  # as k
    v_tail: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor  # [CONSUMERS, SUMS, BLOCK_N], if there are any
    one_keys: gl.shared_memory_descriptor  # [CONSUMERS, BLOCK_N, SHIFT]: ones for further columns of keys
    q_full: gl.shared_memory_descriptor  # [2, 1] barriers, as the following
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # [STAGES, 1]
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor  # [CONSUMERS, 1]


@gluon.jit
def stage_of(m: Memory, i, s: Sizes):
    """Keys, their tail, values and their tail of stage `i`."""
    return (
        m.k.index(s.K_AT + i),
        m.k_tail.index(s.K_TAIL_AT + i),
        m.v.index(s.V_AT + i),
        m.v_tail.index(s.V_TAIL_AT + i),
    )


@gluon.jit
def subtracted(columns, offset, FIRST: gl.constexpr, s: Sizes, LAYOUT: gl.constexpr):
    """`columns` of queries with minus each row's offset from the FIRST on: three numbers of 16 bits hold it exactly."""
    rest = gl.expand_dims(gl.convert_layout(offset, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, SHIFT, gl.SliceLayout(0, LAYOUT)), 0)
    for i in gl.static_range(3):
        part = rest.to(s.DTYPE).to(gl.float32)
        columns = gl.where(column == FIRST + i, (-part).to(s.DTYPE), columns)
        rest -= part
    return columns


@gluon.jit
def halves(x):
    """The first and the last columns."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.constexpr_function
def of_product(sums, again, words):
    """Constraints of a product as text: so many registers out, so many of them in as well, and so many others."""
    return ",".join(["=f"] * sums + [str(i) for i in range(again)] + ["r"] * words)


@gluon.jit
def place(index, num_tiles, s: Sizes):
    """(tile, head) of the `index`-th piece of work.

    Tile by tile, all heads of each; or `TOGETHER` heads of every tile, then the next ones: CTAs at work together share
    the keys of few heads, which stay in L2. With all heads nothing waits for `num_tiles`.
    """
    first_head = 0
    if s.TOGETHER < s.HEADS:
        for i in gl.static_range(s.TOGETHER, s.HEADS, s.TOGETHER):
            first_head = gl.where(index >= i * num_tiles, i, first_head)
        index -= first_head * num_tiles
    return index // s.TOGETHER, first_head + index % s.TOGETHER


@gluon.jit
def work_item(index, tiles_ptr, num_tiles, s: Sizes, ask=True, begin=0, end=0, first=0):
    """The `index`-th piece of work as (first token of the frame, one past its last, first query, head).

    Unless `ask`, the tile is known: `begin`, `end` and `first`.
    """
    tile, head = place(index, num_tiles, s)
    tile_ptr = tiles_ptr + 4 * tile
    begin = gl.load(tile_ptr, mask=ask, other=begin)
    end = gl.load(tile_ptr + 1, mask=ask, other=end)
    return begin, end, gl.load(tile_ptr + 2, mask=ask, other=first), head


@gluon.jit
def of_threads(flags):
    """[ROWS] -> [ROWS / 2]: those of the two rows that one thread holds, in one register."""
    return gl.reshape(gl.reduce_or(gl.reshape(flags, [ROWS // 16, 2, 8]), 1), [ROWS // 2])


@gluon.jit
def program_again(x):
    """This program's number, read anew: kept through a tile's first block it costs `LONG` a spilled word. `x`: any."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_item(tiles_ptr, num_tiles, s: Sizes):
    """This CTA's first piece of work, or whatever lies in its place where it has none."""
    index = gl.program_id(0)
    if s.TOGETHER < s.HEADS:  # which reads no tile past the last then
        index = gl.maximum(gl.minimum(index, num_tiles * s.HEADS - 1), 0)
    return work_item(index, tiles_ptr, num_tiles, s)


@gluon.jit
def following_item(index, tiles_ptr, num_tiles, s: Sizes):
    """The piece of work of this CTA after that of `index`, asked for one ahead; the last of all where it has none."""
    return work_item(gl.minimum(index + gl.num_programs(0), num_tiles * s.HEADS - 1), tiles_ptr, num_tiles, s)


@gluon.jit
def _store(out_ptr, acc, first, end, col, limit: gl.constexpr, s: Sizes, WIDTH: gl.constexpr):
    """Through shared memory, so that a thread writes 16 bytes and neighbours write whole lines.

    Beside three consumers there are no registers for that (32 bytes spill): there each thread writes what it has.
    """
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = LINES if s.CONSUMERS < 3 else PRODUCT
    offs = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    pitch: gl.constexpr = s.HEADS * s.HEAD_DIM
    ptrs = out_ptr + gl.expand_dims(rows.to(gl.int64) * pitch, 1) + gl.expand_dims(col + offs, 0)
    mask = gl.expand_dims(rows < end, 1)
    if limit < WIDTH:
        mask = mask & gl.expand_dims(offs < limit, 0)
    gl.store(ptrs, gl.convert_layout(acc.to(s.DTYPE), LAYOUT), mask=mask)


@gluon.jit
def store_rows(
    out_ptr, acc, acc_tail, total, first, end, head, s: Sizes, LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr
):
    """Stores ROWS queries of one head, `total` being the sum of each row's exponentials."""
    scale = 1.0 / total
    _store(out_ptr, acc * gl.expand_dims(scale, 1), first, end, head * s.HEAD_DIM, s.HEAD, s, s.HEAD)
    if s.TAIL > 0:
        scale = gl.convert_layout(scale, gl.SliceLayout(1, TAIL_LAYOUT))
        rest: gl.constexpr = s.HEAD_DIM - s.HEAD
        col = head * s.HEAD_DIM + s.HEAD
        _store(out_ptr, acc_tail * gl.expand_dims(scale, 1), first, end, col, rest, s, s.TAIL)
