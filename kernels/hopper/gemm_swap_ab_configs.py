"""Tiles of `kernels.hopper.transposed`, what they cost, and the pure heuristic that chooses them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from fusedvit.kernels.hopper import gemm_configs, gluon_compat
from fusedvit.kernels.hopper.gemm_configs import (
    hopper_gemm_config,
    hopper_gemm_mean_us,
    mean_over_contents,
    uses_pdl,
)
from fusedvit.kernels.tile_configs import Target

UNIT = 64  # features of a consumer; rows of a chunk; K of a step
UNIT_BYTES = UNIT * UNIT * 2
MULTIPLE = 8  # of rows of a tile, as an instruction's columns
MOST_ROWS, MOST_CONSUMERS, MOST_STAGES, MOST_WAVES = 192, 4, 18, 4
LONG_K = 2048  # between those that were timed in towers, 1152 and 4304
MOST_BUDGET = 3072  # rows that the heuristic takes it for: at 4096 tiles of 192 x 192 are as fast in `linear.py`
# Registers of a thread: of the launch, of a consumer, of the producer, by consumers.
_REGISTERS = {1: (168, 232, 40), 2: (168, 232, 40), 3: (128, 160, 32), 4: (96, 120, 24)}
UNKNOWN = {"taps", "swiglu"}  # of what `linear_configs` knows
# Epilogues that have run on an H200 and were right: what the heuristic may choose, see `linear_configs.PROVEN`.
PROVEN = {
    torch.bfloat16: (
        "norm+rope", "rms+rope", "residual+stats", "norm+gelu_tanh", "norm+gelu", "bias", "norm+quick_gelu",
    ),
    torch.float16: ("norm+rope", "residual+stats", "norm+gelu_tanh"),
}  # fmt: skip


class OfChunks:
    """What follows from the rows of a tile that is ended a chunk at a time."""

    rows: int

    @property
    def chunks(self) -> int:
        """See `chunks_of`."""
        return chunks_of(self.rows)

    @property
    def width(self) -> int:
        """Rows of a chunk's sums: a power of two."""
        return UNIT if self.chunks > 1 else 1 << (self.rows - 1).bit_length()

    @property
    def box(self) -> int:
        """Rows of the last chunk that are brought at once: a power of two that divides it, and 64."""
        return min(UNIT, self.rows & -self.rows)


