"""The parts of a split product of `kernels.linear` meet: who comes last adds them up and goes on; nobody waits.

    sums: [tile, part, BLOCK_M, BLOCK_N] fp32    what each program leaves
    counters: [tile] int32                       how many have left theirs; 0 before and after a launch

The sum is taken in the order of the parts, whoever takes it: the same bits every time.
"""

import torch
import triton
import triton.language as tl

from fusedvit.kernels.configs import LinearConfig
from fusedvit.kernels.epilogue import Scratch


@triton.jit
def _meet(acc, sums_ptr, counters_ptr, tile, part, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(the tile's sums, whether they are whole) of one of its programs."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    ptrs = sums_ptr + tile.to(tl.int64) * (SPLITS * SIZE)
    ptrs += tl.arange(0, BLOCK_M)[:, None].to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(ptrs + part.to(tl.int64) * SIZE, acc)
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(counters_ptr + tile, 1) == SPLITS - 1
    if last:
        tl.store(counters_ptr + tile, 0)  # for the next launch
        acc = tl.load(ptrs, cache_modifier=".cg")
        for _ in tl.range(1, SPLITS):  # one at a time, as registers allow
            ptrs += SIZE
            acc += tl.load(ptrs, cache_modifier=".cg")
    return acc, last


def meeting(
    scratch: Scratch | None, rows: int, n: int, config: LinearConfig
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sums and counters for a split product of `rows` rows and `n` columns; None for one in one part.

    Raises:
        ValueError: too little scratch.
    """
    if config.splits == 1:
        return None, None
    sums, counters = config.scratch_sizes(rows, n)
    if scratch is None or scratch.sums.numel() < sums or scratch.counters.shape[1] < counters:
        got = "none" if scratch is None else f"{scratch.sums.numel()} and {scratch.counters.shape[1]}"
        raise ValueError(f"linear in parts takes scratch for {sums} sums and {counters} counters, got {got}")
    return scratch.sums, scratch.counters[0]
