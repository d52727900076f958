"""The copy engine: boxes of a tensor to shared memory and back, as a tensor map says."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tests.emulator.arithmetic import Array
from tests.emulator.memory import SHARED_BASE, GlobalMemory, SharedMemory, WrongAccess

SWIZZLE_BITS = {0: 0, 1: 1, 2: 3, 3: 7}  # of a tensor map's mode: which 16 bytes of a line change places


def swizzled(address: Array, bits: int) -> Array:
    """Addresses in shared memory where 16-byte units of a line of 128 change places by the line's number."""
    return address ^ (((address >> 7) & bits) << 4)


@dataclass(frozen=True)
class TensorMap:
    """As the driver makes it of a descriptor; the outermost dimension first.

    Attributes:
        strides: in bytes; the innermost is `unit`.
        box: what is copied at once.
        unit: bytes of an element.
        swizzle: mode (0: none; 1, 2, 3: lines of 32, 64, 128 bytes).
    """

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    unit: int
    swizzle: int

    def __post_init__(self) -> None:
        if self.base % 16 or any(s % 16 for s in self.strides[:-1]) or any(b > 256 for b in self.box):
            raise WrongAccess(f"the driver refuses bases and strides off 16 bytes and boxes over 256: {self}")

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.unit

    @cached_property
    def _inside(self) -> Array:
        """Each element's place in the box, [elements, dimensions]."""
        return np.stack(np.meshgrid(*(np.arange(b) for b in self.box), indexing="ij"), -1).reshape(-1, len(self.box))

    def _places(self, at: Sequence[int], to: int) -> tuple[Array, Array, Array]:
        """(which elements lie in the tensor; their addresses; every byte's place in shared memory)."""
        index = self._inside + np.asarray(at)
        held = ((index >= 0) & (index < np.asarray(self.shape))).all(-1)
        where = self.base + index @ np.asarray(self.strides, np.int64)
        line = to + np.arange(len(index)) * self.unit
        line = swizzled(line, SWIZZLE_BITS[self.swizzle]) - SHARED_BASE
        return held, where, line[:, None] + np.arange(self.unit)

    def load(self, memory: GlobalMemory, shared: SharedMemory, at: Sequence[int], to: int) -> None:
        """The box at `at`, zeros outside the tensor."""
        held, where, line = self._places(at, to)
        values = np.zeros((len(held), self.unit), np.uint8)
        if held.any():
            values[held] = _bytes(memory, where[held], self.unit)
        shared.bring(line.reshape(-1), values.reshape(-1))

    def store(self, memory: GlobalMemory, shared: SharedMemory, at: Sequence[int], of: int) -> None:
        """The box at `at`, but for what lies outside the tensor."""
        held, where, line = self._places(at, of)
        if held.any():
            region, first = memory.region(int(where[held].min()), int(np.ptp(where[held])) + self.unit)
            to = where[held] - where[held].min() + first
            region[to[:, None] + np.arange(self.unit)] = shared.matrix[line[held]]


def _bytes(memory: GlobalMemory, where: Array, unit: int) -> Array:
    region, first = memory.region(int(where.min()), int(np.ptp(where)) + unit)
    return region[(where - where.min() + first)[:, None] + np.arange(unit)]  # type: ignore[no-any-return]


def tensor_map(descriptor: Any, meta: dict[str, Any]) -> TensorMap:
    """Of a host's descriptor, as Triton's launcher makes it; `meta` is what the compiler says of it."""
    unit = meta["elem_size"]
    strides = tuple(int(s) * unit for s in descriptor.strides)
    shape = tuple(int(n) for n in descriptor.shape)
    return TensorMap(descriptor.base.data_ptr(), shape, strides, tuple(meta["block_size"]), unit, meta["swizzle"])
