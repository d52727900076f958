"""The rules of plan_rules.py have teeth: each planted bug is found."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fusedvit.graphs.limits import check_limits
from fusedvit.graphs.packing import FRAMES, Batch, Piece, Plan, Work, pack
from tests.unit.graphs.plan_rules import faults, pieces_of

LIMITS = check_limits((64, 256, 1024, 4096), 8, 32)
WORKS = [Work(1, 300), Work(40, 100), Work(1, 5000), Work(1, 3900), Work(0, 9)]


def without_a_piece(plan: Plan) -> Plan:
    first, *others = plan.batches
    return replace(plan, batches=(replace(first, pieces=first.pieces[1:]), *others))


def with_a_piece_twice(plan: Plan) -> Plan:
    return replace(plan, batches=(*plan.batches, Batch(4096, plan.batches[-1].pieces)))


def with_a_frame_short(plan: Plan) -> Plan:
    return edit_piece(plan, lambda p: p._replace(frames=p.frames - 1, tokens=p.tokens - p.tokens // p.frames))


def with_tokens_miscounted(plan: Plan) -> Plan:
    return edit_piece(plan, lambda p: p._replace(tokens=p.tokens - 1))


def edit_piece(plan: Plan, edit: Callable[[Piece], Piece]) -> Plan:
    first, *others = plan.batches
    return replace(plan, batches=(replace(first, pieces=(*first.pieces[:-1], edit(first.pieces[-1]))), *others))


def with_all_in_one(plan: Plan) -> Plan:
    return replace(plan, batches=(Batch(4096, tuple(pieces_of(plan))),))


def with_a_small_budget(plan: Plan) -> Plan:
    return replace(plan, batches=tuple(replace(batch, budget=64) for batch in plan.batches))


def backwards(plan: Plan) -> Plan:
    return replace(plan, batches=plan.batches[::-1])


def backwards_inside(plan: Plan) -> Plan:
    return replace(plan, batches=tuple(replace(batch, pieces=batch.pieces[::-1]) for batch in plan.batches))


def with_needless_cuts(plan: Plan) -> Plan:
    first, *others = plan.batches
    _, start, frames, tokens = first.pieces[-1]
    frame_tokens = tokens // frames
    halves = (Piece(1, start, 1, frame_tokens), Piece(1, start + 1, frames - 1, tokens - frame_tokens))
    return replace(plan, batches=(replace(first, pieces=(*first.pieces[:-1], *halves)), *others))


def without_overflow(plan: Plan) -> Plan:
    return replace(plan, overflow=())


def with_another_reason(plan: Plan) -> Plan:
    return replace(plan, overflow=tuple(replace(over, reason=FRAMES) for over in plan.overflow))


PLANTED = {
    without_a_piece: "item 0: not every frame once",
    with_a_piece_twice: "not every frame once",
    with_a_frame_short: "item 1: not every frame once",
    with_tokens_miscounted: "item 1: tokens miscounted",
    with_all_in_one: "too many frames",
    with_a_small_budget: "too many tokens",
    backwards: "batches out of order",
    backwards_inside: "pieces out of order",
    with_needless_cuts: "item 1: not as few pieces as possible",
    without_overflow: "item 2: overflow is {}",
    with_another_reason: "item 2: overflow is",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant):
    plan = pack(WORKS, LIMITS)
    assert faults(WORKS, LIMITS, plan) == []
    found = faults(WORKS, LIMITS, plant(plan))
    assert any(PLANTED[plant] in fault for fault in found), found
