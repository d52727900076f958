"""`python -m fusedvit.bench.ahead_of_time`: compiles every kernel that the encoder launches, without a GPU.

The launches are recorded from the encoder itself, over towers x dtypes x budgets, so that the checked kernels are those
that run (`runtime/tower_launches.py`).
"""

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

import torch
import triton

from fusedvit.bench.towers import FAMILIES, GEOMETRIES, family_and_spec
from fusedvit.errors import named_line
from fusedvit.kernels.codegen_checks import Compiled, compile_job, describe, target_named
from fusedvit.kernels.launch import Argument, KernelJob, record
from fusedvit.kernels.patches import PatchLayout, Taps, patches_from_images
from fusedvit.kernels.tile_configs import Target, ladder
from fusedvit.runtime.tower_launches import launch_tower

TOWERS = {name: GEOMETRIES[name] for name in FAMILIES}
TOWERS["GLM-4.5V"] = TOWERS["GLM-4.1V-9B"].but(intermediate_size=10944)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BUDGETS = {  # patch tokens, in bf16; few for a tower that shares most kernels with another
    **dict.fromkeys(TOWERS, (64, 1024, 4096)),
    **dict.fromkeys(("Qwen3-VL-4B", "Qwen2-VL-7B", "Qwen3.5-0.8B"), (64, 256, 1024, 4096, 16384)),
    "Qwen3-VL-8B": tuple(ladder(64, 65536)),
}
ONE_BUDGET = (1024,)  # for other dtypes than bf16, whose tiles are the same
SIZES = {  # of a layer: kernels that differ only in these compile alike
    "N", "K", "EPS", "IN_PARTS", "IN_WIDTH", "IN_LENGTH", "ROPE_COLS",
    "X_PITCH", "W_PITCH", "OUT_PITCH", "RESIDUAL_PITCH",
}  # fmt: skip
TARGETS = {  # by compute capability; without a GPU's name, so that heuristics choose and not tuning tables
    target.capability: replace(target, name="")
    for target in map(target_named, ("a100", "a40", "l40s", "h100", "b200", "rtx-5090"))
}


@dataclass(frozen=True)
class Matrix:
    """The kernels to compile.

    Attributes:
        arches: compute capabilities, keys of `TARGETS`.
        dtypes: keys of `DTYPES`.
        towers: keys of `TOWERS`.
        budgets: patch tokens; None for the budgets in which a tower's kernels differ.
        alike: compile only the first of the kernels with the same `kind_of`.
    """

    arches: tuple[int, ...]
    dtypes: tuple[str, ...]
    towers: tuple[str, ...]
    budgets: tuple[int, ...] | None
    alike: bool = False


