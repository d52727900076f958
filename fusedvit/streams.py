"""Devices and streams, as a call meets them."""

import contextlib
from typing import NamedTuple

import torch

from fusedvit.graphs.current import CurrentStream


def lies_on_gpu(grid: torch.Tensor) -> bool:
    """Whether reading `grid` would wait for a device."""
    return grid.device.type != "cpu"


class Mark(NamedTuple):
    """A place in a stream. Its event goes back to `events` when somebody waits for it, which may happen once."""

    event: torch.cuda.Event
    events: list[torch.cuda.Event]

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream` wait until here: until what the event stands for now, whatever it is recorded for later."""
        stream.wait_event(self.event)
        self.events.append(self.event)


class Marks:
    """Marks places in the streams of one GPU. Events are used again: one takes longer to make than to record.

    From any thread: a list gives an event to one of them only.
    """

    def __init__(self, device: torch.device) -> None:
        self._current = CurrentStream(device)
        self._events: list[torch.cuda.Event] = []

    def here(self) -> Mark:
        """Where the current stream is."""
        try:
            event = self._events.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(self._current.get())
        return Mark(event, self._events)


def is_current(device: torch.device) -> bool:
    """Whether what is launched now goes to `device`, and is run there and not captured."""
    if device.type != "cuda":
        return True
    here = device.index == torch._C._cuda_getDevice()  # torch's own names of these two take 2 us more
    return here and not torch._C._cuda_isCurrentStreamCapturing()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes `device` current, if it is a GPU and is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
