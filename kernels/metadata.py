"""Everything that the encoder needs to know about a batch, from grid_thw, in one launch on the device.

    tokens  : packed cos/sin, or cos and sin, of (row, col); taps of the position table      one row per token
    order   : where a token's pixels are, in towers with attention windows                   one entry per merged token
    frames  : cu_seqlens                                                                     one entry per frame
    tiles   : attention's query tiles                                                        one row per tile
    windows, window tiles : the same for attention windows
    counts  : how many there are of each

Tokens of a frame come in merge-block order: (block row, block col, row in block, col in block). In towers with windows
they come window by window, each in that order. A frame of h x w patches is cut into windows of SIDE x SIDE patches, row
by row from the top left; those at the right and lower border may be smaller.

Each output is a range of programs, and each program finds the items (rows of the grid) that its entries belong to by
prefix sums over the grid, 64 items at a time. A grid row of zeros is an empty item, so a table padded with zeros needs
no count of its own.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedvit.kernels.launch import launch
from fusedvit.kernels.positions import frequencies, packed_width, store_axes, store_bicubic, store_bilinear, store_rope

TOKENS, MERGED, FRAMES, TILES, WINDOWS, WINDOW_TILES, SHORT_TILES = range(7)
BLOCK = 32  # entries of a program, one per lane: more unroll the code, and fetching code takes most of the time
LANES = tl.constexpr(32)
ALL = tl.constexpr(2**31 - 1)  # tokens: more than any frame has


@dataclass(frozen=True)
class Layout:
    """The sizes that determine a tower's metadata.

    Attributes:
        merge: spatial merge size; h and w are multiples of it.
        head_dim: channels of a head, a multiple of 4.
        block_m: queries of an attention tile.
        side: side of the square position table, or entries of each axis's table; 0 for none.
        taps: entries of that table from which a position is interpolated: 4, 16, or 0 for none; 2 for one per axis.
        window: patches on a side of an attention window, a multiple of `merge`; 0 for none.
        window_block_m: queries of an attention tile of windows.
        short: frames of at most this many tokens have their own list of tiles; 0 if there is only one list.
        short_block_m: queries of a tile in that list.
    """

    merge: int
    head_dim: int
    block_m: int
    side: int = 0
    taps: int = 0
    window: int = 0
    window_block_m: int = 64
    short: int = 0
    short_block_m: int = 64


@dataclass(frozen=True)
class Metadata:
    """Device-side facts of one batch, filled by `vision_metadata`. Each field says what its padding holds.

    Attributes:
        counts: `[7, 4]` int32; column 0 holds tokens, merged tokens, frames, tiles, windows, their tiles and tiles of
            short frames. Rows are 16 bytes, so that a pointer to any count is equally aligned. Counts of windows, or
            of short frames, are undefined if the layout has none.
        rope: `[tokens, 2, head_dim / 2]` fp32, cos and sin; not written if `packed_cos_sin` has columns. Past the
            count: undefined, never read.
        packed_cos_sin: `[tokens, packed_width(head_dim)]` int32, the same packed (positions.py); no columns if nothing
            reads them. Past the count: undefined, never read.
        tap_index: `[tokens, taps]` int32 rows of the position table. Past the count: undefined, never read.
        tap_weight: `[tokens, taps]` fp32. Past the count: undefined, never read.
        cu_seqlens: `[frames + 1]` int32. Past the count: the total, so that it is monotone.
        tiles: `[tiles, 4]` int32, see `attention.Segments`, of all or the longer frames. Past the count: zeros.
        order: `[merged tokens]` int32, which merged token of the caller's order each one in window order is; empty
            without windows. Past the count: undefined, never read.
        window_cu_seqlens: `[windows + 1]` int32, as `cu_seqlens`; empty without windows.
        window_tiles: `[window tiles, 4]` int32, as `tiles`; empty without windows.
        short_tiles: `[short tiles, 4]` int32, as `tiles`, of short frames if these have their own list.
    """

    counts: torch.Tensor
    rope: torch.Tensor
    packed_cos_sin: torch.Tensor
    tap_index: torch.Tensor
    tap_weight: torch.Tensor
    cu_seqlens: torch.Tensor
    tiles: torch.Tensor
    order: torch.Tensor
    window_cu_seqlens: torch.Tensor
    window_tiles: torch.Tensor
    short_tiles: torch.Tensor

    def count(self, which: int) -> torch.Tensor:
        """`[1]` int32 view of one count (`TOKENS`, `MERGED`, `FRAMES`, `TILES`, …)."""
        return self.counts[which, :1]


# ── windows ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _divide(a, b):
    """(quotient, remainder) of int32 that are never negative: unsigned division takes a third fewer instructions."""
    quotient = (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)
    return quotient, a - quotient * b


@triton.jit
def _window_of_token(within, h, w, SIDE: tl.constexpr, MERGE: tl.constexpr):
    """(row, col) in the frame of its tokens `within` (0 .. h w - 1, in window order)."""
    window_row, inside = _divide(within, SIDE * w)  # windows of a row hold all its SIDE rows of patches, w wide
    height = tl.minimum(h - window_row * SIDE, SIDE)
    window_col, inside = _divide(inside, height * SIDE)
    width = tl.minimum(w - window_col * SIDE, SIDE)
    block_row, block_col = _divide(inside // (MERGE * MERGE), width // MERGE)
    row = block_row * MERGE + inside // MERGE % MERGE
    col = block_col * MERGE + inside % MERGE
    return window_row * SIDE + row, window_col * SIDE + col


@triton.jit
def _window_span(window_row, window_col, h, w, SIDE: tl.constexpr):
    """(first token within the frame, tokens) of a window."""
    height = tl.minimum(h - window_row * SIDE, SIDE)
    width = tl.minimum(w - window_col * SIDE, SIDE)
    return window_row * (SIDE * w) + window_col * (height * SIDE), height * width


@triton.jit
def _num_windows(h, w, SIDE: tl.constexpr):
    """How many windows a frame has."""
    return ((h + SIDE - 1) // SIDE) * ((w + SIDE - 1) // SIDE)


@triton.jit
def _num_row_tiles(height, w, SIDE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Query tiles of a row of windows, `height` patches high."""
    last = (height * (w % SIDE) + BLOCK_Q - 1) // BLOCK_Q
    return w // SIDE * ((height * SIDE + BLOCK_Q - 1) // BLOCK_Q) + last


