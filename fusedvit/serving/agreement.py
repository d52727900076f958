"""Ranks agree before they wait for each other: each says how it fared, and learns whether all go on.

All ranks run fused; or all run the engine's code, if one cannot run fused; or all gather again, if one has other
weights. If one rank has failed, or is at another step, all raise. Ranks wait `PATIENCE` seconds for a missing one.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from fusedvit.checks.fallback import ADVICE, ENGINE
from fusedvit.errors import PREFIX, Reason, first_line

PATIENCE = 50.0  # seconds that a call waits for the other ranks
BUILDING = 180.0  # the same while towers are built, before weights are loaded
LOADING = 900.0  # the same while weights are loaded, and kernels compiled
_TEXT = 400  # bytes of a rank's message

FUSED, OWN, STALE, FAILED = "runs fused", "cannot run fused", "has other weights", "failed"

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


@dataclass(frozen=True)
class Group:
    """The ranks that share a tower, and this one's place among them."""

    rank: int
    size: int
    on_cpu: dist.ProcessGroup
    on_device: dist.ProcessGroup

    @staticmethod
    def of(coordinator: Any) -> "Group":
        """Of a `GroupCoordinator`, which the `get_tp_group()` of both vLLM and SGLang returns."""
        c = coordinator
        return Group(c.rank_in_group, c.world_size, c.cpu_group, c.device_group)

    def exchange(self, text: str, seconds: float) -> list[str]:
        """Sends `text` to every rank over the CPU; returns the texts of all, by rank.

        Raises:
            RuntimeError: another rank did not send within `seconds`, or is gone.
        """
        mine = torch.zeros(_TEXT, dtype=torch.uint8, device="cpu")
        said = text.encode()[:_TEXT]
        mine[: len(said)] = torch.tensor(list(said), dtype=torch.uint8, device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = datetime.timedelta(seconds=seconds)
        self.on_cpu.allgather([found], [mine], options).wait()
        return [bytes(rank.tolist()).rstrip(b"\0").decode(errors="replace") for rank in found]

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """Fills `out`, `[size, *mine.shape]`, with every rank's `mine`, on the device."""
        _all_gather(out.flatten(0, 1), mine, group=self.on_device)


def told(error: Exception) -> str:
    """The text in which one rank tells the others of an error."""
    return f"{type(error).__name__}: {first_line(error)}"


class OutOfStep(RuntimeError):
    """The ranks are not at the same step; raised on each of them."""


class Agreed(NamedTuple):
    """What all ranks do next.

    Attributes:
        state: the state that all go on in.
        detail: what the first rank in that state said of it.
        whose: that rank; "" if all ranks are in that state.
        strict: one rank's options say to raise an error where the engine's code would run.
    """

    state: str
    detail: str = ""
    whose: str = ""
    strict: bool = False

    def reason(self) -> Reason:
        """`detail` as the reason that it is the text of."""
        kind, _, detail = self.detail.partition(": ")
        if kind not in ADVICE:
            kind, detail = ENGINE, self.detail
        return Reason(kind, ": ".join(filter(None, (self.whose and f"on {self.whose}", detail))))

    def why_not(self) -> str:
        """Why all ranks run the engine's code from the start; "" if they run fused.

        Raises:
            RuntimeError: they run the engine's code, and one rank is strict; raised on every rank.
        """
        if self.state != OWN:
            return ""
        found = ": ".join(filter(None, (self.whose, self.detail)))
        if self.strict:
            raise RuntimeError(f"{PREFIX}the tower cannot run fused: {found}")
        return found


@dataclass
class Agreement:
    """Rounds in which every rank says what it does and how it fared, and learns whether they all go on.

    Attributes:
        strict: whether this rank's options are strict.
    """

    group: Group
    strict: Callable[[], bool] = lambda: False
    rounds: int = 0

    def on(self, what: str, state: str, detail: str = "", seconds: float = PATIENCE) -> Agreed:
        """The state that all ranks go on in: `OWN` if one rank is in it, else `STALE` if one is, else `FUSED`.

        Raises:
            OutOfStep: the ranks are at different steps.
            RuntimeError: a rank has failed, or did not answer within `seconds`.
        """
        self.rounds += 1
        here, strict = f"{what} {self.rounds}", "strict" if self.strict() else ""
        try:
            said = [text.split("\n") for text in self.group.exchange(f"{here}\n{state}\n{strict}\n{detail}", seconds)]
        except RuntimeError as error:
            raise RuntimeError(
                f"fusedvit: rank {self.group.rank} waited for the other {self.group.size - 1} at {here}, at most "
                f"{seconds:g} s: {first_line(error)}"
            ) from error
        in_step = len({step for step, *_ in said}) == 1
        for wanted in (OWN, STALE, FUSED) if in_step and FAILED not in {of for _, of, *_ in said} else ():
            ranks = [rank for rank, (_, of, *_) in enumerate(said) if of == wanted]
            if ranks:
                whose = "" if len(ranks) == self.group.size else f"rank {ranks[0]}"
                return Agreed(wanted, " ".join(said[ranks[0]][3:]), whose, any(of[2] for of in said))
        each = "; ".join(
            f"rank {rank} {' '.join(filter(None, (state, *detail)))} ({step})"
            for rank, (step, state, _, *detail) in enumerate(said)
        )
        kind = RuntimeError if in_step else OutOfStep
        raise kind(f"fusedvit: the ranks of a sharded tower differ, and none goes on alone: {each}")
