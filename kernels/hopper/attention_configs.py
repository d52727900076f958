"""Schedules of the Hopper attention kernel: where they run, what they cost, and which one a budget takes.

    us = launch + rounds (tile + step blocks)        rounds = ceil(tiles heads / CTAs), blocks = ceil(length / BLOCK_N)

for frames of one length. A CTA takes a round for each of its tiles and a step for each block of keys; a CTA that has an
SM to itself, though two could share it, takes half as long. Fitted to times of an H200 (docs/kernels.md): off
by 3 % (rms), 9 % at worst.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.hopper.gluon_compat import absent
from fusedvit.kernels.tile_configs import Target, split_head

UNIT = 8192  # bytes of 64 rows of 64 columns
TAIL_UNIT = UNIT // 4  # of 64 rows of 16 columns
SPARE_UNIT = UNIT // 8  # of 64 rows of 8 columns: the tail of a head of 72, or the ones next to it
MAX_BARRIERS = 32  # of a CTA; a `SmemLayout` has them at a multiple of it


class SmemLayout(NamedTuple):
    """Where operands begin in one array of shared memory, whose WGMMAs and barriers find them by address.

    Offsets are in units, a different one per operand (below), as the kernel's views are indexed in them. Heads of 64
    and 80 have queries, keys, values, their tails, then ones; heads of 72 have the tails, which are narrower, first.
    Barriers lie behind all.

    Attributes:
        q, k, v: in `UNIT`.
        q_tail: in `TAIL_UNIT`.
        k_tail, v_tail: in `TAIL_UNIT`, of heads of 72 in `SPARE_UNIT`.
        ones: in `TAIL_UNIT`, of heads of 72 in `SPARE_UNIT`, a block a consumer.
        barriers: in 8 bytes.
        units: size of the array in `UNIT`.
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


