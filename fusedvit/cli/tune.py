"""`fusedvit tune`."""

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fusedvit import __version__
from fusedvit.bench.towers import GEOMETRIES, MOST_USED, known, spec_of
from fusedvit.bench.tuning import candidates as tune_candidates
from fusedvit.bench.tuning import in_tower
from fusedvit.bench.tuning import tuner as tune
from fusedvit.bench.tuning.candidates import TuningTask
from fusedvit.bench.workloads import WORKLOADS
from fusedvit.cli.console import Outcome, new_console, new_table, progress_bar, refuse_unknown, refuse_unwritable
from fusedvit.errors import InputError
from fusedvit.kernels import tuning_table
from fusedvit.kernels.backends import backend_of
from fusedvit.kernels.tile_configs import Target
from fusedvit.kernels.tuning_table import Entry
from fusedvit.model.plan import heuristic
from fusedvit.runtime.compile_worker import most_children

CPU_NAME = "CPU"


def run(
    tower: list[str] | None = None,
    budget: list[int] | None = None,
    operation: list[str] | None = None,
    budget_minutes: float = 12.0,
    jobs: int | None = None,
    thorough: bool = False,
    new_kernels: bool = True,
    dry_run: bool = False,
    out: Path | None = None,
    json: Any = None,
) -> Outcome:
    """Tunes, or prints what would be tried; the document holds the passport, the table's entries and the log."""
    deadline = time.monotonic() + 60 * budget_minutes
    names, jobs = _names(tower or list(MOST_USED)), jobs or most_children(urgent=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not dry_run and set(names) - {"tiny"}:
        raise InputError("tune: needs an NVIDIA GPU; without one only --dry-run and the tiny tower")
    dtype = torch.bfloat16 if device.type == "cuda" or dry_run else torch.float32
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else CPU_NAME
    waves, console = _waves(names, budget, operation, dtype), new_console()
    path = out or tuning_table.user_folder() / tuning_table.file_name(gpu)
    if not dry_run:
        refuse_unwritable(path)
    passport, on_gpu = tuning_table.passport(gpu, __version__), device.type == "cuda"
    log = tune.Log(path.with_suffix(".log.jsonl"), passport | {"thorough": thorough, "new_kernels": new_kernels})
    check = tune_candidates.in_processes(jobs, dtype, device) if on_gpu else tune_candidates.here(dtype, device)
    only = None if new_kernels else _usual(names, dtype, Target.of(device))
    tuner = tune.Tuner(device, dtype, log, check, deadline=deadline, thorough=thorough, only=only)
    items = [item for wave in waves for item in wave]
    compilations = {tune_candidates.compilation(item, c) for item in items for c in tuner.proposed(item)}
    console.print(f"{len(items)} operations, {len(compilations)} compilations", highlight=False)
    if dry_run:
        _show_plan(items, tuner, console)
        return Outcome({"passport": passport, "operations": [item.describe() for item in items]})
    unproven = path.with_suffix(".unproven.json")
    tuner.keep = lambda entries, decided: tuning_table.write(unproven, passport, entries, decided)
    _run(tuner, waves, console)
    found = _prove(tuner, items, names if on_gpu else (), path, passport, console)
    unproven.unlink(missing_ok=True)
    return Outcome({"passport": passport, **found, "log": log.found})


def _prove(
    tuner: tune.Tuner, items: list[TuningTask], names: tuple[str, ...], path: Path, passport: dict[str, Any],
    console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Times whole towers and writes the entries that make them faster. An entry must do so in every timed tower that
    has its operation.

    Args:
        names: names of the towers to time.
    """
    entries, gains, refused = tuner.entries(items), dict[str, dict[str, list[float]]](), list[str]()
    for name in names:
        own = in_tower.entries_of(spec_of(GEOMETRIES[name]), tuner.dtype, entries)
        kept, gains[name] = _of_tower(name, tuner, own)
        if not in_tower.worth_it(gains[name]):
            kept = []
        entries = [entry for entry in entries if entry in kept or entry not in own]
        refused += [name] if own and not kept else []
        _show_gain(name, gains[name], f"{len(kept)} of {len(own)} entries kept", console)
    _write(path, passport, tuner, items, entries, console)
    return {"entries": entries, "gains": gains, "refused": refused}


def _of_tower(name: str, tuner: tune.Tuner, entries: list[Entry]) -> tuple[list[Entry], dict[str, list[float]]]:
    """The `entries` that make a tower faster at their budgets, and the speed-ups that they give on the workloads."""
    if not entries:
        return [], {}
    with torch.inference_mode(), progress_bar() as step:
        tower = in_tower.WholeTower(GEOMETRIES[name], tuner.dtype, tuner.device)
        kept = in_tower.proven(tower, entries, step)
        grids = {workload: GEOMETRIES[name].rows(list(grid)) for workload, grid in WORKLOADS.items()}
        return kept, in_tower.tower_gains(tower, kept, grids)


def _show_gain(name: str, gains: dict[str, list[float]], verdict: str, console: Console) -> None:
    rounds = [statistics.geometric_mean(ratios) for ratios in zip(*gains.values(), strict=True)]
    mean = ", ".join(f"{ratio:.3f}" for ratio in rounds) or "no other choice at any workload"
    console.print(f"{name}, whole tower, heuristics over tuned, round by round: {mean}: {verdict}", highlight=False)


def _write(
    path: Path, passport: dict[str, Any], tuner: tune.Tuner, items: list[TuningTask], entries: list[Entry],
    console: Console,
) -> None:  # fmt: skip
    """Writes the table of `entries`; without entries, only over an existing table."""
    if entries or path.exists():
        tuning_table.write(path, passport, entries, [item.task.key for item in items if tuner.log.decided(item)])
    decided = [tuner.log.decided(item) for item in items]
    where = path if entries or path.exists() else "no table is written"
    console.out(f"{sum(decided)} of {len(decided)} decided, {len(entries)} unlike the heuristics: {where}")


def _waves(
    names: tuple[str, ...], budgets: list[int] | None, operations: list[str] | None, dtype: torch.dtype
) -> list[list[TuningTask]]:
    """The tasks to decide, those of the most used towers first."""
    specs, most_used = ([spec_of(GEOMETRIES[name]) for name in of] for of in (names, MOST_USED))
    every = tune_candidates.tuning_tasks(specs, budgets or tune_candidates.BUDGETS, dtype)
    refuse_unknown(operations or [], dict.fromkeys(item.task.name for item in every), "--op")
    chosen = [item for item in every if not operations or item.task.name in operations]
    return tune_candidates.in_waves(chosen, most_used)


def _usual(names: tuple[str, ...], dtype: torch.dtype, target: Target) -> set[str]:
    """The kernels that whole towers compile with heuristics alone, at every budget."""
    specs = [spec_of(GEOMETRIES[name]) for name in names]
    every = tune_candidates.tuning_tasks(specs, tune_candidates.BUDGETS, dtype)
    return {tune_candidates.kernel_of(item, heuristic(item.task, dtype, target)) for item in every}


def _names(asked: list[str]) -> tuple[str, ...]:
    if asked == ["all"]:
        return tuple(name for name in known() if name != "tiny")
    refuse_unknown(asked, known(), "--tower")
    return tuple(asked)


def _run(tuner: tune.Tuner, waves: list[list[TuningTask]], console: Console) -> None:
    """Runs the tuner, which writes its table, and prints the entries."""
    with torch.inference_mode(), progress_bar() as step:
        tuner.step = step
        entries = tuner.run(*waves)
    _show_found(entries, console)


def _show_plan(items: list[TuningTask], tuner: tune.Tuner, console: Console) -> None:
    table = new_table("what would be tried", "operation", "candidates")
    for item in items:
        by_backend = Counter(backend_of(config).name for config in tuner.proposed(item))
        table.add_row(item.describe(), ", ".join(f"{n} {backend}" for backend, n in by_backend.items()))
    console.print(table)


def _show_found(entries: list[dict[str, object]], console: Console) -> None:
    heads = ("operation", "rows", "backend", "us", "heuristic us", "configuration")
    table = new_table("fastest, microseconds at a full budget", *heads)
    for e in entries:
        name = f"{e['op']} {e['kind']} {e['n']} x {e['k']}"
        cells = (name, e["rows"], e["backend"], e["us"], e.get("heuristic_us", "–"), e["config"])
        table.add_row(*map(str, cells))
    console.print(table)
