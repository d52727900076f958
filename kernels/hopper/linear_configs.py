"""Tile shapes and schedules of `kernels.hopper.linear`, and the pure heuristic that chooses them."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fusedvit.kernels.configs import Target

CHUNK = 64  # columns that go through the epilogue at a time; K of a step
ROWS, COLS, CONSUMERS, SPLITS = (64, 128), (64, 128, 192, 256), (1, 2, 3), (1, 2, 4, 8)
KINDS = {"norm", "rms", "rope", "bias", "taps", "stats", "residual", "gelu_tanh", "gelu", "quick_gelu", "swiglu"}
# Epilogues that have run on an H200 and were right, in bf16. With any other the tuner may choose this form, as it
# compares each candidate with the twin; the heuristic leaves it to plain Triton.
PROVEN = (
    "taps+stats", "norm+rope", "rms+rope", "residual+stats", "norm+gelu_tanh", "rms+swiglu", "norm+gelu",
)  # fmt: skip
CONTENTS = (0.88, 1.0)  # shares of a budget that it is judged by, as the tuner does
MAX_PARTS = 132  # CTAs of a split product, [64, 128] sums each
MAX_SUMS, MAX_COUNTERS = MAX_PARTS * 64 * 128, MAX_PARTS


@dataclass(frozen=True)
class HopperLinearConfig:
    """Tile and schedule of one launch.

    Attributes:
        rows: rows of a consumer's part of a tile, 64 or 128.
        cols: columns of a tile: 64, 128, 192 (two accumulators, 128 + 64) or 256.
        consumers: warpgroups that share a tile (2 or 3); 1 for ping-pong, two consumers with a tile each.
        stages: depth of the operand ring.
        splits: parts of K that a tile's product is cut into, each a CTA's; 1, 2, 4 or 8.
        max_programs: bounds the persistent grid; a split product has a CTA per part instead.
        group_m: tile rows that are walked together, so that weights stay in L2.
        overlap: start before the previous launch has ended, as far as weights go (programmatic dependent launch). The
            previous launch must not be what writes `num_rows`. Saves 1 to 2 us a launch, but an H200 that is shared
            with another process in turns was seen to hang (docs/hopper.md): nothing here chooses it.
    """

    rows: int
    cols: int
    consumers: int
    stages: int
    splits: int = 1
    max_programs: int = 132
    group_m: int = 8
    overlap: bool = False

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.rows * self.consumers

    @property
    def block_n(self) -> int:
        """Columns of a part of the row statistics: a tile's, or a chunk's where a tile's chunks end in several CTAs."""
        return self.cols if self.splits == 1 else CHUNK

    @property
    def x_in_registers(self) -> bool:
        """Whether consumers read x once for both accumulators: two products would read it from shared memory twice."""
        return self.cols == 192 and self.consumers > 1

    @property
    def accumulators(self) -> tuple[int, int]:
        """Columns of a consumer's accumulators: 192 are 128 + 64."""
        return (128, 64) if self.cols == 192 else (self.cols, 0)

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups of a CTA."""
        return max(2, self.consumers)

    @property
    def cells(self) -> int:
        """Chunks of a tile, over its consumers: what the parts of a split product share out at the end."""
        return self.consumers * self.cols // CHUNK

    def shared_bytes(self) -> int:
        """Shared memory in bytes for 16-bit operands: the ring, a staged output tile per consumer, barriers."""
        ring = self.stages * (self.block_m + self.cols) * CHUNK
        return 2 * (ring + self.warpgroups * self.rows * self.cols) + 8 * (2 * self.stages + 2 * self.warpgroups + 2)

    def scratch_sizes(self, rows: int, n: int) -> tuple[int, int]:
        """Partial sums and counters that a split product of `rows` rows and `n` columns needs room for."""
        tiles = -(-rows // self.block_m) * -(-n // self.cols)
        return tiles * self.splits * self.block_m * self.cols, tiles * self.consumers

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments, in its order."""
        wide, narrow = self.accumulators
        return {
            "BM": self.rows,
            "BN1": wide,
            "BN2": narrow,
            "CONSUMERS": self.consumers,
            "STAGES": self.stages,
            "SPLITS": self.splits,
            "GROUP_M": self.group_m,
            "X_IN_REGISTERS": self.x_in_registers,
        }

    def options(self) -> dict[str, int]:
        """Launch options. Registers are bounded so that `warp_specialize` can hand them out anew."""
        return {"num_warps": 4, "maxnreg": 128 if self.consumers == 3 else 168, "launch_pdl": self.overlap}


