"""What a whole tower launches beside what `fusedvit.runtime.ahead_of_time` compiles for it; prints a line per budget: patch tokens, how
many kernels are launched and not compiled, how many compiled and not launched.

A program of its own: it must run without the interpreter that the tests need.
"""

import torch

from fusedvit.kernels.codegen_checks import MAX_SHARED, Launch
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.plan import plan_for
from fusedvit.runtime.ahead_of_time import TOWERS, launches_of, recorded

HOPPER, BF16 = Target(90, 132, MAX_SHARED[90]), torch.bfloat16
# All deepstack mergers of the tower beside its blocks; two, and one beside the last merger; two in line and one beside
# the last; all in line.
BUDGETS = (256, 896, 1408, 4096)


def launched(tower: str, rows: int) -> list[Launch]:
    """By the tower in its whole depth, with room for mergers beside others."""
    name, spec = TOWERS[tower]
    plan = plan_for(spec, rows, BF16, HOPPER)
    return recorded(name, spec, plan, BF16, rows, apart=len(plan.apart))


for rows in BUDGETS:
    ours, compiled = set(launched("hd72", rows)), set(launches_of(*TOWERS["hd72"], BF16, rows, HOPPER))
    print(rows, len(ours - compiled), len(compiled - ours))
