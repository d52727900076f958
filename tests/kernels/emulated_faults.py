"""`python -m tests.kernels.emulated_faults`: attention's kernel with each wait, arrival and fence taken out in turn.

The emulator must notice every one that ran: by a race, a deadlock, a wrong use of a barrier or of memory, or a wrong
answer. Barriers that Triton puts in by itself are left alone: of two in a row either would do. Where warps arrive for
themselves, arrivals and waits for products alone: consumers' turns decide nothing but time, and a wait for what a
consumer passes over is one of several. A process without Triton's interpreter.
"""

from dataclasses import dataclass, replace

import torch

from fusedvit.kernels.hopper import attention
from fusedvit.kernels.hopper.attention_configs import SHORT, TINY, HopperAttentionConfig
from tests.emulator.launches import Change, emulated
from tests.emulator.ptx import Instruction, Program
from tests.kernels import attention_cases
from tests.kernels.attention_cases import packed, segments

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Schedule:
    """What is broken, on what, which kinds of instructions are taken out, and how many there must be at least."""

    config: HopperAttentionConfig
    head_dim: int
    lengths: tuple[int, ...]
    kinds: tuple[str, ...]
    least: int

    def attend(self, change: Change | None = None) -> tuple[torch.Tensor, set[int]]:
        """The answer, and which instructions ran."""
        config = replace(self.config, max_programs=2, pdl=True)
        qkv = packed(self.lengths, self.head_dim, torch.bfloat16, CPU)
        segs = segments(self.lengths, config.block_m, CPU)
        with emulated(seed=1, change=change, ready=(segs.tiles, segs.num_tiles)) as machine:
            out = attention_cases.run(attention.attention, qkv, segs, self.head_dim, config)
        return out, machine.ran


ARRIVALS = ("mbarrier.arrive", "wgmma.wait_group")
SCHEDULES = (
    Schedule(TINY, 64, (70, 5, 130), ("mbarrier.try_wait", "griddepcontrol.wait", *ARRIVALS), 21),
    Schedule(replace(TINY, shifted=False), 64, (70,), ("fence.proxy.async",), 1),  # else a second one does for both
    Schedule(replace(SHORT, stages=2), 72, (200, 130, 330), ARRIVALS, 21),
)


def without(at: int) -> Change:
    """A change that takes instruction `at` out; where it waits, it does not."""

    def change(program: Program) -> None:
        gone = program.instructions[at]
        waits = gone.op.startswith("mbarrier.try_wait")
        instead = Instruction("mov.pred", (gone.operands[0], "-1")) if waits else Instruction("nanosleep", ())
        program.instructions[at] = instead

    return change


def check(schedule: Schedule) -> None:
    found: list[tuple[int, Instruction]] = []

    def look(program: Program) -> None:
        found.extend((i, ins) for i, ins in enumerate(program.instructions) if ins.op.startswith(schedule.kinds))

    right, ran = schedule.attend(look)
    tried = missed = 0
    for at, instruction in found:
        if at not in ran:
            continue
        tried += 1
        try:
            unlike = not torch.equal(schedule.attend(without(at))[0], right)
        except AssertionError:  # Race, Deadlock, WrongBarrier, WrongAccess, Overtakes
            unlike = True
        if not unlike:
            missed += 1
            print(f"not noticed: {at}: {instruction}")
    assert tried >= schedule.least and missed == 0, f"{missed} of {tried} faults not noticed"
    print(f"right: {tried} faults, all noticed: {schedule.config}")


def main() -> None:
    for schedule in SCHEDULES:
        check(schedule)


if __name__ == "__main__":
    main()
