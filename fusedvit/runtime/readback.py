"""What a call asks of the GPU beside its replay: whether the parameters hold what they did, and what its grid holds.

One launch on a stream of its own, into memory of the host's that is used again, as it takes longer to get than to fill.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fusedvit.graphs.capture import CurrentStream
from fusedvit.kernels.fingerprint import FingerprintSources
from fusedvit.kernels.load_inputs import GRID_DTYPES, MAX_ROWS
from fusedvit.model.ops import ops_for

# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Devices and streams, as a call meets them.


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


# ── look ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

LEAST_ROOM = 64  # items


class Place(NamedTuple):
    """Host memory, pinned where there is a GPU: fingerprints `[P]` int32 and a grid's rows `[room, 3]` int64."""

    found: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Look:
    """What was asked for: fingerprints to compare with `made`, if that is not None, and the rows of `items` items.

    In `place` once `side` has got there, which then goes back to `places`; on a CPU, without a `side`, at once.
    """

    side: torch.cuda.Stream | None
    place: Place
    made: torch.Tensor | None
    items: int
    places: list[Place]

    def done(self, meanwhile: Callable[[], bool] | None = None) -> tuple[bool, list[list[int]], bool | None]:
        """Whether the parameters are the same, the rows, and what `meanwhile` says, which runs before this waits."""
        try:
            said = None if meanwhile is None else meanwhile()
        finally:
            if self.side is not None:
                self.side.synchronize()  # whatever happened: until then what it fills is no memory to be used again
        same = self.made is None or torch.equal(self.place.found, self.made)
        rows = self.place.rows[: self.items].tolist() if self.items else []
        self.places.append(self.place)
        return same, rows, said


@dataclass(frozen=True)
class Content:
    """Fingerprints of what the weights were made from.

    Attributes:
        watched: the parameters.
        made: `[P]` int32 on the host, as they were then.
        side: a stream to look at them while the encoder runs; None on the CPU.
        marks: of the streams that run it; None on the CPU.
        places: those that nobody looks into now.
    """

    watched: FingerprintSources
    made: torch.Tensor
    side: torch.cuda.Stream | None
    marks: Marks | None
    places: list[Place] = field(default_factory=list)

    @staticmethod
    def of(parameters: Sequence[torch.Tensor]) -> "Content":
        watched = FingerprintSources.of(parameters)
        device = watched.pointers.device
        ops = ops_for(device)
        made = ops.fingerprint(watched, torch.empty(len(parameters), dtype=torch.int32, device=device))
        for dtype in GRID_DTYPES:  # so that what a call launches is compiled by now
            rows = torch.zeros(1, 3, dtype=torch.int64, device=device)
            ops.fingerprint(watched, made[:0], rows.to(dtype), rows)
        side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        return Content(watched, made.cpu(), side, Marks(device) if device.type == "cuda" else None)

    def look(self, begin: Mark | None, watch: bool, grid: torch.Tensor | None) -> Look:
        """See `PreparedWeights.look`."""
        items, side = 0 if grid is None else grid.shape[0], self.side
        if side is not None:
            assert begin is not None, "where there is a GPU there are marks"
            begin.wait_on(side)
            if grid is not None and (grid.dtype not in GRID_DTYPES or max(grid.stride()) > MAX_ROWS):
                with torch.cuda.stream(side):
                    grid = grid.long().contiguous()
        place, made = self._place(items), self.made if watch else None
        into = place.found if watch else place.found[:0], grid, None if grid is None else place.rows
        ops_for(self.watched.pointers.device).fingerprint(self.watched, *into, side)
        return Look(side, place, made, items, self.places)

    def _place(self, items: int) -> Place:
        """One with room for so many, from any thread: a list gives it to one of them only."""
        try:
            place = self.places.pop()
        except IndexError:
            return self._new_place(items)
        return place if place.rows.shape[0] >= items else self._new_place(items)

    def _new_place(self, items: int) -> Place:
        pinned, room = self.side is not None, max(LEAST_ROOM, 1 << max(0, items - 1).bit_length())
        with torch.inference_mode(False):  # it is used again in any mode
            return Place(
                torch.empty(self.made.shape, dtype=torch.int32, pin_memory=pinned),
                torch.empty(room, 3, dtype=torch.int64, pin_memory=pinned),
            )
