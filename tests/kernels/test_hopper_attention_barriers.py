"""The barrier protocol of kernels/hopper/attention.py, line for line, under random interleaving.

Shows deadlocks, phases taken for others, and stages overwritten while they are read. Change it with the kernel.
"""

import random
from dataclasses import dataclass, field

import pytest

from tests.kernels.barriers import Barrier, CopyEngine, Process, Slot, run


@dataclass
class Block:
    """One CTA: `tiles` as (number of key blocks, per consumer whether any of its queries lies inside the frame).

    `warps` of a consumer that wait and arrive for themselves: 1 where it arrives as a whole.
    """

    tiles: list[tuple[int, tuple[bool, ...]]]
    consumers: int
    stages: int
    ping_pong: bool
    warps: int = 1
    stored: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = CopyEngine()
        self.q = [Slot() for _ in range(2 * self.consumers)]
        self.k, self.v = ([Slot() for _ in range(self.stages)] for _ in range(2))
        arriving = self.consumers * self.warps
        self.q_full, self.q_empty = [Barrier(1) for _ in range(2)], [Barrier(arriving) for _ in range(2)]
        self.full = [Barrier(1) for _ in range(self.stages)]
        self.empty = [Barrier(arriving) for _ in range(self.stages)]
        self.turn = [Barrier(self.warps) for _ in range(self.consumers)]

    def producer(self) -> Process:
        slot, values = 0, None
        for nth, (blocks, _) in enumerate(self.tiles):
            buffer = nth & 1
            yield self.q_empty[buffer].passed(((nth >> 1) & 1) ^ 1)
            self.q_full[buffer].expect(self.consumers)
            for c in range(self.consumers):
                self.engine.load(self.q[buffer * self.consumers + c], (nth, c), self.q_full[buffer])
            for j in range(blocks):
                i = slot % self.stages
                yield self.empty[i].passed(((slot // self.stages) & 1) ^ 1)
                self.full[i].expect(2 if slot > 0 else 1)
                self.engine.load(self.k[i], (nth, j), self.full[i])
                if slot > 0:
                    self.engine.load(self.v[i], values, self.full[i])
                values = (nth, j)
                slot += 1
        if slot > 0:
            i = slot % self.stages
            yield self.empty[i].passed(((slot // self.stages) & 1) ^ 1)
            self.full[i].expect(1)
            self.engine.load(self.v[i], values, self.full[i])

    def my_turn(self, slot: int, c: int) -> Process:
        if self.ping_pong:
            yield self.turn[c].passed(slot & 1 if c == 0 else (slot & 1) ^ 1)

    def next_turn(self, c: int) -> None:
        if self.ping_pong:
            self.turn[(c + 1) % self.consumers].arrive()

    def full_wait(self, slot: int) -> Process:
        yield self.full[slot % self.stages].passed((slot // self.stages) & 1)

    def products(self, c: int, slot: int, queries: tuple[Slot, int], key: object, value: object) -> Process:
        """Issues Q K and P V in turn, waits for the first; softmax runs under the second, which the caller awaits."""
        stage = slot % self.stages
        yield from self.my_turn(slot, c)
        queries[0].begin_read((queries[1], c))
        self.k[stage].begin_read(key)
        self.v[stage].begin_read(value)
        self.next_turn(c)
        yield lambda: True
        queries[0].end_read()
        self.k[stage].end_read()

    def consumer(self, c: int) -> Process:
        if not self.tiles:
            return
        yield self.q_full[0].passed(0)
        yield self.full[0].passed(0)
        self.k[0].begin_read((0, 0))
        yield lambda: True
        self.k[0].end_read()
        self.empty[0].arrive()
        slot = 1
        yield from self.full_wait(slot)
        for nth, (blocks, inside) in enumerate(self.tiles):
            last = nth + 1 == len(self.tiles)
            steps = blocks if inside[c] else 1
            for step in range(1, steps):
                stage, queries = slot % self.stages, (self.q[(nth & 1) * self.consumers + c], nth)
                yield from self.products(c, slot, queries, (nth, step), (nth, step - 1))
                slot += 1
                yield from self.full_wait(slot)
                self.v[stage].end_read()
                self.empty[stage].arrive()
            for _ in range(steps, blocks):
                yield from self.my_turn(slot, c)
                self.next_turn(c)
                self.empty[slot % self.stages].arrive()
                slot += 1
                yield from self.full_wait(slot)
            stage, buffer = slot % self.stages, (nth + 1) & 1
            if last:
                self.v[stage].begin_read((nth, blocks - 1))
                yield lambda: True
            else:
                yield self.q_full[buffer].passed(((nth + 1) >> 1) & 1)
                queries = (self.q[buffer * self.consumers + c], nth + 1)
                yield from self.products(c, slot, queries, (nth + 1, 0), (nth, blocks - 1))
                self.q_empty[nth & 1].arrive()
                yield from self.full_wait(slot + 1)
            self.v[stage].end_read()
            self.empty[stage].arrive()
            slot += 1
            self.stored.append((nth, c))

    def run(self, seed: int) -> None:
        consumers = [self.consumer(c) for c in range(self.consumers) for _ in range(self.warps)]
        processes = [self.producer(), *consumers]
        run(processes, self.engine, random.Random(seed))


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("warps", [1, 4])
def test_any_interleaving_ends_with_every_tile_stored(warps: int, consumers: int, stages: int, ping_pong: bool) -> None:
    rng = random.Random(consumers * 10 + stages)
    for seed in range(60 // warps):
        tiles = [
            (rng.choice([1, 1, 2, 3, 7]), (True, *(rng.random() < 0.7 for _ in range(consumers - 1))))
            for _ in range(rng.choice([0, 1, 2, 3, 9]))
        ]
        block = Block(tiles, consumers, stages, ping_pong, warps)
        block.run(seed)
        whole = [(n, c) for n in range(len(tiles)) for c in range(consumers) for _ in range(warps)]
        assert sorted(block.stored) == whole


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("fault", ["frees early", "forgets to free", "one stage", "no turn"])
def test_the_emulation_notices(fault: str, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: each must show under some interleaving."""
    stages, ping_pong = (1, False) if fault == "one stage" else (2, True)
    if fault == "frees early":
        monkeypatch.setattr(Block, "full_wait", _free_and_wait)
    elif fault == "forgets to free":
        monkeypatch.setattr(Barrier, "arrive", _never)
    elif fault == "no turn":
        monkeypatch.setattr(Block, "next_turn", lambda self, c: None)
    with pytest.raises(AssertionError):
        for seed in range(200):
            Block([(3, (True, True)), (2, (True, True)), (4, (True, False))], 2, stages, ping_pong, warps).run(seed)


def _free_and_wait(self: Block, slot: int) -> Process:
    """The wait of a consumer that frees the stage before its P V has read it."""
    if slot > 1:
        self.empty[(slot - 1) % self.stages].phase += 1
    yield self.full[slot % self.stages].passed((slot // self.stages) & 1)


def _never(self: Barrier) -> None:
    """An arrival that is lost where several are counted."""
    self.arrived += self.count == 1
    self._end()
