"""What a consumer does with its accumulator, 64 columns at a time, in the layout that the product leaves it in.

In that layout a thread holds columns 8g + 2q and 8g + 2q + 1 (g < 8, q its place in a group of four) of two rows in
every 16: a rotary pair is in one thread, and so are the mean and M2 of a part of the row statistics.
"""

import triton.language as tl

from fusedvit.kernels.hopper.gluon_compat import gl, gluon, record, reinterpret

SPREAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a value a thread of a warpgroup


@record
class Tail:
    """What follows the product (see `kernels.epilogue`). An absent tensor is stood in for by one that nobody reads."""

    bias_ptr: gl.tensor  # [N]
    colsum_ptr: gl.tensor  # [N] fp32
    stats_in_ptr: gl.tensor  # [T, IN_PARTS, 2] fp32
    table_ptr: gl.tensor  # [positions, N]
    tap_index_ptr: gl.tensor  # [T, TAPS] int32
    tap_weight_ptr: gl.tensor  # [T, TAPS] fp32
    stats_out_ptr: gl.tensor  # [T, OUT_PARTS, 2] fp32
    num_rows: gl.tensor
    N: gl.constexpr
    EPS: gl.constexpr
    IN_PARTS: gl.constexpr  # 0: no norm
    CENTRED: gl.constexpr  # LayerNorm, else RMSNorm
    IN_WIDTH: gl.constexpr
    IN_LENGTH: gl.constexpr
    ROPE_COLS: gl.constexpr  # 0: no rotary
    HEAD_DIM: gl.constexpr
    TAPS: gl.constexpr
    ACT: gl.constexpr
    LIMIT: gl.constexpr  # of swiglu's factors, 0: none
    HAS_BIAS: gl.constexpr
    HAS_RESIDUAL: gl.constexpr
    OUT_WIDTH: gl.constexpr  # columns of a part of the output's statistics, 0: none


