"""Back-off: after preparations that no later call could use, the next 4, 8, … 256 calls run the original code at once.

A tower whose parameters somebody writes all the time, replaces at each call, or changes between any two of them, costs
preparations and runs that take longer than its original code. Each time that this is found again twice as many calls
pass before the next one tries.
"""

from fusedvit.errors import Reason

FIRST, MOST = 4, 256  # calls
MOST_PREPARING = 16  # calls in a row that prepared weights of a tower that had changed, before calls do without
AS_MUCH_AS = 2  # of these, one call that finds nothing changed: who changes a tower between a few calls runs fused


class Pause:
    """How many calls to come do not try to run fused, and why.

    Threads may count a call too few or too many: that is no matter of what they answer.

    Attributes:
        again: a pause has been, and no call since has found the weights as the one before it left them.
    """

    def __init__(self) -> None:
        self._reason: Reason | None = None
        self._left, self._next, self._preparing, self._changes = 0, FIRST, 0, 0

    @property
    def again(self) -> bool:
        return self._next > FIRST

    def lasts(self) -> Reason | None:
        """Why the next call does not try, for how many calls, and what ends that; None where it does."""
        left, reason = self._left, self._reason
        if left <= 0 or reason is None:
            return None
        calls = "1 more call" if left == 1 else f"{left} more calls"
        return Reason(reason.kind, f"{reason.detail}; paused for {calls}, or until refresh()")

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

    def prepares(self, changes: int) -> bool:
        """Counts a call that prepared weights as the tower had changed; whether the next ones are to do without.

        Args:
            changes: how often weights were prepared for that; calls of several threads may share one preparation.
        """
        if changes == self._changes:
            return False
        self._changes = changes
        self._preparing += 1
        return self.again or self._preparing >= MOST_PREPARING

    def holds(self) -> None:
        """Counts a call that found the weights as the one before it left them: every call tries."""
        self._left, self._next = 0, FIRST
        self._preparing = max(0, self._preparing - AS_MUCH_AS)

    def end(self) -> None:
        """Every call tries, as if none had been before."""
        self._left, self._next, self._preparing = 0, FIRST, 0
