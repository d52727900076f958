"""Run by test_aot.py without the interpreter: what whole towers launch, and what is compiled for them, as JSON.

`unlike` lists the towers, GPUs and budgets of patch tokens where a tower, in its whole depth, launches other kernels
than `fusedvit.runtime.ahead_of_time` compiles, which are those of a rehearsal. `kernels` are those of the default
ladder on an H100 as `tower_launches` tells them apart, `keys` as Triton does, by what it would compile.
"""

import itertools
import json
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from fusedvit.kernels.codegen_checks import AbsentGPU, Launch, record, target_named
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.plan import plan_for
from fusedvit.runtime.ahead_of_time import TOWERS, launches_of
from fusedvit.runtime.meta_runs import run_on_meta
from fusedvit.runtime.tower_launches import meta_weights, tower_launches

BF16 = torch.bfloat16
BUDGETS = (64, 256, 896, 1408, 4096, 65536)  # with deepstack mergers overlapped with blocks; in line
GPUS = ("h100", "a100")


def launched(tower: str, rows: int, target: Target) -> list[Launch]:
    """With room for overlapped mergers."""
    spec = TOWERS[tower]
    plan, weights = plan_for(spec, rows, BF16, target), meta_weights(spec, BF16, takes_bytes=True)
    return record(lambda: run_on_meta(spec, weights, plan, BF16, rows, len(plan.overlapped), rehearsal=False))


def unlike() -> list[tuple[str, str, int]]:
    def differ(tower: str, gpu: str, rows: int) -> bool:
        target = target_named(gpu)
        return set(launched(tower, rows, target)) != set(launches_of(TOWERS[tower], BF16, rows, target))

    return [each for each in itertools.product(TOWERS, GPUS, BUDGETS) if differ(*each)]


def ladder(tower: str) -> dict[str, int]:
    found = tower_launches(TOWERS[tower], BF16, target_named("h100"))
    triton.runtime.driver.set_active(AbsentGPU(90))
    keys: set[tuple[str, str]] = set()

    def note(kernel: JITFunction, key: str, *compiled: Any, **options: Any) -> None:
        keys.add((kernel.__name__, key))

    with mock.patch.object(JITFunction, "_do_compile", note):
        for compiling in found.values():
            compiling()
    return {"kernels": len(found), "keys": len(keys)}


print(json.dumps({"unlike": unlike()} | ladder("hd72")))