@dataclass(frozen=True)
class HopperSwapABConfig(OfChunks):
    """Tile of one launch.

    Attributes:
        rows: rows of a tile, 16 to 192, a multiple of 8.
        consumers: warpgroups of a CTA, 1 to 4, each 64 columns of the tile.
        stages: depth of the operand ring.
        pdl: see `HopperGemmConfig`.
    """

    rows: int
    consumers: int
    stages: int
    pdl: bool = False

    @property
    def cols(self) -> int:
        """Columns of a tile."""
        return UNIT * self.consumers

    @property
    def block_n(self) -> int:
        """Columns of a part of the row statistics."""
        return UNIT

    def tiles(self, rows: int, n: int) -> int:
        """Tiles of an output of `rows` rows and `n` columns."""
        return -(-rows // self.rows) * -(-n // self.cols)

    def ring_bytes(self, has_norm: bool) -> int:
        """Operands of 16 bits, and behind a norm the moments of a tile's rows."""
        return units_of(self.chunks, self.consumers, self.stages, has_norm) * UNIT_BYTES

    def shared_bytes(self) -> int:
        """Shared memory in bytes, behind a norm: the ring, barriers, and what Triton hands to its partitions."""
        return self.ring_bytes(True) + 8 * (2 * self.stages + 1) + 256

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

    def options(self) -> dict[str, int]:
        """Launch options. Registers are bounded so that `warp_specialize` can hand them out anew."""
        return {"num_warps": 4, "maxnreg": _REGISTERS[self.consumers][0], "launch_pdl": self.pdl}


# Of the kernel, too, where such functions call none but builtins.
def chunks_of(rows: int) -> int:
    """Chunks of 64 rows of a tile of `rows`, the last of which may be shorter."""
    return -(-rows // 64)


def units_of(chunks: int, consumers: int, stages: int, has_norm: bool) -> int:
    """Units of [64, 64] values in a ring."""
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
    """Whether ptxas runs out of registers: erf leaves enough for three consumers, for two as Triton compiles it from
    3.8 on."""
    most = (2 if gluon_compat.NEEDS_MORE_REGISTERS else 3) if "gelu" in kind.split("+") else MOST_CONSUMERS
    return config.consumers > most


def unsupported_shape(n: int, k: int, stages: int) -> str:
    """Why a product of this shape cannot run in so many stages, or ""."""
    if n % 16:
        return f"whole 16s of columns, got {n}"
    if -(-k // UNIT) < stages:
        return f"at least as many steps of {UNIT} in K as stages, got {-(-k // UNIT)} and {stages}"
    return ""


# us, fitted to an H200 (bf16, Triton 3.6, 330 timings of Qwen3-VL-8B's products at 64 to 4096 rows): off by 8 % (rms);
# how far what they choose is from the best is in tests/kernels/transposed_times.py. A step of K is bounded by its own
# loop, by what an SM takes in, by what products read from shared memory and what is written there, 128 bytes a row, by
# the products (a consumer's rows), and by the time from asking to landing.
_STEP_US, _TAKEN_ROW_US, _SHARED_ROW_US, _PRODUCT_ROW_US, _LANDING_US = 0.11, 8.1e-4, 4.1e-4, 1.11e-3, 1.0
# A launch, and a CTA of it; what all CTAs take in, an MB; weights from memory, bytes/us, and how much longer that takes
# for each further CTA that reads the same; a row of a consumer's sums on its way out, more behind a norm, and erf. Each
# wave behind the first, whose rings nothing fills meanwhile: products of 1152 columns at 3584 to 12288 rows.
_LAUNCH_US, _CTA_US, _TAKEN_MB_US, _MEMORY, _READER = 0.66, 0.0117, 0.0119, 3.4e6, 0.025
_WAVE_US = 2.7
_OUT_US, _NORM_US, _NORMED_US, _ERF_US = 6.0e-3, 0.4, 1.2e-3, 0.013


# What `linear_configs` reckons over what the same tiles took in the run that these were fitted to, as one H200 is
# slower than another: where times of both forms are added up.
OF_LINEAR = 1.07


def hopper_swap_ab_us(config: HopperSwapABConfig, rows: int, n: int, k: int, target: Target, kind: str = "") -> float:
    """What a `[rows, k] x [n, k]` product takes by the costs of its parts, in us."""
    c, epilogue, tiles = config.consumers, set(kind.split("+")), config.tiles(max(1, rows), n)
    taken, out, steps = config.cols + config.rows, c * config.rows, -(-k // UNIT)
    shared = c * (UNIT + config.rows) + taken
    bounds = _TAKEN_ROW_US * taken, _SHARED_ROW_US * shared, _PRODUCT_ROW_US * out, _LANDING_US / (config.stages - 1)
    rounds, readers = -(-tiles // target.num_sms), -(-max(1, rows) // config.rows)
    weights = 2 * n * k / _MEMORY * (1 + _READER * (readers - 1))
    end = out * (_OUT_US + _ERF_US * ("gelu" in epilogue))
    end += _NORM_US + _NORMED_US * out if epilogue & {"norm", "rms"} else 0.0
    main = max(rounds * steps * max(_STEP_US, *bounds), weights) + _TAKEN_MB_US * tiles * steps * taken * 128e-6
    return _LAUNCH_US + _CTA_US * min(tiles, target.num_sms) + main + rounds * end + (rounds - 1) * _WAVE_US


def supports(n: int, k: int, kind: str) -> bool:
    """Whether a product of this shape may be followed by `kind`: see `transposed.unsupported`."""
    known = gemm_configs.supports(n, k, kind) and not UNKNOWN & set(kind.split("+"))
    return known and n % 16 == 0 and k >= 4 * UNIT


def _tiles_of(rows: int, n: int, target: Target) -> Iterator[tuple[int, int]]:
    """(rows, consumers) of tiles that all run at once: so many tile rows as there may be, or fewer, of the lowest tiles
    that do; of whole 16s above 64, so that budgets share code. Of many rows, of tiles in several full waves, too."""
    for consumers in range(1, MOST_CONSUMERS + 1):
        columns = -(-n // (UNIT * consumers))
        for count in range(1, target.num_sms // columns + 1):
            height = -(-rows // count)
            multiple = MULTIPLE if height <= UNIT else 2 * MULTIPLE
            yield max(2 * MULTIPLE, -(-height // multiple) * multiple), consumers
        for waves in range(2, MOST_WAVES + 1) if rows > MOST_BUDGET else ():
            height = -(-rows // max(1, waves * target.num_sms // columns))
            yield -(-height // MULTIPLE) * MULTIPLE, consumers


def _deepest(rows: int, consumers: int, k: int, target: Target) -> int:
    """The most stages that shared memory and K allow."""
    none, one = (HopperSwapABConfig(rows, consumers, stages).shared_bytes() for stages in (0, 1))
    return min((target.max_shared - none) // (one - none), MOST_STAGES, -(-k // UNIT))


def _waits_for_its_sm(height: int, consumers: int, k: int, kind: str) -> bool:
    """Whether a tile's steps wait for what its SM takes in, which is more where CTAs lie in order, as a launch places
    them that finds all SMs free: on an H200 that is worth more than to begin early (docs/hopper.md)."""
    return consumers == 1 and height > UNIT and k >= LONG_K and "residual" in kind.split("+")


@lru_cache(maxsize=4096)
def hopper_swap_ab_candidates(rows: int, n: int, k: int, target: Target, kind: str) -> tuple[HopperSwapABConfig, ...]:
    """What a tuner may try."""
    if not supports(n, k, kind):
        return ()
    found = (
        HopperSwapABConfig(
            height,
            consumers,
            _deepest(height, consumers, k, target),
            pdl=uses_pdl(rows, kind) and not _waits_for_its_sm(height, consumers, k, kind),
        )
        for height, consumers in dict.fromkeys(_tiles_of(rows, n, target))
    )
    return tuple(c for c in found if not wrong_hopper_swap_ab(c, target, torch.bfloat16) and not spills(c, kind))


@lru_cache(maxsize=4096)
def hopper_swap_ab_config(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, kind: str
) -> HopperSwapABConfig | None:
    """The configuration that takes least time by `hopper_swap_ab_us`; None where `kernels.hopper.linear` takes less
    by its own costs, or nothing runs. Arguments as of `hopper_gemm_config`."""
    other = hopper_gemm_config(rows, n, k, dtype, target, kind)
    if other is None or kind not in PROVEN[dtype] or rows > MOST_BUDGET:
        return None
    costs = {c: mean_us(c, rows, n, k, target, kind) for c in hopper_swap_ab_candidates(rows, n, k, target, kind)}
    best = min(costs, key=lambda c: costs[c], default=None)
    return best if best is not None and costs[best] < hopper_gemm_mean_us(other, rows, n, k, kind) else None


def mean_us(config: HopperSwapABConfig, rows: int, n: int, k: int, target: Target, kind: str) -> float:
    """The mean over what a budget of `rows` may hold."""
    return mean_over_contents(lambda content: hopper_swap_ab_us(config, content, n, k, target, kind), rows)