@gluon.constexpr_function
def _channels(start, count, parts, width, length):
    """Channels in parts start ... start + count - 1."""
    per_length = -(-length // width)
    return sum(min(length - p % per_length * width, width) for p in range(start, min(start + count, parts)))


@gluon.jit
def _chan(count, mean, m2, more, more_mean, more_m2):
    """Moments of `count` channels merged with those of `more` (Chan, Golub and LeVeque, 1979)."""
    total = count + more
    delta = more_mean - mean
    mean += delta * (more / total)
    m2 += more_m2 + delta * delta * (count * more / total)
    return total, mean, m2


@gluon.jit
def _read_parts(tail, rows, start: gl.constexpr, PAIRS: gl.constexpr, BM: gl.constexpr, ROWS: gl.constexpr):
    """(channels, mean, M2) of parts start ... start + PAIRS - 1 of `rows`."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PAIRS, 16])
    PER_LENGTH: gl.constexpr = (tail.IN_LENGTH + tail.IN_WIDTH - 1) // tail.IN_WIDTH
    COUNT: gl.constexpr = _channels(start, PAIRS, tail.IN_PARTS, tail.IN_WIDTH, tail.IN_LENGTH)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, L), assert_trivial=True)
    offs = gl.expand_dims(gl.arange(0, 2 * PAIRS, gl.SliceLayout(0, L)), 0)
    ptrs = tail.stats_in_ptr + 2 * start + gl.expand_dims(rows * (2 * tail.IN_PARTS), 1) + offs
    both = gl.load(ptrs, mask=offs < 2 * (tail.IN_PARTS - start), other=0.0)
    mean, m2 = both.reshape([BM, PAIRS, 2]).split()  # [BM, PAIRS]
    P: gl.constexpr = mean.type.layout
    part = start + gl.arange(0, PAIRS, gl.SliceLayout(0, P))
    size = gl.minimum(tail.IN_LENGTH - (part % PER_LENGTH) * tail.IN_WIDTH, tail.IN_WIDTH)
    size = gl.expand_dims(gl.where(part < tail.IN_PARTS, size, 0).to(gl.float32), 0)
    total_mean = gl.sum(mean * size, 1) * (1.0 / COUNT)
    spread = mean - gl.expand_dims(total_mean, 1)
    total_m2 = gl.sum(m2 + size * spread * spread, 1)
    total_mean = gl.convert_layout(total_mean, ROWS, assert_trivial=True)
    return COUNT, total_mean, gl.convert_layout(total_m2, ROWS, assert_trivial=True)


@gluon.jit
def _read_moments(tail, rows, BM: gl.constexpr, ROWS: gl.constexpr):
    """(mean, 1 / sqrt(var + eps)) of `rows`, merged from up to 16 parts at a time; of an RMSNorm (any, 1 / rms)."""
    PAIRS: gl.constexpr = 8 if tail.IN_PARTS <= 8 else 16
    count, mean, m2 = _read_parts(tail, rows, 0, PAIRS, BM, ROWS)
    for start in gl.static_range(PAIRS, tail.IN_PARTS, PAIRS):
        more, more_mean, more_m2 = _read_parts(tail, rows, start, PAIRS, BM, ROWS)
        count, mean, m2 = _chan(count, mean, m2, more, more_mean, more_m2)
    square = m2 / count
    if not tail.CENTRED:
        square += mean * mean
    return mean, gl.rsqrt(square + tail.EPS)


@gluon.jit
def _load_columns(ptr, tail, col0, COUNT: gl.constexpr):
    """COUNT columns of a vector as fp32, spread over a warpgroup; 0 past the last."""
    cols = col0 + gl.arange(0, COUNT, SPREAD)
    return gl.load(ptr + cols, mask=cols < tail.N, other=0.0).to(gl.float32)


@gluon.jit
def _load_vectors(tail, col0, COUNT: gl.constexpr):
    """(bias, colsum) of a tile, asked for before the main loop, which hides their latency."""
    none = gl.zeros([COUNT], gl.float32, SPREAD)
    bias = _load_columns(tail.bias_ptr, tail, col0, COUNT) if tail.HAS_BIAS else none
    colsum = _load_columns(tail.colsum_ptr, tail, col0, COUNT) if tail.IN_PARTS > 0 and tail.CENTRED else none
    return bias, colsum


@gluon.jit
def _keep_vectors(tail, places, first: gl.constexpr, vectors):
    """Into shared memory, for every chunk: a load from farther away would be waited for at the chunk's next fence."""
    bias, colsum = vectors
    if tail.HAS_BIAS:
        places.index(first).store(bias)
    if tail.IN_PARTS > 0 and tail.CENTRED:
        places.index(first + 1).store(colsum)


@gluon.jit
def _unpack(word):
    """(cos, sin) from the 16-bit fixed-point halves of a word: u -> u / 32768 - 1, exact in fp32."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 t;
        prmt.b32 t, $2, 0x4B000000, 0x7410; fma.rn.f32 $0, t, 0f38000000, 0fC3808000;
        prmt.b32 t, $2, 0x4B000000, 0x7432; fma.rn.f32 $1, t, 0f38000000, 0fC3808000; }""",
        "=f,=f,r", [word], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _rotate_pairs(x, chunk, BM: gl.constexpr):
    """(a, b) -> (a cos - b sin, b cos + a sin); `chunk` holds the 32 pairs' words [BM, 32] where bf16 will stand."""
    a, b = x.reshape([BM, 32, 2]).split()
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    cos, sin = _unpack(reinterpret(chunk, gl.int32, [BM, 32], WORDS).load(a.type.layout))
    return gl.join(a * cos - b * sin, b * cos + a * sin).reshape([BM, 64])


@gluon.jit
def _add_taps(x, tail, rows, col0, L: gl.constexpr):
    cols = gl.expand_dims(col0 + gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    for i in gl.static_range(tail.TAPS):
        index = gl.load(tail.tap_index_ptr + rows * tail.TAPS + i).to(gl.int64)  # [BM]
        weight = gl.load(tail.tap_weight_ptr + rows * tail.TAPS + i)
        ptrs = tail.table_ptr + gl.expand_dims(index * tail.N, 1) + cols
        if tail.N % 64 == 0:
            row = gl.load(ptrs)
        else:
            row = gl.load(ptrs, mask=cols < tail.N, other=0.0)
        x += gl.expand_dims(weight, 1) * row.to(gl.float32)
    return x


@gluon.jit
def _tanh(x):
    """The hardware's tanh, right to 2^-11: less than bf16 rounds."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    """1 / x, right to an ulp of fp32; the division itself would be nine instructions."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _gelu_erf(x):
    """max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2, off by 4e-5 of itself, which fp16 rounds by 2.4e-4 or more. NaN stays.

    erfc in the form of Abramowitz and Stegun 7.1.26, for the least relative error: a third of libdevice's instructions
    and so few of its registers that tiles of 128 rows do not spill. Beyond 16 it is 0, times infinity too.
    """
    a = gl.minimum(gl.abs(x), 16.0)
    t = _reciprocal(1.0 + 0.376 * a)
    p = t * (0.14947759 + t * (0.15791386 + t * (0.08471196 + t * (0.19874373 - t * 0.09085698))))
    return gl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - a * (p * gl.exp2(-0.72134752 * (a * a)))


@gluon.jit
def _activate(x, ACT: gl.constexpr, dtype: gl.constexpr):
    """The activation on fp32 values; x sigmoid(2u) = (x + x tanh(u)) / 2."""
    if ACT == "none":
        return x
    elif ACT == "gelu":
        return _gelu_erf(x)
    else:
        if ACT == "gelu_tanh":
            u = x * (0.7978845608028654 + 0.03567740813636141 * x * x)
        else:
            u = 0.851 * x
        if dtype == gl.bfloat16:
            half = 0.5 * x
            return half + half * _tanh(u)
        else:
            return x / (1.0 + gl.exp2(u * -2.8853900817779268))


@gluon.jit
def _gate_pairs(x, LIMIT: gl.constexpr, BM: gl.constexpr, dtype: gl.constexpr):
    """[BM, 64] of (gate, up) pairs -> silu(gate) up, [BM, 32]; silu(x) = (x + x tanh(x / 2)) / 2."""
    gate, up = x.reshape([BM, 32, 2]).split()
    if LIMIT > 0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    if dtype == gl.bfloat16:
        half = 0.5 * gate
        return (half + half * _tanh(half)) * up
    else:
        return gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * up


@gluon.jit
def _normed(x, tail, bias, colsum, mean, rstd, ROWS: gl.constexpr):
    """Norm and bias on sums whose rows are along axis ROWS, and features along the other."""
    if tail.IN_PARTS > 0:
        if tail.CENTRED:
            x = x - gl.expand_dims(mean, 1 - ROWS) * gl.expand_dims(colsum, ROWS)
        x = x * gl.expand_dims(rstd, 1 - ROWS)
    if tail.HAS_BIAS:
        x = x + gl.expand_dims(bias, ROWS)
    return x


@gluon.jit
def _finish(x, tail, vectors, mean, rstd, chunk, rows, col0, BM: gl.constexpr, L: gl.constexpr, dtype: gl.constexpr):
    """Everything between the product and rounding, on the chunk at `col0`; `chunk` holds what the producer brought.

    Of swiglu half as many columns come back.
    """
    bias, colsum = vectors
    x = _normed(x, tail, bias, colsum, mean, rstd, 0)
    if tail.TAPS > 0:
        x = _add_taps(x, tail, rows, col0, L)
    if tail.ROPE_COLS > 0:
        if col0 < tail.ROPE_COLS:
            x = gl.convert_layout(_rotate_pairs(x, chunk, BM), L, assert_trivial=True)
    if tail.ACT == "swiglu":
        return _gate_pairs(x, tail.LIMIT, BM, dtype)
    else:
        x = _activate(x, tail.ACT, dtype)
        if tail.HAS_RESIDUAL:
            x = x + chunk.load(L).to(gl.float32)
        return x


@gluon.jit
def _rounded(x, dtype: gl.constexpr):
    """`x.to(dtype)`, two at a time: what is read as fp32 again LLVM rounds one by one, by a unit an eighth as fast."""
    if dtype == gl.bfloat16:
        PAIR: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        y = gl.inline_asm_elementwise(PAIR, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        PAIR: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"  # type: ignore[no-redef]  # the other branch's is gone
        y = gl.inline_asm_elementwise(PAIR, "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)
    return y


@gluon.jit
def _moments(y):
    """(mean, M2) of each row of a chunk."""
    mean = gl.sum(y, 1) * (1.0 / 64)
    spread = y - gl.expand_dims(mean, 1)
    return mean, gl.sum(spread * spread, 1)


@gluon.jit
def _store_moments(mean, m2, tail, rows, known, part):
    """Part `part` of the output's statistics."""
    PARTS: gl.constexpr = (tail.N + tail.OUT_WIDTH - 1) // tail.OUT_WIDTH
    ptrs = tail.stats_out_ptr + rows * (2 * PARTS) + 2 * part
    gl.store(ptrs, mean, mask=known)
    gl.store(ptrs + 1, m2, mask=known)
