"""Where a result comes from: every document of bench/results opens with it."""

import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton

from fusedvit import __version__


def passport(command: str, options: Mapping[str, Any], commit: str = "") -> dict[str, Any]:
    """What ran, where, and how to run it again.

    Args:
        command: without its options.
        options: by name; None and False are left out, True is a flag, a list repeats its option. Of a `Path` only the
            name is kept, as folders differ from machine to machine.
        commit: recorded if given, else git's.
    """
    import transformers

    return {
        "command": " ".join([command, *_words(options)]),
        "commit": commit or git_commit(),
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


def git_commit() -> str:
    """The checkout's commit, or "unknown"."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
