"""Calls that take the original code at once, for a while, after calls before them have prepared weights in vain.

A tower whose parameters somebody writes all the time, or replaces at each call, costs preparations and runs that nobody
uses. Each time that this is found again twice as many calls pass before the next one tries.
"""

from fusedvit.errors import Reason

FIRST, MOST = 4, 256  # calls


class Pause:
    """How many calls to come do not try to run fused, and why.

    Threads may count a call too few or too many: that is no matter of what they answer.

    Attributes:
        again: a pause has been, and no call since has found the weights as the one before it left them.
    """

    def __init__(self) -> None:
        self._reason: Reason | None = None
        self._left, self._next = 0, FIRST

    @property
    def again(self) -> bool:
        return self._next > FIRST

    def take(self) -> Reason | None:
        """Why this call does not try; None where it does."""
        if self._left <= 0:
            return None
        self._left -= 1
        return self._reason

    def begin(self, reason: Reason) -> None:
        """The next calls do not try: `FIRST` of them, or twice as many as last time."""
        self._reason, self._left = reason, self._next
        self._next = min(2 * self._next, MOST)

    def end(self) -> None:
        """Every call tries."""
        self._left, self._next = 0, FIRST
