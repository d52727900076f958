"""Programs of a few instructions, whole: what they give, and what is found in those that are wrong."""

import numpy as np
import pytest
import torch

from tests.emulator.machine import Deadlock, Launch, Machine, Overtakes
from tests.emulator.memory import GlobalMemory, WrongAccess
from tests.emulator.names import Unsupported
from tests.emulator.program import translate
from tests.emulator.ptx import parse
from tests.emulator.races import Race

HEAD = """
.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0)
.reqntid 64
{
    .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    shl.b32 %r2, %r1, 2;
    mov.b32 %r3, global_smem;
    add.s32 %r4, %r3, %r2;
    xor.b32 %r5, %r2, 128;
    add.s32 %r6, %r3, %r5;
    and.b32 %r7, %r1, 31;
    setp.eq.b32 %p1, %r7, 0;
    setp.lt.u32 %p2, %r1, 32;
"""


def run(body: str, seed: int = 0, early: bool = False) -> list[int]:
    """What 64 threads leave in as many words; `early`: on which the launch before may still be at work."""
    out = torch.zeros(64, dtype=torch.int32)
    launch = Launch(translate(parse(HEAD + body + "\nret; }")), 1, (out.data_ptr(),), 1024, early)
    Machine(seed=seed).run(launch, GlobalMemory([out], [out] if early else []))
    return out.tolist()


SWAP = "st.shared.b32 [%r4], %r1; {} ld.shared.b32 %r8, [%r6]; st.global.b32 [%rd3], %r8;"


def test_warps_meet_and_swap() -> None:
    expected = [i ^ 32 for i in range(64)]
    assert all(run(SWAP.format("bar.sync 0;"), seed) == expected for seed in range(5))


def test_a_missing_barrier_is_a_race_in_every_order() -> None:
    for seed in range(5):
        with pytest.raises(Race):
            run(SWAP.format(""), seed)


def test_a_barrier_that_half_of_the_threads_come_to() -> None:
    with pytest.raises(Deadlock, match="1 warps wait"):
        run("@%p2 bra $L_end; bar.sync 0; $L_end: mov.u32 %r9, 0;")


def test_outside_tensors() -> None:
    with pytest.raises(WrongAccess, match="of no tensor"):
        run("st.global.b32 [%rd3 + 4], %r1;")


def test_memory_that_nobody_has_written_is_no_number() -> None:
    assert run("ld.shared.b32 %r8, [%r4]; st.global.b32 [%rd3], %r8;") == [-1] * 64


PARTED = """
    and.b32 %r8, %r1, 3;
    setp.lt.u32 %p3, %r8, 2;
    @%p3 bra $L_less;
    {}
    mov.u32 %r9, 7;
    bra $L_end;
$L_less:
    mul.lo.s32 %r9, %r8, 100;
$L_end:
    add.s32 %r9, %r9, %r1;
    st.global.b32 [%rd3], %r9;
"""


def test_lanes_part_and_meet() -> None:
    assert run(PARTED.format("")) == [i + (i % 4 * 100 if i % 4 < 2 else 7) for i in range(64)]
    with pytest.raises(Unsupported, match="more than registers"):
        run(PARTED.format("st.global.b32 [%rd3], %r9;"))


def test_a_dependent_launch_waits() -> None:
    store, wait = "st.global.b32 [%rd3], %r1;", "griddepcontrol.wait;"
    assert run(wait + store, early=True) == list(range(64))
    with pytest.raises(WrongAccess, match="the launch before"):
        run(store + wait, early=True)
    with pytest.raises(Overtakes, match="has not waited"):
        run("", early=True)


# Warp 1 arrives when it has written; warp 0 waits for it, and reads.
HANDED = """
    @%p1 mbarrier.init.shared::cta.b64 [%r3 + 512], 1;
    bar.sync 0;
    add.s32 %r10, %r3, 512;
    mov.b32 %r11, {parity};
    @%p2 bra $L_reader;
    st.shared.b32 [%r6], %r1;
    {arrive}
    bra $L_end;
$L_reader:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r10], %r11;
    ld.shared.b32 %r8, [%r4];
    st.global.b32 [%rd3], %r8;
$L_end:
    mov.u32 %r9, 0;
"""


def test_mbarriers_hand_on_what_was_written() -> None:
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r10];"
    expected = [*range(32, 64), *[0] * 32]
    assert all(run(HANDED.format(parity=0, arrive=arrive), seed) == expected for seed in range(5))
    with pytest.raises(Deadlock):
        run(HANDED.format(parity=0, arrive=""))
    with pytest.raises(Race):  # the phase before the first counts as over
        run(HANDED.format(parity=1, arrive=arrive))
    with pytest.raises(WrongAccess, match="holds a barrier"):
        run(HANDED.format(parity=0, arrive=arrive + "st.shared.b32 [%r3 + 512], %r1;"))


# A warp's 16 rows of ones, by a matrix of ones that threads wrote: 16 everywhere.
PRODUCT = """
    mov.b32 %r20, 0x3F803F80;
    mad.lo.u32 %r21, %r7, 16, %r3;
    st.shared.v4.b32 [%r21], {{%r20, %r20, %r20, %r20}};
    {fence}
    bar.sync 0;
    shr.u32 %r22, %r3, 4;
    or.b32 %r23, %r22, 524288;
    mov.b32 %r24, 16;
    mov.b64 %rd5, {{%r23, %r24}};
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37}},
        {{%r20, %r20, %r20, %r20}}, %rd5, 0, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    {wait}
    st.global.b32 [%rd3], %r37;
"""
FENCE, WAIT = "fence.proxy.async.shared::cta;", "wgmma.wait_group.sync.aligned 0;"


def test_products() -> None:
    sixteen = int(np.float32(16.0).view(np.int32))
    assert all(run(PRODUCT.format(fence=FENCE, wait=WAIT), seed) == [sixteen] * 64 for seed in range(5))
    assert run(PRODUCT.format(fence=FENCE, wait="")) == [-1] * 64  # sums before anybody has waited for them
    assert np.isnan(np.array(run(PRODUCT.format(fence="", wait=WAIT)), np.int32).view(np.float32)).all()
