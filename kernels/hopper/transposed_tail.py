"""What a consumer of `kernels.hopper.transposed` does with its sums: 64 features of up to 64 rows at a time.

Weights come with the even rows of every 16 before the odd ones, so that a thread holds features 2p and 2p + 1 of its
rows: a rotary pair, and the halves of a word that goes to shared memory, where a row's features are a line.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fusedvit.kernels.hopper.compat import async_store, barrier, gl, gluon
from fusedvit.kernels.hopper.linear_epilogue import (
    _activate,
    _chan,
    _channels,
    _moments,
    _normed,
    _store_moments,
    _unpack,
)
from fusedvit.kernels.hopper.records import reinterpret
from fusedvit.kernels.hopper.transposed_parts import chunks_of, rows_of

WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # a token's 64 features in words of two
LINES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROOM = gl.constexpr(256)  # rows whose moments there is room for: all consumers' shares


@gluon.constexpr_function
def share_of(rows, consumers):
    """Rows of a tile whose moments a consumer merges for all: a power of two, 8 threads or fewer each, as many as eight
    parts have pairs of moments."""
    return max(16, 1 << (-(-rows // consumers) - 1).bit_length())


@gluon.jit
def _features(x, WIDTH: gl.constexpr):
    """(even, odd) features of a chunk's sums [64, WIDTH]: [32, WIDTH] each."""
    even, odd = x.reshape([4, 2, 8, WIDTH]).permute([0, 2, 3, 1]).split()
    return even.reshape([32, WIDTH]), odd.reshape([32, WIDTH])


@gluon.jit
def _ask_parts(tail, rows, start: gl.constexpr, L: gl.constexpr):
    """Parts start ... start + 7 of the statistics of `rows` as they lie."""
    offs = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, L)), 0)
    ptrs = tail.stats_in_ptr + 2 * start + gl.expand_dims(rows, 1) + offs
    return gl.load(ptrs, mask=offs < 2 * (tail.IN_PARTS - start), other=0.0)


@gluon.jit
def _ask_moments(tile, tail, row0, C: gl.constexpr):
    """The statistics of consumer C's share of the tile's rows, on their way: eight parts at a time."""
    SHARE: gl.constexpr = share_of(tile.ROWS, tile.CONSUMERS)
    EACH: gl.constexpr = 128 // SHARE if SHARE < 128 else 1  # threads of a row
    L: gl.constexpr = gl.BlockedLayout([1, 16 // EACH], [32 // EACH, EACH], [4, 1], [1, 0])
    found = ()
    if tail.IN_PARTS > 0:
        rows = row0.to(gl.int64) + C * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, L))
        rows = gl.minimum(rows, tail.num_rows - 1) * (2 * tail.IN_PARTS)
        for start in gl.static_range(0, tail.IN_PARTS, 8):
            found = found + (_ask_parts(tail, rows, start, L),)  # type: ignore[assignment]  # a tuple that grows
    return found


@gluon.jit
def _merge_parts(tail, both, start: gl.constexpr):
    """(channels, mean, M2) of what `_ask_parts` got."""
    COUNT: gl.constexpr = both.shape[0]
    PER_LENGTH: gl.constexpr = (tail.IN_LENGTH + tail.IN_WIDTH - 1) // tail.IN_WIDTH
    CHANNELS: gl.constexpr = _channels(start, 8, tail.IN_PARTS, tail.IN_WIDTH, tail.IN_LENGTH)
    mean, m2 = both.reshape([COUNT, 8, 2]).split()
    part = start + gl.arange(0, 8, gl.SliceLayout(0, mean.type.layout))
    size = gl.minimum(tail.IN_LENGTH - (part % PER_LENGTH) * tail.IN_WIDTH, tail.IN_WIDTH)
    size = gl.expand_dims(gl.where(part < tail.IN_PARTS, size, 0).to(gl.float32), 0)
    total = gl.sum(mean * size, 1) * (1.0 / CHANNELS)
    spread = mean - gl.expand_dims(total, 1)
    return CHANNELS, total, gl.sum(m2 + size * spread * spread, 1)


