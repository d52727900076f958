"""Where attention windows lie in a frame whose tokens come window by window.

A frame of h x w patches is cut into windows of SIDE x SIDE, row by row from the top left; those at the right and lower
border may be narrower or lower. A window's tokens come in merge-block order, like a small frame's.
"""

import triton
import triton.language as tl

from fusedvit.kernels.divide import _divide


@triton.jit
def _window_of_token(within, h, w, SIDE: tl.constexpr, MERGE: tl.constexpr):
    """(row, col) in the frame of its tokens `within` 0 .. h w - 1 in window order."""
    window_row, inside = _divide(within, SIDE * w)  # windows of a row hold all its SIDE rows of patches, w wide
    height = tl.minimum(h - window_row * SIDE, SIDE)
    window_col, inside = _divide(inside, height * SIDE)
    width = tl.minimum(w - window_col * SIDE, SIDE)
    block_row, block_col = _divide(inside // (MERGE * MERGE), width // MERGE)
    row = block_row * MERGE + inside // MERGE % MERGE
    col = block_col * MERGE + inside % MERGE
    return window_row * SIDE + row, window_col * SIDE + col


@triton.jit
def _span(window_row, window_col, h, w, SIDE: tl.constexpr):
    """(first token within the frame, tokens) of a window."""
    height = tl.minimum(h - window_row * SIDE, SIDE)
    width = tl.minimum(w - window_col * SIDE, SIDE)
    return window_row * (SIDE * w) + window_col * (height * SIDE), height * width


@triton.jit
def _windows(h, w, SIDE: tl.constexpr):
    """How many windows a frame has."""
    return ((h + SIDE - 1) // SIDE) * ((w + SIDE - 1) // SIDE)


@triton.jit
def _tiles_of_row(height, w, SIDE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Query tiles of a row of windows, `height` patches high."""
    last = (height * (w % SIDE) + BLOCK_Q - 1) // BLOCK_Q
    return w // SIDE * ((height * SIDE + BLOCK_Q - 1) // BLOCK_Q) + last


@triton.jit
def _window_tiles(h, w, SIDE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """How many query tiles the windows of a frame have."""
    return h // SIDE * _tiles_of_row(SIDE, w, SIDE, BLOCK_Q) + _tiles_of_row(h % SIDE, w, SIDE, BLOCK_Q)


@triton.jit
def _window_tile(tile, h, w, SIDE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """(first token within the frame, tokens) of the window of the frame's tile `tile`, and which of its tiles it is."""
    full = tl.maximum(_tiles_of_row(SIDE, w, SIDE, BLOCK_Q), 1)
    window_row = tl.minimum(_divide(tile, full)[0], h // SIDE)  # whole rows of windows, then perhaps a lower one
    tile -= window_row * full
    height = tl.minimum(h - window_row * SIDE, SIDE)
    each = tl.maximum((height * SIDE + BLOCK_Q - 1) // BLOCK_Q, 1)
    window_col = tl.minimum(_divide(tile, each)[0], w // SIDE)
    begin, size = _span(window_row, window_col, h, w, SIDE)
    return begin, size, tile - window_col * each
