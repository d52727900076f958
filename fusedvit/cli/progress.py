"""A line on stderr that says what long work is doing, gone afterwards."""

from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Result = TypeVar("Result")


def with_progress(work: Callable[[Callable[[str], None]], Result]) -> Result:
    """Runs `work(step)`, where `step(text)` says what comes next."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting")
        return work(lambda text: progress.update(task, description=escape(text)))
