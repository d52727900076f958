"""A consumer warpgroup: ring -> WGMMA -> epilogue, a chunk of 64 columns at a time -> staging -> TMA store."""

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from fusedvit.kernels.hopper.compat import async_store, gl, gluon
from fusedvit.kernels.hopper.linear_epilogue import (
    _chan,
    _finish,
    _keep_vectors,
    _load_vectors,
    _moments,
    _read_moments,
    _rounded,
    _store_moments,
)
from fusedvit.kernels.hopper.linear_parts import VECTOR, _k_range, _owned, _tile_of, _vector_width, _walk, _warpgroups
from fusedvit.kernels.hopper.linear_split import Exchange, _give, _meet, _take
from fusedvit.kernels.hopper.records import reinterpret


@gluon.jit
def _halves(x, BM: gl.constexpr, W: gl.constexpr):
    return x.reshape([BM, 2, W // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _multiply(form, ring, stage, AT: gl.constexpr, acc1, acc2, FIRST: gl.constexpr):
    """Issues one k-step's products; they are still running when it returns."""
    x = ring.x.index(stage * form.CONSUMERS + AT)
    acc1 = warpgroup_mma(x, ring.w1.index(stage).permute((1, 0)), acc1, use_acc=not FIRST, is_async=True)
    if form.BN2 > 0:
        acc2 = warpgroup_mma(x, ring.w2.index(stage).permute((1, 0)), acc2, use_acc=not FIRST, is_async=True)
    return acc1, acc2


@gluon.jit
def _settle(form, acc1, acc2, STEPS: gl.constexpr):
    """Waits until at most STEPS k-steps are running."""
    if form.BN2 > 0:
        acc1, acc2 = warpgroup_mma_wait(2 * STEPS, deps=(acc1, acc2))
    else:
        acc1 = warpgroup_mma_wait(STEPS, deps=(acc1,))
    return acc1, acc2


@gluon.jit
def _begin(form, staging, phase, C: gl.constexpr):
    """Waits for this consumer's turn at the ring."""
    if form.CONSUMERS == 1:
        mbarrier.wait(staging.turn.index(C), phase ^ (1 - C))


@gluon.jit
def _unstage(staging, C: gl.constexpr):
    """Says that the previous tile has left the staging buffers."""
    tma.store_wait(0)
    mbarrier.arrive(staging.empty.index(C), count=1)


@gluon.jit
def _main_loop(form, ring, staging, at, steps, phase, C: gl.constexpr, L1: gl.constexpr, L2: gl.constexpr):
    """The sums of one tile, [BM, BN1] and [BM, BN2]; `at` counts the k-steps that the ring has seen before."""
    AT: gl.constexpr = 0 if form.CONSUMERS == 1 else C
    acc1 = gl.zeros([form.BM, form.BN1], gl.float32, L1)
    acc2 = gl.zeros([form.BM, 64], gl.float32, L2)
    _begin(form, staging, phase, C)
    stage = at % form.STAGES
    mbarrier.wait(ring.full.index(stage), (at // form.STAGES) & 1)
    acc1, acc2 = _multiply(form, ring, stage, AT, acc1, acc2, True)
    acc1, acc2 = _settle(form, acc1, acc2, 1)
    _unstage(staging, C)
    for k in range(1, steps - 1):
        stage = (at + k) % form.STAGES
        mbarrier.wait(ring.full.index(stage), ((at + k) // form.STAGES) & 1)
        acc1, acc2 = _multiply(form, ring, stage, AT, acc1, acc2, False)
        acc1, acc2 = _settle(form, acc1, acc2, 1)
        mbarrier.arrive(ring.empty.index((at + k - 1) % form.STAGES), count=1)
    stage = (at + steps - 1) % form.STAGES
    mbarrier.wait(ring.full.index(stage), ((at + steps - 1) // form.STAGES) & 1)
    acc1, acc2 = _multiply(form, ring, stage, AT, acc1, acc2, False)
    if form.CONSUMERS == 1:  # every stage seen: the tensor cores pass to the other with two steps still in flight
        mbarrier.arrive(staging.turn.index(1 - C), count=1)
    acc1, acc2 = _settle(form, acc1, acc2, 1)
    mbarrier.arrive(ring.empty.index((at + steps - 2) % form.STAGES), count=1)
    acc1, acc2 = _settle(form, acc1, acc2, 0)
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return acc1, acc2


@gluon.jit
def _main_loop_from_registers(
    form, ring, staging, at, steps, C: gl.constexpr, L1: gl.constexpr, L2: gl.constexpr
):  # fmt: skip
    """The same for cooperative consumers with two accumulators, with x read once for both, into registers.

    Each waits for its own products at every step: the others' keep the tensor cores busy meanwhile.
    """
    X1: gl.constexpr = gl.DotOperandLayout(0, L1, 2)
    X2: gl.constexpr = gl.DotOperandLayout(0, L2, 2)
    acc1 = gl.zeros([form.BM, form.BN1], gl.float32, L1)
    acc2 = gl.zeros([form.BM, 64], gl.float32, L2)
    _unstage(staging, C)
    for k in range(0, steps):
        stage = (at + k) % form.STAGES
        mbarrier.wait(ring.full.index(stage), ((at + k) // form.STAGES) & 1)
        x1 = ring.x.index(stage * form.CONSUMERS + C).load(X1)
        x2 = gl.convert_layout(x1, X2, assert_trivial=True)
        acc1 = warpgroup_mma(x1, ring.w1.index(stage).permute((1, 0)), acc1, is_async=True)
        acc2 = warpgroup_mma(x2, ring.w2.index(stage).permute((1, 0)), acc2, is_async=True)
        acc1, acc2, x1, x2 = warpgroup_mma_wait(0, deps=(acc1, acc2, x1, x2))
        mbarrier.arrive(ring.empty.index(stage), count=1)
    return acc1, acc2


@gluon.jit
def _chunks(form, acc1, acc2, L: gl.constexpr):
    """A tile's columns, 64 at a time."""
    if form.BN1 == 256:
        left, right = _halves(acc1, form.BM, 256)
        return _pair(left, form.BM, L) + _pair(right, form.BM, L)
    elif form.BN1 == 128:
        if form.BN2 > 0:
            return _pair(acc1, form.BM, L) + (acc2,)
        else:
            return _pair(acc1, form.BM, L)
    else:
        return (acc1,)


@gluon.jit
def _pair(acc, BM: gl.constexpr, L: gl.constexpr):
    a, b = _halves(acc, BM, 128)
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True)


@gluon.jit
def _next(chunks):
    """The first chunk, and those behind it, one place nearer."""
    return chunks[0], chunks[1:] + (chunks[len(chunks) - 1],)


@gluon.jit
def _staged(tail, staging, phase, C: gl.constexpr):
    """Waits for what the producer brings for a tile's end."""
    if tail.HAS_RESIDUAL or tail.ROPE_COLS > 0:
        mbarrier.wait(staging.full.index(C), phase)


@gluon.jit
def _vectors(form, staging, j, C: gl.constexpr, L: gl.constexpr):
    """(bias, colsum) of chunk j; what the tail has none of is anything."""
    LINES: gl.constexpr = _vector_width(form.BN1 + form.BN2) // 64
    lines = reinterpret(staging.vectors, gl.float32, [2 * _warpgroups(form.CONSUMERS) * LINES, 64], VECTOR)
    return lines.index(2 * C * LINES + j).load(L), lines.index((2 * C + 1) * LINES + j).load(L)


@gluon.jit
def _end_chunk(form, tail, staging, boxes, x, mean, rstd, rows, row0, col0, j, C: gl.constexpr):
    """From chunk j's sums to its way out. Returns the rounded values as fp32."""
    L: gl.constexpr = x.type.layout
    CHUNKS: gl.constexpr = (form.BN1 + form.BN2) // 64
    chunk = staging.chunks.index(C * CHUNKS + j)
    bias, colsum = _vectors(form, staging, j, C, gl.SliceLayout(0, L))
    x = _finish(x, tail, (bias, colsum), mean, rstd, chunk, rows, col0 + j * 64, form.BM, L, boxes.out.dtype)
    y = _rounded(x, boxes.out.dtype) if tail.OUT_WIDTH > 0 else x.to(boxes.out.dtype)
    chunk.store(y)
    fence_async_shared()
    FACTORS: gl.constexpr = 2 if tail.ACT == "swiglu" else 1  # columns of the product to one of the output
    async_store(boxes.out, [row0, (col0 + j * 64) // FACTORS], chunk)
    return y.to(gl.float32)


@gluon.jit
def _end_tile(
    form, tail, staging, boxes, chunks, mean, rstd, row0, col0, phase, C: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Chunk by chunk, by the same code, as every launch of a tower finds instruction caches full of the others'."""
    CHUNKS: gl.constexpr = (form.BN1 + form.BN2) // 64
    rows = row0.to(gl.int64) + gl.arange(0, form.BM, gl.SliceLayout(1, L))
    near = gl.minimum(rows, tail.num_rows - 1)
    out_mean = gl.zeros([form.BM], gl.float32, gl.SliceLayout(1, L))
    out_m2 = out_mean
    _staged(tail, staging, phase, C)
    for j in range(0, gl.minimum(CHUNKS, (form.N - col0 + 63) // 64)):
        x, chunks = _next(chunks)
        y = _end_chunk(form, tail, staging, boxes, x, mean, rstd, near, row0, col0, j, C)
        if tail.OUT_WIDTH > 0:
            chunk_mean, chunk_m2 = _moments(y)
            _, out_mean, out_m2 = _chan(j * 64.0, out_mean, out_m2, 64, chunk_mean, chunk_m2)
    if tail.OUT_WIDTH > 0:
        _store_moments(out_mean, out_m2, tail, rows, rows < tail.num_rows, col0 // tail.OUT_WIDTH)


@gluon.jit
def _select(chunks, j):
    """Chunk j: registers have no index."""
    x = chunks[0]
    for i in gl.static_range(1, len(chunks)):
        x = gl.where(j == i, chunks[i], x)
    return x


@gluon.jit
def _end_shared(
    form, tail, exchange, staging, boxes, x, mean, rstd, row0, col0, j, C: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Ends chunk j, whose other parts other programs have."""
    AT: gl.constexpr = 0 if form.CONSUMERS == 1 else C
    CHUNKS: gl.constexpr = (form.BN1 + form.BN2) // 64
    rows = row0.to(gl.int64) + gl.arange(0, form.BM, gl.SliceLayout(1, L))
    near = gl.minimum(rows, tail.num_rows - 1)
    x = _take(exchange, x, AT * CHUNKS + j, form.BM)
    y = _end_chunk(form, tail, staging, boxes, x, mean, rstd, near, row0, col0, j, C)
    if tail.OUT_WIDTH > 0:
        chunk_mean, chunk_m2 = _moments(y)
        _store_moments(chunk_mean, chunk_m2, tail, rows, rows < tail.num_rows, col0 // 64 + j)


@gluon.jit
def _end_split(
    form, tail, split, staging, boxes, chunks, mean, rstd, row0, col0, C: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Gives away the chunks that other programs end, ends its own."""
    CHUNKS: gl.constexpr = (form.BN1 + form.BN2) // 64
    AT: gl.constexpr = 0 if form.CONSUMERS == 1 else C
    tile = gl.program_id(0) // form.SPLITS
    counter_ptr = split.counters_ptr + tile * form.CONSUMERS + AT
    part = gl.program_id(0) % form.SPLITS
    exchange = Exchange(
        split.partials_ptr, counter_ptr, tile * form.SPLITS, part, form.SPLITS, form.CONSUMERS * CHUNKS
    )  # fmt: skip
    for j in gl.static_range(CHUNKS):
        if not _owned(form, AT * CHUNKS + j):
            _give(exchange, chunks[j], AT * CHUNKS + j, form.BM)
    _meet(exchange)
    _staged(tail, staging, 0, C)
    first = (part + AT * CHUNKS * (form.SPLITS - 1)) % form.SPLITS  # the first of its own
    past = gl.minimum(CHUNKS, (form.N - col0 + 63) // 64)
    for i in gl.static_range(0, CHUNKS, form.SPLITS):  # one of so many; of those before it registers are free
        j = first + i
        if j < past:
            x = _select(chunks[i : i + form.SPLITS], first)
            _end_shared(form, tail, exchange, staging, boxes, x, mean, rstd, row0, col0, j, C, L)


@gluon.jit
def _consumer(form, tail, split, ring, staging, boxes, C: gl.constexpr):
    PING_PONG: gl.constexpr = form.CONSUMERS == 1
    AT: gl.constexpr = 0 if PING_PONG else C
    L1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.BN1, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    num_m, first, step, tiles = _walk(form, tail.num_rows)
    k0, steps = _k_range(form)
    gdc_wait()
    for i in range(C if PING_PONG else 0, tiles, 2 if PING_PONG else 1):
        tile_m, tile_n = _tile_of(form, first + i * step, num_m)
        row0 = (tile_m * form.CONSUMERS + AT) * form.BM
        col0 = tile_n * (form.BN1 + form.BN2)
        mean = gl.zeros([form.BM], gl.float32, gl.SliceLayout(1, L))
        rstd = mean
        if tail.IN_PARTS > 0:  # before the main loop, which hides their latency
            rows = row0.to(gl.int64) + gl.arange(0, form.BM, gl.SliceLayout(1, L))
            mean, rstd = _read_moments(tail, gl.minimum(rows, tail.num_rows - 1), form.BM, gl.SliceLayout(1, L))
        vectors = _load_vectors(tail, col0, _vector_width(form.BN1 + form.BN2))
        phase = (i // 2 if PING_PONG else i) & 1
        if form.X_IN_REGISTERS:
            acc1, acc2 = _main_loop_from_registers(form, ring, staging, i * steps, steps, C, L1, L)
        else:
            acc1, acc2 = _main_loop(form, ring, staging, i * steps, steps, phase, C, L1, L)
        chunks = _chunks(form, acc1, acc2, L)
        _keep_vectors(tail, staging.vectors, 2 * C, vectors)
        if form.SPLITS == 1:
            _end_tile(form, tail, staging, boxes, chunks, mean, rstd, row0, col0, phase, C, L)
        else:
            _end_split(form, tail, split, staging, boxes, chunks, mean, rstd, row0, col0, C, L)
    tma.store_wait(0)
