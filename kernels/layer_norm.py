"""Norm of whole rows, where it cannot be folded into the next product: before tokens are put side by side, before an
activation, before positions are added.

    y   = (x - mean) / sqrt(var + eps) * weight + bias        LayerNorm
    y   = x / sqrt(mean of squares + eps) * weight            RMSNorm (no bias)
    y   = activation(y)
    y  += sum_i tap_weight[t, i] table[tap_index[t, i]]       learned positions, interpolated
    out = y rounded, its row groups put where `order` says; moments of the rounded rows in one part (row_stats.py)

over the last axis, in fp32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fusedvit.kernels.epilogue import Taps
from fusedvit.kernels.linear import _activate, _add_taps
from fusedvit.kernels.row_stats import RowStats, _store_moments

_NO_TAPS = Taps()


@dataclass(frozen=True)
class After:
    """What follows a norm.

    Attributes:
        activation: "none" or "gelu".
        taps: positions to add.
        stats: where moments of the rounded rows go, a part a row; not with `order`.
        order: `[T / unit]` int32: the i-th group of `unit` rows is written as group `order[i]`.
        unit: rows of a group.
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
            raise ValueError("statistics are of rows in their own order")


NOTHING = After()


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
        y = _activate(y, ACT)
        if table_ptr is not None:
            y = _add_taps(y, table_ptr, tap_index_ptr, tap_weight_ptr, rows, mask_m, cols, mask_n, N, TAPS)

        out = y.to(out_ptr.dtype.element_ty)
        if stats_ptr is not None:
            _store_moments(out.to(tl.float32), stats_ptr, rows, mask_m, mask_n, 0, N, 1)
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
    """Normalises the first `num_rows` rows of `x` `[T, N]` into `out` `[T, N]`, `x` itself or, with `order`, another.

    Args:
        weight: `[N]`.
        bias: `[N]`; None makes it an RMSNorm.
        num_rows: `[1]` int32 on the device.
        max_programs: bound of the persistent grid.
        after: what follows.
    """
    (rows, n), taps = x.shape, after.taps or _NO_TAPS
    assert x.stride(1) == out.stride(1) == 1 and out.shape == x.shape, "x and out must be rows of one shape"
    assert after.stats is None or after.stats.width >= n, "statistics of whole rows are one part"
    block_m = 4 if n <= 2048 else 2
    programs = min(max_programs, triton.cdiv(rows, block_m))
    if programs:
        _layer_norm_kernel[(programs,)](
            x,
            weight,
            bias,
            taps.table,
            taps.index,
            taps.weight,
            after.order,
            None if after.stats is None else after.stats.partials,
            out,
            num_rows,
            N=n,
            EPS=eps,
            ACT=after.activation,
            TAPS=0 if taps.index is None else taps.index.shape[1],
            UNIT=after.unit,
            X_PITCH=x.stride(0),
            OUT_PITCH=out.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=triton.next_power_of_2(n),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return out
