"""`fusedvit bench` and `fusedvit bench kernels`."""

import functools
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from fusedvit.bench import kernel_bench, plots, rows, show, towers, workloads
from fusedvit.bench.passport import passport
from fusedvit.bench.tower_bench import Options, measure
from fusedvit.cli import documents
from fusedvit.cli.progress import with_progress

app = typer.Typer(help="Measure towers and operations against their peers.", invoke_without_command=True)

Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write everything to a JSON file as well.")]
Fa3 = Annotated[Path | None, typer.Option(metavar="PATH", help="FA3's library (vLLM's build; may be .xz), for peers.")]
Towers = Annotated[
    list[str] | None, typer.Option("--tower", metavar="NAME", help=f"Of {', '.join(towers.GEOMETRIES)}.")
]
DEFAULT_TOWERS = ("Qwen3-VL-8B", "Qwen3-VL-2B")


@app.callback()
def bench(
    context: typer.Context,
    tower: Towers = None,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these of the nine; 'none' for none.")
    ] = None,
    sweep: Annotated[bool, typer.Option(help="Single images of many sizes and videos of many lengths as well.")] = True,
    compile_on: Annotated[
        list[str] | None, typer.Option("--compile", metavar="WORKLOAD", help="Run torch.compile there: minutes each.")
    ] = None,
    fa3: Fa3 = None,
    seconds: Annotated[float, typer.Option(min=0, help="Of timing for each workload.")] = 2.0,
    json: Json = None,
    csv: Annotated[Path | None, typer.Option(metavar="PATH", help="Write flat rows.")] = None,
    plot: Annotated[Path | None, typer.Option("--plots", metavar="FOLDER", help="Write pictures.")] = None,
    commit: Annotated[str, typer.Option(help="Recorded as it is; read from git when left out.")] = "",
) -> None:
    """Whole towers against Hugging Face, torch.compile and an engine-like encoder. Exits with 1 on a wrong answer."""
    if context.invoked_subcommand is not None:
        return
    names = tuple(tower or DEFAULT_TOWERS)
    device = _device(names)
    grids = _grids(workload, sweep)
    _refuse_unknown(compile_on or [], grids, "--compile")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = Options(names, grids, tuple(compile_on or ()), fa3, seconds, dtype=dtype)
    said = _command(names, workload, sweep, compile_on, fa3, json)
    head: dict[str, Any] = {"passport": passport("", "", commit) | {"command": said}}
    keep = functools.partial(_keep, head, json)
    document = head | with_progress(lambda step: measure(options, device, step, keep))
    console = Console()
    show.show(document, console)
    if csv:
        rows.write_csv(document, csv)
    for path in plots.draw(document, plot) if plot else []:
        console.print(f"picture: {escape(str(path))}")
    wrong = [row for row in rows.flat(document) if row["parity"] is False]
    raise typer.Exit(int(bool(wrong)))


@app.command()
def kernels(tower: Towers = None, fa3: Fa3 = None, json: Json = None) -> None:
    """Each operation alone against cuBLAS, FA3, cuDNN and torch; weights rotated, so that none is found in L2."""
    names = tuple(tower or DEFAULT_TOWERS[:1])
    device = _device(names)
    found = with_progress(lambda step: kernel_bench.measure(names, device, fa3, step))
    show.show_kernels(found, Console())
    if json:
        said = f"fusedvit bench kernels {' '.join(f'--tower {name}' for name in names)} --json {json.name}"
        documents.write({"passport": passport("", "", "") | {"command": said}, "rows": found}, json)
    raise typer.Exit(int(any(row["us"] is None for row in found)))


def _keep(head: dict[str, Any], path: Path | None, found: dict[str, Any]) -> None:
    if path:
        documents.write(head | found, path)


def _command(
    names: tuple[str, ...],
    chosen: list[str] | None,
    sweep: bool,
    compile_on: list[str] | None,
    fa3: Path | None,
    json: Path | None,
) -> str:
    """How to run this again; of paths the name alone, as folders differ from machine to machine."""
    words = ["fusedvit bench", *(f"--tower {name}" for name in names)]
    words += [f"--workload '{name}'" for name in chosen or ()] + ([] if sweep else ["--no-sweep"])
    words += [f"--compile '{name}'" for name in compile_on or ()] + ([f"--fa3 {fa3.name}"] if fa3 else [])
    return " ".join(words + ([f"--json {json.name}"] if json else []))


def _device(names: tuple[str, ...]) -> torch.device:
    _refuse_unknown(list(names), towers.GEOMETRIES, "--tower")
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


def _refuse_unknown(names: list[str], known: dict[str, Any], option: str) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise typer.BadParameter(f"no {unknown[0]!r}; there are {', '.join(map(repr, known))}", param_hint=option)
