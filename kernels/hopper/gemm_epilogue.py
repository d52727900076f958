"""The epilogue that both Hopper GEMMs share: norm, bias, taps, heads, rotary, activation, residual, row statistics.

An accumulator goes through it 64 columns at a time, in the layout that WGMMA leaves it in: a thread holds columns
8g + 2q and 8g + 2q + 1 (g < 8, q its index in a group of four) of two rows in every 16. So a rotary pair is in one
thread, and so are the mean and M2 of a part of the row statistics.

The last functions are the host's: compile-time constants and TMA descriptors of an `Epilogue`.
"""

from typing import Any

import torch
import triton.language as tl

from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.hopper.gemm_configs import CHUNK
from fusedvit.kernels.hopper.gluon_compat import built_descriptor, gl, gluon, record, reinterpret
from fusedvit.kernels.tma import rows_behind

SPREAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one value a thread of a warpgroup
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # one value after another
PACKED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # 32 packed cos/sin a row
LINES = gl.NVMMASharedLayout(128, 16, 2)  # 64 values of 16 bits a row, swizzled
HALF_LINES = gl.NVMMASharedLayout(64, 16, 2)  # 32 values: the output of a gated activation


@record
class EpilogueArgs:
    """Arguments of the epilogue (see `kernels.epilogue`). In place of an absent tensor stands one that is not read."""

    bias_ptr: gl.tensor  # [N]
    colsum_ptr: gl.tensor  # [N] fp32; or what heads are normalised with, [HEAD_PARTS, 64]
    stats_in_ptr: gl.tensor  # [T, IN_PARTS, 2] fp32
    table_ptr: gl.tensor  # [positions, N]
    tap_index_ptr: gl.tensor  # [T, TAPS] int32
    tap_weight_ptr: gl.tensor  # [T, TAPS] fp32
    stats_out_ptr: gl.tensor  # [T, OUT_PARTS, 2] fp32
    clip_ptr: gl.tensor  # of gated activations [3, 2], of heads [HEAD_PARTS, 2] fp32
    num_rows: gl.tensor
    N: gl.constexpr
    EPS: gl.constexpr
    IN_PARTS: gl.constexpr  # 0: no norm; `gemm` reads the number at run time
    CENTRED: gl.constexpr  # LayerNorm, else RMSNorm
    IN_WIDTH: gl.constexpr
    IN_LENGTH: gl.constexpr
    ROPE_COLS: gl.constexpr  # 0: no rotary
    HEAD_DIM: gl.constexpr
    HEAD_PARTS: gl.constexpr  # thirds of the columns whose heads, a chunk each, are normalised; 0: none
    TAPS: gl.constexpr
    ACT: gl.constexpr
    LIMIT: gl.constexpr  # of swiglu's factors; None: none
    HAS_CLIP: gl.constexpr
    HAS_BIAS: gl.constexpr
    HAS_RESIDUAL: gl.constexpr
    OUT_WIDTH: gl.constexpr  # columns of a part of the output's statistics, 0: none


