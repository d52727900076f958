"""Grids for the metadata kernel: strategies, room past the content, and both implementations run into poison."""

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from fusedvit.kernels.metadata import TOKENS, Layout, Metadata
from fusedvit.kernels.positions import packed_width

Grid = Sequence[tuple[int, int, int]]
SIDES = st.integers(1, 5)  # merged tokens: windows of 8 patches are cut, whole and wider; the interpreter is slow
NOTHING = st.just((0, 0, 0))
UNWRITTEN = -(2**30)


def images(merge: int) -> st.SearchStrategy[tuple[int, int, int]]:
    return st.tuples(st.just(1), SIDES, SIDES).map(lambda g: (1, g[1] * merge, g[2] * merge))


def videos(merge: int) -> st.SearchStrategy[tuple[int, int, int]]:
    """Up to three frames, and none at all."""
    return st.tuples(st.integers(0, 3), SIDES, SIDES).map(lambda g: (g[0], g[1] * merge, g[2] * merge))


def grids(merge: int, max_size: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Images, videos and empty rows in any order."""
    return st.lists(images(merge) | videos(merge) | NOTHING, max_size=max_size)


def frames_of(grid: Grid) -> list[int]:
    """Tokens of each frame, in order."""
    return [h * w for t, h, w in grid for _ in range(t)]


def windows_of(grid: Grid, side: int) -> list[int]:
    """Tokens of each window of `side` x `side` patches, in order."""

    def cut(n: int) -> list[int]:
        return [min(side, n - at) for at in range(0, n, side)]

    return [a * b for t, h, w in grid for _ in range(t) for a in cut(h) for b in cut(w)]


def tiles_of(lengths: Sequence[int], block_m: int, above: int = 0, up_to: int = 2**31) -> int:
    """Tiles of the segments of more than `above` tokens and at most `up_to`."""
    return sum(-(-n // block_m) for n in lengths if above < n <= up_to)


def blank(grid: Grid, layout: Layout, device: torch.device, room: int = 0, packed: bool = False) -> Metadata:
    """Room for `grid` and `room` more of everything, every field poisoned; for packed cos/sin if asked for."""
    frames = frames_of(grid)
    tokens, tiles = sum(frames) + room, tiles_of(frames, layout.block_m, above=layout.short) + room
    windows = windows_of(grid, layout.window) if layout.window else []
    more = room if layout.window else 0

    def integers(*shape: int) -> torch.Tensor:
        return torch.full(shape, UNWRITTEN, dtype=torch.int32, device=device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=device)

    return Metadata(
        counts=integers(7, 4),
        rope=floats(tokens, 2, layout.head_dim // 2),
        packed_cos_sin=integers(tokens, packed_width(layout.head_dim) if packed else 0),
        tap_index=integers(tokens, layout.taps),
        tap_weight=floats(tokens, layout.taps),
        cu_seqlens=integers(len(frames) + 1 + room),
        tiles=integers(tiles, 4),
        order=integers(tokens // layout.merge**2 if layout.window else 0),
        window_cu_seqlens=integers(len(windows) + 1 + more if layout.window else 0),
        window_tiles=integers(tiles_of(windows, layout.window_block_m) + more, 4),
        short_tiles=integers(
            tiles_of(frames, layout.short_block_m, up_to=layout.short) + (room if layout.short else 0), 4
        ),
    )


def fill(
    op: Callable[..., Metadata],
    grid: Grid,
    device: torch.device,
    *,
    merge: int = 2,
    head_dim: int = 24,
    side: int = 7,
    taps: int = 4,
    block_m: int = 16,
    room: int = 0,
    window: int = 0,
    window_block_m: int = 16,
    short: int = 0,
    short_block_m: int = 16,
    packed: bool = False,
) -> Metadata:
    """`op`'s answer for `grid`; frequencies as Qwen's."""
    layout = Layout(merge, head_dim, block_m, side, taps if side else 0, window, window_block_m, short, short_block_m)
    out = blank(grid, layout, device, room, packed)
    half = head_dim // 2
    inv_freq = 10000.0 ** -(torch.arange(0, half, 2, device=device) / half)
    rows = torch.tensor(list(grid), dtype=torch.int32, device=device).reshape(-1, 3)
    return op(rows, inv_freq, out, layout)


def assert_same_packed(ours: Metadata, ref: Metadata) -> None:
    """To a unit in each half, and that seldom: where cos or sin lies between two values, its last bits decide."""
    tokens = int(ref.count(TOKENS))
    halves = [(m.packed_cos_sin[:tokens] & 0xFFFF, m.packed_cos_sin[:tokens] >> 16 & 0xFFFF) for m in (ours, ref)]
    off = torch.stack([a - b for a, b in zip(*halves, strict=True)]).abs()
    assert off.numel() == 0 or (off.max() <= 1 and off.float().mean() < 0.05), (off.max(), off.float().mean())
    assert (ours.packed_cos_sin[tokens:] == UNWRITTEN).all(), "written past the tokens"
