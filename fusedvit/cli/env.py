"""`fusedvit env`: versions of the packages that matter, the GPUs with their tuning tables, and a verdict."""

import os
import platform
from collections.abc import Iterable, Iterator
from importlib import import_module, metadata
from typing import Any

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

import fusedvit
from fusedvit.cli.console import Outcome, new_console
from fusedvit.errors import first_line
from fusedvit.kernels import tuning_table
from fusedvit.kernels.tile_configs import Target

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
NEEDED = ("torch", "triton", "transformers")
_MODULES = {"pillow": "PIL"}  # packages whose module has another name
LEAST_CAPABILITY = 80


def run(json: Any = None) -> Outcome:
    """Prints the findings of `collect`, the verdict last."""
    found = collect()
    found["broken"] = broken(name for name, version in found["packages"].items() if version is not None)
    found["verdict"] = verdict(found)
    show(found, new_console())
    return Outcome(found, not found["broken"])


def broken(names: Iterable[str]) -> dict[str, str]:
    """Installed packages that do not import, such as torchvision with another torch than its own, and why."""
    found = {}
    for name in names:
        try:
            import_module(_MODULES.get(name, name))
        except Exception as error:  # a package's modules may raise anything
            found[name] = first_line(error)
    return found


def collect() -> dict[str, Any]:
    """Everything as plain values. A package that is not installed has version None."""
    found: dict[str, Any] = {
        "fusedvit": fusedvit.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "supported": supported_versions(),
        "cuda": torch.version.cuda,
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    }
    return found | {"verdict": verdict(found)}


def supported_versions() -> dict[str, str]:
    """The versions that this fusedvit declares, by package; empty where it is not installed (a bare checkout)."""
    try:
        lines = metadata.requires("fusedvit") or []
    except metadata.PackageNotFoundError:
        return {}
    found = [Requirement(line) for line in lines]
    return {r.name: str(r.specifier) for r in found if r.name in NEEDED}


def verdict(found: dict[str, Any]) -> str:
    """One line: "broken: …", "ready: …", "works, but …" or "no speed-up here, because …". `found` is the result of
    `collect`, with `broken` added if imports were tried."""
    if found.get("broken"):
        return f"broken: {'; '.join(f'{name} does not import ({why})' for name, why in found['broken'].items())}"
    obstacles, doubts = list(_obstacles(found)), list(_doubts(found))
    if obstacles:
        how = "Calls run the original code" if found["gpus"] else "Calls run fused on PyTorch operations, no faster"
        return f"no speed-up here, because {'; '.join(obstacles)}. {how}"
    gpu = found["gpus"][0]
    ready = f"{gpu['name']}, {gpu['tuning']}"
    return f"works, but {'; '.join(doubts)} ({ready})" if doubts else f"ready: {ready}"


def _obstacles(found: dict[str, Any]) -> Iterator[str]:
    if found["packages"]["triton"] is None:
        yield "Triton is not installed"
    if not found["gpus"]:
        yield "torch is a CPU build" if found["cuda"] is None else "torch sees no NVIDIA GPU"
    elif int(found["gpus"][0]["capability"]) < LEAST_CAPABILITY:
        yield f"{found['gpus'][0]['name']} is sm_{found['gpus'][0]['capability']}, sm_{LEAST_CAPABILITY} is needed"


def _doubts(found: dict[str, Any]) -> Iterator[str]:
    for name, specifier in found["supported"].items():
        version = found["packages"][name]
        if version is None:
            yield f"{name} is not installed"
        elif not Requirement(f"{name}{specifier}").specifier.contains(version, prereleases=True):
            yield f"{name} {version} is outside {specifier}"
    for gpu in found["gpus"][:1]:
        yield from gpu["left_out"]


def show(found: dict[str, Any], console: Console) -> None:
    """`collect`'s findings as a table, the verdict below."""
    table = Table(title="fusedvit's environment", show_header=False, title_justify="left")
    table.add_row("fusedvit", found["fusedvit"])
    table.add_row("python", f"{found['python']} on {found['system']}, {found['cpus']} CPUs")
    for name, version in found["packages"].items():
        supported = f" [dim](supported: {found['supported'][name]})[/]" if name in found["supported"] else ""
        table.add_row(name, (version or "[dim]not installed[/]") + supported)
    table.add_row("CUDA of torch", found["cuda"] or "[dim]none: a CPU build[/]")
    for index, gpu in enumerate(found["gpus"]):
        table.add_row(
            f"GPU {index}",
            f"{gpu['name']}, sm_{gpu['capability']}, {gpu['multiprocessors']} SMs, {gpu['memory_gib']:.0f} GiB, "
            f"{gpu['tuning']}",
        )
    if not found["gpus"]:
        table.add_row("GPU", "[dim]none[/]")
    console.print(table)
    console.out(found["verdict"], highlight=False)


def device_name(found: dict[str, Any]) -> str:
    """The machine in few words, for titles."""
    gpus = found["gpus"]
    return gpus[0]["name"] if gpus else f"CPU ({found['cpus']} cores)"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    table = tuning_table.table_for(Target.of(torch.device("cuda", index)))
    file = tuning_table.file_name(properties.name)
    entries = len(table.entries)
    return {
        "name": properties.name,
        "capability": f"{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
        "tuning": f"tuning table {file} ({entries} entries)" if entries else "no tuning table: heuristics choose",
        "left_out": list(table.stale),
    }
