"""The rules of plan_rules.py have teeth: each planted bug is found."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fusedvit.graphs.limits import check_limits
from fusedvit.graphs.packing import Batch, ItemSize, Piece, Plan, pack
from tests.unit.graphs.plan_rules import faults, pieces_of

LIMITS = check_limits((64, 256, 1024, 4096), 8, 32)
SIZES = [ItemSize(1, 300), ItemSize(40, 100), ItemSize(1, 5000), ItemSize(1, 3900), ItemSize(0, 9)]
Change = Callable[[Plan], Plan]


def of_the_first(change: Callable[[tuple[Piece, ...]], tuple[Piece, ...]]) -> Change:
    """Changes the pieces of the first batch."""
    return lambda plan: replace(
        plan, batches=(replace(plan.batches[0], pieces=change(plan.batches[0].pieces)), *plan.batches[1:])
    )


def of_the_last_piece(change: Callable[[Piece], tuple[Piece, ...]]) -> Change:
    return of_the_first(lambda pieces: (*pieces[:-1], *change(pieces[-1])))


def of_batches(change: Callable[[Batch], Batch]) -> Change:
    return lambda plan: replace(plan, batches=tuple(map(change, plan.batches)))


def in_two(piece: Piece) -> tuple[Piece, ...]:
    item, start, frames, tokens = piece
    each = tokens // frames
    return Piece(item, start, 1, each), Piece(item, start + 1, frames - 1, tokens - each)


PLANTED: dict[str, tuple[Change, str]] = {
    "a piece missing": (of_the_first(lambda pieces: pieces[1:]), "item 0: not every frame once"),
    "a piece twice": (
        lambda plan: replace(plan, batches=(*plan.batches, Batch(4096, plan.batches[-1].pieces))),
        "not every frame once",
    ),
    "a frame short": (
        of_the_last_piece(lambda p: (p._replace(frames=p.frames - 1, tokens=p.tokens - p.tokens // p.frames),)),
        "item 1: not every frame once",
    ),
    "tokens miscounted": (
        of_the_last_piece(lambda p: (p._replace(tokens=p.tokens - 1),)),
        "item 1: tokens miscounted",
    ),
    "all in one": (
        lambda plan: replace(plan, batches=(Batch(4096, tuple(pieces_of(plan))),)),
        "too many frames",
    ),
    "a small budget": (of_batches(lambda batch: replace(batch, budget=64)), "too many tokens"),
    "batches backwards": (lambda plan: replace(plan, batches=plan.batches[::-1]), "batches out of order"),
    "pieces backwards": (of_batches(lambda b: replace(b, pieces=b.pieces[::-1])), "pieces out of order"),
    "needless cuts": (of_the_last_piece(in_two), "item 1: not as few pieces as possible"),
    "no overflow": (lambda plan: replace(plan, overflow=()), "item 2: overflow is []"),
    "overflow miscounted": (
        lambda plan: replace(plan, overflow=tuple(p._replace(tokens=p.tokens - 1) for p in plan.overflow)),
        "item 2: overflow is",
    ),
}


@pytest.mark.parametrize("plant, said", PLANTED.values(), ids=PLANTED)
def test_planted_bugs_are_found(plant: Change, said: str) -> None:
    plan = pack(SIZES, LIMITS)
    assert faults(SIZES, LIMITS, plan) == []
    found = faults(SIZES, LIMITS, plant(plan))
    assert any(said in fault for fault in found), found
