"""Shared memory of the Hopper attention kernel: operands, barriers, the walk over tiles, TMA descriptors.

Barriers. Triton makes a warpgroup meet before one of its threads arrives, and where it sees no reason not to: three
times a step. With `BY_WARP` waits and arrivals are inline PTX, each warp does its own, and nobody meets. They need
addresses: barriers lie behind the operands of a `SmemLayout`, as q_full, q_empty, full, empty, order.

Descriptors. The TMA unit cuts blocks of keys and values off at the end of a frame: their descriptor has the row
dimension twice, (a, b) -> row a + b - BLOCK_N with b < BLOCK_N, both of one pitch. A copy from (a, b) reads rows
a + b - BLOCK_N ... a - 1 and zeros behind them, with a the end of the block, so no NaN of a neighbour gets in.

The tail of a head of 72 is 8 columns of a block of 16. Of queries the TMA unit fills the others with zeros. Of keys and
values they hold the first 8 columns of the next head, which meet zeros in q . k and are not stored of P V; where they
are infinite or NaN, so are the row sums, and the tile is computed again without them. Where the spare columns hold ones
(`SPARE`), blocks of keys and values have 8 columns, and those of queries 16, of which half are read.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fusedvit.kernels.hopper import attention_configs
from fusedvit.kernels.hopper.attention_configs import BLOCK_N, MAX_HEAD, QUERIES, HopperAttentionConfig
from fusedvit.kernels.hopper.gluon_compat import built_descriptor, gl, gluon, indexed, record
from fusedvit.kernels.tile_configs import split_head

ROWS = gl.constexpr(64)  # queries of a consumer
SUMS, SHIFT = gl.constexpr(attention_configs.SUMS), gl.constexpr(attention_configs.SHIFT)


@record
class Sizes:
    """What is known when the kernel is compiled."""

    HEADS: gl.constexpr
    HEAD_DIM: gl.constexpr
    HEAD: gl.constexpr  # the power-of-two part of head_dim
    TAIL: gl.constexpr  # columns of a block of the rest, 0 if none
    CONSUMERS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    PING_PONG: gl.constexpr
    TOGETHER: gl.constexpr  # heads that are walked together, see `tile_and_head`
    LATE: gl.constexpr
    SHIFTED: gl.constexpr
    NEAR: gl.constexpr  # nothing is subtracted where the first scores of a tile are small: see attention_consumer.py
    SPARE: gl.constexpr  # the spare columns of a tail shift scores and sum rows: see attention_consumer.py
    SUMMED: gl.constexpr  # the last product with values also sums rows of P
    BY_WARP: gl.constexpr  # each warp waits and arrives at barriers by itself
    DTYPE: gl.constexpr
    # A `SmemLayout`; 0 where each operand has an allocation of its own.
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
    """Shared memory of a CTA.

    With `SPARE` or `SUMMED` all operands are views of one array; with `BY_WARP` every barrier field is one view of it.
    """

    q: gl.shared_memory_descriptor  # [2 * CONSUMERS, ROWS, HEAD]
    q_tail: gl.shared_memory_descriptor  # [2 * CONSUMERS, ROWS, 1, TAIL]
    k: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, HEAD]
    k_tail: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_N, TAIL]
    v: gl.shared_memory_descriptor  # as k
    v_tail: gl.shared_memory_descriptor  # as k_tail
    one_keys: gl.shared_memory_descriptor  # [CONSUMERS, BLOCK_N, SHIFT] ones, if SHIFTED
    q_full: gl.shared_memory_descriptor  # [2, 1] barriers, as the following
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # [STAGES, 1]
    empty: gl.shared_memory_descriptor
    order: gl.shared_memory_descriptor  # [CONSUMERS, 1], of ping-pong


@gluon.jit
def stage_of(m: Memory, i, s: Sizes):
    """Views of keys, their tail, values and their tail of stage `i`."""
    k, v = indexed(m.k, s.K_AT, s.STAGES, i), indexed(m.v, s.V_AT, s.STAGES, i)
    k_tail, v_tail = k, v
    if s.TAIL > 0:
        k_tail = indexed(m.k_tail, s.K_TAIL_AT, s.STAGES, i)
        v_tail = indexed(m.v_tail, s.V_TAIL_AT, s.STAGES, i)
    return k, k_tail, v, v_tail


@gluon.jit
def subtracted(columns, offset, FIRST: gl.constexpr, s: Sizes, LAYOUT: gl.constexpr):
    """`columns` of queries with minus each row's offset from column FIRST on: three 16-bit values hold it exactly."""
    rest = gl.expand_dims(gl.convert_layout(offset, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, SHIFT, gl.SliceLayout(0, LAYOUT)), 0)
    for i in gl.static_range(3):
        part = rest.to(s.DTYPE).to(gl.float32)
        columns = gl.where(column == FIRST + i, (-part).to(s.DTYPE), columns)
        rest -= part
    return columns


