"""`fusedvit compile`: compiles every kernel that a tower launches into a folder, on a machine without a GPU."""

import itertools
import json as json_text
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from fusedvit.bench.towers import GEOMETRIES, family_and_spec, known
from fusedvit.checkpoint import tower_config
from fusedvit.cli.console import Outcome, new_console, progress_bar, refuse_unwritable
from fusedvit.cli.towers import dtype_of
from fusedvit.errors import OF_ODD_OBJECTS, InputError, UnsupportedModel, unnamed
from fusedvit.families.base import Family
from fusedvit.kernels.codegen_checks import AbsentGPU, target_named
from fusedvit.kernels.launch import KernelJob, record
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime import compiled_kernels
from fusedvit.runtime.compile_worker import most_children
from fusedvit.runtime.tower_launches import launch_tower


def run(
    model: list[str], gpu: str, out: Path, dtype: str = "bf16", jobs: int | None = None, json: Any = None
) -> Outcome:
    """Compiles, prints failures, and writes a manifest if there were none; a folder without one is not used."""
    begin = time.monotonic()
    try:
        target = target_named(gpu)
    except ValueError as error:
        raise InputError(f"--gpu: {error}") from None
    of = dtype_of(dtype, torch.device("cuda"))
    if triton.knobs.runtime.interpret:
        raise InputError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    towers = {name: _tower_of(name) for name in model}
    refuse_unwritable(out / compiled_kernels.MANIFEST)
    _refuse_another_gpu(out, target)
    kernel_jobs: dict[object, KernelJob] = {}
    for (family, spec), takes_bytes in itertools.product(towers.values(), (False, True)):
        kernel_jobs |= record(partial(launch_tower, spec, family.names, of, target, takes_bytes))
    builds = [job.build for job in kernel_jobs.values()]
    triton.runtime.driver.set_active(AbsentGPU(target.capability))
    with progress_bar() as step:
        problems = compiled_kernels.fill(out, builds, jobs or most_children(urgent=True), step)
    kernels = len(builds) - len(problems)
    found = compiled_kernels.manifest(gpu, target, list(towers), dtype, kernels)
    if not problems:
        (out / compiled_kernels.MANIFEST).write_text(json_text.dumps(found, indent=1) + "\n", encoding="utf-8")
    seconds = time.monotonic() - begin
    _show(found, problems, out, seconds)
    return Outcome({"manifest": found, "problems": problems, "seconds": seconds}, not problems)


def _tower_of(model: str) -> tuple[Family, VisionSpec]:
    """Family and spec of a tower that the other commands know by name, else of a checkpoint."""
    if model in known():
        return family_and_spec(GEOMETRIES[model])
    family, config = tower_config(model)
    try:
        return family, family.spec_from_config(config)
    except OF_ODD_OBJECTS as error:
        raise UnsupportedModel(f"{model}: {unnamed(error)}") from error


def _refuse_another_gpu(out: Path, target: Target) -> None:
    """Refuses a folder with another GPU's kernels: it has one manifest, and a new one would make those unused."""
    try:
        found = json_text.loads((out / compiled_kernels.MANIFEST).read_text(encoding="utf-8"))["gpu"]
        same = (found["capability"], found["sms"]) == (target.capability, target.num_sms)
        name = found["name"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if not same:
        raise InputError(f"--out: {out} holds kernels for {name}: a folder serves one GPU, expected another folder")


def _show(found: dict[str, Any], problems: list[str], out: Path, seconds: float) -> None:
    console = new_console()
    for problem in problems:
        console.out(problem, style="red", highlight=False)
    where = out.absolute()
    said = f"{found['kernels']} kernels for {found['gpu']['name']} in {where}, {seconds:.0f} s"
    console.out(said, highlight=False)
    if not problems:
        console.out(f"used where {compiled_kernels.VARIABLE}={where}", highlight=False)
