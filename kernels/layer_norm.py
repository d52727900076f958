"""LayerNorm of rows, for the one place where it cannot be folded: the merger, whose rows are four normalised rows.

    out = (x - mean) / sqrt(var + eps) * weight + bias

over the last axis, in fp32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _layer_norm_kernel(
    x_ptr,  # [T, N]
    weight_ptr,  # [N]
    bias_ptr,  # [N]
    out_ptr,  # [T, N]
    num_rows_ptr,  # [1] int32
    N: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_rows = tl.load(num_rows_ptr)
    cols = tl.arange(0, BLOCK_N)
    mask_n = cols < N
    weight = tl.load(weight_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < num_rows)[:, None] & mask_n[None, :]
        offs = rows[:, None] * N + cols[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        mean = tl.div_rn(tl.sum(x, 1), N * 1.0)  # once a row: exact division and root cost nothing
        centred = tl.where(mask_n[None, :], x - mean[:, None], 0.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(centred * centred, 1), N * 1.0) + EPS))
        y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(out_ptr + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    max_programs: int,
) -> torch.Tensor:
    """Normalises the first `num_rows` rows of `x` `[T, N]` (contiguous) into `out` `[T, N]` (contiguous).

    Args:
        weight: `[N]`.
        bias: `[N]`.
        num_rows: `[1]` int32 on the device.
        max_programs: bound of the persistent grid.
    """
    assert x.is_contiguous() and out.is_contiguous(), "x and out must be contiguous"
    block_m = 4
    programs = min(max_programs, triton.cdiv(x.shape[0], block_m))
    if programs:
        _layer_norm_kernel[(programs,)](
            x,
            weight,
            bias,
            out,
            num_rows,
            N=x.shape[1],
            EPS=eps,
            BLOCK_M=block_m,
            BLOCK_N=triton.next_power_of_2(x.shape[1]),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return out
