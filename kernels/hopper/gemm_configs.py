"""Tile shapes and schedules of `kernels.hopper.linear`, and the pure heuristic that chooses them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.hopper.attention_configs import USE_PDL
from fusedvit.kernels.tile_configs import PDL_MAX_ROWS, SPLITS, Target, parts_at_once

CHUNK = 64  # columns that go through the epilogue at a time; K of a step
ROWS, COLS, CONSUMERS = (64, 128), (64, 128, 192, 256), (1, 2, 3)
KINDS = {"norm", "rms", "rope", "bias", "taps", "stats", "residual", "gelu_tanh", "gelu", "quick_gelu", "swiglu"}
# Epilogues that have run on an H200 and were right, in bf16 and fp16. With any other the tuner may choose this form, as
# it compares each candidate with the twin; the heuristic leaves it to plain Triton.
PROVEN = (
    "taps+stats", "norm+rope", "rms+rope", "residual+stats", "norm+gelu_tanh", "rms+swiglu", "norm+gelu", "bias",
    "norm+quick_gelu", "stats", "rms",
)  # fmt: skip
# What begins early, with `USE_PDL`, up to how many rows, by the first that an epilogue has: not the first layer, before
# which the count is written. Of long launches those with a residual, a block's short ones (docs/hopper.md).
PDL_ROWS = {"residual": math.inf, "rope": PDL_MAX_ROWS, "norm": 3072, "rms": 3072}
CONTENTS = (0.88, 1.0)  # shares of a budget that it is judged by; the tuner asks nearer to full where budgets are dense


@dataclass(frozen=True)
class HopperGemmConfig:
    """Tile and schedule of one launch.

    Attributes:
        rows: rows of a consumer's part of a tile, 64 or 128.
        cols: columns of a tile: 64, 128, 192 (two accumulators, 128 + 64) or 256.
        consumers: warpgroups that share a tile (2 or 3); 1 for ping-pong, two consumers with a tile each.
        stages: depth of the operand ring.
        splits: parts of K that a tile's product is cut into, each a CTA's, 1 to 8.
        max_programs: bounds the persistent grid; a split product has a CTA per part instead.
        group_m: tile rows that are walked together, so that weights stay in L2.
        pdl: start before the previous launch has ended, as far as weights go (programmatic dependent launch). The
            previous launch must not be what writes `num_rows`. Saves 1 to 2 us a launch: see `USE_PDL`.
    """

    rows: int
    cols: int
    consumers: int
    stages: int
    splits: int = 1
    max_programs: int = 132
    group_m: int = 8
    pdl: bool = False

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
        """See `warpgroups`."""
        return warpgroups(self.consumers)

    @property
    def cells(self) -> int:
        """Chunks of a tile, over its consumers: what the parts of a split product share out at the end."""
        return self.consumers * self.cols // CHUNK

    def shared_bytes(self) -> int:
        """Shared memory in bytes for 16-bit operands: the ring; per consumer a staged output tile and two vectors of
        fp32; barriers."""
        ring = self.stages * (self.block_m + self.cols) * CHUNK
        vectors = 2 * 4 * vector_width(self.cols)
        own = self.warpgroups * (2 * self.rows * self.cols + vectors)
        return 2 * ring + own + 8 * (2 * self.stages + 2 * self.warpgroups + 2)

    def tiles(self, rows: int, n: int) -> int:
        """Tiles of an output of `rows` rows and `n` columns."""
        return -(-rows // self.block_m) * -(-n // self.cols)

    def scratch_sizes(self, rows: int, n: int) -> tuple[int, int]:
        """Partial sums and counters that a split product of `rows` rows and `n` columns needs room for."""
        tiles = self.tiles(rows, n)
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
        return {"num_warps": 4, "maxnreg": 128 if self.consumers == 3 else 168, "launch_pdl": self.pdl}


# Both of the kernel, too, where such functions call none but builtins.
def warpgroups(consumers: int) -> int:
    """Consumer warpgroups of a CTA."""
    return max(2, consumers)


def vector_width(cols: int) -> int:
    """Columns that a tile's vectors have room for: a power of two, as they are loaded at once."""
    return 1 << (cols - 1).bit_length()


