"""A kernel's PTX as Python functions: straight pieces of code that a warp runs one at a time.

A piece ends where a warp may wait or where others may come in between: at barriers, copies, products and branches. Each
returns the number of the next, or `DONE`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator import arithmetic
from tests.emulator.arithmetic import Array
from tests.emulator.lanes import HANDLERS, line_of
from tests.emulator.memory import SHARED_BASE
from tests.emulator.names import Names, Unsupported
from tests.emulator.ptx import Instruction, Program
from tests.emulator.special import DONE, GUARDED, SPECIAL

if TYPE_CHECKING:
    from tests.emulator.warp import Warp

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
    """

    pieces: list[Callable[["Warp"], int]]
    follows: list[set[int]]
    pure: set[int]
    sizes: dict[str, int]
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
        return Code(pieces, follows, pure, self.names.sizes, self.program.threads)

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
            if ins.guard and head not in GUARDED:
                raise Unsupported(str(ins))
            seen = f"w.ran.add({at})"
            return [f"if ({self.mask(ins)}).any(): {seen}" if ins.guard else seen, SPECIAL[head](self, ins)]
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
    return ins.op.startswith(
        ("brx", "ret", "exit", "mbarrier", "bar.sync", "barrier", "cp.async.bulk", "wgmma.mma", "wgmma.wait", "atom")
    )


def _is_pure(ins: Instruction) -> bool:
    return ins.op.split(".")[0] in ("bra", *HANDLERS) and not ins.op.startswith(("shfl", "redux"))


def translate(program: Program) -> Code:
    """A kernel ready to run.

    Raises:
        Unsupported: an instruction without a meaning here.
    """
    return _Translator(program).code()
