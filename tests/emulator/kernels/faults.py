"""`python -m tests.emulator.kernels.faults`: kernels with one wait, arrival, fence or store wait taken out at a time.

The emulator must notice every one that ran: by a race, a deadlock, a wrong use of a barrier or of memory, or a wrong
answer. Barriers that Triton adds are left alone: of two in a row either would do. A process without Triton's
interpreter.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from fusedvit.kernels.hopper import attention, gemm, gemm_swap_ab
from fusedvit.kernels.hopper.attention_configs import SHORT, TINY, HopperAttentionConfig
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from tests.emulator.launches import Change, emulated
from tests.emulator.ptx import Instruction, Program
from tests.kernels import attention_cases
from tests.kernels.attention_cases import packed, segments
from tests.kernels.linear_cases import Layer, fused, tensors

CPU, BF16 = torch.device("cpu"), torch.bfloat16
Run = Callable[[Change | None], tuple[torch.Tensor, set[int]]]  # the output, and which instructions ran


@dataclass(frozen=True)
class Case:
    """A launch, which kinds of instructions are taken out, and how many there must be at least.

    Attributes:
        idle: instructions among them that wait for nothing.
        moved_up: arrivals that, put above the store before them, are noticed, too.
    """

    run: Run
    kinds: tuple[str, ...]
    least: int
    idle: int = 0
    moved_up: int = 0


def attending(config: HopperAttentionConfig, head_dim: int, lengths: Sequence[int]) -> Run:
    def run(change: Change | None) -> tuple[torch.Tensor, set[int]]:
        launched = replace(config, max_programs=2, pdl=True)
        qkv = packed(lengths, head_dim, BF16, CPU)
        segs = segments(lengths, config.block_m, CPU)
        with emulated(seed=1, change=change, ready=(segs.tiles, segs.num_tiles)) as machine:
            out = attention_cases.run(attention.attention, qkv, segs, head_dim, launched)
        return out, machine.ran

    return run


def multiplying(op: Any, config: Any, layer: Layer) -> Run:
    def run(change: Change | None) -> tuple[torch.Tensor, set[int]]:
        launched = replace(config, pdl=True, **({"max_programs": 1} if hasattr(config, "max_programs") else {}))
        arguments = fused(layer, tensors(layer, BF16, CPU))
        e = arguments.epilogue
        older = [arguments.weight, arguments.num_rows, e.bias, e.norm and e.norm.colsum]
        with emulated(seed=1, change=change, ready=[t for t in older if t is not None]) as machine:
            out, _ = arguments.run(op, launched)
        return out[: layer.rows], machine.ran

    return run


IDLE = 4 if triton.__version__.startswith("3.6.") else 3
ARRIVALS = ("mbarrier.arrive", "wgmma.wait_group")
WAITS = ("mbarrier.try_wait", "griddepcontrol.wait")
EVERY = (*WAITS, *ARRIVALS, "cp.async.bulk.wait_group")
PROJ, QKV = Layer(130, 320, 192, residual=True), Layer(130, 320, 192, norm=True, part=64, heads=2)
FC1 = Layer(130, 256, 192, norm=True, part=64, activation="gelu_tanh")
CASES = {
    "attention": Case(attending(TINY, 64, (70, 5, 130)), (*WAITS, *ARRIVALS), 21),
    # Without `shifted`, else a second fence does for both.
    "attention, fence": Case(attending(replace(TINY, shifted=False), 64, (70,)), ("fence.proxy.async",), 1),
    # Arrivals alone: a wait of ping-pong decides nothing but time, and where warps arrive one by one, a wait for what a
    # consumer skips is one of several.
    "attention, by warp": Case(attending(replace(SHORT, stages=2), 72, (200, 130, 330)), ARRIVALS, 21),
    # Idle: the first step of a tile, for each of two consumers, waits for all products but one where there is one. In
    # three stages a free one tells that staging buffers are free, so that the wait for these is idle, too;
    # Triton 3.6 orders the code so that one more wait decides nothing.
    "gemm, ping-pong": Case(multiplying(gemm.linear, HopperGemmConfig(64, 64, 1, 3), PROJ), EVERY, 40, idle=IDLE),
    "gemm, cooperative": Case(multiplying(gemm.linear, HopperGemmConfig(64, 64, 2, 6), PROJ), EVERY, 38, idle=2),
    # Three chunks of residual in three stages, which wait for every stage's last arrival.
    "swap-AB": Case(multiplying(gemm_swap_ab.linear, HopperSwapABConfig(136, 2, 3), PROJ), EVERY, 26),
    # As many steps as stages and no residual: nothing else tells a consumer that the others have merged their moments.
    "swap-AB, norm": Case(multiplying(gemm_swap_ab.linear, HopperSwapABConfig(72, 3, 4), FC1), WAITS, 12, moved_up=3),
}


def without(at: int) -> Change:
    """A change that takes instruction `at` out; where it waits, it does not."""

    def change(program: Program) -> None:
        gone = program.instructions[at]
        waits = gone.op.startswith("mbarrier.try_wait")
        instead = Instruction("mov.pred", (gone.operands[0], "-1")) if waits else Instruction("nanosleep", ())
        program.instructions[at] = instead

    return change


def moved_up(at: int) -> Change:
    """A change that moves the arrival `at` above the last store to shared memory before it."""

    def change(program: Program) -> None:
        code = program.instructions
        to = max(i for i in range(at) if code[i].op.startswith("st.shared"))
        code[to : at + 1] = [code[at], *code[to:at]]

    return change


def noticed(case: Case, change: Change, right: torch.Tensor) -> bool:
    try:
        return not torch.equal(case.run(change)[0], right)
    except AssertionError:  # Race, Deadlock, WrongBarrier, WrongAccess, Overtakes, Abandons
        return True


def check(name: str, case: Case) -> None:
    found: list[tuple[int, Instruction]] = []

    def list_instructions(program: Program) -> None:
        kinds = (*case.kinds, *(("mbarrier.arrive",) if case.moved_up else ()))
        found.extend((i, ins) for i, ins in enumerate(program.instructions) if ins.op.startswith(kinds))

    right, ran = case.run(list_instructions)
    found = [(at, ins) for at, ins in found if at in ran]
    tried = [(at, ins) for at, ins in found if ins.op.startswith(case.kinds)]
    missed = [f"{at}: {ins}" for at, ins in tried if not noticed(case, without(at), right)]
    assert len(tried) >= case.least and len(missed) == case.idle, f"{name}: of {len(tried)} not noticed: {missed}"
    arrivals = [at for at, ins in found if ins.op.startswith("mbarrier.arrive")] if case.moved_up else []
    early = sum(noticed(case, moved_up(at), right) for at in arrivals)
    assert early >= case.moved_up, f"{name}: of {len(arrivals)} arrivals moved up {early} noticed"
    print(f"right: {name}, {len(tried) - len(missed) + early} faults noticed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), action="append")
    for name in parser.parse_args().case or CASES:
        check(name, CASES[name])


if __name__ == "__main__":
    main()
