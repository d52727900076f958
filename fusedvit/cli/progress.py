"""What long work is doing, on stderr and gone afterwards; without a terminal, lines with the time."""

import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Result = TypeVar("Result")
SECONDS_BETWEEN_LINES = 1.0
Step = Callable[[str], None]
CountedStep = Callable[[str, int, int], None]


def with_progress(work: Callable[[Step], Result]) -> Result:
    """Runs `work(step)`, where `step(text)` says what comes next."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return work(_lines(console))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting")
        return work(lambda text: progress.update(task, description=escape(text)))


def with_bar(work: Callable[[CountedStep], Result]) -> Result:
    """Runs `work(step)`, where `step(text, done, total)` moves a bar; another total is another bar."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return work(_counted(_lines(console)))
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as progress:
        bars = {0: progress.add_task("starting", total=None)}

        def step(text: str, done: int, total: int) -> None:
            if total not in bars:
                for bar in bars.values():
                    progress.update(bar, visible=False)
                bars[total] = progress.add_task("", total=total)
            progress.update(bars[total], completed=done, description=escape(text))

        return work(step)


def _counted(step: Step) -> CountedStep:
    """Counts and the time left as words, the latter by the pace since the total was first heard."""
    begun: dict[int, float] = {}

    def counted(text: str, done: int, total: int) -> None:
        since = time.monotonic() - begun.setdefault(total, time.monotonic())
        left = f", {since / done * (total - done):.0f} s left" if done else ""
        step(f"{done} of {total}{left}: {text}")

    return counted


def _lines(console: Console) -> Step:
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
