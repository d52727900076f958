"""Plans against their rules and against brute force."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.graphs import packing
from fusedvit.graphs.cost import CostModel, price_list
from fusedvit.graphs.limits import Limits, check_limits
from fusedvit.graphs.packing import FRAMES, TOKENS, Batch, Overflow, Piece, Plan, Work, pack
from tests.unit.graphs.plan_rules import even_cost, faults, least_cost, pieces_of, shapes, total

LIMITS = check_limits((64, 256, 1024, 4096), 8, 32)


# ── random cases ─────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def limits_(draw) -> Limits:
    budgets = tuple(sorted(draw(st.sets(st.integers(4, 300), min_size=1, max_size=5))))
    max_items = draw(st.integers(1, min(12, budgets[-1])))
    return check_limits(budgets, max_items, draw(st.integers(max_items, 40)))


def works_(max_size: int):
    image = st.builds(Work, st.just(1), st.integers(0, 320))
    video = st.builds(Work, st.integers(0, 50), st.integers(0, 60))
    return st.lists(st.one_of(image, video), max_size=max_size)


@st.composite
def cost_of(draw, limits: Limits, arbitrary: bool) -> CostModel:
    budgets = limits.token_budgets
    if not arbitrary:
        return even_cost(limits)
    costs = st.lists(st.floats(0, 3000), min_size=len(budgets), max_size=len(budgets)).map(tuple)
    return CostModel(budgets, draw(costs), draw(costs))


@st.composite
def cases(draw, max_size: int = 30):
    limits = draw(limits_())
    return draw(works_(max_size)), limits, draw(cost_of(limits, draw(st.booleans())))


@given(cases(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_every_rule_holds(case, split):
    works, limits, cost = case
    assert faults(works, limits, pack(works, limits, cost, split=split), split) == []


@given(cases(max_size=6))
@settings(deadline=None, max_examples=300)
def test_cost_is_minimal_for_few_pieces(case):
    works, limits, cost = case
    plan = pack(works, limits, cost)
    if len(pieces_of(plan)) <= packing.EXACT_PIECES:
        assert total(plan, cost) == pytest.approx(least_cost(pieces_of(plan), limits, cost), rel=1e-9, abs=1e-6)


@given(cases())
@settings(deadline=None)
def test_budget_of_each_batch_is_its_cheapest(case):
    works, limits, cost = case
    for batch in pack(works, limits, cost).batches:
        tokens = sum(piece.tokens for piece in batch.pieces)
        least = min(cost.cost(b, tokens) for b in limits.token_budgets if b >= tokens)
        assert cost.cost(batch.budget, tokens) == pytest.approx(least, rel=1e-9, abs=1e-6)


@given(cases(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_of_items_does_not_matter(case, shuffler):
    works, limits, cost = case
    shuffled = list(works)
    shuffler.shuffle(shuffled)
    assert shapes(pack(shuffled, limits, cost)) == shapes(pack(works, limits, cost))


@given(cases())
@settings(deadline=None)
def test_same_plan_without_the_cache(case):
    works, limits, cost = case
    plan = pack(works, limits, cost)
    packing._pack.cache_clear()
    assert pack(tuple(works), replace(limits), replace(cost)) == plan


@given(cases(max_size=6), st.integers(1, 300))
@settings(deadline=None)
def test_another_budget_never_costs_more(case, budget):
    """Below the largest one, which decides where videos are cut."""
    works, limits, cost = case
    plan = pack(works, limits, cost)
    if budget >= limits.largest or len(pieces_of(plan)) > packing.EXACT_PIECES:
        return
    more = tuple(sorted({*limits.token_budgets, budget}))
    known = dict(zip(cost.budgets, zip(cost.empty_us, cost.slope_ns, strict=True), strict=True))
    lines = [known.get(b, (100.0, 2000.0)) for b in more]
    richer = CostModel(more, tuple(e for e, _ in lines), tuple(s for _, s in lines))
    better = pack(works, replace(limits, token_budgets=more), richer)
    assert total(better, richer) <= total(plan, cost) * (1 + 1e-9) + 1e-6


# Replays that follow their content, as measured ones do: an empty replay costs as much as some 80 tokens.
PLAUSIBLE = {
    "default": even_cost(check_limits((64, 256, 1024, 4096, 16384), 64, 256)),
    "large budgets faster": CostModel(
        (64, 256, 1024, 4096, 16384), (620.0, 640.0, 700.0, 830.0, 1200.0), (9500.0, 9200.0, 8400.0, 8000.0, 7900.0)
    ),
    "largest slower": CostModel(
        (64, 256, 1024, 4096, 16384), (620.0, 640.0, 700.0, 830.0, 1200.0), (9500.0, 9200.0, 8400.0, 8000.0, 8300.0)
    ),
}


def random_works(rng: random.Random, count: int, most: int) -> list[Work]:
    works = []
    for _ in range(count):
        frames = rng.randint(2, 16) if rng.random() < 0.3 else 1
        works.append(Work(frames, rng.randint(1, most // frames)))
    return works


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_many_pieces_cost_little_more_than_the_lower_bound(name):
    """Worst seen: 1.003, 1.027 and 1.024 times the bound; mean 1.001, 1.003 and 1.011."""
    cost = PLAUSIBLE[name]
    limits = check_limits(cost.budgets, 64, 256)
    rng = random.Random(5)
    for trial in range(400):
        plan = pack(random_works(rng, rng.randint(7, 64), (512, 4096, 16384)[trial % 3]), limits, cost)
        pieces = pieces_of(plan)
        tokens = sum(piece.tokens for piece in pieces)
        batches = max(-(-tokens // limits.largest), -(-sum(p.frames for p in pieces) // limits.max_frames))
        assert total(plan, cost) <= 1.25 * price_list(limits, cost).floor(tokens, batches)


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_seven_pieces_cost_nearly_the_minimum(name):
    """Worst seen: 1.003 times the minimum."""
    cost = PLAUSIBLE[name]
    limits = check_limits(cost.budgets, 64, 256)
    rng = random.Random(6)
    for trial in range(60):
        plan = pack(random_works(rng, 7, (512, 4096, 16384)[trial % 3]), limits, cost)
        assert total(plan, cost) <= 1.02 * least_cost(pieces_of(plan), limits, cost)


# ── cases by hand ────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_of(*works: Work, limits: Limits = LIMITS, split: bool = True) -> Plan:
    return pack(works, limits, even_cost(limits), split=split)


def test_image_and_video_share_a_batch():
    plan = plan_of(Work(1, 196), Work(4, 49), Work(1, 64))
    assert plan == Plan((Batch(1024, (Piece(0, 0, 1, 196), Piece(1, 0, 4, 196), Piece(2, 0, 1, 64))),), ())


def test_nothing_to_do():
    assert plan_of() == Plan((), ())
    assert plan_of(Work(0, 196), Work(1, 0)) == Plan((), ())


def test_items_without_tokens_keep_their_number():
    plan = plan_of(Work(0, 196), Work(1, 64), Work(0, 5000))
    assert plan == Plan((Batch(64, (Piece(1, 0, 1, 64),)),), ())


def test_nine_frames_under_a_frame_budget_of_three():
    limits = check_limits((64,), 2, 3)
    plan = plan_of(Work(9, 4), limits=limits)
    assert [batch.pieces for batch in plan.batches] == [(Piece(0, first, 3, 12),) for first in (0, 3, 6)]


def test_video_over_the_token_budget():
    plan = plan_of(Work(10, 1000))  # four frames a budget
    assert pieces_of(plan) == [Piece(0, 0, 3, 3000), Piece(0, 3, 3, 3000), Piece(0, 6, 4, 4000)]
    assert plan.overflow == ()


def test_limits_by_one():
    assert len(plan_of(*[Work(1, 4)] * 8).batches) == 1
    assert len(plan_of(*[Work(1, 4)] * 9).batches) == 2  # items
    assert len(plan_of(Work(16, 4), Work(16, 4)).batches) == 1
    assert len(plan_of(Work(16, 4), Work(17, 4)).batches) == 2  # frames
    assert len(plan_of(Work(1, 4000), Work(1, 96)).batches) == 1
    assert len(plan_of(Work(1, 4000), Work(1, 97)).batches) == 2  # tokens


def test_overflow_has_a_reason():
    plan = plan_of(Work(1, 4097), Work(1, 4096), Work(2, 5000))
    assert plan.overflow == (Overflow(Piece(0, 0, 1, 4097), TOKENS), Overflow(Piece(2, 0, 2, 10000), TOKENS))
    assert plan.batches == (Batch(4096, (Piece(1, 0, 1, 4096),)),)


def test_overflow_where_videos_stay_whole():
    plan = plan_of(Work(33, 10), Work(32, 10), Work(32, 129), split=False)
    assert plan.overflow == (Overflow(Piece(0, 0, 33, 330), FRAMES), Overflow(Piece(2, 0, 32, 4128), TOKENS))
    assert pieces_of(plan) == [Piece(1, 0, 32, 320)]


def test_two_replays_where_padding_is_dear():
    limits = check_limits((64, 1024), 8, 32)
    works = [Work(1, 60), Work(1, 60)]
    assert [b.budget for b in plan_of(*works, limits=limits).batches] == [1024]
    dear = CostModel((64, 1024), (64.0, 1024.0), (0.0, 0.0))
    assert [b.budget for b in pack(works, limits, dear).batches] == [64, 64]


def test_one_batch_that_was_searched_for_keeps_the_order():
    limits = check_limits((4, 6), 2, 2)
    plan = pack([Work(1, 1), Work(1, 5)], limits, CostModel((4, 6), (0.0, 1.0), (0.0, 0.0)))
    assert plan == Plan((Batch(6, (Piece(0, 0, 1, 1), Piece(1, 0, 1, 5))),), ())


def test_two_replays_cheaper_by_less_than_a_third():
    works, limits = [Work(1, 60), Work(1, 60)], check_limits((64, 128), 8, 32)
    plan = pack(works, limits, CostModel((64, 128), (64.0, 150.0), (0.0, 0.0)))
    assert [b.budget for b in plan.batches] == [64, 64]


# Seven images, so that nothing is searched through: first-fit leaves batches that are cheaper together.
@pytest.mark.parametrize(
    ("tokens", "limits", "cost"),
    [
        ((1, 12, 12, 2, 6, 2, 8), Limits((8, 16, 32), 9, 9), CostModel((8, 16, 32), (2.0, 22.0, 26.0), (0.0,) * 3)),
        # joined, two fill the largest budget to the last token
        ((3, 10, 1, 6, 3, 10, 3), Limits((10, 20), 4, 9), CostModel((10, 20), (12.0, 21.0), (1000.0, 1000.0))),
    ],
)
def test_batches_are_joined(tokens, limits, cost):
    works = [Work(1, n) for n in tokens]
    plan = pack(works, limits, cost)
    assert faults(works, limits, plan) == []
    assert total(plan, cost) == pytest.approx(least_cost(pieces_of(plan), limits, cost))


def test_joined_batches_keep_to_their_items():
    limits, cost = Limits((10, 20), 2, 9), CostModel((10, 20), (3.0, 12.0), (1000.0, 2000.0))
    works = [Work(1, n) for n in (5, 12, 4, 12, 1, 12, 3)]  # two batches with three items would be cheaper as one
    assert faults(works, limits, pack(works, limits, cost)) == []


def test_remembers_a_bounded_number_of_layouts():
    for frames in range(1, 1000):
        plan_of(Work(frames, 1))
    info = packing._pack.cache_info()
    assert info.maxsize is not None and info.currsize <= info.maxsize


def test_cost_model_of_other_budgets():
    with pytest.raises(ValueError, match=r"lacks \[64, 256, 1024\]"):
        pack([Work(1, 1)], LIMITS, even_cost(check_limits((4096,), 1, 1)))
