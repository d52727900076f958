"""Limits of one replay: token budgets, items and frames, given by the user or inferred from the tower and free memory.

Tokens are output tokens: patches after the spatial merge. A frame is one attention sequence, of at least one token.
All budgets share one set of buffers, so one more graph costs a fraction of a MiB. There are therefore always at least
four budgets per octave below the largest one, and a small batch runs on tiles chosen for its own size.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

DEFAULT_ITEMS = 64
DEFAULT_FRAMES = 256  # attention sequences: a video of 64 pictures has 32, one for each two pictures
FRAMES_PER_ITEM = 4
MOST = 2**31 - 1  # upper limit of every count


@dataclass(frozen=True)
class Limits:
    """Limits of one replay, created and checked by `check_limits` or `infer_limits`.

    Attributes:
        token_budgets: tokens that each captured graph has room for, ascending.
        max_items: most images, videos and parts of videos in one batch.
        max_frames: most frames in one batch, over all its pieces.
    """

    token_budgets: tuple[int, ...]
    max_items: int
    max_frames: int

    @property
    def largest(self) -> int:
        return self.token_budgets[-1]

    def smallest_for(self, tokens: int) -> int | None:
        """The smallest budget that holds `tokens`; None if none does."""
        i = bisect_left(self.token_budgets, tokens)
        return self.token_budgets[i] if i < len(self.token_budgets) else None


def check_limits(token_budgets: Sequence[int], max_items: int, max_frames: int) -> Limits:
    """Checks limits that a user gave.

    Raises:
        TypeError: an option is not an integer, or `token_budgets` not a sequence of integers.
        ValueError: budgets are empty, not positive or not strictly ascending; more items than the largest budget has
            tokens (an item has at least one); fewer frames than items (an item has at least one).
    """
    budgets = _check_budgets(token_budgets)
    _check_count("max_items", max_items)
    _check_count("max_frames", max_frames)
    if max_items > budgets[-1]:
        raise ValueError(
            f"fusedvit: max_items must be at most the largest of token_budgets, {budgets[-1]}, "
            f"as every item has a token; got {max_items}"
        )
    if max_frames < max_items:
        raise ValueError(
            f"fusedvit: max_frames must be at least max_items, {max_items}, as every item has a frame; got {max_frames}"
        )
    return Limits(budgets, max_items, max_frames)


def infer_limits(
    *,
    smallest: int,
    largest: int,
    dense: Iterable[int],
    bytes_per_token: int,
    free_bytes: int,
    share: float,
    token_budgets: Sequence[int] | None = None,
    max_items: int | None = None,
    max_frames: int | None = None,
) -> Limits:
    """Infers limits that a user left out (None) from the tower and free memory; given ones are checked and kept.

    token_budgets: if left out, `largest`, halved until the buffers take at most `share` of free memory, but with room
    for `smallest` and for the user's `max_items` even if memory does not suffice. Given or not, sizes below the last
    budget are added from `smallest` on: four per octave (4, 5, 6 and 7 times powers of two) and those of `dense`.
    max_items: 64, or what the largest budget or the user's `max_frames` holds if that is less.
    max_frames: four per item and at least 256, or what the largest budget holds if that is less.

    Args:
        smallest, largest: ends of the ladder, in tokens.
        dense: sizes in tokens at which kernels' tiles change in smaller steps than four per octave.
        bytes_per_token: bytes by which static buffers grow with each token of the largest budget.
        free_bytes: free device memory.
        share: part of `free_bytes` that buffers may take, in (0, 1].

    Raises:
        TypeError, ValueError: as `check_limits` does, naming the option.
    """
    for name, count in (("max_items", max_items), ("max_frames", max_frames)):
        if count is not None:
            _check_count(name, count)
    if token_budgets is None:
        held = int(share * free_bytes) // bytes_per_token
        token_budgets = (_halve_to(held, largest, floor=max(smallest, max_items or 1)),)
    budgets = _filled(_check_budgets(token_budgets), smallest, dense)
    if max_items is None:
        max_items = min(DEFAULT_ITEMS, budgets[-1], max_frames or DEFAULT_ITEMS)
    if max_frames is None:
        max_frames = max(max_items, min(max(DEFAULT_FRAMES, FRAMES_PER_ITEM * max_items), budgets[-1]))
    return check_limits(budgets, max_items, max_frames)


def _halve_to(held: int, top: int, floor: int) -> int:
    """`top` halved until it is at most `held`, but never below `floor`.

    Halving gives the same budget for nearly the same free memory.
    """
    while top > held and top > floor:
        top = max(floor, top // 2)
    return top


def _filled(budgets: tuple[int, ...], smallest: int, dense: Iterable[int]) -> tuple[int, ...]:
    """`budgets` plus, between `smallest` and the last budget, four sizes per octave and those of `dense`."""
    end = budgets[-1]
    return tuple(sorted({*budgets, *_sizes(smallest, end), *(size for size in dense if smallest < size < end)}))


def _sizes(smallest: int, end: int) -> Iterator[int]:
    size = smallest
    while size < end:
        yield size
        step = 1 << max(0, size.bit_length() - 3)
        size = (size // step + 1) * step


def _check_budgets(token_budgets: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(token_budgets, Sequence) or isinstance(token_budgets, str | bytes | bytearray):
        raise TypeError(f"fusedvit: token_budgets must be a sequence of ints, got {type(token_budgets).__name__}")
    if not token_budgets:
        raise ValueError("fusedvit: token_budgets must name at least one budget, got none")
    before = 0
    for i, budget in enumerate(token_budgets):
        _check_count(f"token_budgets[{i}]", budget)
        if budget <= before:
            raise ValueError(f"fusedvit: token_budgets must ascend, each budget once; got {before} before {budget}")
        before = budget
    return tuple(token_budgets)


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"fusedvit: {name} must be an int, got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"fusedvit: {name} must be at least 1, got {count}")
    if count > MOST:
        raise ValueError(f"fusedvit: {name} must be at most {MOST}, as tokens are counted in 32 bits; got {count}")
