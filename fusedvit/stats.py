"""Counters of one fused tower."""

import logging
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
        items: images and videos of fused calls.
        tokens: patch tokens of fused calls.
        refreshes: times that prepared weights were made again.
    """

    calls: int = 0
    fused: int = 0
    original: Counter[str] = field(default_factory=Counter)
    items: int = 0
    tokens: int = 0
    refreshes: int = 0

    def count_original(self, reason: str, name: str) -> None:
        """Counts a call that takes the original code; warns the first time for each reason."""
        self.original[reason] += 1
        if self.original[reason] == 1:
            logger.warning("%s runs its original code: %s (%s)", name, reason, ADVICE[reason])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, a copy."""
        return {
            "calls": self.calls,
            "fused": self.fused,
            "original": dict(self.original),
            "items": self.items,
            "tokens": self.tokens,
            "refreshes": self.refreshes,
        }
