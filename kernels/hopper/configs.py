"""Schedules of the attention kernel for Hopper: what there is, what can run, what the tuner tries."""

import functools
from dataclasses import dataclass, replace

import torch

from fusedvit.kernels.attention import split_head
from fusedvit.kernels.configs import Target
from fusedvit.kernels.hopper import compat
from fusedvit.kernels.hopper.attention_places import placed_bytes

MAX_HEAD = 128
QUERIES = 64  # of a consumer
SHIFT = 16  # columns of the step of K that shifts scores: the fewest that an instruction has
SUMS = 8  # columns of a product with ones, all alike: the fewest that an instruction has
OVERLAP = True  # whether what is chosen here begins before the previous launch has ended
_placed_bytes = functools.cache(placed_bytes)  # asked at every launch


@dataclass(frozen=True)
class HopperAttentionConfig:
    """Schedule of `kernels.hopper.attention`.

    Attributes:
        consumers: warpgroups of a CTA that multiply, 1 to 3, each 64 queries of one tile.
        block_n: keys of a step.
        stages: steps whose keys and values a CTA holds.
        ctas: CTAs that share an SM.
        ping_pong: consumers issue their products in turn.
        together: heads of every tile that are walked before the next ones (see `attention_parts.place`); all where
            it is 0 or does not divide their number.
        late: P is rounded under the next Q K, which spares moves and takes registers (see `attention_softmax.rounded`).
        ones: rows of P are summed by a product with ones, not added up in registers.
        shifted: scores come out of the product less their row's offset, by a step of K more; no addition each.
        near: that step is left out where a tile's first scores are small (see attention_softmax.py); in bfloat16.
        by_warp: warps wait and arrive for themselves (see attention_barriers.py), where memory is placed for it.
        max_programs: bound of the persistent grid.
        overlap: begin before the previous launch has ended (programmatic dependent launch), see `OVERLAP`. The previous
            launch must not be what writes the tiles.
    """

    consumers: int
    block_n: int
    stages: int
    ctas: int = 1
    ping_pong: bool = False
    together: int = 0
    late: bool = False
    ones: bool = False
    shifted: bool = False
    near: bool = False
    by_warp: bool = False
    max_programs: int = 132
    overlap: bool = False

    @property
    def block_m(self) -> int:
        """Queries of a tile of `Segments`."""
        return self.consumers * QUERIES

    def spare(self, head_dim: int) -> bool:
        """Whether tails' products shift scores and sum rows as well (attention_spare.py)."""
        return self.shifted and self.block_n == QUERIES and head_dim == 72

    def summed(self, head_dim: int) -> bool:
        """Whether the last product with values sums rows of P as well (attention_sums.py)."""
        return self.block_n == QUERIES and head_dim in (64, 80)

    def placed_bytes(self, head_dim: int) -> int:
        """Of the array of attention_places.py; 0 where there is none."""
        if not (self.spare(head_dim) or self.summed(head_dim)):
            return 0
        return _placed_bytes(head_dim, self.consumers, self.stages, self.by_warp)

    def constants(self, heads: int, head_dim: int) -> dict[str, int | bool]:
        """The kernel's compile-time arguments, in its order."""
        spare, summed = self.spare(head_dim), self.summed(head_dim)
        shifted = self.shifted and not spare
        return {
            "CONSUMERS": self.consumers,
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
            "PING_PONG": self.ping_pong,
            "TOGETHER": self.together if self.together and heads % self.together == 0 else heads,
            "LATE": self.late,
            "ONES": self.ones and not spare and not summed,
            "SHIFTED": shifted,
            "NEAR": self.near and shifted,
            "SPARE": spare,
            "SUMMED": summed,
            "BY_WARP": self.by_warp and (spare or summed),
        }


