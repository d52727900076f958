"""Side streams: launches of a captured graph that overlap with others of it."""

from collections.abc import Callable

import torch

PRIORITY = -2  # above the captured stream's; a level whose streams PyTorch hands out to hardly anybody else


class CapturedSideStream:
    """A stream that joins the capture of the current one. Where nothing is captured, launches stay in line.

    A graph's nodes keep the priority of the stream that they were captured on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device, priority=PRIORITY)
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
