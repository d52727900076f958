"""Reference of `kernels.load_inputs`, on the host."""

import torch
from einops import rearrange

from fusedvit.kernels.load_inputs import FLOATS, centred


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
    """See `fusedvit.kernels.load_inputs.load_inputs`."""
    sides = grid.long()
    within = bool(((sides >= 1) & (sides <= rows)).all()) and bool((sides[:, 1:] % merge == 0).all())
    items = sides.tolist() if within else []
    total = sum(t * h * w for t, h, w in items)
    out.zero_()
    if within and (0 < total <= rows if padded else total == rows) and sum(t for t, _, _ in items) <= frames:
        out[: len(items)] = sides
    if counts is not None:
        counts[:, 0] = 0
        counts[kind, 0] = total if bool(out.any()) else 0
    if pixels is not None and into is not None:
        length, width = pixels.shape
        into[:length, :width].copy_(centred(pixels, into.dtype) if pixels.dtype == torch.uint8 else pixels)
    return out


def patch_grid(positions: torch.Tensor, side: int, merge: int, out: torch.Tensor) -> torch.Tensor:
    """See `fusedvit.kernels.load_inputs.patch_grid`."""
    for i, image in enumerate(positions.long()):
        w, h = (int(n) + 1 for n in image.amax(0)) if len(image) else (0, 0)
        whole = 0 < w <= side and 0 < h <= side and w % merge == 0 and h % merge == 0 and w * h <= len(image)
        out[i] = torch.tensor([1, h, w] if whole and _is_raster(image, h, w) else [0, 0, 0], device="cpu")
    return out


def _is_raster(image: torch.Tensor, h: int, w: int) -> bool:
    raster = torch.arange(h * w, device=image.device)
    positions = torch.stack([raster % w, raster // w], 1)
    return torch.equal(image[: h * w], positions) and bool((image[h * w :] == -1).all())


def load_patches(pixels: torch.Tensor, grid: torch.Tensor, merge: int, out: torch.Tensor) -> torch.Tensor:
    """See `fusedvit.kernels.load_inputs.load_patches`."""
    first = 0
    for image, (t, h, w) in zip(pixels, grid.tolist(), strict=True):
        if not t:
            continue
        rows = rearrange(image[: h * w], "(bh mh bw mw) c -> (bh bw mh mw) c", mh=merge, mw=merge, bw=w // merge)
        out[first : first + h * w] = 2 * (rows - 0.5)
        first += h * w
    return out
