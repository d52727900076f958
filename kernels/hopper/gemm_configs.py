"""Tiles and schedules of the Hopper GEMM, the cost model of both Hopper GEMMs, and the heuristic that chooses by it.

    us = launch + max(rounds steps step, weights / memory) + traffic + rounds end

rounds = ceil(tiles / SMs), steps = ceil(K / 64). `step` and `end` are a tile's: a step of K, and what follows the
last one; in ping-pong all ends but the last are hidden under the other consumer's steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.tile_configs import PDL_MAX_ROWS, Target, contents_of

CHUNK = 64  # columns of a step of the epilogue; K of a step of the main loop
ROWS, COLS, CONSUMERS = (64, 128), (64, 128, 192, 256), (1, 2, 3)
GATED = {"swiglu", "geglu_tanh"}
ACTIVATIONS = {"gelu_tanh", "gelu", "quick_gelu", *GATED}
KINDS = {"norm", "rms", "heads", "rope", "bias", "taps", "stats", "residual"} | ACTIVATIONS
# Epilogues that were right in bf16 and fp16 on an H200, "taps", "heads" and "geglu_tanh" on the emulator. The tuner may
# choose this backend for others, as it compares each candidate with the reference; the heuristic leaves those to plain
# Triton.
PROVEN = (
    "taps+stats", "norm+rope", "rms+rope", "residual+stats", "norm+gelu_tanh", "rms+swiglu", "norm+gelu", "gelu",
    "bias", "norm+quick_gelu", "stats", "rms", "taps", "geglu_tanh", "heads+rope", "rms+heads+rope",
)  # fmt: skip
# Largest row count at which a launch uses PDL: that of the first key that its epilogue's kind contains, else 0. A
# tower's first layer never uses PDL, as the launch before it writes the row count. Of long launches only those with a
# residual gain (docs/kernels.md).
PDL_ROWS = {"residual": math.inf, "rope": PDL_MAX_ROWS, "norm": 3072, "rms": 3072}
OF_MERGED = {"norm+gelu", "gelu", "bias"}  # epilogues of layers over merged tokens, a quarter of the patches
MERGE_UNIT = 4


@dataclass(frozen=True)
class TileCost:
    """Microseconds of a tile: a step of K, and its end; `hidden`: only the last tile's end takes time."""

    step: float
    end: float
    hidden: bool = False


