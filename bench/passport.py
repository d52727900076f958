"""Where a result comes from, written beside it."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusedvit import __version__


def passport(module: str, words: Sequence[str], commit: str) -> dict[str, Any]:
    """What ran, where, and how to run it again.

    Args:
        module: of the benches.
        words: its arguments. Of paths the name alone is kept, as folders differ from machine to machine, and no
            `--commit`.
        commit: if known; else git's.
    """
    import transformers
    import triton

    return {
        "command": " ".join([f"python -m fusedvit.bench.{module}", *_kept(words)]),
        "commit": commit or git_commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "fusedvit": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def _kept(words: Sequence[str]) -> list[str]:
    before = ["", *words]
    kept = [w for w, last in zip(words, before, strict=False) if last != "--commit" and not w.startswith("--commit")]
    return [shlex.quote(Path(word).name if "/" in word else word) for word in kept]


def git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
