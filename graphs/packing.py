"""Which pieces of images and videos replay together, and in the graph of which token budget.

Pure: the same arguments, the same plan. Attention never crosses frames, so a video may be cut between frames without
changing a bit of its output.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from operator import itemgetter
from typing import NamedTuple

from fusedvit.graphs.cost import CostModel, PriceList, price_list
from fusedvit.graphs.limits import Limits

TOKENS = "token budget"
FRAMES = "frame budget"

EXACT_PIECES = 6
CLOSE = 1.01  # a packing this near its lower bound ends the search
_BY_TOKENS = itemgetter(0)


# Work and Piece are made for every item of every call: a tuple costs a third of a frozen dataclass.
class Work(NamedTuple):
    """One image (frames = 1) or video; neither count is negative.

    Attributes:
        frames: attention sequences.
        frame_tokens: output tokens of each.
    """

    frames: int
    frame_tokens: int


class Piece(NamedTuple):
    """Frames `first_frame` to `first_frame + frames` of the caller's item number `item`, and their tokens."""

    item: int
    first_frame: int
    frames: int
    tokens: int


@dataclass(frozen=True)
class Batch:
    """Pieces, in the caller's order, that replay together in the graph of `budget`."""

    budget: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Overflow:
    """An item that no graph can hold, and the limit in its way: `TOKENS` or `FRAMES`."""

    piece: Piece
    reason: str


@dataclass(frozen=True)
class Plan:
    """Batches by their first piece, and whole items that go eager, in the caller's order."""

    batches: tuple[Batch, ...]
    overflow: tuple[Overflow, ...]


def pack(works: Sequence[Work], limits: Limits, cost: CostModel, *, split: bool = True) -> Plan:
    """Plans one call: every frame of every item in exactly one piece, at the least cost.

    A video over the frame or token budget is cut into as few, evenly filled pieces as possible; what still does not
    fit, such as a frame over the largest budget, overflows as a whole item. Items without tokens appear nowhere.

    The cost is minimal over all groupings of up to 6 pieces. Beyond, first-fit-decreasing by each budget, the cheapest
    of them improved by merging. Permuting the items permutes the plan: only equal pieces may change places.

    Args:
        works: the items; recent calls of equal layout are remembered.
        split: whether videos may be cut; not for a tower whose attention crosses frames.

    Raises:
        ValueError: the cost model lacks a budget of `limits`.
    """
    return _pack(tuple(works), limits, cost, split)


def sole_budget(tokens: int, items: int, limits: Limits, cost: CostModel) -> int | None:
    """The budget of the one batch that any `items` of together `tokens` are; None if that depends on their shapes.

    Provided that each has tokens, and that their frames are within `limits`.
    """
    if not 0 < items <= limits.max_items or not items <= tokens <= limits.largest:
        return None
    prices = price_list(limits, cost)
    price, budget = prices.cheapest(tokens)
    return budget if items == 1 or price <= prices.floor(tokens, 2) else None


@lru_cache(maxsize=256)
def _pack(works: tuple[Work, ...], limits: Limits, cost: CostModel, split: bool) -> Plan:
    pieces, overflow = _cut(works, limits, split)
    if not pieces:
        return Plan((), overflow)
    prices = price_list(limits, cost)
    groups = sorted([sorted(group) for group in _group(pieces, limits, prices)])
    return Plan(tuple([Batch(prices.cheapest(_tokens(group))[1], tuple(group)) for group in groups]), overflow)


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum([piece.tokens for piece in pieces])


def _frames(pieces: Sequence[Piece]) -> int:
    return sum([piece.frames for piece in pieces])


# ── items to pieces ──────────────────────────────────────────────────────────────────────────────────────────────────


