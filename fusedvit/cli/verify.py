"""`fusedvit verify`: a user's own checkpoint and media, the fused tower against the original."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fusedvit
from fusedvit.cli import demo, documents, environment
from fusedvit.cli.demo import OutputParity, Step
from fusedvit.cli.media import Media
from fusedvit.cli.on_media import on_media
from fusedvit.cli.towers import checkpoint_tower
from fusedvit.tolerance import Summary, summarize


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint: a folder or a hub name.")],
    media: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[IMAGE|VIDEO]...", help="Left out: a photograph and a video that we ship."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write everything to a file too.")] = None,
) -> None:
    """Compare the fused tower of your checkpoint with the original, on your media. Exits with 1 where they differ."""
    found, report = on_media(media, lambda files, step: run(model, files, step))
    spread = summarize(p.comparison for parity in found.values() for p in parity)
    show(found, spread, report, Console())
    if json:
        calls = {name: [asdict(p) for p in parity] for name, parity in found.items()}
        head: dict[str, Any] = {"model": model, "environment": environment.collect(), "passed": not spread.failures}
        documents.write({**head, "calls": calls, "spread": asdict(spread), "report": report}, json)
    raise typer.Exit(int(spread.failures > 0))


def run(model: str, media: list[Media], step: Step) -> tuple[dict[str, list[OutputParity]], str]:
    """(every output of every call, the handle's report).

    Raises:
        UnsupportedModel: the checkpoint holds no tower that can be fused.
        OSError: there is no such checkpoint.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step("loading the checkpoint")
    tower = checkpoint_tower(model, device)
    step("fusing")
    handle = fusedvit.fuse(tower.model)
    towers = demo.side_by_side(handle, tower.dtype, device)
    found = {}
    for name, item in demo.inputs_of(media, towers).items():
        step(name)
        found[name] = demo.parity_of(towers, item)
    return found, handle.report()


def show(found: dict[str, list[OutputParity]], spread: Summary, report: str, console: Console) -> None:
    """A line per output, then what was fused and the verdict."""
    table = Table(title="error over the original's own (largest may be 2, rms 1.25)", title_justify="left")
    for head in ("input", "output", "shape", "largest", "rms", ""):
        table.add_column(head)
    for name, parity in found.items():
        for p in parity:
            c = p.comparison
            verdict = "[green]passed[/]" if c.passed else f"[red]{escape(c.reason)}[/]"
            shape = " x ".join(map(str, p.shape))
            table.add_row(escape(name), p.output, shape, f"{c.ratio_max:.2f}", f"{c.ratio_rms:.2f}", verdict)
    console.print(table)
    console.print(escape(report))
    total = sum(len(parity) for parity in found.values())
    passed = spread.failures == 0
    console.print(f"[{'green' if passed else 'red'}]{total - spread.failures} of {total} outputs pass[/]")
