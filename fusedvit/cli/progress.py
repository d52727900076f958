"""A line on stderr that says what long work is doing, gone afterwards; without a terminal, lines with the time."""

import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Result = TypeVar("Result")
SECONDS_BETWEEN_LINES = 1.0


def with_progress(work: Callable[[Callable[[str], None]], Result]) -> Result:
    """Runs `work(step)`, where `step(text)` says what comes next."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return work(_lines(console))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting")
        return work(lambda text: progress.update(task, description=escape(text)))


def _lines(console: Console) -> Callable[[str], None]:
    """Of steps in quick succession, the first."""
    begun = time.monotonic()
    last = begun - SECONDS_BETWEEN_LINES

    def step(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            console.print(f"{now - begun:.0f} s: {escape(text)}", highlight=False, soft_wrap=True)
            last = now

    return step
