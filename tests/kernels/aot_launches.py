"""What a whole tower launches beside what `fusedvit.aot` compiles for it; prints a line per budget: patch tokens, how
many kernels are launched and not compiled, how many compiled and not launched.

A program of its own: it must run without the interpreter that the tests need.
"""

import torch

from fusedvit.aot import TOWERS, launches_of, meta_weights
from fusedvit.buffers import Capacity, allocate
from fusedvit.encoder import encode
from fusedvit.items import Item
from fusedvit.kernels.aot import MAX_SHARED, Launch, record
from fusedvit.kernels.configs import Target
from fusedvit.ops import TRITON
from fusedvit.plan import plan_for

HOPPER, BF16, META = Target(90, 132, MAX_SHARED[90]), torch.bfloat16, torch.device("meta")
# All deepstack mergers of the tower beside its blocks; two, and one beside the last merger; two in line and one beside
# the last; all in line.
BUDGETS = (256, 896, 1408, 4096)


def launched(tower: str, rows: int) -> list[Launch]:
    """By the tower in its whole depth, with room for mergers beside others."""
    name, spec = TOWERS[tower]
    plan = plan_for(spec, rows, BF16, HOPPER)
    items = [Item(1, 2, rows // 2 - 2), Item(1, 2, 2)]  # a frame of each list of tiles
    capacity = Capacity.of(items, plan.layout(spec))
    buffers = allocate(spec, capacity, BF16, META, apart=(len(plan.apart), rows))
    weights = meta_weights(name, spec, BF16)
    return record(lambda: encode(spec, weights, buffers, TRITON, plan))


for rows in BUDGETS:
    ours, compiled = set(launched("hd72", rows)), set(launches_of(*TOWERS["hd72"], BF16, rows, HOPPER))
    print(rows, len(ours - compiled), len(compiled - ours))
