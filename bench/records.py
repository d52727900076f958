"""Helpers of the programs of bench/: their arguments, the origin of their figures, and their documents."""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import triton

from fusedvit import __version__
from fusedvit.errors import InputError, unnamed

ROOT = Path(__file__).resolve().parent.parent


def arguments(about: str) -> argparse.ArgumentParser:
    """A parser with the options of every program: `--json` and `--commit`.

    Args:
        about: the program's docstring, whose first paragraph its help shows.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n\n")[0])
    parser.add_argument("--json", type=_document, help="where the document goes; without it figures are only printed")
    parser.add_argument("--commit", default="", help="recorded as it is; read from git when left out")
    return parser


def _document(given: str) -> Path:
    """The path of a document. A wrong one is refused before the work, so that no results are lost after it."""
    path = Path(given)
    if not given or path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"a file in a folder that is there expected, got {given!r}")
    return path


def need_gpus(count: int = 1) -> None:
    """Raises InputError if torch sees fewer than `count` GPUs."""
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here < count:
        raise InputError(f"{count} NVIDIA GPU{'s' * (count > 1)} expected, got {here}")


def run_program(main: Callable[[], int]) -> NoReturn:
    """Runs a program's `main` and exits with its code; unusable input exits with 2 and one line."""
    try:
        code = main()
    except InputError as error:
        print(unnamed(error), file=sys.stderr)
        code = 2
    sys.exit(code)


def write(path: Path | None, document: Mapping[str, Any]) -> None:
    """Writes a document of plain values; does nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def passport(command: str, options: Mapping[str, Any], commit: str = "") -> dict[str, Any]:
    """What ran, where, and how to run it again.

    Args:
        command: the command without its options.
        options: by name; None and False are left out, True is a flag, a list repeats its option. Only the name of a
            `Path` is kept, as folders differ from machine to machine.
        commit: the commit to record; if empty, git's.
    """
    import transformers

    return {
        "command": " ".join([command, *_words(options)]),
        "commit": commit or commit_of(ROOT),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "fusedvit": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is None or one is False:
                continue
            yield option
            if one is not True:
                yield shlex.quote(one.name if isinstance(one, Path) else str(one))


def commit_of(root: Path) -> str:
    """The commit of a checkout; "unknown" if `root` is not a checkout's root."""
    asked = ["git", "-C", str(root), "rev-parse", "HEAD", "--show-toplevel"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    commit, _, top = done.stdout.strip().partition("\n")
    return commit if top and Path(top).resolve() == root.resolve() else "unknown"


def today() -> str:
    """The date in UTC, as documents have it."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
