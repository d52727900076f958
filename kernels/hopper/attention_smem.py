"""Tensor descriptors of the Hopper attention kernel: what the copy engine brings of q | k | v, box by box.

Boxes of keys and values are cut off at the end of the frame by the copy engine itself: their descriptor has a row
dimension twice, (a, b) -> row a + b - BLOCK_N with b < BLOCK_N, both of pitch W. A box that starts at (a, b) reads
rows a + b - BLOCK_N ... a - 1 and zeros behind them, so a = end of the block and no neighbour's NaN gets in.

The tail of a head of 72 is 8 columns in a box of 16. Of queries the copy engine fills it up with zeros, which takes it
longer; of keys and values the box holds the next head's first 8 columns, which meet zeros in q . k and are not stored
of P V. Where these are infinite or NaN, so are the sums, and the tile is redone without them. Where a tail leaves its
columns to ones (attention_spare.py), boxes of keys and values have 8 columns, and queries' have 16, of which half are
read.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fusedvit.kernels.attention import split_head
from fusedvit.kernels.hopper import attention_configs
from fusedvit.kernels.hopper.attention_configs import MAX_HEAD, QUERIES, HopperAttentionConfig
from fusedvit.kernels.hopper.gluon_compat import TensorDescriptor, gl, gluon, record

# ── attention parts ───────────────────────────────────────────────────────────────────────────────────────────────────
# What the warpgroups of the Hopper attention kernel share: sizes, shared memory, the walk over tiles.

ROWS = gl.constexpr(64)  # queries of a consumer
SUMS, SHIFT = gl.constexpr(attention_configs.SUMS), gl.constexpr(attention_configs.SHIFT)


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


# ── attention barriers ────────────────────────────────────────────────────────────────────────────────────────────────
# Barriers of the Hopper attention kernel, each warp waiting and arriving for itself where they are `BY_WARP`.
#
# Triton has a warpgroup meet before one of its threads arrives, and where it sees no reason not to: three times a step.
# As text none of these is left, and four warps arrive in place of a thread. Addresses are what this takes: barriers are
# in the array of attention_places.py, in the order q_full, q_empty, full, empty, turn.

WARPS = 4  # of a consumer


@gluon.constexpr_function
def _first(kind, stages):
    """The first barrier of a kind."""
    return {"q_full": 0, "q_empty": 2, "full": 4, "empty": 4 + stages, "turn": 4 + 2 * stages}[kind]


@gluon.constexpr_function
def _making(stages, consumers, turns):
    """By the CTA's first thread. Those that nobody waits at are not made: see `sass.overwritten_barriers`."""
    alike = [(2, 1), (2, WARPS * consumers), (stages, 1), (stages, WARPS * consumers)] + [(consumers, WARPS)] * turns
    counts = [count for many, count in alike for _ in range(many)]
    made = "\n".join(f"@one mbarrier.init.shared::cta.b64 [$1+{8 * i}], {count};" for i, count in enumerate(counts))
    return f"{{ .reg .b32 t; .reg .pred one; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0;\n{made}\nmov.u32 $0, 0; }}"


@gluon.constexpr_function
def _waiting(first):
    return f"""{{ .reg .b32 at; .reg .pred complete;
        mad.lo.u32 at, $1, 8, $3;
        waitLoop: mbarrier.try_wait.parity.shared::cta.b64 complete, [at+{8 * first}], $2;
        @!complete bra.uni waitLoop;
        mov.u32 $0, 0; }}"""


@gluon.constexpr_function
def _arriving(first):
    return f"""{{ .reg .b32 at; .reg .pred one;
        mov.u32 at, %laneid; setp.eq.u32 one, at, 0;
        mad.lo.u32 at, $1, 8, $2;
        @one mbarrier.arrive.shared::cta.b64 _, [at+{8 * first}];
        mov.u32 $0, 0; }}"""


@gluon.constexpr_function
def _address(first):
    """Handed from lane to lane, so that ptxas does not work it out anew wherever it is needed."""
    return f"""{{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, {8 * first};
        shfl.sync.idx.b32 $0, at, 0, 31, -1; }}"""