@gluon.constexpr_function
def channels_of(start, count, parts, width, length):
    """Channels in parts start ... start + count - 1."""
    per_length = -(-length // width)
    return sum(min(length - p % per_length * width, width) for p in range(start, min(start + count, parts)))


@gluon.jit
def merge_moments(count, mean, m2, more, more_mean, more_m2):
    """Moments of `count` channels merged with those of `more` (Chan, Golub and LeVeque, 1979)."""
    total = count + more
    delta = more_mean - mean
    mean += delta * (more / total)
    m2 += more_m2 + delta * delta * (count * more / total)
    return total, mean, m2


@gluon.jit
def steps_of(shape):
    """Steps of 64 in K: STEPS, a constant to the compiler, or where that is 0 `steps`."""
    return shape.steps * (shape.STEPS == 0) + shape.STEPS


PARTS = gl.constexpr(8)  # of the statistics of a row that are read together


@gluon.jit
def _channels_before(part, shape, epi):
    """Channels in parts 0 ... part - 1; the last part of every IN_LENGTH channels may be narrower."""
    return part // shape.per_length * epi.IN_LENGTH + part % shape.per_length * shape.in_width


@gluon.jit
def _read_parts(epi, shape, rows, start, BM: gl.constexpr, ROWS: gl.constexpr):
    """(channels, mean, M2) of up to PARTS parts of `rows` from `start` on."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PARTS, 16])
    rows = gl.convert_layout(rows, gl.SliceLayout(1, L), assert_trivial=True)
    offs = gl.expand_dims(gl.arange(0, 2 * PARTS, gl.SliceLayout(0, L)), 0)
    ptrs = epi.stats_in_ptr + (gl.expand_dims(rows * (2 * shape.in_parts), 1) + (2 * start + offs))
    both = gl.load(ptrs, mask=offs < 2 * (shape.in_parts - start), other=0.0)
    mean, m2 = both.reshape([BM, PARTS, 2]).split()  # [BM, PARTS]
    part = start + gl.arange(0, PARTS, gl.SliceLayout(0, mean.type.layout))
    size = gl.minimum(epi.IN_LENGTH - (part % shape.per_length) * shape.in_width, shape.in_width)
    size = gl.expand_dims(gl.where(part < shape.in_parts, size, 0).to(gl.float32), 0)
    end = gl.minimum(start + PARTS, shape.in_parts)
    count = (_channels_before(end, shape, epi) - _channels_before(start, shape, epi)).to(gl.float32)
    total_mean = gl.sum(mean * size, 1) * (1.0 / count)
    spread = mean - gl.expand_dims(total_mean, 1)
    total_m2 = gl.sum(m2 + size * spread * spread, 1)
    total_mean = gl.convert_layout(total_mean, ROWS, assert_trivial=True)
    return count, total_mean, gl.convert_layout(total_m2, ROWS, assert_trivial=True)


@gluon.jit
def read_moments(epi, shape, rows, BM: gl.constexpr, ROWS: gl.constexpr):
    """(mean, 1 / sqrt(var + eps)) of `rows`, merged from PARTS parts at a time; of an RMSNorm (any, 1 / rms).

    The parts are as wide as the tiles that wrote them: `shape` says how many there are and how wide, at run time, so
    that one kernel reads them all.
    """
    mean = gl.zeros([BM], gl.float32, ROWS)
    m2 = mean
    count = gl.minimum(shape.in_parts, 0).to(gl.float32)  # 0
    for start in range(0, shape.in_parts, PARTS):
        more, more_mean, more_m2 = _read_parts(epi, shape, rows, start, BM, ROWS)
        count, mean, m2 = merge_moments(count, mean, m2, more, more_mean, more_m2)
    square = m2 / count
    if not epi.CENTRED:
        square += mean * mean
    return mean, gl.rsqrt(square + epi.EPS)


@gluon.jit
def _load_columns(ptr, epi, col0, COUNT: gl.constexpr):
    """COUNT columns of a vector as fp32, spread over a warpgroup; 0 past the last."""
    cols = col0 + gl.arange(0, COUNT, SPREAD)
    return gl.load(ptr + cols, mask=cols < epi.N, other=0.0).to(gl.float32)


@gluon.jit
def _load_head_norm(epi, col0, COUNT: gl.constexpr):
    """What COUNT columns of normalised heads are multiplied with, as fp32; 0 past the last."""
    cols = col0 + gl.arange(0, COUNT, SPREAD)
    third: gl.constexpr = epi.N // 3
    ptrs = epi.colsum_ptr + ((cols // third << 6) + cols % 64)
    return gl.load(ptrs, mask=cols < epi.HEAD_PARTS * third, other=0.0).to(gl.float32)


@gluon.jit
def load_vectors(epi, col0, COUNT: gl.constexpr):
    """(bias, colsum) of a tile, loaded before the main loop, which hides their latency; heads take colsum's place."""
    none = gl.zeros([COUNT], gl.float32, SPREAD)
    bias = _load_columns(epi.bias_ptr, epi, col0, COUNT) if epi.HAS_BIAS else none
    if epi.HEAD_PARTS > 0:
        colsum = _load_head_norm(epi, col0, COUNT)
    else:
        colsum = _load_columns(epi.colsum_ptr, epi, col0, COUNT) if epi.IN_PARTS > 0 and epi.CENTRED else none
    return bias, colsum


@gluon.jit
def store_vectors(epi, smem, first: gl.constexpr, vectors):
    """Into shared memory, once a tile: the fence of each chunk would wait for a load from global memory."""
    bias, colsum = vectors
    if epi.HAS_BIAS:
        smem.index(first).store(bias)
    if (epi.IN_PARTS > 0 and epi.CENTRED) or epi.HEAD_PARTS > 0:
        smem.index(first + 1).store(colsum)


@gluon.jit
def unpack_cos_sin(packed):
    """(cos, sin) from 16-bit fixed-point halves: u -> u / 32768 - 1, exact in fp32."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 t;
        prmt.b32 t, $2, 0x4B000000, 0x7410; fma.rn.f32 $0, t, 0f38000000, 0fC3808000;
        prmt.b32 t, $2, 0x4B000000, 0x7432; fma.rn.f32 $1, t, 0f38000000, 0fC3808000; }""",
        "=f,=f,r", [packed], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _rotate_pairs(x, chunk, BM: gl.constexpr):
    """(a, b) -> (a cos - b sin, b cos + a sin); `chunk` holds packed cos/sin [BM, 32], later the output."""
    a, b = x.reshape([BM, 32, 2]).split()
    cos, sin = unpack_cos_sin(reinterpret(chunk, gl.int32, [BM, 32], PACKED).load(a.type.layout))
    return gl.join(a * cos - b * sin, b * cos + a * sin).reshape([BM, 64])


@gluon.jit
def _normalise_head(x, epi, weight, col0):
    """clamp(x) / sqrt(mean of squares + eps) * weight of the head that is the chunk at `col0`."""
    if epi.HAS_CLIP:
        x = _clamp(x, epi, col0 // (epi.N // 3))
    rstd = gl.rsqrt(gl.sum(x * x, 1) * (1.0 / 64) + epi.EPS)
    return x * gl.expand_dims(rstd, 1) * gl.expand_dims(weight, 0)


@gluon.jit
def _add_taps(x, epi, rows, col0, L: gl.constexpr):
    cols = gl.expand_dims(col0 + gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    for i in gl.static_range(epi.TAPS):
        index = gl.load(epi.tap_index_ptr + rows * epi.TAPS + i).to(gl.int64)  # [BM]
        weight = gl.load(epi.tap_weight_ptr + rows * epi.TAPS + i)
        ptrs = epi.table_ptr + gl.expand_dims(index * epi.N, 1) + cols
        if epi.N % 64 == 0:
            row = gl.load(ptrs)
        else:
            row = gl.load(ptrs, mask=cols < epi.N, other=0.0)
        x += gl.expand_dims(weight, 1) * row.to(gl.float32)
    return x


@gluon.jit
def _tanh(x):
    """The hardware's tanh, off by up to 2^-11, which is less than bf16 rounds."""
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
def activate(x, ACT: gl.constexpr, dtype: gl.constexpr):
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
    if LIMIT is not None:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    if dtype == gl.bfloat16:
        half = 0.5 * gate
        return (half + half * _tanh(half)) * up
    else:
        return gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * up


@gluon.jit
def _clamp(x, epi, which):
    """x within bounds `which`; NaN stays."""
    x = gl.maximum(x, gl.load(epi.clip_ptr + 2 * which), propagate_nan=tl.PropagateNan.ALL)
    return gl.minimum(x, gl.load(epi.clip_ptr + 2 * which + 1), propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _gate_pairs_gelu(x, epi, BM: gl.constexpr, dtype: gl.constexpr):
    """[BM, 64] of (gate, up) pairs -> gelu_tanh(gate) up, [BM, 32], each clamped if there are bounds."""
    gate, up = x.reshape([BM, 32, 2]).split()
    if epi.HAS_CLIP:
        return _clamp(activate(_clamp(gate, epi, 0), "gelu_tanh", dtype) * _clamp(up, epi, 1), epi, 2)
    else:
        return activate(gate, "gelu_tanh", dtype) * up


@gluon.jit
def apply_norm(x, epi, bias, colsum, mean, rstd, ROWS: gl.constexpr):
    """Norm and bias on sums whose rows are along axis ROWS, and features along the other."""
    if epi.IN_PARTS > 0:
        if epi.CENTRED:
            x = x - gl.expand_dims(mean, 1 - ROWS) * gl.expand_dims(colsum, ROWS)
        x = x * gl.expand_dims(rstd, 1 - ROWS)
    if epi.HAS_BIAS:
        x = x + gl.expand_dims(bias, ROWS)
    return x


@gluon.jit
def finish_chunk(
    x, epi, vectors, mean, rstd, chunk, rows, col0, BM: gl.constexpr, L: gl.constexpr, dtype: gl.constexpr
):
    """The epilogue of the chunk at `col0`, up to rounding; `chunk` holds the residual or packed cos/sin.

    A gated activation returns half as many columns.
    """
    bias, colsum = vectors
    x = apply_norm(x, epi, bias, colsum, mean, rstd, 0)
    if epi.TAPS > 0:
        x = _add_taps(x, epi, rows, col0, L)
    if epi.HEAD_PARTS > 0:
        if col0 < epi.HEAD_PARTS * (epi.N // 3):
            x = _normalise_head(x, epi, colsum, col0)
    if epi.ROPE_COLS > 0:
        if col0 < epi.ROPE_COLS:
            x = gl.convert_layout(_rotate_pairs(x, chunk, BM), L, assert_trivial=True)
    if epi.ACT == "swiglu":
        return _gate_pairs(x, epi.LIMIT, BM, dtype)
    elif epi.ACT == "geglu_tanh":
        return _gate_pairs_gelu(x, epi, BM, dtype)
    else:
        x = activate(x, epi.ACT, dtype)
        if epi.HAS_RESIDUAL:
            x = x + chunk.load(L).to(gl.float32)
        return x


@gluon.jit
def round_pairs(x, dtype: gl.constexpr):
    """`x.to(dtype)`, two values an instruction. Where the result is read as fp32 again, LLVM would round one by one, an
    eighth as fast."""
    if dtype == gl.bfloat16:
        PAIR: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        y = gl.inline_asm_elementwise(PAIR, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        PAIR: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"  # type: ignore[no-redef]  # the compiler sees one branch
        y = gl.inline_asm_elementwise(PAIR, "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)
    return y


@gluon.jit
def moments_of(y):
    """(mean, M2) of each row of a chunk."""
    mean = gl.sum(y, 1) * (1.0 / 64)
    spread = y - gl.expand_dims(mean, 1)
    return mean, gl.sum(spread * spread, 1)


@gluon.jit
def store_moments(mean, m2, epi, rows, known, part):
    """Part `part` of the output's statistics."""
    PARTS: gl.constexpr = (epi.N + epi.OUT_WIDTH - 1) // epi.OUT_WIDTH
    ptrs = epi.stats_out_ptr + rows * (2 * PARTS) + 2 * part
    gl.store(ptrs, mean, mask=known)
    gl.store(ptrs + 1, m2, mask=known)


def unsupported_operands(e: Epilogue, x: torch.Tensor) -> str:
    """What neither Gluon GEMM takes, or ""."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"operands of 16 bits only, got {x.dtype}"
    if e.rope is not None and e.rope.packed is None:
        return "rotary factors as packed cos/sin, got none"
    if e.rope is not None and (e.rope.cols % CHUNK or e.residual is not None):
        return f"rotary columns of whole {CHUNK}s and no residual, got {e.rope.cols}"
    return ""


def extra_descriptor(e: Epilogue, rows: int, tile: int) -> Any:
    """Descriptor of the residual or packed cos/sin, `rows` rows at a time, in tiles of `tile` rows; None if neither."""
    if e.rope is not None and e.rope.packed is not None:
        return descriptor(e.rope.packed, rows, PACKED.value, tile)
    return None if e.residual is None else descriptor(e.residual, rows, tile=tile)


def descriptor(t: torch.Tensor, rows: int, layout: Any = LINES, tile: int = 1) -> Any:
    """A TMA descriptor of `t` for Gluon: blocks of `rows` rows, as wide as the swizzle of `layout`; `tile`: see
    `tma.rows_behind`."""
    block = [rows, layout.swizzle_byte_width // t.element_size()]
    return built_descriptor(t, [rows_behind(t, tile), t.shape[1]], t.stride(), block, layout)


def epilogue_constants(n: int, k: int, e: Epilogue, shared_k: bool) -> dict[str, Any]:
    """`Epilogue.constants`, with steps in place of K, and whether what a kernel has no None for is there.

    Args:
        shared_k: steps are an argument at run time: layers that differ in K alone share a kernel.
    """
    constants = e.constants(n, k)
    steps = -(-constants.pop("K") // CHUNK)
    return (
        {"STEPS": 0 if shared_k else steps}
        | constants
        | {
            "CENTRED": e.norm is not None and e.norm.colsum is not None,
            "HAS_CLIP": e.bounds is not None,
            "HAS_BIAS": e.bias is not None,
            "HAS_RESIDUAL": e.residual is not None,
            "OUT_WIDTH": 0 if e.stats is None else e.stats.width,
        }
    )
