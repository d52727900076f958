"""Parts of the emulator against what they stand for."""

import numpy as np
import pytest
import torch

from tests.emulator import arithmetic as a
from tests.emulator.lanes import line_of
from tests.emulator.mbarriers import Barriers, MBarrier, WrongBarrier
from tests.emulator.memory import SHARED_BASE, GlobalMemory, SharedMemory, WrongAccess
from tests.emulator.names import Names, Unsupported
from tests.emulator.ptx import Instruction, Program, parse
from tests.emulator.races import Race, Races
from tests.emulator.tma import TensorMap
from tests.emulator.wgmma import DEPTH, fragment, places, registers_of, sums_of
from tests.kernels.test_aot import run

RNG = np.random.default_rng(0)
ANY = RNG.integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32)


def test_halves_are_rounded_as_torch_rounds() -> None:
    x = torch.from_numpy(ANY.view(np.float32).copy())
    for dtype, narrow, widen in ((torch.bfloat16, a.to_bf16, a.from_bf16), (torch.float16, a.to_f16, a.from_f16)):
        with np.errstate(all="ignore"):
            ours = widen(narrow(x.numpy()))
        assert torch.equal(torch.from_numpy(ours).nan_to_num(7.0), x.to(dtype).float().nan_to_num(7.0))


def test_integers() -> None:
    x, y = ANY[:2048], ANY[2048:]
    wide = x.astype(object) * y.astype(object)
    assert (a.mul_hi(x, y) == np.array([int(w) >> 32 for w in wide], np.uint32)).all()
    signed = x.view(np.int32).astype(object) * y.view(np.int32).astype(object)
    assert (a.mul_hi(x.view(np.int32), y.view(np.int32)) == np.array([int(w) >> 32 for w in signed], np.int32)).all()
    halves = (x & 0xFFFF).astype(np.uint16), (y & 0xFFFF).astype(np.uint16)
    assert (a.mul_hi(*halves) == (halves[0].astype(np.uint32) * halves[1] >> 16)).all()
    assert (a.shl(x, np.full(2048, 32)) == 0).all() and (a.shr(x, np.full(2048, 40)) == 0).all()
    assert (a.shr(x.view(np.int32), np.full(2048, 40)) == np.where(x.view(np.int32) < 0, -1, 0)).all()
    small = np.array([-7, 7, -8], np.int32)
    assert a.div(small, np.array([2, -2, 3], np.int32)).tolist() == [-3, -3, -2]
    assert a.rem(small, np.array([2, -2, 3], np.int32)).tolist() == [-1, 1, -2]
    field = np.array([0b1011_0110], np.int32)
    assert a.bfe(field, np.array([1]), np.array([3])).tolist() == [0b011]
    assert a.bfe(field, np.array([4]), np.array([4])).tolist() == [0b1011 - 16]
    assert a.prmt(
        np.array([0x33221100], np.uint32), np.array([0x77665544], np.uint32), np.array([0x7410], np.uint32)
    ) == [0x77441100]


SCOPES = """
.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0)
.reqntid 64
{
    .reg .pred %p<2>; .reg .b32 %r<4>;
    // begin inline asm
    { .reg .b32 at; mov.u32 at, 3; add.u32 %r1, at, %r2; }
    { .reg .b32 at; waitLoop: @!%p1 bra waitLoop; mov.b32 {at, %r3}, %rd1; }
    // end inline asm
    brx.idx %r1, $L_brx_0;
$L_brx_0: .branchtargets $L_a, $L_b;
$L_a: $L_b: ret;
}
"""


def test_scopes_labels_and_targets() -> None:
    program = parse(SCOPES)
    ops = [str(i) for i in program.instructions]
    assert ops[1] == "add.u32 %r1, at@2, %r2" and ops[3] == "mov.b32 {at@3, %r3}, %rd1"
    assert ops[2] == "@!%p1 bra waitLoop@3" and program.labels["waitLoop@3"] == 2
    assert program.targets["$L_brx_0"] == ["$L_a", "$L_b"] and program.threads == 64
    assert program.params == [("k_param_0", "u64")] and program.kind("at@3") == program.kind("%r3") == "b32"


@pytest.mark.parametrize(
    "op, operands",
    [
        ("add.sat.f32", ("%r1", "%r2", "%r3")),
        ("vote.sync.any.pred", ("%p1", "%p1", "-1")),
        ("cvt.sat.s32.f32", ("%r1",) * 2),
    ],
)
def test_what_is_not_known_is_refused(op: str, operands: tuple[str, ...]) -> None:
    with pytest.raises(Unsupported, match=op.split(".")[0]):
        line_of(Names(parse(SCOPES), {}), Instruction(op, operands))


