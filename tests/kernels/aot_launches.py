"""Compares what a whole tower launches with what `fusedvit.runtime.ahead_of_time` compiles for it.

Prints a line per budget: patch tokens, how many kernels are launched and not compiled, how many compiled and not
launched. A program of its own: it must run without the interpreter that the tests need.
"""

import torch

from fusedvit.kernels.codegen_checks import MAX_SHARED, Launch
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.plan import plan_for
from fusedvit.runtime.ahead_of_time import TOWERS, launches_of, recorded

HOPPER, BF16 = Target(90, 132, MAX_SHARED[90]), torch.bfloat16
BUDGETS = (256, 896, 1408, 4096)  # with deepstack mergers overlapped with blocks; in line


def launched(tower: str, rows: int) -> list[Launch]:
    """By the tower in its whole depth, with room for overlapped mergers."""
    plan = plan_for(TOWERS[tower], rows, BF16, HOPPER)
    return recorded(TOWERS[tower], plan, BF16, rows, len(plan.overlapped))


for rows in BUDGETS:
    ours, compiled = set(launched("hd72", rows)), set(launches_of(TOWERS["hd72"], BF16, rows, HOPPER))
    print(rows, len(ours - compiled), len(compiled - ours))