@triton.jit
def _num_window_tiles(h, w, SIDE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """How many query tiles the windows of a frame have."""
    return h // SIDE * _num_row_tiles(SIDE, w, SIDE, BLOCK_Q) + _num_row_tiles(h % SIDE, w, SIDE, BLOCK_Q)


@triton.jit
def _window_of_tile(tile, h, w, SIDE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """(first token within the frame, tokens) of the window of the frame's tile `tile`, and which of its tiles it is."""
    full = tl.maximum(_num_row_tiles(SIDE, w, SIDE, BLOCK_Q), 1)
    window_row = tl.minimum(_divide(tile, full)[0], h // SIDE)  # whole rows of windows, then perhaps a lower one
    tile -= window_row * full
    height = tl.minimum(h - window_row * SIDE, SIDE)
    each = tl.maximum((height * SIDE + BLOCK_Q - 1) // BLOCK_Q, 1)
    window_col = tl.minimum(_divide(tile, each)[0], w // SIDE)
    begin, size = _window_span(window_row, window_col, h, w, SIDE)
    return begin, size, tile - window_col * each


# ── search over the grid ──────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _size(
    item, grid_ptr, num_items, KIND: tl.constexpr, block_q, WINDOW: tl.constexpr, above, up_to
):  # fmt: skip
    """(entries of KIND, tokens) of items; 0 past the table. KIND as in `_locate`."""
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
        size = tl.where((h * w > above) & (h * w <= up_to), t * _divide(h * w + block_q - 1, block_q)[0], 0)
    elif KIND == 4:
        size = t * _num_windows(h, w, WINDOW)
    else:
        size = t * _num_window_tiles(h, w, WINDOW, block_q)
    return size, tokens


@triton.jit
def _search(end, offs):
    """Which of the consecutive intervals that end at `end` [LANES] each of `offs` lies in: the number of those that end
    at or before it, empty ones included; the last one for an offset past all. A binary search."""
    found = offs * 0
    for i in tl.static_range(5):
        found = tl.where(tl.gather(end, found + ((16 >> i) - 1), 0) <= offs, found + (16 >> i), found)
    return found


@triton.jit
def _locate(
    offs, grid_ptr, num_items, KIND: tl.constexpr, block_q, WINDOW: tl.constexpr, above=0, up_to=0
):  # fmt: skip
    """Which item each of `offs` belongs to, among entries of KIND: tokens (0), frames (2), tiles (3), windows (4) or
    window tiles (5).

    Only frames of more than `above` tokens have tiles, and of at most `up_to`. A lane has two items, and
    every warp all 64 of an iteration: sums, searches and exchanges stay within a warp, without barriers.

    Returns:
        Of each offset: its offset within the item, the item's first token, height and width (past the total: undefined,
        height and width 0). Then the totals of entries and of tokens.
    """
    total = 0
    total_tokens = 0
    within = offs * 0
    first = offs * 0
    height = offs * 0
    width = offs * 0
    for start in tl.range(0, num_items, 2 * LANES):
        even = start + 2 * tl.arange(0, LANES)
        size, tokens = _size(even, grid_ptr, num_items, KIND, block_q, WINDOW, above, up_to)
        odd_size, odd_tokens = _size(even + 1, grid_ptr, num_items, KIND, block_q, WINDOW, above, up_to)
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


# ── kernel ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _store_tokens(
    offs, grid_ptr, num_items, counts_ptr, rope_ptr, packed_ptr, index_ptr, weight_ptr, order_ptr, inv_freq_ptr,
    num_pairs, MERGE: tl.constexpr, PAIRS: tl.constexpr, PACKED_COLS: tl.constexpr, SIDE: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Positions of tokens, and the order of merged tokens in towers with windows."""
    inv_freq = frequencies(inv_freq_ptr, 0, PAIRS)  # in flight while the item is found
    within, first, height, width, total, _ = _locate(offs, grid_ptr, num_items, 0, 1, WINDOW)
    mask = offs < total
    h = tl.maximum(height, MERGE)
    w = tl.maximum(width, MERGE)
    frame, inside = _divide(within, h * w)
    if WINDOW > 0:
        row, col = _window_of_token(inside, h, w, WINDOW, MERGE)
        unit: tl.constexpr = MERGE * MERGE
        source = (first + frame * (h * w)) // unit + row // MERGE * (w // MERGE) + col // MERGE
        tl.store(order_ptr + offs // unit, source, mask=mask & (offs % unit == 0))
    else:
        block_row, block_col = _divide(inside // (MERGE * MERGE), w // MERGE)
        row = block_row * MERGE + inside // MERGE % MERGE
        col = block_col * MERGE + inside % MERGE
    if TAPS == 2:
        store_axes(index_ptr, weight_ptr, offs, row, col, mask, SIDE)
    if TAPS == 4:
        store_bilinear(index_ptr, weight_ptr, offs, row, col, h, w, mask, SIDE)
    if TAPS == 16:
        store_bicubic(index_ptr, weight_ptr, offs, row, col, h, w, mask, SIDE)
    store_rope(rope_ptr, packed_ptr, inv_freq_ptr, inv_freq, offs, row, col, mask, num_pairs, PAIRS, PACKED_COLS)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr, total)
        tl.store(counts_ptr + 4, total // (MERGE * MERGE))


@triton.jit
def _store_segments(first_program, offs, grid_ptr, num_items, count_ptr, cu_ptr, num_cu, WINDOW: tl.constexpr):
    """cu_seqlens of frames, or with WINDOW of windows."""
    within, first, height, width, total, tokens = _locate(offs, grid_ptr, num_items, 4 if WINDOW > 0 else 2, 1, WINDOW)
    if WINDOW > 0:
        frame, window = _divide(within, tl.maximum(_num_windows(height, width, WINDOW), 1))
        window_row, window_col = _divide(window, tl.maximum((width + WINDOW - 1) // WINDOW, 1))
        start, _ = _window_span(window_row, window_col, height, width, WINDOW)
        begin = first + frame * height * width + start
    else:
        begin = first + within * height * width
    tl.store(cu_ptr + offs, tl.where(offs < total, begin, tokens), mask=offs < num_cu)
    if tl.program_id(0) == first_program:
        tl.store(count_ptr, total)


@triton.jit
def _store_tiles(
    first_program, offs, grid_ptr, num_items, count_ptr, tiles_ptr, num_tiles, block_q, WINDOW: tl.constexpr,
    above=0, up_to=0,
):  # fmt: skip
    """Query tiles of frames, or with WINDOW of windows."""
    within, first, height, width, total, _ = _locate(
        offs, grid_ptr, num_items, 5 if WINDOW > 0 else 3, block_q, WINDOW, above, up_to
    )
    if WINDOW > 0:
        frame, tile = _divide(within, tl.maximum(_num_window_tiles(height, width, WINDOW, block_q), 1))
        start, size, tile = _window_of_tile(tile, height, width, WINDOW, block_q)
        begin = first + frame * height * width + start
    else:
        size = height * width
        frame, tile = _divide(within, tl.maximum(_divide(size + block_q - 1, block_q)[0], 1))
        begin = first + frame * size
    real = offs < total
    ptrs = tiles_ptr + 4 * offs
    mask = offs < num_tiles
    tl.store(ptrs, tl.where(real, begin, 0), mask=mask)
    tl.store(ptrs + 1, tl.where(real, begin + size, 0), mask=mask)
    tl.store(ptrs + 2, tl.where(real, begin + tile * block_q, 0), mask=mask)
    tl.store(ptrs + 3, offs * 0, mask=mask)
    if tl.program_id(0) == first_program:
        tl.store(count_ptr, total)


_ENDS, _SIZES = ("a1", "a2", "a3", "a4", "a5"), ("num_cu", "num_tiles", "num_short", "num_windows", "num_wtiles")
_TILES = "block_q", "short", "short_q"


@triton.jit(do_not_specialize=["num_items", "num_pairs", *_ENDS, *_SIZES, *_TILES])
def _metadata_kernel(
    grid_ptr,  # [items, 3] int32, (t, h, w)
    inv_freq_ptr,  # [PAIRS / 2] fp32
    counts_ptr,  # [7, 4] int32
    rope_ptr,  # [T, 2, PAIRS] fp32
    packed_ptr,  # [T, PACKED_COLS] int32
    index_ptr,  # [T, TAPS] int32
    weight_ptr,  # [T, TAPS] fp32
    cu_ptr,  # [num_cu] int32
    tiles_ptr,  # [num_tiles, 4] int32
    short_tiles_ptr,  # [num_short, 4] int32
    order_ptr,  # [T / MERGE^2] int32
    window_cu_ptr,  # [num_windows] int32
    window_tiles_ptr,  # [num_wtiles, 4] int32
    num_items,
    num_pairs,  # PAIRS as a runtime value, so that the loop over them is not unrolled
    a1,  # ends of ranges of programs: tokens to a1, frames to a2, tiles to a3, short tiles to a4, windows to a5
    a2,
    a3,
    a4,
    a5,
    num_cu,
    num_tiles,
    num_short,
    num_windows,
    num_wtiles,
    block_q,  # queries of a tile of frames of more than `short` tokens
    short,
    short_q,  # of those of at most so many, which have a list of their own if `short` is not 0
    MERGE: tl.constexpr,
    PAIRS: tl.constexpr,
    PACKED_COLS: tl.constexpr,
    SIDE: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if pid < a1:
        _store_tokens(
            pid * BLOCK + lane, grid_ptr, num_items, counts_ptr, rope_ptr, packed_ptr, index_ptr, weight_ptr,
            order_ptr, inv_freq_ptr, num_pairs, MERGE, PAIRS, PACKED_COLS, SIDE, TAPS, WINDOW,
        )  # fmt: skip
    elif pid < a2:
        _store_segments(a1, (pid - a1) * BLOCK + lane, grid_ptr, num_items, counts_ptr + 8, cu_ptr, num_cu, 0)
    elif pid < a3:
        offs = (pid - a2) * BLOCK + lane
        _store_tiles(a2, offs, grid_ptr, num_items, counts_ptr + 12, tiles_ptr, num_tiles, block_q, 0, short, ALL)
    elif pid < a4:
        offs = (pid - a3) * BLOCK + lane
        _store_tiles(a3, offs, grid_ptr, num_items, counts_ptr + 24, short_tiles_ptr, num_short, short_q, 0, 0, short)
    elif WINDOW > 0:
        if pid < a5:
            offs = (pid - a4) * BLOCK + lane
            _store_segments(a4, offs, grid_ptr, num_items, counts_ptr + 16, window_cu_ptr, num_windows, WINDOW)
        else:
            offs = (pid - a5) * BLOCK + lane
            _store_tiles(a5, offs, grid_ptr, num_items, counts_ptr + 20, window_tiles_ptr, num_wtiles, WINDOW_Q, WINDOW)


def _program_ranges(out: Metadata, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(end of the range of programs of each output, entries of each output but the tokens), in the kernel's order."""
    lists = (out.rope, out.cu_seqlens, out.tiles, out.short_tiles, out.window_cu_seqlens, out.window_tiles)
    present = (True, True, True, layout.short > 0, layout.window > 0, layout.window > 0)
    sizes = tuple(t.shape[0] if here else 0 for t, here in zip(lists, present, strict=True))
    ends = accumulate(max(int(here), triton.cdiv(n, BLOCK)) for n, here in zip(sizes, present, strict=True))
    return tuple(ends), sizes[1:]


def vision_metadata(grid: torch.Tensor, inv_freq: torch.Tensor, out: Metadata, layout: Layout) -> Metadata:
    """Fills `out` from `grid`; capacities are the shapes of `out`.

    Args:
        grid: `[items, 3]` int32 (t, h, w) on the device, rows of zeros for no item.
        inv_freq: `[head_dim / 4]` fp32.
        layout: sizes of the tower and its attention tiles.
    """
    pairs, packed_cols = layout.head_dim // 2, out.packed_cos_sin.shape[1]
    assert packed_cols in (0, packed_width(layout.head_dim)), (
        f"packed cos/sin: expected {packed_width(layout.head_dim)} columns, or 0, got {packed_cols}"
    )
    ends, sizes = _program_ranges(out, layout)
    pointers = (
        *(grid, inv_freq, out.counts, out.rope, out.packed_cos_sin, out.tap_index, out.tap_weight, out.cu_seqlens),
        *(out.tiles, out.short_tiles, out.order, out.window_cu_seqlens, out.window_tiles),
    )
    constants = {
        "MERGE": layout.merge,
        "PAIRS": pairs,
        "PACKED_COLS": packed_cols,
        "SIDE": layout.side,
        "TAPS": layout.taps,
        "WINDOW": layout.window,
        "WINDOW_Q": layout.window_block_m,
        "BLOCK": BLOCK,
    }
    scalars = grid.shape[0], pairs, *ends[:5], *sizes, layout.block_m, layout.short, layout.short_block_m
    launch(_metadata_kernel, ends[-1], (), pointers, constants, {"num_warps": 4}, scalars)
    return out
