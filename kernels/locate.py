"""Which item of a grid table something belongs to: sums over items, looked up sixteen at a time."""

import triton
import triton.language as tl

from fusedvit.kernels.windows import _window_tiles, _windows


@triton.jit
def _locate(
    offs, grid_ptr, num_items, KIND: tl.constexpr, BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr, ITEMS: tl.constexpr,
    ABOVE: tl.constexpr = 0, UP_TO: tl.constexpr = 0,
):  # fmt: skip
    """Which item each of `offs` belongs to, by KIND: tokens (0), frames (2), tiles (3), windows (4), their tiles.

    Only frames of more than ABOVE tokens have tiles, and of at most UP_TO, if that is not 0.
    Returns, for each: its offset within the item, the item's first token, height, width; and the totals.
    """
    total = 0
    total_tokens = 0
    within = offs * 0
    first = offs * 0
    height = offs * 0
    width = offs * 0
    for start in tl.range(0, num_items, ITEMS):
        item = start + tl.arange(0, ITEMS)
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
        begin = total + tl.cumsum(size, 0) - size  # [ITEMS]
        begin_tokens = total_tokens + tl.cumsum(tokens, 0) - tokens
        here = (offs[:, None] >= begin[None, :]) & (offs[:, None] < (begin + size)[None, :])  # one a row at most
        within += tl.sum(tl.where(here, offs[:, None] - begin[None, :], 0), 1)
        first += tl.sum(tl.where(here, begin_tokens[None, :], 0), 1)
        height += tl.sum(tl.where(here, h[None, :], 0), 1)
        width += tl.sum(tl.where(here, w[None, :], 0), 1)
        total += tl.sum(size, 0)
        total_tokens += tl.sum(tokens, 0)
    return within, first, height, width, total, total_tokens
