"""`python -m tests.kernels.emulated_faults`: attention's kernel with each wait, arrival and fence taken out in turn.

The emulator must notice every one that ran: by a race, a deadlock, a wrong use of a barrier or of memory, or a wrong
answer. Barriers that Triton puts in by itself are left alone: of two in a row either would do. A process without
Triton's interpreter.
"""

from dataclasses import replace

import torch

from fusedvit.kernels.hopper import attention
from fusedvit.kernels.hopper.configs import TINY
from tests.emulator.launches import Change, emulated
from tests.emulator.ptx import Instruction, Program
from tests.kernels import attention_cases
from tests.kernels.attention_cases import packed, segments

KINDS = ("mbarrier.try_wait", "mbarrier.arrive", "fence.proxy.async", "wgmma.wait_group", "griddepcontrol.wait")
CPU, LENGTHS, HEAD_DIM = torch.device("cpu"), [70, 5, 130], 64


def attend(change: Change | None = None) -> tuple[torch.Tensor, set[int]]:
    """The answer, and which instructions ran."""
    config = replace(TINY, max_programs=2, overlap=True)
    qkv = packed(LENGTHS, HEAD_DIM, torch.bfloat16, CPU)
    segs = segments(LENGTHS, config.block_m, CPU)
    with emulated(seed=1, change=change, ready=(segs.tiles, segs.num_tiles)) as machine:
        out = attention_cases.run(attention.attention, qkv, segs, HEAD_DIM, config)
    return out, machine.ran


def without(at: int) -> Change:
    """A change that takes instruction `at` out; where it waits, it does not."""

    def change(program: Program) -> None:
        gone = program.instructions[at]
        waits = gone.op.startswith("mbarrier.try_wait")
        instead = Instruction("mov.pred", (gone.operands[0], "-1")) if waits else Instruction("nanosleep", ())
        program.instructions[at] = instead

    return change


def main() -> None:
    found: list[tuple[int, Instruction]] = []

    def look(program: Program) -> None:
        found.extend((i, ins) for i, ins in enumerate(program.instructions) if ins.op.startswith(KINDS))

    right, ran = attend(look)
    tried = missed = 0
    for at, instruction in found:
        if at not in ran:
            continue
        tried += 1
        try:
            unlike = not torch.equal(attend(without(at))[0], right)
        except AssertionError:  # Race, Deadlock, WrongBarrier, WrongAccess, Overtakes
            unlike = True
        if not unlike:
            missed += 1
            print(f"not noticed: {at}: {instruction}")
    assert tried > 20 and missed == 0, f"{missed} of {tried} faults not noticed"
    print(f"right: {tried} faults, all noticed")


if __name__ == "__main__":
    main()
