"""What every plan must be: its rules in words, and the fewest batches by brute force."""

from collections import Counter
from collections.abc import Iterator

from fusedvit.graphs.limits import Limits
from fusedvit.graphs.packing import Batch, ItemSize, Piece, Plan


def faults(sizes: list[ItemSize], limits: Limits, plan: Plan) -> list[str]:
    """What is wrong with a plan, in words; nothing about its cost."""
    found = [fault for batch in plan.batches for fault in batch_faults(batch, limits)]
    if [batch.pieces[0] for batch in plan.batches] != sorted(batch.pieces[0] for batch in plan.batches):
        found.append("batches out of order")
    if list(plan.overflow) != sorted(plan.overflow):
        found.append("overflow out of order")
    planned = sorted(piece for batch in plan.batches for piece in batch.pieces)
    for item, size in enumerate(sizes):
        pieces = [piece for piece in planned if piece.item == item]
        eager = [piece for piece in plan.overflow if piece.item == item]
        found += [f"item {item}: {fault}" for fault in item_faults(item, size, pieces, eager, limits)]
    if any(piece.item >= len(sizes) for piece in [*planned, *plan.overflow]):
        found.append("an item that nobody gave")
    return found


def batch_faults(batch: Batch, limits: Limits) -> Iterator[str]:
    if not batch.pieces:
        yield "an empty batch"
    if batch.budget not in limits.token_budgets:
        yield f"no budget {batch.budget}"
    if sum(piece.tokens for piece in batch.pieces) > batch.budget:
        yield "too many tokens"
    if sum(piece.frames for piece in batch.pieces) > limits.max_frames:
        yield "too many frames"
    if len(batch.pieces) > limits.max_items:
        yield "too many items"
    if list(batch.pieces) != sorted(batch.pieces):
        yield "pieces out of order"


def item_faults(item: int, size: ItemSize, pieces: list[Piece], eager: list[Piece], limits: Limits) -> Iterator[str]:
    most, overflows = expected(size, limits)
    if eager != ([Piece(item, 0, size.frames, size.frames * size.frame_tokens)] if overflows else []):
        yield f"overflow is {eager}"
    if not most:
        if pieces:
            yield "planned"
        return
    frames = [frame for piece in pieces for frame in range(piece.first_frame, piece.first_frame + piece.frames)]
    if frames != list(range(size.frames)):
        yield "not every frame once"
    if any(piece.tokens != piece.frames * size.frame_tokens for piece in pieces):
        yield "tokens miscounted"
    if len(pieces) != -(-size.frames // most):
        yield "not as few pieces as possible"
    if pieces and max(piece.frames for piece in pieces) - min(piece.frames for piece in pieces) > 1:
        yield "unevenly filled"


def expected(size: ItemSize, limits: Limits) -> tuple[int, bool]:
    """(frames that a piece may have at most, or 0 if the item has no pieces; whether it goes eager)."""
    tokens = size.frames * size.frame_tokens
    if tokens == 0:
        return 0, False
    if tokens <= limits.largest and size.frames <= limits.max_frames:
        return size.frames, False
    if size.frame_tokens <= limits.largest:
        return min(limits.max_frames, limits.largest // size.frame_tokens), False
    return 0, True


def pieces_of(plan: Plan) -> list[Piece]:
    return [piece for batch in plan.batches for piece in batch.pieces]


def shapes(plan: Plan) -> Counter:
    """Batches without regard to which item is which."""
    return Counter((b.budget, tuple(sorted((p.frames, p.tokens) for p in b.pieces))) for b in plan.batches)


def groupings(pieces: list[Piece], limits: Limits) -> Iterator[list[list[Piece]]]:
    """Every way to put pieces into batches that keep to the limits."""
    if not pieces:
        yield []
        return
    first, *rest = pieces
    for smaller in groupings(rest, limits):
        yield [[first], *smaller]
        for i, group in enumerate(smaller):
            joined = [first, *group]
            if fits(joined, limits):
                yield [*smaller[:i], joined, *smaller[i + 1 :]]


def fits(pieces: list[Piece], limits: Limits) -> bool:
    tokens, frames = sum(p.tokens for p in pieces), sum(p.frames for p in pieces)
    return tokens <= limits.largest and frames <= limits.max_frames and len(pieces) <= limits.max_items
