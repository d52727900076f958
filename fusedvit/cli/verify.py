"""`fusedvit verify`: compares the fused tower of a user's own checkpoint with the original, on the user's media."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import fusedvit
from fusedvit.checkpoint import load_tower
from fusedvit.cli import env
from fusedvit.cli.console import Outcome, new_console, new_table, progress, quiet
from fusedvit.cli.media import load_all
from fusedvit.cli.parity import REFERENCE, OutputParity, parity_of, prepared_for_towers, side_by_side
from fusedvit.cli.towers import Tower, device_of, dtype_of
from fusedvit.tolerance import FACTOR_MAX, FACTOR_RMS, Summary, summarize


def run(
    model: str,
    media: Sequence[str | Path] | None,
    device: str | None = None,
    dtype: str | None = None,
    json: Any = None,
) -> Outcome:
    """Compares, prints and returns every output of every call; passes if all agree and some ran fused."""
    with quiet(), progress() as step:
        files = load_all(media or [])
        on = device_of(device)
        of = dtype_of(dtype, on)
        tower = Tower(model, load_tower(model, on, of, step), of)
        step("fusing")
        towers = side_by_side(fusedvit.fuse(tower.model, fusedvit.FuseConfig(compile="now")), tower.dtype, on)
        found = {}
        for name, item in prepared_for_towers(files, towers).items():
            step(name)
            found[name] = parity_of(towers, item)
        report, stats = towers.handle.report(), towers.handle.stats()
    spread = summarize(p.comparison for parity in found.values() for p in parity)
    original, compared = sum(stats["original"].values()), stats["fused"] > 0
    passed = compared and not spread.failures
    console = new_console()
    show(found, spread, report, console)
    if original:
        console.print(f"[yellow]{original} of {stats['calls']} calls ran the original code: see the report above[/]")
    if not compared:  # the original only agrees with itself
        console.print("[red]nothing was compared: no call ran fused[/]")
    calls = {name: [asdict(p) for p in parity] for name, parity in found.items()}
    head: dict[str, Any] = {"model": model, "dtype": str(tower.dtype), "device": str(on)}
    head |= {"environment": env.collect(), "passed": passed, "ran_original_code": original}
    return Outcome({**head, "calls": calls, "spread": asdict(spread), "report": report}, passed)


def show(found: dict[str, list[OutputParity]], spread: Summary, report: str, console: Console) -> None:
    """Prints a line per output, then the report and the verdict."""
    title = (
        f"Error ratio fused / original, both against {str(REFERENCE)[6:]}. "
        f"Passes: max up to {FACTOR_MAX:g}, rms up to {FACTOR_RMS:g}."
    )
    table = new_table(title, "input", "output", "shape", "max", "rms", "")
    for name, parity in found.items():
        for p in parity:
            c = p.comparison
            verdict = "[green]passed[/]" if c.passed else f"[red]{escape(c.reason)}[/]"
            shape = " x ".join(map(str, p.shape))
            table.add_row(escape(name), p.output, shape, f"{c.ratio_max:.2f}", f"{c.ratio_rms:.2f}", verdict)
    console.print(table)
    console.out(report)
    total = sum(len(parity) for parity in found.values())
    agree = spread.failures == 0
    console.print(f"[{'green' if agree else 'red'}]{total - spread.failures} of {total} outputs pass[/]")