def wrong_hopper_linear(config: HopperLinearConfig, target: Target, dtype: torch.dtype) -> str:
    """Why `config` cannot run on `target`, or ""."""
    for name, allowed in (("rows", ROWS), ("cols", COLS), ("consumers", CONSUMERS), ("splits", SPLITS)):
        if getattr(config, name) not in allowed:
            return f"{name} must be one of {allowed}, got {getattr(config, name)}"
    if config.stages < 2 or config.group_m < 1 or config.max_programs < 1:
        return f"stages must be at least 2, group_m and max_programs positive, got {config}"
    if config.rows * config.cols > 128 * 192 or (config.consumers == 3 and config.rows * config.cols > 64 * 192):
        return f"a consumer's {config.rows} x {config.cols} sums do not fit its registers"
    if config.shared_bytes() > target.max_shared:
        return f"{config.shared_bytes()} bytes of shared memory, limit {target.max_shared}"
    return ""


Costed = tuple[HopperLinearConfig, float, float, float]

# Configurations with what a step of K, a round of tiles and a launch cost in us, fitted to an H200 (bf16, K = 1152 and
# 4304, 256 to 16384 rows; in ping-pong a tile's end hides under the next): what they choose is 1 % slower than the best
# on average, 4 % at worst.
_MEASURED: tuple[Costed, ...] = (
    (HopperLinearConfig(128, 128, 1, 4), 0.388, 0.2, 2.6),
    (HopperLinearConfig(64, 192, 1, 5), 0.299, 1.4, 1.4),
    (HopperLinearConfig(64, 128, 1, 6), 0.199, 0.8, 2.2),
    (HopperLinearConfig(64, 64, 1, 8), 0.158, 0.3, 1.8),
    (HopperLinearConfig(64, 256, 2, 3), 0.669, 3.7, 0.6),
    (HopperLinearConfig(64, 192, 2, 4), 0.519, 2.8, 0.9),
    (HopperLinearConfig(64, 192, 3, 3), 0.718, 4.7, 0.5),
    (HopperLinearConfig(64, 128, 3, 4), 0.493, 3.4, 0.4),
)
_SELDOM: tuple[Costed, ...] = ((HopperLinearConfig(64, 128, 2, 5), 0.347, 2.3, 0.7),)  # for the tuner
_SPLIT, _MEETING_US, _LONG_K = 2, 2.2, 2048  # (64, 128, 1) in parts of a long K, and what it costs these to meet


@lru_cache(maxsize=4096)
def hopper_linear_config(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, kind: str
) -> HopperLinearConfig | None:
    """The configuration that takes least time for a `[rows, k] x [n, k]` product; None where it is plain Triton's.

    Args:
        rows: row budget; times are means over `CONTENTS` of it.
        n: output features.
        k: input features.
        dtype: operand dtype.
        target: the device.
        kind: what follows the product, as in `forms.Key`.
    """
    if target.capability != 90 or dtype != torch.bfloat16 or kind not in PROVEN or not supports(n, k, kind):
        return None
    best, least = None, float("inf")
    for config, step_us, round_us, launch_us in _candidates(rows, n, k, target, _MEASURED):
        columns = -(-n // config.cols) * config.splits
        tiles = [-(-int(rows * share) // config.block_m) * columns for share in CONTENTS]
        rounds = sum(-(-t // target.num_sms) for t in tiles) / len(tiles)
        time = rounds * (-(-k // CHUNK) / config.splits * step_us + round_us) + launch_us
        if time < least and not _spills(config, kind) and not wrong_hopper_linear(config, target, dtype):
            best, least = config, time
    return best


def supports(n: int, k: int, kind: str) -> bool:
    """Whether a product of this shape may be followed by `kind`: see `linear.unsupported`."""
    parts = set(kind.split("+"))
    whole = n % CHUNK == 0 or "stats" not in parts
    turned = "rope" not in parts or n % (3 * CHUNK // 2) == 0
    gated = "swiglu" not in parts or (parts <= {"norm", "rms", "bias", "swiglu"} and n % 16 == 0)
    return parts <= KINDS and k >= 2 * CHUNK and whole and turned and gated


def _spills(config: HopperLinearConfig, kind: str) -> bool:
    """Whether ptxas runs out of registers in this epilogue."""
    parts = set(kind.split("+"))
    return config.rows > 64 and bool(parts & {"taps", "gelu"}) or config.consumers == 3 and "taps" in parts


def _candidates(rows: int, n: int, k: int, target: Target, measured: tuple[Costed, ...]) -> list[Costed]:
    """`measured` for this device, and narrow tiles in parts of K where all of them run at once."""
    found = [(replace(c, max_programs=target.num_sms), step, per_round, once) for c, step, per_round, once in measured]
    config, step_us, round_us, launch_us = found[_SPLIT]
    tiles = -(-rows // config.block_m) * -(-n // config.cols)
    for splits in SPLITS[1:]:
        if tiles * splits <= min(target.num_sms, MAX_PARTS) and k >= _LONG_K:
            found.append((replace(config, splits=splits), step_us, round_us, launch_us + _MEETING_US))
    return found


def hopper_linear_candidates(rows: int, n: int, k: int, target: Target, kind: str) -> list[HopperLinearConfig]:
    """What a tuner may try."""
    if not supports(n, k, kind):
        return []
    found = [config for config, *_ in _candidates(rows, n, k, target, _MEASURED + _SELDOM)]
    return [config for config in found if not _spills(config, kind)]
