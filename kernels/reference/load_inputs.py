"""Reference of `kernels.load_inputs`, on the host."""

import torch

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
) -> torch.Tensor:
    """See `fusedvit.kernels.load_inputs.load_inputs`."""
    sides = grid.long()
    within = bool(((sides >= 1) & (sides <= rows)).all()) and bool((sides[:, 1:] % merge == 0).all())
    items = sides.tolist() if within else []
    out.zero_()
    if within and sum(t * h * w for t, h, w in items) == rows and sum(t for t, _, _ in items) <= frames:
        out[: len(items)] = sides
    if counts is not None:
        counts[:, 0] = 0
        counts[kind, 0] = rows if bool(out.any()) else 0
    if pixels is not None and into is not None:
        length, width = pixels.shape
        into[:length, :width].copy_(centred(pixels, into.dtype) if pixels.dtype == torch.uint8 else pixels)
    return out
