"""Where in a call of Python code a signal may be handled."""

from collections import Counter
from types import FrameType


class Places:
    """Counts the places in `files` where CPython handles signals: where a function of Python begins, and where one of C
    has returned; those of a line the first two times that it runs, as a loop's third turn is like its second.

    Args:
        visits: how often a line counts.
    """

    def __init__(self, *files: str, visits: int = 2) -> None:
        self.files, self.visits, self.count = files, visits, 0
        self._seen: Counter[tuple[str, int, str]] = Counter()

    def comes_to(self, at: int, frame: FrameType, event: str) -> str:
        """Where this is, if it is place number `at`, from 1; else ""."""
        if event not in ("call", "c_return") or not frame.f_code.co_filename.endswith(self.files):
            return ""
        line = frame.f_code.co_filename, frame.f_lineno, event
        self._seen[line] += 1
        if self._seen[line] > self.visits:
            return ""
        self.count += 1
        return f"{line[0]}:{line[1]}" if self.count == at else ""
