"""Copies a replay's outputs from static buffers to the caller's tensors, all in one launch.

to_hidden[r] = hidden[r]          r < rows
to_merged[p][m] = merged[p][m]    m < merged_rows, every plane p

Each plane is a tensor of its own on either side, so that the caller may keep one output, change it or free it without
the others. A launch takes four planes, as many as the largest released towers have; more take more launches.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedvit.kernels.launch import launch

_CHUNK = 4096  # values that a program copies, 32 a thread
PLANES = 4  # planes per launch


@triton.jit
def _copy_plane(from_ptr, to_ptr, offs, values, OUT: tl.constexpr, PITCH: tl.constexpr):
    if PITCH == OUT:
        x = tl.load(from_ptr + offs, mask=offs < values)
    else:
        x = tl.load(from_ptr + offs // OUT * PITCH + offs % OUT, mask=offs < values)
    tl.store(to_ptr + offs, x, mask=offs < values)


@triton.jit(do_not_specialize=["rows", "merged_rows"])
def _store_outputs_kernel(
    hidden_ptr,  # [rows or more, HIDDEN]
    merged0_ptr,  # [merged_rows or more, OUT], row stride PITCH; None for no such plane
    merged1_ptr,
    merged2_ptr,
    merged3_ptr,
    to_hidden_ptr,  # [rows, HIDDEN]
    to_merged0_ptr,  # [merged_rows, OUT]
    to_merged1_ptr,
    to_merged2_ptr,
    to_merged3_ptr,
    rows,
    merged_rows,
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
        if merged0_ptr is not None:
            if p == 0:
                _copy_plane(merged0_ptr, to_merged0_ptr, offs, merged_values, OUT, PITCH)
        if merged1_ptr is not None:
            if p == 1:
                _copy_plane(merged1_ptr, to_merged1_ptr, offs, merged_values, OUT, PITCH)
        if merged2_ptr is not None:
            if p == 2:
                _copy_plane(merged2_ptr, to_merged2_ptr, offs, merged_values, OUT, PITCH)
        if merged3_ptr is not None:
            if p == 3:
                _copy_plane(merged3_ptr, to_merged3_ptr, offs, merged_values, OUT, PITCH)


def store_outputs(
    hidden: torch.Tensor, merged: Sequence[torch.Tensor], to_hidden: torch.Tensor, to_merged: Sequence[torch.Tensor]
) -> None:
    """Copies the first rows of `hidden` and of each plane of `merged`; one launch for every `PLANES` planes.

    Args:
        hidden: `[rows or more, width]`, contiguous.
        merged: planes `[merged_rows or more, out]`, all with the same row stride of at least `out` elements.
        to_hidden: `[rows, width]`, contiguous.
        to_merged: as many planes `[merged_rows, out]`, contiguous.
    """
    rows, width = to_hidden.shape
    merged_rows, out = to_merged[0].shape if to_merged else (0, 1)
    pitch = merged[0].stride(0) if merged else out
    assert hidden.is_contiguous() and all([plane.stride() == (pitch, 1) for plane in merged]), (
        f"expected contiguous hidden and planes of equal rows, got strides {hidden.stride()} and "
        f"{[plane.stride() for plane in merged]}"
    )
    constants = {"HIDDEN": width, "OUT": out, "PITCH": pitch, "CHUNK": _CHUNK}
    for i in range(0, max(1, len(merged)), PLANES):
        planes, to = list(merged[i : i + PLANES]), list(to_merged[i : i + PLANES])
        none: list[torch.Tensor | None] = [None] * (PLANES - len(planes))
        programs = -(-rows * width // _CHUNK) + len(planes) * -(-merged_rows * out // _CHUNK)
        pointers = (hidden, *planes, *none, to_hidden, *to, *none)
        launch(_store_outputs_kernel, programs, (), pointers, constants, {"num_warps": 4}, (rows, merged_rows))
        rows = 0  # later launches copy only planes