@gluon.jit
def halves(x):
    """The first and the second half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.constexpr_function
def wgmma_constraints(sums, again, others):
    """Constraints of a WGMMA in PTX: `sums` registers out, `again` of them in as well, and `others` more in."""
    return ",".join(["=f"] * sums + [str(i) for i in range(again)] + ["r"] * others)


@gluon.jit
def tile_and_head(index, num_tiles, s: Sizes):
    """(tile, head) of work item `index`.

    Tile by tile, all heads of each; or `TOGETHER` heads of every tile, then the next heads: the CTAs that run at one
    time then share the keys of few heads, which stay in L2. With all heads nothing waits for `num_tiles`.
    """
    first_head = 0
    if s.TOGETHER < s.HEADS:
        for i in gl.static_range(s.TOGETHER, s.HEADS, s.TOGETHER):
            first_head = gl.where(index >= i * num_tiles, i, first_head)
        index -= first_head * num_tiles
    return index // s.TOGETHER, first_head + index % s.TOGETHER


@gluon.jit
def work_item(index, tiles_ptr, num_tiles, s: Sizes, load=True, begin=0, end=0, first=0):
    """Work item `index`: (first token of the frame, one past its last, first query, head).

    Where `load` is false nothing is loaded: the tile is `begin`, `end`, `first`.
    """
    tile, head = tile_and_head(index, num_tiles, s)
    tile_ptr = tiles_ptr + 4 * tile
    begin = gl.load(tile_ptr, mask=load, other=begin)
    end = gl.load(tile_ptr + 1, mask=load, other=end)
    return begin, end, gl.load(tile_ptr + 2, mask=load, other=first), head


@gluon.jit
def of_threads(flags):
    """[ROWS] -> [ROWS / 2]: flags of the two rows that one thread holds, in one register."""
    return gl.reshape(gl.reduce_or(gl.reshape(flags, [ROWS // 16, 2, 8]), 1), [ROWS // 2])


@gluon.jit
def reread_program_id(x):
    """The program id, read again: kept through a tile's first block it would spill in `LONG`. `x`: any value."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_item(tiles_ptr, num_tiles, s: Sizes):
    """This CTA's first work item; whatever is stored there if it has none."""
    index = gl.program_id(0)
    if s.TOGETHER < s.HEADS:  # without this bound a tile past the last would be read
        index = gl.maximum(gl.minimum(index, num_tiles * s.HEADS - 1), 0)
    return work_item(index, tiles_ptr, num_tiles, s)


@gluon.jit
def following_item(index, tiles_ptr, num_tiles, s: Sizes):
    """This CTA's work item after `index`, loaded one ahead; the last of all if it has none."""
    return work_item(gl.minimum(index + gl.num_programs(0), num_tiles * s.HEADS - 1), tiles_ptr, num_tiles, s)


@gluon.jit
def _store(out_ptr, clip_ptr, acc, first, end, col, limit: gl.constexpr, s: Sizes, WIDTH: gl.constexpr):
    """Stores through shared memory, so that a thread writes 16 bytes and neighbours write whole lines.

    Three consumers have no registers for that (32 bytes spill): there each thread writes the columns it holds.
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
    if clip_ptr is not None:
        acc = gl.maximum(acc, gl.load(clip_ptr), propagate_nan=tl.PropagateNan.ALL)
        acc = gl.minimum(acc, gl.load(clip_ptr + 1), propagate_nan=tl.PropagateNan.ALL)
    gl.store(ptrs, gl.convert_layout(acc.to(s.DTYPE), LAYOUT), mask=mask)


@gluon.jit
def store_rows(
    out_ptr, clip_ptr, acc, acc_tail, total, first, end, head, s: Sizes,
    LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Stores ROWS queries of one head, within bounds if there are any; `total`: sums of rows of exponentials."""
    scale = 1.0 / total
    _store(out_ptr, clip_ptr, acc * gl.expand_dims(scale, 1), first, end, head * s.HEAD_DIM, s.HEAD, s, s.HEAD)
    if s.TAIL > 0:
        scale = gl.convert_layout(scale, gl.SliceLayout(1, TAIL_LAYOUT))
        rest: gl.constexpr = s.HEAD_DIM - s.HEAD
        col = head * s.HEAD_DIM + s.HEAD
        _store(out_ptr, clip_ptr, acc_tail * gl.expand_dims(scale, 1), first, end, col, rest, s, s.TAIL)


WARPS = 4  # of a consumer


@gluon.constexpr_function
def _first_barrier(kind, stages):
    """Index of the first barrier of a kind."""
    return {"q_full": 0, "q_empty": 2, "full": 4, "empty": 4 + stages, "order": 4 + 2 * stages}[kind]


@gluon.constexpr_function
def _init_text(stages, consumers, ping_pong):
    """Initialisation by the first thread of the CTA; not of barriers that nobody waits at."""
    groups = [(2, 1), (2, WARPS * consumers), (stages, 1), (stages, WARPS * consumers)]
    groups += [(consumers, WARPS)] * ping_pong
    counts = [count for many, count in groups for _ in range(many)]
    inits = "\n".join(f"@one mbarrier.init.shared::cta.b64 [$1+{8 * i}], {count};" for i, count in enumerate(counts))
    return f"{{ .reg .b32 t; .reg .pred one; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0;\n{inits}\nmov.u32 $0, 0; }}"


