"""Norms that cannot be folded into a GEMM, and the row order of towers with attention windows.

    layer_norm     : y   = (x - mean) / sqrt(var + eps) * weight + bias            LayerNorm
                     y   = x / sqrt(mean of squares + eps) * weight                RMSNorm (no bias)
                     y   = activation(y)
                     y  += sum_i tap_weight[t, i] table[tap_index[t, i]]           learned positions, interpolated
                     out = y rounded, its row groups where `order` says; moments of the rounded rows in one part
    head_norm_rope : y      = clamp(x) / sqrt(mean of squares + eps) * weight      each head of q, of k, perhaps of v
                     (a, b) = y[2i:2i+2] -> (a cos - b sin, b cos + a sin)         not of v; in place
    residual_norm  : h     += clamp(y) / sqrt(mean of squares + eps) * weight      in place, rounded
                     out    = clamp(h / sqrt(mean of squares + eps) * next)        the norm of the next layer
    pool_rows      : y      = mean of u rows, rounded, times sqrt(N)
                     out    = (y - bias) * scale
    gather_rows    : out[u i + j] = x[u order[i] + j],   j < u                     groups of u rows

All sums are fp32. A norm needs its own kernel before tokens are merged, before an activation, before positions are
added, before the residual stream, and on the heads of q and k.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fusedvit.kernels.epilogue import RowStats, Taps, activate, add_taps, clamp, store_moments
from fusedvit.kernels.launch import launch


def _launch_rows(
    kernel: Any, rows: int, block_m: int, max_programs: int, pointers: tuple[Any, ...], constants: dict[str, Any],
    num_warps: int,
) -> None:  # fmt: skip
    """Launches a kernel that walks over `rows` rows in blocks of `block_m`; launches nothing for 0 rows."""
    programs = min(max_programs, triton.cdiv(rows, block_m))
    if programs:
        blocks = {"BLOCK_M": block_m, "BLOCK_N": triton.next_power_of_2(constants["N"])}
        launch(kernel, programs, (), pointers, constants | blocks, {"num_warps": num_warps})


# ── layer_norm ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class After:
    """The steps after a norm.

    Attributes:
        activation: "none" or "gelu".
        taps: positions to add.
        stats: takes the moments of the rounded rows, one part per row; not with `order`.
        order: `[T / unit]` int32: the i-th group of `unit` rows is written as group `order[i]`.
        unit: rows of a group.

    Raises:
        ValueError: another activation; statistics together with an order.
    """

    activation: str = "none"
    taps: Taps | None = None
    stats: RowStats | None = None
    order: torch.Tensor | None = None
    unit: int = 1

    def __post_init__(self) -> None:
        if self.activation not in ("none", "gelu"):
            raise ValueError(f"activation must be 'none' or 'gelu', got {self.activation!r}")
        if self.stats is not None and self.order is not None:
            raise ValueError("expected statistics or an order, got both")


NOTHING = After()
_NO_TAPS = Taps()


@triton.jit
def _layer_norm_kernel(
    x_ptr,  # [T, N]
    weight_ptr,  # [N]
    bias_ptr,  # [N]; None for an RMSNorm
    table_ptr,  # [positions, N] or None
    tap_index_ptr,  # [T, TAPS] int32
    tap_weight_ptr,  # [T, TAPS] fp32
    order_ptr,  # [T / UNIT] int32 or None
    stats_ptr,  # [T, 1, 2] fp32 or None
    out_ptr,  # [T, N]
    num_rows_ptr,  # [1] int32
    N: tl.constexpr,
    EPS: tl.constexpr,
    ACT: tl.constexpr,
    TAPS: tl.constexpr,
    UNIT: tl.constexpr,
    X_PITCH: tl.constexpr,
    OUT_PITCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_rows = tl.load(num_rows_ptr)
    cols = tl.arange(0, BLOCK_N)
    mask_n = cols < N
    weight = tl.load(weight_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = rows < num_rows
        mask = mask_m[:, None] & mask_n[None, :]
        x = tl.load(x_ptr + rows[:, None] * X_PITCH + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            mean = tl.div_rn(tl.sum(x, 1), N * 1.0)  # once a row: exact division and root cost nothing
            x = tl.where(mask_n[None, :], x - mean[:, None], 0.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), N * 1.0) + EPS))
        y = x * rstd[:, None] * weight[None, :]
        if bias_ptr is not None:
            y += bias[None, :]
        y = activate(y, ACT)
        if table_ptr is not None:
            y = add_taps(y, table_ptr, tap_index_ptr, tap_weight_ptr, rows, mask_m, cols, mask_n, N, TAPS)

        out = y.to(out_ptr.dtype.element_ty)
        if stats_ptr is not None:
            store_moments(out.to(tl.float32), stats_ptr, rows, mask_m, mask_n, 0, N, 1)
        if order_ptr is not None:
            rows = tl.load(order_ptr + rows // UNIT, mask=mask_m, other=0).to(tl.int64) * UNIT + rows % UNIT
        tl.store(out_ptr + rows[:, None] * OUT_PITCH + cols[None, :], out, mask=mask)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    max_programs: int,
    after: After = NOTHING,
) -> torch.Tensor:
    """Normalises the first `num_rows` rows of `x` `[T, N]` into `out` `[T, N]`, which may be `x` unless `order` is set.

    Args:
        weight: `[N]`.
        bias: `[N]`; None for an RMSNorm.
        num_rows: `[1]` int32 on the device, the true T.
        eps: added to the variance, or to the mean square.
        max_programs: bound of the persistent grid.
        after: the steps after the norm.
    """
    (rows, n), taps = x.shape, after.taps or _NO_TAPS
    assert x.stride(1) == out.stride(1) == 1 and out.shape == x.shape, (
        f"expected equal shapes, got {x.shape}, {out.shape}"
    )
    assert after.stats is None or after.stats.width >= n, f"expected one part of {n} columns, got {after.stats.width}"
    stats = None if after.stats is None else after.stats.partials
    pointers = (x, weight, bias, taps.table, taps.index, taps.weight, after.order, stats, out, num_rows)
    constants = {
        "N": n,
        "EPS": eps,
        "ACT": after.activation,
        "TAPS": 0 if taps.index is None else taps.index.shape[1],
        "UNIT": after.unit,
        "X_PITCH": x.stride(0),
        "OUT_PITCH": out.stride(0),
    }
    _launch_rows(_layer_norm_kernel, rows, 4 if n <= 2048 else 2, max_programs, pointers, constants, 8)
    return out


# ── head_norm_rope ────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _load_pairs(ptrs, bounds_ptr, mask, PAIRS: tl.constexpr):
    """(first, second) of each pair of neighbours of heads [ROWS, HEADS, 2 PAIRS], fp32, clamped if there are bounds;
    zeros beyond the mask."""
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if bounds_ptr is not None:
        x = tl.where(mask, clamp(x, tl.load(bounds_ptr), tl.load(bounds_ptr + 1)), 0.0)
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], PAIRS, 2]))


@triton.jit
def _store_pairs(ptrs, a, b, rstd, weight_ptr, rope_ptr, p, row, mask, turned, HALF: tl.constexpr):
    """Stores pairs `p` of heads, [ROWS, HEADS, PAIRS] each half, normalised, and turned where `turned` [ROWS, 1]."""
    inside = p < HALF
    a *= rstd * tl.load(weight_ptr + 2 * p, mask=inside, other=0.0).to(tl.float32)[None, None, :]
    b *= rstd * tl.load(weight_ptr + 2 * p + 1, mask=inside, other=0.0).to(tl.float32)[None, None, :]
    angles = rope_ptr + row[:, None] * (2 * HALF) + p[None, :]  # of a row, for all its heads
    cos = tl.load(angles, mask=turned & inside[None, :], other=1.0)[:, None, :]
    sin = tl.load(angles + HALF, mask=turned & inside[None, :], other=0.0)[:, None, :]
    out = tl.join(a * cos - b * sin, b * cos + a * sin)
    out = tl.reshape(out, [out.shape[0], out.shape[1], 2 * out.shape[2]])
    tl.store(ptrs, out.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _head_norm_rope_kernel(
    qkv_ptr,  # [T, 3 * HEADS * HEAD_DIM]
    weight_ptr,  # [PARTS, HEAD_DIM], q's, k's and v's
    rope_ptr,  # [T, 2, HEAD_DIM / 2] fp32: cos, sin
    clip_ptr,  # [PARTS, 2] fp32 or None
    num_rows_ptr,  # [1] int32
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EPS: tl.constexpr,
    PITCH: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    num_rows = tl.load(num_rows_ptr)
    h = tl.arange(0, HEAD_BLOCK)
    p = tl.arange(0, PAIRS)
    cols = tl.arange(0, 2 * PAIRS)[None, None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * PARTS, tl.num_programs(0)):
        part = block % PARTS  # all heads of q, of k or of v
        row = block // PARTS * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < num_rows)[:, None, None] & (h < HEADS)[None, :, None]
        turned = ((row < num_rows) & (part < 2))[:, None]
        heads = qkv_ptr + row[:, None, None] * PITCH + ((part * HEADS + h).to(tl.int64) * HEAD_DIM)[None, :, None]
        weight = weight_ptr + part * HEAD_DIM
        bounds = clip_ptr
        if clip_ptr is not None:
            bounds = clip_ptr + 2 * part
        a, b = _load_pairs(heads + cols, bounds, mask, PAIRS)
        squares = tl.sum(a * a + b * b, 2)
        if REST > 0:  # of a head of 72, 4 pairs: a power of two of them and these, so that few lanes idle
            rest = 2 * PAIRS + tl.arange(0, 2 * REST)[None, None, :]
            inside = mask & (rest < HEAD_DIM)
            c, d = _load_pairs(heads + rest, bounds, inside, REST)
            squares += tl.sum(c * c + d * d, 2)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, HEAD_DIM * 1.0) + EPS))[:, :, None]
        _store_pairs(heads + cols, a, b, rstd, weight, rope_ptr, p, row, mask, turned, HALF)
        if REST > 0:
            pairs = PAIRS + tl.arange(0, REST)
            _store_pairs(heads + rest, c, d, rstd, weight, rope_ptr, pairs, row, inside, turned, HALF)


def head_norm_rope(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    rope: torch.Tensor,
    num_rows: torch.Tensor,
    heads: int,
    eps: float,
    max_programs: int,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalises and rotates q and k of the first `num_rows` rows of `qkv` `[T, 3 * heads * head_dim]`, in place.

    Args:
        weight: `[2, head_dim]`, contiguous: the weights of q's norm and k's; `[3, head_dim]` if v is normalised, too.
        rope: `[T, 2, head_dim / 2]` fp32, cos and sin of each pair's angle.
        num_rows: `[1]` int32 on the device, the true T.
        heads: of q, and of k.
        max_programs: an eighth of the bound of the persistent grid, whose programs are smaller than other kernels'.
        clip: `[2 or 3, 2]` fp32, contiguous: least and largest value of q, k and v before they are normalised.
    """
    parts, head_dim = weight.shape
    assert qkv.stride(1) == 1 and qkv.shape[1] == 3 * heads * head_dim, f"qkv {qkv.shape}, {heads} heads of {head_dim}"
    half, block = head_dim // 2, triton.next_power_of_2(heads)
    pairs = 1 << (half.bit_length() - 1)
    rows = max(1, 1024 // (block * pairs))
    programs = min(8 * max_programs, triton.cdiv(qkv.shape[0], rows) * parts)
    if programs:
        constants = {
            "PARTS": parts,
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "EPS": eps,
            "PITCH": qkv.stride(0),
            "ROWS": rows,
            "HEAD_BLOCK": block,
            "PAIRS": pairs,
            "REST": 0 if half == pairs else triton.next_power_of_2(half - pairs),
        }
        launch(_head_norm_rope_kernel, programs, (), (qkv, weight, rope, clip, num_rows), constants, {"num_warps": 2})
    return qkv


# ── residual_norm ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class NextNorm:
    """The RMSNorm that reads the residual stream next.

    Attributes:
        weight: `[N]`.
        out: `[T, N]`, takes the norm's output; may be the tensor that was added.
        clip: `[2]` fp32, least and largest value of the output; None for no clamp.
        pdl: the next launch may begin before this one has ended; it waits before it reads `out`.
    """

    weight: torch.Tensor
    out: torch.Tensor
    clip: torch.Tensor | None = None
    pdl: bool = False


@triton.jit
def _rms_norm(x, weight, EPS: tl.constexpr, N: tl.constexpr):
    """Rows of x [BLOCK_M, BLOCK_N], zeros past the last column."""
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), N * 1.0) + EPS))
    return x * rstd[:, None] * weight[None, :]


