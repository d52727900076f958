"""What a call asks of the GPU beside its replay: whether the parameters hold what they did, and what its grid holds.

One launch on a stream of its own, into memory of the host's that is used again, as it takes longer to get than to fill.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fusedvit.kernels.admit import DTYPES, MOST
from fusedvit.kernels.fingerprint import Watched
from fusedvit.ops import ops_for
from fusedvit.streams import Mark, Marks

LEAST_ROOM = 64  # items


class Place(NamedTuple):
    """Host memory, pinned where there is a GPU: fingerprints `[P]` int32 and a grid's rows `[room, 3]` int64."""

    found: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Look:
    """What was asked for: fingerprints to compare with `made`, if that is not None, and the rows of `items` items.

    In `place` once `side` has got there, which then goes back to `places`; on a CPU, where both are None, at once.
    """

    side: torch.cuda.Stream | None
    place: Place
    made: torch.Tensor | None
    items: int
    places: list[Place] | None

    def done(self, meanwhile: Callable[[], bool] | None = None) -> tuple[bool, list[list[int]], bool | None]:
        """Whether the parameters are the same, the rows, and what `meanwhile` says, which runs before this waits."""
        try:
            said = None if meanwhile is None else meanwhile()
        finally:
            if self.side is not None:
                self.side.synchronize()  # whatever happened: until then what it fills is no memory to be used again
        same = self.made is None or torch.equal(self.place.found, self.made)
        rows = self.place.rows[: self.items].tolist() if self.items else []
        if self.places is not None:
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

    watched: Watched
    made: torch.Tensor
    side: torch.cuda.Stream | None
    marks: Marks | None
    places: list[Place] = field(default_factory=list)

    @staticmethod
    def of(parameters: Sequence[torch.Tensor]) -> "Content":
        watched = Watched.of(parameters)
        device = watched.pointers.device
        made = ops_for(device).fingerprint(watched, torch.empty(len(parameters), dtype=torch.int32, device=device))
        side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        return Content(watched, made.cpu(), side, Marks(device) if device.type == "cuda" else None)

    def look(self, begin: Mark | None, watch: bool, grid: torch.Tensor | None) -> Look:
        """See `PreparedWeights.look`."""
        items = 0 if grid is None else grid.shape[0]
        made, ops = self.made if watch else None, ops_for(self.watched.pointers.device)
        if self.side is None or begin is None:
            place = self._new_place(items)
            ops.fingerprint(self.watched, place.found if watch else place.found[:0], grid, place.rows)
            return Look(None, place, made, items, None)
        begin.wait_on(self.side)
        if grid is not None and (grid.dtype not in DTYPES or max(grid.stride()) > MOST):
            with torch.cuda.stream(self.side):
                grid = grid.long().contiguous()
        place = self._place(items)
        ops.fingerprint(self.watched, place.found if watch else place.found[:0], grid, place.rows, self.side)
        return Look(self.side, place, made, items, self.places)

    def _place(self, items: int) -> Place:
        """One with room for so many, from any thread: a list gives it to one of them only."""
        try:
            place = self.places.pop()
        except IndexError:
            return self._new_place(items)
        return place if place.rows.shape[0] >= items else self._new_place(items)

    def _new_place(self, items: int) -> Place:
        pinned = self.side is not None
        room = max(LEAST_ROOM, 1 << max(0, items - 1).bit_length())
        return Place(
            torch.empty(self.made.shape, dtype=torch.int32, pin_memory=pinned),
            torch.empty(room, 3, dtype=torch.int64, pin_memory=pinned),
        )
