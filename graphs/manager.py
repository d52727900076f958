"""The graph manager: one captured CUDA graph per token budget, all over one set of static buffers.

A budget has no graph yet, has a captured graph, or its capture has failed. A failure leaves the other graphs as they
are; `drop_graphs` and `release` forget graphs and failures. A `Program` defines what is captured.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fusedvit.graphs.capture import CudaCapture
from fusedvit.graphs.limits import Limits
from fusedvit.graphs.packing import Batch

logger = logging.getLogger("fusedvit")

CAPTURE_FAILED = "capture failed"
MIB = 2**20


class Program(Protocol):
    """The work that a manager captures, and its static buffers."""

    def allocate(self, limits: Limits) -> None:
        """Allocates static buffers for the largest budget, before any capture; smaller budgets use parts of them."""

    def run(self, budget: int) -> None:
        """Launches everything for `budget` on the static buffers. Allocates nothing, reads nothing back."""

    def rehearse(self, budget: int) -> None:
        """Fills the buffers with a small batch, and launches every kernel of `run`, of loading and of storing, so that
        compilation and failures happen outside a capture."""

    def held_bytes(self) -> int:
        """Bytes of the static buffers."""

    def free(self) -> None:
        """Drops the static buffers."""


@dataclass
class GraphStats:
    """Counters of what the graphs did.

    Attributes:
        replays: replays by the budget whose graph ran.
        pieces: images, videos and parts of videos replayed.
        merged_tokens: merged tokens replayed.
        budget_tokens: merged tokens that the replayed graphs have room for.
        captures: graphs captured.
        failures: captures that failed.
        mispredictions: speculative replays whose content turned out to need another plan.
    """

    replays: Counter[int] = field(default_factory=Counter)
    pieces: int = 0
    merged_tokens: int = 0
    budget_tokens: int = 0
    captures: int = 0
    failures: int = 0
    mispredictions: int = 0

    def add(self, batch: Batch) -> None:
        """Counts a replay of `batch` by the graph of its budget."""
        self.replays[batch.budget] += 1
        self.pieces += len(batch.pieces)
        self.merged_tokens += sum([piece.tokens for piece in batch.pieces])
        self.budget_tokens += batch.budget

    def as_dict(self) -> dict[str, Any]:
        """The counters as a dictionary of plain values."""
        padding = 1 - self.merged_tokens / self.budget_tokens if self.budget_tokens else 0.0
        return {
            "replays": sum(self.replays.values()),
            "replays_by_budget": dict(sorted(self.replays.items())),
            "pieces": self.pieces,
            "merged_tokens": self.merged_tokens,
            "budget_tokens": self.budget_tokens,
            "padding": padding,
            "captures": self.captures,
            "capture_failures": self.failures,
            "mispredictions": self.mispredictions,
        }


class GraphManager:
    """Captures graphs by `ready` or when first needed, replays them, and frees their memory.

    Every method may be called from any thread and stream: the lock orders launches on the host, and an event of the
    capture orders their execution on the GPU.
    """

    def __init__(self, limits: Limits, program: Program, capture: CudaCapture) -> None:
        self.limits = limits
        self.stats = GraphStats()
        self._program = program
        self._capture = capture
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._failed: dict[int, int | None] = {}  # failed budget -> a larger one whose graph replaces it, or None
        self._allocated = False
        self._lock = threading.RLock()

    # replay

    def replay(self, batch: Batch, load: Callable[[int], None], unload: Callable[[int], None]) -> bool:
        """Replays `batch`, and counts the replay.

        On the current stream `load(budget)` fills the static buffers as `budget` sees them, the graph of `budget` runs,
        and `unload(budget)` copies outputs. `budget` is the batch's, or a larger one if the batch's capture failed.

        Returns:
            False, with nothing done, if no graph takes the batch.
        """
        with self._lock:
            budget = self._budget_for(batch.budget)
            if budget is None:
                return False
            self.replay_if_captured(budget, load, unload)
            self.stats.add(batch if budget == batch.budget else replace(batch, budget=budget))
            return True

    def replay_if_captured(self, budget: int, load: Callable[[int], object], unload: Callable[[int], None]) -> bool:
        """Replays the graph of `budget` as `replay` does, on content that the host may not have read yet.

        Once the content is known, the caller counts the replay by `count_replay` or `count_misprediction`.

        Args:
            load: may return False after enqueuing the loads; then the graph does not run.

        Returns:
            Whether the graph ran; False if `budget` has no graph yet.
        """
        with self._lock:
            graph = self._graphs.get(budget)
            if graph is None:
                return False
            self._capture.before_use()
            try:
                if load(budget) is False:
                    return False
                graph.replay()
                unload(budget)
            finally:
                self._capture.after_use()
            return True

    def count_replay(self, batch: Batch) -> None:
        """Counts a speculative replay that turned out to be of `batch`, by the graph of its budget."""
        with self._lock:
            self.stats.add(batch)

    def count_misprediction(self) -> None:
        """Counts a speculative replay whose content turned out to need another plan."""
        with self._lock:
            self.stats.mispredictions += 1

    # capture

    def ready(self, budget: int) -> bool:
        """Whether `budget` has a graph; captures it if that was not tried yet."""
        with self._lock:
            if budget not in self._graphs and budget not in self._failed:
                self._try_capture(budget)
            return budget in self._graphs

    def is_settled(self, budget: int) -> bool:
        """Whether a capture of `budget` was tried, so that a replay captures nothing."""
        return budget in self._graphs or budget in self._failed

    def graph(self, budget: int) -> torch.cuda.CUDAGraph:
        """The captured graph of a `ready` budget, for measuring."""
        return self._graphs[budget]

    def _budget_for(self, budget: int) -> int | None:
        """The budget whose graph takes a batch of `budget`, or None; the same from call to call."""
        return budget if self.ready(budget) else self._failed[budget]

    def _try_capture(self, budget: int) -> None:
        try:
            self._capture_budget(budget)
            return
        except RuntimeError as error:  # CUDA errors, out of memory, the compiler; any other type is a bug of fusedvit
            cause = _first_line(error)
        self._give_up(budget, cause)  # outside the handler, where the traceback would keep the failed capture alive

    def _capture_budget(self, budget: int) -> None:
        if not self._allocated:
            self._program.allocate(self.limits)
            self._allocated = True
        self._capture.before_use()
        try:
            self._program.rehearse(budget)
        finally:
            self._capture.after_use()
        self._graphs[budget] = self._capture.capture(lambda: self._program.run(budget))
        self.stats.captures += 1

    def _give_up(self, budget: int, cause: str) -> None:
        """Decides for good what runs batches of `budget`, as graphs of two budgets may differ in an output's last
        bit."""
        self.stats.failures += 1
        held = self.held_bytes() / MIB
        if not self._graphs:
            self._free()
        instead = self._failed[budget] = min((b for b in self._graphs if b > budget), default=None)
        logger.warning(
            "fusedvit: no CUDA graph for token budget %d, %s: %s. Graphs and buffers held %.0f MiB; smaller "
            "token_budgets need less",
            budget,
            "which runs eagerly" if instead is None else f"whose batches replay that of {instead}",
            cause,
            held,
        )

    # memory

    def exclusive(self) -> threading.RLock:
        """The lock under which nothing is launched on the static buffers."""
        return self._lock

    def wait(self) -> None:
        """Makes the host wait until no replay is running; under `exclusive()` none begins."""
        self._capture.wait()

    def held_bytes(self) -> int:
        """Bytes of static buffers and of captured graphs."""
        return self._program.held_bytes() + self._capture.held_bytes()

    def drop_graphs(self) -> None:
        """Forgets captured graphs and failures, as captured addresses have moved; keeps the static buffers."""
        with self._lock:
            self._reset_graphs()
            self._failed.clear()

    def release(self) -> None:
        """Frees graphs and static buffers, and forgets failures; the next use captures again."""
        with self._lock:
            self._free()
            self._failed.clear()

    def _free(self) -> None:
        self._reset_graphs()
        self._allocated = False  # before `free`: after an interrupt in between, captures would run without buffers
        self._program.free()
        self._capture.give_back()

    def _reset_graphs(self) -> None:
        self._capture.wait()
        while self._graphs:  # one by one, so that after an interrupt no graph that was reset is replayed
            self._graphs.popitem()[1].reset()
        self._capture.forget()


def _first_line(error: Exception) -> str:
    """The first line of the error's message, or the name of its type if there is no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
