"""`fusedvit bench` and `fusedvit bench kernels`."""

import functools
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from fusedvit.bench import guard, kernel_bench, plots, rows, show, towers, workloads
from fusedvit.bench.passport import passport
from fusedvit.bench.tower_bench import Options, measure
from fusedvit.cli import documents
from fusedvit.cli.progress import with_progress
from fusedvit.kernels import backends
from fusedvit.kernels.tile_configs import note_failure

app = typer.Typer(help="Measure towers and operations against their peers.", invoke_without_command=True)

Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write everything to a JSON file as well.")]
Fa3 = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", envvar="FUSEDVIT_FA3", help="FA3's library (vLLM's build; may be .xz), for peers.", exists=True
    ),
]
Towers = Annotated[
    list[str] | None,
    typer.Option("--tower", metavar="NAME", help=f"Of {', '.join(towers.GEOMETRIES)}, or another family's."),
]
Rows = Annotated[
    list[int] | None, typer.Option("--rows", metavar="PATCHES", min=1, help="Each operation alone at so many rows.")
]
Commit = Annotated[str, typer.Option(help="Recorded as it is; read from git when left out.")]


def _leave_out(asked: list[str] | None) -> list[str] | None:
    """As if these forms did not compile here."""
    known = {f"{backend.op}/{backend.name}" for backend in backends.BACKENDS if backend.name != "triton"}
    _refuse_unknown(asked or [], known, "--without")
    for backend in asked or []:
        note_failure(backend, "left out by --without")
    return asked


Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="FORM", help="As if it were not there: linear/hopper …", callback=_leave_out),
]
Guard = Annotated[
    float, typer.Option("--guard", min=0, help="Seconds for checking forms in a process of its own first.")
]
DEFAULT_TOWERS = ("Qwen3-VL-8B", "Qwen3-VL-2B")
SHORT_SECONDS, SECONDS = 0.3, 2.0


@app.callback()
def bench(
    context: typer.Context,
    tower: Towers = None,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these of the nine; 'none' for none.")
    ] = None,
    sweep: Annotated[
        bool | None, typer.Option("--sweep/--no-sweep", help="Single images of many sizes and videos of many lengths.")
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="A minute or two: one tower, no sweep, the peers that count, fewer rounds.")
    ] = False,
    compile_on: Annotated[
        list[str] | None, typer.Option("--compile", metavar="WORKLOAD", help="Run torch.compile there: minutes each.")
    ] = None,
    fa3: Fa3 = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Of timing for each workload.")] = None,
    rows_alone: Rows = None,
    without: Without = None,
    guard_s: Guard = 0.0,
    json: Json = None,
    csv: Annotated[Path | None, typer.Option(metavar="PATH", help="Write flat rows.")] = None,
    plot: Annotated[Path | None, typer.Option("--plots", metavar="FOLDER", help="Write pictures.")] = None,
    commit: Commit = "",
) -> None:
    """Whole towers against Hugging Face, torch.compile and an engine-like encoder. Exits with 1 on a wrong answer."""
    if context.invoked_subcommand is not None:
        return
    names = tuple(tower or (DEFAULT_TOWERS[:1] if short else DEFAULT_TOWERS))
    device = _device(names)
    grids = _grids(workload, not short if sweep is None else sweep)
    _refuse_unknown(compile_on or [], grids, "--compile")
    given: dict[str, Any] = {"--tower": tower, "--workload": workload, "--sweep": sweep, "--no-sweep": sweep is False}
    given |= {"--short": short, "--compile": compile_on, "--fa3": fa3, "--seconds": seconds, "--rows": rows_alone}
    given |= {"--without": without, "--guard": guard_s or None, "--json": json}
    options = _options(names, grids, compile_on, fa3, seconds, short, device)
    head = _passport("fusedvit bench", given, commit) | _guarded(options, guard_s)
    document = _measure(options, tuple(rows_alone or ()), device, head, json)
    _show(document, csv, plot)
    raise typer.Exit(int(_any_wrong(document)))


def _options(
    names: tuple[str, ...],
    grids: dict[str, workloads.Grid],
    compile_on: list[str] | None,
    fa3: Path | None,
    seconds: float | None,
    short: bool,
    device: torch.device,
) -> Options:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seconds = (SHORT_SECONDS if short else SECONDS) if seconds is None else seconds
    return Options(names, grids, tuple(compile_on or ()), fa3, seconds, dtype=dtype, short=short)


def _guarded(options: Options, seconds: float) -> dict[str, Any]:
    """Leaves out the forms that would spoil the run; what was found, for the document."""
    if not seconds:
        return {}
    found = guard.guarded(guard.command(options.towers, options.workloads.values()), seconds)
    for backend, problem in found.problems.items():
        note_failure(backend, problem)
    return {"guard": asdict(found)}


def _measure(
    options: Options, sizes: tuple[int, ...], device: torch.device, head: dict[str, Any], path: Path | None
) -> dict[str, Any]:
    """The document, kept in `path` as far as it is after every workload."""
    keep = functools.partial(_keep, head, path)
    document = head | with_progress(lambda step: measure(options, device, step, keep))
    if sizes:
        measured = kernel_bench.measure
        found = with_progress(lambda step: measured(options.towers, device, options.fa3, step, sizes))
        document["operations"] = found
        _keep(document, path, {})
    return document


def _show(document: dict[str, Any], csv: Path | None, plot: Path | None) -> None:
    console = Console()
    show.show(document, console)
    show.show_split(document, console)
    if "operations" in document:
        show.show_kernels(document["operations"], console)
    show.show_bars(document, console)
    if csv:
        rows.write_csv(document, csv)
    for path in plots.draw(document, plot) if plot else []:
        console.print(f"picture: {escape(str(path))}")


def _any_wrong(document: dict[str, Any]) -> bool:
    operations = document.get("operations", [])
    wrong = any(row["parity"] is False for row in rows.flat(document)) or any(row["us"] is None for row in operations)
    return wrong or any(found.get("failed") for found in document["towers"].values())


@app.command()
def kernels(
    tower: Towers = None,
    fa3: Fa3 = None,
    rows_alone: Rows = None,
    without: Without = None,
    json: Json = None,
    commit: Commit = "",
) -> None:
    """Each operation alone against cuBLAS, FA3, cuDNN and torch; weights rotated, so that none is found in L2."""
    names, sizes = tuple(tower or DEFAULT_TOWERS[:1]), tuple(rows_alone or ())
    device = _device(names)
    found = with_progress(lambda step: kernel_bench.measure(names, device, fa3, step, sizes))
    show.show_kernels(found, Console())
    if json:
        given = {"--tower": tower, "--fa3": fa3, "--rows": rows_alone, "--without": without, "--json": json}
        documents.write(_passport("fusedvit bench kernels", given, commit) | {"rows": found}, json)
    raise typer.Exit(int(any(row["us"] is None for row in found)))


def _passport(command: str, given: dict[str, Any], commit: str = "") -> dict[str, Any]:
    """Where a result comes from, and how to make it again; of paths the name alone, as folders differ by machine."""
    words = [command]
    for option, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is None or one is False:
                continue
            words += [option] if one is True else [option, shlex.quote(one.name if isinstance(one, Path) else str(one))]
    return {"passport": passport("", (), commit) | {"command": " ".join(words)}}


def _keep(head: dict[str, Any], path: Path | None, found: dict[str, Any]) -> None:
    if path:
        documents.write(head | found, path)


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
