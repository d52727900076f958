"""Where a kernel's registers lie, and how an operand is read: as a row of 32 lanes, of its own type.

Registers are rows in four banks, seen as other types by views: P predicates; H, Hs 16 bits; R, S, F 32 bits; D, L 64.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.emulator.arithmetic import Array
from tests.emulator.ptx import Program

BANKS = {"pred": "P", "b16": "H", "b32": "R", "b64": "D"}
VIEWS = {
    "pred": "P",
    **dict.fromkeys(("b16", "u16", "f16", "bf16"), "H"),
    "s16": "Hs",
    **dict.fromkeys(("b32", "u32", "f16x2", "bf16x2"), "R"),
    "s32": "S",
    "f32": "F",
    **dict.fromkeys(("b64", "u64"), "D"),
    "s64": "L",
}
DTYPES = {
    "P": np.bool_, "H": np.uint16, "Hs": np.int16, "R": np.uint32, "S": np.int32, "F": np.float32, "D": np.uint64,
    "L": np.int64,
}  # fmt: skip
SPECIAL = {"%tid.x": "w.tid", "%ctaid.x": "w.ctaid", "%nctaid.x": "w.nctaid", "%laneid": "w.lanes"}


class Unsupported(NotImplementedError):
    """PTX that the emulator has no meaning for."""


@dataclass
class Names:
    """Where registers lie, and constants as rows of 32.

    Attributes:
        symbols: addresses of `global_smem` and of parameters.
        at: row of each register in its bank.
    """

    program: Program
    symbols: dict[str, int]
    at: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BANKS.values(), 0))
    constants: list[Array] = field(default_factory=list)
    _known: dict[tuple[str, str], str] = field(default_factory=dict)

    def register(self, name: str) -> int:
        """Row of a register in the bank of its type."""
        if name not in self.at:
            bank = BANKS[self.size(name)]
            self.at[name] = self.sizes[bank]
            self.sizes[bank] += 1
        return self.at[name]

    def size(self, name: str) -> str:
        """Type of a register by its size: "pred", "b16", "b32" or "b64"; "" of what is none."""
        kind = self.program.kind(name)
        return kind if kind == "pred" or not kind else f"b{kind[1:]}"

    def written(self, name: str, kind: str) -> str:
        return f"{VIEWS[kind]}[{self.register(name)}]"

    def read(self, operand: str, kind: str) -> str:
        """A register, or 32 times a constant."""
        if operand in SPECIAL:
            return SPECIAL[operand]
        if self.program.kind(operand):
            return self.written(operand, kind)
        if (operand, kind) not in self._known:
            self._known[operand, kind] = f"C[{len(self.constants)}]"
            self.constants.append(np.full(32, self._value(operand, kind), DTYPES[VIEWS[kind]]))
        return self._known[operand, kind]

    def _value(self, operand: str, kind: str) -> Array | bool:
        if operand in self.symbols:
            value = self.symbols[operand]
        elif operand.startswith("0f"):
            value = int(operand[2:], 16)
        else:
            value = int(operand.rstrip("U"), 0)
        if kind == "pred":
            return value != 0
        dtype = np.dtype(DTYPES[VIEWS[kind]])
        bits = value & ((1 << 8 * dtype.itemsize) - 1)  # floats are given by theirs
        return np.array(bits, f"u{dtype.itemsize}").view(dtype)

    def address(self, operand: str) -> str:
        """`[base + offset]` as 32 addresses."""
        inner = operand.strip("[] ").replace(" ", "")
        base, _, offset = inner.partition("+")
        if not self.program.kind(base):
            value = self.symbols[base] + int(offset or 0)
            return self.read(str(value), "u32")
        kind = "s64" if self.size(base) == "b64" else "u32"
        return self.read(base, kind) + (f" + {self.read(offset, kind)}" if offset not in ("", "0") else "")


def vector(operand: str) -> list[str]:
    """`{a, b}` or `a`."""
    return [part.strip() for part in operand.strip("{} ").split(",")]
