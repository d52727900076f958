"""Helpers of every command: errors that end in exit code 2, progress on stderr, and JSON documents."""

import contextlib
import errno
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

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
from rich.table import Table

from fusedvit.errors import InputError, of_folder

Step = Callable[[str], None]
CountedStep = Callable[[str, int, int], None]
SECONDS_BETWEEN_LINES = 1.0
SECONDS_OF_SILENCE = 3.0
STDOUT = "-"  # as `--json -`
# Errors of replacing a file that is a mount of its own, or whose folder takes no new file: it may still be writable.
_NOT_REPLACED = frozenset((errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP))
PICTURES = (".png", ".svg", ".pdf", ".jpg")  # suffixes that --plot takes


@dataclass(frozen=True)
class Outcome:
    """The result of a command: a document of plain values, and whether it passed (exit code 0, else 1)."""

    document: dict[str, Any]
    passed: bool = True


def new_console(stderr: bool = False) -> Console:
    """A console that prints names as they are, even `:key:`, which rich would turn into an emoji."""
    return Console(stderr=stderr, emoji=False)


def new_table(title: str, *heads: str, **options: Any) -> Table:
    """A table that wraps cells instead of cutting them off: different names may be alike once cut off."""
    table = Table(title=title, title_justify="left", **options)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


@contextmanager
def quiet() -> Iterator[None]:
    """Silences fusedvit's warnings: the handle's report, which is printed, says the same."""
    logger = logging.getLogger("fusedvit")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def refuse_unknown(names: Iterable[str], there: Iterable[str], option: str) -> None:
    """Raises InputError if one of `names`, given as `option`, is not in `there`."""
    unknown = sorted(set(names) - set(there))
    if unknown:
        raise InputError(f"{option}: no {unknown[0]!r}; there are {', '.join(map(repr, there))}")


# ── progress ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def progress() -> Iterator[Step]:
    """Gives `step(text)`, which shows the next step beside a spinner, or as a line if stderr is no terminal."""
    console = new_console(stderr=True)
    if not console.is_terminal:
        with _lines(console) as step:
            yield step
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting")
        yield lambda text: shown.update(task, description=escape(text))


@contextmanager
def progress_bar() -> Iterator[CountedStep]:
    """Gives `step(text, done, total)`, which moves a bar; each total has a bar of its own."""
    console = new_console(stderr=True)
    if not console.is_terminal:
        with _lines(console) as line:
            yield _counted(line)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as shown:
        bars = {0: shown.add_task("starting", total=None)}

        def step(text: str, done: int, total: int) -> None:
            if total not in bars:
                for bar in bars.values():
                    shown.update(bar, visible=False)
                bars[total] = shown.add_task("", total=total)
            shown.update(bars[total], completed=done, description=escape(text))

        yield step


def _counted(step: Step) -> CountedStep:
    """Shows counts and the time left as text. The time left assumes the pace since the first step of that total."""
    begun: dict[int, float] = {}

    def counted(text: str, done: int, total: int) -> None:
        now = time.monotonic()
        since = now - begun.setdefault(total, now)
        left = f", {since / done * (total - done):.0f} s left" if done and since > 0 else ""
        step(f"{done} of {total}{left}: {text}")

    return counted


@contextmanager
def _lines(console: Console) -> Iterator[Step]:
    """A line per step, only the first of steps in quick succession. During silence the last step is repeated."""
    lines = _Lines(console)
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(SECONDS_OF_SILENCE / 2):
            lines.repeat()

    thread = threading.Thread(target=repeat, daemon=True)
    with contextlib.suppress(RuntimeError):  # without room for another thread the line is not repeated
        thread.start()
    try:
        yield lines.step
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


class _Lines:
    """Progress as lines of text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._printed = self._begun - SECONDS_BETWEEN_LINES
        self._text = ""

    def step(self, text: str) -> None:
        self._text = text
        if time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._print(text)

    def repeat(self) -> None:
        if self._text and time.monotonic() - self._printed >= SECONDS_OF_SILENCE:
            self._print(self._text)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        self._console.out(f"{self._printed - self._begun:.0f} s: {text}", highlight=False)


# ── documents ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(value: Any) -> Any:
    """`value` with dataclasses as dicts, tuples as lists, paths as text; nan and inf, which JSON lacks, as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def write(document: Any, path: str | Path) -> None:
    """Write `document` to `path`, creating its folder; "-" is standard output. An interrupted write leaves an older
    document as it was, unless the file can be written but not replaced.

    Raises:
        InputError: `path` cannot be written.
    """
    text = json.dumps(plain(document), indent=2, allow_nan=False) + "\n"
    if str(path) == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_file(text.encode(), path)


def write_file(content: bytes, path: str | Path) -> None:
    """Write a file as `write` does. Raises InputError as there."""
    try:
        _replace_file(content, _target(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def refuse_unwritable(path: str | Path, suffixes: tuple[str, ...] = ()) -> None:
    """Creates the folder of `path` before the work, so that results are not lost after it.

    Raises:
        InputError: `path` cannot be written, or its suffix is not among `suffixes`, if any are given.
    """
    try:
        path = _target(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # also where the working folder is gone
        raise InputError(f"{path}: cannot be written ({of_folder(error)})") from None
    if path.is_dir():
        raise InputError(f"{path}: cannot be written (a folder)")
    if not (os.access(path, os.W_OK) if path.exists() else os.access(path.parent, os.W_OK | os.X_OK)):
        raise InputError(f"{path}: cannot be written (no permission)")
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{path}: the suffix must be one of {', '.join(suffixes)}")


def _target(path: str | Path) -> Path:
    """`path` with links followed, so that a link's target is written and the link stays."""
    return Path(os.path.realpath(path))


def _replace_file(content: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a pipe, a terminal
        path.write_bytes(content)
        return
    whole = path.with_name(f".{os.getpid()}.new")  # short: `path.name` may already have the longest length
    try:
        whole.write_bytes(content)
        whole.replace(path)
    except OSError as error:
        if error.errno not in _NOT_REPLACED or not path.is_file():
            raise
        path.write_bytes(content)
    finally:
        with contextlib.suppress(OSError):
            whole.unlink(missing_ok=True)


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def shorten(name: str, room: int) -> str:
    """`name` in at most `room` characters (4 or more): only its two ends if it does not fit."""
    tail = (room - 1) // 2
    return name if len(name) <= room else f"{name[: room - 1 - tail]}…{name[-tail:]}"


def stem(name: str, room: int) -> str:
    """`shorten` of a file name without its suffix."""
    return shorten(name.rpartition(".")[0] or name, room)
