"""Hopper's barriers and copy engine in plain Python, run under random interleaving.

A protocol is written as generators, one a warp or warpgroup, that yield whatever they wait for. `run` steps them in
random order, completing copies at random moments, until all are done or nobody can move.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Process = Iterator[Callable[[], bool]]


@dataclass
class Barrier:
    """An mbarrier: a phase ends once `count` arrivals are in and every expected byte has come."""

    count: int
    phase: int = 0
    arrived: int = 0
    awaited: int = 0

    def arrive(self) -> None:
        assert self.arrived < self.count, "more arrivals than the barrier counts in one phase"
        self.arrived += 1
        self._end()

    def expect(self, copies: int) -> None:
        self.awaited += copies
        self.arrive()

    def copied(self) -> None:
        self.awaited -= 1
        self._end()

    def passed(self, parity: int) -> Callable[[], bool]:
        """What a wait for `parity` yields: like the hardware, it cannot tell a phase from the one two later."""
        return lambda: self.phase & 1 != parity

    def _end(self) -> None:
        if self.arrived == self.count and self.awaited == 0:
            self.phase, self.arrived = self.phase + 1, 0


@dataclass
class Slot:
    """A piece of shared memory: what lies there, and who is reading it."""

    content: Any = None
    writing: bool = False
    readers: int = 0

    def begin_read(self, expected: Any) -> None:
        assert not self.writing, f"read while {expected} or another is being written"
        assert self.content == expected, f"expected {expected}, found {self.content}"
        self.readers += 1

    def end_read(self) -> None:
        self.readers -= 1


@dataclass
class CopyEngine:
    """Copies that are under way, in no order."""

    pending: list[tuple[Slot, Any, Barrier]] = field(default_factory=list)

    def load(self, slot: Slot, content: Any, barrier: Barrier) -> None:
        assert not slot.readers, f"{content} overwrites {slot.content}, which is being read"
        assert not slot.writing, f"{content} overwrites what is on its way"
        slot.writing = True
        self.pending.append((slot, content, barrier))

    def complete(self, index: int) -> None:
        slot, content, barrier = self.pending.pop(index)
        slot.content, slot.writing = content, False
        barrier.copied()


def run(processes: Iterable[Process], engine: CopyEngine, rng: random.Random) -> None:
    """Runs all to their ends. Raises AssertionError on a deadlock, or what a process asserts."""
    waiting = [(p, lambda: True) for p in processes]
    while waiting:
        ready = [i for i, (_, condition) in enumerate(waiting) if condition()]
        assert ready or engine.pending, f"deadlock: {len(waiting)} processes wait"
        choice = rng.randrange(len(ready) + len(engine.pending))
        if choice >= len(ready):
            engine.complete(choice - len(ready))
            continue
        process, _ = waiting[ready[choice]]
        try:
            waiting[ready[choice]] = (process, next(process))
        except StopIteration:
            del waiting[ready[choice]]
    assert not engine.pending, "copies that nobody waited for"
