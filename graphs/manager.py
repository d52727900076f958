"""One captured graph per token budget over one set of static buffers.

States of a budget: unknown -> captured, or failed. A failure leaves the others as they are; `release` makes all unknown
again. Nothing here knows what is captured: a `Program` does.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fusedvit.graphs.capture import Capture, Graph
from fusedvit.graphs.limits import Limits
from fusedvit.graphs.packing import Batch

logger = logging.getLogger("fusedvit")

CAPTURE_FAILED = "capture failed"
MIB = 2**20


class Program(Protocol):
    """What is captured."""

    def allocate(self, limits: Limits) -> None:
        """Static buffers for the largest budget; smaller ones use a part of them. Called before any capture."""

    def compile(self, budgets: Sequence[int]) -> None:
        """Compiles what `run` will launch for `budgets`; what fails here may fail again there. After `allocate`."""

    def run(self, budget: int) -> None:
        """Launches everything for `budget` on the static buffers. Allocates nothing, reads nothing back."""

    def rehearse(self, budget: int, tokens: int) -> int:
        """Fills the buffers with a batch of about `tokens`, at least one, and returns how many it has."""

    def held_bytes(self) -> int:
        """Bytes of the static buffers."""

    def free(self) -> None:
        """Drops the static buffers."""


@dataclass
class GraphStats:
    """What the graphs did.

    Attributes:
        replays: by budget.
        items: pieces (images, videos or parts of videos) replayed.
        tokens: merged tokens replayed.
        launched_tokens: merged tokens that the replayed budgets have room for.
        captures: graphs captured.
        failures: captures that failed.
        mispredictions: replays begun before their content was known, for which another plan turned out to be right.
    """

    replays: Counter[int] = field(default_factory=Counter)
    items: int = 0
    tokens: int = 0
    launched_tokens: int = 0
    captures: int = 0
    failures: int = 0
    mispredictions: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, a copy."""
        padding = 1 - self.tokens / self.launched_tokens if self.launched_tokens else 0.0
        return {
            "replays": sum(self.replays.values()),
            "replays_by_budget": dict(sorted(self.replays.items())),
            "items": self.items,
            "tokens": self.tokens,
            "launched_tokens": self.launched_tokens,
            "padding": padding,
            "captures": self.captures,
            "capture_failures": self.failures,
            "mispredictions": self.mispredictions,
        }


class GraphManager:
    """Captures lazily or at `warmup`, replays, and gives memory back.

    A call of `replay` is safe from any thread and stream: the lock covers what is launched, an event what still runs.
    """

    def __init__(self, limits: Limits, program: Program, capture: Capture) -> None:
        self.limits = limits
        self.stats = GraphStats()
        self._program = program
        self._capture = capture
        self._graphs: dict[int, Graph] = {}
        self._failed: set[int] = set()
        self._allocated = False
        self._lock = threading.RLock()

    def warmup(
        self,
        progress: Callable[[Iterable[int]], Iterable[int]] = lambda budgets: budgets,
        only: Collection[int] | None = None,
    ) -> None:
        """Captures every budget, or those of `only`, the largest first; `progress` wraps the iterable of budgets."""
        wanted = tuple(b for b in reversed(self.limits.token_budgets) if only is None or b in only)
        self._compile(tuple(b for b in reversed(wanted) if b not in self._graphs and b not in self._failed))
        for budget in progress(wanted):
            self.ready(budget)

    def _compile(self, budgets: tuple[int, ...]) -> None:
        """All at once, which takes a fraction of the time; a failure is found, and dealt with, budget by budget."""
        if not budgets:
            return
        with self._lock, contextlib.suppress(RuntimeError):
            self._allocate()
            self._capture.before_use()
            try:
                self._program.compile(budgets)
            finally:
                self._capture.after_use()

    def _allocate(self) -> None:
        if not self._allocated:
            self._program.allocate(self.limits)
            self._allocated = True

    def ready(self, budget: int) -> bool:
        """Whether `budget` has a graph; captures it if nobody has tried yet."""
        with self._lock:
            if budget in self._graphs:
                return True
            if budget in self._failed:
                return False
            try:
                self._capture_budget(budget)
            except torch.cuda.OutOfMemoryError as error:
                self._give_up(budget, error)
            except RuntimeError as error:  # what CUDA and the compiler raise; anything else is a fault of ours
                self._give_up(budget, error)
            return budget in self._graphs

    def _capture_budget(self, budget: int) -> None:
        self._allocate()
        self._capture.before_use()
        self._program.rehearse(budget, 1)
        self._program.run(budget)  # compiles, and fails outside the capture if it must
        self._capture.after_use()
        self._graphs[budget] = self._capture.capture(lambda: self._program.run(budget))
        self.stats.captures += 1

    def _give_up(self, budget: int, error: RuntimeError) -> None:
        self.stats.failures += 1
        held = self.held_bytes() / MIB
        if not self._graphs:
            self._drop()
        self._failed.add(budget)
        logger.warning(
            "no CUDA graph for token budget %d, which runs eagerly: %s. Graphs and buffers held %.0f MiB; smaller "
            "token_budgets need less",
            budget,
            str(error).splitlines()[0],
            held,
        )

    def replay(self, batch: Batch, load: Callable[[int], None], unload: Callable[[int], None]) -> bool:
        """`load(budget)` fills the static buffers of `budget`, whose graph runs, `unload(budget)` copies out.

        All on the current stream. Returns False, with nothing done, where the budget cannot be captured.
        """
        with self._lock:
            if not self.ready(batch.budget) or not self.replay_if_captured(batch.budget, load, unload):
                return False
            self.count_replay(batch)
            return True

    def replay_if_captured(self, budget: int, load: Callable[[int], None], unload: Callable[[int], None]) -> bool:
        """As `replay`, of content that the host may have yet to read: the caller counts it when it is known.

        Returns False, with nothing done, where the budget is not captured yet.
        """
        with self._lock:
            graph = self._graphs.get(budget)
            if graph is None:
                return False
            self._capture.before_use()
            try:
                load(budget)
                graph.replay()
                unload(budget)
            finally:
                self._capture.after_use()
            return True

    def count_replay(self, batch: Batch) -> None:
        """Counts a replay of `batch`."""
        with self._lock:
            stats = self.stats
            stats.replays[batch.budget] += 1
            stats.items += len(batch.pieces)
            stats.tokens += sum([piece.tokens for piece in batch.pieces])
            stats.launched_tokens += batch.budget

    def count_misprediction(self) -> None:
        """Counts a speculative replay whose content turned out to be another."""
        with self._lock:
            self.stats.mispredictions += 1

    def graph(self, budget: int) -> Graph:
        """The captured graph of a `ready` budget, for measuring."""
        return self._graphs[budget]

    def exclusive(self) -> threading.RLock:
        """The lock under which nothing is launched on the static buffers."""
        return self._lock

    def wait(self) -> None:
        """Makes the host wait until no replay is under way; under `exclusive()` none begins."""
        self._capture.wait()

    def drop_graphs(self) -> None:
        """Forgets captured graphs and failures, keeps the static buffers: what they point to has moved."""
        with self._lock:
            self._capture.wait()
            for graph in self._graphs.values():
                graph.reset()
            self._graphs.clear()
            self._failed.clear()
            self._capture.forget()

    def release(self) -> None:
        """Gives back graphs and static buffers; the next use captures again."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self.drop_graphs()
        self._program.free()
        self._allocated = False
        self._capture.give_back()

    def held_bytes(self) -> int:
        """Bytes of static buffers and of captured graphs."""
        return self._program.held_bytes() + self._capture.held_bytes()
