"""The linear layer on Hopper: a persistent, warp-specialised GEMM in Gluon.

    out = epilogue(x w^T)        x [T, K], w [N, K], out [T, N]; the formula is that of `kernels.linear`

A CTA is a producer warp and two or three consumer warpgroups; it walks over output tiles.

    producer : x and w of a K step -> a multistage pipeline in shared memory (TMA; a `full` and an `empty` barrier a
               stage); residual or packed cos/sin -> the staging buffers
    consumer : pipeline -> WGMMA -> epilogue, a chunk of 64 columns at a time -> staging -> TMA store

Ping-pong (one consumer a tile): tiles alternate between two consumers, and the epilogue of one runs under the main loop
of the other. The barrier `order` lets a consumer begin once the other has issued all products of its tile, so that no
consumer is ever two rounds of the pipeline behind, which a barrier's parity could not tell.
Cooperative (two or three consumers a tile): each has its own rows of x, and they share w.

`python -m tests.emulator.kernels.faults` takes out each wait and arrival of this protocol and shows that it is noticed.
"""

from typing import Any

import torch
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.hopper.gemm_configs import CHUNK, HopperGemmConfig, vector_width, warpgroups
from fusedvit.kernels.hopper.gemm_epilogue import (
    HALF_LINES,
    LINES,
    PACKED,
    VECTOR,
    EpilogueArgs,
    descriptor,
    epilogue_constants,
    extra_descriptor,
    finish_chunk,
    load_vectors,
    merge_moments,
    moments_of,
    read_moments,
    round_pairs,
    steps_of,
    store_moments,
    store_vectors,
    unsupported_operands,
)
from fusedvit.kernels.hopper.gluon_compat import (
    async_load,
    async_store,
    gl,
    gluon,
    record,
    reinterpret,
)
from fusedvit.kernels.launch import launch


@record
class GemmShape:
    """Sizes and schedule of a launch, known when it is compiled but for the first four."""

    steps: gl.tensor  # of 64 in K, see `steps_of`
    STEPS: gl.constexpr
    in_parts: gl.tensor  # of the statistics of a row of x, each of `in_width` channels, `per_length` in IN_LENGTH
    in_width: gl.tensor
    per_length: gl.tensor
    N: gl.constexpr
    BM: gl.constexpr  # rows of one consumer in a tile
    BN1: gl.constexpr  # columns of the first accumulator
    BN2: gl.constexpr  # columns of the second accumulator: 64 or 0
    CONSUMERS: gl.constexpr  # 1: ping-pong
    STAGES: gl.constexpr
    X_IN_REGISTERS: gl.constexpr


@record
class Pipeline:
    """Operands of STAGES steps of K in shared memory."""

    x: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, BM, 64]
    w1: gl.shared_memory_descriptor  # [STAGES, BN1, 64]
    w2: gl.shared_memory_descriptor  # [STAGES, BN2, 64]
    full: gl.shared_memory_descriptor  # [STAGES, 1] barriers: operands have landed
    empty: gl.shared_memory_descriptor  # [STAGES, 1] barriers: every consumer has read them


@record
class Staging:
    """Where a residual or packed cos/sin lands, and where output chunks wait for their TMA store."""

    chunks: gl.shared_memory_descriptor  # [warpgroups * chunks, BM, 64]
    full: gl.shared_memory_descriptor  # a barrier per consumer: the residual or packed cos/sin has landed
    empty: gl.shared_memory_descriptor  # a barrier per consumer: the previous tile's stores have read the buffers
    order: gl.shared_memory_descriptor  # ping-pong: a barrier per consumer, the other has issued its tile's products
    vectors: gl.shared_memory_descriptor  # [2 * warpgroups, columns] fp32: a tile's bias and column sums


@record
class Descriptors:
    x: tma.tensor_descriptor  # [T, K]
    w1: tma.tensor_descriptor  # [N, K], BN1 rows at a time
    w2: tma.tensor_descriptor  # [N, K], BN2 rows at a time
    out: tma.tensor_descriptor  # [T, N]
    extra: tma.tensor_descriptor  # residual [T, N] or packed cos/sin [T, W]


_vector_width = gluon.constexpr_function(vector_width)
_warpgroups = gluon.constexpr_function(warpgroups)
GROUP_M = gl.constexpr(8)  # tile rows that are walked together; with 4 or 16 towers take as long within 1 %


