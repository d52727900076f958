"""Divides one call over several GPUs: whole images, and videos cut between frames, balanced by load."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusedvit.graphs.balance import balance, patch_constant
from fusedvit.graphs.packing import ItemSize, Piece
from fusedvit.model.spec import VisionSpec


class Share(NamedTuple):
    """What one GPU encodes.

    Attributes:
        pieces: pieces of the caller's items, in the caller's order.
        rows: for each piece, the first and last (exclusive) row of its patches in the call's pixels.
        grid: `[pieces, 3]`, on the CPU.
    """

    pieces: tuple[Piece, ...]
    rows: tuple[tuple[int, int], ...]
    grid: torch.Tensor

    def patches(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    def pixels_of(self, pixels: torch.Tensor) -> torch.Tensor:
        """The share's patches, `[patches, width]`; a view of `pixels` if they are consecutive."""
        first, last = (self.rows[0][0], self.rows[-1][1]) if self.rows else (0, 0)
        if last - first == self.patches():
            return pixels[first:last]
        return torch.cat([pixels[begin:end] for begin, end in self.rows])


def shares_of(spec: VisionSpec, patches: int, grid: torch.Tensor, parts: int) -> list[Share] | None:
    """The share of each of `parts` GPUs; deterministic.

    Args:
        patches: rows of the call's pixels.
        grid: `[items, 3]` on the CPU.

    Returns:
        None if pixels and grid do not match; the tower raises the error for that.
    """
    sizes = [ItemSize(t, h * w) for t, h, w in grid.tolist()]
    if min([n for size in sizes for n in size], default=0) <= 0:
        return None
    first_rows = [0]
    for frames, each in sizes:
        first_rows.append(first_rows[-1] + frames * each)
    if first_rows[-1] != patches:
        return None
    constant = patch_constant(spec.hidden_size, spec.intermediate_size, 3 if spec.gated else 2)
    found = []
    for pieces in balance(sizes, parts, constant):
        begins = [first_rows[piece.item] + piece.first_frame * sizes[piece.item].frame_tokens for piece in pieces]
        grids = grid[[piece.item for piece in pieces]]
        grids[:, 0] = torch.tensor([piece.frames for piece in pieces], dtype=grid.dtype, device="cpu")
        rows = tuple((begin, begin + piece.tokens) for begin, piece in zip(begins, pieces, strict=True))
        found.append(Share(pieces, rows, grids))
    return found


def in_order(shares: Sequence[Share], rows: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """The rows that the GPUs encoded, in the caller's order, on the device of the first share's rows.

    Args:
        rows: the outputs of each share, `[tokens, width]`.
        out: the output tensor; None to allocate it.
    """
    device = rows[0].device
    parts: dict[tuple[int, int], torch.Tensor] = {}
    for (pieces, _, _), found in zip(shares, rows, strict=True):
        patches = sum(piece.tokens for piece in pieces) // max(1, len(found))  # merged into each row
        split = found.to(device, non_blocking=True).split([piece.tokens // max(1, patches) for piece in pieces])
        parts |= {(piece.item, piece.first_frame): part for piece, part in zip(pieces, split, strict=True)}
    return torch.cat([parts[key] for key in sorted(parts)], out=out) if parts else rows[0]