def wrong_hopper_gemm(config: HopperGemmConfig, target: Target, dtype: torch.dtype) -> str:
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


Costed = tuple[HopperGemmConfig, float, float, float]

# Configurations with what a step of K, a round of tiles and a launch cost in us, fitted to an H200 (bf16, 56 to 16384
# rows; in ping-pong a tile's end hides under the next, but for the last's, which the launch's share holds): off by 6 %
# (rms); how far what they choose is from the best is in tests/kernels/linear_times.py.
_MEASURED: tuple[Costed, ...] = (
    (HopperGemmConfig(128, 128, 1, 4), 0.363, 0.2, 3.8),
    (HopperGemmConfig(64, 192, 1, 5), 0.291, 0.35, 3.7),
    (HopperGemmConfig(64, 128, 1, 6), 0.199, 0.25, 3.5),
    (HopperGemmConfig(64, 64, 1, 8), 0.141, 0.05, 3.2),
    (HopperGemmConfig(64, 256, 2, 3), 0.662, 3.15, 1.9),
    (HopperGemmConfig(64, 192, 2, 4), 0.475, 2.8, 2.35),
    (HopperGemmConfig(64, 192, 3, 3), 0.745, 3.5, 2.05),
    (HopperGemmConfig(64, 128, 3, 4), 0.482, 2.95, 1.65),
    (HopperGemmConfig(64, 128, 2, 5), 0.343, 2.2, 2.0),
)


def tile_of(config: HopperGemmConfig) -> tuple[int, int, int]:
    """What its costs go by."""
    return config.rows, config.cols, config.consumers


_COSTS = {tile_of(config): costs for config, *costs in _MEASURED}
# What it costs parts to meet, and each [64, 64] that a part gives away: this by towers of 196 to 1296 rows since sums
# travel in the order that threads hold them, not by the fit, which gave 1.5 before.
_LONG_K, _MEETING_US, _CELL_US = 2048, 0.5, 1.0
# Of each [64, 64] of a tile: erf where nothing hides it, position taps in every round, as memory is what they wait for.
_ERF_US, _TAPS_US = 1.15, 1.15
# erf where a tile is shared by consumers and ended by nobody else, as much of it is in what a round costs: by mergers'
# first layers of up to 3072 rows. Of more the tuner took other tiles, as power is what bounds them.
_ERF_ROWS = 3072
_SHARED_ERF_US = {(64, 256, 2): 0.1, (64, 192, 2): 0.6, (64, 192, 3): 0.1, (64, 128, 3): 0.35, (64, 128, 2): 0.1}
# Bytes/us, of weights, or of the share of x, residual and output that nothing hides; us from asking for a step's
# operands to landing.
_MEMORY, _SHOWN, _LATENCY_US = 3.12e6, 0.4, 1.06


@lru_cache(maxsize=4096)
def hopper_gemm_config(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, kind: str
) -> HopperGemmConfig | None:
    """The configuration that takes least time for a `[rows, k] x [n, k]` product; None where it is plain Triton's.

    Args:
        rows: row budget; the least mean over `CONTENTS` of it wins.
        n: output features.
        k: input features.
        dtype: operand dtype.
        target: the device.
        kind: what follows the product, as in `forms.Key`.
    """
    if target.capability != 90 or dtype.itemsize != 2 or kind not in PROVEN or not supports(n, k, kind):
        return None
    found = [c for c in _candidates(rows, n, k, target) if not spills(c, kind)]
    best = min(
        (c for c in found if not wrong_hopper_gemm(c, target, dtype)),
        key=lambda c: hopper_gemm_mean_us(c, rows, n, k, kind),
    )
    return _scheduled(best, rows, kind)


def _scheduled(config: HopperGemmConfig, rows: int, kind: str) -> HopperGemmConfig:
    """`config` with what it does for its neighbours in time."""
    return replace(config, pdl=uses_pdl(rows, kind))