@gluon.jit
def _schedule(shape, num_rows):
    """(tile rows, first tile of this program, stride and count of its tiles)."""
    num_m = (num_rows + shape.BM * shape.CONSUMERS - 1) // (shape.BM * shape.CONSUMERS)
    NUM_N: gl.constexpr = (shape.N + shape.BN1 + shape.BN2 - 1) // (shape.BN1 + shape.BN2)
    first, step = gl.program_id(0), gl.num_programs(0)
    return num_m, first, step, (num_m * NUM_N - first + step - 1) // step


@gluon.jit
def _tile_coords(shape, t, num_m):
    """Tile index -> (tile row, tile column). GROUP_M tile rows are walked together, so that weights stay in L2."""
    NUM_N: gl.constexpr = (shape.N + shape.BN1 + shape.BN2 - 1) // (shape.BN1 + shape.BN2)
    group = t // (GROUP_M * NUM_N)
    size = gl.minimum(num_m - group * GROUP_M, GROUP_M)
    inside = t - group * (GROUP_M * NUM_N)
    return group * GROUP_M + inside % size, inside // size


@gluon.jit
def _needs_extra(shape, epi, col0):
    """Whether the epilogue of the chunk at `col0` reads a residual or packed cos/sin."""
    LIMIT: gl.constexpr = shape.N if epi.HAS_RESIDUAL else epi.ROPE_COLS
    return col0 < LIMIT


