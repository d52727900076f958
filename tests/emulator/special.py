"""PTX instructions that touch more than a warp's registers, each as a call of `Warp`."""

import re
from collections.abc import Callable
from typing import Protocol

from tests.emulator.names import Names, Unsupported, vector
from tests.emulator.ptx import Instruction, Program

DONE = -1  # no piece comes next


class Translator(Protocol):
    """What a handler asks of whoever puts a program together."""

    program: Program
    names: Names
    number: dict[int, int]

    def mask(self, ins: Instruction) -> str: ...

    def rows_of(self, registers: list[str]) -> str: ...


def _bits(op: str) -> tuple[int, int]:
    """(bits of an element, elements) of a load or store."""
    count = re.search(r"\.v(\d)", op)
    bits = re.search(r"\.[bsuf](\d+)$", op)
    if bits is None:
        raise Unsupported(op)
    return int(bits.group(1)), int(count.group(1)) if count else 1


def _load(t: Translator, ins: Instruction) -> str:
    bits, _ = _bits(ins.op)
    space = "shared" if ".shared" in ins.op else "global"
    target = vector(ins.operands[0])
    bank = {8: "b16", 16: "b16", 32: "b32", 64: "b64"}[bits]
    size = t.names.size(target[0]) if bits == 8 else bank
    into = ", ".join(t.names.written(name, size) for name in target)
    return f"w.load_{space}(({into},), {t.names.address(ins.operands[1])}, {bits}, {t.mask(ins)})"


def _store(t: Translator, ins: Instruction) -> str:
    bits, _ = _bits(ins.op)
    kind = "b16" if bits == 8 and t.names.size(vector(ins.operands[1])[0]) == "b16" else f"b{max(bits, 16)}"
    values = ", ".join(t.names.read(o, kind) for o in vector(ins.operands[1]))
    where = "store_shared" if ".shared" in ins.op else "store_global"
    return f"w.{where}({t.names.address(ins.operands[0])}, [{values}], {bits}, {t.mask(ins)})"


def _parameter(t: Translator, ins: Instruction) -> str:
    index = [name for name, _ in t.program.params].index(ins.operands[1].strip("[] "))
    kind = ins.op.rsplit(".", 1)[1]
    return f"{t.names.written(ins.operands[0], kind)}[:] = w.arguments[{index}]"


def _product(t: Translator, ins: Instruction) -> str:
    found = re.search(r"\.m64n(\d+)k16\.f32\.(bf16|f16)\.", ins.op)
    sums, a, b, adds, *signs = ins.operands
    if found is None or 2 * len(vector(sums)) != int(found.group(1)):
        raise Unsupported(str(ins))
    of_registers = a.startswith("{")
    left = f"R[{t.rows_of(vector(a))}]" if of_registers else f"int({t.names.read(a, 'b64')}[0])"
    across = [s != "0" for s in signs[2:]]
    both = (False, across[0]) if of_registers else (across[0], across[1])
    more = f"uniform({t.names.read(adds, 'pred')})" if t.program.kind(adds) else str(adds in ("1", "true", "-1"))
    right = f"int({t.names.read(b, 'b64')}[0])"
    rows, held = t.rows_of(vector(sums)), (int(signs[0]), int(signs[1]))
    return f"w.product({rows}, {left}, {right}, {more}, {held}, {both}, {found.group(2)!r})"


def _initialise(t: Translator, ins: Instruction) -> str:
    return f"w.new_barrier({t.names.address(ins.operands[0])}, {int(ins.operands[1])}, {t.mask(ins)})"


def _invalidate(t: Translator, ins: Instruction) -> str:
    return f"w.end_barrier({t.names.address(ins.operands[0])}, {t.mask(ins)})"


def _arrive(t: Translator, ins: Instruction) -> str:
    if ".no" in ins.op or ".cluster." in ins.op:
        raise Unsupported(str(ins))
    at = next(i for i, o in enumerate(ins.operands) if o.startswith("["))
    expect = ".expect_tx" in ins.op
    amount = t.names.read(ins.operands[at + 1], "u32") if len(ins.operands) > at + 1 else t.names.read("1", "u32")
    times = "0" if ins.op.startswith("mbarrier.expect_tx") else "1"
    return f"w.arrive({t.names.address(ins.operands[at])}, {amount}, {expect}, {times}, {t.mask(ins)})"


