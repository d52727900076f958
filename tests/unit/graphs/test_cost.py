"""The cost model against its formula, and the price list against the model."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusedvit.graphs.cost import CostModel, price_list
from fusedvit.graphs.limits import Limits
from tests.unit.graphs.plan_rules import even_cost

LIMITS = Limits((64, 256, 1024, 4096), 64, 256)


@st.composite
def models(draw) -> tuple[Limits, CostModel]:
    budgets = tuple(sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=6))))
    costs = st.lists(st.floats(0, 3000), min_size=len(budgets), max_size=len(budgets)).map(tuple)
    return Limits(budgets, 1, 1), CostModel(budgets, draw(costs), draw(costs))


def test_cost_is_a_line_per_budget():
    model = CostModel((64, 256), (100.0, 120.0), (2000.0, 1500.0))
    assert model.cost(64, 0) == 100.0
    assert model.cost(64, 64) == pytest.approx(228.0)
    assert model.cost(256, 64) == pytest.approx(216.0)


def test_an_even_model_follows_the_content():
    model = even_cost(LIMITS)
    assert model.cost(4096, 64) < 1.05 * model.cost(64, 64)
    assert model.cost(4096, 4096) > 10 * model.cost(4096, 64)
    assert list(model.empty_us) == sorted(set(model.empty_us))


def test_measured_goes_through_two_samples():
    samples = [(64, 1, 502.0), (64, 64, 565.0), (256, 1, 511.0), (256, 256, 1021.0)]
    model = CostModel.measured(samples)
    assert model.budgets == (64, 256)
    for budget, tokens, us in samples:
        assert model.cost(budget, tokens) == pytest.approx(us)


def test_measured_fits_more_samples_and_clamps_noise():
    model = CostModel.measured([(8, 0, 10.0), (8, 4, 11.0), (8, 4, 13.0), (8, 8, 14.0), (16, 1, 30.0), (16, 16, 29.0)])
    assert model.cost(8, 4) == pytest.approx(12.0)
    assert model.slope_ns[1] == 0.0 and model.cost(16, 3) == pytest.approx(29.5)
    assert CostModel.measured([(8, 4, 1.0), (8, 8, 9.0)]).empty_us == (0.0,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (((), (), ()), "of one length, at least 1"),
        (((64,), (1.0, 2.0), (1.0,)), r"of one length, at least 1; got \(1, 2, 1\)"),
        (((64, 64), (1.0, 2.0), (1.0, 1.0)), r"budgets must ascend, each once; got \(64, 64\)"),
        (((64,), (-1.0,), (1.0,)), "empty_us must be finite and not negative"),
        (((64,), (1.0,), (float("nan"),)), "slope_ns must be finite and not negative"),
    ],
)
def test_impossible_models(fields, message):
    with pytest.raises(ValueError, match=message):
        CostModel(*fields)


def test_questions_without_an_answer():
    model = even_cost(LIMITS)
    with pytest.raises(ValueError, match="budget must be one of .* got 65"):
        model.cost(65, 1)
    with pytest.raises(ValueError, match="budget 64 has no room for 65 tokens"):
        model.cost(64, 65)
    with pytest.raises(ValueError, match=r"budget 64 needs samples of two token counts, got \[3\]"):
        CostModel.measured([(64, 3, 1.0), (64, 3, 2.0)])
    with pytest.raises(ValueError, match="at least 1"):
        CostModel.measured([])
    with pytest.raises(ValueError, match=r"lacks \[4096\]"):
        price_list(LIMITS, even_cost(Limits((64, 256, 1024, 8192), 1, 1)))


@given(models(), st.integers(1, 300))
@settings(deadline=None)
def test_cheapest_replay(case, tokens):
    limits, model = case
    assume(tokens <= limits.largest)
    price, budget = price_list(limits, model).cheapest(tokens)
    by_budget = {b: model.cost(b, tokens) for b in limits.token_budgets if b >= tokens}
    assert price == pytest.approx(min(by_budget.values()), rel=1e-9, abs=1e-9)
    assert by_budget[budget] == pytest.approx(price, rel=1e-9, abs=1e-9)


def test_smallest_of_equally_cheap_budgets():
    model = CostModel((64, 256), (100.0, 100.0), (1000.0, 1000.0))
    assert price_list(Limits((64, 256), 1, 1), model).cheapest(64)[1] == 64


def test_larger_budget_that_is_cheaper_for_some_contents_only():
    model = CostModel((64, 256), (100.0, 130.0), (2000.0, 1000.0))
    prices = price_list(Limits((64, 256), 1, 1), model)
    assert [prices.cheapest(tokens)[1] for tokens in (29, 30, 31)] == [64, 64, 256]


@given(models(), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=8))
@settings(deadline=None)
def test_no_batches_undercut_the_floor(case, chosen):
    """Any batches at all, as (budget, tokens): together they cost at least the floor of their tokens and number."""
    limits, model = case
    batches = [(limits.token_budgets[i % len(limits.token_budgets)], tokens) for i, tokens in chosen]
    batches = [(budget, min(tokens, budget)) for budget, tokens in batches]
    total = sum(model.cost(budget, tokens) for budget, tokens in batches)
    floor = price_list(limits, model).floor(sum(tokens for _, tokens in batches), len(batches))
    assert floor <= total + 1e-6


def test_floor_between_its_ends():
    """Two batches of 104 tokens: neither the cheapest start nor the cheapest token alone gives the bound."""
    model = CostModel((64, 256), (100.0, 200.0), (2000.0, 1800.0))
    least = min(
        model.cost(a, n) + model.cost(b, 208 - n)
        for a in (64, 256)
        for b in (64, 256)
        for n in range(209)
        if n <= a and 208 - n <= b
    )
    floor = price_list(Limits((64, 256), 1, 1), model).floor(208, 2)
    assert max(2 * 100.0 + 2.0 * 208, 208 * (200 / 256 + 1.8)) < floor <= least


def test_floor_is_met_by_full_batches():
    model = CostModel((64, 256), (100.0, 120.0), (2000.0, 1500.0))
    assert price_list(Limits((64, 256), 1, 1), model).floor(512, 2) == pytest.approx(2 * model.cost(256, 256))
