"""Varlen attention on Hopper: `kernels.attention` as a warp-specialised Gluon kernel, with softmax under the products.

    out[t, h] = sum_j p[t, j] v[j, h] / sum_j p[t, j],  p[t, j] = 2^(q[t, h] . k[j, h])        j over t's frame

A CTA is a producer warp and one to three consumer warpgroups; CTAs walk over tiles x heads. A tile is 64 CONSUMERS
queries of one frame; its keys come in blocks. The producer loads through a pipeline of STAGES stages, a slot at a time:

    slot 0: K0        slot 1: K1 V0        slot 2: K2 V1        ...        last slot: V

where blocks are counted through all tiles of the CTA. At slot t a consumer issues Q K_t and P_(t-1) V_(t-1), computes
the softmax of block t while P V is running, then frees the slot. Where K_t is the first block of the next tile the
scheme goes on: the end of one tile and the start of the next overlap, too. With `PING_PONG` consumers issue their
products one after the other, so that the softmax of one runs under the products of another.

Programmatic dependent launch: every warp waits for the previous launch (`gdc_wait`), also in a CTA without work. Before
that it reads only tiles and their count, which must be older. The next launch may begin once every producer has issued
its last load.
"""

import torch
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusedvit.kernels.attention import Segments
from fusedvit.kernels.hopper import attention_configs
from fusedvit.kernels.hopper.attention_configs import MAX_HEAD, HopperAttentionConfig
from fusedvit.kernels.hopper.attention_consumer import allocate_with_ones, allocate_with_spare_tails, consumer
from fusedvit.kernels.hopper.attention_smem import (
    ROWS,
    SHIFT,
    Memory,
    Sizes,
    await_phase,
    barrier_of,
    barriers_address,
    descriptors,
    first_item,
    init_barriers,
    stage_of,
    work_item,
)
from fusedvit.kernels.hopper.gluon_compat import (
    async_load,
    barrier,
    gl,
    gluon,
    indexed,
    misplaced_operands,
    reinterpret,
)
from fusedvit.kernels.launch import Loaded, launch
from fusedvit.kernels.tile_configs import split_head


@gluon.jit
def _load_block(desc, tail_desc, dst, dst_tail, barrier, last, skip, section, head, s: Sizes, pred):
    """Loads keys (section 1) or values (2) of one block, zeros past row `last`."""
    col = (section * s.HEADS + head) * s.HEAD_DIM
    async_load(desc, [last, skip, col], barrier, dst, pred=pred)
    if s.TAIL > 0:
        async_load(tail_desc, [last, skip, col + s.HEAD], barrier, dst_tail, pred=pred)


