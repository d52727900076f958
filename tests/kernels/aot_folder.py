"""Run by test_compiled_kernels.py without the interpreter: a folder of kernels filled, moved, and found by launches.

Prints as JSON what failed, the kinds of files that are left, and how many kernels a process that is given the folder
compiles of those in it, and of all.
"""

import json
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton

from fusedvit.families.qwen3 import NAMES
from fusedvit.kernels.codegen_checks import AbsentGPU, target_named
from fusedvit.kernels.launch import KernelJob, record
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime import compiled_kernels
from fusedvit.runtime.tower_launches import launch_tower

TINY = VisionSpec(2, 144, 2, 72, 288, 96, 16, position_side=4, deepstack=(0,))


def compiled(found: list[KernelJob]) -> int:
    """How many of these are compiled, and not found in Triton's cache."""
    begun: list[object] = []
    stages = triton.backends.nvidia.compiler.CUDABackend.add_stages
    with mock.patch.object(
        triton.backends.nvidia.compiler.CUDABackend, "add_stages", lambda *a: begun.append(a) or stages(*a)
    ):
        for job in found:
            job.build()
    return len(begun)


root = Path(sys.argv[1])
triton.runtime.driver.set_active(AbsentGPU(90))
jobs = record(partial(launch_tower, TINY, NAMES, torch.bfloat16, target_named("h100"))).values()
some = [job for job in jobs if job.name.startswith(("_load", "_store", "_finger"))]
assert len(some) >= 4
problems = compiled_kernels.fill(root / "first", [job.build for job in some], 2, lambda *told: None)
(root / "first").rename(root / "moved")
kinds = sorted({path.suffix for path in (root / "moved").rglob("*") if path.is_file()})
triton.knobs.cache.dir = str(root / "cache")
entered = [compiled_kernels.enter(root / "moved", root / "cache") for _ in range(2)]
said = {"problems": problems, "kinds": kinds, "entered": entered, "some": len(some), "again": compiled(some)}
print(json.dumps(said))
