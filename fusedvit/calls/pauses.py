"""Back-off: after preparations that no later call could use, the next 4, 8, … 256 calls run the original code at once.

If a program keeps writing a tower's parameters, replaces them at each call, or changes the tower between any two calls,
preparing weights and running fused takes longer than the original code. Each time that a call finds this again, twice
as many calls skip the attempt.
"""

from fusedvit.errors import Reason

FIRST, MOST = 4, 256  # calls
MOST_PREPARING = 16  # calls in a row that prepared weights because the tower had changed, before a pause begins
AS_MUCH_AS = 2  # such calls that an unchanged call cancels: a tower that changes only every few calls runs fused


class Pause:
    """How many of the next calls do not try to run fused, and why.

    With several threads the count may be off by a call; outputs do not depend on it.

    Attributes:
        again: there has been a pause, and no call since has found the weights unchanged since the call before.
    """

    def __init__(self) -> None:
        self._reason: Reason | None = None
        self._left, self._next, self._preparing, self._changes = 0, FIRST, 0, 0
        self._tried = False  # whether a call since the last pause has prepared weights

    @property
    def again(self) -> bool:
        return self._next > FIRST

    def lasts(self) -> Reason | None:
        """Why the next call does not try, how many calls are left, and what ends the pause; None if it tries."""
        left, reason = self._left, self._reason
        if left <= 0 or reason is None:
            return None
        calls = "1 more call" if left == 1 else f"{left} more calls"
        return Reason(reason.kind, f"{reason.detail}; paused for {calls}, or until refresh()")

    def skip_call(self) -> Reason | None:
        """Why this call does not try, counting it off the pause; None if it tries."""
        if self._left <= 0:
            return None
        self._left -= 1
        return self._reason

    def begin(self, reason: Reason) -> None:
        """Begins a pause of `FIRST` calls, or of twice as many as last time."""
        self._reason, self._left, self._tried = reason, self._next, False
        self._next = min(2 * self._next, MOST)

    def prepares(self, changes: int) -> bool:
        """Counts a call that prepared weights because the tower had changed; returns whether to begin a pause.

        The first such call after a pause begins no other: the change may be older, as paused calls do not check the
        weights.

        Args:
            changes: how often weights were prepared for this cause. Calls of several threads may share a preparation.
        """
        if changes == self._changes:
            return False
        self._changes = changes
        self._preparing = min(self._preparing + 1, MOST_PREPARING)
        tried, self._tried = self._tried, True
        return tried if self.again else self._preparing >= MOST_PREPARING

    def holds(self) -> None:
        """Counts a call that found the weights unchanged since the call before; ends the pause."""
        self._left, self._next = 0, FIRST
        self._preparing = max(0, self._preparing - AS_MUCH_AS)

    def end(self) -> None:
        """Ends the pause and forgets the calls counted so far."""
        self._left, self._next, self._preparing = 0, FIRST, 0
