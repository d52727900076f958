"""Tiles of `kernels.hopper.alternating`, which of them a tuner may try, and where the heuristic takes it."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from fusedvit.kernels.hopper.gemm_configs import hopper_gemm_config, tile_of, uses_pdl
from fusedvit.kernels.hopper.gemm_swap_ab_configs import LONG_K, UNIT, UNIT_BYTES, OfChunks, supports
from fusedvit.kernels.tile_configs import Target

HALVES = 2  # of 64 features each, that a consumer's tile has
COLS = HALVES * UNIT
STAGED = 2 * HALVES  # units on their way in and out: each consumer's halves of a chunk
LEAST_ROWS, MOST_ROWS, MULTIPLE = 16, 128, 16
# Rows from which the tuner may try it: at 2048 of a block's others were faster on an H200. With a long K fewer will do,
# if there are two tiles an SM.
LEAST_BUDGET = 3328
TRIED = (128, 112)  # rows of tiles: others were slower
# Where the heuristic takes it, of what has run on an H200 and was right. In `ALONE` of plain Triton; in `INSTEAD` of
# `linear.py`'s two consumers in turns with a tile of 128 x 128 each, which it does the other way round: it was 2 % to
# 12 % faster in 91 of 113 products with K above 1024, in most others as fast, and in 5 of 27 with a shorter K.
INSTEAD = {torch.bfloat16: ("residual+stats", "norm+gelu_tanh", "norm+gelu", "norm+quick_gelu", "bias")}
ALONE = {torch.bfloat16: ("stats", "rms")}
SHORT_K = 1024
OF_A_TILE = 64  # what a tile takes whatever its height, in rows: so an H200's table differs in 14 of 345 heights
_MOMENTS_BYTES = 2 * 2 * 1024  # of both consumers
_LAUNCH_REGISTERS = 168


@dataclass(frozen=True)
class HopperAlternatingConfig(OfChunks):
    """Tile and schedule of one launch.

    Attributes:
        rows: rows of a tile, 16 to 128, a multiple of 16.
        stages: depth of the operand ring.
        max_programs: bounds the persistent grid.
        pdl: see `HopperGemmConfig`.
    """

    rows: int
    stages: int
    max_programs: int = 132
    pdl: bool = False

    @property
    def cols(self) -> int:
        """Columns of a tile."""
        return COLS

    @property
    def block_n(self) -> int:
        """Columns of a part of the row statistics."""
        return UNIT

    def tiles(self, rows: int, n: int) -> int:
        """Tiles of an output of `rows` rows and `n` columns."""
        return -(-rows // self.rows) * -(-n // self.cols)

    def ring_bytes(self) -> int:
        """Operands of 16 bits."""
        return self.stages * (HALVES + self.chunks) * UNIT_BYTES

    def shared_bytes(self) -> int:
        """Shared memory in bytes: the ring, chunks on their way, moments, barriers, what Triton hands to partitions."""
        return self.ring_bytes() + STAGED * UNIT_BYTES + _MOMENTS_BYTES + 8 * (2 * self.stages + 4) + 256

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments, in its order."""
        return {"ROWS": self.rows, "WIDTH": self.width, "BOX": self.box, "STAGES": self.stages}

    def options(self) -> dict[str, int]:
        """Launch options. Registers are bounded so that `warp_specialize` can hand them out anew."""
        return {"num_warps": 4, "maxnreg": _LAUNCH_REGISTERS, "launch_pdl": self.pdl}


def wrong_hopper_alternating(config: HopperAlternatingConfig, target: Target, dtype: torch.dtype) -> str:
    """Why `config` cannot run on `target`, or ""."""
    if config.rows not in range(LEAST_ROWS, MOST_ROWS + 1, MULTIPLE):
        return f"rows must be {LEAST_ROWS} to {MOST_ROWS} in {MULTIPLE}s, got {config}"
    if config.stages < 2 or config.max_programs < 1:
        return f"stages must be at least 2, max_programs positive, got {config}"
    if config.shared_bytes() > target.max_shared:
        return f"{config.shared_bytes()} bytes of shared memory, limit {target.max_shared}"
    return ""


@lru_cache(maxsize=4096)
def hopper_alternating_config(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, kind: str
) -> HopperAlternatingConfig | None:
    """The height whose rounds of tiles take least; None where another form is as fast. Arguments as of
    `hopper_gemm_config`."""
    if target.capability != 90:
        return None
    if kind in INSTEAD.get(dtype, ()) and k > SHORT_K:
        other = hopper_gemm_config(rows, n, k, dtype, target, kind)
        taken = other is not None and tile_of(other) == (2 * UNIT, COLS, 1)
    else:
        taken = kind in ALONE.get(dtype, ())
    found = hopper_alternating_candidates(rows, n, k, target, kind) if taken else ()
    return min(found, key=lambda c: -(-c.tiles(rows, n) // c.max_programs) * (c.rows + OF_A_TILE), default=None)


@lru_cache(maxsize=4096)
def hopper_alternating_candidates(
    rows: int, n: int, k: int, target: Target, kind: str
) -> tuple[HopperAlternatingConfig, ...]:
    """What a tuner may try; arguments as of `hopper_gemm_config`."""
    if "rope" in kind.split("+") or not supports(n, k, kind):  # with these it was slower
        return ()
    if rows < LEAST_BUDGET and (k < LONG_K or rows * n < 2 * target.num_sms * MOST_ROWS * COLS):
        return ()
    none, one = (HopperAlternatingConfig(max(TRIED), stages).shared_bytes() for stages in (0, 1))
    stages = (target.max_shared - none) // (one - none)
    if -(-k // UNIT) < stages:
        return ()
    early = uses_pdl(rows, kind)
    return tuple(HopperAlternatingConfig(height, stages, target.num_sms, early) for height in TRIED)
