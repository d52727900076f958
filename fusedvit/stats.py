"""Counters of one fused tower."""

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fusedvit.reasons import ADVICE

logger = logging.getLogger("fusedvit")


@dataclass
class Stats:
    """What a tower has done since it was fused.

    Attributes:
        calls: forward calls.
        fused: calls that ran fused.
        original: calls that took the original code, by reason.
        eager: runs of the fused encoder outside a graph, by reason.
        items: images and videos of fused calls.
        tokens: patch tokens of fused calls.
    """

    calls: int = 0
    fused: int = 0
    original: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    items: int = 0
    tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: int) -> None:
        """Adds to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def count_original(self, reason: str, name: str) -> None:
        """Counts a call that takes the original code; warns the first time for each reason."""
        with self._lock:
            self.original[reason] += 1
            first = self.original[reason] == 1
        if first:
            logger.warning("%s runs its original code: %s (%s)", name, reason, ADVICE[reason])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, a copy."""
        return {
            "calls": self.calls,
            "fused": self.fused,
            "original": dict(self.original),
            "eager": dict(self.eager),
            "items": self.items,
            "tokens": self.tokens,
        }