def _await(t: Translator, ins: Instruction) -> str:
    passed, at, parity = ins.operands[:3]
    done = f"{t.names.written(passed, 'pred')}[:] = True"
    return f"{done}; w.await_barrier({t.names.address(at)}, {t.names.read(parity, 'u32')})"


def _meet(t: Translator, ins: Instruction) -> str:
    number = t.names.read(ins.operands[0], "u32")
    threads = f"int({t.names.read(ins.operands[1], 'u32')}[0])" if len(ins.operands) > 1 else "None"
    return f"w.meet(int({number}[0]), {threads})"


def _copy(t: Translator, ins: Instruction) -> str:
    if "multicast" in ins.op or not re.search(r"\.tensor\.\dd\.(shared|global)", ins.op):
        raise Unsupported(str(ins))
    stores = ".global.shared" in ins.op
    boxed, other = (ins.operands[0], ins.operands[1]) if stores else (ins.operands[1], ins.operands[0])
    name, _, at = boxed.strip("[] ").partition(",")
    place = ", ".join(t.names.read(o, "s32") for o in vector(at.strip()))
    here, map_at = t.names.address(other), t.names.read(name.strip(), "u64")
    barrier = "None" if stores else t.names.address(ins.operands[2])
    return f"w.copy({map_at}, ({place},), {here}, {barrier}, {t.mask(ins)})"


def _elect(t: Translator, ins: Instruction) -> str:
    lane, elected = ins.operands[0].split("|")
    return f"{t.names.written(lane, 'b32')}[:] = 0; {t.names.written(elected, 'pred')}[:] = w.lanes == 0"


def _atomic(t: Translator, ins: Instruction) -> str:
    if ".add." not in ins.op or not ins.op.endswith("32"):
        raise Unsupported(str(ins))
    into, value = t.names.written(ins.operands[0], "b32"), t.names.read(ins.operands[2], "u32")
    return f"w.add({into}, {t.names.address(ins.operands[1])}, {value}, {t.mask(ins)})"


def _matrix(t: Translator, ins: Instruction) -> str:
    if ".trans" in ins.op or ".m8n8." not in ins.op:
        raise Unsupported(str(ins))
    loads = ins.op.startswith("ldmatrix")
    held, at = (ins.operands[0], ins.operands[1]) if loads else (ins.operands[1], ins.operands[0])
    registers = ", ".join(t.names.written(name, "b32") for name in vector(held))
    return f"w.{'load' if loads else 'store'}_matrices(({registers},), {t.names.address(at)})"


def _jump(t: Translator, ins: Instruction) -> str:
    numbers = [t.number[t.program.labels[label]] for label in t.program.targets[ins.operands[1]]]
    return f"return {numbers}[int({t.names.read(ins.operands[0], 'u32')}[0])]"


def _leave(t: Translator, ins: Instruction) -> str:
    return f"if uniform({t.mask(ins)}): return {DONE}" if ins.guard else f"return {DONE}"


# Those that lanes may be kept out of, by a predicate.
GUARDED = {
    "ld.", "st.", "atom.", "mbarrier.init", "mbarrier.inval", "mbarrier.arrive", "mbarrier.expect_tx",
    "cp.async.bulk.tensor", "ret", "exit",
}  # fmt: skip
SPECIAL: dict[str, Callable[[Translator, Instruction], str]] = {
    "ld.param": _parameter,
    "ld.": _load,
    "st.": _store,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
    "wgmma.mma_async": _product,
    "wgmma.commit_group": lambda t, ins: "w.commit_products()",
    "wgmma.wait_group": lambda t, ins: f"w.await_products({int(ins.operands[0])})",
    "mbarrier.init": _initialise,
    "mbarrier.inval": _invalidate,
    "mbarrier.arrive": _arrive,
    "mbarrier.expect_tx": _arrive,
    "mbarrier.try_wait": _await,
    "bar.sync": _meet,
    "barrier.sync": _meet,
    "cp.async.bulk.commit_group": lambda t, ins: "w.commit_copies()",
    "cp.async.bulk.wait_group": lambda t, ins: f"w.await_copies({int(ins.operands[0])})",
    "cp.async.bulk.tensor": _copy,
    "fence.proxy.async": lambda t, ins: "w.fence()",
    "griddepcontrol.wait": lambda t, ins: "w.wait_for_launch()",
    "elect.sync": _elect,
    "atom.": _atomic,
    "brx.idx": _jump,
    "ret": _leave,
    "exit": _leave,
}