@gluon.constexpr_function
def _wait_text(first):
    return f"""{{ .reg .b32 at; .reg .pred complete;
        mad.lo.u32 at, $1, 8, $3;
        waitLoop: mbarrier.try_wait.parity.shared::cta.b64 complete, [at+{8 * first}], $2;
        @!complete bra.uni waitLoop;
        mov.u32 $0, 0; }}"""


@gluon.constexpr_function
def _arrive_text(first):
    return f"""{{ .reg .b32 at; .reg .pred one;
        mov.u32 at, %laneid; setp.eq.u32 one, at, 0;
        mad.lo.u32 at, $1, 8, $2;
        @one mbarrier.arrive.shared::cta.b64 _, [at+{8 * first}];
        mov.u32 $0, 0; }}"""


@gluon.constexpr_function
def _address_text(first):
    """The address goes through a shuffle, so that ptxas does not compute it again wherever it is used."""
    return f"""{{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, {8 * first};
        shfl.sync.idx.b32 $0, at, 0, 31, -1; }}"""


@gluon.jit
def barriers_address(x, s: Sizes):
    """Address of the first barrier. `x`: any value."""
    TEXT: gl.constexpr = _address_text(s.BARRIERS_AT)
    return gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def init_barriers(x, s: Sizes):
    """Initialises all barriers. `x`: any value."""
    TEXT: gl.constexpr = _init_text(s.STAGES, s.CONSUMERS, s.PING_PONG)
    barriers = barriers_address(x, s)
    gl.inline_asm_elementwise(TEXT, "=r,r", [barriers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_of(m: Memory, KIND: gl.constexpr, i, s: Sizes):
    """Barrier `i` of a kind, as Gluon takes it."""
    if s.BY_WARP:
        FIRST: gl.constexpr = _first_barrier(KIND, s.STAGES)
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
        return m.order.index(i)


@gluon.jit
def await_phase(m: Memory, KIND: gl.constexpr, i, parity, barriers, s: Sizes):
    """Waits for the phase of `parity` of barrier `i` of a kind; `barriers` is the address of the first of all."""
    if s.BY_WARP:
        TEXT: gl.constexpr = _wait_text(_first_barrier(KIND, s.STAGES))
        i, parity = gl.to_tensor(i), gl.to_tensor(parity)
        gl.inline_asm_elementwise(TEXT, "=r,r,r,r", [i, parity, barriers], dtype=gl.int32, is_pure=False, pack=1)
    else:
        mbarrier.wait(barrier_of(m, KIND, i, s), parity)


@gluon.jit
def arrive(m: Memory, KIND: gl.constexpr, i, barriers, s: Sizes):
    """A consumer arrives at barrier `i` of a kind."""
    if s.BY_WARP:
        TEXT: gl.constexpr = _arrive_text(_first_barrier(KIND, s.STAGES))
        i = gl.to_tensor(i)
        gl.inline_asm_elementwise(TEXT, "=r,r,r", [i, barriers], dtype=gl.int32, is_pure=False, pack=1)
    else:
        mbarrier.arrive(barrier_of(m, KIND, i, s), count=1)


@dataclass(frozen=True)
class _StartingEarlier:
    """`tensor` as if it began `bytes_ahead` earlier; its descriptor never reads what lies there."""

    tensor: torch.Tensor
    bytes_ahead: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.bytes_ahead


def _descriptor(base: torch.Tensor | _StartingEarlier, shape: list[int], strides: list[int], dst: list[int]) -> Any:
    return built_descriptor(base, shape, strides, dst, _layout(tuple(dst), base.dtype))


@functools.cache
def _layout(dst: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(dst), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def descriptors(qkv: torch.Tensor, heads: int, head_dim: int, config: HopperAttentionConfig) -> tuple[Any, ...]:
    """Descriptors of q, its tail, keys and values, their tail; without tails the others are repeated."""
    (rows, pitch), block_n = qkv.shape, BLOCK_N
    head, tail = split_head(head_dim, MAX_HEAD)
    ahead = block_n * pitch * qkv.element_size()
    q = _descriptor(qkv, [rows, pitch], [pitch, 1], [QUERIES, head])
    kv, kv_tail = (
        _descriptor(_StartingEarlier(qkv, ahead), [rows + 1, block_n, pitch], [pitch, pitch, 1], [1, block_n, width])
        for width in (head, 8 if config.spare(head_dim) else tail or head)
    )
    if tail == 0:
        return q, q, kv, kv_tail
    if config.spare(head_dim):
        return q, _descriptor(qkv, [rows, pitch], [pitch, 1], [QUERIES, tail]), kv, kv_tail
    shape, strides = [rows, 3 * heads, head_dim - head], [pitch, head_dim, 1]
    return q, _descriptor(qkv[:, head:], shape, strides, [QUERIES, 1, tail]), kv, kv_tail
