"""`fusedvit bench` and `fusedvit bench kernels`."""

import functools
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from fusedvit.bench import guard, kernel_bench, plots, rows, show, workloads
from fusedvit.bench.passport import passport
from fusedvit.bench.tower_bench import Options, measure
from fusedvit.cli.console import Outcome, progress, write
from fusedvit.kernels import backends
from fusedvit.kernels.tile_configs import note_failure

DEFAULT_TOWERS = ("Qwen3-VL-8B", "Qwen3-VL-2B")
SHORT_SECONDS, SECONDS = 0.3, 2.0


@dataclass(frozen=True)
class Asked:
    """The command's options, as app.py declares them; `json` is None for standard output."""

    kernels: bool = False
    tower: list[str] | None = None
    workload: list[str] | None = None
    sweep: bool | None = None
    short: bool = False
    compile_on: list[str] | None = None
    fa3: Path | None = None
    seconds: float | None = None
    rows: list[int] | None = None
    without: list[str] | None = None
    guard: float = 0.0
    json: str | None = None
    csv: Path | None = None
    plots: Path | None = None
    commit: str = ""

    @property
    def towers(self) -> tuple[str, ...]:
        one = self.short or self.kernels
        return tuple(self.tower or (DEFAULT_TOWERS[:1] if one else DEFAULT_TOWERS))

    def command(self) -> str:
        """What to type to measure this again; of paths the name alone, as folders differ by machine."""
        given: dict[str, Any] = {"--tower": self.tower, "--workload": self.workload, "--sweep": self.sweep}
        given |= {"--no-sweep": self.sweep is False, "--short": self.short, "--compile": self.compile_on}
        given |= {"--fa3": self.fa3, "--seconds": self.seconds, "--rows": self.rows, "--without": self.without}
        given |= {"--guard": self.guard or None, "--json": self.json and Path(self.json)}
        words = ["fusedvit bench kernels" if self.kernels else "fusedvit bench"]
        for option, value in given.items():
            for one in value if isinstance(value, list) else [value]:
                if one is None or one is False:
                    continue
                text = one.name if isinstance(one, Path) else str(one)
                words += [option] if one is True else [option, shlex.quote(text)]
        return " ".join(words)


def run(**options: Any) -> Outcome:
    """Measures and prints; not passed where an answer is wrong."""
    asked = Asked(**options)
    _leave_out(asked.without or [])
    return _run_kernels(asked) if asked.kernels else _run_towers(asked)


def _leave_out(names: list[str]) -> None:
    """As if these backends did not compile here."""
    known = {f"{backend.op}/{backend.name}" for backend in backends.BACKENDS if backend.name != "triton"}
    _refuse_unknown(names, known, "--without")
    for backend in names:
        note_failure(backend, "left out by --without")


def _run_kernels(asked: Asked) -> Outcome:
    device = _device(asked.towers)
    with progress() as step:
        found = kernel_bench.measure(asked.towers, device, asked.fa3, step, tuple(asked.rows or ()))
    show.show_kernels(found, Console())
    return Outcome(_passport(asked) | {"rows": found}, all(row["us"] is not None for row in found))


def _run_towers(asked: Asked) -> Outcome:
    device = _device(asked.towers)
    options = _options(asked, device)
    head = _passport(asked) | _guarded(options, asked.guard)
    document = _measure(options, asked, device, head)
    _show(document, asked)
    return Outcome(document, not _any_wrong(document))


def _options(asked: Asked, device: torch.device) -> Options:
    grids = _grids(asked.workload, not asked.short if asked.sweep is None else asked.sweep)
    _refuse_unknown(asked.compile_on or [], grids, "--compile")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seconds = (SHORT_SECONDS if asked.short else SECONDS) if asked.seconds is None else asked.seconds
    compiled = tuple(asked.compile_on or ())
    return Options(asked.towers, grids, compiled, asked.fa3, seconds, dtype=dtype, short=asked.short)


def _guarded(options: Options, seconds: float) -> dict[str, Any]:
    """Leaves out the backends that would spoil the run; what was found, for the document."""
    if not seconds:
        return {}
    found = guard.guarded(guard.command(options.towers, options.workloads.values()), seconds)
    for backend, problem in found.problems.items():
        note_failure(backend, problem)
    return {"guard": asdict(found)}


def _measure(options: Options, asked: Asked, device: torch.device, head: dict[str, Any]) -> dict[str, Any]:
    """The document, kept in its file as far as it is after every workload."""
    keep = functools.partial(_keep, head, asked.json)
    with progress() as step:
        document = head | measure(options, device, step, keep)
        if asked.rows:
            sizes = tuple(asked.rows)
            document["operations"] = kernel_bench.measure(options.towers, device, options.fa3, step, sizes)
    return document


def _keep(head: dict[str, Any], path: str | None, found: dict[str, Any]) -> None:
    if path:
        write(head | found, path)


def _show(document: dict[str, Any], asked: Asked) -> None:
    console = Console()
    show.show(document, console)
    show.show_split(document, console)
    if "operations" in document:
        show.show_kernels(document["operations"], console)
    show.show_bars(document, console)
    if asked.csv:
        rows.write_csv(document, asked.csv)
    for path in plots.draw(document, asked.plots) if asked.plots else []:
        console.print(f"picture: {escape(str(path))}")


def _any_wrong(document: dict[str, Any]) -> bool:
    operations = document.get("operations", [])
    wrong = any(row["parity"] is False for row in rows.flat(document)) or any(row["us"] is None for row in operations)
    return wrong or any(found.get("failed") for found in document["towers"].values())


def _passport(asked: Asked) -> dict[str, Any]:
    """Where a result comes from."""
    return {"passport": passport("", (), asked.commit) | {"command": asked.command()}}


def _device(names: tuple[str, ...]) -> torch.device:
    _refuse_unknown(list(names), kernel_bench.known(), "--tower")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if set(names) - {"tiny"}:
        raise typer.BadParameter("needs an NVIDIA GPU; without one only the tiny tower runs", param_hint="--tower")
    return torch.device("cpu")


def _grids(chosen: list[str] | None, sweep: bool) -> dict[str, workloads.Grid]:
    none = chosen == ["none"]
    if chosen and not none:
        _refuse_unknown(chosen, workloads.WORKLOADS | workloads.sweep(), "--workload")
        return {name: (workloads.WORKLOADS | workloads.sweep())[name] for name in chosen}
    return ({} if none else dict(workloads.WORKLOADS)) | (workloads.sweep() if sweep else {})


def _refuse_unknown(names: list[str], known: Iterable[str], option: str) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise typer.BadParameter(f"no {unknown[0]!r}; there are {', '.join(map(repr, known))}", param_hint=option)