@gluon.jit
def _load_extra(shape, epi, descs, staging, C: gl.constexpr, PART: gl.constexpr, row0, col0, phase):
    """Residual or packed cos/sin into the staging buffers of consumer C, which has part PART of the tile's rows."""
    CHUNKS: gl.constexpr = (shape.BN1 + shape.BN2) // 64
    PAIRS: gl.constexpr = epi.HEAD_DIM // 2
    full = staging.full.index(C)
    mbarrier.wait(staging.empty.index(C), phase)
    count = 0
    for j in gl.static_range(CHUNKS):
        count += _needs_extra(shape, epi, col0 + j * 64).to(gl.int32)
    for j in gl.static_range(CHUNKS + 1):  # also for none, so that the barrier's phase ends with every tile
        mbarrier.expect(full, shape.BM * j * 128, pred=count == j)
    for j in gl.static_range(CHUNKS):
        chunk = staging.chunks.index(C * CHUNKS + j)
        wanted = _needs_extra(shape, epi, col0 + j * 64)
        row = row0 + PART * shape.BM
        if epi.HAS_RESIDUAL:
            async_load(descs.extra, [row, col0 + j * 64], full, chunk, pred=wanted)
        else:
            packed = reinterpret(chunk, gl.int32, [shape.BM, 32], PACKED)
            async_load(descs.extra, [row, (col0 + j * 64) // 2 % PAIRS], full, packed, pred=wanted)


@gluon.jit
def _load_step(shape, pipe, descs, stage, row0, col0, k, X: gl.constexpr, W: gl.constexpr):
    """Operands of a step of K into a stage: weights if W, rows of x if X. With W the barrier begins to expect both."""
    full = pipe.full.index(stage)
    if W:
        mbarrier.expect(full, (shape.BM * shape.CONSUMERS + shape.BN1 + shape.BN2) * 128)
        async_load(descs.w1, [col0, k * 64], full, pipe.w1.index(stage))
        if shape.BN2 > 0:
            async_load(descs.w2, [col0 + shape.BN1, k * 64], full, pipe.w2.index(stage))
    if X:
        for c in gl.static_range(shape.CONSUMERS):
            async_load(descs.x, [row0 + c * shape.BM, k * 64], full, pipe.x.index(stage * shape.CONSUMERS + c))


@gluon.jit
def _producer(shape, epi, pipe, staging, descs):
    ahead = gl.minimum(steps_of(shape), shape.STAGES)
    num_m, first, step, tiles = _schedule(shape, epi.num_rows)
    tile_m, tile_n = _tile_coords(shape, first, num_m)  # outside the output where there are no tiles: never loaded
    row0 = tile_m * (shape.BM * shape.CONSUMERS)
    col0 = tile_n * (shape.BN1 + shape.BN2)
    if tiles > 0:  # weights of the first stages, while the previous launch still writes x (PDL)
        for k in range(0, ahead):
            _load_step(shape, pipe, descs, k, 0, col0, k, False, True)
    gdc_wait()
    if tiles > 0:  # nothing can begin before x has landed
        for k in range(0, ahead):
            _load_step(shape, pipe, descs, k, row0, 0, k, True, False)
    for i in range(0, tiles):
        tile_m, tile_n = _tile_coords(shape, first + i * step, num_m)
        row0 = tile_m * (shape.BM * shape.CONSUMERS)
        col0 = tile_n * (shape.BN1 + shape.BN2)
        for k in range(0, steps_of(shape)):
            at = i * steps_of(shape) + k
            stage = at % shape.STAGES
            if at >= ahead:
                mbarrier.wait(pipe.empty.index(stage), ((at // shape.STAGES) & 1) ^ 1)
                _load_step(shape, pipe, descs, stage, row0, col0, k, True, True)
            if epi.HAS_RESIDUAL or epi.ROPE_COLS > 0:
                # By this step the consumer has begun, and the staging buffers are about free.
                if k == gl.minimum(steps_of(shape) - 1, shape.STAGES):
                    if shape.CONSUMERS > 1:
                        for c in gl.static_range(shape.CONSUMERS):
                            _load_extra(shape, epi, descs, staging, c, c, row0, col0, i & 1)
                    elif i % 2 == 0:
                        _load_extra(shape, epi, descs, staging, 0, 0, row0, col0, (i // 2) & 1)
                    else:
                        _load_extra(shape, epi, descs, staging, 1, 0, row0, col0, (i // 2) & 1)


@gluon.jit
def _halves(x, BM: gl.constexpr, W: gl.constexpr):
    return x.reshape([BM, 2, W // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _issue_mma(shape, pipe, stage, PART: gl.constexpr, acc1, acc2, FIRST: gl.constexpr):
    """Issues the products of one step of K; they are still running when it returns."""
    x = pipe.x.index(stage * shape.CONSUMERS + PART)
    acc1 = warpgroup_mma(x, pipe.w1.index(stage).permute((1, 0)), acc1, use_acc=not FIRST, is_async=True)
    if shape.BN2 > 0:
        acc2 = warpgroup_mma(x, pipe.w2.index(stage).permute((1, 0)), acc2, use_acc=not FIRST, is_async=True)
    return acc1, acc2


@gluon.jit
def _wait_mma(shape, acc1, acc2, STEPS: gl.constexpr):
    """Waits until the products of at most STEPS steps are running."""
    if shape.BN2 > 0:
        acc1, acc2 = warpgroup_mma_wait(2 * STEPS, deps=(acc1, acc2))
    else:
        acc1 = warpgroup_mma_wait(STEPS, deps=(acc1,))
    return acc1, acc2


@gluon.jit
def _await_order(shape, staging, phase, C: gl.constexpr):
    """Ping-pong: waits until the other consumer has issued all products of its tile."""
    if shape.CONSUMERS == 1:
        mbarrier.wait(staging.order.index(C), phase ^ (1 - C))


@gluon.jit
def _release_staging(staging, C: gl.constexpr):
    """Frees the staging buffers once the previous tile's stores have read them."""
    tma.store_wait(0)
    mbarrier.arrive(staging.empty.index(C), count=1)


@gluon.jit
def _main_loop(shape, pipe, staging, at, phase, C: gl.constexpr, L1: gl.constexpr, L2: gl.constexpr):
    """The sums of one tile, [BM, BN1] and [BM, BN2]; `at` counts the steps that went through the pipeline before."""
    PART: gl.constexpr = 0 if shape.CONSUMERS == 1 else C
    acc1 = gl.zeros([shape.BM, shape.BN1], gl.float32, L1)
    acc2 = gl.zeros([shape.BM, 64], gl.float32, L2)
    _await_order(shape, staging, phase, C)
    stage = at % shape.STAGES
    mbarrier.wait(pipe.full.index(stage), (at // shape.STAGES) & 1)
    acc1, acc2 = _issue_mma(shape, pipe, stage, PART, acc1, acc2, True)
    acc1, acc2 = _wait_mma(shape, acc1, acc2, 1)
    _release_staging(staging, C)
    for k in range(1, steps_of(shape) - 1):
        stage = (at + k) % shape.STAGES
        mbarrier.wait(pipe.full.index(stage), ((at + k) // shape.STAGES) & 1)
        acc1, acc2 = _issue_mma(shape, pipe, stage, PART, acc1, acc2, False)
        acc1, acc2 = _wait_mma(shape, acc1, acc2, 1)
        mbarrier.arrive(pipe.empty.index((at + k - 1) % shape.STAGES), count=1)
    stage = (at + steps_of(shape) - 1) % shape.STAGES
    mbarrier.wait(pipe.full.index(stage), ((at + steps_of(shape) - 1) // shape.STAGES) & 1)
    acc1, acc2 = _issue_mma(shape, pipe, stage, PART, acc1, acc2, False)
    if shape.CONSUMERS == 1:  # the other's products queue behind the two steps in flight
        mbarrier.arrive(staging.order.index(1 - C), count=1)
    acc1, acc2 = _wait_mma(shape, acc1, acc2, 1)
    mbarrier.arrive(pipe.empty.index((at + steps_of(shape) - 2) % shape.STAGES), count=1)
    acc1, acc2 = _wait_mma(shape, acc1, acc2, 0)
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    return acc1, acc2


@gluon.jit
def _main_loop_from_registers(
    shape, pipe, staging, at, C: gl.constexpr, L1: gl.constexpr, L2: gl.constexpr
):  # fmt: skip
    """`_main_loop` for cooperative consumers with two accumulators: x is read once for both, into registers.

    A consumer waits for its own products at every step; the others keep the tensor cores busy meanwhile.
    """
    X1: gl.constexpr = gl.DotOperandLayout(0, L1, 2)
    X2: gl.constexpr = gl.DotOperandLayout(0, L2, 2)
    acc1 = gl.zeros([shape.BM, shape.BN1], gl.float32, L1)
    acc2 = gl.zeros([shape.BM, 64], gl.float32, L2)
    _release_staging(staging, C)
    for k in range(0, steps_of(shape)):
        stage = (at + k) % shape.STAGES
        mbarrier.wait(pipe.full.index(stage), ((at + k) // shape.STAGES) & 1)
        x1 = pipe.x.index(stage * shape.CONSUMERS + C).load(X1)
        x2 = gl.convert_layout(x1, X2, assert_trivial=True)
        acc1 = warpgroup_mma(x1, pipe.w1.index(stage).permute((1, 0)), acc1, is_async=True)
        acc2 = warpgroup_mma(x2, pipe.w2.index(stage).permute((1, 0)), acc2, is_async=True)
        acc1, acc2, x1, x2 = warpgroup_mma_wait(0, deps=(acc1, acc2, x1, x2))
        mbarrier.arrive(pipe.empty.index(stage), count=1)
    return acc1, acc2


@gluon.jit
def _chunks(shape, acc1, acc2, L: gl.constexpr):
    """Accumulators as a tuple of chunks of 64 columns."""
    if shape.BN1 == 256:
        left, right = _halves(acc1, shape.BM, 256)
        return _pair(left, shape.BM, L) + _pair(right, shape.BM, L)
    elif shape.BN1 == 128:
        if shape.BN2 > 0:
            return _pair(acc1, shape.BM, L) + (acc2,)
        else:
            return _pair(acc1, shape.BM, L)
    else:
        return (acc1,)


@gluon.jit
def _pair(acc, BM: gl.constexpr, L: gl.constexpr):
    a, b = _halves(acc, BM, 128)
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True)


@gluon.jit
def _next(chunks):
    """The first chunk, and the others moved up by one."""
    return chunks[0], chunks[1:] + (chunks[len(chunks) - 1],)


@gluon.jit
def _await_extra(epi, staging, phase, C: gl.constexpr):
    """Waits for the residual or packed cos/sin."""
    if epi.HAS_RESIDUAL or epi.ROPE_COLS > 0:
        mbarrier.wait(staging.full.index(C), phase)


@gluon.jit
def _chunk_vectors(shape, staging, j, C: gl.constexpr, L: gl.constexpr):
    """(bias, colsum) of chunk j; undefined where the epilogue has none."""
    LINES: gl.constexpr = _vector_width(shape.BN1 + shape.BN2) // 64
    lines = reinterpret(staging.vectors, gl.float32, [2 * _warpgroups(shape.CONSUMERS) * LINES, 64], VECTOR)
    return lines.index(2 * C * LINES + j).load(L), lines.index((2 * C + 1) * LINES + j).load(L)


@gluon.jit
def _finish_chunk_at(shape, epi, staging, descs, x, mean, rstd, rows, row0, col0, j, C: gl.constexpr):
    """Epilogue and store of chunk j. Returns the rounded values as fp32."""
    L: gl.constexpr = x.type.layout
    CHUNKS: gl.constexpr = (shape.BN1 + shape.BN2) // 64
    chunk = staging.chunks.index(C * CHUNKS + j)
    bias, colsum = _chunk_vectors(shape, staging, j, C, gl.SliceLayout(0, L))
    x = finish_chunk(x, epi, (bias, colsum), mean, rstd, chunk, rows, col0 + j * 64, shape.BM, L, descs.out.dtype)
    y = round_pairs(x, descs.out.dtype) if epi.OUT_WIDTH > 0 else x.to(descs.out.dtype)
    chunk.store(y)
    fence_async_shared()
    GATED: gl.constexpr = epi.ACT == "swiglu" or epi.ACT == "geglu_tanh"
    FACTORS: gl.constexpr = 2 if GATED else 1  # columns of the product to one of the output
    async_store(descs.out, [row0, (col0 + j * 64) // FACTORS], chunk)
    return y.to(gl.float32)


@gluon.jit
def _finish_tile(
    shape, epi, staging, descs, chunks, mean, rstd, row0, col0, phase, C: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Epilogue of a tile, chunk by chunk. A loop keeps the code short: a launch begins with cold instruction caches."""
    CHUNKS: gl.constexpr = (shape.BN1 + shape.BN2) // 64
    rows = row0.to(gl.int64) + gl.arange(0, shape.BM, gl.SliceLayout(1, L))
    near = gl.minimum(rows, epi.num_rows - 1)
    out_mean = gl.zeros([shape.BM], gl.float32, gl.SliceLayout(1, L))
    out_m2 = out_mean
    _await_extra(epi, staging, phase, C)
    for j in range(0, gl.minimum(CHUNKS, (shape.N - col0 + 63) // 64)):
        x, chunks = _next(chunks)
        y = _finish_chunk_at(shape, epi, staging, descs, x, mean, rstd, near, row0, col0, j, C)
        if epi.OUT_WIDTH > 0:
            chunk_mean, chunk_m2 = moments_of(y)
            if epi.OUT_WIDTH == 64:
                store_moments(chunk_mean, chunk_m2, epi, rows, rows < epi.num_rows, col0 // 64 + j)
            else:
                _, out_mean, out_m2 = merge_moments(j * 64.0, out_mean, out_m2, 64, chunk_mean, chunk_m2)
    if epi.OUT_WIDTH > 64:
        store_moments(out_mean, out_m2, epi, rows, rows < epi.num_rows, col0 // epi.OUT_WIDTH)


@gluon.jit
def _consumer(shape, epi, pipe, staging, descs, C: gl.constexpr):
    PING_PONG: gl.constexpr = shape.CONSUMERS == 1
    PART: gl.constexpr = 0 if PING_PONG else C
    L1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.BN1, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    num_m, first, step, tiles = _schedule(shape, epi.num_rows)
    gdc_wait()
    for i in range(C if PING_PONG else 0, tiles, 2 if PING_PONG else 1):
        tile_m, tile_n = _tile_coords(shape, first + i * step, num_m)
        row0 = (tile_m * shape.CONSUMERS + PART) * shape.BM
        col0 = tile_n * (shape.BN1 + shape.BN2)
        mean = gl.zeros([shape.BM], gl.float32, gl.SliceLayout(1, L))
        rstd = mean
        if epi.IN_PARTS > 0:  # before the main loop, which hides their latency
            rows = row0.to(gl.int64) + gl.arange(0, shape.BM, gl.SliceLayout(1, L))
            mean, rstd = read_moments(epi, shape, gl.minimum(rows, epi.num_rows - 1), shape.BM, gl.SliceLayout(1, L))
        vectors = load_vectors(epi, col0, _vector_width(shape.BN1 + shape.BN2))
        phase = (i // 2 if PING_PONG else i) & 1
        if shape.X_IN_REGISTERS:
            acc1, acc2 = _main_loop_from_registers(shape, pipe, staging, i * steps_of(shape), C, L1, L)
        else:
            acc1, acc2 = _main_loop(shape, pipe, staging, i * steps_of(shape), phase, C, L1, L)
        chunks = _chunks(shape, acc1, acc2, L)
        store_vectors(epi, staging.vectors, 2 * C, vectors)
        _finish_tile(shape, epi, staging, descs, chunks, mean, rstd, row0, col0, phase, C, L)
    tma.store_wait(0)


@gluon.jit
def _consumer_0(shape, epi, pipe, staging, descs):
    _consumer(shape, epi, pipe, staging, descs, 0)


@gluon.jit
def _consumer_1(shape, epi, pipe, staging, descs):
    _consumer(shape, epi, pipe, staging, descs, 1)


@gluon.jit
def _consumer_2(shape, epi, pipe, staging, descs):
    _consumer(shape, epi, pipe, staging, descs, 2)


@gluon.jit(do_not_specialize=["steps", "in_parts", "in_width", "per_length"])
def _hopper_gemm_kernel(
    x_desc,  # [T, K]
    w1_desc,  # [N, K]
    w2_desc,  # [N, K]
    out_desc,  # [T, N]; of gated activations [T, N / 2]
    extra_desc,  # residual [T, N] or packed cos/sin [T, W]; any descriptor if neither
    bias_ptr,
    colsum_ptr,
    stats_in_ptr,
    table_ptr,
    tap_index_ptr,
    tap_weight_ptr,
    stats_out_ptr,
    clip_ptr,
    num_rows_ptr,  # [1] int32: the true T
    steps,  # see `GemmShape`, as the next three
    in_parts,
    in_width,
    per_length,
    STEPS: gl.constexpr,
    N: gl.constexpr,
    EPS: gl.constexpr,
    IN_PARTS: gl.constexpr,
    IN_WIDTH: gl.constexpr,
    IN_LENGTH: gl.constexpr,
    ROPE_COLS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_PARTS: gl.constexpr,
    TAPS: gl.constexpr,
    ACT: gl.constexpr,
    LIMIT: gl.constexpr,
    CENTRED: gl.constexpr,
    HAS_CLIP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    OUT_WIDTH: gl.constexpr,
    BM: gl.constexpr,
    BN1: gl.constexpr,
    BN2: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    X_IN_REGISTERS: gl.constexpr,
):
    num_rows = gl.load(num_rows_ptr)  # first: which tiles there are depends on it
    WARPGROUPS: gl.constexpr = _warpgroups(CONSUMERS)
    CHUNKS: gl.constexpr = (BN1 + BN2) // 64
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = x_desc.dtype
    x = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, BM, 64], x_desc.layout)
    w1 = gl.allocate_shared_memory(dtype, [STAGES, BN1, 64], w1_desc.layout)
    w2 = w1
    if BN2 > 0:
        w2 = gl.allocate_shared_memory(dtype, [STAGES, BN2, 64], w2_desc.layout)
    OUT_COLS: gl.constexpr = 32 if ACT == "swiglu" or ACT == "geglu_tanh" else 64  # of a chunk of 64
    chunks = gl.allocate_shared_memory(dtype, [WARPGROUPS * CHUNKS, BM, OUT_COLS], out_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [2 * WARPGROUPS, _vector_width(BN1 + BN2)], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    staged = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    unstaged = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    # Interleaved: between two inits of one array Triton puts a barrier of the whole CTA. A barrier that nobody waits at
    # must not be initialised: see `codegen_checks.overwritten_barriers`.
    for i in gl.static_range(STAGES if STAGES > WARPGROUPS else WARPGROUPS):
        if i < STAGES:
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        if i < WARPGROUPS:
            mbarrier.init(unstaged.index(i), count=1)
        if i < WARPGROUPS and (HAS_RESIDUAL or ROPE_COLS > 0):
            mbarrier.init(staged.index(i), count=1)
        if i < 2 and CONSUMERS == 1:
            mbarrier.init(order.index(i), count=1)
    gdc_launch_dependents()

    shape = GemmShape(steps, STEPS, in_parts, in_width, per_length, N, BM, BN1, BN2, CONSUMERS, STAGES, X_IN_REGISTERS)
    epi = EpilogueArgs(
        bias_ptr, colsum_ptr, stats_in_ptr, table_ptr, tap_index_ptr, tap_weight_ptr, stats_out_ptr, clip_ptr,
        num_rows, N, EPS, IN_PARTS, CENTRED, IN_WIDTH, IN_LENGTH, ROPE_COLS, HEAD_DIM, HEAD_PARTS, TAPS, ACT, LIMIT,
        HAS_CLIP, HAS_BIAS, HAS_RESIDUAL, OUT_WIDTH,
    )  # fmt: skip
    pipe = Pipeline(x, w1, w2, full, empty)
    staging = Staging(chunks, staged, unstaged, order, vectors)
    descs = Descriptors(x_desc, w1_desc, w2_desc, out_desc, extra_desc)
    args = (shape, epi, pipe, staging, descs)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [(_consumer_0, args), (_consumer_1, args), (_consumer_2, args), (_producer, args)],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize([(_consumer_0, args), (_consumer_1, args), (_producer, args)], [4, 1], [232, 40])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    config: HopperGemmConfig,
) -> torch.Tensor:
    """See `kernels.linear.linear`.

    Raises:
        ValueError: what `unsupported` says, before any launch.
    """
    (rows, k), n = x.shape, weight.shape[0]
    e = epilogue
    reason = unsupported(e, x, n, config)
    if reason:
        raise ValueError(f"the hopper GEMM takes {reason}")
    wide = n // 2 if e.gated else n
    assert weight.shape[1] == k and out.shape == (rows, wide), f"x {x.shape}, weight {weight.shape}, out {out.shape}"
    tiles = config.tiles(rows, n)
    if tiles == 0:
        return out
    bias, colsum, moments = e.vectors()
    columns = bias, colsum if e.heads is None else e.heads.weight, moments
    pointers = *columns, *e.tap_tensors(), e.moments_out(), e.bounds
    in_parts = {"IN_PARTS": int(e.norm is not None), "IN_WIDTH": 1}  # their numbers are arguments at run time
    launch(
        _hopper_gemm_kernel,
        min(tiles, config.max_programs),
        _descriptors(x, weight, out, e, config),
        tuple(num_rows if p is None else p for p in pointers) + (num_rows,),
        epilogue_constants(n, k, e, e.residual is not None) | in_parts | config.constants(),
        config.options(),
        (-(-k // CHUNK), *_parts_of(e)),
    )
    return out


def _parts_of(e: Epilogue) -> tuple[int, int, int]:
    """Parts of the input's statistics, channels of each, and parts of so many channels as one row had that wrote
    them."""
    stats = None if e.norm is None else e.norm.stats
    return (0, 1, 1) if stats is None else (stats.parts, stats.width, -(-stats.length // stats.width))


def unsupported(e: Epilogue, x: torch.Tensor, n: int, config: HopperGemmConfig) -> str:
    """Why this backend cannot run the product and its epilogue, or ""."""
    steps = -(-x.shape[1] // CHUNK)
    if e.gated and (n % 16 or e.rope is not None or e.taps is not None):
        return f"gated activations of whole 16s of columns, without rotary factors or taps, got {n}"
    if e.heads is not None and n % (3 * CHUNK):
        return f"whole heads of {CHUNK} columns, got {n}"
    if steps < 2:
        return f"at least two steps of {CHUNK} in K, got {steps}"
    if e.stats is not None and (e.stats.width not in (config.block_n, CHUNK) or n % CHUNK):
        return f"statistics of whole {CHUNK}s in parts of {config.block_n}, got {n} in parts of {e.stats.width}"
    return unsupported_operands(e, x)


def _descriptors(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, e: Epilogue, config: HopperGemmConfig
) -> tuple[Any, ...]:
    wide, narrow = config.accumulators
    rows, tile = config.rows, config.block_m
    out_desc = descriptor(out, rows, HALF_LINES if e.gated else LINES)
    return (
        descriptor(x, rows, tile=tile),
        descriptor(weight, wide, tile=config.cols),
        descriptor(weight, narrow or wide, tile=config.cols),
        out_desc,
        extra_descriptor(e, rows, tile) or out_desc,
    )
