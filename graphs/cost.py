"""What a replay costs: a fixed part per token budget, and a part that follows the tokens in it.

    cost(b, t) = empty(b) + slope(b) * t        t <= b

Captured kernels read true counts from device memory, so that padding costs little: a block past the content exits.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite

from fusedvit.graphs.limits import Limits

IDLE_SHARE = 0.001  # what a token of room costs beside a token of content


@dataclass(frozen=True)
class CostModel:
    """Cost of a replay by token budget.

    Attributes:
        budgets: token budgets, ascending.
        empty_us: per budget, microseconds of a replay with no content to speak of.
        slope_ns: per budget, nanoseconds per token of content.

    Raises:
        ValueError: lengths that differ, budgets that do not ascend, or a cost that is negative or not finite.
    """

    budgets: tuple[int, ...]
    empty_us: tuple[float, ...]
    slope_ns: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = (len(self.budgets), len(self.empty_us), len(self.slope_ns))
        if len(set(lengths)) != 1 or not self.budgets:
            raise ValueError(f"budgets, empty_us and slope_ns must be of one length, at least 1; got {lengths}")
        if list(self.budgets) != sorted(set(self.budgets)):
            raise ValueError(f"budgets must ascend, each once; got {self.budgets}")
        for name, costs in (("empty_us", self.empty_us), ("slope_ns", self.slope_ns)):
            if not all(isfinite(c) and c >= 0 for c in costs):
                raise ValueError(f"{name} must be finite and not negative, got {costs}")

    @classmethod
    def even(cls, limits: Limits, empty_us: float, slope_ns: float) -> "CostModel":
        """When nothing was measured: `empty_us` a replay and a trifle per token of its budget, one slope for all."""
        budgets = limits.token_budgets
        empty = tuple(empty_us + IDLE_SHARE * slope_ns * b / 1000 for b in budgets)
        return cls(budgets, empty, (slope_ns,) * len(budgets))

    @classmethod
    def measured(cls, samples: Sequence[tuple[int, int, float]]) -> "CostModel":
        """From samples (budget, tokens, microseconds): two a budget, nearly empty and full; more are fitted.

        What noise makes negative counts as 0.

        Raises:
            ValueError: a budget without samples of two different token counts, or no budget.
        """
        budgets = tuple(sorted({budget for budget, _, _ in samples}))
        lines = [_fit_line(b, [(n, us) for budget, n, us in samples if budget == b]) for b in budgets]
        return cls(budgets, tuple(empty for empty, _ in lines), tuple(1000 * slope for _, slope in lines))

    def cost(self, budget: int, tokens: int) -> float:
        """Microseconds of a replay of `budget` that holds `tokens`.

        Raises:
            ValueError: a budget that the model does not know, or more tokens than it has room for.
        """
        if budget not in self.budgets:
            raise ValueError(f"budget must be one of {self.budgets}, got {budget}")
        if tokens > budget:
            raise ValueError(f"budget {budget} has no room for {tokens} tokens")
        i = self.budgets.index(budget)
        return self.empty_us[i] + self.slope_ns[i] * tokens / 1000


def _fit_line(budget: int, points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares: (microseconds at no tokens, microseconds per token), neither below 0."""
    mean_n = sum(n for n, _ in points) / len(points)
    mean_us = sum(us for _, us in points) / len(points)
    spread = sum((n - mean_n) ** 2 for n, _ in points)
    if spread == 0:
        raise ValueError(f"budget {budget} needs samples of two token counts, got {sorted({n for n, _ in points})}")
    slope = max(0.0, sum((n - mean_n) * (us - mean_us) for n, us in points) / spread)
    return max(0.0, mean_us - slope * mean_n), slope


Line = tuple[float, float, int]  # microseconds at no tokens, microseconds per token, budget


@dataclass(frozen=True)
class PriceList:
    """A cost model made ready for many questions.

    Attributes:
        budgets: token budgets, ascending.
        choices: for tokens whose smallest budget is the i-th, the budgets that may be cheapest, smallest first.
        full_rates: pairs (microseconds per token of a full replay, budget), the cheapest first.
        bounds: pairs (microseconds per batch, microseconds per token), each a lower bound of any packing.
    """

    budgets: tuple[int, ...]
    choices: tuple[tuple[Line, ...], ...]
    full_rates: tuple[tuple[float, int], ...]
    bounds: tuple[tuple[float, float], ...]

    def cheapest(self, tokens: int) -> tuple[float, int]:
        """(microseconds, budget) of the cheapest replay that holds `tokens`, the smallest budget among equals."""
        best, chosen = inf, 0
        for empty, slope, budget in self.choices[bisect_left(self.budgets, tokens)]:
            price = empty + slope * tokens
            if price < best:
                best, chosen = price, budget
        return best, chosen

    def floor(self, tokens: int, batches: int) -> float:
        """Microseconds that no packing of `tokens` into `batches` or more can undercut."""
        return max([per_batch * batches + per_token * tokens for per_batch, per_token in self.bounds])


@lru_cache(maxsize=64)
def price_list(limits: Limits, cost: CostModel) -> PriceList:
    """Prices of the budgets of `limits`.

    Raises:
        ValueError: a budget that the model does not know.
    """
    missing = set(limits.token_budgets) - set(cost.budgets)
    if missing:
        raise ValueError(f"cost model must know every token budget; it lacks {sorted(missing)}")
    known = {b: (e, s / 1000, b) for b, e, s in zip(cost.budgets, cost.empty_us, cost.slope_ns, strict=True)}
    lines = [known[b] for b in limits.token_budgets]
    fewest = [1, *(b + 1 for b in limits.token_budgets[:-1])]
    choices = tuple(_worth(lines[i:], fewest[i], limits.token_budgets[i]) for i in range(len(lines)))
    rates = sorted((empty / budget + slope, budget) for empty, slope, budget in lines)
    return PriceList(limits.token_budgets, choices, tuple(rates), _bounds(lines))


def _worth(lines: Sequence[Line], fewest: int, most: int) -> tuple[Line, ...]:
    """Without lines that lie nowhere below the first one between `fewest` and `most` tokens."""
    first = lines[0]
    ends = (fewest, most)
    return (first, *(line for line in lines[1:] if any(line[0] + line[1] * n < first[0] + first[1] * n for n in ends)))


def _bounds(lines: Sequence[Line]) -> tuple[tuple[float, float], ...]:
    """Lower bounds by linear duality: `m` per batch and `k` per token, such that m + k t <= cost(b, t) for all t <= b.

    That is m <= empty(b) and k <= (empty(b) - m) / b + slope(b) for all b. The best m lies at an end, or where two
    budgets change places in the minimum over b.
    """
    highest = min(empty for empty, _, _ in lines)
    turns = {0.0, highest}
    for i, (empty, slope, budget) in enumerate(lines):
        for other_empty, other_slope, other in lines[:i]:
            rise = empty / budget + slope - other_empty / other - other_slope
            turn = rise / (1 / budget - 1 / other)
            turns.add(min(max(turn, 0.0), highest))
    return tuple((m, min((empty - m) / budget + slope for empty, slope, budget in lines)) for m in sorted(turns))