def _cut(works: tuple[Work, ...], limits: Limits, split: bool) -> tuple[list[Piece], tuple[Overflow, ...]]:
    pieces: list[Piece] = []
    overflow: list[Overflow] = []
    largest, max_frames = limits.largest, limits.max_frames
    for item, (frames, frame_tokens) in enumerate(works):
        tokens = frames * frame_tokens
        if not tokens:
            continue
        if tokens <= largest and frames <= max_frames:
            pieces.append(Piece(item, 0, frames, tokens))
        elif frame_tokens > largest or not split:
            reason = TOKENS if tokens > largest else FRAMES
            overflow.append(Overflow(Piece(item, 0, frames, tokens), reason))
        else:
            pieces += _cut_video(item, frames, frame_tokens, min(max_frames, largest // frame_tokens))
    return pieces, tuple(overflow)


def _cut_video(item: int, frames: int, frame_tokens: int, most: int) -> list[Piece]:
    """As few pieces of at most `most` frames as possible, whose frames differ by at most one."""
    count = -(-frames // most)
    cuts = [frames * i // count for i in range(count + 1)]
    return [Piece(item, a, b - a, (b - a) * frame_tokens) for a, b in zip(cuts, cuts[1:], strict=False)]


# ── pieces to batches ────────────────────────────────────────────────────────────────────────────────────────────────


def _group(pieces: list[Piece], limits: Limits, prices: PriceList) -> list[list[Piece]]:
    if len(pieces) == 1:
        return [pieces]
    tokens = _tokens(pieces)
    if _fits(pieces, tokens, limits) and prices.cheapest(tokens)[0] <= prices.floor(tokens, 2):
        return [pieces]
    # Searched by size, so that the caller's order decides between equal pieces only.
    ordered = sorted(pieces, key=itemgetter(3, 2), reverse=True)
    if len(ordered) <= EXACT_PIECES:
        return _exact(ordered, limits, prices)
    return _heuristic(ordered, limits, prices)


def _fits(pieces: list[Piece], tokens: int, limits: Limits) -> bool:
    return tokens <= limits.largest and len(pieces) <= limits.max_items and _frames(pieces) <= limits.max_frames


def _exact(pieces: list[Piece], limits: Limits, prices: PriceList) -> list[list[Piece]]:
    """Over every subset: the cheapest batch that holds its first piece, and the rest, already solved."""
    subsets = 1 << len(pieces)
    members: list[list[Piece]] = [[]]
    for mask in range(1, subsets):
        last = mask.bit_length() - 1
        members.append([*members[mask ^ (1 << last)], pieces[last]])
    alone = [_price(group, limits, prices) for group in members]
    best, chosen = [0.0] * subsets, [0] * subsets
    for mask in range(1, subsets):
        others = rest = mask & (mask - 1)
        best[mask] = inf
        while True:  # `others` runs through the subsets of `rest`, the largest first
            batch = mask ^ rest | others
            price = alone[batch] + best[mask ^ batch]
            if price < best[mask]:
                best[mask], chosen[mask] = price, batch
            if not others:
                break
            others = (others - 1) & rest
    groups, mask = [], subsets - 1
    while mask:
        groups.append(members[chosen[mask]])
        mask ^= chosen[mask]
    return groups


def _price(pieces: list[Piece], limits: Limits, prices: PriceList) -> float:
    """Microseconds of one batch; infinite if it breaks a limit."""
    tokens = _tokens(pieces)
    return prices.cheapest(tokens)[0] if _fits(pieces, tokens, limits) else inf


def _heuristic(pieces: list[Piece], limits: Limits, prices: PriceList) -> list[list[Piece]]:
    """First-fit-decreasing into bins of one budget after the other, the budget with the cheapest tokens first."""
    tokens = _tokens(pieces)
    enough = CLOSE * prices.floor(tokens, _fewest_batches(pieces, tokens, limits))
    best: list[_Group] = []
    price = inf
    for rate, budget in prices.full_rates:
        if price <= max(enough, rate * tokens):  # full bins of this budget would cost as much
            break
        groups = _first_fit(pieces, budget, limits, prices)
        total = sum([group.price for group in groups])
        if total < price:
            best, price = groups, total
    if price > enough:
        best = _merge(best, limits, prices)
    return [group.pieces for group in best]


def _fewest_batches(pieces: list[Piece], tokens: int, limits: Limits) -> int:
    """A lower bound: what each limit asks for, and pieces of more than half a budget, which never meet."""
    halves = sum([2 * piece.tokens > limits.largest for piece in pieces])
    needs = ((tokens, limits.largest), (len(pieces), limits.max_items), (_frames(pieces), limits.max_frames))
    return max(halves, *(-(-need // limit) for need, limit in needs))


class _Group(NamedTuple):
    """A batch that is priced, but may yet be joined with another."""

    tokens: int
    frames: int
    price: float
    pieces: list[Piece]


@dataclass
class _Bin:
    """A batch under construction, and the room left in it."""

    size: int
    tokens: int
    frames: int
    pieces: list[Piece]


def _first_fit(pieces: list[Piece], budget: int, limits: Limits, prices: PriceList) -> list[_Group]:
    """Each piece, largest first, goes into the first bin with room, of size `budget` or what its first piece needs."""
    least = pieces[-1].tokens
    budgets, max_items, max_frames = limits.token_budgets, limits.max_items, limits.max_frames
    bins: list[_Bin] = []
    unfilled: list[_Bin] = []
    for piece in pieces:
        _, _, frames, tokens = piece
        for place in unfilled:
            if place.tokens >= tokens and place.frames >= frames:
                break
        else:
            size = budget if tokens <= budget else budgets[bisect_left(budgets, tokens)]
            place = _Bin(size, size, max_frames, [])
            bins.append(place)
            unfilled.append(place)
        place.tokens -= tokens
        place.frames -= frames
        place.pieces.append(piece)
        if place.tokens < least or not place.frames or len(place.pieces) == max_items:
            unfilled = [other for other in unfilled if other is not place]
    used = [(b.size - b.tokens, max_frames - b.frames, b.pieces) for b in bins]
    return [_Group(tokens, frames, prices.cheapest(tokens)[0], members) for tokens, frames, members in used]


def _merge(groups: list[_Group], limits: Limits, prices: PriceList) -> list[_Group]:
    """Joins each batch, the smallest first, with the smallest one that makes one replay cheaper than two."""
    rate = CLOSE * prices.full_rates[0][0]
    left, done = sorted(groups, key=_BY_TOKENS), []
    while left:
        group = left.pop(0)
        partner = None if group.price <= rate * group.tokens else _partner(group, left, limits, prices)
        if partner is None:
            done.append(group)
        else:
            insort(left, _join(group, left.pop(partner), prices), key=_BY_TOKENS)
    return done


def _partner(group: _Group, others: list[_Group], limits: Limits, prices: PriceList) -> int | None:
    """Which of `others`, ascending by tokens, is the first to be cheaper together with `group`."""
    for i, other in enumerate(others):
        tokens = group.tokens + other.tokens
        if tokens > limits.largest:
            return None
        saves = prices.cheapest(tokens)[0] < group.price + other.price
        items = len(group.pieces) + len(other.pieces)
        if saves and items <= limits.max_items and group.frames + other.frames <= limits.max_frames:
            return i
    return None


def _join(a: _Group, b: _Group, prices: PriceList) -> _Group:
    tokens = a.tokens + b.tokens
    return _Group(tokens, a.frames + b.frames, prices.cheapest(tokens)[0], a.pieces + b.pieces)
