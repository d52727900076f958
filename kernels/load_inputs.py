"""Loads a call's inputs into static buffers on the device, in one launch: its grid, unread by the host, and its pixels.

out[i] = (t, h, w)[i]   i < n, if every item has t, h, w >= 1 and h, w multiples of the merge size,
                        least <= sum t h w <= rows and sum t <= frames;  else 0.  Rows from n on are 0.

`least` is `rows`, or 1 where the last of the rows may be padding.

Kernels that read `out` then stay within buffers sized for `rows` patch tokens and `frames` frames, whatever the
caller's grid held. Float pixels are rounded to nearest, as `Tensor.copy_` rounds. Bytes are centred:

into = (byte - 128) / 128, exact in every float dtype.

Padded images with positions of patches are first turned into a grid, and into pixel rows without padding:

    grid[b]          = (1, h, w) where the positions of image b are those of an image of h x w patches row by row from
                       the top left, and (-1, -1) from then on, h and w multiples of the merge size; else (0, 0, 0)
    out[first_b + r] = 2 (pixels[b, raster(r)] - 0.5)      r < h w, patches of merged tokens side by side

`first_b` is the number of patches of the images before b.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fusedvit.kernels.launch import Loaded, launch

GRID_DTYPES = (torch.int64, torch.int32)
PIXEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOADED_DTYPES = (*PIXEL_DTYPES, torch.uint8)
FLOATS, BYTES, STILL_BYTES = KINDS = range(3)  # of pixels; still: a row holds one of a patch's frames
CENTRE = 128  # of bytes, and half their range
POSITION_DTYPES = GRID_DTYPES
MAX_ROWS = 2**31 - 1  # also the largest stride of a grid
_CHUNK = 4096  # pixel values that a program copies, 32 a thread
_BLOCK = 1024  # positions of padded images at a time
_ROWS = 8  # pixel rows of padded images that a program copies


@triton.jit
def _load_side(ptrs, here, wide):
    """Numbers of 32 bits, or if `wide` of 64, as int64."""
    low = tl.load(ptrs, mask=here, other=0)
    high = tl.load(ptrs + 1, mask=here & (wide != 0), other=0)
    return tl.where(wide != 0, (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64), low)


@triton.jit
def _load_items(grid_ptr, i, num_items, rows, item_pitch, side_pitch, wide, MERGE: tl.constexpr):
    """(t, h, w, tokens, number of invalid ones) of items `i`. Past the last item all are 0."""
    here = i < num_items
    ptrs = grid_ptr + i.to(tl.int64) * item_pitch * (1 + wide)
    step = side_pitch.to(tl.int64) * (1 + wide)
    t = _load_side(ptrs, here, wide)
    h = _load_side(ptrs + step, here, wide)
    w = _load_side(ptrs + 2 * step, here, wide)
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
    counts_ptr,
    num_items,
    rows,
    item_pitch,
    side_pitch,
    kind,
    most_frames,
    room,
    wide,
    least,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Checks and stores all items, in one program, as the sums are over all of them."""
    offs = tl.arange(0, BLOCK)
    invalid = 0
    total = tl.sum(offs.to(tl.int64) * 0, 0)
    frames = total
    for start in tl.range(0, room, BLOCK):
        i = start + offs
        t, h, w, tokens, bad = _load_items(grid_ptr, i, num_items, rows, item_pitch, side_pitch, wide, MERGE)
        invalid += bad
        within = tokens <= rows
        total += tl.sum(tl.where(within, tokens, 0), 0)
        frames += tl.sum(tl.where(within & (tokens > 0), t, 0), 0)
        tl.store(out_ptr + 3 * i, t.to(tl.int32), mask=i < room)
        tl.store(out_ptr + 3 * i + 1, h.to(tl.int32), mask=i < room)
        tl.store(out_ptr + 3 * i + 2, w.to(tl.int32), mask=i < room)
    # The grid is read once: what was checked is what was stored, even if somebody writes to it meanwhile.
    tl.debug_barrier()
    refused = (invalid > 0) | (total < least) | (total > rows) | (frames > most_frames)
    for start in tl.range(0, room, BLOCK):
        i = start + offs
        zeros = offs * 0
        tl.store(out_ptr + 3 * i, zeros, mask=refused & (i < room))
        tl.store(out_ptr + 3 * i + 1, zeros, mask=refused & (i < room))
        tl.store(out_ptr + 3 * i + 2, zeros, mask=refused & (i < room))
    if counts_ptr is not None:
        each = tl.arange(0, 4)
        counts = tl.where(refused, 0, tl.where(each == kind, total.to(tl.int32), 0))
        tl.store(counts_ptr + 4 * each, counts, mask=each < 3)


