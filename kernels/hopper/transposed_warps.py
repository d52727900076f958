"""The warps of `kernels.hopper.transposed`: the producer, and a consumer's way from its first step to its output."""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from fusedvit.kernels.hopper.compat import async_load, gl, gluon
from fusedvit.kernels.hopper.records import reinterpret
from fusedvit.kernels.hopper.transposed_parts import (
    PAIRED,
    _multiply,
    _next_stage,
    _place,
    _rows,
    _settle,
    _weights,
    chunks_of,
    rows_of,
)
from fusedvit.kernels.hopper.transposed_tail import (
    LINES,
    WORDS,
    _ask_moments,
    _await_moments,
    _end_chunk,
    _features,
    _keep_moments,
    _load_vectors,
)


@gluon.jit
def _load_weights(tile, ring, boxes, stage, col0, k, dtype: gl.constexpr):
    """A step's weights; its barrier expects x with them."""
    full = ring.full.index(stage)
    mbarrier.expect(full, (64 * tile.CONSUMERS + tile.ROWS) * 128)
    for c in gl.static_range(tile.CONSUMERS):
        unit = reinterpret(_weights(ring, tile, stage, c), dtype, [4, 2, 8, 64], PAIRED)
        col = _inside(col0, 64 * c, tile.N)
        async_load(boxes.w, [col // 16, 0, 0, k * 64], full, unit)


@gluon.jit
def _inside(first, behind: gl.constexpr, end):
    """Where a box begins that lies `behind` a tile's first; there itself where it would lie past the end, as such boxes
    take longer."""
    return gl.where(first + behind < end, first + behind, first)


@gluon.jit
def _load_rows(tile, tail, ring, boxes, stage, row0, k, dtype: gl.constexpr):
    """A step's rows of x."""
    full = ring.full.index(stage)
    for h in gl.static_range(chunks_of(tile.ROWS)):
        unit = _rows(ring, tile, stage, h)
        if rows_of(tile.ROWS, h) == 64:
            async_load(boxes.wide, [_inside(row0, 64 * h, tail.num_rows), k * 64], full, unit)
        else:
            lines = reinterpret(unit, dtype, [64 // tile.BOX, tile.BOX, 64], LINES)
            for i in gl.static_range(rows_of(tile.ROWS, h) // tile.BOX):
                row = _inside(row0, 64 * h + i * tile.BOX, tail.num_rows)
                async_load(boxes.x, [row, k * 64], full, lines.index(i))


@gluon.jit
def _bring(tile, tail, ring, boxes, stage, row0, col0, H: gl.constexpr, dtype: gl.constexpr):
    """Residual or rotary words of chunk H, where each consumer's weights were."""
    PAIRS: gl.constexpr = tail.HEAD_DIM // 2
    HERE: gl.constexpr = rows_of(tile.ROWS, H)
    full = ring.full.index(stage)
    mbarrier.expect(full, tile.CONSUMERS * HERE * 128)
    for c in gl.static_range(tile.CONSUMERS):
        unit, col = _weights(ring, tile, stage, c), col0 + 64 * c
        for i in gl.static_range(HERE // tile.BOX):
            row = _inside(row0, 64 * H + i * tile.BOX, tail.num_rows)
            if tail.HAS_RESIDUAL:
                lines = reinterpret(unit, dtype, [64 // tile.BOX, tile.BOX, 64], LINES)
                async_load(boxes.extra, [row, col], full, lines.index(i))
            else:
                words = reinterpret(unit, gl.int32, [64 // tile.BOX, tile.BOX, 32], WORDS)
                async_load(boxes.extra, [row, col // 2 % PAIRS], full, words.index(i))


@gluon.jit
def _producer(tile, tail, ring, boxes):
    STEPS: gl.constexpr = (tile.K + 63) // 64
    CHUNKS: gl.constexpr = chunks_of(tile.ROWS)
    dtype: gl.constexpr = ring.units.dtype
    row0, col0 = _place(tile, tail.num_rows)
    # As many as there are stages, which the compiler does not know: one code for all of them.
    ahead = gl.minimum(tail.num_rows * tile.STAGES, tile.STAGES)
    if col0 < tile.N:
        for k in range(0, ahead):  # while the previous launch is still busy with x
            _load_weights(tile, ring, boxes, k, col0, k, dtype)
        gdc_wait()
        for k in range(0, ahead):
            _load_rows(tile, tail, ring, boxes, k, row0, k, dtype)
        stage, phase = ahead - tile.STAGES, ahead - tile.STAGES
        for k in range(ahead, STEPS):
            mbarrier.wait(ring.empty.index(stage), phase)
            _load_weights(tile, ring, boxes, stage, col0, k, dtype)
            _load_rows(tile, tail, ring, boxes, stage, row0, k, dtype)
            stage, phase = _next_stage(tile, stage, phase)
        if tile.BRINGS:
            for h in gl.static_range(CHUNKS):
                mbarrier.wait(ring.empty.index(stage), phase)
                _bring(tile, tail, ring, boxes, stage, row0, col0, h, dtype)
                stage, phase = _next_stage(tile, stage, phase)


@gluon.jit
def _zeros(tile):
    """A consumer's sums, [64, WIDTH] a chunk."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile.WIDTH, 16])
    sums = ()
    for _ in gl.static_range(chunks_of(tile.ROWS)):
        sums = sums + (gl.zeros([64, tile.WIDTH], gl.float32, L),)
    return sums


@gluon.jit
def _main_loop(tile, tail, ring, parts, C: gl.constexpr):
    """(sums, the stage behind the last step, its round's parity); moments are merged under the first step's products,
    where registers allow it."""
    STEPS: gl.constexpr = (tile.K + 63) // 64
    UNDER: gl.constexpr = chunks_of(tile.ROWS) < 3
    dtype: gl.constexpr = ring.units.dtype
    if not UNDER:
        _keep_moments(tile, tail, ring, C, parts)
    before = gl.minimum(tail.num_rows, 0)  # 0, unknown to the compiler
    stage, phase = _next_stage(tile, before, before)
    mbarrier.wait(ring.full.index(0), 0)
    sums = _multiply(tile, _zeros(tile), before, C, dtype)
    if UNDER:
        _keep_moments(tile, tail, ring, C, parts)
    for _ in range(1, STEPS):
        mbarrier.wait(ring.full.index(stage), phase)
        sums = _multiply(tile, sums, stage, C, dtype)
        sums = _settle(tile, sums, 1)
        mbarrier.arrive(ring.empty.index(before), count=1)
        before = stage
        stage, phase = _next_stage(tile, stage, phase)
    sums = _settle(tile, sums, 0)
    mbarrier.arrive(ring.empty.index(before), count=1)
    return sums, stage, phase


@gluon.jit
def _consumer(tile, tail, ring, boxes, C: gl.constexpr):
    row0, tile_col0 = _place(tile, tail.num_rows)
    col0 = tile_col0 + 64 * C
    even, _ = _features(_zeros(tile)[0], tile.WIDTH)
    vectors = _load_vectors(tail, col0, gl.SliceLayout(1, even.type.layout))
    gdc_wait()
    if tile_col0 < tile.N:
        parts = _ask_moments(tile, tail, row0, C)
        sums, stage, phase = _main_loop(tile, tail, ring, parts, C)
        _await_moments(tail, ring)
        for h in gl.static_range(chunks_of(tile.ROWS)):
            if tile.BRINGS:
                mbarrier.wait(ring.full.index(stage), phase)
            if col0 < tile.N:
                unit = _weights(ring, tile, stage, C)
                _end_chunk(tile, tail, ring, unit, boxes, vectors, sums[h], row0, col0, h)
            stage, phase = _next_stage(tile, stage, phase)
        tma.store_wait(0)
