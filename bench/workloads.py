"""The nine measured workloads (single images of several sizes, batches, videos), a sweep, and the roofline.

A grid is `[(t, h, w), ...]` in patches of 16 pixels; two frames of a video are one t.

The roofline is the least time that the useful FLOPs and bytes of each operation take.
"""

from dataclasses import dataclass

import torch

from fusedvit.kernels import backends
from fusedvit.model.plan import Task, tasks
from fusedvit.model.spec import VisionSpec

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
    """One square image of `side` pixels, resized to a multiple of 32 as by the processor."""
    cells = 2 * max(1, round(side / (2 * PATCH)))
    return [(1, cells, cells)]


def video(frames: int, side: int = 224) -> Grid:
    """One video of square frames, two of which make one t."""
    ((_, h, w),) = image(side)
    return [(-(-frames // 2), h, w)]


def sweep() -> dict[str, Grid]:
    """Single images by their side, then videos of 224 px by their frames."""
    images = {f"image {side} px": image(side) for side in IMAGE_SIDES}
    return images | {f"video {n} frames": video(n) for n in VIDEO_FRAMES}


# ── the roofline ──

PEAK_TFLOPS, PEAK_TBS = 790.0, 4.3  # measured on an H200: an 8192^3 bf16 product, an elementwise copy
ITEM = 2  # bytes of a value in bf16
MERGED = ("merger", "deepstack", "downsample")  # prefixes of operations whose rows are merged tokens
ONCE = ("patch", "downsample", "merger_proj")


@dataclass(frozen=True)
class Cost:
    """The cost of one operation: each input is read once, each output written once."""

    flops: float
    bytes: float
    weight_bytes: float = 0.0

    @property
    def floor_ms(self) -> float:
        return max(self.flops / PEAK_TFLOPS, self.bytes / PEAK_TBS) / 1e9

    def times(self, n: int) -> "Cost":
        return Cost(n * self.flops, n * self.bytes, n * self.weight_bytes)


def linear_cost(rows: int, n: int, k: int, *, extra_values: int = 0) -> Cost:
    """The cost of `[rows, k] x [n, k]`; `extra_values` counts values of a residual or table that the epilogue reads."""
    weight = n * k * ITEM
    return Cost(2.0 * rows * n * k, weight + (rows * (n + k) + extra_values) * ITEM, weight)


def attention_cost(lengths: list[int], heads: int, head_dim: int) -> Cost:
    """The cost of two products within each sequence, with q, k and v read and the result written."""
    pairs = sum(length * length for length in lengths)
    return Cost(4.0 * pairs * heads * head_dim, 4.0 * sum(lengths) * heads * head_dim * ITEM)


def tower_costs(spec: VisionSpec, grid: Grid) -> dict[str, Cost]:
    """The cost of one call by operation, named as in `plan.EncoderPlan`; all attention together."""
    found: dict[str, Cost] = {}
    for task in tasks(spec, tokens(grid), torch.bfloat16):
        if task.key.op == backends.ATTENTION:
            found.setdefault("attention", _attention(spec, grid))
            continue
        merged = task.name.startswith(MERGED)
        times = _times(spec, task.name)
        found[task.name] = _linear(task, spec, tokens(grid) // (spec.merge_unit if merged else 1)).times(times)
    return found


def _times(spec: VisionSpec, name: str) -> int:
    """How often a tower launches a linear layer."""
    once = name in ONCE or (name == "merger_fc1" and spec.deepstack)
    if once or name == "deepstack_fc1":
        return 1 if once else len(spec.deepstack)
    return 1 + len(spec.deepstack) if name.startswith(MERGED) else spec.depth


def _linear(task: Task, spec: VisionSpec, rows: int) -> Cost:
    """The cost of one launch. Keys and values that heads share count once, though ours computes them for each head."""
    parts, n, k = set(task.key.kind.split("+")), task.key.n, task.key.k
    if task.name == "qkv" and spec.kv_heads:
        n = spec.head_dim * (spec.num_heads + 2 * spec.kv_heads)
    extra = rows * n if parts & {"residual", "taps"} else -rows * n // 2 if parts & {"swiglu", "geglu_tanh"} else 0
    return linear_cost(rows, n, k, extra_values=extra)


def _attention(spec: VisionSpec, grid: Grid) -> Cost:
    """The attention cost of all blocks: within frames, or within windows, which are smaller at a frame's borders."""
    side = spec.window * spec.merge_size
    windowed = sum(spec.is_windowed(block) for block in range(spec.depth))
    frames = [(h, w) for t, h, w in grid for _ in range(t)]
    whole = attention_cost([h * w for h, w in frames], spec.num_heads, spec.head_dim).times(spec.depth - windowed)
    if not windowed:
        return whole
    lengths = [a * b for h, w in frames for a in _cut(h, side) for b in _cut(w, side)]
    within = attention_cost(lengths, spec.num_heads, spec.head_dim).times(windowed)
    return Cost(whole.flops + within.flops, whole.bytes + within.bytes)


def _cut(length: int, side: int) -> list[int]:
    """`length` in parts of `side`; the last has the rest."""
    return [min(side, length - begin) for begin in range(0, length, side)]


def tower_floor_ms(spec: VisionSpec, grid: Grid) -> float:
    """The time of all useful FLOPs at the peak rate, or of reading all weights once, whichever is longer."""
    costs = tower_costs(spec, grid).values()
    flops, weights = sum(c.flops for c in costs), sum(c.weight_bytes for c in costs)
    return max(flops / PEAK_TFLOPS, weights / PEAK_TBS) / 1e9
