"""`fusedvit verify`: a user's own checkpoint and media, the fused tower against the original."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fusedvit
from fusedvit.checkpoint import load_tower
from fusedvit.cli import env
from fusedvit.cli.console import Outcome, Step, progress, quiet
from fusedvit.cli.media import load_all
from fusedvit.cli.parity import REFERENCE, OutputParity, inputs_of, parity_of, side_by_side
from fusedvit.cli.towers import Tower
from fusedvit.errors import InputError
from fusedvit.tolerance import FACTOR_MAX, FACTOR_RMS, Summary, summarize

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run(
    model: str,
    media: Sequence[str | Path] | None,
    device: str | None = None,
    dtype: str | None = None,
    json: Any = None,
) -> Outcome:
    """Compares, prints and returns every output of every call."""
    with quiet(), progress() as step:
        files = load_all(media or [])
        on = device_of(device)
        tower = checkpoint_tower(model, on, dtype, step)
        step("fusing")
        towers = side_by_side(fusedvit.fuse(tower.model), tower.dtype, on)
        found = {}
        for name, item in inputs_of(files, towers).items():
            step(name)
            found[name] = parity_of(towers, item)
        report, original = towers.handle.report(), sum(towers.handle.stats()["original"].values())
    spread = summarize(p.comparison for parity in found.values() for p in parity)
    console = Console()
    show(found, spread, report, console)
    if original:
        console.print(f"[yellow]{original} calls of the fused tower ran the original code: see the report above[/]")
    calls = {name: [asdict(p) for p in parity] for name, parity in found.items()}
    head: dict[str, Any] = {"model": model, "dtype": str(tower.dtype), "device": str(on)}
    head |= {"environment": env.collect(), "passed": not spread.failures, "ran_original_code": original}
    return Outcome({**head, "calls": calls, "spread": asdict(spread), "report": report}, not spread.failures)


def show(found: dict[str, list[OutputParity]], spread: Summary, report: str, console: Console) -> None:
    """A line per output, then what was fused and the verdict."""
    title = (
        f"error against {str(REFERENCE)[6:]}, fused / original: up to {FACTOR_MAX:g} (max), {FACTOR_RMS:g} (rms) pass"
    )
    table = Table(title=title, title_justify="left")
    for head in ("input", "output", "shape", "max", "rms", ""):
        table.add_column(head)
    for name, parity in found.items():
        for p in parity:
            c = p.comparison
            verdict = "[green]passed[/]" if c.passed else f"[red]{escape(c.reason)}[/]"
            shape = " x ".join(map(str, p.shape))
            table.add_row(escape(name), p.output, shape, f"{c.ratio_max:.2f}", f"{c.ratio_rms:.2f}", verdict)
    console.print(table)
    console.print(escape(report), soft_wrap=True)
    total = sum(len(parity) for parity in found.values())
    passed = spread.failures == 0
    console.print(f"[{'green' if passed else 'red'}]{total - spread.failures} of {total} outputs pass[/]")


def checkpoint_tower(where: str, device: torch.device, dtype: str | None, step: Step) -> Tower:
    """The tower of a checkpoint on `device`, in the dtype of that name.

    Raises:
        InputError: no such checkpoint or dtype, or a checkpoint that does not load.
        UnsupportedModel: it holds no tower that can be fused.
    """
    of = dtype_of(dtype, device)
    return Tower(where, load_tower(where, device, of, step), of)


def device_of(name: str | None) -> torch.device:
    """The device of that name; the GPU if there is one, else the CPU, without a name.

    Raises:
        InputError: no such device, or none that is here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device: cpu, cuda or cuda:N expected, got {name!r}") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= count):
        raise InputError(f"--device: no {name!r} here; torch sees the CPU and {count} GPUs")
    return device


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """bf16, fp16 or fp32 by name; without one bf16 on a GPU and fp32 on a CPU. Raises InputError for other names."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise InputError(f"--dtype: one of {', '.join(DTYPES)} expected, got {name!r}")
    return DTYPES[name]