@gluon.jit
def _producer(m: Memory, q_desc, q_tail_desc, kv_desc, kv_tail_desc, tiles_ptr, num_tiles_ptr, s: Sizes):
    Q_BYTES: gl.constexpr = s.CONSUMERS * ROWS * (s.HEAD + s.TAIL) * 2
    KV_BYTES: gl.constexpr = s.BLOCK_N * (s.HEAD + (8 if s.SPARE else s.TAIL)) * 2
    num_tiles = gl.load(num_tiles_ptr)
    barriers = barriers_address(num_tiles, s)
    EARLY: gl.constexpr = s.CONSUMERS < 3  # three consumers leave no registers for it
    begin_0, end_0, first_0 = 0, 0, 0
    if EARLY:
        begin_0, end_0, first_0, _ = first_item(tiles_ptr, num_tiles, s)
    gdc_wait()
    slot = 0
    nth = 0
    v_last = 0  # the block whose values are loaded with the next keys
    v_skip = 0
    v_head = 0
    for index in range(gl.program_id(0), num_tiles * s.HEADS, gl.num_programs(0)):
        # Only the first tile is loaded early: Triton carries no value around a loop that an inner loop begins at.
        later = (index > gl.program_id(0)) if EARLY else True
        begin, end, first, head = work_item(index, tiles_ptr, num_tiles, s, later, begin_0, end_0, first_0)
        buffer = nth & 1
        q_full = barrier_of(m, "q_full", buffer, s)
        await_phase(m, "q_empty", buffer, ((nth >> 1) & 1) ^ 1, barriers, s)
        mbarrier.expect(q_full, Q_BYTES)
        for c in gl.static_range(s.CONSUMERS):
            rows = first + c * ROWS
            i = buffer * s.CONSUMERS + c
            async_load(q_desc, [rows, head * s.HEAD_DIM], q_full, indexed(m.q, s.Q_AT, 2 * s.CONSUMERS, i))
            if s.TAIL > 0:
                dst = indexed(m.q_tail, s.Q_TAIL_AT, 2 * s.CONSUMERS, i)
                if s.SPARE:
                    async_load(q_tail_desc, [rows, head * s.HEAD_DIM + s.HEAD], q_full, dst)
                else:
                    async_load(q_tail_desc, [rows, head, 0], q_full, dst)
        for row in range(begin, end, s.BLOCK_N):
            i = slot % s.STAGES
            full = barrier_of(m, "full", i, s)
            last = gl.minimum(row + s.BLOCK_N, end)
            skip = row + s.BLOCK_N - last
            await_phase(m, "empty", i, ((slot // s.STAGES) & 1) ^ 1, barriers, s)
            mbarrier.expect(full, KV_BYTES, pred=slot == 0)
            mbarrier.expect(full, 2 * KV_BYTES, pred=slot > 0)
            k, k_tail, v, v_tail = stage_of(m, i, s)
            _load_block(kv_desc, kv_tail_desc, k, k_tail, full, last, skip, 1, head, s, True)
            _load_block(kv_desc, kv_tail_desc, v, v_tail, full, v_last, v_skip, 2, v_head, s, slot > 0)
            v_last, v_skip, v_head = last, skip, head
            slot += 1
        nth += 1
    if slot > 0:
        i = slot % s.STAGES
        full = barrier_of(m, "full", i, s)
        await_phase(m, "empty", i, ((slot // s.STAGES) & 1) ^ 1, barriers, s)
        mbarrier.expect(full, KV_BYTES)
        k, k_tail, v, v_tail = stage_of(m, i, s)
        _load_block(kv_desc, kv_tail_desc, v, v_tail, full, v_last, v_skip, 2, v_head, s, True)
    # Here and not at the beginning, with which towers were slower (docs/kernels.md).
    gdc_launch_dependents()


smem_layout = gluon.constexpr_function(attention_configs.smem_layout)
UNIT, BLOCK_N = gl.constexpr(attention_configs.UNIT), gl.constexpr(attention_configs.BLOCK_N)
MAX_BARRIERS = gl.constexpr(attention_configs.MAX_BARRIERS)


@gluon.jit
def _barriers(array, s: Sizes):
    """q_full, q_empty, full, empty and order, initialised; with `BY_WARP` five times one view of all."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    if s.BY_WARP:
        init_barriers(gl.program_id(0), s)
        # Not a view of the whole array, for the reason that `gluon_compat.indexed` has.
        lines = reinterpret(array, gl.int64, [s.UNITS * UNIT // (8 * MAX_BARRIERS), MAX_BARRIERS], BARRIER)
        every = reinterpret(lines.index(s.BARRIERS_AT // MAX_BARRIERS), gl.int64, [MAX_BARRIERS, 1], BARRIER)
        q_full, q_empty, full, empty, order = every, every, every, every, every
    else:
        q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        full = gl.allocate_shared_memory(gl.int64, [s.STAGES, 1], BARRIER)
        empty = gl.allocate_shared_memory(gl.int64, [s.STAGES, 1], BARRIER)
        order = gl.allocate_shared_memory(gl.int64, [s.CONSUMERS, 1], BARRIER)
        # Interleaved: between two inits of one array Triton puts a barrier of the whole CTA. Barriers that nobody waits
        # at must not be initialised: see `codegen_checks.overwritten_barriers`.
        for i in gl.static_range(s.STAGES if s.STAGES > 3 else 3):
            if i < s.STAGES:
                mbarrier.init(full.index(i), count=1)
                mbarrier.init(empty.index(i), count=s.CONSUMERS)
            if i < 2:
                mbarrier.init(q_full.index(i), count=1)
                mbarrier.init(q_empty.index(i), count=s.CONSUMERS)
            if i < s.CONSUMERS and s.PING_PONG:
                mbarrier.init(order.index(i), count=1)
    return q_full, q_empty, full, empty, order


@gluon.jit
def _hopper_attention_kernel(
    q_desc,  # [T, 3 * HEADS * HEAD_DIM], blocks [ROWS, HEAD]
    q_tail_desc,  # [T, 3 * HEADS, HEAD_DIM - HEAD], blocks [ROWS, 1, TAIL]; if SPARE as q_desc, blocks [ROWS, TAIL]
    kv_desc,  # [T + 1, BLOCK_N, 3 * HEADS * HEAD_DIM], see attention_smem.py; blocks [1, BLOCK_N, HEAD]
    kv_tail_desc,  # as kv_desc, blocks [1, BLOCK_N, TAIL]; if SPARE [1, BLOCK_N, 8]
    qkv_ptr,  # [T, 3 * HEADS * HEAD_DIM]
    out_ptr,  # [T, HEADS * HEAD_DIM]
    tiles_ptr,  # [tile capacity, 4] int32
    num_tiles_ptr,  # [1] int32
    clip_ptr,  # [2] fp32 or None
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD: gl.constexpr,
    TAIL: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    PING_PONG: gl.constexpr,
    TOGETHER: gl.constexpr,
    LATE: gl.constexpr,
    SHIFTED: gl.constexpr,
    NEAR: gl.constexpr,
    SPARE: gl.constexpr,
    SUMMED: gl.constexpr,
    BY_WARP: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a consumer's thread
):
    DTYPE: gl.constexpr = q_desc.dtype
    AT: gl.constexpr = smem_layout(HEAD_DIM, CONSUMERS, STAGES, BY_WARP) if SPARE or SUMMED else (0,) * 9
    NEAR_HERE: gl.constexpr = NEAR and gl.bfloat16 == DTYPE  # fp16 needs offsets of at least HEADROOM
    s = Sizes(
        HEADS, HEAD_DIM, HEAD, TAIL, CONSUMERS, BLOCK_N, STAGES, PING_PONG, TOGETHER, LATE, SHIFTED, NEAR_HERE, SPARE,
        SUMMED, BY_WARP, DTYPE, AT[0], AT[1], AT[2], AT[3], AT[4], AT[5], AT[6], AT[7], AT[8],
    )  # fmt: skip
    if SPARE:
        q, q_tail, k, k_tail, v, v_tail = allocate_with_spare_tails(q_desc, q_tail_desc, kv_desc, kv_tail_desc, s)
    elif SUMMED:
        q, q_tail, k, k_tail, v, v_tail = allocate_with_ones(q_desc, q_tail_desc, kv_desc, kv_tail_desc, s)
    else:
        q = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, ROWS, HEAD], q_desc.layout)
        k = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_N, HEAD], kv_desc.layout)
        v = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_N, HEAD], kv_desc.layout)
        q_tail, k_tail, v_tail = q, k, v
    if TAIL > 0 and not SPARE and not SUMMED:
        q_tail = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, ROWS, 1, TAIL], q_tail_desc.layout)
        k_tail = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_N, TAIL], kv_tail_desc.layout)
        v_tail = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_N, TAIL], kv_tail_desc.layout)
    one_keys = q
    if SHIFTED:
        one_keys = gl.allocate_shared_memory(DTYPE, [CONSUMERS, BLOCK_N, SHIFT], gl.NVMMASharedLayout(32, 16, 2))
    q_full, q_empty, full, empty, order = _barriers(q, s)
    if SUMMED or BY_WARP:  # ones and barriers become visible to the tensor cores and the TMA unit
        fence_async_shared()
        barrier()
    m = Memory(q, q_tail, k, k_tail, v, v_tail, one_keys, q_full, q_empty, full, empty, order)
    # Constants that go through a tuple variable are no constants inside the partitions: hence the repetition.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consumer, (m, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles_ptr, s, gl.constexpr(0))),
                (_producer, (m, q_desc, q_tail_desc, kv_desc, kv_tail_desc, tiles_ptr, num_tiles_ptr, s)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (m, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles_ptr, s, gl.constexpr(0))),
                (consumer, (m, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles_ptr, s, gl.constexpr(1))),
                (_producer, (m, q_desc, q_tail_desc, kv_desc, kv_tail_desc, tiles_ptr, num_tiles_ptr, s)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (m, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles_ptr, s, gl.constexpr(0))),
                (consumer, (m, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles_ptr, s, gl.constexpr(1))),
                (consumer, (m, qkv_ptr, out_ptr, clip_ptr, tiles_ptr, num_tiles_ptr, s, gl.constexpr(2))),
                (_producer, (m, q_desc, q_tail_desc, kv_desc, kv_tail_desc, tiles_ptr, num_tiles_ptr, s)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def _registers(config: HopperAttentionConfig) -> tuple[int, int]:
    """(registers of a thread at launch, of a consumer's thread afterwards): the producer keeps 24."""
    groups = config.consumers + 1
    at_launch = min(255, 65536 // (128 * groups * config.ctas)) // 8 * 8
    return at_launch, (at_launch * groups - 24) // config.consumers // 8 * 8


_checked: set[Loaded] = set()  # compiled kernels whose operands lie where their WGMMAs look for them


def _check(
    qkv: torch.Tensor, segments: Segments, out: torch.Tensor, heads: int, head_dim: int, config: HopperAttentionConfig
) -> None:
    if qkv.dtype not in (torch.bfloat16, torch.float16) or out.dtype != qkv.dtype:
        raise TypeError(f"qkv and out must both be bfloat16 or both float16, got {qkv.dtype} and {out.dtype}")
    if head_dim % 8 or not 16 <= head_dim <= MAX_HEAD:
        raise ValueError(f"head_dim must be a multiple of 8 from 16 to {MAX_HEAD}, got {head_dim}")
    rows, c = qkv.shape[0], heads * head_dim
    if qkv.shape != (rows, 3 * c) or out.shape != (rows, c):
        shapes = f"{tuple(qkv.shape)} and {tuple(out.shape)}"
        raise ValueError(f"qkv and out must be [T, {3 * c}] and [T, {c}] for {heads} heads of {head_dim}, got {shapes}")
    if not (qkv.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"qkv and out must be contiguous, got strides {qkv.stride()} and {out.stride()}")
    if qkv.data_ptr() % 16:
        raise ValueError(f"qkv must begin at a multiple of 16 bytes, got address {qkv.data_ptr():#x}")
    if segments.block_m != config.block_m:
        raise ValueError(f"tiles must be of {config.block_m} queries as the config's, got {segments.block_m}")


def attention(
    qkv: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
    heads: int,
    head_dim: int,
    config: HopperAttentionConfig,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `fusedvit.kernels.attention.attention`; bf16 and fp16, on devices of compute capability 9.0.

    Raises:
        TypeError: another dtype, or two.
        ValueError: a shape, layout or alignment that the TMA unit cannot take, or tiles of another size.
        RuntimeError: this Triton puts the operands elsewhere, so the output of this launch is wrong.
    """
    _check(qkv, segments, out, heads, head_dim, config)
    programs = min(config.max_programs, segments.tiles.shape[0] * heads)
    if programs == 0 or qkv.shape[0] == 0:
        return out
    head, tail = split_head(head_dim, MAX_HEAD)
    at_launch, registers = _registers(config)
    constants = {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "HEAD": head,
        "TAIL": tail,
        **config.constants(heads, head_dim),
        "REGISTERS": registers,
    }
    pointers = (qkv, out, segments.tiles, segments.num_tiles, clip)
    options = {"num_warps": 4, "maxnreg": at_launch, "launch_pdl": config.pdl}
    described = descriptors(qkv, heads, head_dim, config)
    loaded = launch(_hopper_attention_kernel, programs, described, pointers, constants, options)
    if config.operand_bytes(head_dim) and loaded is not None and loaded not in _checked:
        said = misplaced_operands(loaded.ptx(), config.operand_bytes(head_dim))
        if said:
            raise RuntimeError(said)
        _checked.add(loaded)
    return out
