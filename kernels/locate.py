"""Which item of a grid table something belongs to: sums over items, looked up 64 at a time.

A lane of a warp has two items, and every warp all 64, so that sums, searches and exchanges stay within a warp: no
barriers, and no second wait for memory before the 65th item.
"""

import triton
import triton.language as tl

from fusedvit.kernels.windows import _window_tiles, _windows

LANES = tl.constexpr(32)


@triton.jit
def _size(
    item, grid_ptr, num_items, KIND: tl.constexpr, BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr,
    ABOVE: tl.constexpr, UP_TO: tl.constexpr,
):  # fmt: skip
    """(how many of KIND, tokens) of items; none past the table."""
    mask = item < num_items
    t = tl.load(grid_ptr + 3 * item, mask=mask, other=0)
    h = tl.load(grid_ptr + 3 * item + 1, mask=mask, other=0)
    w = tl.load(grid_ptr + 3 * item + 2, mask=mask, other=0)
    tokens = t * h * w
    if KIND == 0:
        size = tokens
    elif KIND == 2:
        size = t
    elif KIND == 3:
        size = t * ((h * w + BLOCK_Q - 1) // BLOCK_Q)
        if ABOVE > 0:
            size = tl.where(h * w > ABOVE, size, 0)
        if UP_TO > 0:
            size = tl.where(h * w <= UP_TO, size, 0)
    elif KIND == 4:
        size = t * _windows(h, w, WINDOW)
    else:
        size = t * _window_tiles(h, w, WINDOW, BLOCK_Q)
    return size, tokens


@triton.jit
def _search(end, offs):
    """Of intervals that follow each other up to each of `end` [LANES], which each of `offs` lies in: how many end at or
    before it, empty ones too. The last, if it lies past them all."""
    found = offs * 0
    for i in tl.static_range(5):
        found = tl.where(tl.gather(end, found + ((16 >> i) - 1), 0) <= offs, found + (16 >> i), found)
    return found


@triton.jit
def _locate(
    offs, grid_ptr, num_items, KIND: tl.constexpr, BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr,
    ABOVE: tl.constexpr = 0, UP_TO: tl.constexpr = 0,
):  # fmt: skip
    """Which item each of `offs` belongs to, by KIND: tokens (0), frames (2), tiles (3), windows (4), their tiles.

    Only frames of more than ABOVE tokens have tiles, and of at most UP_TO, if that is not 0.
    Returns, for each: its offset within the item, the item's first token, height, width (past the total: undefined,
    height and width 0); and the totals.
    """
    total = 0
    total_tokens = 0
    within = offs * 0
    first = offs * 0
    height = offs * 0
    width = offs * 0
    for start in tl.range(0, num_items, 2 * LANES):
        even = start + 2 * tl.arange(0, LANES)
        size, tokens = _size(even, grid_ptr, num_items, KIND, BLOCK_Q, WINDOW, ABOVE, UP_TO)
        odd_size, odd_tokens = _size(even + 1, grid_ptr, num_items, KIND, BLOCK_Q, WINDOW, ABOVE, UP_TO)
        both = size + odd_size
        end = total + tl.cumsum(both, 0)  # [LANES], of pairs of items
        pair = _search(end, offs)
        here = (offs >= total) & (offs < total + tl.sum(both, 0))
        middle = tl.gather(end - odd_size, pair, 0)
        odd = offs >= middle
        within = tl.where(here, offs - tl.where(odd, middle, middle - tl.gather(size, pair, 0)), within)
        total += tl.sum(both, 0)
        if KIND != 0:
            both_tokens = tokens + odd_tokens
            middle = total_tokens + tl.gather(tl.cumsum(both_tokens, 0) - odd_tokens, pair, 0)
            first = tl.where(here, tl.where(odd, middle, middle - tl.gather(tokens, pair, 0)), first)
            total_tokens += tl.sum(both_tokens, 0)
        item = start + 2 * pair + odd.to(tl.int32)
        height = tl.load(grid_ptr + 3 * item + 1, mask=here, other=height)
        width = tl.load(grid_ptr + 3 * item + 2, mask=here, other=width)
    if KIND == 0:
        first = offs - within
        total_tokens = total
    return within, first, height, width, total, total_tokens
