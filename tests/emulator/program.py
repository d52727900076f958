"""A kernel's PTX as Python functions: straight pieces of code that a warp runs one at a time.

A piece ends where a warp may wait or where others may come in between: at barriers, copies, products and branches. Each
returns the number of the next, or `DONE`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator import arithmetic
from tests.emulator.arithmetic import Array
from tests.emulator.lanes import HANDLERS, Names, Unsupported, line_of, vector
from tests.emulator.memory import SHARED_BASE
from tests.emulator.ptx import Instruction, Program, parse

if TYPE_CHECKING:
    from tests.emulator.machine import Warp

DONE = -1
PARAMS = 0x7F00_0000  # where parameters would lie, in 32 bits; tensor maps are known by these addresses
PARAM_BYTES = 128
NOTHING = ("setmaxnreg", "griddepcontrol", "bar.warp.sync", "fence", "membar", "wgmma.fence", "prefetch", "nanosleep")


@dataclass
class Code:
    """A kernel, ready to run.

    Attributes:
        pieces: what a warp runs, by number, in the order of the text; the first is 0.
        follows: which may come behind each.
        pure: those that change registers and nothing else.
        sizes: registers of each bank.
        params: name and type of each.
    """

    pieces: list[Callable[["Warp"], int]]
    follows: list[set[int]]
    pure: set[int]
    sizes: dict[str, int]
    params: list[tuple[str, str]]
    threads: int

    def meeting(self, one: int, other: int) -> int:
        """Where lanes that went on at `one` and at `other` are together again, at the latest: the first piece that
        both come by on every way."""
        shared = self._on_every_way[one] & self._on_every_way[other]
        ways = [n for n in range(len(self.pieces)) if shared >> n & 1]
        return max(ways, key=lambda n: self._on_every_way[n].bit_count())

    @cached_property
    def _on_every_way(self) -> list[int]:
        """Of each piece those that come after it whatever happens, as bits, itself too."""
        every = (1 << len(self.pieces)) - 1
        found = [every if onward else 1 << n for n, onward in enumerate(self.follows)]
        changed = True
        while changed:
            changed = False
            for n in reversed(range(len(found))):
                behind = every if self.follows[n] else 0
                for onward in self.follows[n]:
                    behind &= found[onward]
                changed |= found[n] != (behind | 1 << n)
                found[n] = behind | 1 << n
        return found


def address_of_param(index: int) -> int:
    return PARAMS + index * PARAM_BYTES


class _Translator:
    def __init__(self, program: Program) -> None:
        self.program = program
        symbols = {name: address_of_param(i) for i, (name, _) in enumerate(program.params)}
        self.names = Names(program, symbols | {"global_smem": SHARED_BASE})
        self.rows: list[Array] = []
        self.starts = {0, *program.labels.values()}

    def code(self) -> Code:
        instructions = self.program.instructions
        for i, instruction in enumerate(instructions):
            if _pauses(instruction):
                self.starts.add(i + 1)
        begins = sorted(s for s in self.starts if s < len(instructions))
        self.number = {begin: n for n, begin in enumerate(begins)} | {len(instructions): DONE}
        text, follows, pure = [], [], set()
        for n, begin in enumerate(begins):
            end = begins[n + 1] if n + 1 < len(begins) else len(instructions)
            lines = [line for i in range(begin, end) for line in self._lines(instructions[i], i)]
            text.append("\n    ".join([f"def piece_{n}(w):", _PROLOGUE, *lines, f"return {self.number[end]}"]))
            if all(_is_pure(ins) for ins in instructions[begin:end]):
                pure.add(n)
            follows.append(self._onward(instructions[begin:end], self.number[end]))
        scope: dict[str, Any] = vars(arithmetic) | {"C": self.names.constants, "J": self.rows, "uniform": uniform}
        exec(compile("\n".join(text), "<kernel>", "exec"), scope)
        pieces = [scope[f"piece_{n}"] for n in range(len(begins))]
        return Code(pieces, follows, pure, self.names.sizes, self.program.params, self.program.threads)

    def _onward(self, piece: list[Instruction], behind: int) -> set[int]:
        """Which pieces may come after one; `behind` is that next to it."""
        last = piece[-1]
        labels = []
        if last.op.startswith("bra"):
            labels = [last.operands[0]]
        elif last.op.startswith("brx"):
            labels = self.program.targets[last.operands[1]]
        leaves = last.op.startswith(("bra", "brx", "ret", "exit")) and not last.guard
        found = {self.number[self.program.labels[label]] for label in labels}
        return found if leaves or behind == DONE else found | {behind}

    def _lines(self, ins: Instruction, at: int) -> list[str]:
        head = next((h for h in SPECIAL if ins.op.startswith(h)), "")
        if head:
            return [SPECIAL[head](self, ins)]
        if ins.op.startswith(NOTHING):
            return []
        if ins.op.startswith("bra"):
            return [self._branch(ins, at)]
        return [line_of(self.names, ins)]

    def mask(self, ins: Instruction) -> str:
        if not ins.guard:
            return "None"
        return f"{'~' * ins.negated}{self.names.read(ins.guard, 'pred')}"

    def rows_of(self, registers: list[str]) -> str:
        self.rows.append(np.array([self.names.register(name) for name in registers]))
        return f"J[{len(self.rows) - 1}]"

    def _branch(self, ins: Instruction, at: int) -> str:
        target = self.number[self.program.labels[ins.operands[0]]]
        if not ins.guard:
            return f"return {target}"
        return f"return w.branch({self.mask(ins)}, {target}, {self.number[at + 1]})"


_PROLOGUE = "P = w.P; H = w.H; Hs = w.Hs; R = w.R; S = w.S; F = w.F; D = w.D; L = w.L"


def uniform(condition: Array) -> bool:
    """
    Raises:
        Unsupported: lanes of a warp differ.
    """
    first = bool(condition[0])
    if (condition != first).any():
        raise Unsupported("lanes of a warp part ways where they must not")
    return first


def _pauses(ins: Instruction) -> bool:
    """Whether a piece ends behind it."""
    if ins.op.startswith("bra"):
        return True
    return ins.op.startswith(("brx", "ret", "exit", "mbarrier", "bar.sync", "barrier", "cp.async.bulk", "wgmma.mma", "wgmma.wait", "atom"))


def _is_pure(ins: Instruction) -> bool:
    return ins.op.split(".")[0] in ("bra", *HANDLERS) and not ins.op.startswith(("shfl", "redux"))


def _bits(op: str) -> tuple[int, int]:
    """(bits of an element, elements) of a load or store."""
    count = re.search(r"\.v(\d)", op)
    bits = re.search(r"\.[bsuf](\d+)$", op)
    if bits is None:
        raise Unsupported(op)
    return int(bits.group(1)), int(count.group(1)) if count else 1


def _load(t: _Translator, ins: Instruction) -> str:
    bits, _ = _bits(ins.op)
    space = "shared" if ".shared" in ins.op else "global"
    target = vector(ins.operands[0])
    bank = {8: "b16", 16: "b16", 32: "b32", 64: "b64"}[bits]
    size = t.names._size(target[0]) if bits == 8 else bank
    into = ", ".join(t.names.written(name, size) for name in target)
    return f"w.load_{space}(({into},), {t.names.address(ins.operands[1])}, {bits}, {t.mask(ins)})"


def _store(t: _Translator, ins: Instruction) -> str:
    bits, _ = _bits(ins.op)
    kind = "b16" if bits == 8 and t.names._size(vector(ins.operands[1])[0]) == "b16" else f"b{max(bits, 16)}"
    values = ", ".join(t.names.read(o, kind) for o in vector(ins.operands[1]))
    where = "store_shared" if ".shared" in ins.op else "store_global"
    return f"w.{where}({t.names.address(ins.operands[0])}, [{values}], {bits}, {t.mask(ins)})"


def _parameter(t: _Translator, ins: Instruction) -> str:
    index = [name for name, _ in t.program.params].index(ins.operands[1].strip("[] "))
    kind = ins.op.rsplit(".", 1)[1]
    return f"{t.names.written(ins.operands[0], kind)}[:] = w.arguments[{index}]"


def _product(t: _Translator, ins: Instruction) -> str:
    found = re.search(r"\.m64n(\d+)k16\.f32\.(bf16|f16)\.", ins.op)
    if found is None:
        raise Unsupported(str(ins))
    columns, kind = int(found.group(1)), found.group(2)
    sums, a, b, adds, *signs = ins.operands
    of_registers = a.startswith("{")
    left = f"R[{t.rows_of(vector(a))}]" if of_registers else f"int({t.names.read(a, 'b64')}[0])"
    across = [s != "0" for s in signs[2:]]
    both = (False, across[0]) if of_registers else (across[0], across[1])
    more = f"uniform({t.names.read(adds, 'pred')})" if t.program.kind(adds) else str(adds in ("1", "true", "-1"))
    right = f"int({t.names.read(b, 'b64')}[0])"
    rows, held = t.rows_of(vector(sums)), (int(signs[0]), int(signs[1]))
    return f"w.product({columns}, {rows}, {left}, {right}, {more}, {held}, {both}, {kind!r})"


def _initialise(t: _Translator, ins: Instruction) -> str:
    return f"w.new_barrier({t.names.address(ins.operands[0])}, {int(ins.operands[1])}, {t.mask(ins)})"


def _invalidate(t: _Translator, ins: Instruction) -> str:
    return f"w.end_barrier({t.names.address(ins.operands[0])}, {t.mask(ins)})"


def _arrive(t: _Translator, ins: Instruction) -> str:
    if ".no" in ins.op or ".cluster." in ins.op:
        raise Unsupported(str(ins))
    at = next(i for i, o in enumerate(ins.operands) if o.startswith("["))
    expect = ".expect_tx" in ins.op
    amount = t.names.read(ins.operands[at + 1], "u32") if len(ins.operands) > at + 1 else t.names.read("1", "u32")
    times = "0" if ins.op.startswith("mbarrier.expect_tx") else "1"
    return f"w.arrive({t.names.address(ins.operands[at])}, {amount}, {expect}, {times}, {t.mask(ins)})"


def _await(t: _Translator, ins: Instruction) -> str:
    passed, at, parity = ins.operands[:3]
    done = f"{t.names.written(passed, 'pred')}[:] = True"
    return f"{done}; w.await_barrier({t.names.address(at)}, {t.names.read(parity, 'u32')})"


def _meet(t: _Translator, ins: Instruction) -> str:
    number = t.names.read(ins.operands[0], "u32")
    threads = f"int({t.names.read(ins.operands[1], 'u32')}[0])" if len(ins.operands) > 1 else "None"
    return f"w.meet(int({number}[0]), {threads})"


def _copy(t: _Translator, ins: Instruction) -> str:
    if "multicast" in ins.op or not re.search(r"\.tensor\.\dd\.(shared|global)", ins.op):
        raise Unsupported(str(ins))
    stores = ".global.shared" in ins.op
    boxed, other = (ins.operands[0], ins.operands[1]) if stores else (ins.operands[1], ins.operands[0])
    name, _, at = boxed.strip("[] ").partition(",")
    place = ", ".join(t.names.read(o, "s32") for o in vector(at.strip()))
    here, map_at = t.names.address(other), t.names.read(name.strip(), "u64")
    barrier = "None" if stores else t.names.address(ins.operands[2])
    return f"w.copy({map_at}, ({place},), {here}, {barrier}, {t.mask(ins)})"


def _elect(t: _Translator, ins: Instruction) -> str:
    lane, elected = ins.operands[0].split("|")
    return f"{t.names.written(lane, 'b32')}[:] = 0; {t.names.written(elected, 'pred')}[:] = w.lanes == 0"


def _atomic(t: _Translator, ins: Instruction) -> str:
    if ".add." not in ins.op or not ins.op.endswith("32"):
        raise Unsupported(str(ins))
    into, value = t.names.written(ins.operands[0], "b32"), t.names.read(ins.operands[2], "u32")
    return f"w.add({into}, {t.names.address(ins.operands[1])}, {value}, {t.mask(ins)})"


def _matrix(t: _Translator, ins: Instruction) -> str:
    if ".trans" in ins.op or ".m8n8." not in ins.op:
        raise Unsupported(str(ins))
    loads = ins.op.startswith("ldmatrix")
    held, at = (ins.operands[0], ins.operands[1]) if loads else (ins.operands[1], ins.operands[0])
    registers = ", ".join(t.names.written(name, "b32") for name in vector(held))
    return f"w.{'load' if loads else 'store'}_matrices(({registers},), {t.names.address(at)})"


def _jump(t: _Translator, ins: Instruction) -> str:
    numbers = [t.number[t.program.labels[label]] for label in t.program.targets[ins.operands[1]]]
    return f"return {numbers}[int({t.names.read(ins.operands[0], 'u32')}[0])]"


def _leave(t: _Translator, ins: Instruction) -> str:
    return f"if uniform({t.mask(ins)}): return {DONE}" if ins.guard else f"return {DONE}"


SPECIAL: dict[str, Callable[[_Translator, Instruction], str]] = {
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
    "elect.sync": _elect,
    "atom.": _atomic,
    "brx.idx": _jump,
    "ret": _leave,
    "exit": _leave,
}


def translate(ptx: str) -> Code:
    """
    Raises:
        Unsupported: an instruction without a meaning here.
    """
    return _Translator(parse(ptx)).code()
