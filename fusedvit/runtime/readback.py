"""The one host read of a call: the rows of its grid, and whether the parameters still hold what they did.

One kernel (`kernels.fingerprint`) reads both on its own stream, overlapped with the encoder, into pinned memory. This
memory is reused, as allocating it takes longer than filling it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from fusedvit.graphs.capture import CurrentStream
from fusedvit.kernels.fingerprint import FingerprintSources
from fusedvit.kernels.load_inputs import GRID_DTYPES, MAX_ROWS
from fusedvit.model.digest import digest_of, has_memory
from fusedvit.model.ops import Ops, ops_for

SMALLEST_SLOT = 64  # items
BEGINNING = 2**14  # bytes checked of a prepared copy: as many as `kernels.fingerprint` reads consecutively


class StreamMark(NamedTuple):
    """A point in a stream. `wait_on` may be called once; it returns the event to `pool`."""

    event: torch.cuda.Event
    pool: list[torch.cuda.Event]

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream` wait until this point."""
        stream.wait_event(self.event)
        self.pool.append(self.event)


class StreamMarks:
    """Marks points in the streams of one GPU. Events are reused, as creating one takes longer than recording it.

    Thread-safe: popping a list gives an event to one thread only.
    """

    def __init__(self, device: torch.device) -> None:
        self._current = CurrentStream(device)
        self._pool: list[torch.cuda.Event] = []

    def here(self) -> StreamMark:
        """A mark of the current point in the current stream."""
        try:
            event = self._pool.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(self._current.get())
        return StreamMark(event, self._pool)


class Slot(NamedTuple):
    """Host memory, pinned if there is a GPU: fingerprints `[P]` int32 and a grid's rows `[room, 3]` int64."""

    fingerprints: torch.Tensor
    rows: torch.Tensor


class ReadBack(NamedTuple):
    """What a call has learned from the device.

    Attributes:
        unchanged: the parameters held, when the call began, what the weights were prepared from.
        rows: (t, h, w) of each item of the call's grid; empty if the grid was on the host.
        lost: prepared copies have lost their content, though nothing has written to them since.
    """

    unchanged: bool
    rows: list[list[int]]
    lost: bool = False