MEASURED = (64, 72, 80, 128)  # head_dims that were timed on an H200; for others `fusedvit tune` may choose the form
TINY = HopperAttentionConfig(1, 64, 3, ctas=2, shifted=True)
SHORT = HopperAttentionConfig(2, 64, 6, ping_pong=True, late=True, ones=True, shifted=True, by_warp=True)
MIDDLE = HopperAttentionConfig(2, 128, 3, ping_pong=True, shifted=True)
LONG = HopperAttentionConfig(3, 64, 4, ping_pong=True, shifted=True)
# The same as heads of 64 and 80 are fastest.
SHORT_OF_64 = replace(SHORT, ping_pong=False, near=True, by_warp=False)
MIDDLE_OF_64 = replace(MIDDLE, ping_pong=False, ones=True)
ROOMY = not compat.NEEDS_MORE_REGISTERS  # for three consumers, which spill else
LONG_OF_64 = replace(LONG, ping_pong=False, late=ROOMY, near=ROOMY)
LONG_OF_80 = replace(LONG, near=ROOMY, by_warp=ROOMY)
SMALL_WIDE = HopperAttentionConfig(1, 64, 2, ctas=2)  # for heads of 128, as TINY
WIDE = HopperAttentionConfig(2, 64, 4, late=True)  # for heads of 128


def shared_bytes(config: HopperAttentionConfig, head_dim: int) -> int:
    """Shared memory of a CTA: two tiles of queries, the ring, both kinds of ones, and lines of output on their way."""
    head, tail = split_head(head_dim, MAX_HEAD)
    constants = config.constants(1, head_dim)
    lines = 0 if config.consumers == 3 else config.block_m * 2 * head
    ones = constants["ONES"] * config.consumers * SUMS * config.block_n * 2
    shift = constants["SHIFTED"] * config.consumers * config.block_n * SHIFT * 2
    tiles = 4 * (config.block_m + config.stages * config.block_n) * (head + tail)
    return (config.placed_bytes(head_dim) or tiles) + lines + ones + shift + 1024


def hopper_attention_candidates(head_dim: int, dtype: torch.dtype, target: Target) -> list[HopperAttentionConfig]:
    """Schedules that were the fastest somewhere, or may be; those that spill at a head's width are pruned."""
    if head_dim == 128:
        in_turns = replace(WIDE, ping_pong=True)
        found = [SMALL_WIDE, WIDE, in_turns, replace(in_turns, stages=3), replace(WIDE, stages=3, shifted=True)]
    else:
        short, middle, long = SHORT, [MIDDLE], LONG_OF_80 if head_dim == 80 else LONG
        if head_dim == 64:
            short, long = SHORT_OF_64, LONG_OF_64
            middle = [MIDDLE_OF_64, HopperAttentionConfig(1, 128, 2, ctas=2, shifted=True)]
        turned = [replace(short, ping_pong=not short.ping_pong), replace(short, by_warp=not short.by_warp)]
        if head_dim == 80:
            turned += [replace(config, near=True) for config in (short, *turned)]
        varied = [replace(long, late=not long.late), replace(long, near=not long.near)]
        found = [TINY, short, *middle, long, *turned, *varied]
    found = [replace(config, max_programs=config.ctas * target.num_sms, overlap=OVERLAP) for config in found]
    return [config for config in found if not wrong_hopper_attention(config, target, dtype)]


def absent(target: Target, dtype: torch.dtype) -> str:
    """Why the kernel cannot run there, or ""."""
    if dtype.itemsize != 2:
        return "bfloat16 and float16 only"
    if not compat.AVAILABLE:
        return compat.MISSING
    return "" if compat.usable(target.capability) else f"Hopper only, not sm_{target.capability} or the interpreter"


def wrong_hopper_attention(config: HopperAttentionConfig, target: Target, dtype: torch.dtype) -> str:
    """Why `config` cannot run on `target`, or ""."""
    if config.consumers not in (1, 2, 3) or config.block_n not in (64, 128):
        return f"consumers must be 1 to 3 and block_n 64 or 128, got {config}"
    if config.stages < 2 or min(config.ctas, config.max_programs) < 1 or config.together < 0:
        return f"stages, ctas, together or max_programs out of range: {config}"
    if config.ping_pong and config.consumers == 1:
        return "one consumer has nobody to take turns with"
    needed = config.ctas * shared_bytes(config, 64)
    if needed > target.max_shared:
        return f"{needed} bytes of shared memory, limit {target.max_shared}"
    return absent(target, dtype)
