"""Where the parts of one array of shared memory lie, whose products and barriers are found by address.

Heads of 64 and 80 have queries, keys, values, their tails and ones; of 72 tails, which are narrower, come first
(attention_spare.py). Barriers that warps arrive at one by one (attention_barriers.py) are behind them all.
"""

from typing import NamedTuple

UNIT = 8192  # bytes of 64 rows of 64 columns
TAIL_UNIT = UNIT // 4  # of 64 rows of 16
SPARE_UNIT = UNIT // 8  # of 64 rows of 8: a tail of a head of 72, or ones beside it


class Places(NamedTuple):
    """Where each begins, in its own units, by which its views are indexed.

    Attributes:
        q, k, v: in `UNIT`.
        q_tail: in `TAIL_UNIT`.
        k_tail, v_tail: in `TAIL_UNIT`, of heads of 72 in `SPARE_UNIT`.
        ones: in `TAIL_UNIT`, of heads of 72 in `SPARE_UNIT`, a block a consumer.
        barriers: in 8 bytes.
        units: `UNIT`s of all.
    """

    q: int
    q_tail: int
    k: int
    k_tail: int
    v: int
    v_tail: int
    ones: int
    barriers: int
    units: int


def places(head_dim: int, consumers: int, stages: int, by_warp: bool) -> Places:
    """Of heads of 64, 72 or 80, with room for barriers if they are `by_warp`. Calls nothing: a kernel asks it, too."""
    queries = 2 * consumers
    if head_dim == 72:
        ones = 2 * stages
        q_tail = (ones + consumers + 1) // 2
        q = (q_tail + queries + 3) // 4
        end = (q + queries + 2 * stages) * UNIT
        k, k_tail, v, v_tail = q + queries, 0, q + queries + stages, stages
    else:
        tails = 1 if head_dim > 64 else 0
        q, k, v = 0, queries, queries + stages
        q_tail = 4 * (queries + 2 * stages)
        k_tail = q_tail + tails * queries
        v_tail = k_tail + tails * stages
        ones = v_tail + tails * stages
        end = (ones + 1) * TAIL_UNIT
    barriers = 4 + 2 * stages + consumers if by_warp else 0  # as attention_barriers.py has them
    units = (end + 8 * barriers + UNIT - 1) // UNIT
    return Places(q, q_tail, k, k_tail, v, v_tail, ones, end // 8, units)


def placed_bytes(head_dim: int, consumers: int, stages: int, by_warp: bool) -> int:
    """Of all of it."""
    return places(head_dim, consumers, stages, by_warp).units * UNIT
