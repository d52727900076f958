"""An engine's call of its tower: what the fused encoder refuses, the engine's own code answers, or refuses its way.

Engines take grids as they come: arrays, lists of tensors, images without rows. Whatever of it the fused encoder has no
answer for is counted, and left to the code that it stands for.
"""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import nn

from fusedvit.errors import unnamed
from fusedvit.fused_encoder import Answer, FusedEncoder
from fusedvit.runtime.inputs import check_grid

_REFUSED = (TypeError, ValueError)  # what `runtime.inputs` raises


def answer_of(
    handle: FusedEncoder, tower: nn.Module, pixels: Any, grid: Any, extra: dict[str, Any] | None = None
) -> Answer | None:
    """As `FusedEncoder.answer`; what that refuses is counted, and None."""
    try:
        return handle.answer(tower, pixels, grid, extra or {})
    except _REFUSED as error:
        handle.leave(unnamed(error), counted=True)
        return None


def grid_of(handle: FusedEncoder, grid_thw: Any) -> torch.Tensor | None:
    """`grid_thw` as an integer tensor `[n, 3]`; None, counted, for anything else. Nothing is read from a GPU."""
    try:
        return check_grid(as_rows(grid_thw))
    except _REFUSED as error:
        handle.leave(unnamed(error))
        return None


def as_rows(grid_thw: Any) -> Any:
    """Arrays, and lists of arrays or tensors, as lists of integers; a tensor, and what is no grid at all, as it is."""
    if isinstance(grid_thw, torch.Tensor):
        return grid_thw
    rows = _listed(grid_thw)
    if not isinstance(rows, Sequence) or all(type(row) in (list, tuple) for row in rows):
        return rows
    return [_integers(_listed(row)) for row in rows]


def _listed(given: Any) -> Any:
    return given.tolist() if hasattr(given, "tolist") else given


def _integers(row: Any) -> Any:
    try:
        return [index(n) for n in row]
    except TypeError:  # whose message says what it is
        return row
