"""Images resized and cut into the rows of patches that a tower takes, as bytes, in two launches.

A pass along one axis, on bytes, with weights in fixed point and an int32 sum (`bits` fraction bits):

    out[i] = clip((sum_t weights[t, i] * in[first[i] + t] + 2^(bits - 1)) >> bits, 0, 255)

Pillow and torch's CPU code resize by two such passes with a rounding to bytes between them, so integers give their
bytes exactly. The second pass writes rows of patches: `[t, h / m, w / m, m, m]` patches of `[C, T, p, p]` pixels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fusedvit.kernels.launch import launch

_BLOCK_Y, _BLOCK_X = 4, 128


@dataclass(frozen=True)
class Taps:
    """The input pixels and weights that a pass sums for every output pixel.

    Attributes:
        first: `[n]` int32, the first input pixel of each output pixel.
        weights: `[taps, n]` int32 with `bits` fraction bits; 0 for unused taps.
        bits: fraction bits, at least 1.
    """

    first: torch.Tensor
    weights: torch.Tensor
    bits: int

    @property
    def size(self) -> int:
        """Output pixels."""
        return self.first.shape[0]


@dataclass(frozen=True)
class PatchLayout:
    """Pixels on a side of a patch, patches on a side of a merged token, frames of a patch."""

    patch: int
    merge: int
    temporal: int


@triton.jit(
    do_not_specialize=[
        "programs_y",
        "programs_x",
        "frames",
        "height",
        "width",
        "taps",
        "length",
        "bits",
        "pitch_n",
        "pitch_c",
        "pitch_y",
        "grid_h",
        "grid_w",
    ],
    do_not_specialize_on_alignment=["image_ptr", "first_ptr", "weights_ptr", "out_ptr"],
)
def _resize_kernel(
    image_ptr,  # uint8, `frames` images of CHANNELS, read at the pitches given
    first_ptr,  # [height or width] int32
    weights_ptr,  # [taps, height or width] int32
    out_ptr,  # uint8: [n, CHANNELS, height, width], or rows of patches where PATCH is not 0
    programs_y,
    programs_x,
    frames,
    height,  # of the output
    width,
    taps,
    length,  # of the input, along the axis that is resized
    bits,
    pitch_n,
    pitch_c,
    pitch_y,
    grid_h,
    grid_w,
    PITCH_X: tl.constexpr,
    AXIS: tl.constexpr,  # that is resized: 1 the height, 2 the width, 0 none
    CHANNELS: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    pid = tl.program_id(0)
    x = (pid % programs_x) * BLOCK_X + tl.arange(0, BLOCK_X)[None, :]
    pid = pid // programs_x
    y = (pid % programs_y) * BLOCK_Y + tl.arange(0, BLOCK_Y)[:, None]
    pid = pid // programs_y
    c, n = pid % CHANNELS, pid // CHANNELS
    here = (y < height) & (x < width)

    # a video's last frame stands for those that fill its last patch
    image_ptr += tl.minimum(n, frames - 1).to(tl.int64) * pitch_n + c * pitch_c.to(tl.int64)
    if AXIS == 0:
        value = tl.load(image_ptr + y.to(tl.int64) * pitch_y + x * PITCH_X, mask=here, other=0)
    else:
        i = tl.minimum(x, width - 1) if AXIS == 2 else tl.minimum(y, height - 1)
        first = tl.load(first_ptr + i)
        weights_ptr += i
        total = tl.zeros((BLOCK_Y, BLOCK_X), tl.int32) + (1 << (bits - 1))
        for t in range(taps):
            weight = tl.load(weights_ptr)
            weights_ptr += width if AXIS == 2 else height
            at = tl.minimum(first + t, length - 1)  # beyond the end all weights are 0
            if AXIS == 2:
                ptrs = image_ptr + y.to(tl.int64) * pitch_y + at * PITCH_X
            else:
                ptrs = image_ptr + at.to(tl.int64) * pitch_y + x * PITCH_X
            total += tl.load(ptrs, mask=here, other=0).to(tl.int32) * weight
        value = tl.minimum(tl.maximum(total >> bits, 0), 255).to(tl.uint8)

    if PATCH:
        block = (y // (PATCH * MERGE)) * (grid_w // MERGE) + x // (PATCH * MERGE)
        within = (y // PATCH % MERGE) * MERGE + x // PATCH % MERGE
        row = (n // TEMPORAL).to(tl.int64) * grid_h * grid_w + block * (MERGE * MERGE) + within
        column = ((c.to(tl.int64) * TEMPORAL + n % TEMPORAL) * PATCH + y % PATCH) * PATCH + x % PATCH
        offs = row * (CHANNELS * TEMPORAL * PATCH * PATCH) + column
    else:
        offs = ((n.to(tl.int64) * CHANNELS + c) * height + y) * width + x
    tl.store(out_ptr + offs, value, mask=here)


def patches_from_images(
    images: torch.Tensor,
    down: Taps | None,
    across: Taps | None,
    layout: PatchLayout,
    grid: tuple[int, int, int],
    out: torch.Tensor,
    down_first: bool = False,
) -> torch.Tensor:
    """Fills all of `out` with the patches of `images`, resized.

    Args:
        images: `[n, H, W, C]` uint8, of any strides: stills, or the frames of a video.
        down, across: taps along the height and along the width, on the same device; None leaves that axis as it is. If
            the result is smaller than `grid`, the rest is 0, at the bottom and to the right.
        layout: sizes of the patches; `temporal` is 1 for stills.
        grid: (t, h, w) in patches, h and w multiples of the merge size. For stills t is their number.
        out: `[t * h * w, C * temporal * patch^2]` uint8, contiguous.
        down_first: resize along the height first; else along the width first.
    """
    n, height, width, channels = images.shape
    t, h, w = grid
    size = (height if down is None else down.size, width if across is None else across.size)
    shape = (t * h * w, channels * layout.temporal * layout.patch**2)
    assert images.dtype == out.dtype == torch.uint8 and out.is_contiguous(), (
        f"expected bytes, contiguous ones to write, got {images.dtype} and {out.dtype}"
    )
    assert tuple(out.shape) == shape, f"expected rows {shape}, got {tuple(out.shape)}"
    assert size[0] <= h * layout.patch and size[1] <= w * layout.patch, (
        f"expected at most {h} x {w} patches of {layout.patch} pixels, got {size[0]} x {size[1]} pixels"
    )
    if size != (h * layout.patch, w * layout.patch):
        out.zero_()
    passes = [(1, down), (2, across)] if down_first else [(2, across), (1, down)]
    passes = [(axis, taps) for axis, taps in passes if taps is not None] or [(0, None)]
    if len(passes) == 2:
        middle = (size[0], width) if down_first else (height, size[1])
        between = torch.empty((n, channels, *middle), dtype=torch.uint8, device=images.device)
        _launch(images, *passes[0], n, None, (1, 1), between)
        images = between.permute(0, 2, 3, 1)
    _launch(images, *passes[-1], t * layout.temporal, layout, (h, w), out)
    return out


def _launch(
    images: torch.Tensor,
    axis: int,
    taps: Taps | None,
    n: int,
    layout: PatchLayout | None,
    grid: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """One pass over `n` images `[…, H, W, C]`; the last of `images` is repeated if there are fewer."""
    frames, *size, channels = images.shape
    length, fixed = size[axis - 1], (0, 0)
    if taps is not None:
        size[axis - 1] = taps.size
        fixed = taps.weights.shape[0], taps.bits
    programs = -(-size[0] // _BLOCK_Y), -(-size[1] // _BLOCK_X)
    pitch_n, pitch_y, pitch_x, pitch_c = images.stride()
    patch, merge, temporal = (0, 1, 1) if layout is None else (layout.patch, layout.merge, layout.temporal)
    constants = {"PITCH_X": pitch_x, "AXIS": axis, "CHANNELS": channels, "PATCH": patch, "MERGE": merge}
    constants |= {"TEMPORAL": temporal, "BLOCK_Y": _BLOCK_Y, "BLOCK_X": _BLOCK_X}
    taken = fixed[0], length, fixed[1]
    scalars = (*programs, frames, *size, *taken, pitch_n, pitch_c, pitch_y, *grid)
    pointers = (images, None if taps is None else taps.first, None if taps is None else taps.weights, out)
    launch(_resize_kernel, n * channels * programs[0] * programs[1], (), pointers, constants, {"num_warps": 4}, scalars)
