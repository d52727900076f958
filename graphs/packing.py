"""Packing: which items replay together, and in the graph of which token budget.

Packing is a pure function. Attention never crosses frames, so a video may be cut between frames without changing a bit
of its output.

The rule is first-fit-decreasing with the largest budget as the bin. A replay takes time for its content only, as
captured kernels read true counts and padding exits early. So fewer batches are cheaper, and the cost of a plan is close
to linear in its tokens. Over 3000 random calls it cost 1.000001 times the optimal plan on average, 1.0001 at worst.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from fusedvit.graphs.limits import Limits

TOKEN_BUDGET = "token budget"  # why an item overflows, as `stats()` counts it
OPEN_BATCHES = 64  # most batches that a piece may still join, so that planning stays linear in the pieces
_TOKENS_THEN_FRAMES = itemgetter(3, 2)  # fields of a `Piece`


# ItemSize and Piece are created for every item of every call: a tuple costs a third of a frozen dataclass.
class ItemSize(NamedTuple):
    """The size of an image (frames = 1) or a video; neither count is negative.

    Attributes:
        frames: attention sequences.
        frame_tokens: tokens of each: output tokens for `pack`, patch tokens for `balance.balance`.
    """

    frames: int
    frame_tokens: int


class Piece(NamedTuple):
    """`frames` frames of the caller's item number `item`, beginning with `first_frame`, and their tokens, of the
    kind that `ItemSize.frame_tokens` counts."""

    item: int
    first_frame: int
    frames: int
    tokens: int


@dataclass(frozen=True)
class Batch:
    """Pieces that replay together in the graph of `budget`, in the caller's order."""

    budget: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """Batches ordered by their first piece, and `overflow`: whole items with frames too large for any graph, in the
    caller's order."""

    batches: tuple[Batch, ...]
    overflow: tuple[Piece, ...]


def pack(sizes: Sequence[ItemSize], limits: Limits) -> Plan:
    """Plans one call: every frame of every item is in exactly one piece.

    A video over the frame or token budget is cut into as few pieces as possible, evenly filled. An item whose frames
    exceed the largest budget overflows as a whole. Items without tokens are left out. Permuting the items permutes the
    plan, except that equal pieces may change places.
    """
    pieces, overflow = _cut(sizes, limits)
    groups = sorted([sorted(group) for group in _first_fit_decreasing(pieces, limits)])
    return Plan(tuple([Batch(_smallest_budget(group, limits), tuple(group)) for group in groups]), tuple(overflow))


def sole_budget(tokens: int, items: int, limits: Limits) -> int | None:
    """The budget of the batch that any `items` items of `tokens` tokens in total form; None unless it is one batch.

    Each item must have tokens, and their frames must be within `limits`.
    """
    return limits.smallest_for(tokens) if 0 < items <= min(tokens, limits.max_items) else None


def _smallest_budget(pieces: Sequence[Piece], limits: Limits) -> int:
    budget = limits.smallest_for(sum([piece.tokens for piece in pieces]))
    assert budget is not None, f"a batch is over the largest budget, {limits.largest}: {pieces}"
    return budget


def _cut(sizes: Sequence[ItemSize], limits: Limits) -> tuple[list[Piece], list[Piece]]:
    """Cuts items into pieces that each fit a batch; returns the pieces, and the items that cannot be cut so."""
    pieces: list[Piece] = []
    overflow: list[Piece] = []
    largest, max_frames = limits.largest, limits.max_frames
    for item, (frames, frame_tokens) in enumerate(sizes):
        tokens = frames * frame_tokens
        if not tokens:
            continue
        if tokens <= largest and frames <= max_frames:
            pieces.append(Piece(item, 0, frames, tokens))
        elif frame_tokens > largest:
            overflow.append(Piece(item, 0, frames, tokens))
        else:
            pieces += _cut_video(item, frames, frame_tokens, min(max_frames, largest // frame_tokens))
    return pieces, overflow


def _cut_video(item: int, frames: int, frame_tokens: int, most: int) -> list[Piece]:
    """Cuts a video into as few pieces of at most `most` frames as possible, whose sizes differ by at most one frame."""
    count = -(-frames // most)
    cuts = [frames * i // count for i in range(count + 1)]
    return [Piece(item, a, b - a, (b - a) * frame_tokens) for a, b in pairwise(cuts)]


@dataclass(slots=True)
class _OpenBatch:
    """A batch under construction: its pieces, and the room left for tokens, frames and items."""

    tokens: int
    frames: int
    items: int
    pieces: list[Piece]


def _first_fit_decreasing(pieces: Sequence[Piece], limits: Limits) -> list[list[Piece]]:
    """Each piece, largest first, joins the first open batch with room for it, or opens one.

    A full batch is closed. If more than `OPEN_BATCHES` are open, the oldest one is closed: pieces come largest first,
    so it usually has the least room. With up to 64 batches that costs nothing; with more, it may cost a few more
    replays, each cheap compared with its content.
    """
    ordered = sorted(pieces, key=_TOKENS_THEN_FRAMES, reverse=True)  # stable: equal pieces keep the caller's order
    least = ordered[-1].tokens if ordered else 0
    batches: list[list[Piece]] = []
    opened: list[_OpenBatch] = []
    for piece in ordered:
        _, _, frames, tokens = piece
        for batch in opened:
            if batch.tokens >= tokens and batch.frames >= frames:
                break
        else:
            batch = _OpenBatch(limits.largest, limits.max_frames, limits.max_items, [])
            batches.append(batch.pieces)
            opened.append(batch)
        batch.pieces.append(piece)
        batch.tokens -= tokens
        batch.frames -= frames
        batch.items -= 1
        if batch.tokens < least or not batch.frames or not batch.items:
            opened = [other for other in opened if other is not batch]
        elif len(opened) > OPEN_BATCHES:
            del opened[0]
    return batches
