"""Waiting for what other threads and processes do, for as long as a busy machine may take."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 60.0  # seconds


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Returns once `condition()` holds. Raises AssertionError if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Processes that `pid` started and that are there still."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in lists for word in path.read_text(encoding="utf-8").split()]
