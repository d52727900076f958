"""Products of a warpgroup, a warp's 16 rows at a time: where operands lie, and fp32 sums.

Layouts are those of the PTX manual's matrix descriptors (`wgmma`, asynchronous warpgroup level matrix instructions).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.emulator.arithmetic import NARROW, Array
from tests.emulator.memory import SHARED_BASE, SharedMemory, WrongAccess
from tests.emulator.races import WORD
from tests.emulator.tma import swizzled

DEPTH = 16  # of an instruction with 16-bit operands
LINES = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a line, by a descriptor's mode
SWIZZLES = {0: 0, 1: 7, 2: 3, 3: 1}


@dataclass(frozen=True)
class Descriptor:
    """Bits of a matrix descriptor, addresses and distances in bytes."""

    start: int
    leading: int
    stride: int
    mode: int

    @classmethod
    def of(cls, bits: int) -> "Descriptor":
        return cls((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, bits >> 62 & 3)


@lru_cache(maxsize=256)
def _offsets(rows: int, across: bool, leading: int, stride: int, mode: int) -> Array:
    """Bytes from the start to element (row, k), [rows, DEPTH]; `across`: rows are what lies side by side in memory."""
    row, k = np.meshgrid(np.arange(rows), np.arange(DEPTH), indexing="ij")
    line = LINES[mode]
    wide = line // 2
    if not across:
        if mode == 0:
            return row // 8 * stride + row % 8 * 16 + k // 8 * leading + k % 8 * 2  # type: ignore[no-any-return]
        return row // 8 * stride + row % 8 * line + k * 2  # type: ignore[no-any-return]
    if mode == 0:
        return row // 8 * stride + row % 8 * 2 + k // 8 * leading + k % 8 * 16  # type: ignore[no-any-return]
    return row // wide * leading + row % wide * 2 + k // 8 * stride + k % 8 * line  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Places:
    """Where in shared memory an operand lies: bytes of its elements `[rows, DEPTH]`, and the words that they are in."""

    at: Array
    words: Array


@lru_cache(maxsize=4096)
def places(size: int, bits: int, rows: int, first: int, across: bool) -> Places:
    """A matrix from its row `first` on, of `size` bytes of shared memory.

    Raises:
        WrongAccess: it lies outside.
    """
    d = Descriptor.of(bits)
    at = d.start + _offsets(first + rows, across, d.leading, d.stride, d.mode)[first:]
    at = swizzled(at, SWIZZLES[d.mode]) - SHARED_BASE
    if at.min() < 0 or at.max() + 2 > size:
        raise WrongAccess(f"operands at {at.min()} to {at.max()} of {size} bytes of shared memory: {d}")
    return Places(at, np.unique(at // WORD))


def _matrix(shared: SharedMemory, at: Array, kind: str) -> Array:
    return NARROW[kind][0](shared.matrix.view(np.uint16)[at // 2])


def fragment(registers: Array, kind: str) -> Array:
    """A warp's rows of the first operand, [16, DEPTH], from four words a lane."""
    halves = np.ascontiguousarray(registers.T).view(np.uint16)  # [32, (k half, row half, pair)]
    held = halves.reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4)  # [row half, 8, k half, 4, pair]
    return NARROW[kind][0](np.ascontiguousarray(held.reshape(16, DEPTH)))


def sums_of(registers: Array) -> Array:
    """[columns / 2, 32] registers -> [16, columns]."""
    n = registers.shape[0] // 4
    return registers.reshape(n, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, 8 * n)


def registers_of(sums: Array) -> Array:
    """The reverse of `sums_of`."""
    n = sums.shape[1] // 8
    return sums.reshape(2, 8, n, 4, 2).transpose(2, 0, 4, 1, 3).reshape(4 * n, 32)


@dataclass
class Product:
    """One instruction of one warp, in flight.

    Attributes:
        sums: the first of the registers that it adds to, by which `Warp.sums` has them.
        a: the warp's 16 rows, in fp32; or where they lie.
        b: where the second operand lies.
    """

    sums: int
    a: Array | Places
    b: Places
    adds: bool
    signs: tuple[int, int]
    kind: str

    def run(self, shared: SharedMemory, sums: Array) -> None:
        """Adds to `sums` `[16, columns]`."""
        a = _matrix(shared, self.a.at, self.kind) if isinstance(self.a, Places) else self.a
        if not self.adds:
            sums[:] = 0
        sums += (a * self.signs[0]) @ (_matrix(shared, self.b.at, self.kind) * self.signs[1]).T