@pytest.mark.parametrize("swizzle, mode", [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("across", [False, True])
def test_products_find_what_the_copy_engine_brought(swizzle: int, mode: int, across: bool) -> None:
    """A box of 64 lines, in each swizzle, read along and across."""
    wide = 8 << swizzle  # halves in a line
    tensor = torch.arange(64 * wide, dtype=torch.int16).view(64, wide)
    shared, start = SharedMemory(16384, 4), SHARED_BASE + 2048
    box = TensorMap(tensor.data_ptr(), (64, wide), (2 * wide, 2), (64, wide), 2, swizzle)
    box.load(GlobalMemory([tensor]), shared, (0, 0), box.places(start)[0])
    lines = 8 * 2 * wide  # bytes of eight
    stride, leading = (lines, 0) if not across else (lines, 64 * 2 * wide)
    bits = start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62
    rows = wide if across else 64
    found = shared.matrix.view(np.int16)[places(shared.size, bits, rows, 0, across).at // 2]
    expected = tensor.numpy()[:DEPTH].T if across else tensor.numpy()[:, :DEPTH]
    assert (found == expected).all()


def test_boxes_past_the_end_hold_zeros_and_write_nothing() -> None:
    tensor = torch.ones(5, 32, dtype=torch.int16)
    shared, memory = SharedMemory(16384, 4), GlobalMemory([tensor])
    box = TensorMap(tensor.data_ptr(), (5, 32), (64, 2), (8, 32), 2, 0)
    to = box.places(SHARED_BASE)[0]
    box.load(memory, shared, (3, 0), to)
    assert shared.seen[:512].view(np.int16).reshape(8, 32).sum(1).tolist() == [32, 32, 0, 0, 0, 0, 0, 0]
    shared.matrix[:512] = 2
    box.store(memory, shared, (4, 0), to)
    assert tensor[:4].eq(1).all() and tensor[4].eq(0x0202).all()


def test_fragments_and_sums() -> None:
    rows = RNG.integers(0, 0x7C00, (16, DEPTH)).astype(np.uint16)
    lane = np.arange(32)
    registers = np.empty((4, 32), np.uint32)
    for i in range(4):
        row, k = lane // 4 + 8 * (i % 2), lane % 4 * 2 + 8 * (i // 2)
        registers[i] = rows[row, k] | rows[row, k + 1].astype(np.uint32) << 16
    assert (fragment(registers, "f16") == a.from_f16(rows)).all()
    held = np.arange(12 * 32, dtype=np.float32).reshape(12, 32)  # 24 columns
    sums = sums_of(held)
    assert sums[9, 2 + 8] == held[4 + 2, 4 * 1 + 1] and (registers_of(sums) == held).all()


def test_barriers() -> None:
    barrier = MBarrier(2)
    assert barrier.passed(1) and not barrier.passed(0)
    barrier.arrive(expect=32)
    barrier.arrive()
    assert not barrier.passed(0)
    with pytest.raises(WrongBarrier, match="1 arrivals where 0 of 2"):
        barrier.arrive()
    barrier = MBarrier(1)
    barrier.arrive(expect=32)
    barrier.complete(32)
    assert barrier.passed(0) and not barrier.passed(1)
    with pytest.raises(WrongBarrier, match="no barrier at 8"):
        Barriers(64).at(8)


def test_only_a_launchs_tensors_can_be_reached() -> None:
    tensor, lanes = torch.zeros(32, dtype=torch.int32), np.arange(32)
    memory, at = GlobalMemory([tensor]), tensor.data_ptr()
    memory.store(at + 4 * lanes, [lanes.astype(np.uint32)], 32, None)
    assert tensor.tolist() == list(range(32))
    with pytest.raises(WrongAccess, match="of no tensor"):
        memory.load(at + 4 + 4 * lanes, 32, 1, None)
    with pytest.raises(WrongAccess, match="no multiple"):
        memory.load(at + 2 + 4 * lanes, 32, 1, lanes < 8)
    shared = SharedMemory(64, 1)
    with pytest.raises(WrongAccess, match="of 64 from"):
        shared.load(0, SHARED_BASE + 4 * lanes, 32, 1, None)


def test_races() -> None:
    words = np.arange(4)
    races = Races(64, 2)
    races.write(words, 0)
    with pytest.raises(Race, match="warp 1 reads byte 0, but does not wait for warp 0"):
        races.read(words, 1)
    known = races.hand_on(0)
    races.learn(1, known)
    races.read(words, 1)
    with pytest.raises(Race, match="warp 0 writes byte 0 while warp 1 may still read it"):
        races.write(words, 0)
    races.learn(0, races.hand_on(1))
    races.read(words, 0, races.products(0), 1)
    races.write(words[:0], 1)
    with pytest.raises(Race, match="while a product of warp 0 may still read it"):
        races.write(words, 0)
    races.ended(0, races.products(0), 1)
    races.write(words, 0, races.barrier(1024), 1)
    with pytest.raises(Race, match="does not wait for what is brought for the barrier at 1024"):
        races.read(words, 0)
    races.ended(0, races.barrier(1024), 1)
    races.read(words, 0)


def test_the_same_value_may_be_written_in_any_order() -> None:
    shared, lanes = SharedMemory(128, 2), np.arange(32)
    values = [lanes.astype(np.uint32)]
    for warp in range(2):
        shared.store(warp, SHARED_BASE + 4 * lanes, values, 32, None)
    with pytest.raises(Race, match="warp 1 writes byte 0, but does not wait for warp 0"):
        shared.store(1, SHARED_BASE + 4 * lanes, [values[0] + 1], 32, None)


def test_a_program_of_no_kernel() -> None:
    with pytest.raises(ValueError, match="got none"):
        parse(".version 8.7")
    assert Program().kind("%r1") == ""


COPIED = """
import torch
from fusedvit.kernels.store_outputs import store_outputs
from tests.emulator.launches import emulated
hidden, merged = torch.randn(4, 64), torch.randn(1, 64)
to_hidden, to_merged = torch.zeros(4, 64), torch.zeros(1, 64)
with emulated():
    store_outputs(hidden, [merged], to_hidden, [to_merged])
assert torch.equal(to_hidden, hidden) and torch.equal(to_merged, merged)
"""


def test_a_launch_is_compiled_and_run() -> None:
    """The cheapest kernel: those that compute take minutes."""
    done = run("-c", COPIED)
    assert done.returncode == 0, done.stderr
