"""The protocol of kernels/hopper/alternating.py in plain Python, step by step as the kernel has it, for `barriers.run`.

`Faults` leave one rule out, so that a test can see that the emulation notices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.kernels.barriers import Barrier, CopyEngine, Process, Slot

CONSUMERS = 2


@dataclass(frozen=True)
class Faults:
    no_turns: bool = False  # consumers begin when they like
    early_release: bool = False  # a stage is given back while its products still run
    no_wait_for_room: bool = False  # what is brought, or ended, goes where a chunk is still leaving
    no_wait_for_brought: bool = False  # a chunk ends before what is brought for it is there


@dataclass(frozen=True)
class Shape:
    """One launch of one CTA; `brings`: residual or rotary words come for each chunk; `dwell`: steps that a chunk takes
    to leave."""

    stages: int
    steps: int
    tiles: int
    chunks: int
    brings: bool = False
    dwell: int = 0


@dataclass
class Cta:
    """Shared memory, barriers and what came out."""

    shape: Shape
    faults: Faults
    engine: CopyEngine = field(default_factory=CopyEngine)
    done: list[tuple[int, int]] = field(default_factory=list)  # (tile, chunk)

    def __post_init__(self) -> None:
        s = self.shape
        self.stage = [Slot() for _ in range(s.stages)]
        self.full = [Barrier(1) for _ in range(s.stages)]
        self.empty = [Barrier(1) for _ in range(s.stages)]
        self.out = [Slot() for _ in range(CONSUMERS)]  # both halves of a chunk
        self.brought = [Barrier(1) for _ in range(CONSUMERS)]
        self.turn = [Barrier(1) for _ in range(CONSUMERS)]
        self.leaving = [False] * CONSUMERS
        self.running = CONSUMERS

    def processes(self) -> list[Process]:
        consumers = [self._consumer(c) for c in range(CONSUMERS)]
        return [self._producer(), *consumers, *(self._stores(c) for c in range(CONSUMERS))]

    def _producer(self) -> Process:
        s = self.shape
        for at in range(s.tiles * s.steps):
            stage = at % s.stages
            if at >= s.stages:
                yield self.empty[stage].passed((at // s.stages & 1) ^ 1)
            self.full[stage].expect(1)
            self.engine.load(self.stage[stage], at, self.full[stage])
            yield lambda: True

    def _consumer(self, c: int) -> Process:
        s = self.shape
        for i in range(c, s.tiles, CONSUMERS):
            yield from self._make_room(i, c, 0)
            if not self.faults.no_turns:
                yield self.turn[c].passed(i // CONSUMERS & 1 ^ (1 - c))
            yield from self._main_loop(i, c)
            for h in range(s.chunks):
                if h:
                    yield from self._make_room(i, c, h)
                yield from self._end_chunk(i, c, h)
        yield lambda: not self.leaving[c]
        self.running -= 1

    def _make_room(self, i: int, c: int, h: int) -> Iterator[object]:
        if not self.faults.no_wait_for_room:
            yield lambda: not self.leaving[c]
        if self.shape.brings:
            self.brought[c].expect(1)
            self.engine.load(self.out[c], ("extra", i, h), self.brought[c])
        yield lambda: True

    def _main_loop(self, i: int, c: int) -> Iterator[object]:
        s, flying = self.shape, list[int]()
        for k in range(s.steps):
            at = i * s.steps + k
            stage = at % s.stages
            yield self.full[stage].passed(at // s.stages & 1)
            self.stage[stage].begin_read(at)
            flying.append(stage)
            yield lambda: True
            before = self.empty[(at - 1) % s.stages]
            if k and self.faults.early_release:
                before.arrive()
                yield lambda: True
            if k:
                self.stage[flying.pop(0)].end_read()
                yield lambda: True
            if k and not self.faults.early_release:
                before.arrive()
        self.turn[1 - c].arrive()  # a step is still running
        yield lambda: True
        self.stage[flying.pop(0)].end_read()
        self.empty[stage].arrive()

    def _end_chunk(self, i: int, c: int, h: int) -> Iterator[object]:
        place = self.out[c]
        if self.shape.brings:
            if not self.faults.no_wait_for_brought:
                yield self.brought[c].passed((i // CONSUMERS * self.shape.chunks + h) & 1)
            place.begin_read(("extra", i, h))
            yield lambda: True
            place.end_read()
        assert not place.readers and not place.writing, f"chunk {h} of tile {i} goes where another still is"
        place.content = (i, h)
        place.begin_read(place.content)
        self.leaving[c] = True
        yield lambda: True

    def _stores(self, c: int) -> Process:
        """The copy engine's stores."""
        while True:
            yield lambda: self.leaving[c] or not self.running
            if not self.leaving[c]:
                return
            for _ in range(self.shape.dwell):
                yield lambda: True
            self.out[c].end_read()
            self.done.append(self.out[c].content)
            self.leaving[c] = False
