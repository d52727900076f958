"""What the commands that run a user's media through a tower have in common."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from fusedvit.cli.demo import Step, load_media
from fusedvit.cli.media import Media, MediaError
from fusedvit.cli.progress import with_progress
from fusedvit.errors import UnsupportedModel

Result = TypeVar("Result")


def on_media(paths: Sequence[Path] | None, work: Callable[[list[Media], Step], Result]) -> Result:
    """Runs `work(media, step)` on the given files, or on those that we ship; what it would warn of is in its report.

    Exits with 2, and a line that says why, where a file or the checkpoint cannot be used.
    """
    logger = logging.getLogger("fusedvit")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        media = load_media(paths or [])
        return with_progress(lambda step: work(media, step))
    except (MediaError, UnsupportedModel, OSError) as error:  # OSError: no such checkpoint
        Console(stderr=True).print(f"[red]{escape(str(error))}[/]")
        raise typer.Exit(2) from None
    finally:
        logger.setLevel(level)
