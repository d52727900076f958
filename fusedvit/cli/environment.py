"""What fusedvit runs on: versions of the packages that matter, and the GPUs with what they can do."""

import os
import platform
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fusedvit

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "einops",
    "numpy",
    "pillow",
    "av",
    "matplotlib",
    "torchvision",
    "accelerate",
    "kernels",
)


def collect() -> dict[str, Any]:
    """Everything as plain values. A package that is not installed has version None; nothing but torch is imported."""
    return {
        "fusedvit": fusedvit.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    }


def show(environment: dict[str, Any], console: Console) -> None:
    """`collect`'s answer as a table."""
    table = Table(title="fusedvit's environment", show_header=False, title_justify="left")
    table.add_row("fusedvit", environment["fusedvit"])
    table.add_row("python", f"{environment['python']} on {environment['system']}, {environment['cpus']} CPUs")
    for name, version in environment["packages"].items():
        table.add_row(name, version or "[dim]not installed[/]")
    table.add_row("CUDA of torch", environment["cuda"] or "[dim]none: a CPU build[/]")
    for index, gpu in enumerate(environment["gpus"]):
        table.add_row(
            f"GPU {index}",
            f"{gpu['name']}, sm_{gpu['capability']}, {gpu['multiprocessors']} SMs, {gpu['memory_gib']:.0f} GiB",
        )
    if not environment["gpus"]:
        table.add_row("GPU", "[dim]none[/]")
    console.print(table)


def device_name(environment: dict[str, Any]) -> str:
    """The machine in few words, for titles."""
    gpus = environment["gpus"]
    return gpus[0]["name"] if gpus else f"CPU ({environment['cpus']} cores)"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
    }
