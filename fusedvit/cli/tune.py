"""`fusedvit tune`."""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusedvit.bench import kernel_bench, prune, tune
from fusedvit.cli import documents
from fusedvit.cli.progress import with_progress
from fusedvit.kernels import tables
from fusedvit.kernels.configs import Target

CPU_NAME = "CPU"


def command(
    tower: Annotated[
        list[str] | None,
        typer.Option("--tower", metavar="NAME", help="Of Qwen3-VL-8B and -2B, the default, other families', or 'all'."),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            "--budget", metavar="PATCHES", min=4, help="Row budgets; else four to an octave from 128 to 65536."
        ),
    ] = None,
    operation: Annotated[
        list[str] | None, typer.Option("--op", metavar="NAME", help="Only these, as `report()` names them: qkv, fc2 …")
    ] = None,
    budget_minutes: Annotated[float, typer.Option(min=0, help="Stop after so long; run again to go on.")] = 60.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile and check candidates.")] = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be tried.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="The table; else your own in the cache.")] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write what was found as well.")] = None,
) -> None:
    """Find the fastest form and tile of every operation on this GPU; the table is used from the next process on."""
    names = _names(tower or ["Qwen3-VL-8B", "Qwen3-VL-2B"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not dry_run and set(names) - {"tiny"}:
        raise typer.BadParameter(
            "needs an NVIDIA GPU; without one only --dry-run and the tiny tower", param_hint="tune"
        )
    dtype = torch.bfloat16 if device.type == "cuda" or dry_run else torch.float32
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else CPU_NAME
    asked = tune.questions([kernel_bench.spec_of(name) for name in names], budget or tune.BUDGETS, dtype)
    asked, console = [q for q in asked if not operation or q.task.name in operation], Console()
    if dry_run:
        _show_plan(asked, dtype, Target.of(device), console)
        return
    path = out or tables.user_folder() / tables.file_name(gpu)
    log = _decide(asked, path, device, dtype, gpu, jobs, 60 * budget_minutes, console)
    if json:
        entries = [record["entry"] for record in log.found.values() if record.get("entry")]
        documents.write({"passport": tune.passport(gpu), "entries": entries, "log": log.found}, json)


def _names(asked: list[str]) -> tuple[str, ...]:
    known = kernel_bench.known()
    if asked == ["all"]:
        return tuple(name for name in known if name != "tiny")
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise typer.BadParameter(f"no {unknown[0]!r}; there are {', '.join(known)}", param_hint="--tower")
    return tuple(asked)


def _decide(
    asked: list[tune.Question],
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    gpu: str,
    jobs: int,
    seconds: float,
    console: Console,
) -> tune.Log:
    """Runs the tuner, writes and shows its table; returns its log."""
    log = tune.Log(path.with_suffix(".log.jsonl"), tune.passport(gpu))
    pruned = prune.in_processes(jobs, dtype, device) if device.type == "cuda" else prune.here(dtype, device)
    deadline = time.monotonic() + seconds
    with torch.inference_mode():
        entries = with_progress(lambda step: tune.Tuner(device, dtype, log, pruned, step, deadline).run(asked))
    tune.write(path, gpu, entries)
    _show_found(entries, console)
    console.print(f"{len(entries)} of {len(asked)} decided: {escape(str(path))}")
    return log


def _show_plan(asked: list[tune.Question], dtype: torch.dtype, target: Target, console: Console) -> None:
    table = Table(title="what would be tried", title_justify="left")
    for head in ("operation", "candidates"):
        table.add_column(head)
    for question in asked:
        by_form: dict[str, int] = {}
        for candidate in tune.candidates(question, dtype, target):
            by_form[candidate.form] = by_form.get(candidate.form, 0) + 1
        table.add_row(question.describe(), ", ".join(f"{n} {form}" for form, n in by_form.items()))
    console.print(table)


def _show_found(entries: list[dict[str, object]], console: Console) -> None:
    table = Table(title="fastest, microseconds at a full budget", title_justify="left")
    for head in ("operation", "rows", "form", "us", "heuristic us", "configuration"):
        table.add_column(head)
    for e in entries:
        name = f"{e['op']} {e['kind']} {e['n']} x {e['k']}"
        cells = (name, e["rows"], e["form"], e["us"], e.get("heuristic_us", "–"), e["config"])
        table.add_row(*map(str, cells))
    console.print(table)
