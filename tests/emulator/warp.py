"""A warp of the emulator: registers, what is in flight for it, and every instruction that touches more than registers.

Copies take effect at some time behind their request, products at some time between their issue and the wait for them;
until then the registers of their sums hold NaN.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.emulator.arithmetic import Array
from tests.emulator.mbarriers import Barriers
from tests.emulator.memory import SHARED_BASE, GlobalMemory, SharedMemory, lanes_of
from tests.emulator.names import Unsupported
from tests.emulator.program import Code
from tests.emulator.tma import TensorMap
from tests.emulator.wgmma import Places, Product, fragment, places, registers_of, sums_of

UNSET = 0xFFFFFFFF  # NaN as fp32, and as two halves
_BANKS = (("H", 0xFFFF, np.uint16), ("R", UNSET, np.uint32), ("D", UNSET, np.uint64))


@dataclass
class Cta:
    """What the warps of a CTA share."""

    shared: SharedMemory
    barriers: Barriers
    copies: list[Callable[[], None]] = field(default_factory=list)
    live: int = 0
    waited: bool = False  # one of its warps has, for the launch before


class Warp:
    """32 threads: registers, and what is in flight for them."""

    lanes = np.arange(32, dtype=np.int32)

    def __init__(self, code: Code, number: int, cta: Cta, memory: GlobalMemory, place: tuple[int, int]) -> None:
        self.code, self.number, self.cta, self.memory, self.shared = code, number, cta, memory, cta.shared
        halves, words, longs = (np.full((code.sizes[b] + 1, 32), UNSET & m, t) for b, m, t in _BANKS)
        predicates = np.zeros((code.sizes["P"] + 1, 32), np.bool_)
        self.P = list(predicates)
        self.H, self.Hs = list(halves), list(halves.view(np.int16))
        self.R, self.S, self.F = words, list(words.view(np.int32)), list(words.view(np.float32))
        self._banks = [predicates, halves, words, longs]
        self.D, self.L = list(longs), list(longs.view(np.int64))
        self.tid = (32 * number + np.arange(32)).astype(np.uint32)
        self.ctaid, self.nctaid = (np.full(32, x, np.uint32) for x in place)
        self.arguments: list[Any] = []
        self.maps: dict[int, TensorMap] = {}
        self.waits: Callable[[], bool] | None = None
        self.sums: dict[int, tuple[Array, Array]] = {}  # by their first register: (registers, [16, columns])
        self.products: deque[Product] = deque()  # not yet run
        self._groups: list[list[int]] = [[]]  # sums of each group that nobody has waited for; the last is open
        self._sent: list[list[Callable[[], None]]] = [[]]  # boxes on their way out, likewise
        self._groups_issued = self._groups_sent = 0
        self.races = cta.shared.races
        self.at = 0
        self.ran: set[int] = set()
        self.waited = False  # for the launch before

    # --- memory ---

    def load_shared(self, into: tuple[Array, ...], at: Array, bits: int, mask: Array | None) -> None:
        values, lanes = self.shared.load(self.number, at, bits, len(into), mask)
        for register, value in zip(into, values, strict=True):
            register[lanes] = value

    def load_global(self, into: tuple[Array, ...], at: Array, bits: int, mask: Array | None) -> None:
        values, lanes = self.memory.load(at, bits, len(into), mask, self.waited)
        for register, value in zip(into, values, strict=True):
            register[lanes] = value

    def store_shared(self, at: Array, values: list[Array], bits: int, mask: Array | None) -> None:
        self.shared.store(self.number, at, values, bits, mask)

    def store_global(self, at: Array, values: list[Array], bits: int, mask: Array | None) -> None:
        self.memory.store(at, values, bits, mask, self.waited)

    def add(self, into: Array, at: Array, value: Array, mask: Array | None) -> None:
        for lane in lanes_of(mask):
            into[lane] = self.memory.add(int(at[lane]), int(value[lane]), self.waited)

    def load_matrices(self, into: tuple[Array, ...], at: Array) -> None:
        for i, register in enumerate(into):
            self.load_shared((register,), _rows_of_matrix(at, i), 32, None)

    def store_matrices(self, of: tuple[Array, ...], at: Array) -> None:
        for i, register in enumerate(of):
            self.store_shared(_rows_of_matrix(at, i), [register], 32, None)

    def fence(self) -> None:
        self.shared.fence(self.number)

    def wait_for_launch(self) -> None:
        """`griddepcontrol.wait`."""
        self.waited = self.cta.waited = True

    # --- barriers ---

    def new_barrier(self, at: Array, count: int, mask: Array | None) -> None:
        if mask is None or mask.any():
            address = int(at[0])
            self.cta.barriers.begin(address, count)
            self.shared.barriers[address - SHARED_BASE :][:8] = True

    def end_barrier(self, at: Array, mask: Array | None) -> None:
        if mask is None or mask.any():
            self.cta.barriers.end(int(at[0]))
            self.shared.barriers[int(at[0]) - SHARED_BASE :][:8] = False

    def arrive(self, at: Array, amount: Array, expect: bool, times: int, mask: Array | None) -> None:
        for lane in lanes_of(mask):
            barrier = self.cta.barriers.at(int(at[lane]))
            barrier.tell(self.races.hand_on(self.number))
            barrier.arrive(times if expect else int(amount[lane]), int(amount[lane]) if expect else 0)

    def await_barrier(self, at: Array, parity: Array) -> None:
        address, wanted = int(at[0]), int(parity[0])
        barrier = self.cta.barriers.at(address)

        def passed() -> bool:
            if not barrier.passed(wanted):
                return False
            if barrier.phase:
                self.races.learn(self.number, barrier.known)
                self.races.ended(self.number, self.races.barrier(address), barrier.phases)
            return True

        self.waits = passed

    def meet(self, number: int, threads: int | None) -> None:
        meeting = self.cta.barriers.numbered(number, threads)
        due = meeting.arrive(self.races.hand_on(self.number))

        def together() -> bool:
            if meeting.rounds == due:
                return False
            self.races.learn(self.number, meeting.known)
            return True

        self.waits = together

    # --- copies ---

    def copy(
        self, maps: Array, place: tuple[Array, ...], here: Array, barrier: Array | None, mask: Array | None
    ) -> None:
        for lane in lanes_of(mask):
            box, at = self.maps[int(maps[lane])], [int(p[lane]) for p in reversed(place)]
            self.memory.reach(box.storage, self.waited)
            if barrier is None:
                self._send(box, at, int(here[lane]))
            else:
                self._bring(box, at, int(here[lane]), int(barrier[lane]))

    def _bring(self, box: TensorMap, at: list[int], start: int, address: int) -> None:
        barrier, (to, words) = self.cta.barriers.at(address), box.places(start)
        self.races.write(words, self.number, self.races.barrier(address), barrier.phases + 1)
        barrier.tell(self.races.hand_on(self.number))

        def land() -> None:
            box.load(self.memory, self.shared, at, to)
            barrier.complete(box.bytes)

        self.cta.copies.append(land)

    def _send(self, box: TensorMap, at: list[int], start: int) -> None:
        of, words = box.places(start)
        self.races.read(words, self.number, self.races.boxes(self.number), self._groups_sent + 1)

        def land() -> None:
            box.store(self.memory, self.shared, at, of)

        self._sent[-1].append(land)
        self.cta.copies.append(land)

    def commit_copies(self) -> None:
        self._sent.append([])
        self._groups_sent += 1

    def is_sending(self) -> bool:
        """Whether it has not waited for a store of its own."""
        return len(self._sent) > 1 or bool(self._sent[0])

    def await_copies(self, left: int) -> None:
        """What is on its way out leaves shared memory now, at the latest."""
        while len(self._sent) - 1 > left:
            for land in self._sent.pop(0):
                if land in self.cta.copies:
                    self.cta.copies.remove(land)
                    land()
        self.races.ended(self.number, self.races.boxes(self.number), self._groups_sent - left)

    # --- products ---

    def product(
        self,
        rows: Array,
        a: Any,
        b: int,
        adds: bool,
        signs: tuple[int, int],
        across: tuple[bool, bool],
        kind: str,
    ) -> None:
        """Issues one: `rows` are its sums' registers, one for two columns; `a` are four registers, or a descriptor."""
        first, columns = int(rows[0]), 2 * len(rows)
        if first not in self.sums:
            self.sums[first] = rows, sums_of(self.R[rows].view(np.float32)).copy()
            self.R[rows] = UNSET
        elif len(self.sums[first][0]) != len(rows):
            raise AssertionError(f"products of {columns} columns and others add to the same registers")
        size = self.shared.size
        left = places(size, a, 16, 16 * (self.number % 4), across[0]) if isinstance(a, int) else fragment(a, kind)
        right = places(size, b, columns, 0, across[1])
        for operand in (left, right):
            if isinstance(operand, Places):
                agent = self.races.products(self.number)
                self.races.read(operand.words, self.number, agent, self._groups_issued + 1)
        self.products.append(Product(first, left, right, adds, signs, kind))
        self._groups[-1].append(first)

    def run_product(self) -> None:
        product = self.products.popleft()
        product.run(self.shared, self.sums[product.sums][1])

    def commit_products(self) -> None:
        self._groups.append([])
        self._groups_issued += 1

    def await_products(self, left: int) -> None:
        """All but the last `left` groups are done, and their sums in registers."""
        while len(self._groups) - 1 > left:
            done = self._groups.pop(0)
            while len(self.products) > sum(map(len, self._groups)):
                self.run_product()
            for first in set(done) - {f for group in self._groups for f in group}:
                rows, sums = self.sums.pop(first)
                self.R[rows] = np.ascontiguousarray(registers_of(sums)).view(np.uint32)
        self.races.ended(self.number, self.races.products(self.number), self._groups_issued - left)

    # --- running ---

    def branch(self, condition: Array, taken: int, other: int) -> int:
        """The next piece. Where lanes part, those that branch and the others run one after the other up to where they
        meet, each with all registers, of which it keeps its own lanes'."""
        if condition.all() or not condition.any():
            return taken if condition[0] else other
        meeting = self.code.meeting(taken, other)
        before = [bank.copy() for bank in self._banks]
        self._run_to(other, meeting)
        others = [bank.copy() for bank in self._banks]
        for bank, held in zip(self._banks, before, strict=True):
            bank[:] = held
        self._run_to(taken, meeting)
        for bank, held in zip(self._banks, others, strict=True):
            np.copyto(bank, held, where=~condition)
        return meeting

    def _run_to(self, piece: int, last: int) -> None:
        while piece != last:
            if piece not in self.code.pure:
                raise Unsupported("lanes of a warp part ways where more than registers changes")
            piece = self.code.pieces[piece](self)

    def ready(self) -> bool:
        if self.waits is not None and self.waits():
            self.waits = None
        return self.waits is None


def _rows_of_matrix(at: Array, i: int) -> Array:
    """Each lane's word of the `i`-th matrix of 8 rows of 16 bytes, whose addresses lanes 8 i and following have."""
    return (at[8 * i : 8 * i + 8][:, None] + np.arange(4) * 4).reshape(-1)
