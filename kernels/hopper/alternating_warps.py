"""The warps of `kernels.hopper.alternating`: the producer, and a consumer's way from one of its tiles to the next."""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from fusedvit.kernels.hopper.alternating_configs import COLS, HALVES
from fusedvit.kernels.hopper.gemm import GemmShape, _tile_of, _walk
from fusedvit.kernels.hopper.gemm_epilogue import _chan
from fusedvit.kernels.hopper.gemm_swap_ab import (
    LINES,
    ROOM,
    Ring,
    Tile,
    _ask_moments,
    _bring,
    _end_chunk,
    _features,
    _load_rows,
    _load_vectors,
    _load_weights,
    _merge_parts,
    _multiply,
    _next_stage,
    _places,
    _settle,
    _weights,
    _zeros,
    chunks_of,
    share_of,
)
from fusedvit.kernels.hopper.gluon_compat import barrier, gl, gluon, record, reinterpret

GROUP = gl.constexpr(8)  # tile rows that are walked together, so that weights stay in L2
WIDE = gl.constexpr(COLS)
PAIR = gl.constexpr(HALVES)


@record
class Turns:
    """What each consumer has for itself."""

    out: Ring  # a stage a consumer, of both halves of a chunk on their way in or out; `full`: what is brought is there
    moments: gl.shared_memory_descriptor  # [2, 16, 64]
    turn: gl.shared_memory_descriptor  # the other has asked for all of its tile's products


@gluon.jit
def _grid(tile):
    """What `linear`'s walk goes by: tiles of a consumer each, WIDE columns, not split."""
    return GemmShape(tile.N, tile.K, tile.ROWS, WIDE, 0, 1, tile.STAGES, 1, GROUP, False)


@gluon.jit
def _place(tile, t, num_m):
    """(first row, first column) of tile t."""
    tile_m, tile_n = _tile_of(_grid(tile), t, num_m)
    return tile_m * tile.ROWS, tile_n * WIDE


@gluon.jit
def _producer(tile, tail, ring, turns, boxes):
    STEPS: gl.constexpr = (tile.K + 63) // 64
    dtype: gl.constexpr = ring.units.dtype
    num_m, first, step, tiles = _walk(_grid(tile), tail.num_rows)
    # As many as there are stages, which the compiler does not know: one code for all of them.
    ahead = gl.minimum(tail.num_rows * tile.STAGES, tile.STAGES)
    if tiles > 0:
        row0, col0 = _place(tile, first, num_m)
        for k in range(0, ahead):  # while the previous launch is still busy with x
            _load_weights(tile, ring, boxes, k, col0, k, dtype)
        gdc_wait()
        for k in range(0, ahead):
            _load_rows(tile, tail, ring, boxes, k, row0, k, dtype)
        none = ahead - tile.STAGES
        stage, phase, k, i = none, none, ahead, none
        for _ in range(ahead, tiles * STEPS):
            if k == STEPS:
                k, i = none, i + 1
                row0, col0 = _place(tile, first + i * step, num_m)
            mbarrier.wait(ring.empty.index(stage), phase)
            _load_weights(tile, ring, boxes, stage, col0, k, dtype)
            _load_rows(tile, tail, ring, boxes, stage, row0, k, dtype)
            stage, phase = _next_stage(tile, stage, phase)
            k += 1


