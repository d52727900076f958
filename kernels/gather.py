"""Rows of a table put in another order, in groups.

out[u i + j] = x[u order[i] + j]        j < u
"""

import torch
import triton
import triton.language as tl


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
        there = tl.load(order_ptr + rows // UNIT, mask=mask_m, other=0).to(tl.int64) * UNIT + rows % UNIT
        mask = mask_m[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + there[:, None] * X_PITCH + cols[None, :], mask=mask)
        tl.store(out_ptr + rows[:, None] * OUT_PITCH + cols[None, :], x, mask=mask)


def gather_rows(
    x: torch.Tensor, order: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor, unit: int, max_programs: int
) -> torch.Tensor:
    """Fills the first `num_rows` rows of `out` `[T, N]` from `x` `[T, N]`.

    Args:
        order: `[T / unit]` int32, the group of x that each group of `unit` rows of `out` is.
        num_rows: `[1]` int32 on the device, a multiple of `unit`.
        max_programs: bound of the persistent grid.
    """
    assert x.stride(1) == out.stride(1) == 1 and out.shape == x.shape, "x and out must be rows of one shape"
    block_m = 4
    programs = min(max_programs, triton.cdiv(x.shape[0], block_m))
    if programs:
        _gather_rows_kernel[(programs,)](
            x,
            order,
            out,
            num_rows,
            N=x.shape[1],
            UNIT=unit,
            X_PITCH=x.stride(0),
            OUT_PITCH=out.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=triton.next_power_of_2(x.shape[1]),
            num_warps=4,
        )
    return out
