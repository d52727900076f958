"""Tiles of the swap-AB Hopper GEMM, and the heuristic that chooses between them and those of `gemm_configs`.

First the heuristic picks a small set of tiles for a layer, good enough at every row budget, as each tile is a kernel to
compile (`tiles_of`); then, for one budget, the fastest of the set (`hopper_gemm_config`, `hopper_swap_ab_config`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fusedvit.kernels.hopper import gemm_configs, gluon_compat
from fusedvit.kernels.hopper.gemm_configs import (
    CELL_END_US,
    MERGE_UNIT,
    OF_MERGED,
    HopperGemmConfig,
    TileCost,
    cells_of,
    cost_model,
    uses_pdl,
)
from fusedvit.kernels.tile_configs import Target, ladder

UNIT = 64  # features of a consumer; rows of a chunk; K of a step
UNIT_BYTES = UNIT * UNIT * 2
MULTIPLE = 8  # rows of a tile are a multiple of this, as columns of a WGMMA
MOST_ROWS, MOST_CONSUMERS, MOST_STAGES, MOST_WAVES = 192, 4, 18, 4
LONG_K = 2048  # between those that were timed in towers, 1152 and 4304
MOST_BUDGET = 3072  # rows up to which this backend is chosen: at 4096, tiles of 192 x 192 are as fast in `gemm`
# Registers of a thread: of the launch, of a consumer, of the producer, by consumers.
_REGISTERS = {1: (168, 232, 40), 2: (168, 232, 40), 3: (128, 160, 32), 4: (96, 120, 24)}
UNSUPPORTED = {"taps", "heads", "swiglu", "geglu_tanh"}  # of the epilogues of `gemm_configs`
# Epilogues that ran on an H200 and were right: see `gemm_configs.PROVEN`.
PROVEN = {
    torch.bfloat16: (
        "norm+rope", "rms+rope", "residual+stats", "norm+gelu_tanh", "norm+gelu", "bias", "norm+quick_gelu",
    ),
    torch.float16: ("norm+rope", "residual+stats", "norm+gelu_tanh"),
}  # fmt: skip


@dataclass(frozen=True)
class HopperSwapABConfig:
    """Tile of one launch.

    Attributes:
        rows: rows of a tile, 16 to 192, a multiple of 8.
        consumers: warpgroups of a CTA, 1 to 4, each 64 columns of the tile.
        stages: depth of the operand pipeline.
        pdl: see `HopperGemmConfig`.
    """

    rows: int
    consumers: int
    stages: int
    pdl: bool = False

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.rows

    @property
    def cols(self) -> int:
        """Columns of a tile."""
        return UNIT * self.consumers

    @property
    def chunks(self) -> int:
        """Chunks of up to 64 rows that the epilogue runs over."""
        return chunks_of(self.rows)

    @property
    def width(self) -> int:
        """Columns of the accumulator of a chunk: a power of two."""
        return UNIT if self.chunks > 1 else 1 << (self.rows - 1).bit_length()

    @property
    def box(self) -> int:
        """Rows of one TMA copy of the last chunk: a power of two that divides it, 64 at most."""
        return min(UNIT, self.rows & -self.rows)

    @property
    def block_n(self) -> int:
        """Columns of a part of the row statistics."""
        return UNIT

    @property
    def least_n(self) -> int:
        """See `HopperGemmConfig`."""
        return UNIT

    def tiles(self, rows: int, n: int) -> int:
        """Tiles of an output of `rows` rows and `n` columns."""
        return -(-rows // self.rows) * -(-n // self.cols)

    def pipeline_bytes(self, has_norm: bool) -> int:
        """Size in bytes of 16-bit operands, and behind a norm of the moments of a tile's rows."""
        return units_of(self.chunks, self.consumers, self.stages, has_norm) * UNIT_BYTES

    def shared_bytes(self) -> int:
        """Shared memory in bytes, behind a norm: the pipeline, barriers, and what Triton passes to partitions."""
        return self.pipeline_bytes(True) + 8 * (2 * self.stages + 1) + 256

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments, in its order."""
        _, consumer, producer = _REGISTERS[self.consumers]
        return {
            "ROWS": self.rows,
            "WIDTH": self.width,
            "BOX": self.box,
            "CONSUMERS": self.consumers,
            "STAGES": self.stages,
            "CONSUMER_REGISTERS": consumer,
            "PRODUCER_REGISTERS": producer,
        }

    def tile_cost(self) -> TileCost:
        """For the cost model of GEMMs. A step is bounded by its own loop, by the WGMMAs, or by shared memory: lines
        of 128 bytes that consumers read and TMA writes."""
        cells = cells_of(self.rows, self.cols)
        lines = self.consumers * (UNIT + self.rows) + self.cols + self.rows
        step = max(_STEP_US, _CELL_STEP_US * cells, _SHARED_LINE_US * lines)
        return TileCost(step, _END_US + CELL_END_US * cells)

    def options(self) -> dict[str, int]:
        """Launch options. Registers are bounded so that `warp_specialize` can hand them out anew."""
        return {"num_warps": 4, "maxnreg": _REGISTERS[self.consumers][0], "launch_pdl": self.pdl}


# The kernel calls both: functions of a kernel may call builtins only.
def chunks_of(rows: int) -> int:
    """Chunks of 64 rows of a tile of `rows`, the last of which may be shorter."""
    return -(-rows // 64)


def units_of(chunks: int, consumers: int, stages: int, has_norm: bool) -> int:
    """Units of [64, 64] values of the pipeline."""
    return stages * (consumers + chunks) + int(has_norm)


def wrong_hopper_swap_ab(config: HopperSwapABConfig, target: Target, dtype: torch.dtype) -> str:
    """Why `config` cannot run on `target`, or ""."""
    rows, consumers = config.rows, config.consumers
    if rows not in range(2 * MULTIPLE, MOST_ROWS + 1, MULTIPLE) or consumers not in range(1, MOST_CONSUMERS + 1):
        return f"rows must be 16 to {MOST_ROWS} in {MULTIPLE}s and consumers 1 to {MOST_CONSUMERS}, got {config}"
    if config.stages < max(2, config.chunks):
        return f"stages must be 2 or more, and as many as the {config.chunks} chunks, got {config.stages}"
    if consumers == MOST_CONSUMERS and config.chunks > 2:
        return f"{config.chunks} chunks of sums do not fit the registers of {consumers} consumers"
    if config.shared_bytes() > target.max_shared:
        return f"{config.shared_bytes()} bytes of shared memory, limit {target.max_shared}"
    return ""


def spills(config: HopperSwapABConfig, kind: str) -> bool:
    """Whether ptxas runs out of registers: erf fits three consumers, two as Triton 3.8 and later compile it."""
    most = (2 if gluon_compat.NEEDS_MORE_REGISTERS else 3) if "gelu" in kind.split("+") else MOST_CONSUMERS
    return config.consumers > most


def unsupported_shape(n: int, k: int, stages: int) -> str:
    """Why a product of this shape cannot run in `stages` stages, or ""."""
    if n % 16:
        return f"whole 16s of columns, got {n}"
    if -(-k // UNIT) < stages:
        return f"at least as many steps of {UNIT} in K as stages, got {-(-k // UNIT)} and {stages}"
    return ""


# us on an H200 (see `gemm_configs`): of a step its loop, a cell of [64, 64], a line of 128 bytes; the end of a tile.
_STEP_US, _CELL_STEP_US, _SHARED_LINE_US, _END_US = 0.115, 0.0777, 4.47e-4, 0.46


def supports(n: int, k: int, kind: str) -> bool:
    """Whether the kernel can run a product of this shape with the epilogue `kind`: see `gemm_swap_ab.unsupported`."""
    known = gemm_configs.supports(n, k, kind) and not UNSUPPORTED & set(kind.split("+"))
    return known and n % 16 == 0 and k >= 4 * UNIT


def _tiles_of(rows: int, n: int, target: Target) -> Iterator[tuple[int, int]]:
    """(rows, consumers) of tiles that all run at once, the lowest for each number of tile rows; above 64 rows in whole
    16s, so that budgets share code. For many rows also tiles in several full waves."""
    for consumers in range(1, MOST_CONSUMERS + 1):
        columns = -(-n // (UNIT * consumers))
        for count in range(1, target.num_sms // columns + 1):
            height = -(-rows // count)
            multiple = MULTIPLE if height <= UNIT else 2 * MULTIPLE
            yield max(2 * MULTIPLE, -(-height // multiple) * multiple), consumers
        for waves in range(2, MOST_WAVES + 1) if rows > MOST_BUDGET else ():
            height = -(-rows // max(1, waves * target.num_sms // columns))
            yield -(-height // MULTIPLE) * MULTIPLE, consumers


@lru_cache(maxsize=4096)
def _deepest(rows: int, consumers: int, k: int, target: Target) -> HopperSwapABConfig | None:
    """A tile with the most stages that shared memory and K allow; None where it cannot run."""
    none, one = (HopperSwapABConfig(rows, consumers, stages).shared_bytes() for stages in (0, 1))
    stages = min((target.max_shared - none) // (one - none), MOST_STAGES, -(-k // UNIT))
    config = HopperSwapABConfig(rows, consumers, stages)
    return None if wrong_hopper_swap_ab(config, target, torch.bfloat16) else config


def _uses_pdl(config: HopperSwapABConfig, rows: int, k: int, kind: str) -> bool:
    """`uses_pdl`, but where loads bound the steps of a tile. They are faster where CTAs lie in order, as a launch
    places them that finds all SMs free: on an H200 that is worth more than PDL (docs/kernels.md)."""
    bound_by_loads = config.consumers == 1 and config.rows > UNIT and k >= LONG_K and "residual" in kind.split("+")
    return uses_pdl(rows, kind) and not bound_by_loads


@lru_cache(maxsize=4096)
def hopper_swap_ab_candidates(rows: int, n: int, k: int, target: Target, kind: str) -> tuple[HopperSwapABConfig, ...]:
    """Configurations worth timing; arguments as of `hopper_gemm_config`."""
    return tuple(replace(c, pdl=_uses_pdl(c, rows, k, kind)) for c in _unscheduled(rows, n, k, target, kind))


def _unscheduled(rows: int, n: int, k: int, target: Target, kind: str) -> list[HopperSwapABConfig]:
    """`hopper_swap_ab_candidates` without PDL."""
    if not supports(n, k, kind):
        return []
    every = (_deepest(*tile, k, target) for tile in dict.fromkeys(_tiles_of(rows, n, target)))
    return [config for config in every if config is not None and not spills(config, kind)]


# A tile may replace the fastest one of a budget if the cost model has it at most this much slower: each tile is a
# kernel to compile. Layers that a tower has once, or once per merger, may lose more, in small batches most.
TOLERANCE = 0.02
RARE = {"norm+gelu": (0.12, 0.04), "bias": (0.12, 0.04), "gelu": (0.25, 0.05), "taps+stats": (0.3, 0.3),
        "stats": (0.3, 0.3)}  # fmt: skip


@lru_cache(maxsize=4096)
def hopper_swap_ab_config(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, kind: str
) -> HopperSwapABConfig | None:
    """The fastest tile of `tiles_of`; None if that is one of `gemm_configs`, or nothing runs.

    Arguments as of `hopper_gemm_config`.
    """
    best = _scheduled(rows, n, k, dtype, target, kind)
    return best if isinstance(best, HopperSwapABConfig) else None


@lru_cache(maxsize=4096)
def hopper_gemm_config(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, kind: str
) -> HopperGemmConfig | None:
    """The fastest of the tiles of `tiles_of` that are of `gemm_configs`, without those of swap-AB; None if none runs.

    Args:
        rows: row budget.
        n, k: output and input features.
        dtype: of the operands.
        target: the GPU, or the part of it that the launch is bounded to.
        kind: the epilogue, as in `kernels.backends.Key`.
    """
    best = _scheduled(rows, n, k, dtype, target, kind, without_swap_ab=True)
    assert best is None or isinstance(best, HopperGemmConfig), f"expected a tile of the GEMM, got {best}"
    return best


Tile = HopperGemmConfig | HopperSwapABConfig


def _scheduled(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, kind: str, without_swap_ab: bool = False
) -> Tile | None:
    """The fastest of `tiles_of` that run at `rows` rows, scheduled."""
    models = _models(n, k, dtype, target, kind).items()
    times = {tile: us(rows) for tile, us in models if isinstance(tile, HopperGemmConfig) or not without_swap_ab}
    best = min(times, key=times.__getitem__, default=None)
    if best is None or times[best] == math.inf:
        return None
    if isinstance(best, HopperGemmConfig):
        return replace(best, max_programs=target.num_sms, pdl=uses_pdl(rows, kind))
    return replace(best, pdl=_uses_pdl(best, rows, k, kind))


@lru_cache(maxsize=512)
def _models(n: int, k: int, dtype: torch.dtype, target: Target, kind: str) -> dict[Tile, Callable[[int], float]]:
    """`_model` of each of `tiles_of`, which are those of the whole GPU."""
    return {tile: _model(tile, n, k, target, kind) for tile in tiles_of(n, k, dtype, target.whole(), kind)}


def _model(tile: Tile, n: int, k: int, target: Target, kind: str) -> Callable[[int], float]:
    """`cost_model`; infinite where a tile is not for so many rows: swap-AB has nothing that hides the end of a tile, so
    all of its tiles run at once."""
    us = cost_model(tile, n, k, target, kind)
    if isinstance(tile, HopperGemmConfig):
        return us
    return lambda rows: us(rows) if rows <= _most(kind) and tile.tiles(rows, n) <= target.num_sms else math.inf


def _most(kind: str) -> int:
    """Rows up to which swap-AB is chosen. The norm before a merger reads statistics in parts as wide as the tiles of
    the layer that wrote them: swap-AB would need a kernel for each of these widths, which the GEMM reads at run
    time."""
    return MOST_BUDGET // 4 if kind == "norm+gelu" else MOST_BUDGET


@lru_cache(maxsize=256)
def tiles_of(n: int, k: int, dtype: torch.dtype, target: Target, kind: str) -> tuple[Tile, ...]:
    """The fewest tiles (by a greedy cover) of both Hopper GEMMs of which, at every row budget, one is within the
    tolerance of the fastest tile there is. Without schedules; none where both GEMMs leave the product to plain Triton.
    """
    if not gemm_configs.is_proven(n, k, dtype, target, kind):
        return ()
    sizes = [max(1, rows // MERGE_UNIT) if kind in OF_MERGED else rows for rows in ladder(64, 65536)]
    candidates = [replace(tile, pdl=False) for tile in gemm_configs.hopper_gemm_candidates(1, n, k, target, kind)]
    tiles: list[Tile] = [tile for tile in candidates if not gemm_configs.wrong_hopper_gemm(tile, target, dtype)]
    offered = {rows: [*tiles, *_offered(rows, n, k, dtype, target, kind)] for rows in sizes}
    every = dict.fromkeys(tile for found in offered.values() for tile in found)
    models = {tile: _model(tile, n, k, target, kind) for tile in every}
    covered: dict[Tile, dict[int, float]] = {tile: {} for tile in models}  # rows -> how much slower than the fastest
    few, many = RARE.get(kind, (TOLERANCE,) * 2)
    for rows in sizes if models else ():
        us = {tile: model(rows) for tile, model in models.items()}
        least = min(us[tile] for tile in offered[rows])
        most = least * (1 + (many if rows > MOST_BUDGET // 4 else few))
        for tile, time in us.items():
            if time <= most:
                covered[tile][rows] = time / least
    chosen, left = list[Tile](), set(sizes if models else ())
    while left:
        found = {tile: [slower for rows, slower in at.items() if rows in left] for tile, at in covered.items()}
        best = max(models, key=lambda tile: (len(found[tile]), -sum(found[tile])))
        chosen.append(best)
        left -= covered[best].keys()
    return tuple(chosen)


def _offered(rows: int, n: int, k: int, dtype: torch.dtype, target: Target, kind: str) -> Sequence[HopperSwapABConfig]:
    """The tiles of swap-AB that are tried at `rows` rows, without schedules."""
    if kind not in PROVEN[dtype] or rows > _most(kind) or "linear/swap_ab" in dict(target.without):
        return ()
    return _unscheduled(rows, n, k, target, kind)