@gluon.jit
def _keep_moments(tile, tail, places, row0):
    """(mean, 1 / sqrt(var + eps)) of all of a tile's rows into shared memory; of an RMSNorm (any, 1 / rms)."""
    SHARE: gl.constexpr = share_of(tile.ROWS, PAIR)
    lines = _places(tile, places, SHARE)
    for c in gl.static_range(PAIR):
        parts = _ask_moments(tile, tail, row0, c)
        count, mean, m2 = _merge_parts(tail, parts[0], 0)
        for p in gl.static_range(1, len(parts)):
            more, more_mean, more_m2 = _merge_parts(tail, parts[p], 8 * p)
            count, mean, m2 = _chan(count, mean, m2, more, more_mean, more_m2)
        square = m2 / count
        if not tail.CENTRED:
            square += mean * mean
        lines.index(c).store(mean)
        lines.index(c + ROOM // SHARE).store(gl.rsqrt(square + tail.EPS))
    barrier()


@gluon.jit
def _main_loop(tile, ring, turns, at, C: gl.constexpr):
    """The sums of a tile's two halves; `at` counts the steps that the ring has seen before."""
    STEPS: gl.constexpr = (tile.K + 63) // 64
    dtype: gl.constexpr = ring.units.dtype
    before, phase = at % tile.STAGES, (at // tile.STAGES) & 1
    # Nothing is under way: but what has been settled is in registers before the first product, not beside it, where
    # ptxas would wait for that.
    low, high = _settle(tile, _zeros(tile), 0), _settle(tile, _zeros(tile), 0)
    mbarrier.wait(ring.full.index(before), phase)
    low = _multiply(tile, low, before, 0, dtype)
    high = _multiply(tile, high, before, 1, dtype)
    stage, phase = _next_stage(tile, before, phase)
    for _ in range(1, STEPS):
        mbarrier.wait(ring.full.index(stage), phase)
        low = _multiply(tile, low, stage, 0, dtype)
        high = _multiply(tile, high, stage, 1, dtype)
        low, high = _settle(tile, low, PAIR), _settle(tile, high, PAIR)
        mbarrier.arrive(ring.empty.index(before), count=1)
        before = stage
        stage, phase = _next_stage(tile, stage, phase)
    mbarrier.arrive(turns.turn.index(1 - C), count=1)  # a step is still running
    low, high = _settle(tile, low, 0), _settle(tile, high, 0)
    mbarrier.arrive(ring.empty.index(before), count=1)
    return low, high


@gluon.jit
def _make_room(tile, tail, turns, boxes, row0, col0, H: gl.constexpr, C: gl.constexpr, dtype: gl.constexpr):
    """Waits until what was on its way out has left; has what chunk H needs brought there."""
    tma.store_wait(0)
    barrier()
    if tile.BRINGS:
        _bring(tile, tail, turns.out, boxes, C, row0, col0, H, dtype)


@gluon.jit
def _end_tile(tile, tail, turns, places, boxes, vectors, sums, row0, col0, done, C: gl.constexpr):
    """Chunk by chunk, both halves; `done`: chunks of this consumer's earlier tiles."""
    for h in gl.static_range(chunks_of(tile.ROWS)):
        if h > 0:
            _make_room(tile, tail, turns, boxes, row0, col0, h, C, boxes.out.dtype)
        if tile.BRINGS:
            mbarrier.wait(turns.out.full.index(C), (done + h) & 1)
        for half in gl.static_range(PAIR):
            col = col0 + 64 * half
            if col < tile.N:
                unit = _weights(turns.out, tile, C, half)
                _end_chunk(tile, tail, places, unit, boxes, vectors[half], sums[half][h], row0, col, h)


@gluon.jit
def _consumer(tile, tail, ring, turns, boxes, C: gl.constexpr):
    STEPS: gl.constexpr = (tile.K + 63) // 64
    CHUNKS: gl.constexpr = chunks_of(tile.ROWS)
    dtype: gl.constexpr = ring.units.dtype
    num_m, first, step, tiles = _walk(_grid(tile), tail.num_rows)
    even, _ = _features(_zeros(tile)[0], tile.WIDTH)
    L: gl.constexpr = gl.SliceLayout(1, even.type.layout)
    # `transposed` has moments behind its ring's last stage: these are behind a ring of none.
    ended = Tile(tile.N, tile.K, tile.ROWS, tile.WIDTH, tile.BOX, PAIR, 0, tile.BRINGS)
    places = Ring(reinterpret(turns.moments.index(C), dtype, [1, 16, 64], LINES), ring.full, ring.empty, ring.merged)
    gdc_wait()
    for i in range(C, tiles, 2):
        row0, col0 = _place(tile, first + i * step, num_m)
        _make_room(tile, tail, turns, boxes, row0, col0, 0, C, dtype)
        if tail.IN_PARTS > 0:
            _keep_moments(ended, tail, places, row0)
        vectors = _load_vectors(tail, col0, L), _load_vectors(tail, col0 + 64, L)
        mbarrier.wait(turns.turn.index(C), (i // 2) & 1 ^ (1 - C))
        sums = _main_loop(tile, ring, turns, i * STEPS, C)
        _end_tile(ended, tail, turns, places, boxes, vectors, sums, row0, col0, i // 2 * CHUNKS, C)
    tma.store_wait(0)
