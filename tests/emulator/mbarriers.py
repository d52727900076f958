"""Barriers in shared memory, and those that warps of a CTA meet at by number; with what those that wait learn."""

from dataclasses import dataclass, field

import numpy as np

from tests.emulator.arithmetic import Array

NOTHING: Array = np.zeros(1, np.int32)


class WrongBarrier(AssertionError):
    """A barrier was used against its contract."""


@dataclass
class MBarrier:
    """`mbarrier`: a phase ends when as many have arrived as expected and all bytes asked for are there.

    Attributes:
        before: phases of those that lay at the same address before.
        told: what those that arrived in this phase and before knew (see races.py); `known`: at the last phase's end.
    """

    count: int
    phase: int = 0
    pending: int = 0
    bytes_due: int = 0
    before: int = 0
    told: Array = field(default_factory=lambda: NOTHING)
    known: Array = field(default_factory=lambda: NOTHING)

    def __post_init__(self) -> None:
        self.pending = self.count

    @property
    def phases(self) -> int:
        """That have ended at this address, ever."""
        return self.before + self.phase

    def tell(self, known: Array) -> None:
        self.told = np.maximum(self.told, known)

    def arrive(self, times: int = 1, expect: int = 0) -> None:
        self.bytes_due += expect
        self.pending -= times
        if self.pending < 0:
            raise WrongBarrier(f"{times} arrivals where {self.pending + times} of {self.count} were due")
        self._end()

    def complete(self, size: int) -> None:
        """`size` bytes have arrived."""
        self.bytes_due -= size
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.bytes_due == 0:
            self.phase += 1
            self.pending = self.count
            self.known = self.told

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity has ended: the one under way has the other."""
        return self.phase & 1 != parity & 1


@dataclass
class Meeting:
    """`barrier.sync`, `bar.sync`: warps wait until `threads` are there."""

    threads: int
    arrived: int = 0
    rounds: int = 0
    told: Array = field(default_factory=lambda: NOTHING)
    known: Array = field(default_factory=lambda: NOTHING)

    def arrive(self, known: Array) -> int:
        """The round that the warp must see ended."""
        self.arrived += 32
        self.told = np.maximum(self.told, known)
        due = self.rounds
        if self.arrived == self.threads:
            self.arrived, self.rounds, self.known = 0, self.rounds + 1, self.told
        return due


@dataclass
class Barriers:
    """Those of a CTA of so many threads."""

    threads: int
    by_address: dict[int, MBarrier] = field(default_factory=dict)
    by_number: dict[int, Meeting] = field(default_factory=dict)
    _phases: dict[int, int] = field(default_factory=dict)

    def begin(self, address: int, count: int) -> None:
        self.by_address[address] = MBarrier(count, before=self._phases.get(address, 0))

    def end(self, address: int) -> None:
        self._phases[address] = self.at(address).phases + 1
        del self.by_address[address]

    def at(self, address: int) -> MBarrier:
        """
        Raises:
            WrongBarrier: none was initialised there.
        """
        if address not in self.by_address:
            raise WrongBarrier(f"no barrier at {address}, only at {sorted(self.by_address)}")
        return self.by_address[address]

    def numbered(self, number: int, threads: int | None) -> Meeting:
        """
        Raises:
            WrongBarrier: others wait there for another number of threads.
        """
        meeting = self.by_number.setdefault(number, Meeting(threads or self.threads))
        if meeting.threads != (threads or self.threads):
            if meeting.arrived:
                raise WrongBarrier(f"barrier {number}: {threads} threads, but {meeting.threads} for those that wait")
            meeting.threads = threads or self.threads
        return meeting
