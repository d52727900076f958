"""Loads a call's inputs into static buffers on the device, in one launch: its grid, unread by the host, and its pixels.

out[i] = (t, h, w)[i]   i < n, if every item has t, h, w >= 1 and h, w multiples of the merge size,
                        sum t h w = rows and sum t <= frames;  else 0.  Rows from n on are 0.

Kernels that read `out` then stay within buffers sized for `rows` patch tokens and `frames` frames, whatever the
caller's grid held. Pixels are rounded to nearest, as `Tensor.copy_` rounds.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fusedvit.kernels.launch import Loaded, launch

GRID_DTYPES = (torch.int64, torch.int32)
PIXEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROWS = 2**31 - 1  # also the largest stride of a grid
_CHUNK = 4096  # pixel values that a program copies, 32 a thread


@triton.jit
def _load_items(grid_ptr, i, num_items, rows, item_pitch, side_pitch, MERGE: tl.constexpr):
    """(t, h, w, tokens, number of invalid ones) of items `i`. Past the last item all are 0."""
    here = i < num_items
    ptrs = grid_ptr + i.to(tl.int64) * item_pitch
    step = side_pitch.to(tl.int64)
    t = tl.load(ptrs, mask=here, other=0).to(tl.int64)
    h = tl.load(ptrs + step, mask=here, other=0).to(tl.int64)
    w = tl.load(ptrs + 2 * step, mask=here, other=0).to(tl.int64)
    # Each side is at most `rows`, under 2^31, before it is multiplied: no product overflows.
    good = (t >= 1) & (t <= rows) & (h >= 1) & (h <= rows) & (w >= 1) & (w <= rows)
    good = good & (h % MERGE == 0) & (w % MERGE == 0)
    frame = tl.where(good, h * w, 0)
    tokens = tl.where(good & (frame <= rows), t, 0) * frame
    bad = tl.sum((here & ((tokens < 1) | (tokens > rows))).to(tl.int32), 0)
    return t, h, w, tokens, bad


@triton.jit
def _load_grid(
    grid_ptr,
    out_ptr,
    num_items,
    rows,
    item_pitch,
    side_pitch,
    FRAMES: tl.constexpr,
    MERGE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Checks and stores all items, in one program, as the sums are over all of them."""
    offs = tl.arange(0, BLOCK)
    invalid = 0
    total = tl.sum(offs.to(tl.int64) * 0, 0)
    frames = total
    for start in tl.range(0, ROOM, BLOCK):
        i = start + offs
        t, h, w, tokens, bad = _load_items(grid_ptr, i, num_items, rows, item_pitch, side_pitch, MERGE)
        invalid += bad
        within = tokens <= rows
        total += tl.sum(tl.where(within, tokens, 0), 0)
        frames += tl.sum(tl.where(within & (tokens > 0), t, 0), 0)
        tl.store(out_ptr + 3 * i, t.to(tl.int32), mask=i < ROOM)
        tl.store(out_ptr + 3 * i + 1, h.to(tl.int32), mask=i < ROOM)
        tl.store(out_ptr + 3 * i + 2, w.to(tl.int32), mask=i < ROOM)
    # The grid is read once: what was checked is what was stored, even if somebody writes to it meanwhile.
    tl.debug_barrier()
    refused = (invalid > 0) | (total != rows) | (frames > FRAMES)
    for start in tl.range(0, ROOM, BLOCK):
        i = start + offs
        zeros = offs * 0
        tl.store(out_ptr + 3 * i, zeros, mask=refused & (i < ROOM))
        tl.store(out_ptr + 3 * i + 1, zeros, mask=refused & (i < ROOM))
        tl.store(out_ptr + 3 * i + 2, zeros, mask=refused & (i < ROOM))


