"""Memory as a kernel sees it: tensors of this process by their real addresses, and the shared memory of a CTA.

Reading or writing outside a launch's tensors is an error. Shared memory is held twice: as threads see it, and as the
copy engine and the tensor cores do, which see what a thread wrote from its next `fence.proxy.async` on. It begins as
NaN in every 16- and 32-bit type.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.emulator.arithmetic import Array
from tests.emulator.races import WORD, Races

SHARED_BASE = 1024  # address of `global_smem`
UNSET = 0xFF


class WrongAccess(AssertionError):
    """A kernel touched memory that is not its own."""


def lanes_of(mask: Array | None) -> Array:
    """Which lanes take part."""
    return np.arange(32) if mask is None else np.flatnonzero(mask)


def bytes_of(storage: torch.UntypedStorage) -> Array:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload, no-any-return]


class GlobalMemory:
    """The storages of a launch's tensors; of some of them the launch before may not be done yet."""

    def __init__(self, tensors: list[torch.Tensor], unready: list[torch.Tensor] | None = None) -> None:
        self._unready = {t.untyped_storage().data_ptr() for t in unready or ()}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        self._begins = sorted(storages)
        self._bytes = [bytes_of(storages[begin]) for begin in self._begins]

    def reach(self, storage: int, waited: bool) -> None:
        """By a warp that has waited for the launch before, or has not.

        Raises:
            WrongAccess: it must have.
        """
        if not waited and storage in self._unready:
            raise WrongAccess("a tensor is read or written while the launch before may still be at work on it")

    def region(self, address: int, size: int, waited: bool = True) -> tuple[Array, int]:
        """The bytes of the tensor that holds `size` bytes from `address` on, and where in it they begin.

        Raises:
            WrongAccess: no tensor does; or see `reach`.
        """
        i = bisect_right(self._begins, address) - 1
        if i < 0 or address + size > self._begins[i] + len(self._bytes[i]):
            raise WrongAccess(f"{size} bytes at {address:#x} are of no tensor of this launch")
        self.reach(self._begins[i], waited)
        return self._bytes[i], address - self._begins[i]

    def _lanes(self, addresses: Array, size: int, mask: Array | None, waited: bool) -> tuple[Array, Array]:
        active = addresses if mask is None else addresses[mask]
        first, last = int(active.min()), int(active.max())
        if (active % size).any():
            raise WrongAccess(f"accesses of {size} bytes at addresses that are no multiple of it: {active}")
        held, begin = self.region(first, last - first + size, waited)
        return held, (active - first + begin).astype(np.int64)

    def load(
        self, addresses: Array, bits: int, count: int, mask: Array | None, waited: bool = True
    ) -> tuple[Array, Array]:
        """([count, active lanes] of `bits` each, which lanes)."""
        unit, lanes = bits // 8, lanes_of(mask)
        if not lanes.size:
            return np.zeros((count, 0), f"u{unit}"), lanes
        held, at = self._lanes(addresses.astype(np.int64), unit * count, mask, waited)
        index = at[None] + np.arange(count)[:, None] * unit
        return held[index[..., None] + np.arange(unit)].view(f"u{unit}")[..., 0], lanes

    def store(self, addresses: Array, values: list[Array], bits: int, mask: Array | None, waited: bool = True) -> None:
        unit, lanes = bits // 8, lanes_of(mask)
        if not lanes.size:
            return
        held, at = self._lanes(addresses.astype(np.int64), unit * len(values), mask, waited)
        for i, value in enumerate(values):
            words = np.ascontiguousarray(value[lanes].astype(f"u{unit}")).view(np.uint8).reshape(-1, unit)
            held[(at + i * unit)[:, None] + np.arange(unit)] = words

    def add(self, address: int, value: int, waited: bool = True) -> int:
        """`atom.add` of 32 bits; what was there."""
        held, at = self.region(address, 4, waited)
        word = held[at : at + 4].view(np.uint32)
        old = int(word[0])
        word[0] = (old + value) & 0xFFFFFFFF
        return old


@dataclass
class SharedMemory:
    """Of one CTA of so many warps.

    Attributes:
        seen: as threads see it.
        matrix: as the copy engine and the tensor cores do.
        barriers: bytes that hold barriers, which nothing else may touch.
    """

    size: int
    warps: int
    seen: Array = field(init=False)
    matrix: Array = field(init=False)
    barriers: Array = field(init=False)
    races: Races = field(init=False)
    _unfenced: dict[int, list[Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen = np.full(-(-self.size // 16) * 16, UNSET, np.uint8)  # whole words of every type
        self.matrix = self.seen.copy()
        self.barriers = np.zeros(len(self.seen), np.bool_)
        self.races = Races(self.size, self.warps)

    def _index(self, addresses: Array, size: int) -> Array:
        at = addresses.astype(np.int64) - SHARED_BASE
        if at.size and (at.min() < 0 or at.max() + size > self.size or (at % size).any()):
            raise WrongAccess(f"{size} bytes of shared memory at {addresses}, of {self.size} from {SHARED_BASE} on")
        if self.barriers[at].any():
            raise WrongAccess(f"shared memory at {addresses} holds a barrier")
        return at

    def load(self, warp: int, addresses: Array, bits: int, count: int, mask: Array | None) -> tuple[Array, Array]:
        """([count, active lanes] of `bits` each, which lanes)."""
        unit, lanes = bits // 8, lanes_of(mask)
        at = self._index(addresses[lanes], unit * count)
        self.races.read(_words(at, unit * count), warp)
        index = at[None] // unit + np.arange(count)[:, None]
        return self.seen.view(f"u{unit}")[index], lanes

    def store(self, warp: int, addresses: Array, values: list[Array], bits: int, mask: Array | None) -> None:
        unit, lanes = bits // 8, lanes_of(mask)
        at = self._index(addresses[lanes], unit * len(values))
        touched = (at[:, None] + np.arange(unit * len(values))).reshape(-1)
        before = self.seen[touched]
        whole = self.seen.view(f"u{unit}")
        for i, value in enumerate(values):
            whole[at // unit + i] = value[lanes].astype(f"u{unit}")
        changed = touched[before != self.seen[touched]] // WORD
        self.races.write(_words(at, unit * len(values)), warp, changed=changed)
        self._unfenced.setdefault(warp, []).append(touched)

    def fence(self, warp: int) -> None:
        """What this warp wrote reaches the copy engine and the tensor cores."""
        for at in self._unfenced.pop(warp, []):
            self.matrix[at] = self.seen[at]

    def bring(self, at: Array, values: Array) -> None:
        """Bytes written by the copy engine."""
        if self.barriers[at].any():
            raise WrongAccess("the copy engine writes where a barrier is")
        self.seen[at] = values
        self.matrix[at] = values


def _words(at: Array, size: int) -> Array:
    """The words that `size` bytes from each of `at` on lie in."""
    return (at[:, None] + np.arange(0, size, WORD)).reshape(-1) // WORD
