"""The copy engine: boxes of a tensor to shared memory and back, as a tensor map says."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tests.emulator.arithmetic import Array
from tests.emulator.memory import SHARED_BASE, GlobalMemory, SharedMemory, WrongAccess
from tests.emulator.races import WORD

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
        storage: where the tensor's memory begins.
    """

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    unit: int
    swizzle: int
    storage: int = 0

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

    @lru_cache(maxsize=1024)  # noqa: B019  # frozen, and a launch has few
    def places(self, start: int) -> tuple[Array, Array]:
        """Where in shared memory the bytes of a box at address `start` lie, [elements, unit]; the words they are in."""
        line = start + np.arange(len(self._inside)) * self.unit
        line = swizzled(line, SWIZZLE_BITS[self.swizzle]) - SHARED_BASE
        line = line[:, None] + np.arange(self.unit)
        return line, np.unique(line // WORD)

    def _elements(self, at: Sequence[int]) -> tuple[Array, Array]:
        """(which elements of the box at `at` lie in the tensor; their addresses)."""
        index = self._inside + np.asarray(at)
        held = ((index >= 0) & (index < np.asarray(self.shape))).all(-1)
        return held, (self.base + index @ np.asarray(self.strides, np.int64))[held]

    def load(self, memory: GlobalMemory, shared: SharedMemory, at: Sequence[int], to: Array) -> None:
        """The box at `at` to places `to`, zeros outside the tensor."""
        held, where = self._elements(at)
        values = np.zeros((len(held), self.unit), np.uint8)
        if held.any():
            region, index = _bytes(memory, where, self.unit)
            values[held] = region[index]
        shared.bring(to.reshape(-1), values.reshape(-1))

    def store(self, memory: GlobalMemory, shared: SharedMemory, at: Sequence[int], of: Array) -> None:
        """Places `of` to the box at `at`, but for what lies outside the tensor."""
        held, where = self._elements(at)
        if held.any():
            region, index = _bytes(memory, where, self.unit)
            region[index] = shared.matrix[of[held]]


def _bytes(memory: GlobalMemory, where: Array, unit: int) -> tuple[Array, Array]:
    """The tensor that elements at these addresses belong to, and the places of their bytes in it."""
    region, first = memory.region(int(where.min()), int(np.ptp(where)) + unit)
    return region, (where - where.min() + first)[:, None] + np.arange(unit)


def tensor_map(descriptor: Any, meta: dict[str, Any]) -> TensorMap:
    """Of a host's descriptor, as Triton's launcher makes it; `meta` is what the compiler says of it."""
    unit = meta["elem_size"]
    strides = tuple(int(s) * unit for s in descriptor.strides)
    shape = tuple(int(n) for n in descriptor.shape)
    tensor = getattr(descriptor.base, "tensor", descriptor.base)
    storage = tensor.untyped_storage().data_ptr()
    box, swizzle = tuple(meta["block_size"]), meta["swizzle"]
    return TensorMap(descriptor.base.data_ptr(), shape, strides, box, unit, swizzle, storage)
