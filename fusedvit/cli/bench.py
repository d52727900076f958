"""`fusedvit bench`, `fusedvit bench kernels` and `fusedvit bench pixels`."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench import ops, records, tables, workloads
from fusedvit.bench.engines import vllm_bench
from fusedvit.bench.pixels import report as pixels
from fusedvit.bench.pixels import table
from fusedvit.bench.tower_bench import Options, measure
from fusedvit.bench.towers import MOST_USED, known
from fusedvit.cli.console import Outcome, new_console, progress, refuse_unknown, write, write_file
from fusedvit.errors import InputError
from fusedvit.kernels import backends
from fusedvit.kernels.tile_configs import note_failure

SHORT_SECONDS, SECONDS = 0.3, 2.0
OPERATIONS = "operations alone (ratio: a peer's time over ours)"


@dataclass(frozen=True)
class Asked:
    """The command's options, as app.py declares them; `json` is None for standard output."""

    kernels: bool = False
    pixels: bool = False
    images: int | None = None
    plot: Path | None = None
    tower: list[str] | None = None
    workload: list[str] | None = None
    sweep: bool | None = None
    short: bool = False
    compile_on: list[str] | None = None
    fa3: Path | None = None
    seconds: float | None = None
    rows: list[int] | None = None
    without: list[str] | None = None
    vllm: Path | None = None
    json: str | None = None
    commit: str = ""

    @property
    def towers(self) -> tuple[str, ...]:
        one = self.short or self.kernels or self.pixels or self.vllm is not None
        return tuple(self.tower or (MOST_USED[:1] if one else MOST_USED))

    def passport(self) -> dict[str, Any]:
        """The origin of a result, and the command that measures it again."""
        given: dict[str, Any] = {"--tower": self.tower, "--workload": self.workload, "--sweep": self.sweep}
        given |= {"--no-sweep": self.sweep is False, "--short": self.short, "--compile": self.compile_on}
        given |= {"--fa3": self.fa3, "--seconds": self.seconds, "--rows": self.rows, "--without": self.without}
        given |= {"--vllm": self.vllm}
        given |= {"--json": self.json and Path(self.json)}
        given |= {"--images": self.images, "--plot": self.plot}
        command = "fusedvit bench" + (" kernels" if self.kernels else " pixels" if self.pixels else "")
        return {"passport": records.passport(command, given, self.commit)}


def run(**options: Any) -> Outcome:
    """Measures and prints; does not pass if an output is wrong."""
    asked = Asked(**options)
    _leave_out(asked.without or [])
    if asked.pixels:
        return _run_pixels(asked)
    if asked.vllm is not None:
        return _run_vllm(asked, asked.vllm)
    return _run_kernels(asked) if asked.kernels else _run_towers(asked)


def _leave_out(names: list[str]) -> None:
    """Treats these backends as if they did not compile here."""
    others = {f"{backend.op}/{backend.name}" for backend in backends.BACKENDS if backend.name != "triton"}
    refuse_unknown(names, others, "--without")
    for backend in names:
        note_failure(backend, "left out by --without")


def _run_kernels(asked: Asked) -> Outcome:
    device = _device(asked.towers)
    with progress() as step:
        found = ops.measure(asked.towers, device, asked.fa3, step, tuple(asked.rows or ()))
    tables.operation_table(found).show(OPERATIONS, new_console())
    return Outcome(asked.passport() | {"rows": found}, all(row["us"] is not None for row in found))


def _run_pixels(asked: Asked) -> Outcome:
    device = _device(asked.towers)
    work = table.WORKLOADS if device.type == "cuda" else table.TINY
    options = pixels.Options(
        asked.towers[0], work, asked.images or 2000, SECONDS * 2 if asked.seconds is None else asked.seconds
    )
    head = asked.passport()
    with progress() as step:
        found = head | pixels.measure(options, device, step, functools.partial(_keep, head, asked.json))
    pixels.show(found, new_console())
    if asked.plot:
        write_file(pixels.draw(found, asked.plot.suffix), asked.plot)
    return Outcome(found, pixels.passed(found))


def _run_vllm(asked: Asked, folder: Path) -> Outcome:
    device = _device(asked.towers)
    options = _options(asked, device)
    peer = vllm_bench.Options(folder, asked.towers[0], options.workloads, options.seconds, options.dtype)
    head = asked.passport()
    with progress() as step:
        document = head | vllm_bench.measure(peer, device, step, functools.partial(_keep, head, asked.json))
    vllm_bench.show(document, new_console())
    return Outcome(document, not vllm_bench.any_wrong(document))


def _run_towers(asked: Asked) -> Outcome:
    device = _device(asked.towers)
    options, head, console = _options(asked, device), asked.passport(), new_console()
    with progress() as step:
        document = head | measure(options, device, step, functools.partial(_keep, head, asked.json))
        if asked.rows:
            document["operations"] = ops.measure(options.towers, device, options.fa3, step, tuple(asked.rows))
    tables.show_towers(document, console)
    if asked.rows:
        tables.operation_table(document["operations"]).show(OPERATIONS, console)
    return Outcome(document, not tables.any_wrong(document))


def _options(asked: Asked, device: torch.device) -> Options:
    swept = not (asked.short or asked.vllm or asked.workload) if asked.sweep is None else asked.sweep
    grids = _grids(asked.workload, swept)
    refuse_unknown(asked.compile_on or [], grids, "--compile")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seconds = (SHORT_SECONDS if asked.short else SECONDS) if asked.seconds is None else asked.seconds
    compiled = tuple(asked.compile_on or ())
    return Options(asked.towers, grids, compiled, asked.fa3, seconds, dtype=dtype, short=asked.short)


def _keep(head: dict[str, Any], path: str | None, found: dict[str, Any]) -> None:
    """Rewrites the document's file, after every workload."""
    if path:
        write(head | found, path)


def _device(names: tuple[str, ...]) -> torch.device:
    refuse_unknown(list(names), known(), "--tower")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if set(names) - {"tiny"}:
        raise InputError(f"bench: needs an NVIDIA GPU for {', '.join(names)}; without one only --tower tiny runs")
    return torch.device("cpu")


def _grids(chosen: list[str] | None, sweep: bool) -> dict[str, workloads.Grid]:
    there = workloads.WORKLOADS | workloads.sweep()
    names = [] if chosen == ["none"] else chosen or list(workloads.WORKLOADS)
    refuse_unknown(names, there, "--workload")
    return {name: there[name] for name in names} | (workloads.sweep() if sweep else {})