@gluon.jit
def address_of_barriers(x, s: Sizes):
    """Of the first of all. `x`: any number."""
    TEXT: gl.constexpr = _address(s.BARRIERS_AT)
    return gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def make_barriers(x, s: Sizes):
    """All of them. `x`: any number."""
    TEXT: gl.constexpr = _making(s.STAGES, s.CONSUMERS, s.PING_PONG)
    barriers = address_of_barriers(x, s)
    gl.inline_asm_elementwise(TEXT, "=r,r", [barriers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def handle(m: Memory, KIND: gl.constexpr, i, s: Sizes):
    """The `i`-th of a kind, for Gluon."""
    if s.BY_WARP:
        FIRST: gl.constexpr = s.BARRIERS_AT + _first(KIND, s.STAGES)
        return m.full.index(FIRST + i)
    elif KIND == "q_full":
        return m.q_full.index(i)
    elif KIND == "q_empty":
        return m.q_empty.index(i)
    elif KIND == "full":
        return m.full.index(i)
    elif KIND == "empty":
        return m.empty.index(i)
    else:
        return m.turn.index(i)


@gluon.jit
def await_phase(m: Memory, KIND: gl.constexpr, i, parity, barriers, s: Sizes):
    """Waits at the `i`-th of a kind; `barriers` is their address."""
    if s.BY_WARP:
        TEXT: gl.constexpr = _waiting(_first(KIND, s.STAGES))
        i, parity = gl.to_tensor(i), gl.to_tensor(parity)
        gl.inline_asm_elementwise(TEXT, "=r,r,r,r", [i, parity, barriers], dtype=gl.int32, is_pure=False, pack=1)
    else:
        mbarrier.wait(handle(m, KIND, i, s), parity)


@gluon.jit
def arrive(m: Memory, KIND: gl.constexpr, i, barriers, s: Sizes):
    """A consumer arrives at the `i`-th of a kind."""
    if s.BY_WARP:
        TEXT: gl.constexpr = _arriving(_first(KIND, s.STAGES))
        i = gl.to_tensor(i)
        gl.inline_asm_elementwise(TEXT, "=r,r,r", [i, barriers], dtype=gl.int32, is_pure=False, pack=1)
    else:
        mbarrier.arrive(handle(m, KIND, i, s), count=1)


# ── attention boxes ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Ahead:
    """A tensor as if it began `bytes_ahead` earlier, to a descriptor that never reads what lies there."""

    tensor: torch.Tensor
    bytes_ahead: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.bytes_ahead


def _descriptor(base: torch.Tensor | _Ahead, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    """Made without the record's own checks, which cost more than the launch (see descriptor.py)."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = base, shape, strides, box
    descriptor.layout = _layout(tuple(box), base.dtype)
    return descriptor


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def boxes(qkv: torch.Tensor, heads: int, head_dim: int, config: HopperAttentionConfig) -> tuple[Any, ...]:
    """q, q's tail, keys and values, their tail; of a head that is a power of two the tails are the others again."""
    (rows, pitch), block_n = qkv.shape, config.block_n
    head, tail = split_head(head_dim, MAX_HEAD)
    ahead = block_n * pitch * qkv.element_size()
    q = _descriptor(qkv, [rows, pitch], [pitch, 1], [QUERIES, head])
    kv, kv_tail = (
        _descriptor(_Ahead(qkv, ahead), [rows + 1, block_n, pitch], [pitch, pitch, 1], [1, block_n, width])
        for width in (head, 8 if config.spare(head_dim) else tail or head)
    )
    if tail == 0:
        return q, q, kv, kv_tail
    if config.spare(head_dim):
        return q, _descriptor(qkv, [rows, pitch], [pitch, 1], [QUERIES, tail]), kv, kv_tail
    shape, strides = [rows, 3 * heads, head_dim - head], [pitch, head_dim, 1]
    return q, _descriptor(qkv[:, head:], shape, strides, [QUERIES, 1, tail]), kv, kv_tail
