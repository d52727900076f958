"""The one host read of a call: the rows of its grid, and whether the parameters still hold what they did.

Both come by one kernel (`kernels.fingerprint`) on a stream of its own, overlapped with the encoder, into pinned memory
that is used again: allocating it takes longer than filling it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from fusedvit.graphs.capture import CurrentStream
from fusedvit.kernels.fingerprint import FingerprintSources
from fusedvit.kernels.load_inputs import GRID_DTYPES, MAX_ROWS
from fusedvit.model.digest import digest_of
from fusedvit.model.ops import Ops, ops_for

SMALLEST_SLOT = 64  # items
BEGINNING = 2**14  # bytes of a prepared copy: as many as `kernels.fingerprint` reads one after another


class StreamMark(NamedTuple):
    """A point in a stream. Its event goes back to `pool` when somebody waits for it, which may happen once."""

    event: torch.cuda.Event
    pool: list[torch.cuda.Event]

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream` wait until this point."""
        stream.wait_event(self.event)
        self.pool.append(self.event)


class StreamMarks:
    """Marks points in the streams of one GPU. Events are used again: one takes longer to make than to record.

    Safe from any thread: popping a list gives an event to one of them only.
    """

    def __init__(self, device: torch.device) -> None:
        self._current = CurrentStream(device)
        self._pool: list[torch.cuda.Event] = []

    def here(self) -> StreamMark:
        """Where the current stream is now."""
        try:
            event = self._pool.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(self._current.get())
        return StreamMark(event, self._pool)


class Slot(NamedTuple):
    """Host memory, pinned where there is a GPU: fingerprints `[P]` int32 and a grid's rows `[room, 3]` int64."""

    fingerprints: torch.Tensor
    rows: torch.Tensor


class ReadBack(NamedTuple):
    """What a call has learned from the device.

    Attributes:
        unchanged: the parameters held, when the call began, what the weights were prepared from.
        rows: (t, h, w) of each item of its grid; empty where the grid was on the host.
        lost: prepared copies no longer hold what was written to them, though nobody wrote to them since.
    """

    unchanged: bool
    rows: list[list[int]]
    lost: bool = False


@dataclass(frozen=True)
class PendingRead:
    """A read that is under way on `stream`; on a CPU, without a stream, it is done.

    Attributes:
        slot: where it goes; back to `slots` once read.
        expected: fingerprints to compare with; None where the content is not checked.
        items: rows of the grid.
        parameters: how many of the fingerprints are of parameters; the others are of prepared copies.
    """

    stream: torch.cuda.Stream | None
    slot: Slot
    expected: torch.Tensor | None
    items: int
    slots: list[Slot]
    parameters: int | None = None

    def wait(self, meanwhile: Callable[[], bool]) -> ReadBack:
        """Runs `meanwhile`, another check of the weights, then makes the host wait for the read."""
        try:
            unchanged = meanwhile()
        finally:
            if self.stream is not None:
                self.stream.synchronize()  # whatever was raised: until then the slot is written to
        lost = False
        if self.expected is not None and not torch.equal(self.slot.fingerprints, self.expected):
            unchanged, n = False, self.parameters
            lost = n is not None and not torch.equal(self.slot.fingerprints[n:], self.expected[n:])
        rows = self.slot.rows[: self.items].tolist() if self.items else []
        self.slots.append(self.slot)
        return ReadBack(unchanged, rows, lost)


