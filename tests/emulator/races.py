"""Accesses to shared memory that nothing puts in order, found by vector clocks whatever order they happened to take.

Agents are warps, and for each warp its products in flight and its boxes on their way out, which end with the group that
it waits for, and barriers, for the boxes that they count. A clock is advanced by whoever hands on what it has done: an
arrival, a meeting, a group; who waits for it knows all that it knew. An access must know of every conflicting one
before it, where every 2 bytes are told apart. An asynchronous access knows what its issuer knew.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.emulator.arithmetic import Array

WORD = 2  # bytes: the least that a warp of ours stores
MOST_BARRIERS = 64  # of a CTA


class Race(AssertionError):
    """Two accesses to the same shared memory, at least one of them a write, in no order."""


@dataclass
class Races:
    """The history of a CTA's shared memory of `size` bytes and so many warps."""

    size: int
    warps: int
    _writer: Array = field(init=False)
    _written: Array = field(init=False)  # the writer's clock
    _read: Array = field(init=False)  # [agents that read, words], their clocks
    _barriers: dict[int, int] = field(default_factory=dict)
    clocks: list[Array] = field(init=False)  # of each warp: what it knows of every agent

    def __post_init__(self) -> None:
        words = -(-self.size // WORD)
        self._writer, self._written = np.zeros(words, np.int32), np.zeros(words, np.int32)
        self._read = np.zeros((3 * self.warps, words), np.int32)
        self.clocks = [np.zeros(3 * self.warps + MOST_BARRIERS, np.int32) for _ in range(self.warps)]
        for warp, clock in enumerate(self.clocks):
            clock[warp] = 1

    # Agents by number.

    def products(self, warp: int) -> int:
        return self.warps + warp

    def boxes(self, warp: int) -> int:
        return 2 * self.warps + warp

    def barrier(self, address: int) -> int:
        return 3 * self.warps + self._barriers.setdefault(address, len(self._barriers))

    # Accesses to words by number.

    def read(self, words: Array, warp: int, agent: int | None = None, clock: int | None = None) -> None:
        """By `warp`, or on its behalf by an agent, whose end is known by `clock`."""
        known = self.clocks[warp]
        self._check_writes(words, known, f"warp {warp} reads")
        self._read[warp if agent is None else agent, words] = known[warp] if clock is None else clock

    def write(
        self,
        words: Array,
        warp: int,
        agent: int | None = None,
        clock: int | None = None,
        changed: Array | None = None,
    ) -> None:
        """`changed`: those that hold another value since. Warps may write the same in any order, as Triton's do."""
        known = self.clocks[warp]
        if changed is not None:
            other = self._written[words] <= known[self._writer[words]]
            words = words[other | np.isin(words, changed)]
        self._check_writes(words, known, f"warp {warp} writes")
        readers = self._read[:, words].max(1, initial=0)
        late = np.flatnonzero(readers > known[: len(readers)])
        if late.size:
            word = words[self._read[late[0], words].argmax()]
            raise Race(f"warp {warp} writes byte {word * WORD} while {self._name(int(late[0]))} may still read it")
        self._writer[words] = warp if agent is None else agent
        self._written[words] = known[warp] if clock is None else clock

    def _check_writes(self, words: Array, known: Array, what: str) -> None:
        late = np.flatnonzero(self._written[words] > known[self._writer[words]])
        if late.size:
            word = words[late[0]]
            raise Race(f"{what} byte {word * WORD}, but does not wait for {self._name(int(self._writer[word]))}")

    def _name(self, agent: int) -> str:
        kind, warp = divmod(agent, self.warps)
        if kind > 2:
            at = {number: address for address, number in self._barriers.items()}[agent - 3 * self.warps]
            return f"what is brought for the barrier at {at}"
        return (f"warp {warp}", f"a product of warp {warp}", f"a box that warp {warp} sends")[kind]

    # Order.

    def hand_on(self, warp: int) -> Array:
        """What `warp` knows now, for those that wait for it; what it does from here on they do not know."""
        known = self.clocks[warp].copy()
        self.clocks[warp][warp] += 1
        return known

    def learn(self, warp: int, known: Array) -> None:
        np.maximum(self.clocks[warp], known, out=self.clocks[warp])

    def ended(self, warp: int, agent: int, clock: int) -> None:
        """`warp` knows that `agent` is done up to `clock`."""
        self.clocks[warp][agent] = max(self.clocks[warp][agent], clock)
