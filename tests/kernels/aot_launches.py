"""Run by test_aot.py without the interpreter: what whole towers launch, and what is compiled for them, as JSON.

`unlike` has for each budget of patch tokens how many kernels the tower launches that `fusedvit.runtime.ahead_of_time`
does not compile, and how many it compiles that are not launched. `kernels` are those of the default ladder on an H100
as `tower_launches` tells them apart, `keys` as Triton does, by what it would compile.
"""

import json
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from fusedvit.kernels.codegen_checks import MAX_SHARED, AbsentGPU, Launch, target_named
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.plan import plan_for
from fusedvit.runtime.ahead_of_time import TOWERS, launches_of, recorded
from fusedvit.runtime.tower_launches import tower_launches

HOPPER, BF16 = Target(90, 132, MAX_SHARED[90]), torch.bfloat16
BUDGETS = (256, 896, 1408, 4096)  # with deepstack mergers overlapped with blocks; in line


def launched(tower: str, rows: int) -> list[Launch]:
    """By the tower in its whole depth, with room for overlapped mergers."""
    plan = plan_for(TOWERS[tower], rows, BF16, HOPPER)
    return recorded(TOWERS[tower], plan, BF16, rows, len(plan.overlapped))


def unlike(tower: str, rows: int) -> tuple[int, int]:
    ours, compiled = set(launched(tower, rows)), set(launches_of(TOWERS[tower], BF16, rows, HOPPER))
    return len(ours - compiled), len(compiled - ours)


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


print(json.dumps({"unlike": {rows: unlike("hd72", rows) for rows in BUDGETS}} | ladder("hd72")))
