"""The nine workloads every figure of ours is about: one still picture of several sizes, batches, and videos.

A grid is `[(t, h, w), ...]` in patches of 16 pixels; a frame pair of a video is one t.
"""

Grid = list[tuple[int, int, int]]

WORKLOADS: dict[str, Grid] = {
    "1 x 224 px": [(1, 14, 14)],
    "1 x 448 px": [(1, 28, 28)],
    "1 x 576 px": [(1, 36, 36)],
    "video, 8 frames 224 px": [(4, 14, 14)],
    "1 x 1024 px": [(1, 64, 64)],
    "8 x 448 px": [(1, 28, 28)] * 8,
    "mixed": [(1, 64, 64), (8, 14, 14), (1, 28, 40), (1, 10, 16)],
    "1 x 2048 px": [(1, 128, 128)],
    "video, 64 frames 448 px": [(32, 28, 28)],
}


def tokens(grid: Grid) -> int:
    """Patch tokens of a grid."""
    return sum(t * h * w for t, h, w in grid)
