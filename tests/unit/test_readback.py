"""The one host read of a call: what it waits for, and the memory that it is read into."""

import contextlib

import pytest
import torch

from fusedvit.model.ops import TORCH
from fusedvit.runtime.readback import SMALLEST_SLOT, ContentCheck, PendingRead, ReadBack, Slot

GRID = [(1, 4, 6), (2, 4, 4)]
ROWS = [list(row) for row in GRID]


@pytest.mark.parametrize("fails", [False, True])
def test_the_read_is_waited_for_after_the_walk_whatever_that_raises(fails: bool) -> None:
    order: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            order.append("waited")
            found.copy_(torch.tensor([1, 2]))

    def walk() -> bool:
        order.append("walked")
        if fails:
            raise AttributeError("no such module")
        return True

    found, slots = torch.zeros(2, dtype=torch.int32), list[Slot]()
    slot, expected = Slot(found, torch.tensor([*GRID, (9, 9, 9)])), torch.tensor([1, 2], dtype=torch.int32)
    read = PendingRead(Stream(), slot, expected, len(GRID), slots)  # type: ignore[arg-type]
    with pytest.raises(AttributeError) if fails else contextlib.nullcontext():
        assert read.wait(walk) == ReadBack(True, ROWS)
    assert order == ["walked", "waited"]
    assert slots == [] if fails else slots[0] is slot, "a slot is used again once it has been read"


@pytest.mark.parametrize("walk, content, want", [(True, [1, 2], True), (False, [1, 2], False), (True, [1, 3], False)])
def test_unchanged_means_modules_and_content(walk: bool, content: list[int], want: bool) -> None:
    slot = Slot(torch.tensor(content, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int64))
    read = PendingRead(None, slot, torch.tensor([1, 2], dtype=torch.int32), 0, [])
    assert read.wait(lambda: walk) == ReadBack(want, [])


def test_a_slot_belongs_to_one_read_at_a_time() -> None:
    check = ContentCheck.of([torch.ones(3)], TORCH)
    first, second = (check._slot(items) for items in (2, SMALLEST_SLOT + 1))
    assert first.rows.shape[0] == SMALLEST_SLOT and second.rows.shape[0] == 2 * SMALLEST_SLOT
    check.slots.append(first)
    assert check._slot(SMALLEST_SLOT) is first and check._slot(1) is not first and check.slots == []
    check.slots.append(first)
    assert check._slot(SMALLEST_SLOT + 1) is not first


def test_a_slot_of_one_mode_is_used_again_in_another() -> None:
    check, grid = ContentCheck.of([torch.ones(3)], TORCH), torch.tensor(GRID)
    for mode in (torch.inference_mode(), contextlib.nullcontext(), torch.no_grad()):
        with mode:
            assert check.begin(None, True, grid).wait(lambda: True) == ReadBack(True, ROWS)
    assert len(check.slots) == 1
