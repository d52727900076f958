"""`kernels.linear` for Hopper, in Gluon: a producer warp, two or three consumer warpgroups, a persistent walk of tiles.

The formula is that of `kernels.linear`, which is this function's twin. What differs is who waits for whom:

    producer : x and w of a k-step -> the ring (TMA; a `full` and an `empty` barrier a stage);
               residual or rotary words -> staging
    consumer : ring -> WGMMA -> epilogue, a chunk of 64 columns at a time -> staging -> TMA store

Ping-pong (one consumer a tile): the CTA's tiles alternate between two consumers over one ring, which they drain in tile
order: `turn` lets a consumer begin once the other has issued all of its tile's products. One's epilogue runs under the
other's main loop; and nobody is ever two rounds of the ring behind, which keeps barrier parities unambiguous.
Cooperative (2 or 3 consumers a tile): each has its own rows of x, and they share w.
Split: several CTAs a tile, each with a part of K (see linear_split.py).

tests/kernels/hopper_linear_protocol.py runs this protocol in plain Python under random interleaving.
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

from fusedvit.kernels.epilogue import Epilogue, NormFold, Rope, Scratch, Taps
from fusedvit.kernels.hopper.gemm_configs import CHUNK, HopperGemmConfig, vector_width, warpgroups
from fusedvit.kernels.hopper.gemm_epilogue import (
    Tail,
    _chan,
    _finish,
    _keep_vectors,
    _load_vectors,
    _moments,
    _read_moments,
    _rounded,
    _store_moments,
)
from fusedvit.kernels.hopper.gluon_compat import (
    TensorDescriptor,
    async_load,
    async_store,
    barrier,
    gl,
    gluon,
    record,
    reinterpret,
)
from fusedvit.kernels.launch import launch
from fusedvit.kernels.tma import rows_behind

# ── linear parts ──────────────────────────────────────────────────────────────────────────────────────────────────────
# What the warps of `kernels.hopper.linear` share: the records they work on, and who does which tile.


@record
class GemmShape:
    """What is known of a launch when it is compiled."""

    N: gl.constexpr
    K: gl.constexpr
    BM: gl.constexpr  # rows of a consumer's part of a tile
    BN1: gl.constexpr  # columns of the first accumulator
    BN2: gl.constexpr  # and of the second: 64 or 0
    CONSUMERS: gl.constexpr  # 1: ping-pong
    STAGES: gl.constexpr
    SPLITS: gl.constexpr
    GROUP_M: gl.constexpr
    X_IN_REGISTERS: gl.constexpr


@record
class Ring:
    """Operands on their way: [STAGES * CONSUMERS, BM, 64], [STAGES, BN1, 64], [STAGES, BN2, 64]."""

    x: gl.shared_memory_descriptor
    w1: gl.shared_memory_descriptor
    w2: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@record
class Staging:
    """Output chunks on their way out, [warpgroups * chunks, BM, 64]; residual or rotary words come in so."""

    chunks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # that has landed, a barrier per consumer
    empty: gl.shared_memory_descriptor  # the previous tile has left
    turn: gl.shared_memory_descriptor
    vectors: gl.shared_memory_descriptor  # [2 * warpgroups, columns] fp32: bias, then column sums of a tile


@record
class Boxes:
    x: tma.tensor_descriptor  # [T, K]
    w1: tma.tensor_descriptor  # [N, K], BN1 rows at a time
    w2: tma.tensor_descriptor  # [N, K], BN2 rows at a time
    out: tma.tensor_descriptor  # [T, N]
    extra: tma.tensor_descriptor  # residual [T, N] or rotary words [T, W]


VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # as values follow one another
_vector_width = gluon.constexpr_function(vector_width)
_warpgroups = gluon.constexpr_function(warpgroups)


@record
class Split:
    partials_ptr: gl.tensor  # [programs, cells, BM * 64] fp32
    counters_ptr: gl.tensor  # [tiles, consumers] int32, those of SPLITS


@gluon.jit
def _walk(form, num_rows):
    """(tile rows, this program's first tile, tiles to the next, tiles): a split tile's programs are neighbours."""
    num_m = (num_rows + form.BM * form.CONSUMERS - 1) // (form.BM * form.CONSUMERS)
    NUM_N: gl.constexpr = (form.N + form.BN1 + form.BN2 - 1) // (form.BN1 + form.BN2)
    first = gl.program_id(0) // form.SPLITS
    step = gl.num_programs(0) // form.SPLITS
    return num_m, first, step, (num_m * NUM_N - first + step - 1) // step


@gluon.jit
def _tile_of(form, t, num_m):
    """Tile index -> (tile row, tile column), GROUP_M tile rows at a time so that weights stay in L2."""
    NUM_N: gl.constexpr = (form.N + form.BN1 + form.BN2 - 1) // (form.BN1 + form.BN2)
    group = t // (form.GROUP_M * NUM_N)
    size = gl.minimum(num_m - group * form.GROUP_M, form.GROUP_M)
    inside = t - group * (form.GROUP_M * NUM_N)
    return group * form.GROUP_M + inside % size, inside // size


@gluon.jit
def _k_range(form):
    """This program's k-steps: (first, how many)."""
    NUM_K: gl.constexpr = (form.K + 63) // 64
    split = gl.program_id(0) % form.SPLITS
    first = split * NUM_K // form.SPLITS
    return first, (split + 1) * NUM_K // form.SPLITS - first


@gluon.jit
def _owned(form, cell):
    """Whether this program ends a cell."""
    return gl.program_id(0) % form.SPLITS == _owner(cell, form.SPLITS)


# ── linear split ──────────────────────────────────────────────────────────────────────────────────────────────────────
# The parts of a split product meet: each CTA of a tile ends some of its chunks and gives away what it has of the rest.
#
#     partials: [CTA, chunk, BM * 64] fp32   sums of chunks that another CTA ends, in the order that threads hold them
#     counters: [tile, consumer] int32       how many CTAs have ever written theirs, launch after launch
#
# A tile's CTAs are neighbours, and CTAs start in order: of all that wait for one that has not started, at most one tile's
# are; every other tile's finish and make room. The sum is taken in the order of the parts, whoever takes it.
# Every launch adds a power of two to each counter that it uses, one per part and the last part the rest: nothing is set
# back, the number that a CTA draws tells its launch's share from the ones before, also when the count wraps around.


@record
class Exchange:
    """Where a consumer of a split product meets its peers."""

    partials_ptr: gl.tensor  # [programs, CELLS, BM * 64] fp32
    counter_ptr: gl.tensor  # this tile's and consumer's
    first: gl.tensor  # the tile's first program
    split: gl.tensor  # which part this program has
    SPLITS: gl.constexpr
    CELLS: gl.constexpr


@gluon.constexpr_function
def _whole(splits):
    """What a launch adds to a counter: the next power of two."""
    return 1 << (splits - 1).bit_length()


@gluon.jit
def _owner(cell: gl.constexpr, SPLITS: gl.constexpr):
    """The part that ends a cell: in turns, so that each consumer of each part ends as many, give or take one."""
    return cell % SPLITS


@gluon.jit
def _as_held(x, BM: gl.constexpr):
    """[BM, 64] in a product's layout -> [BM * 64], four values of a thread in a row, then its neighbour's."""
    return x.reshape([BM // 64, 4, 2, 8, 8, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6]).reshape([BM * 64])


@gluon.jit
def _as_product(x, BM: gl.constexpr, L: gl.constexpr):
    """The reverse of `_as_held`."""
    x = x.reshape([BM // 64, 8, 4, 8, 4, 2, 2]).permute([0, 2, 5, 3, 1, 4, 6]).reshape([BM, 64])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def _cell_ptrs(exchange, split, cell, BM: gl.constexpr, H: gl.constexpr):
    base = exchange.partials_ptr + ((exchange.first + split).to(gl.int64) * exchange.CELLS + cell) * (BM * 64)
    return base + gl.arange(0, BM * 64, H)


@gluon.jit
def _give(exchange, x, cell: gl.constexpr, BM: gl.constexpr):
    """Leaves this program's part of a cell to whoever ends it."""
    x = _as_held(x, BM)
    H: gl.constexpr = x.type.layout
    gl.store(_cell_ptrs(exchange, exchange.split, cell, BM, H), x, cache_modifier=".cg")


@gluon.jit
def _meet(exchange):
    """Says that this consumer's cells are written, and waits until the peers' are."""
    barrier()  # every thread's stores come before the one thread's release
    WHOLE: gl.constexpr = _whole(exchange.SPLITS)
    mine = gl.where(exchange.split == exchange.SPLITS - 1, WHOLE - exchange.SPLITS + 1, 1)
    drawn = gl.atomic_add(exchange.counter_ptr, mine, sem="acq_rel", scope="gpu")
    complete = (drawn | (WHOLE - 1)) + 1
    while gl.atomic_add(exchange.counter_ptr, 0, sem="acquire", scope="gpu") - complete < 0:
        pass
    barrier()


@gluon.jit
def _part_of(exchange, s, cell, BM: gl.constexpr, H: gl.constexpr):
    """Another program's part of a cell; 0 of this one's."""
    ptrs = _cell_ptrs(exchange, s, cell, BM, H)
    return gl.load(ptrs, mask=s != exchange.split, other=0.0, cache_modifier=".cg")


@gluon.jit
def _take(exchange, x, cell, BM: gl.constexpr):
    """The whole sum of a cell: of two or three parts all that is missing is asked for at once."""
    L: gl.constexpr = x.type.layout
    x = _as_held(x, BM)
    H: gl.constexpr = x.type.layout
    mine = exchange.split
    if exchange.SPLITS == 2:
        total = x + _part_of(exchange, 1 - mine, cell, BM, H)  # in either order
    elif exchange.SPLITS == 3:
        first = _part_of(exchange, gl.where(mine == 0, 1, 0), cell, BM, H)
        last = _part_of(exchange, gl.where(mine == 2, 1, 2), cell, BM, H)
        total = (first + gl.where(mine == 2, last, x)) + gl.where(mine == 2, x, last)
    else:
        total = gl.zeros([BM * 64], gl.float32, H)
        for s in range(exchange.SPLITS):
            total += gl.where(mine == s, x, _part_of(exchange, s, cell, BM, H))
    return _as_product(total, BM, L)


# ── linear producer ───────────────────────────────────────────────────────────────────────────────────────────────────
# The producer warp: operands of every k-step into the ring, residual or rotary words into the staging buffers.


@gluon.jit
def _wanted(form, tail, cell: gl.constexpr, col0):
    """Whether this program ends the chunk at `col0` and needs something brought for it."""
    LIMIT: gl.constexpr = form.N if tail.HAS_RESIDUAL else tail.ROPE_COLS
    return _owned(form, cell) & (col0 < LIMIT)


@gluon.jit
def _bring(form, tail, boxes, staging, C: gl.constexpr, AT: gl.constexpr, row0, col0, phase):
    """Into the staging buffers of consumer C, whose place in the tile is AT: residual or rotary words, a chunk each."""
    CHUNKS: gl.constexpr = (form.BN1 + form.BN2) // 64
    PAIRS: gl.constexpr = tail.HEAD_DIM // 2
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    full = staging.full.index(C)
    mbarrier.wait(staging.empty.index(C), phase)
    count = 0
    for j in gl.static_range(CHUNKS):
        count += _wanted(form, tail, AT * CHUNKS + j, col0 + j * 64).to(gl.int32)
    for j in gl.static_range(CHUNKS + 1):  # even of none, so that the barrier turns with every tile
        mbarrier.expect(full, form.BM * j * 128, pred=count == j)
    for j in gl.static_range(CHUNKS):
        chunk = staging.chunks.index(C * CHUNKS + j)
        wanted = _wanted(form, tail, AT * CHUNKS + j, col0 + j * 64)
        row = row0 + AT * form.BM
        if tail.HAS_RESIDUAL:
            async_load(boxes.extra, [row, col0 + j * 64], full, chunk, pred=wanted)
        else:
            words = reinterpret(chunk, gl.int32, [form.BM, 32], WORDS)
            async_load(boxes.extra, [row, (col0 + j * 64) // 2 % PAIRS], full, words, pred=wanted)


@gluon.jit
def _load_step(form, ring, boxes, stage, row0, col0, k, X: gl.constexpr, W: gl.constexpr):
    """One k-step's operands into a stage; its barrier expects both from the first call on."""
    full = ring.full.index(stage)
    if W:
        mbarrier.expect(full, (form.BM * form.CONSUMERS + form.BN1 + form.BN2) * 128)
        async_load(boxes.w1, [col0, k * 64], full, ring.w1.index(stage))
        if form.BN2 > 0:
            async_load(boxes.w2, [col0 + form.BN1, k * 64], full, ring.w2.index(stage))
    if X:
        for c in gl.static_range(form.CONSUMERS):
            async_load(boxes.x, [row0 + c * form.BM, k * 64], full, ring.x.index(stage * form.CONSUMERS + c))


@gluon.jit
def _producer(form, tail, split, ring, staging, boxes):
    num_m, first, step, tiles = _walk(form, tail.num_rows)
    k0, steps = _k_range(form)
    ahead = gl.minimum(steps, form.STAGES)
    tile_m, tile_n = _tile_of(form, first, num_m)  # no tile where there are none, and then not asked for
    row0 = tile_m * (form.BM * form.CONSUMERS)
    col0 = tile_n * (form.BN1 + form.BN2)
    if tiles > 0:  # weights of the first stages, while the previous launch is still busy with x
        for k in range(0, ahead):
            _load_step(form, ring, boxes, k, 0, col0, k0 + k, False, True)
    gdc_wait()
    if tiles > 0:  # at once: everybody waits for it
        for k in range(0, ahead):
            _load_step(form, ring, boxes, k, row0, 0, k0 + k, True, False)
    for i in range(0, tiles):
        tile_m, tile_n = _tile_of(form, first + i * step, num_m)
        row0 = tile_m * (form.BM * form.CONSUMERS)
        col0 = tile_n * (form.BN1 + form.BN2)
        for k in range(0, steps):
            at = i * steps + k
            stage = at % form.STAGES
            if at >= ahead:
                mbarrier.wait(ring.empty.index(stage), ((at // form.STAGES) & 1) ^ 1)
                _load_step(form, ring, boxes, stage, row0, col0, k0 + k, True, True)
            if tail.HAS_RESIDUAL or tail.ROPE_COLS > 0:
                if k == gl.minimum(steps - 1, form.STAGES):  # by then the consumer has begun, and staging is about free
                    if form.CONSUMERS > 1:
                        for c in gl.static_range(form.CONSUMERS):
                            _bring(form, tail, boxes, staging, c, c, row0, col0, i & 1)
                    elif i % 2 == 0:
                        _bring(form, tail, boxes, staging, 0, 0, row0, col0, (i // 2) & 1)
                    else:
                        _bring(form, tail, boxes, staging, 1, 0, row0, col0, (i // 2) & 1)


# ── linear consumer ───────────────────────────────────────────────────────────────────────────────────────────────────
# A consumer warpgroup: ring -> WGMMA -> epilogue, a chunk of 64 columns at a time -> staging -> TMA store.


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


# ── linear ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def _consumer_0(form, tail, split, ring, staging, boxes):
    _consumer(form, tail, split, ring, staging, boxes, 0)


@gluon.jit
def _consumer_1(form, tail, split, ring, staging, boxes):
    _consumer(form, tail, split, ring, staging, boxes, 1)


@gluon.jit
def _consumer_2(form, tail, split, ring, staging, boxes):
    _consumer(form, tail, split, ring, staging, boxes, 2)


@gluon.jit
def _hopper_linear_kernel(
    x_desc,  # [T, K]
    w1_desc,  # [N, K]
    w2_desc,  # [N, K]
    out_desc,  # [T, N]; of swiglu [T, N / 2]
    extra_desc,  # residual [T, N] or rotary words [T, W]; a stand-in where there is neither
    bias_ptr,
    colsum_ptr,
    stats_in_ptr,
    table_ptr,
    tap_index_ptr,
    tap_weight_ptr,
    stats_out_ptr,
    partials_ptr,
    counters_ptr,
    num_rows_ptr,  # [1] int32: the true T
    N: gl.constexpr,
    K: gl.constexpr,
    EPS: gl.constexpr,
    IN_PARTS: gl.constexpr,
    CENTRED: gl.constexpr,
    IN_WIDTH: gl.constexpr,
    IN_LENGTH: gl.constexpr,
    ROPE_COLS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TAPS: gl.constexpr,
    ACT: gl.constexpr,
    LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    OUT_WIDTH: gl.constexpr,
    BM: gl.constexpr,
    BN1: gl.constexpr,
    BN2: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP_M: gl.constexpr,
    X_IN_REGISTERS: gl.constexpr,
):
    num_rows = gl.load(num_rows_ptr)  # first, as all tiles hang on it
    WARPGROUPS: gl.constexpr = _warpgroups(CONSUMERS)
    CHUNKS: gl.constexpr = (BN1 + BN2) // 64
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = x_desc.dtype
    x = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, BM, 64], x_desc.layout)
    w1 = gl.allocate_shared_memory(dtype, [STAGES, BN1, 64], w1_desc.layout)
    w2 = w1
    if BN2 > 0:
        w2 = gl.allocate_shared_memory(dtype, [STAGES, BN2, 64], w2_desc.layout)
    OUT_COLS: gl.constexpr = 32 if ACT == "swiglu" else 64  # of a chunk of 64
    chunks = gl.allocate_shared_memory(dtype, [WARPGROUPS * CHUNKS, BM, OUT_COLS], out_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [2 * WARPGROUPS, _vector_width(BN1 + BN2)], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    staged = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    unstaged = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    # In turns, as Triton has the CTA meet between two of one array. Those that nobody waits at must not be initialised:
    # see `sass.overwritten_barriers`.
    for i in gl.static_range(STAGES if STAGES > WARPGROUPS else WARPGROUPS):
        if i < STAGES:
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        if i < WARPGROUPS:
            mbarrier.init(unstaged.index(i), count=1)
        if i < WARPGROUPS and (HAS_RESIDUAL or ROPE_COLS > 0):
            mbarrier.init(staged.index(i), count=1)
        if i < 2 and CONSUMERS == 1:
            mbarrier.init(turn.index(i), count=1)
    gdc_launch_dependents()

    form = GemmShape(N, K, BM, BN1, BN2, CONSUMERS, STAGES, SPLITS, GROUP_M, X_IN_REGISTERS)
    tail = Tail(
        bias_ptr, colsum_ptr, stats_in_ptr, table_ptr, tap_index_ptr, tap_weight_ptr, stats_out_ptr,
        num_rows, N, EPS, IN_PARTS, CENTRED, IN_WIDTH, IN_LENGTH, ROPE_COLS, HEAD_DIM, TAPS, ACT, LIMIT, HAS_BIAS,
        HAS_RESIDUAL, OUT_WIDTH,
    )  # fmt: skip
    split = Split(partials_ptr, counters_ptr)
    ring = Ring(x, w1, w2, full, empty)
    staging = Staging(chunks, staged, unstaged, turn, vectors)
    boxes = Boxes(x_desc, w1_desc, w2_desc, out_desc, extra_desc)
    args = (form, tail, split, ring, staging, boxes)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [(_consumer_0, args), (_consumer_1, args), (_consumer_2, args), (_producer, args)],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize([(_consumer_0, args), (_consumer_1, args), (_producer, args)], [4, 1], [232, 40])


_NO_NORM, _NO_ROPE, _NO_TAPS = NormFold(), Rope(), Taps()


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    config: HopperGemmConfig,
) -> torch.Tensor:
    """See `kernels.linear.linear`. A split product needs `epilogue.scratch`.

    Raises:
        ValueError: what `unsupported` says, before any launch.
    """
    (rows, k), n = x.shape, weight.shape[0]
    e = epilogue
    reason = unsupported(e, x, n, config)
    if reason:
        raise ValueError(f"linear in its hopper form takes {reason}")
    wide = n // 2 if e.gated else n
    assert weight.shape[1] == k and out.shape == (rows, wide), f"x {x.shape}, weight {weight.shape}, out {out.shape}"
    tiles = config.tiles(rows, n)
    if tiles == 0:
        return out
    norm, rope, taps = e.norm or _NO_NORM, e.rope or _NO_ROPE, e.taps or _NO_TAPS
    launch(
        _hopper_linear_kernel,
        min(tiles, config.max_programs) if config.splits == 1 else tiles * config.splits,
        _boxes(x, weight, out, e, config),
        tuple(num_rows if p is None else p for p in _pointers(e, norm, taps, config)) + (num_rows,),
        _constants(n, k, e, norm, rope, taps) | config.constants(),
        config.options(),
    )
    return out


def unsupported(e: Epilogue, x: torch.Tensor, n: int, config: HopperGemmConfig) -> str:
    """Why this product and what follows it cannot run here, or ""."""
    steps = -(-x.shape[1] // CHUNK) // config.splits
    if e.gated and (n % 16 or e.rope is not None or e.taps is not None):
        return f"swiglu of whole 16s of columns, without rotary factors or taps, got {n}"
    if steps < 2:
        return f"at least two steps of {CHUNK} in K a part, got {steps}"
    if e.stats is not None and (e.stats.width != config.block_n or n % CHUNK):
        return f"statistics of whole {CHUNK}s in parts of {config.block_n}, got {n} in parts of {e.stats.width}"
    if config.splits > 1:
        sums, counters = config.scratch_sizes(x.shape[0], n)
        if e.scratch is None or e.scratch.sums.numel() < sums or e.scratch.counters.shape[1] < counters:
            return f"scratch for {sums} sums and {counters} counters, got {_size(e.scratch)}"
    return unsupported_operands(e, x)


def unsupported_operands(e: Epilogue, x: torch.Tensor) -> str:
    """What neither form in Gluon takes, or ""."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"operands of 16 bits only, got {x.dtype}"
    if e.rope is not None and e.rope.packed is None:
        return "rotary factors as words (see packed_cos_sin.py), got none"
    if e.rope is not None and (e.rope.cols % CHUNK or e.residual is not None):
        return f"rotary columns of whole {CHUNK}s and no residual, got {e.rope.cols}"
    return ""


def _size(scratch: Scratch | None) -> str:
    return "none" if scratch is None else f"{scratch.sums.numel()} and {scratch.counters.shape[1]}"


def _pointers(e: Epilogue, norm: NormFold, taps: Taps, config: HopperGemmConfig) -> tuple[torch.Tensor | None, ...]:
    """What the kernel reads and writes by itself; for None there is a stand-in, never read."""
    scratch = e.scratch if config.splits > 1 else None
    return (
        e.bias,
        norm.colsum,
        None if norm.stats is None else norm.stats.partials,
        taps.table,
        taps.index,
        taps.weight,
        None if e.stats is None else e.stats.partials,
        None if scratch is None else scratch.sums,
        None if scratch is None else scratch.counters[(config.splits - 1).bit_length()],
    )


def _boxes(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, e: Epilogue, config: HopperGemmConfig
) -> tuple[Any, ...]:
    wide, narrow = config.accumulators
    rows, tile = config.rows, config.block_m
    out_box = _box(out, rows, _HALF if e.gated else _LAYOUT)
    return (
        _box(x, rows, tile=tile),
        _box(weight, wide, tile=config.cols),
        _box(weight, narrow or wide, tile=config.cols),
        out_box,
        _extra_box(e, rows, tile) or out_box,
    )


def _extra_box(e: Epilogue, rows: int, tile: int) -> Any:
    """Residual or rotary words, `rows` rows at a time, in tiles of `tile`; None where there is neither."""
    if e.rope is not None and e.rope.packed is not None:
        return _box(e.rope.packed, rows, _WORDS, tile)
    return None if e.residual is None else _box(e.residual, rows, tile=tile)


_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)  # 128 bytes a row, swizzled
_HALF = gl.NVMMASharedLayout(64, 16, 2)
_WORDS = gl.NVMMASharedLayout(128, 32, 2)


def _box(t: torch.Tensor, rows: int, layout: Any = _LAYOUT, tile: int = 1) -> Any:
    """As `descriptor.box`, for Gluon: `rows` rows as wide as the layout's swizzle; products read 128 bytes. Of what is
    read in whole tiles of `tile` rows: see `rows_behind`."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = t
    descriptor.shape = [rows_behind(t, tile), t.shape[1]]
    descriptor.strides = t.stride()
    descriptor.block_shape = [rows, layout.swizzle_byte_width // t.element_size()]
    descriptor.layout = layout
    return descriptor


def _constants(n: int, k: int, e: Epilogue, norm: NormFold, rope: Rope, taps: Taps) -> dict[str, int | float | str]:
    """The compile-time arguments that come from shapes and the epilogue."""
    stats = norm.stats
    return {
        "N": n,
        "K": k,
        "EPS": norm.eps,
        "IN_PARTS": 0 if stats is None else stats.parts,
        "CENTRED": norm.colsum is not None,
        "IN_WIDTH": 1 if stats is None else stats.width,
        "IN_LENGTH": 1 if stats is None else stats.length,
        "ROPE_COLS": rope.cols,
        "HEAD_DIM": rope.head_dim,
        "TAPS": 0 if taps.index is None else taps.index.shape[1],
        "ACT": e.activation,
        "LIMIT": e.limit,
        "HAS_BIAS": e.bias is not None,
        "HAS_RESIDUAL": e.residual is not None,
        "OUT_WIDTH": 0 if e.stats is None else e.stats.width,
    }
