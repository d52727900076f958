"""The nine workloads that figures are about: single images of several sizes, batches, and videos; and a sweep.

A grid is `[(t, h, w), ...]` in patches of 16 pixels; two frames of a video are one t.
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


PATCH = 16  # pixels of a side; patches are merged two by two
IMAGE_SIDES = (56, 112, 224, 336, 448, 576, 768, 1024, 1536, 2048, 2560)
VIDEO_FRAMES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def image(side: int) -> Grid:
    """One square image of `side` pixels, as the processor would resize it: to a multiple of 32."""
    cells = 2 * max(1, round(side / (2 * PATCH)))
    return [(1, cells, cells)]


def video(frames: int, side: int = 224) -> Grid:
    """One video of square frames, two of which make one t."""
    ((_, h, w),) = image(side)
    return [(-(-frames // 2), h, w)]


def sweep(sides: tuple[int, ...] = IMAGE_SIDES, frames: tuple[int, ...] = VIDEO_FRAMES) -> dict[str, Grid]:
    """Single images by their side, then videos of 224 px by their frames."""
    images = {f"image {side} px": image(side) for side in sides}
    return images | {f"video {n} frames": video(n) for n in frames}
