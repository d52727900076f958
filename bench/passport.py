"""Where a result comes from, written beside it."""

import subprocess
from pathlib import Path
from typing import Any

import torch

from fusedvit import __version__


def passport(module: str, path: str, commit: str) -> dict[str, Any]:
    """What ran, where, and how to run it again; of `path` the name alone, as folders differ from machine to machine."""
    import transformers
    import triton

    return {
        "command": f"python -m fusedvit.bench.{module} --json {Path(path).name}",
        "commit": commit or git_commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "fusedvit": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
