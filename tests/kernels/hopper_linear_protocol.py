"""The protocol of kernels/hopper/gemm.py in plain Python, step by step as the kernel has it, for `barriers.run`.

`Faults` leave one rule out, so that a test can see that the emulation notices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.kernels.barriers import Barrier, CopyEngine, Process, Slot


@dataclass(frozen=True)
class Faults:
    no_turns: bool = False  # ping-pong consumers begin when they like
    early_release: bool = False  # a stage is given back while its products still run
    no_store_wait: bool = False  # staging buffers are given back while they are still leaving


@dataclass(frozen=True)
class Shape:
    """One launch of one CTA: `consumers` 1 is ping-pong; `brings` says that the epilogue's inputs come in by copies."""

    consumers: int
    stages: int
    steps: int
    tiles: int
    chunks: int = 2
    brings: bool = False
    dwell: int = 0  # steps that a chunk takes to leave

    @property
    def warpgroups(self) -> int:
        return max(2, self.consumers)


@dataclass
class Cta:
    """Shared memory, barriers and what came out."""

    shape: Shape
    faults: Faults
    engine: CopyEngine = field(default_factory=CopyEngine)
    done: list[tuple[int, int, int]] = field(default_factory=list)  # (tile, place in the tile, chunk)

    def __post_init__(self) -> None:
        s = self.shape
        self.x = [[Slot() for _ in range(s.consumers)] for _ in range(s.stages)]
        self.w = [Slot() for _ in range(s.stages)]
        self.full = [Barrier(1) for _ in range(s.stages)]
        self.empty = [Barrier(s.consumers) for _ in range(s.stages)]
        self.staging = [[Slot() for _ in range(s.chunks)] for _ in range(s.warpgroups)]
        self.staged = [Barrier(1) for _ in range(s.warpgroups)]
        self.unstaged = [Barrier(1) for _ in range(s.warpgroups)]
        self.turn = [Barrier(1), Barrier(1)]
        self.leaving: list[list[Slot]] = [[] for _ in range(s.warpgroups)]
        self.running = s.warpgroups

    def processes(self) -> list[Process]:
        consumers = [self._consumer(c) for c in range(self.shape.warpgroups)]
        return [self._producer(), *consumers, *(self._stores(c) for c in range(self.shape.warpgroups))]

    def _producer(self) -> Process:
        s = self.shape
        ahead = min(s.steps, s.stages) if s.tiles else 0
        for k in range(ahead):
            self.full[k].expect(1 + s.consumers)
            self.engine.load(self.w[k], ("w", 0, k), self.full[k])
            yield lambda: True
        for k in range(ahead):
            self._load_x(k, 0, k)
            yield lambda: True
        for i in range(s.tiles):
            for k in range(s.steps):
                at = i * s.steps + k
                stage = at % s.stages
                if at >= ahead:
                    yield self.empty[stage].passed((at // s.stages & 1) ^ 1)
                    self.full[stage].expect(1 + s.consumers)
                    self.engine.load(self.w[stage], ("w", i, k), self.full[stage])
                    self._load_x(stage, i, k)
                yield lambda: True
                if s.brings and k == min(s.steps - 1, s.stages):
                    for c in range(s.consumers) if s.consumers > 1 else [i % 2]:
                        yield from self._bring(i, c)

    def _load_x(self, stage: int, i: int, k: int) -> None:
        for c in range(self.shape.consumers):
            self.engine.load(self.x[stage][c], ("x", i, k, c), self.full[stage])

    def _phase(self, i: int) -> int:
        return (i if self.shape.consumers > 1 else i // 2) & 1

    def _bring(self, i: int, c: int) -> Iterator[object]:
        yield self.unstaged[c].passed(self._phase(i))
        self.staged[c].expect(self.shape.chunks)
        for j, chunk in enumerate(self.staging[c]):
            self.engine.load(chunk, ("extra", i, j), self.staged[c])

    def _consumer(self, c: int) -> Process:
        ping_pong = self.shape.consumers == 1
        for i in range(c if ping_pong else 0, self.shape.tiles, 2 if ping_pong else 1):
            yield from self._main_loop(i, c, 0 if ping_pong else c)
            yield from self._end_tile(i, c, 0 if ping_pong else c)
        yield lambda: not self.leaving[c]
        self.running -= 1

    def _main_loop(self, i: int, c: int, place: int) -> Iterator[object]:
        s = self.shape
        flying: list[tuple[int, int]] = []

        def settle(most: int) -> None:
            while len(flying) > most:
                stage, _ = flying.pop(0)
                self.x[stage][place].end_read()
                self.w[stage].end_read()

        if s.consumers == 1 and not self.faults.no_turns:
            yield self.turn[c].passed(self._phase(i) ^ (1 - c))
        for k in range(s.steps):
            at = i * s.steps + k
            stage = at % s.stages
            yield self.full[stage].passed(at // s.stages & 1)
            self.x[stage][place].begin_read(("x", i, k, place))
            self.w[stage].begin_read(("w", i, k))
            flying.append((stage, k))
            yield lambda: True
            if self.faults.early_release and k:
                self.empty[(at - 1) % s.stages].arrive()
                yield lambda: True
            if s.consumers == 1 and k == s.steps - 1:
                self.turn[1 - c].arrive()
            settle(1)
            yield lambda: True
            if k == 0:
                if not self.faults.no_store_wait:
                    yield lambda: not self.leaving[c]
                self.unstaged[c].arrive()
            elif not self.faults.early_release:
                self.empty[(at - 1) % s.stages].arrive()
        settle(0)
        self.empty[stage].arrive()

    def _end_tile(self, i: int, c: int, place: int) -> Iterator[object]:
        if self.shape.brings:
            yield self.staged[c].passed(self._phase(i))
        for j, chunk in enumerate(self.staging[c]):
            if self.shape.brings:
                chunk.begin_read(("extra", i, j))
                yield lambda: True
                chunk.end_read()
            assert not chunk.readers and not chunk.writing, f"tile {i} overwrites a chunk that is still leaving"
            chunk.content = ("out", i, place, j)
            chunk.begin_read(chunk.content)
            self.leaving[c].append(chunk)
            yield lambda: True

    def _stores(self, c: int) -> Process:
        """The copy engine's stores, in the order in which they were asked for."""
        while True:
            yield lambda: bool(self.leaving[c]) or not self.running
            if not self.leaving[c]:
                return
            for _ in range(self.shape.dwell):
                yield lambda: True
            chunk = self.leaving[c][0]
            _, i, place, j = chunk.content
            chunk.end_read()
            self.leaving[c].pop(0)
            self.done.append((i, place, j))


@dataclass
class Chain:
    """Launches one after another on a few SMs, each begun early: a launch's CTAs begin in order once every CTA of the
    launch before has begun, hold an SM, wait for that launch's end, and meet the other parts of their tile.

    `hasty`: a fault, CTAs begin once one of the launch before has.
    """

    sms: int
    tiles: int
    splits: int
    launches: int
    hasty: bool = False

    def processes(self) -> list[Process]:
        self.begun, self.ended = [0] * self.launches, [0] * self.launches
        self.arrived = [[0] * self.tiles for _ in range(self.launches)]
        self.free = self.sms
        return [self._cta(launch, p) for launch in range(self.launches) for p in range(self.tiles * self.splits)]

    def _cta(self, launch: int, p: int) -> Process:
        ctas, before = self.tiles * self.splits, launch - 1
        enough = 1 if self.hasty else ctas
        yield lambda: self.free > 0 and self.begun[launch] == p and (launch == 0 or self.begun[before] >= enough)
        self.free -= 1
        self.begun[launch] += 1
        yield lambda: launch == 0 or self.ended[before] == ctas  # the grid's wait
        self.arrived[launch][p // self.splits] += 1
        yield lambda: self.arrived[launch][p // self.splits] == self.splits
        self.ended[launch] += 1
        self.free += 1


def int32(n: int) -> int:
    """`n` as 32 bits hold it."""
    return (n + 2**31) % 2**32 - 2**31


@dataclass
class Meeting:
    """The parts of one tile over several launches; each part draws a number and waits for its launch's others."""

    splits: int
    launches: int
    counter: int = 0
    waits: bool = True  # else a fault
    partials: list[int] = field(default_factory=list)
    launch: int = 0
    finished: int = 0

    def processes(self) -> list[Process]:
        self.partials = [-1] * self.splits
        return [self._part(s) for s in range(self.splits)]

    def _part(self, s: int) -> Process:
        for launch in range(self.launches):
            yield lambda at=launch: self.launch == at  # the previous launch has ended
            self.partials[s] = launch
            yield lambda: True
            whole = 1 << (self.splits - 1).bit_length()
            mine = whole - self.splits + 1 if s == self.splits - 1 else 1
            drawn, self.counter = self.counter, int32(self.counter + mine)
            complete = int32((drawn | (whole - 1)) + 1)
            if self.waits:
                yield lambda goal=complete: int32(self.counter - goal) >= 0
            for theirs in self.partials:
                assert theirs == launch, f"launch {launch} takes a sum of launch {theirs}"
            self.finished += 1
            if self.finished == self.splits:
                self.finished, self.launch = 0, self.launch + 1