@triton.jit
def _load_pixels(
    pixels_ptr,
    into_ptr,
    length,
    pid,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copies a chunk of values, to rows that may lie further apart; bytes are centred."""
    start = pid.to(tl.int64) * CHUNK
    offs = start + tl.arange(0, CHUNK)
    here = offs < length.to(tl.int64) * WIDTH
    x = tl.load(pixels_ptr + offs, mask=here)
    if pixels_ptr.dtype.element_ty == tl.uint8:
        x = (x.to(tl.float32) - 128.0) * 0.0078125
    if PITCH != WIDTH:  # GROUP values that begin at a multiple of GROUP are in one row
        cols = (start % WIDTH).to(tl.int32) + tl.arange(0, CHUNK)  # of the first row, and on into the next ones
        offs = start // WIDTH * PITCH + cols + (cols // WIDTH).to(tl.int64) * (PITCH - WIDTH)
        offs = tl.max_contiguous(tl.multiple_of(offs, GROUP), GROUP)
    tl.store(into_ptr + offs, x.to(into_ptr.dtype.element_ty), mask=here)


@triton.jit(
    do_not_specialize=[
        "num_items",
        "rows",
        "item_pitch",
        "side_pitch",
        "length",
        "kind",
        "most_frames",
        "room",
        "wide",
        "least",
    ],
    do_not_specialize_on_alignment=["grid_ptr"],
)
def _load_inputs_kernel(
    grid_ptr,  # [num_items, 3], words of int64 or int32
    pixels_ptr,  # [length, WIDTH] of any float or uint8; nothing where WIDTH is 0
    into_ptr,  # [length or more, WIDTH or more] of any float, rows PITCH apart; nothing where WIDTH is 0
    counts_ptr,  # [3, 4] int32 or None
    out_ptr,  # [room, 3] int32
    num_items,
    rows,
    item_pitch,
    side_pitch,
    length,
    kind,
    most_frames,
    room,
    wide,  # 1 where the grid has 64 bits, two words a number; else 0
    least,  # patch tokens of all items
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid == 0:
        _load_grid(
            grid_ptr, out_ptr, counts_ptr, num_items, rows, item_pitch, side_pitch, kind, most_frames, room,
            wide, least, MERGE, BLOCK,
        )  # fmt: skip
    elif WIDTH:
        _load_pixels(pixels_ptr, into_ptr, length, pid - 1, WIDTH, PITCH, GROUP, CHUNK)


def kind_of(pixels: torch.Tensor, width: int) -> int:
    """The kind, one of `KINDS`, of `pixels` `[…, values]` for patches of `width` values."""
    if pixels.dtype != torch.uint8:
        return FLOATS
    return BYTES if pixels.shape[-1] == width else STILL_BYTES


def centred(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as the encoder's input in `dtype`: `(byte - 128) / 128`."""
    return pixels.to(dtype).sub_(CENTRE).div_(CENTRE)


def can_load(pixels: torch.Tensor, device: torch.device) -> bool:
    """Whether `load_inputs` can copy `pixels` `[length, width]` to `device`: they must be dense, aligned, on `device`,
    no other tensor subclass than `Parameter`, and without PyTorch's lazy negation or zeros."""
    return (
        type(pixels) in (torch.Tensor, torch.nn.Parameter)
        and pixels.dtype in LOADED_DTYPES
        and pixels.device == device
        and pixels.is_contiguous()
        and not pixels.is_neg()
        and not pixels._is_zerotensor()
        and pixels.data_ptr() % 16 == 0
    )


_loaded: dict[tuple[Any, ...], Loaded] = {}  # kernels of launches with pixels, by what determines the code


def load_inputs(
    grid: torch.Tensor,
    rows: int,
    frames: int,
    merge: int,
    out: torch.Tensor,
    pixels: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    kind: int = FLOATS,
    padded: bool = False,
) -> torch.Tensor:
    """Fills all of `out` from `grid`, with zeros if anything in `grid` is wrong; one launch.

    Args:
        grid: `[n, 3]` of one of `GRID_DTYPES`, (t, h, w) in patches; any strides up to `MAX_ROWS`.
        rows: patch tokens of the call, at most `MAX_ROWS`.
        frames: the most frames (attention sequences) that all items together may have.
        merge: the merge size, of which h and w must be multiples.
        out: `[room, 3]` int32, contiguous, `n <= room`.
        pixels: `[length, width]` for which `can_load` is True; copied even if `grid` is wrong. None for none.
        into: `[length or more, width or more]` of any of `PIXEL_DTYPES`, aligned to 16 bytes: takes the pixels in its
            first columns.
        counts: `[3, 4]` int32: in column 0, row `kind` becomes the items' patch tokens and the other rows 0; all become
            0 if anything is wrong.
        kind: one of `KINDS`.
        padded: the items may have fewer patch tokens than `rows`; the remaining rows are padding.
    """
    room = out.shape[0]
    assert grid.dtype in GRID_DTYPES and grid.shape[0] <= room and out.is_contiguous(), (
        f"expected at most {room} items of {GRID_DTYPES}, got {grid.shape[0]} of {grid.dtype}"
    )
    length, width, pitch = (0, 0, 0) if pixels is None or into is None else (*pixels.shape, into.stride(0))
    wide, least = int(grid.dtype is torch.int64), min(1, rows) if padded else rows
    scalars = (grid.shape[0], rows, *grid.stride(), length, kind, frames, room, wide, least)
    programs = 1 - (-length * width // _CHUNK)
    fixed = merge, room, width, pitch
    if pixels is None or into is None or counts is None or not grid.is_cuda:
        _launch(grid, pixels, into, out, counts, programs, scalars, fixed)
        return out
    # The GPU idles until this launch, so its key is shorter than that of `launch`.
    addresses = grid.data_ptr(), pixels.data_ptr(), into.data_ptr(), counts.data_ptr(), out.data_ptr()
    aligned = not (addresses[1] | addresses[2] | addresses[3] | addresses[4]) % 16
    key = pixels.dtype, into.dtype, *fixed, out.device, aligned
    loaded = _loaded.get(key)
    if loaded is not None:
        loaded.launch(programs, (*addresses, *scalars))
        return out
    loaded = _launch(grid, pixels, into, out, counts, programs, scalars, fixed)
    if loaded is not None and aligned:
        _loaded[key] = loaded
    return out


def _launch(
    grid: torch.Tensor,
    pixels: torch.Tensor | None,
    into: torch.Tensor | None,
    out: torch.Tensor,
    counts: torch.Tensor | None,
    programs: int,
    scalars: tuple[int, ...],
    fixed: tuple[int, int, int, int],
) -> Loaded | None:
    merge, room, width, pitch = fixed
    block = min(max(32, 1 << (room - 1).bit_length()), 1024)  # Triton's own function for this takes 5 us
    common = math.gcd(width, pitch)
    constants = {"MERGE": merge, "BLOCK": block, "WIDTH": width, "PITCH": pitch}
    constants |= {"GROUP": min(common & -common, 16), "CHUNK": _CHUNK}
    options = {"num_warps": 4 if block < 1024 else 8}
    words = grid
    if grid.dtype == torch.int64:  # one kernel for both dtypes: it takes a pointer to 32-bit words
        words = torch.empty(0, dtype=torch.int32, device=grid.device)
        strides = [2 * pitch for pitch in grid.stride()]
        words.set_(grid.untyped_storage(), 2 * grid.storage_offset(), grid.shape, strides)
    return launch(_load_inputs_kernel, programs, (), (words, pixels, into, counts, out), constants, options, scalars)


# ── padded images ─────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _positions(positions_ptr, image, i, num_patches, image_pitch, patch_pitch, axis_pitch):
    """(x, y) of patches `i` of an image, -1 past the last."""
    ptrs = positions_ptr + image.to(tl.int64) * image_pitch + i.to(tl.int64) * patch_pitch
    here = i < num_patches
    x = tl.load(ptrs, mask=here, other=-1).to(tl.int64)
    return x, tl.load(ptrs + axis_pitch, mask=here, other=-1).to(tl.int64)


@triton.jit(
    do_not_specialize=["num_patches", "image_pitch", "patch_pitch", "axis_pitch"],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def _patch_grid_kernel(
    positions_ptr,  # [B, P, 2] int64 or int32
    out_ptr,  # [B, 3] int32
    num_patches,
    image_pitch,
    patch_pitch,
    axis_pitch,
    SIDE: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    most_x = tl.zeros((BLOCK,), tl.int64) - 1
    most_y = most_x
    for start in tl.range(0, num_patches, BLOCK):
        x, y = _positions(positions_ptr, image, start + lanes, num_patches, image_pitch, patch_pitch, axis_pitch)
        most_x, most_y = tl.maximum(most_x, x), tl.maximum(most_y, y)
    right, low = tl.max(most_x, 0), tl.max(most_y, 0)
    good = (right >= 0) & (low >= 0) & (right < SIDE) & (low < SIDE)
    w = tl.where(good, right + 1, MERGE).to(tl.int32)
    h = tl.where(good, low + 1, MERGE).to(tl.int32)
    good = good & (w % MERGE == 0) & (h % MERGE == 0) & (w.to(tl.int64) * h <= num_patches)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, num_patches, BLOCK):
        i = start + lanes
        x, y = _positions(positions_ptr, image, i, num_patches, image_pitch, patch_pitch, axis_pitch)
        there = i < w * h
        same = (x == tl.where(there, i % w, -1)) & (y == tl.where(there, i // w, -1))
        wrong += (same == 0).to(tl.int32)
    good = good & (tl.sum(wrong, 0) == 0)
    tl.store(out_ptr + 3 * image, good.to(tl.int32))
    tl.store(out_ptr + 3 * image + 1, tl.where(good, h, 0))
    tl.store(out_ptr + 3 * image + 2, tl.where(good, w, 0))


def patch_grid(positions: torch.Tensor, side: int, merge: int, out: torch.Tensor) -> torch.Tensor:
    """Fills `out` `[B, 3]` int32 with (t, h, w) of images, zeros for images whose positions form no such grid.

    Args:
        positions: `[B, P, 2]` of one of `POSITION_DTYPES`, (x, y) of each patch.
        side: exclusive upper bound of positions.
        merge: patches on a side of a merged token.
    """
    images, patches, _ = positions.shape
    if images:
        constants = {"SIDE": side, "MERGE": merge, "BLOCK": _BLOCK}
        scalars = (patches, *positions.stride())
        launch(_patch_grid_kernel, images, (), (positions, out), constants, {"num_warps": 4}, scalars)
    return out


@triton.jit(do_not_specialize=["num_patches"])
def _load_patches_kernel(
    pixels_ptr,  # [B * P, WIDTH]
    grid_ptr,  # [B, 3] int32
    out_ptr,  # [B * P, WIDTH]
    num_patches,
    WIDTH: tl.constexpr,
    MERGE: tl.constexpr,
    IMAGES: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    chunks = tl.cdiv(num_patches, ROWS)
    image = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    h = tl.load(grid_ptr + 3 * image + 1)
    w = tl.load(grid_ptr + 3 * image + 2)
    if chunk * ROWS < h * w:
        first = tl.sum(tl.zeros([IMAGES], tl.int64), 0)
        for start in tl.range(0, image, IMAGES):
            i = start + tl.arange(0, IMAGES)
            before = i < image
            rows = tl.load(grid_ptr + 3 * i + 1, mask=before, other=0).to(tl.int64)
            first += tl.sum(rows * tl.load(grid_ptr + 3 * i + 2, mask=before, other=0), 0)
        r = chunk * ROWS + tl.arange(0, ROWS)
        block, inside = r // (MERGE * MERGE), r % (MERGE * MERGE)
        row = block // (w // MERGE) * MERGE + inside // MERGE
        col = block % (w // MERGE) * MERGE + inside % MERGE
        source = image.to(tl.int64) * num_patches + row * w + col
        cols = tl.arange(0, COLS)
        mask = (r < h * w)[:, None] & (cols < WIDTH)[None, :]
        x = tl.load(pixels_ptr + source[:, None] * WIDTH + cols[None, :], mask=mask, other=0.5)
        x = 2.0 * (x.to(tl.float32) - 0.5).to(x.dtype).to(tl.float32)  # rounded as PyTorch rounds each step
        ptrs = out_ptr + (first + r)[:, None] * WIDTH + cols[None, :]
        tl.store(ptrs, x.to(out_ptr.dtype.element_ty), mask=mask)


def load_patches(pixels: torch.Tensor, grid: torch.Tensor, merge: int, out: torch.Tensor) -> torch.Tensor:
    """Fills the first rows of `out` `[B * P, width]` from `pixels` `[B, P, width]`, both contiguous floats.

    Args:
        grid: `[B, 3]` int32, as `patch_grid` fills it: images whose entry is zeros have no rows.
        merge: patches on a side of a merged token.
    """
    images, patches, width = pixels.shape
    if images and patches:
        cols = triton.next_power_of_2(width)
        constants = {"WIDTH": width, "MERGE": merge, "IMAGES": 128, "COLS": cols, "ROWS": _ROWS}
        programs = images * triton.cdiv(patches, _ROWS)
        launch(_load_patches_kernel, programs, (), (pixels, grid, out), constants, {"num_warps": 8}, (patches,))
    return out