def uses_pdl(rows: int, kind: str) -> bool:
    """Whether a product of `rows` rows followed by `kind` begins before the previous launch has ended."""
    epilogue = kind.split("+")
    return USE_PDL and rows <= next((most for what, most in PDL_ROWS.items() if what in epilogue), 0)


def mean_over_contents(us: Callable[[int], float], rows: int) -> float:
    """The mean of what `us` says of the contents that a budget of `rows` is judged by."""
    held = [us(int(share * rows)) for share in CONTENTS]
    return sum(held) / len(held)


def hopper_gemm_mean_us(config: HopperGemmConfig, rows: int, n: int, k: int, kind: str) -> float:
    """`hopper_gemm_us` as a budget of `rows` is judged by."""
    return mean_over_contents(lambda content: hopper_gemm_us(config, content, n, k, kind), rows)


def hopper_gemm_us(config: HopperGemmConfig, rows: int, n: int, k: int, kind: str = "") -> float:
    """What a `[rows, k] x [n, k]` product takes by the costs of its parts, in us; inf for a tile without any."""
    step_us, round_us, launch_us = _COSTS.get(tile_of(config), (float("inf"),) * 3)
    tiles, epilogue = config.tiles(max(1, rows), n), set(kind.split("+"))
    rounds = -(-tiles * config.splits // config.max_programs)
    steps = rounds * -(-k // CHUNK) / config.splits
    main = max(steps * max(step_us, _LATENCY_US / (config.stages - 1)), 2 * n * k / _MEMORY)
    moved = 2 * rows * (k + n * (2 if "residual" in epilogue else 1)) * _SHOWN / _MEMORY
    shown = 1 if config.consumers == 1 else rounds  # rounds whose end nothing hides
    cells = config.block_m * config.cols / CHUNK**2
    erf_us = _SHARED_ERF_US.get(tile_of(config), _ERF_US) if config.splits == 1 and rows <= _ERF_ROWS else _ERF_US
    after = cells / config.splits * (erf_us * shown * ("gelu" in epilogue) + _TAPS_US * rounds * ("taps" in epilogue))
    meeting = _MEETING_US + cells * (1 - 1 / config.splits) * _CELL_US if config.splits > 1 else 0.0
    return main + moved + rounds * round_us + launch_us + meeting + after


def supports(n: int, k: int, kind: str) -> bool:
    """Whether a product of this shape may be followed by `kind`: see `linear.unsupported`."""
    parts = set(kind.split("+"))
    whole = n % CHUNK == 0 or "stats" not in parts
    turned = "rope" not in parts or n % (3 * CHUNK // 2) == 0
    gated = "swiglu" not in parts or (parts <= {"norm", "rms", "bias", "swiglu"} and n % 16 == 0)
    return parts <= KINDS and k >= 2 * CHUNK and whole and turned and gated


def spills(config: HopperGemmConfig, kind: str) -> bool:
    """Whether ptxas runs out of registers in this epilogue."""
    parts, three = set(kind.split("+")), config.consumers == 3
    taps = "taps" in parts and (config.rows > 64 or three)
    residual = gluon_compat.NEEDS_MORE_REGISTERS and "residual" in parts and three and not config.x_in_registers
    wide = config.rows > 64 or (gluon_compat.NEEDS_MORE_REGISTERS and config.cols > 192)
    return taps or residual or (wide and config.splits > 2)


def _candidates(rows: int, n: int, k: int, target: Target) -> list[HopperGemmConfig]:
    """`_MEASURED` for this device, and some in parts of a long K where all of them run at once."""
    found = [replace(config, max_programs=target.num_sms) for config, *_ in _MEASURED]
    for config in [c for c in found if c.consumers < 3] if k >= _LONG_K else []:  # three have no registers for it
        counts = parts_at_once(config.tiles(rows, n), config.block_m * config.cols, target)
        found += [replace(config, splits=count) for count in counts]
    return found


def hopper_gemm_candidates(rows: int, n: int, k: int, target: Target, kind: str) -> list[HopperGemmConfig]:
    """What a tuner may try."""
    if not supports(n, k, kind):
        return []
    found = _candidates(rows, n, k, target)
    return [_scheduled(config, rows, kind) for config in found if not spills(config, kind)]