@triton.jit
def _residual_norm_kernel(
    y_ptr,  # [T, N]; None: nothing is added
    weight_ptr,  # [N]
    hidden_ptr,  # [T, N] contiguous
    next_ptr,  # [N]; None: no norm follows
    out_ptr,  # [T, N]
    clip_y_ptr,  # [2] fp32 or None
    clip_out_ptr,  # [2] fp32 or None
    num_rows_ptr,  # [1] int32
    N: tl.constexpr,
    EPS: tl.constexpr,
    Y_PITCH: tl.constexpr,
    OUT_PITCH: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    num_rows = tl.load(num_rows_ptr)
    cols = tl.arange(0, BLOCK_N)
    mask_n = cols < N
    if y_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)
    if next_ptr is not None:
        following = tl.load(next_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < num_rows)[:, None] & mask_n[None, :]
        hidden = tl.load(hidden_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if y_ptr is not None:
            y = tl.load(y_ptr + rows[:, None] * Y_PITCH + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            if clip_y_ptr is not None:
                y = tl.where(mask, clamp(y, tl.load(clip_y_ptr), tl.load(clip_y_ptr + 1)), 0.0)
            rounded = (hidden + _rms_norm(y, weight, EPS, N)).to(hidden_ptr.dtype.element_ty)
            tl.store(hidden_ptr + rows[:, None] * N + cols[None, :], rounded, mask=mask)
            hidden = rounded.to(tl.float32)
        if next_ptr is not None:
            out = _rms_norm(hidden, following, EPS, N)
            if clip_out_ptr is not None:
                out = clamp(out, tl.load(clip_out_ptr), tl.load(clip_out_ptr + 1))
            ptrs = out_ptr + rows[:, None] * OUT_PITCH + cols[None, :]
            tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def residual_norm(
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    hidden: torch.Tensor,
    num_rows: torch.Tensor,
    eps: float,
    max_programs: int,
    following: NextNorm | None = None,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds the RMSNorm of `y` to the first `num_rows` rows of `hidden` `[T, N]`, in place, and applies the next norm.

    Args:
        y: `[T, N]`; None to add nothing.
        weight: `[N]` of the norm of y; None with y.
        num_rows: `[1]` int32 on the device, the true T.
        eps: of both norms, added to the mean square.
        max_programs: a quarter of the bound of the persistent grid, whose programs are smaller than other kernels'.
        following: the next norm; None for none.
        clip: `[2]` fp32, least and largest value of y before its norm; None for no clamp.
    """
    rows, n = hidden.shape
    out = None if following is None else following.out
    shapes = [t.shape for t in (y, out) if t is not None and (t.shape != hidden.shape or t.stride(1) != 1)]
    assert hidden.is_contiguous() and not shapes, f"expected rows of [{rows}, {n}], got {shapes}"
    weights = weight, hidden, None if following is None else following.weight
    pointers = (y, *weights, out, clip, None if following is None else following.clip, num_rows)
    pitches = {"Y_PITCH": 0 if y is None else y.stride(0), "OUT_PITCH": 0 if out is None else out.stride(0)}
    pdl = following is not None and following.pdl and not triton.knobs.runtime.interpret
    constants = {"N": n, "EPS": eps, **pitches, "PDL": pdl}
    warps = max(1, triton.next_power_of_2(n) // 1024)  # as many as a row needs: sums within a warp are the fastest
    _launch_rows(_residual_norm_kernel, rows, 1, 4 * max_programs, pointers, constants, warps)
    return hidden


# ── pool_rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _pool_rows_kernel(
    x_ptr,  # [T, N] contiguous
    bias_ptr,  # [N] or None
    scale_ptr,  # [N]; None with the bias
    out_ptr,  # [T / UNIT, N]
    num_rows_ptr,  # [1] int32: of out
    N: tl.constexpr,
    UNIT: tl.constexpr,
    FACTOR: tl.constexpr,
    OUT_PITCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_rows = tl.load(num_rows_ptr)
    cols = tl.arange(0, BLOCK_N)
    mask_n = cols < N
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < num_rows)[:, None] & mask_n[None, :]
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i in tl.static_range(UNIT):
            ptrs = x_ptr + (rows * UNIT + i)[:, None] * N + cols[None, :]
            y += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        y = (y / UNIT).to(x_ptr.dtype.element_ty).to(tl.float32) * FACTOR
        if bias_ptr is not None:
            y -= tl.load(bias_ptr + cols, mask=mask_n, other=0.0)[None, :]
            y *= tl.load(scale_ptr + cols, mask=mask_n, other=0.0)[None, :]
        tl.store(out_ptr + rows[:, None] * OUT_PITCH + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def pool_rows(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    unit: int,
    max_programs: int,
) -> torch.Tensor:
    """Fills the first `num_rows` rows of `out` `[T / unit, N]` with standardised means of `unit` rows of `x` `[T, N]`.

    Args:
        bias, scale: `[N]` fp32; None for no standardisation.
        num_rows: `[1]` int32 on the device, of `out`.
        max_programs: bound of the persistent grid.
    """
    rows, n = out.shape
    assert x.is_contiguous() and x.shape == (rows * unit, n), f"expected [{rows * unit}, {n}], got {tuple(x.shape)}"
    pointers = (x, bias, scale, out, num_rows)
    constants = {"N": n, "UNIT": unit, "FACTOR": n**0.5, "OUT_PITCH": out.stride(0)}
    _launch_rows(_pool_rows_kernel, rows, 4 if n <= 1024 else 2, max_programs, pointers, constants, 8)
    return out


# ── gather_rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _gather_rows_kernel(
    x_ptr,  # [T, N]
    order_ptr,  # [T / UNIT] int32
    out_ptr,  # [T, N]
    num_rows_ptr,  # [1] int32
    N: tl.constexpr,
    UNIT: tl.constexpr,
    X_PITCH: tl.constexpr,
    OUT_PITCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_rows = tl.load(num_rows_ptr)
    cols = tl.arange(0, BLOCK_N)
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = rows < num_rows
        source = tl.load(order_ptr + rows // UNIT, mask=mask_m, other=0).to(tl.int64) * UNIT + rows % UNIT
        mask = mask_m[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + source[:, None] * X_PITCH + cols[None, :], mask=mask)
        tl.store(out_ptr + rows[:, None] * OUT_PITCH + cols[None, :], x, mask=mask)


def gather_rows(
    x: torch.Tensor, order: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor, unit: int, max_programs: int
) -> torch.Tensor:
    """Fills the first `num_rows` rows of `out` `[T, N]` from `x` `[T, N]`.

    Args:
        order: `[T / unit]` int32: group i of `unit` rows of `out` is group `order[i]` of x.
        num_rows: `[1]` int32 on the device, a multiple of `unit`.
        max_programs: bound of the persistent grid.
    """
    assert x.stride(1) == out.stride(1) == 1 and out.shape == x.shape, (
        f"expected equal shapes, got {x.shape}, {out.shape}"
    )
    constants = {"N": x.shape[1], "UNIT": unit, "X_PITCH": x.stride(0), "OUT_PITCH": out.stride(0)}
    _launch_rows(_gather_rows_kernel, x.shape[0], 4, max_programs, (x, order, out, num_rows), constants, 4)
    return out