@dataclass(frozen=True)
class PendingRead:
    """A read in progress on `stream`; on a CPU, without a stream, it is already done.

    Attributes:
        slot: where the read writes; returned to `slots` afterwards.
        expected: fingerprints to compare with; None if the content is not checked.
        items: rows of the grid.
        parameters: how many of the fingerprints belong to parameters; the others belong to prepared copies.
    """

    stream: torch.cuda.Stream | None
    slot: Slot
    expected: torch.Tensor | None
    items: int
    slots: list[Slot]
    parameters: int | None = None

    def wait(self, meanwhile: Callable[[], bool]) -> ReadBack:
        """Runs `meanwhile`, another check of the weights, then blocks the host until the read is done."""
        try:
            unchanged = meanwhile()
        finally:
            if self.stream is not None:
                self.stream.synchronize()  # even after an exception: until then the GPU writes to the slot
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

    Copies are checked because memory may lose its content and keep its address, as in a serving engine's sleep mode:
    the engine fills parameters again, but not prepared copies.

    Five methods ask whether something is still the same:

        begin, wait        parameters and copies at the addresses of `sources`; the host read of a call
        moved              parameters at their current addresses; waits for the GPU
        parameters_hold    a function to call later: parameters at their addresses then; waits for the GPU
        agrees_with        two checks, by their fingerprints; does not read
        held_by            whether parameters are the same objects at the same addresses; does not read

    Attributes:
        parameters: the parameters.
        addresses: addresses of the parameters when the check was created.
        sources: the parameters, then the copies, as aliases of the memory that they had when the check was created.
        expected: their fingerprints at that time, `[P]` int32 on the host.
        stream: the stream of the check while the encoder runs; None on the CPU.
        marks: marks points in the streams that run the encoder; None on the CPU.
        slots: slots that no read is filling now.
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
        for dtype in GRID_DTYPES:  # loads the kernels that a call will launch
            rows = torch.zeros(1, 3, dtype=torch.int64, device=device)
            ops.fingerprint(sources, found[:0], rows.to(dtype), rows)
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        marks = StreamMarks(device) if device.type == "cuda" else None
        return ContentCheck(tuple(parameters), addresses, sources, found.cpu(), stream, marks)

    def with_copies(self, copies: Sequence[torch.Tensor], ops: Ops) -> "ContentCheck":
        """This check extended by the beginnings of flat `copies` as they are; waits for the GPU.

        Beginnings suffice, as memory that loses its content loses all of it, and keep a call's read short, as it shares
        the GPU with the encoder.
        """
        if not copies:
            return self
        beginnings = FingerprintSources.of([copy[: BEGINNING // copy.itemsize] for copy in copies])
        found = torch.empty(len(copies), dtype=torch.int32, device=beginnings.pointers.device)
        expected = torch.cat([self.expected, ops.fingerprint(beginnings, found).cpu()])
        sources = FingerprintSources.of([*self.sources.tensors, *beginnings.tensors])
        return replace(self, sources=sources, expected=expected, slots=[])

    def moved(self, ops: Ops) -> "ContentCheck | None":
        """This check at the current addresses of its parameters; None if their content differs. Waits for the GPU."""
        now, then = self.parameters, self.sources.tensors
        if not all(_is_like(p, alias) for p, alias in zip(now, then, strict=False)):
            return None
        sources = FingerprintSources.of([*now, *then[len(now) :]])
        found = torch.empty_like(self.expected, device=sources.pointers.device)
        if not torch.equal(ops.fingerprint(sources, found).cpu(), self.expected):
            return None
        return replace(self, addresses=[t.data_ptr() for t in sources.tensors[: len(now)]], sources=sources, slots=[])

    def digest(self) -> list[int]:
        """A hash of the parameters' whole content, where fingerprints only sample it; waits for the GPU."""
        return digest_of(self.sources.tensors[: len(self.parameters)])

    def agrees_with(self, now: "ContentCheck") -> bool:
        """Whether `now` covers as many parameters and copies with the same content and layout, at any addresses."""
        then = self.sources.tensors
        return (
            len(then) == len(now.sources.tensors)
            and all(map(_is_like, now.sources.tensors, then))
            and torch.equal(now.expected, self.expected)
        )

    def held_by(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all parameter memory that this check keeps alive belongs to `parameters`."""
        known = {*map(id, self.parameters)}  # others may be of a kind that has no address, as lazy modules' are
        now = {id(p): p.data_ptr() for p in parameters if id(p) in known and p.layout is torch.strided}
        kept = zip(self.parameters, map(torch.Tensor.data_ptr, self.sources.tensors), strict=False)
        return all(now.get(id(p)) == at for p, at in kept if at and isinstance(p, torch.nn.Parameter))

    def parameters_hold(self) -> Callable[[], bool]:
        """A function that returns whether parameters still hold what they held, at any addresses.

        It keeps no prepared copies alive.
        """
        parameters, expected = self.parameters, self.expected[: len(self.parameters)]

        def hold() -> bool:
            if not all(map(has_memory, parameters)):
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
        """A slot with room for `items` rows. Thread-safe: popping a list gives a slot to one thread only."""
        try:
            slot = self.slots.pop()
        except IndexError:
            return self._new_slot(items)
        return slot if slot.rows.shape[0] >= items else self._new_slot(items)

    def _new_slot(self, items: int) -> Slot:
        pinned, room = self.stream is not None, max(SMALLEST_SLOT, 1 << max(0, items - 1).bit_length())
        with torch.inference_mode(False):  # the slot will be reused in any mode
            return Slot(
                torch.empty(self.expected.shape, dtype=torch.int32, device="cpu", pin_memory=pinned),
                torch.empty(room, 3, dtype=torch.int64, device="cpu", pin_memory=pinned),
            )


def _is_like(now: torch.Tensor, then: torch.Tensor) -> bool:
    """Whether a parameter that has moved could still hold its content: in the same layout, and not freed."""
    alike = (now.shape, now.stride(), now.dtype, now.device) == (then.shape, then.stride(), then.dtype, then.device)
    return alike and has_memory(now)
