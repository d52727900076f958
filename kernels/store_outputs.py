"""Copies a replay's outputs from static buffers to the caller's tensors, all in one launch.

to_hidden[r] = hidden[r]         r < rows
to_merged[p, m] = merged[p, m]   m < merged_rows, every plane p
"""

import torch
import triton
import triton.language as tl

from fusedvit.kernels.launch import launch

_CHUNK = 4096  # values that a program copies, 32 a thread


@triton.jit(do_not_specialize=["rows", "merged_rows", "plane"])
def _store_outputs_kernel(
    hidden_ptr,  # [rows or more, HIDDEN]
    merged_ptr,  # [planes, plane, OUT], row stride PITCH
    to_hidden_ptr,  # [rows, HIDDEN]
    to_merged_ptr,  # [planes, merged_rows, OUT]
    rows,
    merged_rows,
    plane,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    PITCH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pid = tl.program_id(0)
    # Multiples of a row, as the compiler sees: masks are equal over the 16 bytes of a load, which stays one load.
    values, merged_values = rows.to(tl.int64) * HIDDEN, merged_rows.to(tl.int64) * OUT
    first = tl.cdiv(values, CHUNK).to(tl.int32)
    if pid < first:
        offs = pid.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(hidden_ptr + offs, mask=offs < values)
        tl.store(to_hidden_ptr + offs, x, mask=offs < values)
    else:
        each = tl.cdiv(merged_values, CHUNK).to(tl.int32)
        p = (pid - first) // each
        offs = (pid - first - p * each).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        from_ptr = merged_ptr + p * (plane.to(tl.int64) * PITCH)
        if PITCH == OUT:
            x = tl.load(from_ptr + offs, mask=offs < merged_values)
        else:
            x = tl.load(from_ptr + offs // OUT * PITCH + offs % OUT, mask=offs < merged_values)
        tl.store(to_merged_ptr + p * merged_values + offs, x, mask=offs < merged_values)


def store_outputs(hidden: torch.Tensor, merged: torch.Tensor, to_hidden: torch.Tensor, to_merged: torch.Tensor) -> None:
    """Copies the first rows of `hidden` and of each plane of `merged`; one launch.

    Args:
        hidden: `[rows or more, width]`, contiguous.
        merged: `[planes, merged_rows or more, out]`, rows `out` or more elements from each other.
        to_hidden: `[rows, width]`, contiguous.
        to_merged: `[planes, merged_rows, out]`, contiguous.
    """
    rows, width = to_hidden.shape
    planes, merged_rows, out = to_merged.shape
    distance, pitch, _ = merged.stride()
    assert hidden.is_contiguous() and distance % pitch == 0 and merged.stride(2) == 1, (
        f"expected contiguous hidden and planes of whole rows, got strides {hidden.stride()} and {merged.stride()}"
    )
    programs = -(-rows * width // _CHUNK) + planes * -(-merged_rows * out // _CHUNK)
    pointers = (hidden, merged, to_hidden, to_merged)
    constants = {"HIDDEN": width, "OUT": out, "PITCH": pitch, "CHUNK": _CHUNK}
    scalars = (rows, merged_rows, distance // pitch)
    launch(_store_outputs_kernel, programs, (), pointers, constants, {"num_warps": 4}, scalars)
