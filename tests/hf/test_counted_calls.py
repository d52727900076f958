"""Every call is counted once in `stats()["calls"]`, whatever it ends in."""

import copy
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import fusedvit
from fusedvit.checks import fallback
from fusedvit.errors import Reason
from fusedvit.kernels.launch import KernelFailed
from fusedvit.model.normalization import Normalization
from fusedvit.pixels.byte_pixels import BytePixels
from fusedvit.runtime.kernel_loader import KernelsNotReady
from fusedvit.serving.engine_calls import answer_of
from tests.support.towers import GRIDS, Call, outcome, tiny_tower

FUSED, ORIGINAL, RAISED = "fused", "original", "raised"
Exit = Callable[[Any, Any, Call], Any]  # (handle, tower, call) -> the answer of one call


def plain(handle: Any, tower: Any, call: Call) -> Any:
    return handle.answer(tower, call.pixels, call.grid, {})


def of_pixels(pixels: Callable[[torch.Tensor], Any]) -> Exit:
    return lambda handle, tower, call: handle.answer(tower, pixels(call.pixels), call.grid, {})


def of_another_layout(pixels: torch.Tensor) -> torch.Tensor:
    normalization = Normalization(1 / 255, None, None, patch=14)
    return BytePixels.mark(torch.zeros(len(pixels), normalization.width(False), dtype=torch.uint8), normalization)


def failing(error: Exception) -> Exit:
    def call_with(handle: Any, tower: Any, call: Call) -> Any:
        with mock.patch("fusedvit.runtime.runner._launch_steps", side_effect=error):
            return plain(handle, tower, call)

    return call_with


def paused(handle: Any, tower: Any, call: Call) -> Any:
    handle._pause.begin(Reason(fallback.CHANGED_DURING_CALL))
    return plain(handle, tower, call)


def hooked(handle: Any, tower: Any, call: Call) -> Any:
    tower.blocks[0].register_forward_hook(lambda *given: None)
    return plain(handle, tower, call)


def under_a_transform(handle: Any, tower: Any, call: Call) -> Any:
    return torch.func.vmap(lambda pixels: handle.answer(tower, pixels, call.grid, {}) or pixels)(call.pixels[None])


def strict(handle: Any, tower: Any, call: Call) -> Any:
    handle.reconfigure(fusedvit.FuseConfig(strict=True))
    return handle.answer(tower, call.pixels, call.grid, {"output_attentions": True})


EXITS: dict[str, tuple[str, Exit]] = {
    "fused": (FUSED, plain),
    "bytes of another layout": (RAISED, of_pixels(of_another_layout)),
    "under a transform": (ORIGINAL, under_a_transform),
    "a copy of the tower": (ORIGINAL, lambda handle, tower, call: plain(handle, copy.copy(tower), call)),
    "an argument": (ORIGINAL, lambda h, tower, call: h.answer(tower, call.pixels, call.grid, {"output_attentions": 1})),
    "paused": (ORIGINAL, paused),
    "a tower that cannot run fused": (ORIGINAL, hooked),
    "no pixels": (RAISED, of_pixels(lambda pixels: None)),
    "too few rows": (RAISED, of_pixels(lambda pixels: pixels[1:])),
    "a grid that is none": (RAISED, lambda handle, tower, call: handle.answer(tower, call.pixels, "grid", {})),
    "kernels not ready": (ORIGINAL, failing(KernelsNotReady(""))),
    "a kernel that does not compile": (ORIGINAL, failing(KernelFailed("ptxas: no"))),
    "out of memory": (RAISED, failing(MemoryError("no"))),
    "strict": (RAISED, strict),
}
BY_EXIT = pytest.mark.parametrize("exit_", EXITS.values(), ids=EXITS)


@BY_EXIT
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_call_is_counted_once(exit_: tuple[str, Exit], used: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="fusedvit")
    ends, act = exit_
    tower = tiny_tower()
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["mix"])
    if used:
        plain(handle, tower, call)
    before = handle.stats()
    answer = outcome(act, handle, tower, call)
    stats = handle.stats()
    assert stats["calls"] == before["calls"] + 1
    assert stats["fused"] - before["fused"] == (ends == FUSED)
    assert sum(stats["original"].values()) == (ends == ORIGINAL)
    assert stats["raised"] == (ends == RAISED)
    assert (", 1 raised" in handle.report()) == (ends == RAISED)
    assert isinstance(answer, Exception) == (ends == RAISED), answer


@BY_EXIT
def test_an_engines_call_is_fused_or_original(exit_: tuple[str, Exit], caplog: pytest.LogCaptureFixture) -> None:
    """What the fused encoder refuses, an engine's own code answers."""
    caplog.set_level(logging.CRITICAL, logger="fusedvit")
    tower = tiny_tower()
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["mix"])
    found = outcome(exit_[1], _Engine(handle), tower, call)
    stats = handle.stats()
    assert stats["calls"] == 1 and stats["raised"] == isinstance(found, Exception)
    assert stats["fused"] + sum(stats["original"].values()) == 1 - stats["raised"]


class _Engine:
    """A handle whose `answer` is asked as engines ask it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def answer(self, *arguments: Any) -> Any:
        return answer_of(self._handle, *arguments)
