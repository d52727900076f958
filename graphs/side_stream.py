"""Side streams: launches of a captured graph that overlap with others of it."""

from collections.abc import Callable
from typing import Protocol

import torch

PRIORITY = -2  # above the captured stream's; a level whose streams PyTorch hands out to hardly anybody else


class SideStream(Protocol):
    """Takes launches that may overlap with those of the current stream."""

    def fork(self, launches: Callable[[], None]) -> None:
        """Runs `launches` after everything launched before, overlapped with what is launched from now on until `join`.

        Forks run in their order. `launches` allocates nothing.
        """

    def join(self) -> None:
        """Makes what is launched from now on wait for every fork."""


class NoSideStream:
    """No overlap: forks are launched in line, on the current stream."""

    def fork(self, launches: Callable[[], None]) -> None:
        launches()

    def join(self) -> None:
        pass


class CapturedSideStream:
    """A stream that joins the capture of the current one. Where nothing is captured, launches stay in line.

    A graph's nodes keep the priority of the stream that they were captured on.
    """

    def __init__(self, device: torch.device, priority: int = PRIORITY) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device, priority=priority)
        self._forked = False

    def fork(self, launches: Callable[[], None]) -> None:
        if not torch.cuda.is_current_stream_capturing():
            launches()
            return
        self._forked = True
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            launches()

    def join(self) -> None:
        if self._forked:  # a capture ends with every stream joined, also one that fails on the way
            self._forked = False
            torch.cuda.current_stream(self._device).wait_stream(self._side)
