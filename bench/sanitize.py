"""`python -m fusedvit.bench.sanitize`: every kernel once at a tiny size, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 7 python -m fusedvit.bench.sanitize
    python -m fusedvit.bench.sanitize --tool memcheck --json PATH       # the same, counted in a document

Every tensor is an allocation of its own, so that a step past its end is noticed. First each operation runs alone, in
every configuration that is chosen at any of four budgets (with `--candidates`, also those that the tuner tries), with
full and with smaller row counts. Then whole towers of few blocks run: metadata, norms, gathers, fingerprints.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fusedvit.api import fuse
from fusedvit.bench.ops import Case, attention_case, compiling_only, linear_case, supported
from fusedvit.bench.records import arguments, need_gpus, passport, run_program, today, write
from fusedvit.bench.timing import wait
from fusedvit.bench.towers import GEOMETRIES, Geometry, build_one, class_of, patch_width, shallow, spec_of
from fusedvit.config import FuseConfig
from fusedvit.errors import InputError
from fusedvit.kernels import backends, load_inputs, tuning_table
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.ops import ops_for
from fusedvit.model.plan import Task, choose, heuristic, tasks
from fusedvit.model.spec import VisionSpec

TOWERS = ("Qwen3-VL-8B", "Qwen2.5-VL-7B", "GLM-4.1V-9B", "GLM-5.3-Flash")
BUDGETS = (256, 1024, 4096, 16384)  # patch tokens for which configurations are chosen
ROWS, LENGTHS = 130, (65, 130, 4)  # not multiples of a tile
GRID = [[1, 4, 6], [1, 10, 4], [1, 2, 2]]
WIDTH = 1176  # pixels of a patch
BLOCKS = 8  # of a tower: the fewest with windows and deepstack at their relative depth


def towers(geometries: Mapping[str, Geometry], dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Calls each tower and yields its name. Calls are eager, so that every buffer has exactly the content's size."""
    for name, geometry in geometries.items():
        tower = build_one(geometry, dtype, device)
        pixels = torch.randn(sum(t * h * w for t, h, w in GRID), patch_width(tower), device=device).to(dtype)
        handle = fuse(tower, FuseConfig(strict=True, graphs=False))
        with torch.inference_mode():
            tower(pixels, grid_thw=torch.tensor(GRID, device=device))
        wait(device)
        handle.release()
        yield f"{name}'s tower"


def grids(device: torch.device) -> Iterator[str]:
    """Runs the kernel that loads a grid and pixels into static buffers, with an exact and with a larger capacity."""
    rows = sum(t * h * w for t, h, w in GRID)
    for dtype in load_inputs.GRID_DTYPES:
        for room in (len(GRID), 64):
            table = torch.empty(room, 3, dtype=torch.int32, device=device)
            pixels = torch.randn(rows, WIDTH, device=device)
            kept = torch.empty(rows + room - len(GRID), WIDTH, dtype=torch.bfloat16, device=device)
            grid = torch.tensor(GRID, dtype=dtype, device=device)
            loaded = ops_for(device).load_inputs(grid, rows, room, 2, table, pixels, kept)
            assert loaded[: len(GRID)].tolist() == GRID, f"expected {GRID}, got {loaded.tolist()}"
            assert torch.equal(kept[:rows], pixels.bfloat16()), "expected the pixels that were given"
            yield f"grid, {dtype}, room for {room}"


def operations(
    specs: Iterable[VisionSpec], dtype: torch.dtype, device: torch.device, every: bool = False
) -> Iterator[str]:
    """Runs each distinct operation and configuration of the towers alone, and yields its description."""
    target = Target.of(device)
    found: dict[Any, tuple[VisionSpec, Task, Any]] = {}
    for spec in specs:
        for rows in BUDGETS:
            for task in filter(supported, tasks(spec, rows, dtype)):
                for config in _configs(task, dtype, target, every):
                    like = (task.key.op, task.key.kind, task.key.n, task.key.k, config)
                    found.setdefault(like, (spec, task, config))
    if device.type == "cuda":
        with compiling_only():
            for spec, task, config in found.values():
                _case(spec, task, dtype, device).run(config, 0)
    for spec, task, config in found.values():
        case, room = _case(spec, task, dtype, device), min(ROWS, task.key.rows)
        for rows in (room, room - 5, 1, 0) if case.fill else (room,):
            if case.fill:
                case.fill(rows)
            case.run(config, 0)
            wait(device)
        yield f"{task.name} {task.key.kind} {task.key.n} x {task.key.k}: {config}"


def _configs(task: Task, dtype: torch.dtype, target: Target, every: bool) -> list[Any]:
    """The table's choice and the heuristic's; with `every`, also candidates of the tuner from backends but Triton's."""
    found = [choose(task, dtype, target, tuning_table.table_for(target)), heuristic(task, dtype, target)]
    for backend in backends.BACKENDS if every else ():
        if (
            backend.op == task.key.op
            and backend.name != "triton"
            and not backends.why_unavailable(backend, target, dtype)
        ):
            found += backend.candidates(task.key, dtype, target, task.widest)
    return list(dict.fromkeys(found))


def _case(spec: VisionSpec, task: Task, dtype: torch.dtype, device: torch.device) -> Case:
    key = task.key
    if key.op == backends.ATTENTION:
        return attention_case(key.n, key.k, LENGTHS, dtype, device, fa3=False)
    return linear_case(task, spec, dtype, device, min(ROWS, key.rows), sets=1)


def sanitized(args: argparse.Namespace) -> int:
    """Runs this program under compute-sanitizer, which must be on the path, and writes the counts."""
    options = ["--tower", *args.tower, *(["--candidates"] if args.candidates else [])]
    inner = [sys.executable, "-m", "fusedvit.bench.sanitize", *options]
    command = ["compute-sanitizer", "--tool", args.tool, "--error-exitcode", "7", *inner]
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]} expected on the path, got none: it comes with the CUDA toolkit")
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "its standard output is ours"
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    errors = [int(n) for line in lines for n in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", line)]
    wrong = int(process.returncode != 0 or not errors)
    found = {"launches": sum(not line.startswith("=") for line in lines), "errors": sum(errors), "wrong": wrong}
    given = {"--tool": args.tool, "--candidates": args.candidates, "--json": args.json}
    document = {
        "passport": passport("python -m fusedvit.bench.sanitize", given, args.commit),
        "date": today(),
        "trust": {args.tool: found | {"code": process.returncode}},
    }
    write(args.json, document)
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Prints a line for everything that ran. compute-sanitizer reports errors, also by its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--tower", nargs="*", default=list(TOWERS), choices=list(GEOMETRIES))
    parser.add_argument("--candidates", action="store_true", help="also what the tuner tries")
    parser.add_argument("--tool", choices=["memcheck", "racecheck"], help="run under compute-sanitizer, counted")
    args = parser.parse_args(argv)
    if args.tool and args.json is None:
        parser.error("--json PATH expected with --tool, got none")
    need_gpus()
    if args.tool:
        return sanitized(args)
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    device, dtype = torch.device("cuda"), torch.bfloat16
    chosen = {name: GEOMETRIES[name] for name in args.tower if class_of(GEOMETRIES[name]) is not None}
    specs = [spec_of(geometry) for geometry in chosen.values()]
    shallows = {name: shallow(geometry, BLOCKS) for name, geometry in chosen.items()}
    with torch.inference_mode():
        for line in itertools.chain(grids(device), operations(specs, dtype, device, args.candidates)):
            print(line, flush=True)
    for line in towers(shallows, dtype, device):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    run_program(main)