def launches_of(tower: str, dtype: str, budgets: Sequence[int], target: Target) -> dict[object, KernelJob]:
    """What graphs of these budgets, in patch tokens, and the calls around them launch, as `record` returns it."""
    family, spec = family_and_spec(TOWERS[tower])
    merged = sorted({max(1, tokens // spec.merge_unit) for tokens in budgets})
    return record(partial(launch_tower, spec, family.names, DTYPES[dtype], target, True, merged))


def launches_around(target: Target) -> dict[object, KernelJob]:
    """The launches that make patches, load them and store outputs: in every dtype, for towers with and without a
    merger, with any number of deepstack mergers; as `record` returns them."""
    qwen, ernie = (family_and_spec(TOWERS[name]) for name in ("Qwen3-VL-8B", "ERNIE-4.5-VL-28B-A3B"))
    towers = [ernie, *((qwen[0], replace(qwen[1], deepstack=qwen[1].deepstack[:n])) for n in range(4))]
    found = record(_launches_of_pixels)
    for (family, spec), dtype in itertools.product(towers, DTYPES.values()):
        every = record(partial(launch_tower, spec, family.names, dtype, target, True, (1,)))
        found |= {code: j for code, j in every.items() if j.name.startswith(("_load_inputs", "_store_outputs"))}
    return found


def _launches_of_pixels() -> None:
    """Turns images and a video into patches, with their channels last and as planes, and with either pass first."""

    def taps(size: int) -> Taps:
        table = torch.empty(9, size, dtype=torch.int32, device="meta")
        return Taps(table[0], table, 22)

    frames = torch.empty(2, 50, 52, 3, dtype=torch.uint8, device="meta")
    planes = torch.empty(2, 3, 50, 52, dtype=torch.uint8, device="meta").movedim(1, -1)
    for patch, temporal, images, down_first in itertools.product((14, 16), (1, 2), (frames, planes), (False, True)):
        layout, grid = PatchLayout(patch, 2, temporal), (2 // temporal, 4, 4)
        out = torch.empty(16 * grid[0], 3 * temporal * patch**2, dtype=torch.uint8, device="meta")
        patches_from_images(images, taps(4 * patch), taps(4 * patch), layout, grid, out, down_first)
        patches_from_images(images, taps(4 * patch) if down_first else None, None, layout, grid, out)


def jobs_of(matrix: Matrix) -> list[tuple[KernelJob, int]]:
    """Each distinct kernel of a matrix, with its architecture."""
    jobs: list[tuple[KernelJob, int]] = []
    for arch in matrix.arches:
        found = launches_around(TARGETS[arch])
        for tower, dtype in itertools.product(matrix.towers, matrix.dtypes):
            budgets = matrix.budgets or (BUDGETS[tower] if dtype == "bf16" else ONE_BUDGET)
            found |= launches_of(tower, dtype, budgets, TARGETS[arch])
        chosen = {kind_of(job): job for job in reversed(found.values())} if matrix.alike else found
        jobs += [(job, arch) for job in chosen.values()]
    return jobs


def kind_of(job: KernelJob) -> tuple[object, ...]:
    """What determines a job's code, without its layer's sizes (only whether they are 0) and without its 16-bit type."""
    constants = {name: bool(value) if name in SIZES else value for name, value in job.constants.items()}
    arguments = (replace(a, dtype=DTYPES["fp16"]) if _is_bf16(a) else a for a in job.arguments)
    return replace(job, arguments=tuple(arguments), constants=constants).code


def _is_bf16(argument: object) -> TypeGuard[Argument]:
    return isinstance(argument, Argument) and argument.dtype == DTYPES["bf16"]


def compile_or_fail(job: KernelJob, arch: int) -> Compiled:
    """`compile_job`, but an error of the compiler becomes this job's problem and does not end the run."""
    try:
        return compile_job(job, arch)
    except Exception as error:
        return Compiled(describe(job), arch, 0, 0, 0, (named_line(error),))


def compile_all(matrix: Matrix, processes: int = 1) -> list[Compiled]:
    """Compiles the whole matrix in `processes` processes."""
    jobs = jobs_of(matrix)
    if processes == 1:
        return [compile_or_fail(*job) for job in jobs]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(compile_or_fail, *zip(*jobs, strict=True), chunksize=4))


def main(argv: list[str] | None = None) -> int:
    """Prints a line per problem and a summary; the exit code is the number of failures, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", default=sorted(TARGETS), choices=sorted(TARGETS))
    parser.add_argument("--dtype", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--tower", nargs="*", default=list(TOWERS), choices=list(TOWERS))
    parser.add_argument("--budget", type=int, nargs="*", help="patch tokens; all that matter if left out")
    parser.add_argument("--alike", action="store_true", help="one of those that differ in sizes or bf16/fp16 alone")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    budgets = None if args.budget is None else tuple(args.budget)
    matrix = Matrix(tuple(args.arch), tuple(args.dtype), tuple(args.tower), budgets, args.alike)
    results = compile_all(matrix, args.jobs)
    bad = [r for r in results if r.problems]
    for r in bad:
        print(f"FAIL sm_{r.capability} {r.launch}: {'; '.join(r.problems)}", file=sys.stderr)
    print(f"triton {triton.__version__}: {len(results)} kernels compiled, {len(bad)} failed", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
