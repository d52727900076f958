"""An engine's call of its tower: input that the fused encoder refuses goes to the engine's own code.

Engines accept grids as arrays, as lists of tensors, or with images without rows. A call that the fused encoder refuses
is counted and left to the engine's own code, which answers it or raises its own error.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import index
from typing import Any, TypeVar

import torch
from torch import nn

from fusedvit.checks.fallback import ENGINE
from fusedvit.errors import Reason, unnamed
from fusedvit.fused_encoder import Answer, FusedEncoder
from fusedvit.outputs.hugging_face import side_by_side
from fusedvit.runtime.inputs import check_grid

Result = TypeVar("Result")

_REFUSED = (TypeError, ValueError)  # raised by `runtime.inputs`


def answer_of(
    handle: FusedEncoder, tower: nn.Module, pixels: Any, grid: Any, extra: dict[str, Any] | None = None
) -> Answer | None:
    """As `FusedEncoder.answer`, but a call that it refuses is counted and gives None."""
    return counted(handle, lambda: handle.answer_or_reason(tower, pixels, grid, extra or {}))


def counted(handle: FusedEncoder, answer: Callable[[], Answer | Reason]) -> Answer | None:
    """What `answer` gives, counted once; None where the engine's own code runs, as for input that `answer` refuses.

    Raises:
        RuntimeError: with `strict=True`, the engine's own code must run.
    """
    found: Answer | Reason | None = None
    try:
        found = or_refusal(answer)
    finally:
        handle.count(found.items if isinstance(found, Answer) else found)
    return found if isinstance(found, Answer) else None


def encoded(
    answer: Callable[[FusedEncoder, nn.Module, Any, Any], Answer | Reason],
    handle: FusedEncoder,
    tower: nn.Module,
    pixels: Any,
    grid: Any,
) -> torch.Tensor | Reason:
    """The rows of a share of a call, not counted; or the reason why the engine's own code must run."""
    found = or_refusal(lambda: answer(handle, tower, pixels, grid))
    return found if isinstance(found, Reason) else side_by_side(found.outputs, handle.spec)


def waiting_allowed() -> AbstractContextManager[Any]:
    """A context in vLLM that may wait for the GPU, as a fused call does once, whatever `VLLM_GPU_SYNC_CHECK` is."""
    return _gpu_sync_allowed()()


@cache
def _gpu_sync_allowed() -> Callable[[], AbstractContextManager[Any]]:
    try:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed
    except ImportError:  # a release that checks nothing
        return nullcontext
    allowed: Callable[[], AbstractContextManager[Any]] = gpu_sync_allowed
    return allowed


def or_refusal(check: Callable[[], Result]) -> Result | Reason:
    """What `check` returns, or the reason why it refuses its input."""
    try:
        return check()
    except _REFUSED as error:
        return Reason(ENGINE, unnamed(error))


def nothing_in(pixels: Any) -> Reason | None:
    """The reason to leave a call without patches to the engine, which may answer it or raise its own error."""
    return Reason(ENGINE, "no patches") if isinstance(pixels, torch.Tensor) and not pixels.numel() else None


def grid_of(grid_thw: Any) -> torch.Tensor | Reason:
    """`grid_thw` as an integer tensor `[n, 3]`; a reason for anything else. Nothing is read from a GPU."""
    return or_refusal(lambda: check_grid(as_rows(grid_thw)))


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
