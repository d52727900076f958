"""The protocol of kernels/hopper/gemm_swap_ab.py in plain Python, step by step as the kernel has it, for `barriers.run`.

`Faults` leave one rule out, so that a test can see that the emulation notices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.kernels.barriers import Barrier, CopyEngine, Process, Slot


@dataclass(frozen=True)
class Faults:
    early_release: bool = False  # a stage is given back while its products still run
    no_wait_for_empty: bool = False  # what is brought does not wait for the weights before it
    no_wait_for_brought: bool = False  # a chunk ends before what is brought for it is there
    one_place: bool = False  # every chunk ends where the first one does
    no_wait_for_merged: bool = False  # a chunk ends before all consumers have merged their shares of the moments
    merged_first: bool = False  # a share's barrier says so before it is there


@dataclass(frozen=True)
class Shape:
    """One launch of one CTA, of one tile; `brings`: residual or rotary words come behind the last step; `norm`:
    consumers merge moments, a share each."""

    consumers: int
    stages: int
    steps: int
    chunks: int
    brings: bool
    norm: bool = False


@dataclass
class Cta:
    """Shared memory, barriers and what came out."""

    shape: Shape
    faults: Faults
    engine: CopyEngine = field(default_factory=CopyEngine)
    done: list[tuple[int, int]] = field(default_factory=list)  # (consumer, chunk)

    def __post_init__(self) -> None:
        s = self.shape
        self.w = [[Slot() for _ in range(s.consumers)] for _ in range(s.stages)]
        self.x = [[Slot() for _ in range(s.chunks)] for _ in range(s.stages)]
        self.full = [Barrier(1) for _ in range(s.stages)]
        self.empty = [Barrier(s.consumers) for _ in range(s.stages)]
        self.shares = [Slot() for _ in range(s.consumers)]
        self.merged = Barrier(s.consumers)

    def processes(self) -> list[Process]:
        return [self._producer(), *(self._consumer(c) for c in range(self.shape.consumers))]

    def _next(self, stage: int, phase: int) -> tuple[int, int]:
        last = stage == self.shape.stages - 1
        return (0, phase ^ 1) if last else (stage + 1, phase)

    def _producer(self) -> Process:
        s = self.shape
        for k in range(s.stages):
            self._load_weights(k, k)
            yield lambda: True
        for k in range(s.stages):
            self._load_rows(k, k)
            yield lambda: True
        stage, phase = 0, 0
        for k in range(s.stages, s.steps):
            yield self.empty[stage].passed(phase)
            self._load_weights(stage, k)
            self._load_rows(stage, k)
            stage, phase = self._next(stage, phase)
        for h in range(s.chunks if s.brings else 0):
            if not self.faults.no_wait_for_empty:
                yield self.empty[stage].passed(phase)
            self.full[stage].expect(s.consumers)
            for c in range(s.consumers):
                self.engine.load(self.w[stage][c], ("extra", h, c), self.full[stage])
            yield lambda: True
            stage, phase = self._next(stage, phase)

    def _load_weights(self, stage: int, k: int) -> None:
        s = self.shape
        self.full[stage].expect(s.consumers + s.chunks)
        for c in range(s.consumers):
            self.engine.load(self.w[stage][c], ("w", k, c), self.full[stage])

    def _load_rows(self, stage: int, k: int) -> None:
        for h in range(self.shape.chunks):
            self.engine.load(self.x[stage][h], ("x", k, h), self.full[stage])

    def _consumer(self, c: int) -> Process:
        stage, phase = yield from self._main_loop(c)
        first = stage
        if self.shape.norm and not self.faults.no_wait_for_merged:
            yield self.merged.passed(0)
        for h in range(self.shape.chunks):
            if self.shape.brings and not self.faults.no_wait_for_brought:
                yield self.full[stage].passed(phase)
            unit = self.w[first if self.faults.one_place else stage][c]
            if self.shape.brings:
                unit.begin_read(("extra", h, c))
                yield lambda: True
                unit.end_read()
            for other, share in enumerate(self.shares if self.shape.norm else []):
                share.begin_read(("moments", other))
                share.end_read()
            assert not unit.writing and not unit.readers, f"chunk {h} is written where another still is"
            unit.content = ("out", h, c)
            unit.begin_read(unit.content)  # on its way out, until the CTA ends
            self.done.append((c, h))
            stage, phase = self._next(stage, phase)
            yield lambda: True

    def _merge(self, c: int) -> Process:
        if self.faults.merged_first:
            self.merged.arrive()
            yield lambda: True
        self.shares[c].content = ("moments", c)
        yield lambda: True
        if not self.faults.merged_first:
            self.merged.arrive()

    def _main_loop(self, c: int) -> Iterator[object]:
        s, flying = self.shape, list[int]()

        def settle(most: int) -> None:
            while len(flying) > most:
                ended = flying.pop(0)
                for slot in (self.w[ended][c], *self.x[ended]):
                    slot.end_read()

        stage, phase, before = 0, 0, 0
        for k in range(s.steps):
            yield self.full[stage].passed(phase)
            self.w[stage][c].begin_read(("w", k, c))
            for h, slot in enumerate(self.x[stage]):
                slot.begin_read(("x", k, h))
            flying.append(stage)
            yield lambda: True
            if s.norm and k == 0:  # under the first step's products, or before it
                yield from self._merge(c)
            if k:
                if self.faults.early_release:
                    self.empty[before].arrive()
                    yield lambda: True
                    settle(1)
                else:
                    settle(1)
                    self.empty[before].arrive()
            before = stage
            stage, phase = self._next(stage, phase)
        settle(0)
        self.empty[before].arrive()
        return stage, phase
