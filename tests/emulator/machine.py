"""Warps of a grid, run a piece of code at a time in an order drawn at random, with what is asynchronous late or early.

Where nothing can go on, it is a deadlock.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.emulator.mbarriers import Barriers
from tests.emulator.memory import GlobalMemory, SharedMemory
from tests.emulator.program import Code, address_of_param
from tests.emulator.special import DONE
from tests.emulator.tma import TensorMap
from tests.emulator.warp import Cta, Warp

MOST_TURNS = 3_000_000  # some that wait for others ask again and again


def promptness_for(seed: int) -> float:
    """By seed: what is asynchronous lands late, now and then, or early."""
    return (0.02, 0.3, 0.9)[seed % 3]


class Deadlock(AssertionError):
    """No warp can go on, and nothing is on its way."""


class Abandons(AssertionError):
    """A warp ends before its stores have read shared memory, which another CTA may be given then."""


class Overtakes(AssertionError):
    """A launch may end before the one that it follows."""


@dataclass(frozen=True)
class Launch:
    """A grid of one dimension, its arguments in order (tensor maps, addresses, numbers)."""

    code: Code
    programs: int
    arguments: tuple[Any, ...]
    shared_bytes: int
    early: bool = False  # programmatic dependent launch


@dataclass
class Machine:
    """Runs launches.

    Attributes:
        seed: of the order.
        resident: CTAs at a time; they start in order.
        promptness: share of the turns that go to what is asynchronous, while there is any.
        turns: taken so far.
        ran: numbers of the instructions that did something to more than registers.
    """

    seed: int = 0
    resident: int = 8
    promptness: float = 0.3
    turns: int = 0
    ran: set[int] = field(default_factory=set)

    def run(self, launch: Launch, memory: GlobalMemory) -> None:
        """
        Raises:
            Deadlock: nothing can go on.
            WrongAccess, WrongBarrier, Unsupported: what a kernel must not do, or the emulator cannot.
        """
        rng, code = random.Random(self.seed), launch.code
        waiting, end = deque(range(launch.programs)), self.turns + MOST_TURNS
        warps: list[Warp] = []
        ctas: list[Cta] = []
        with np.errstate(all="ignore"):
            while waiting or warps:
                while waiting and len(ctas) < self.resident:
                    ctas.append(self._start(launch, waiting.popleft(), memory, warps))
                if self.turns == end:
                    raise Deadlock(f"no end after {MOST_TURNS} turns, at pieces {sorted({w.at for w in warps})}")
                self._turn(rng, code, warps, ctas)
                ctas[:] = [cta for cta in ctas if cta.live or _finish(cta, launch.early)]

    def _start(self, launch: Launch, program: int, memory: GlobalMemory, warps: list[Warp]) -> Cta:
        threads = launch.code.threads
        cta = Cta(SharedMemory(launch.shared_bytes, threads // 32), Barriers(threads), live=threads // 32)
        for number in range(cta.live):
            warp = Warp(launch.code, number, cta, memory, (program, launch.programs))
            warp.ran = self.ran
            for i, argument in enumerate(launch.arguments):
                warp.arguments.append(0 if isinstance(argument, TensorMap) else argument)
                if isinstance(argument, TensorMap):
                    warp.maps[address_of_param(i)] = argument
            warps.append(warp)
        return cta

    def _turn(self, rng: random.Random, code: Code, warps: list[Warp], ctas: list[Cta]) -> None:
        self.turns += 1
        if rng.random() < self.promptness and _something_lands(rng, warps, ctas):
            return
        for _ in range(4):
            warp = rng.choice(warps)
            if warp.ready():
                break
        else:
            able = [w for w in warps if w.ready()]
            if not able:
                if not _something_lands(rng, warps, ctas):
                    raise Deadlock(f"{len(warps)} warps wait, at pieces {sorted({w.at for w in warps})}")
                return
            warp = rng.choice(able)
        for _ in range(rng.randint(1, 6)):
            warp.at = code.pieces[warp.at](warp)
            if warp.at == DONE:
                warp.await_products(0)
                if warp.is_sending():
                    raise Abandons(f"warp {warp.number} ends and has not waited for its stores")
                warp.cta.live -= 1
                warps.remove(warp)
                return
            if not warp.ready():
                return


def _something_lands(rng: random.Random, warps: list[Warp], ctas: list[Cta]) -> bool:
    """One copy or one product, if there is any."""
    copying = [cta for cta in ctas if cta.copies]
    multiplying = [warp for warp in warps if warp.products]
    if not copying and not multiplying:
        return False
    chosen = rng.choice([*copying, *multiplying])
    if isinstance(chosen, Warp):
        chosen.run_product()
    else:
        chosen.copies.pop(rng.randrange(len(chosen.copies)))()
    return True


def _finish(cta: Cta, early: bool) -> bool:
    """What a CTA without warps has on its way lands; False: it is over.

    Raises:
        Overtakes: a dependent launch could end before the one before it, and so begin what reads that one's results.
    """
    if early and not cta.waited:
        raise Overtakes("a CTA ends and has not waited for the launch before")
    while cta.copies:
        cta.copies.pop(0)()
    return False
