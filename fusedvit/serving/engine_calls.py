"""An engine's call of its tower: input that the fused encoder refuses goes to the engine's own code.

Engines accept grids as arrays, as lists of tensors, or with images without rows. A call that the fused encoder refuses
is counted and left to the engine's own code, which answers it or raises its own error.
"""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import nn

from fusedvit.checks import fallback
from fusedvit.errors import Reason, unnamed
from fusedvit.fused_encoder import Answer, FusedEncoder
from fusedvit.runtime.inputs import check_grid

_REFUSED = (TypeError, ValueError)  # raised by `runtime.inputs`


def answer_of(
    handle: FusedEncoder, tower: nn.Module, pixels: Any, grid: Any, extra: dict[str, Any] | None = None
) -> Answer | None:
    """As `FusedEncoder.answer`, but input that it refuses is counted as the reason `engine` and gives None."""
    ended: Answer | Reason | None = None
    try:
        ended = handle.answer_or_reason(tower, pixels, grid, extra or {})
    except _REFUSED as error:
        ended = Reason(fallback.ENGINE, unnamed(error))
    finally:
        handle.count(ended.items if isinstance(ended, Answer) else ended)
    return ended if isinstance(ended, Answer) else None


def grid_of(handle: FusedEncoder, grid_thw: Any) -> torch.Tensor | None:
    """`grid_thw` as an integer tensor `[n, 3]`; None, counted, for anything else. Nothing is read from a GPU."""
    try:
        return check_grid(as_rows(grid_thw))
    except _REFUSED as error:
        handle.leave(unnamed(error))
        return None


def as_rows(grid_thw: Any) -> Any:
    """Turns arrays, and lists of arrays or tensors, into lists of integers; returns anything else as it is."""
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
    except TypeError:  # returned as it is: the message of `check_grid` shows it
        return row