@gluon.jit
def _places(tile, ring, WIDTH: gl.constexpr):
    """Where moments are kept, WIDTH rows a line: the means of up to ROOM rows, then the others."""
    LAST: gl.constexpr = tile.STAGES * (tile.CONSUMERS + chunks_of(tile.ROWS))
    return reinterpret(ring.units.index(LAST), gl.float32, [2 * ROOM // WIDTH, WIDTH], VECTOR)


@gluon.jit
def _keep_moments(tile, tail, ring, C: gl.constexpr, parts):
    """(mean, 1 / sqrt(var + eps)) of `_ask_moments` into shared memory; of an RMSNorm (any, 1 / rms)."""
    if tail.IN_PARTS > 0:
        SHARE: gl.constexpr = share_of(tile.ROWS, tile.CONSUMERS)
        places = _places(tile, ring, SHARE)
        count, mean, m2 = _merge_parts(tail, parts[0], 0)
        for i in gl.static_range(1, len(parts)):
            more, more_mean, more_m2 = _merge_parts(tail, parts[i], 8 * i)
            count, mean, m2 = _chan(count, mean, m2, more, more_mean, more_m2)
        square = m2 / count
        if not tail.CENTRED:
            square += mean * mean
        places.index(C).store(mean)
        places.index(C + ROOM // SHARE).store(gl.rsqrt(square + tail.EPS))
        barrier()  # every thread's stores come before the one thread's arrival
        mbarrier.arrive(ring.merged.index(0), count=1)


@gluon.jit
def _await_moments(tail, ring):
    """Waits until every consumer has kept its share."""
    if tail.IN_PARTS > 0:
        mbarrier.wait(ring.merged.index(0), 0)


@gluon.jit
def _of_features(ptr, tail, col0, ODD: gl.constexpr, L: gl.constexpr):
    """Every second value of a vector from `col0` on, 32 of them; 0 past the last."""
    cols = col0 + ODD + 2 * gl.arange(0, 32, L)
    return gl.load(ptr + cols, mask=cols < tail.N, other=0.0).to(gl.float32)


@gluon.jit
def _load_vectors(tail, col0, L: gl.constexpr):
    """(bias, colsum) of even and odd features, asked for before the main loop, which hides their latency."""
    none = gl.zeros([32], gl.float32, L)
    bias0, bias1, sum0, sum1 = none, none, none, none
    if tail.HAS_BIAS:
        bias0, bias1 = _of_features(tail.bias_ptr, tail, col0, 0, L), _of_features(tail.bias_ptr, tail, col0, 1, L)
    if tail.IN_PARTS > 0 and tail.CENTRED:
        sum0, sum1 = _of_features(tail.colsum_ptr, tail, col0, 0, L), _of_features(tail.colsum_ptr, tail, col0, 1, L)
    return bias0, bias1, sum0, sum1


@gluon.jit
def _kept_moments(tile, tail, ring, H: gl.constexpr, L: gl.constexpr):
    """(mean, 1 / std) of chunk H's rows."""
    mean = gl.zeros([tile.WIDTH], gl.float32, L)
    rstd = mean
    if tail.IN_PARTS > 0:
        kept = _places(tile, ring, tile.WIDTH)
        mean = kept.index(H).load(L)
        rstd = kept.index(H + ROOM // tile.WIDTH).load(L)
    return mean, rstd


@gluon.jit
def _pack(even, odd, dtype: gl.constexpr):
    """Two features of a row, rounded, in a word."""
    if dtype == gl.bfloat16:
        TEXT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        TEXT: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"  # type: ignore[no-redef]  # the other branch's is gone
    return gl.inline_asm_elementwise(TEXT, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack_pair(word, dtype: gl.constexpr):
    """The two of `_pack` as fp32."""
    if dtype == gl.bfloat16:
        TEXT: gl.constexpr = """{ .reg .b32 a; shl.b32 a, $2, 16; mov.b32 $0, a;
            and.b32 a, $2, 0xFFFF0000; mov.b32 $1, a; }"""
    else:
        TEXT: gl.constexpr = (  # type: ignore[no-redef]
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
        )
    return gl.inline_asm_elementwise(
        TEXT, "=f,=f,r", [word], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _finish(tile, tail, words, vectors, ring, even, odd, col0, H: gl.constexpr, dtype: gl.constexpr):
    """Everything between product and rounding, on a chunk's (even, odd); `words` holds what the producer brought."""
    P: gl.constexpr = even.type.layout
    bias0, bias1, sum0, sum1 = vectors
    mean, rstd = _kept_moments(tile, tail, ring, H, gl.SliceLayout(0, P))
    even = _normed(even, tail, bias0, sum0, mean, rstd, 1)
    odd = _normed(odd, tail, bias1, sum1, mean, rstd, 1)
    if tail.ROPE_COLS > 0:
        if col0 < tail.ROPE_COLS:
            cos, sin = _unpack(words.load(P))
            even, odd = even * cos - odd * sin, odd * cos + even * sin
    even, odd = _activate(even, tail.ACT, dtype), _activate(odd, tail.ACT, dtype)
    if tail.HAS_RESIDUAL:
        more0, more1 = _unpack_pair(words.load(P), dtype)
        even, odd = even + more0, odd + more1
    return even, odd


@gluon.jit
def _store_statistics(tile, tail, lines, row0, col0, H: gl.constexpr):
    """Moments of each row's 64 features as rounded, 128 / WIDTH threads a row."""
    L: gl.constexpr = gl.BlockedLayout([1, tile.WIDTH // 2], [tile.WIDTH // 4, 128 // tile.WIDTH], [4, 1], [1, 0])
    mean, m2 = _moments(lines.load(L).to(gl.float32))
    inside = 64 * H + gl.arange(0, tile.WIDTH, gl.SliceLayout(1, L))
    rows = row0.to(gl.int64) + inside
    _store_moments(mean, m2, tail, rows, (rows < tail.num_rows) & (inside < tile.ROWS), col0 // 64)


@gluon.jit
def _end_chunk(tile, tail, ring, unit, boxes, vectors, x, row0, col0, H: gl.constexpr):
    """From chunk H's sums to their way out, by `unit`, where what the producer brought lies."""
    dtype: gl.constexpr = boxes.out.dtype
    HERE: gl.constexpr = rows_of(tile.ROWS, H)
    even, odd = _features(x, tile.WIDTH)
    words = reinterpret(unit, gl.int32, [tile.WIDTH, 32], WORDS).permute((1, 0))
    even, odd = _finish(tile, tail, words, vectors, ring, even, odd, col0, H, dtype)
    words.store(_pack(even, odd, dtype))
    fence_async_shared()
    lines = reinterpret(unit, dtype, [64 // tile.BOX, tile.BOX, 64], LINES)
    for i in gl.static_range(HERE // tile.BOX):
        async_store(boxes.out, [row0 + 64 * H + i * tile.BOX, col0], lines.index(i))
    if tail.OUT_WIDTH > 0:
        _store_statistics(tile, tail, reinterpret(unit, dtype, [tile.WIDTH, 64], LINES), row0, col0, H)
