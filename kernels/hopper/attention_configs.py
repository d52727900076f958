"""Which schedule a budget's attention takes on Hopper: what each costs, by waves, over the contents it may have.

    us = launch + rounds (tile + step blocks)        rounds = ceil(tiles heads / CTAs), blocks = ceil(length / block_n)

of frames of one length. A CTA takes a round for each of its tiles and a step for each block of keys; a CTA that has an
SM to itself, though two could share it, takes half as long. Fitted to what an H200 timed (docs/hopper-attention.md):
off by 3 % (rms), 9 % at worst.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fusedvit.kernels.attention import split_head
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.tile_configs import Target

# ── attention places ──────────────────────────────────────────────────────────────────────────────────────────────────
# Where the parts of one array of shared memory lie, whose products and barriers are found by address.
#
# Heads of 64 and 80 have queries, keys, values, their tails and ones; of 72 tails, which are narrower, come first
# (attention_spare.py). Barriers that warps arrive at one by one (attention_barriers.py) are behind them all.

UNIT = 8192  # bytes of 64 rows of 64 columns
TAIL_UNIT = UNIT // 4  # of 64 rows of 16
SPARE_UNIT = UNIT // 8  # of 64 rows of 8: a tail of a head of 72, or ones beside it


class Places(NamedTuple):
    """Where each begins, in its own units, by which its views are indexed.

    Attributes:
        q, k, v: in `UNIT`.
        q_tail: in `TAIL_UNIT`.
        k_tail, v_tail: in `TAIL_UNIT`, of heads of 72 in `SPARE_UNIT`.
        ones: in `TAIL_UNIT`, of heads of 72 in `SPARE_UNIT`, a block a consumer.
        barriers: in 8 bytes.
        units: `UNIT`s of all.
    """

    q: int
    q_tail: int
    k: int
    k_tail: int
    v: int
    v_tail: int
    ones: int
    barriers: int
    units: int


def places(head_dim: int, consumers: int, stages: int, by_warp: bool) -> Places:
    """Of heads of 64, 72 or 80, with room for barriers if they are `by_warp`. Calls nothing: a kernel asks it, too."""
    queries = 2 * consumers
    if head_dim == 72:
        ones = 2 * stages
        q_tail = (ones + consumers + 1) // 2
        q = (q_tail + queries + 3) // 4
        end = (q + queries + 2 * stages) * UNIT
        k, k_tail, v, v_tail = q + queries, 0, q + queries + stages, stages
    else:
        tails = 1 if head_dim > 64 else 0
        q, k, v = 0, queries, queries + stages
        q_tail = 4 * (queries + 2 * stages)
        k_tail = q_tail + tails * queries
        v_tail = k_tail + tails * stages
        ones = v_tail + tails * stages
        end = (ones + 1) * TAIL_UNIT
    barriers = 4 + 2 * stages + consumers if by_warp else 0  # as attention_barriers.py has them
    units = (end + 8 * barriers + UNIT - 1) // UNIT
    return Places(q, q_tail, k, k_tail, v, v_tail, ones, end // 8, units)


def placed_bytes(head_dim: int, consumers: int, stages: int, by_warp: bool) -> int:
    """Of all of it."""
    return places(head_dim, consumers, stages, by_warp).units * UNIT


# ── configs ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Schedules of the attention kernel for Hopper: what there is, what can run, what the tuner tries.

MAX_HEAD = 128
QUERIES = 64  # of a consumer
SHIFT = 16  # columns of the step of K that shifts scores: the fewest that an instruction has
SUMS = 8  # columns of a product with ones, all alike: the fewest that an instruction has
USE_PDL = True  # whether what is chosen here begins before the previous launch has ended
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
        pdl: begin before the previous launch has ended (programmatic dependent launch), see `USE_PDL`. The previous
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
    pdl: bool = False

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
ROOMY = not gluon_compat.NEEDS_MORE_REGISTERS  # for three consumers, which spill else
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
    found = [replace(config, max_programs=config.ctas * target.num_sms, pdl=USE_PDL) for config in found]
    return [config for config in found if not wrong_hopper_attention(config, target, dtype)]


def absent(target: Target, dtype: torch.dtype) -> str:
    """Why the kernel cannot run there, or ""."""
    if dtype.itemsize != 2:
        return "bfloat16 and float16 only"
    if not gluon_compat.AVAILABLE:
        return gluon_compat.MISSING
    return (
        "" if gluon_compat.usable(target.capability) else f"Hopper only, not sm_{target.capability} or the interpreter"
    )


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


def spills(config: HopperAttentionConfig, head_dim: int) -> bool:
    """Whether ptxas runs out of registers, as Triton compiles three consumers from 3.8 on."""
    extras = config.late or config.near or config.by_warp
    return gluon_compat.NEEDS_MORE_REGISTERS and config.consumers == 3 and extras


# ── attention choice ──────────────────────────────────────────────────────────────────────────────────────────────────

FRAMES = (196, 784, 1024)  # tokens of a frame of 224 px and of pictures of 448 and 512 px
PICTURE = 2.0  # contents of a budget that one picture which fills it counts for
WINDOW = 64  # tokens of an attention window
SHORT_FRAME = 4096  # tokens of the longest frame of the first list of two; longer ones are in the other
TWO_LISTS, TWO_LISTS_OF_64 = 12288, 20480  # budgets from here on gain by them: an empty launch takes 2.3 us
KEPT_BYTES = 48 << 20  # of keys and values of all heads that L2 keeps, about
HEADS_AT_A_TIME = 4  # where it does not
ALL_FRAMES, SHORT_FRAMES, LONG_FRAMES, WINDOWS = "", "short", "long", "window"  # an attention's kind


@dataclass(frozen=True)
class Cost:
    """Microseconds: once, of each tile of a CTA, and of each block of keys of such a tile."""

    launch: float
    tile: float
    step: float


# By (consumers, keys of a step), then by head_dim.
COSTS = {
    (1, 64): {
        64: Cost(3.65, 2.24, 0.189),
        72: Cost(3.06, 2.34, 0.733),
        80: Cost(3.67, 2.59, 0.367),
        128: Cost(2.2, 3.10, 0.758),
    },
    (2, 64): {
        64: Cost(4.06, 0.87, 0.432),
        72: Cost(4.08, 1.18, 0.520),
        80: Cost(3.79, 1.06, 0.541),
        128: Cost(2.7, 1.60, 0.730),
    },
    (2, 128): {64: Cost(4.97, 0.81, 1.033), 72: Cost(4.32, 1.96, 1.077), 80: Cost(4.14, 1.72, 1.084)},
    (3, 64): {64: Cost(4.70, 1.33, 0.648), 72: Cost(4.80, 1.99, 0.737), 80: Cost(4.67, 1.97, 0.767)},
}
TIMED_TO = {TINY: 512, SMALL_WIDE: 1024}  # tokens of the longest frame that it was timed with, where that is few


def microseconds(config: HopperAttentionConfig, frames: int, length: int, heads: int, head_dim: int, sms: int) -> float:
    """Of `frames` frames of `length` tokens, expected."""
    cost = COSTS[config.consumers, config.block_n][head_dim]
    tiles = frames * -(-length // config.block_m) * heads
    rounds = -(-tiles // (config.ctas * sms)) * (1 / config.ctas if tiles <= sms else 1.0)
    return cost.launch + rounds * (cost.tile + cost.step * -(-length // config.block_n))


def two_lists(rows: int, head_dim: int) -> bool:
    """Whether a budget's long and short frames have a list of tiles each, and a schedule of their own.

    Heads of 64 later: one schedule is the best for 64 x 256, 16 x 1024 and 1 x 16384.
    """
    return rows >= (TWO_LISTS_OF_64 if head_dim == 64 else TWO_LISTS)


def contents(rows: int, kind: str) -> list[tuple[int, int]]:
    """(frames, tokens of each) that a budget of `rows` is judged by: one picture, several, a video's frames.

    Each fills more than four fifths: nearly what falls into it, and of several lengths. Frames of `kind` only.
    """
    if kind == WINDOWS:
        return [(max(1, rows // WINDOW), WINDOW)]
    found = [(rows // n, n) for n in dict.fromkeys((rows, *FRAMES)) if rows // n * n > 0.8 * rows]
    return [c for c in found if kind == ALL_FRAMES or (c[1] > SHORT_FRAME) == (kind == LONG_FRAMES)]


def in_order(config: HopperAttentionConfig, rows: int, heads: int, head_dim: int, kind: str) -> HopperAttentionConfig:
    """`config` with a few heads of every tile walked before the next ones where keys and values of all exceed L2.

    By turns, each of which finds the GPU's clock up, that gives nothing; under load without a pause, as a batch of that
    size is, 3 to 5 % of one long frame, as fetching costs power (docs/hopper-attention.md). So no tuner chooses it.
    """
    long = kind in (ALL_FRAMES, LONG_FRAMES) and 4 * rows * heads * head_dim > KEPT_BYTES
    return replace(config, together=HEADS_AT_A_TIME if long else 0)


def schedules(head_dim: int) -> tuple[HopperAttentionConfig, ...]:
    """Those to choose from."""
    if head_dim == 128:
        return SMALL_WIDE, WIDE
    if head_dim == 64:
        return TINY, SHORT_OF_64, LONG_OF_64
    return TINY, SHORT, LONG_OF_80 if head_dim == 80 else LONG


def hopper_attention_config(
    rows: int, heads: int, head_dim: int, dtype: torch.dtype, target: Target, kind: str = ALL_FRAMES
) -> HopperAttentionConfig | None:
    """The form for varlen attention over `rows` packed tokens (a budget), or None where it cannot run or was not timed.

    Lengths are not known here: of the schedules timed with frames as long as any of `contents`, the one that is nearest
    to the best of each, on average, one picture counting for more.
    """
    if absent(target, dtype) or head_dim not in MEASURED:
        return None
    held = contents(rows, kind)
    longest = max((length for _, length in held), default=0)
    offered = [s for s in schedules(head_dim) if longest <= TIMED_TO.get(s, longest)]
    if kind == WINDOWS:  # a window fills a tile of one consumer, and two of them an SM: the fastest at every size
        offered = offered[:1]
    sms = target.num_sms
    taken = {s: [microseconds(s, *c, heads, head_dim, sms) for c in held] for s in offered}
    least = [min(us) for us in zip(*taken.values(), strict=True)]
    weights = [PICTURE if frames == 1 else 1.0 for frames, _ in held]
    chosen = min(
        offered, key=lambda s: sum(w * us / best for w, us, best in zip(weights, taken[s], least, strict=True))
    )
    chosen = replace(chosen, max_programs=chosen.ctas * sms, pdl=USE_PDL)
    return in_order(chosen, rows, heads, head_dim, kind)


def hopper_attention_proposals(
    rows: int, heads: int, head_dim: int, dtype: torch.dtype, target: Target, kind: str = ALL_FRAMES
) -> list[HopperAttentionConfig]:
    """What is worth timing for such a budget."""
    proposed = hopper_attention_candidates(head_dim, dtype, target)
    return [in_order(config, rows, heads, head_dim, kind) for config in proposed]