@dataclass(frozen=True)
class HopperGemmConfig:
    """Tile and schedule of one launch.

    Attributes:
        rows: rows of one consumer, 64 or 128.
        cols: columns of a tile: 64, 128, 192 (two accumulators, 128 + 64) or 256.
        consumers: warpgroups that share a tile (2 or 3); 1 for ping-pong: two consumers, with tiles of their own.
        stages: depth of the operand pipeline.
        max_programs: bound of the persistent grid.
        pdl: begin before the previous launch has ended (programmatic dependent launch). The previous launch must not
            be the one that writes `num_rows`.
    """

    rows: int
    cols: int
    consumers: int
    stages: int
    max_programs: int = 132
    pdl: bool = False

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.rows * self.consumers

    @property
    def block_n(self) -> int:
        """Columns of a part of the row statistics."""
        return self.cols

    @property
    def least_n(self) -> int:
        """Columns of the narrowest part of the row statistics that it can write."""
        return CHUNK

    @property
    def x_in_registers(self) -> bool:
        """Whether consumers load x into registers, once for both accumulators."""
        return self.cols == 192 and self.consumers > 1

    @property
    def accumulators(self) -> tuple[int, int]:
        """Columns of a consumer's accumulators: 192 are 128 + 64."""
        return (128, 64) if self.cols == 192 else (self.cols, 0)

    @property
    def warpgroups(self) -> int:
        """See `warpgroups`."""
        return warpgroups(self.consumers)

    def shared_bytes(self) -> int:
        """Shared memory in bytes: the pipeline; of each consumer an output tile and two fp32 vectors; barriers."""
        pipeline = self.stages * (self.block_m + self.cols) * CHUNK
        vectors = 2 * 4 * vector_width(self.cols)
        own = self.warpgroups * (2 * self.rows * self.cols + vectors)
        return 2 * pipeline + own + 8 * (2 * self.stages + 2 * self.warpgroups + 2)

    def tiles(self, rows: int, n: int) -> int:
        """Tiles of an output of `rows` rows and `n` columns."""
        return -(-rows // self.block_m) * -(-n // self.cols)

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments, in its order."""
        wide, narrow = self.accumulators
        return {
            "BM": self.rows,
            "BN1": wide,
            "BN2": narrow,
            "CONSUMERS": self.consumers,
            "STAGES": self.stages,
            "X_IN_REGISTERS": self.x_in_registers,
        }

    def tile_cost(self) -> TileCost:
        """For `cost_model`; a tile that was not timed takes forever."""
        step = _STEP_US.get((self.rows, self.cols, self.consumers), math.inf)
        if self.consumers == 1:
            return TileCost(step, _PING_PONG_END_US, hidden=True)
        return TileCost(step, _COOPERATIVE_END_US + CELL_END_US * cells_of(self.block_m, self.cols))

    def options(self) -> dict[str, int]:
        """Launch options. Registers are bounded so that `warp_specialize` can hand them out anew."""
        return {"num_warps": 4, "maxnreg": 128 if self.consumers == 3 else 168, "launch_pdl": self.pdl}


# The kernel calls both: functions of a kernel may call builtins only.
def warpgroups(consumers: int) -> int:
    """Consumer warpgroups of a CTA."""
    return max(2, consumers)


def vector_width(cols: int) -> int:
    """Columns of a tile's bias and column sums, rounded up to a power of two."""
    return 1 << (cols - 1).bit_length()


def wrong_hopper_gemm(config: HopperGemmConfig, target: Target, dtype: torch.dtype) -> str:
    """Why `config` cannot run on `target`, or ""."""
    for name, allowed in (("rows", ROWS), ("cols", COLS), ("consumers", CONSUMERS)):
        if getattr(config, name) not in allowed:
            return f"{name} must be one of {allowed}, got {getattr(config, name)}"
    if config.stages < 2 or config.max_programs < 1:
        return f"stages must be at least 2, max_programs positive, got {config}"
    if config.rows * config.cols > 128 * 192 or (config.consumers == 3 and config.rows * config.cols > 64 * 192):
        return f"a consumer's {config.rows} x {config.cols} sums do not fit its registers"
    if config.shared_bytes() > target.max_shared:
        return f"{config.shared_bytes()} bytes of shared memory, limit {target.max_shared}"
    return ""


# Tiles, and what a step of K of each takes in us on an H200 (bf16). 64 x 192 in ping-pong reads most for what it
# computes: a step takes 0.291 on an H200, and 0.38 in qkv and fc1 on an H100. At 0.300 fc1 of GLM-4.1V takes 128 x 128
# at 1344 rows, with which the whole tower is 6 to 7 % faster on an H100.
_TILES: tuple[tuple[HopperGemmConfig, float], ...] = (
    (HopperGemmConfig(128, 128, 1, 4), 0.363),
    (HopperGemmConfig(64, 192, 1, 5), 0.300),
    (HopperGemmConfig(64, 128, 1, 6), 0.199),
    (HopperGemmConfig(64, 64, 1, 8), 0.141),
    (HopperGemmConfig(64, 256, 2, 3), 0.662),
    (HopperGemmConfig(64, 192, 2, 4), 0.475),
    (HopperGemmConfig(64, 192, 3, 3), 0.745),
    (HopperGemmConfig(64, 128, 3, 4), 0.482),
    (HopperGemmConfig(64, 128, 2, 5), 0.343),
)
_STEP_US = {(config.rows, config.cols, config.consumers): step_us for config, step_us in _TILES}
# The rest of the cost model, in us: ends of tiles; of a cell of [64, 64] its end, erf and position taps; a launch; from
# a load to its landing; an MB of operands through L2; and bytes a us of weights from memory. Fitted to timings of an
# H200 (tests/kernels/gemm_times.json) and a finer model of each GEMM.
_PING_PONG_END_US, _COOPERATIVE_END_US = 1.49, 3.0
CELL_END_US, _CELL_ERF_US, _CELL_TAPS_US = 0.035, 0.48, 0.93
_LAUNCH_US, _LANDING_US, _TRAFFIC_MB_US, _MEMORY = 0.73, 1.03, 0.0146, 3.13e6


def is_proven(n: int, k: int, dtype: torch.dtype, target: Target, kind: str) -> bool:
    """Whether the heuristic may choose this backend, at any number of rows."""
    return target.capability == 90 and dtype.itemsize == 2 and kind in PROVEN and supports(n, k, kind)


def uses_pdl(rows: int, kind: str) -> bool:
    """Whether a launch over `rows` rows with the epilogue `kind` uses programmatic dependent launch."""
    epilogue = kind.split("+")
    return rows <= next((most for what, most in PDL_ROWS.items() if what in epilogue), 0)


def cells_of(rows: int, cols: int) -> float:
    """Size of a tile in cells of [64, 64]."""
    return rows * cols / CHUNK**2


def cost_model(config: Any, n: int, k: int, target: Target, kind: str) -> Callable[[int], float]:
    """Time in us of a `[rows, k] x [n, k]` product by rows: the mean over what a budget of so many may hold.

    `config`: of either Hopper GEMM.
    """
    cost, epilogue, cells = config.tile_cost(), kind.split("+"), cells_of(config.block_m, config.cols)
    steps, memory = -(-k // CHUNK), 2 * n * k / _MEMORY
    main = steps * max(cost.step, _LANDING_US / (config.stages - 1))
    end, taps = cost.end + cells * _CELL_ERF_US * ("gelu" in epilogue), cells * _CELL_TAPS_US * ("taps" in epilogue)
    once, each = (end, taps) if cost.hidden else (0.0, end + taps)
    traffic = _TRAFFIC_MB_US * steps * (config.block_m + config.cols) * 2 * CHUNK * 1e-6

    def us(rows: int) -> float:
        total, contents = 0.0, contents_of(rows, MERGE_UNIT if kind in OF_MERGED else 1)
        for content in contents:
            tiles = config.tiles(content, n)
            rounds = -(-tiles // target.num_sms)
            total += max(rounds * main, memory) + tiles * traffic + rounds * each
        return _LAUNCH_US + once + total / len(contents)

    return us


def supports(n: int, k: int, kind: str) -> bool:
    """Whether the kernel can run a product of this shape with the epilogue `kind`: see `gemm.unsupported`."""
    parts = set(kind.split("+"))
    whole = n % CHUNK == 0 or "stats" not in parts
    rotary = "rope" not in parts or n % (3 * CHUNK // 2) == 0
    gated = not parts & GATED or (parts <= {"norm", "rms", "bias", *GATED} and n % 16 == 0)
    return parts <= KINDS and k >= 2 * CHUNK and whole and rotary and gated


def spills(config: HopperGemmConfig, kind: str) -> bool:
    """Whether ptxas runs out of registers in this epilogue."""
    parts, three = set(kind.split("+")), config.consumers == 3
    taps = "taps" in parts and (config.rows > 64 or three)
    residual = gluon_compat.NEEDS_MORE_REGISTERS and "residual" in parts and three and not config.x_in_registers
    return taps or residual


def hopper_gemm_candidates(rows: int, n: int, k: int, target: Target, kind: str) -> list[HopperGemmConfig]:
    """Configurations worth timing; arguments as of `gemm_swap_ab_configs.hopper_gemm_config`."""
    if not supports(n, k, kind):
        return []
    found = [replace(c, max_programs=target.num_sms, pdl=uses_pdl(rows, kind)) for c, _ in _TILES]
    return [config for config in found if not spills(config, kind)]
