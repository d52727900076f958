"""Which stream makes patches on a GPU, with PyTorch's streams replaced by a record of what is asked of them."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.kernels.patches import PatchLayout
from fusedvit.pixels import patches
from fusedvit.pixels.resize import TORCH

STILL = patches.SizedFrames(torch.zeros(1, 28, 28, 3, dtype=torch.uint8), (1, 2, 2), (28, 28))
GPU = torch.device("cuda", 0)


class Stream:
    log: list[str] = []

    def __init__(self, *given: object) -> None:
        self.name = f"stream {len(made)}" if given else "current"
        made.append(self)

    def wait_event(self, event: object) -> None:
        self.log.append(f"{self.name} waits")


class Event:
    def record(self, stream: Stream) -> None:
        stream.log.append(f"{stream.name} recorded")


made: list[Stream] = []


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    made.clear()
    Stream.log = []
    current = Stream()
    cuda: dict[str, Any] = {
        "current_device": lambda: 0,
        "current_stream": lambda *_: current,
        "set_stream": lambda stream: Stream.log.append(f"{stream.name} set"),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
    }
    kept = lambda out, stream: Stream.log.append(f"kept for {stream.name}")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)
    patches._side.cache_clear()
    with mock.patch.multiple(torch.cuda, **cuda):
        yield Stream.log
    patches._side.cache_clear()


def test_the_current_stream_waits_for_patches_that_another_one_makes(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "_computed", lambda *_: log.append("made") or torch.zeros(1))
    for _ in range(2):
        patches.patches_of([STILL], PatchLayout(14, 2, 1), TORCH, GPU)
    call = ["stream 1 set", "made", "current set", "stream 1 recorded", "current waits", "kept for current"]
    assert log == ["current recorded", *call, *call]


def test_the_current_stream_is_the_callers_again_after_an_error(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("none left")

    monkeypatch.setattr(patches, "_computed", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        patches.patches_of([STILL], PatchLayout(14, 2, 1), TORCH, GPU)
    assert log[-1] == "current set"