@triton.jit(
    do_not_specialize=["num_items", "rows", "item_pitch", "side_pitch", "length"],
    do_not_specialize_on_alignment=["grid_ptr"],
)
def _load_inputs_kernel(
    grid_ptr,  # [num_items, 3] int64 or int32
    pixels_ptr,  # [length, WIDTH] of any float; nothing where WIDTH is 0
    into_ptr,  # [length or more, WIDTH] of any float; nothing where WIDTH is 0
    out_ptr,  # [ROOM, 3] int32
    num_items,
    rows,
    item_pitch,
    side_pitch,
    length,
    FRAMES: tl.constexpr,
    MERGE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid == 0:
        _load_grid(grid_ptr, out_ptr, num_items, rows, item_pitch, side_pitch, FRAMES, MERGE, ROOM, BLOCK)
    elif WIDTH:
        offs = (pid - 1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        here = offs < length.to(tl.int64) * WIDTH
        x = tl.load(pixels_ptr + offs, mask=here)
        tl.store(into_ptr + offs, x.to(into_ptr.dtype.element_ty), mask=here)


def can_load(pixels: torch.Tensor, device: torch.device) -> bool:
    """Whether `load_inputs` can copy `pixels` `[length, width]` to `device`: dense, there, of no tensor subclass."""
    return (
        type(pixels) in (torch.Tensor, torch.nn.Parameter)
        and pixels.dtype in PIXEL_DTYPES
        and pixels.device == device
        and pixels.is_contiguous()
        and not pixels.is_neg()
        and pixels.data_ptr() % 16 == 0
    )


_loaded: dict[tuple[Any, ...], Loaded] = {}  # of launches with pixels, by what decides the code


def load_inputs(
    grid: torch.Tensor,
    rows: int,
    frames: int,
    merge: int,
    out: torch.Tensor,
    pixels: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fills all of `out` from `grid`, with zeros if anything in `grid` is wrong; one launch.

    Args:
        grid: `[n, 3]` of one of `GRID_DTYPES`, (t, h, w) in patches; any strides up to `MAX_ROWS`.
        rows: patch tokens that the call has, at most `MAX_ROWS`.
        frames: the most frames (attention sequences) of all items together.
        merge: what h and w are multiples of.
        out: `[room, 3]` int32, contiguous, `n <= room`.
        pixels: `[length, width]` for which `can_load` holds, copied whatever `grid` holds; None for none.
        into: `[length or more, width]` of any of `PIXEL_DTYPES`, contiguous, aligned to 16 bytes: where they go.
    """
    room = out.shape[0]
    assert grid.dtype in GRID_DTYPES and grid.shape[0] <= room and out.is_contiguous(), (
        f"expected at most {room} items of {GRID_DTYPES}, got {grid.shape[0]} of {grid.dtype}"
    )
    length, width = (0, 0) if pixels is None or into is None else pixels.shape
    scalars = (grid.shape[0], rows, *grid.stride(), length)
    programs = 1 - (-length * width // _CHUNK)
    if pixels is None or into is None or not grid.is_cuda:
        _launch(grid, pixels, into, out, programs, scalars, (frames, merge, room, width))
        return out
    # The GPU idles until this launch, so the key is shorter than that of `launch`.
    addresses = grid.data_ptr(), pixels.data_ptr(), into.data_ptr(), out.data_ptr()
    aligned = not (addresses[1] | addresses[2] | addresses[3]) % 16
    key = grid.dtype, pixels.dtype, into.dtype, frames, merge, room, width, out.device, aligned
    loaded = _loaded.get(key)
    if loaded is not None:
        loaded.launch(programs, (*addresses, *scalars))
        return out
    loaded = _launch(grid, pixels, into, out, programs, scalars, (frames, merge, room, width))
    if loaded is not None and aligned:
        _loaded[key] = loaded
    return out


def _launch(
    grid: torch.Tensor,
    pixels: torch.Tensor | None,
    into: torch.Tensor | None,
    out: torch.Tensor,
    programs: int,
    scalars: tuple[int, ...],
    fixed: tuple[int, int, int, int],
) -> Loaded | None:
    frames, merge, room, width = fixed
    block = min(max(32, 1 << (room - 1).bit_length()), 1024)  # Triton's own function for this takes 5 us
    constants = {"FRAMES": frames, "MERGE": merge, "ROOM": room, "BLOCK": block, "WIDTH": width, "CHUNK": _CHUNK}
    options = {"num_warps": 4 if block < 1024 else 8}
    return launch(_load_inputs_kernel, programs, (), (grid, pixels, into, out), constants, options, scalars)
