"""What the work costs at least: useful FLOPs and bytes of each operation, and the time they cannot go below."""

from dataclasses import dataclass

from fusedvit.bench.workloads import Grid, tokens
from fusedvit.spec import VisionSpec

PEAK_TFLOPS, PEAK_TBS = 790.0, 4.3  # an H200's measured ceilings: an 8192^3 bf16 product, an elementwise copy
ITEM = 2  # bytes of a value in bf16


@dataclass(frozen=True)
class Cost:
    """Of one operation, all its launches of one call together: each input read once, each output written once."""

    flops: float
    bytes: float
    weight_bytes: float = 0.0

    @property
    def floor_ms(self) -> float:
        return max(self.flops / PEAK_TFLOPS, self.bytes / PEAK_TBS) / 1e9

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    def times(self, n: int) -> "Cost":
        return Cost(n * self.flops, n * self.bytes, n * self.weight_bytes)


def linear_cost(rows: int, n: int, k: int, *, extra_values: int = 0) -> Cost:
    """`[rows, k] x [n, k]`; `extra_values`: of a residual or table that the epilogue reads."""
    weight = n * k * ITEM
    return Cost(2.0 * rows * n * k, weight + (rows * (n + k) + extra_values) * ITEM, weight)


def attention_cost(lengths: list[int], heads: int, head_dim: int) -> Cost:
    """Two products within each sequence; q, k, v read, the result written."""
    pairs = sum(length * length for length in lengths)
    return Cost(4.0 * pairs * heads * head_dim, 4.0 * sum(lengths) * heads * head_dim * ITEM)


def tower_costs(spec: VisionSpec, grid: Grid) -> dict[str, Cost]:
    """The cost of one call by operation, named as in `plan.EncoderPlan`."""
    rows, c, depth = tokens(grid), spec.hidden_size, spec.depth
    merged, wide, mergers = rows // spec.merge_unit, spec.merged_size, 1 + len(spec.deepstack)
    lengths = [h * w for t, h, w in grid for _ in range(t)]
    return {
        "patch": linear_cost(rows, c, spec.patch_width, extra_values=rows * c if spec.position_side else 0),
        "qkv": linear_cost(rows, 3 * c, c).times(depth),
        "attention": attention_cost(lengths, spec.num_heads, spec.head_dim).times(depth),
        "proj": linear_cost(rows, c, c, extra_values=rows * c).times(depth),
        "fc1": linear_cost(rows, spec.intermediate_size, c).times(depth),
        "fc2": linear_cost(rows, c, spec.intermediate_size, extra_values=rows * c).times(depth),
        "merger_fc1": linear_cost(merged, wide, wide).times(mergers),
        "merger_fc2": linear_cost(merged, spec.out_size, wide).times(mergers),
    }


def tower_floor_ms(spec: VisionSpec, grid: Grid) -> float:
    """All useful FLOPs at the peak rate, or all weights through memory once, whichever is longer."""
    costs = tower_costs(spec, grid).values()
    flops, weights = sum(c.flops for c in costs), sum(c.weight_bytes for c in costs)
    return max(flops / PEAK_TFLOPS, weights / PEAK_TBS) / 1e9