@dataclass(frozen=True)
class ContentCheck:
    """Fingerprints of the parameters that the weights were prepared from, and of the prepared copies.

    Memory may lose its content and keep its address, as a serving engine's sleep mode lets it: where parameters were
    filled again, prepared copies were not.

    Attributes:
        parameters: the parameters.
        addresses: theirs, then.
        sources: the parameters, then the copies, as aliases of their memory then.
        expected: `[P]` int32 on the host, as they were then.
        stream: where they are checked while the encoder runs; None on the CPU.
        marks: of the streams that run the encoder; None on the CPU.
        slots: those that no read is filling now.
    """

    parameters: tuple[torch.Tensor, ...]
    addresses: list[int]
    sources: FingerprintSources
    expected: torch.Tensor
    stream: torch.cuda.Stream | None
    marks: StreamMarks | None
    slots: list[Slot] = field(default_factory=list)

    @staticmethod
    def of(parameters: Sequence[torch.Tensor], ops: Ops) -> "ContentCheck":
        """Fingerprints `parameters` as they are, by `ops`; waits for the GPU."""
        sources = FingerprintSources.of(parameters)
        device, addresses = sources.pointers.device, [t.data_ptr() for t in sources.tensors]
        found = ops.fingerprint(sources, torch.empty(len(sources.tensors), dtype=torch.int32, device=device))
        for dtype in GRID_DTYPES:  # so that what a call launches is loaded by now
            rows = torch.zeros(1, 3, dtype=torch.int64, device=device)
            ops.fingerprint(sources, found[:0], rows.to(dtype), rows)
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        marks = StreamMarks(device) if device.type == "cuda" else None
        return ContentCheck(tuple(parameters), addresses, sources, found.cpu(), stream, marks)

    def with_copies(self, copies: Sequence[torch.Tensor], ops: Ops) -> "ContentCheck":
        """This check, and the beginnings of flat `copies` as they are; waits for the GPU.

        Memory that loses its content loses all of it; a call's read is short, as the encoder shares the GPU with it.
        """
        if not copies:
            return self
        beginnings = FingerprintSources.of([copy[: BEGINNING // copy.itemsize] for copy in copies])
        found = torch.empty(len(copies), dtype=torch.int32, device=beginnings.pointers.device)
        expected = torch.cat([self.expected, ops.fingerprint(beginnings, found).cpu()])
        sources = FingerprintSources.of([*self.sources.tensors, *beginnings.tensors])
        return replace(self, sources=sources, expected=expected, slots=[])

    def moved(self, ops: Ops) -> "ContentCheck | None":
        """This check at the addresses that its parameters have now, if these hold what they did; waits for the GPU."""
        now, then = self.parameters, self.sources.tensors
        if not all(_is_like(p, alias) for p, alias in zip(now, then, strict=False)):
            return None
        sources = FingerprintSources.of([*now, *then[len(now) :]])
        found = torch.empty_like(self.expected, device=sources.pointers.device)
        if not torch.equal(ops.fingerprint(sources, found).cpu(), self.expected):
            return None
        return replace(self, addresses=[t.data_ptr() for t in sources.tensors[: len(now)]], sources=sources, slots=[])

    def digest(self) -> list[int]:
        """A hash of all that the parameters hold, where fingerprints are of samples; waits for the GPU."""
        return digest_of(self.sources.tensors[: len(self.parameters)])

    def agrees_with(self, now: "ContentCheck") -> bool:
        """Whether `now`, of as many parameters and copies, read the same content in the same layout, wherever it
        lies."""
        then = self.sources.tensors
        return (
            len(then) == len(now.sources.tensors)
            and all(map(_is_like, now.sources.tensors, then))
            and torch.equal(now.expected, self.expected)
        )

    def held_by(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all memory of parameters that this keeps alive is that of `parameters`."""
        now = {id(p): p.data_ptr() for p in parameters if p.layout is torch.strided}
        kept = zip(self.parameters, map(torch.Tensor.data_ptr, self.sources.tensors), strict=False)
        return all(now.get(id(p)) == at for p, at in kept if at and isinstance(p, torch.nn.Parameter))

    def parameters_hold(self) -> Callable[[], bool]:
        """Whether parameters hold what they did, wherever they lie now; it keeps no prepared copies."""
        parameters, expected = self.parameters, self.expected[: len(self.parameters)]

        def hold() -> bool:
            if not all(p.untyped_storage().nbytes() for p in parameters if p.numel()):
                return False
            sources = FingerprintSources.of(parameters)
            found = torch.empty_like(expected, device=sources.pointers.device)
            return torch.equal(ops_for(found.device).fingerprint(sources, found).cpu(), expected)

        return hold

    def begin(self, mark: StreamMark | None, check_content: bool, grid: torch.Tensor | None) -> PendingRead:
        """Launches the read; see `WeightCache.read_back`."""
        items, stream = 0 if grid is None else grid.shape[0], self.stream
        if stream is not None:
            assert mark is not None, "where there is a GPU there are marks"
            mark.wait_on(stream)
            if grid is not None and (grid.dtype not in GRID_DTYPES or max(grid.stride()) > MAX_ROWS):
                with torch.cuda.stream(stream):
                    grid = grid.long().contiguous()
        slot = self._slot(items)
        fingerprints = slot.fingerprints if check_content else slot.fingerprints[:0]
        rows = None if grid is None else slot.rows
        ops_for(self.sources.pointers.device).fingerprint(self.sources, fingerprints, grid, rows, stream)
        expected = self.expected if check_content else None
        return PendingRead(stream, slot, expected, items, self.slots, len(self.parameters))

    def _slot(self, items: int) -> Slot:
        """One with room for so many items, from any thread: popping a list gives it to one of them only."""
        try:
            slot = self.slots.pop()
        except IndexError:
            return self._new_slot(items)
        return slot if slot.rows.shape[0] >= items else self._new_slot(items)

    def _new_slot(self, items: int) -> Slot:
        pinned, room = self.stream is not None, max(SMALLEST_SLOT, 1 << max(0, items - 1).bit_length())
        with torch.inference_mode(False):  # it is used again in any mode
            return Slot(
                torch.empty(self.expected.shape, dtype=torch.int32, device="cpu", pin_memory=pinned),
                torch.empty(room, 3, dtype=torch.int64, device="cpu", pin_memory=pinned),
            )


def _is_like(now: torch.Tensor, then: torch.Tensor) -> bool:
    """Whether a parameter that has moved could hold what it did: laid out as it was, in memory that is there."""
    alike = (now.shape, now.stride(), now.dtype, now.device) == (then.shape, then.stride(), then.dtype, then.device)
    return alike and (not now.numel() or now.untyped_storage().nbytes() > 0)
