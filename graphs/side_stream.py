"""Side streams: some launches of a captured graph overlap with its other launches."""

from collections.abc import Callable

import torch

PRIORITY = -2  # above the captured stream's; hardly any other code asks PyTorch for streams of this level


class CapturedSideStream:
    """A stream that joins the capture of the current stream. Outside a capture, launches stay on the current stream.

    A graph's nodes keep the priority of the stream on which they were captured.
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
        if self._forked:  # a capture must end with every stream joined, even if it fails midway
            self._forked = False
            torch.cuda.current_stream(self._device).wait_stream(self._side)
