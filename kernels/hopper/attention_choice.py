"""Which schedule a budget's attention takes on Hopper: what each costs, by waves, over the contents it may have.

    us = launch + rounds (tile + step blocks)        rounds = ceil(tiles heads / CTAs), blocks = ceil(length / block_n)

of frames of one length. A CTA takes a round for each of its tiles and a step for each block of keys; a CTA that has an
SM to itself, though two could share it, takes half as long. Fitted to what an H200 timed (docs/hopper-attention.md):
off by 3 % (rms), 9 % at worst.
"""

from dataclasses import dataclass, replace

import torch

from fusedvit.kernels.configs import Target
from fusedvit.kernels.hopper.configs import (
    LONG,
    LONG_OF_64,
    LONG_OF_80,
    MEASURED,
    OVERLAP,
    SHORT,
    SHORT_OF_64,
    SMALL_WIDE,
    TINY,
    WIDE,
    HopperAttentionConfig,
    absent,
    hopper_attention_candidates,
)

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
    chosen = replace(chosen, max_programs=chosen.ctas * sms, overlap=OVERLAP)
    return in_order(chosen, rows, heads, head_dim, kind)


def hopper_attention_proposals(
    rows: int, heads: int, head_dim: int, dtype: torch.dtype, target: Target, kind: str = ALL_FRAMES
) -> list[HopperAttentionConfig]:
    """What is worth timing for such a budget."""
    proposed = hopper_attention_candidates(head_dim, dtype, target)
    return [in_order(config, rows, heads, head_dim, kind) for config in proposed]
