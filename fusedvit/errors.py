"""Our own exceptions, and why a tower or a call cannot run fused.

Wrong input to a call raises ValueError or TypeError instead.
"""

from typing import NamedTuple


class Reason(NamedTuple):
    """Why something cannot run fused.

    Attributes:
        kind: what `stats()` counts, one of `fusedvit.checks.fallback.ADVICE`.
        detail: the module path, argument or object it is about, what was expected and what was found; "" for none.
    """

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class UnsupportedModel(ValueError):
    """The model contains no supported vision tower; the message names the supported ones."""