def smem_layout(head_dim: int, consumers: int, stages: int, by_warp: bool) -> SmemLayout:
    """Layout of heads of 64, 72 or 80, with room for barriers if `by_warp`. For kernels, too: it calls no function."""
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
    barriers = 4 + 2 * stages + consumers if by_warp else 0  # q_full, q_empty, full, empty, order
    units = (end + 8 * barriers + UNIT - 1) // UNIT
    return SmemLayout(q, q_tail, k, k_tail, v, v_tail, ones, end // 8, units)


def smem_layout_bytes(head_dim: int, consumers: int, stages: int, by_warp: bool) -> int:
    """Size of the array in bytes."""
    return smem_layout(head_dim, consumers, stages, by_warp).units * UNIT


MAX_HEAD = 128
QUERIES = 64  # of a consumer
BLOCK_N = 64  # keys of a step
SHIFT = 16  # columns of the product that shifts scores: the fewest that a WGMMA has
SUMS = 8  # columns of a product with ones, all equal: the fewest that a WGMMA has
_smem_layout_bytes = functools.cache(smem_layout_bytes)  # needed at every launch


@dataclass(frozen=True)
class HopperAttentionConfig:
    """Schedule of `kernels.hopper.attention`.

    Attributes:
        consumers: warpgroups of a CTA that multiply, 1 to 3, each with 64 queries of one tile.
        stages: steps whose keys and values a CTA holds.
        ctas: CTAs that share an SM.
        ping_pong: consumers issue their products one after the other.
        together: heads of every tile that are walked before the next heads (see `attention_smem.tile_and_head`); all
            where it is 0 or does not divide their number.
        late: P is rounded under the next Q K: fewer moves, more registers (see `attention_consumer.rounded`).
        shifted: the product subtracts each row's offset from its scores, by one step of K more, in place of an addition
            per score.
        near: with `shifted` in bfloat16, nothing is subtracted where the first scores of a tile are small (see
            attention_consumer.py).
        by_warp: warps wait and arrive at barriers one by one (see `attention_smem`), where a `SmemLayout` is used.
        max_programs: bound of the persistent grid.
        pdl: begin before the previous launch has ended (programmatic dependent launch). The previous launch must not
            be the one that writes the tiles.
    """

    consumers: int
    stages: int
    ctas: int = 1
    ping_pong: bool = False
    together: int = 0
    late: bool = False
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
        """Whether the spare columns of tails shift scores and sum rows."""
        return self.shifted and head_dim == 72

    def summed(self, head_dim: int) -> bool:
        """Whether the last product with values sums rows of P as well."""
        return head_dim in (64, 80)

    def operand_bytes(self, head_dim: int) -> int:
        """Size in bytes of the array that a `SmemLayout` describes; 0 where there is none."""
        if not (self.spare(head_dim) or self.summed(head_dim)):
            return 0
        return _smem_layout_bytes(head_dim, self.consumers, self.stages, self.by_warp)

    def constants(self, heads: int, head_dim: int) -> dict[str, int | bool]:
        """The kernel's compile-time arguments, in its order."""
        spare, summed = self.spare(head_dim), self.summed(head_dim)
        shifted = self.shifted and not spare
        return {
            "CONSUMERS": self.consumers,
            "STAGES": self.stages,
            "PING_PONG": self.ping_pong,
            "TOGETHER": self.together if self.together and heads % self.together == 0 else heads,
            "LATE": self.late,
            "SHIFTED": shifted,
            "NEAR": self.near and shifted,
            "SPARE": spare,
            "SUMMED": summed,
            "BY_WARP": self.by_warp and (spare or summed),
        }


MEASURED = (64, 72, 80, 128)  # head_dims that were timed on an H200; for others `fusedvit tune` may choose this backend
ROOMY = not gluon_compat.NEEDS_MORE_REGISTERS  # three consumers have registers for `late`, `near`, `by_warp`
TINY = HopperAttentionConfig(1, 3, ctas=2, shifted=True)
SHORT = HopperAttentionConfig(2, 6, ping_pong=True, late=True, shifted=True, by_warp=True)
SHORT_OF_64 = replace(SHORT, ping_pong=False, near=True, by_warp=False)
LONG = HopperAttentionConfig(3, 4, ping_pong=True, shifted=True)
LONG_OF_64 = replace(LONG, ping_pong=False, late=ROOMY, near=ROOMY)
LONG_OF_80 = replace(LONG, near=ROOMY, by_warp=ROOMY)
SMALL_WIDE = HopperAttentionConfig(1, 2, ctas=2)  # for heads of 128, as TINY
WIDE = HopperAttentionConfig(2, 4, late=True)  # for heads of 128


def shared_bytes(config: HopperAttentionConfig, head_dim: int) -> int:
    """Shared memory of a CTA in bytes: two tiles of queries, the pipeline, ones, and output lines on their way."""
    head, tail = split_head(head_dim, MAX_HEAD)
    lines = 0 if config.consumers == 3 else config.block_m * 2 * head
    shift = config.constants(1, head_dim)["SHIFTED"] * config.consumers * BLOCK_N * SHIFT * 2
    tiles = 4 * (config.block_m + config.stages * BLOCK_N) * (head + tail)
    return (config.operand_bytes(head_dim) or tiles) + lines + shift + 1024


def hopper_attention_candidates(head_dim: int, dtype: torch.dtype, target: Target) -> list[HopperAttentionConfig]:
    """Schedules that were the fastest somewhere, or may be."""
    if head_dim == 128:
        ping_pong = replace(WIDE, ping_pong=True)
        found = [SMALL_WIDE, WIDE, ping_pong, replace(ping_pong, stages=3), replace(WIDE, stages=3, shifted=True)]
    else:
        tiny, short, long = schedules(head_dim)
        shorts = [short, replace(short, ping_pong=not short.ping_pong), replace(short, by_warp=not short.by_warp)]
        if head_dim == 80:
            shorts += [replace(config, near=True) for config in shorts]
        found = [tiny, *shorts, long, replace(long, late=not long.late), replace(long, near=not long.near)]
    found = [replace(config, max_programs=config.ctas * target.num_sms, pdl=True) for config in found]
    return [config for config in found if not wrong_hopper_attention(config, target, dtype)]


def wrong_hopper_attention(config: HopperAttentionConfig, target: Target, dtype: torch.dtype) -> str:
    """Why `config` cannot run on `target`, or ""."""
    if config.consumers not in (1, 2, 3):
        return f"consumers must be 1 to 3, got {config.consumers}"
    if config.stages < 2 or min(config.ctas, config.max_programs) < 1 or config.together < 0:
        return f"stages must be at least 2, ctas and max_programs positive, together not negative, got {config}"
    if config.ping_pong and config.consumers == 1:
        return "ping_pong needs at least 2 consumers, got 1"
    needed = config.ctas * shared_bytes(config, 64)
    if needed > target.max_shared:
        return f"{needed} bytes of shared memory, limit {target.max_shared}"
    return absent(target.capability, dtype)


def spills(config: HopperAttentionConfig) -> bool:
    """Whether ptxas runs out of registers, as Triton compiles three consumers from 3.8 on."""
    extras = config.late or config.near or config.by_warp
    return gluon_compat.NEEDS_MORE_REGISTERS and config.consumers == 3 and extras


FRAMES = (196, 784, 1024)  # tokens of a frame of 224 px and of pictures of 448 and 512 px
PICTURE = 2.0  # weight of the case that one picture fills the budget, in the choice of a schedule; of others 1
WINDOW = 64  # tokens of an attention window
SHORT_FRAME = 4096  # tokens of the longest frame of the first list of two; longer ones are in the other
TWO_LISTS, TWO_LISTS_OF_64 = 12288, 20480  # budgets from which two lists are faster: an empty launch takes 2.3 us
KEPT_BYTES = 48 << 20  # keys and values of all heads that stay in L2, about
HEADS_TOGETHER = 4  # where they do not
ALL_FRAMES, SHORT_FRAMES, LONG_FRAMES, WINDOWS = "", "short", "long", "window"  # an attention's kind


@dataclass(frozen=True)
class Cost:
    """Microseconds: once, of each tile of a CTA, and of each block of keys of such a tile."""

    launch: float
    tile: float
    step: float


# By consumers, then by head_dim.
COSTS = {
    1: {
        64: Cost(3.65, 2.24, 0.189),
        72: Cost(3.06, 2.34, 0.733),
        80: Cost(3.67, 2.59, 0.367),
        128: Cost(2.2, 3.10, 0.758),
    },
    2: {
        64: Cost(4.06, 0.87, 0.432),
        72: Cost(4.08, 1.18, 0.520),
        80: Cost(3.79, 1.06, 0.541),
        128: Cost(2.7, 1.60, 0.730),
    },
    3: {64: Cost(4.70, 1.33, 0.648), 72: Cost(4.80, 1.99, 0.737), 80: Cost(4.67, 1.97, 0.767)},
}
TIMED_TO = {TINY: 512, SMALL_WIDE: 1024}  # tokens of the longest frame that it was timed with, where that is few


def microseconds(config: HopperAttentionConfig, frames: int, length: int, heads: int, head_dim: int, sms: int) -> float:
    """Of `frames` frames of `length` tokens, expected."""
    cost = COSTS[config.consumers][head_dim]
    tiles = frames * -(-length // config.block_m) * heads
    rounds = -(-tiles // (config.ctas * sms)) * (1 / config.ctas if tiles <= sms else 1.0)
    return cost.launch + rounds * (cost.tile + cost.step * -(-length // BLOCK_N))


def two_lists(rows: int, head_dim: int) -> bool:
    """Whether long and short frames of a budget have a list of tiles and a schedule each.

    Heads of 64 from larger budgets on: one schedule is the best for 64 x 256, 16 x 1024 and 1 x 16384.
    """
    return rows >= (TWO_LISTS_OF_64 if head_dim == 64 else TWO_LISTS)


def contents(rows: int, kind: str) -> list[tuple[int, int]]:
    """Typical batches of a budget of `rows`, as (frames, tokens of each): one picture, several, a video's frames.

    Each fills more than four fifths of the budget. Only frames of `kind`.
    """
    if kind == WINDOWS:
        return [(max(1, rows // WINDOW), WINDOW)]
    found = [(rows // n, n) for n in dict.fromkeys((rows, *FRAMES)) if rows // n * n > 0.8 * rows]
    return [c for c in found if kind == ALL_FRAMES or (c[1] > SHORT_FRAME) == (kind == LONG_FRAMES)]


def in_order(config: HopperAttentionConfig, rows: int, heads: int, head_dim: int, kind: str) -> HopperAttentionConfig:
    """`config`, with a few heads of every tile walked before the next heads where keys and values of all exceed L2.

    Loads from memory cost power: under sustained load 3 to 5 % of attention with one long frame. A tuner does not
    choose it, since with pauses between launches, each at full clock, it makes no difference.
    """
    long = kind in (ALL_FRAMES, LONG_FRAMES) and 4 * rows * heads * head_dim > KEPT_BYTES
    return replace(config, together=HEADS_TOGETHER if long else 0)


def schedules(head_dim: int) -> tuple[HopperAttentionConfig, ...]:
    """The schedules that the heuristic chooses from."""
    if head_dim == 128:
        return SMALL_WIDE, WIDE
    if head_dim == 64:
        return TINY, SHORT_OF_64, LONG_OF_64
    return TINY, SHORT, LONG_OF_80 if head_dim == 80 else LONG


def hopper_attention_config(
    rows: int, heads: int, head_dim: int, dtype: torch.dtype, target: Target, kind: str = ALL_FRAMES
) -> HopperAttentionConfig | None:
    """The schedule for varlen attention over `rows` packed tokens (a budget); None where it cannot run or has no costs.

    Lengths are not known here: of the schedules timed with frames as long as any of `contents`, the one that is nearest
    to the best of each, on average, one picture counting for more.
    """
    if absent(target.capability, dtype) or head_dim not in MEASURED:
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
    chosen = replace(chosen, max_programs=chosen.ctas * sms, pdl=True)
    return in_order(chosen, rows, heads, head_dim, kind)


def hopper_attention_proposals(
    rows: int, heads: int, head_dim: int, dtype: torch.dtype, target: Target, kind: str = ALL_FRAMES
) -> list[HopperAttentionConfig]:
    """Schedules worth timing: `hopper_attention_candidates`, with the arguments of `hopper_attention_config`."""
    proposed = hopper_attention_candidates(head_dim, dtype, target)
    return [in_order(config, rows, heads, head_dim, kind) for config in proposed]
