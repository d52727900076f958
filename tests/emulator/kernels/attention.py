"""`python -m tests.emulator.kernels.attention --head-dim 72`: attention as compiled for Hopper, on the emulator.

A process without Triton's interpreter. A schedule is checked as tests/gpu/test_hopper_attention.py does on a
GPU, with fewer tokens: the rule, NaN past the end, rows whose softmax overflows, and the same bits in every order of
warps and copies. Races and accesses outside tensors are the emulator's own to find. Prints a line a schedule.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from fusedvit.kernels.hopper import attention
from fusedvit.kernels.hopper.attention_configs import HopperAttentionConfig, schedules
from tests.emulator.launches import emulated
from tests.emulator.machine import promptness_for
from tests.kernels import attention_cases
from tests.kernels.attention_cases import packed, segments, with_room
from tests.kernels.support import NAN, assert_within

CPU, HEADS, ROOM = torch.device("cpu"), 2, 70
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = [1, 64, 70, 5, 130, 63]  # several tiles a CTA; frames of less than a tile


def chosen(head_dim: int, variants: bool) -> Iterator[tuple[str, HopperAttentionConfig]]:
    """The schedules that the heuristic chooses from, and with `variants` those that a tuner may choose."""
    for config in schedules(head_dim):
        yield "", replace(config, max_programs=3, pdl=True)
        if not variants:
            continue
        switches = ("late", "by_warp") if config.consumers == 1 else ("late", "by_warp", "near", "ping_pong")
        changes = {name: {name: not getattr(config, name)} for name in switches}
        if config.consumers > 1:
            changes["together"] = {"together": 1}
        for name, change in changes.items():
            variant = replace(config, max_programs=3, **change)
            if variant.constants(HEADS, head_dim) != config.constants(HEADS, head_dim):
                yield name, variant


def attend(
    qkv: torch.Tensor,
    lengths: list[int],
    head_dim: int,
    config: HopperAttentionConfig,
    seed: int,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    segs = segments(lengths, config.block_m, CPU, room=5)
    with emulated(seed=seed, promptness=promptness_for(seed), ready=(segs.tiles, segs.num_tiles)):
        return attention_cases.run(attention.attention, with_room(qkv, ROOM), segs, head_dim, config, clip)


def check(
    lengths: list[int],
    head_dim: int,
    dtype: torch.dtype,
    config: HopperAttentionConfig,
    change: Callable[[torch.Tensor], None] | None = None,
    seed: int = 0,
) -> None:
    """The rule, nothing written past the end, and the same bits in another order."""
    qkv = packed(lengths, head_dim, dtype, CPU, seed, HEADS)
    if change is not None:
        change(qkv.view(len(qkv), 3, HEADS, head_dim))
    out = attend(qkv, lengths, head_dim, config, seed)
    assert out[len(qkv) :].isnan().all(), "rows past the last frame were written"
    wide, own = (attention_cases.plain(qkv, lengths, head_dim, of) for of in (torch.float64, dtype))
    assert_within(out[: len(qkv)], wide, own, f"{lengths}, {change}, {config}:")
    assert torch.equal(attend(qkv, lengths, head_dim, config, seed + 1)[: len(qkv)], out[: len(qkv)]), "other bits"


def growing(qkv: torch.Tensor) -> None:
    """Keys of a frame's first block say nothing of those behind them: every exponent overflows."""
    qkv[140:, 1] *= 300.0


def creeping(qkv: torch.Tensor) -> None:
    """Exponentials that fp16 cannot hold and bf16 can."""
    qkv[140:, 1] *= 6.0


def massive(qkv: torch.Tensor) -> None:
    """Two channels of queries and keys thirty times the others."""
    qkv[:, :2, :, [3, qkv.shape[3] - 2]] *= 30.0


def nan_stays_in_its_frame(head_dim: int, dtype: torch.dtype, config: HopperAttentionConfig) -> None:
    """Frames of NaN on both sides: bit for bit as beside real numbers."""
    lengths = [5, 130, 9, 70, 6]
    qkv = packed(lengths, head_dim, dtype, CPU, heads=HEADS)
    poisoned = qkv.clone()
    for frame in list(poisoned.split(lengths))[::2]:
        frame.fill_(NAN)
    clean = attend(qkv, lengths, head_dim, config, 0)[: len(qkv)].split(lengths)
    out = attend(poisoned, lengths, head_dim, config, 1)[: len(qkv)].split(lengths)
    for i, frame in enumerate(out):
        assert frame.isnan().all() if i % 2 == 0 else torch.equal(frame, clean[i]), f"{config}, frame {i}"


def within_bounds(head_dim: int, dtype: torch.dtype, config: HopperAttentionConfig) -> None:
    """Bit for bit the output without bounds, clamped; also of a tile that is computed again."""
    qkv, clip = packed(LENGTHS, head_dim, dtype, CPU, heads=HEADS), torch.tensor([-0.25, 0.125])
    growing(qkv.view(len(qkv), 3, HEADS, head_dim))
    free, held = (attend(qkv, LENGTHS, head_dim, config, 0, bounds)[: len(qkv)] for bounds in (None, clip))
    assert free.min() < -0.25 and free.max() > 0.125
    assert torch.equal(held, free.clamp(-0.25, 0.125)), f"{config}: not the bounded output"


def nothing_to_do(head_dim: int, dtype: torch.dtype, config: HopperAttentionConfig) -> None:
    assert attend(packed([8], head_dim, dtype, CPU, heads=HEADS), [], head_dim, config, 0).isnan().all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--cases", type=int, default=4, help="random ones a schedule that ships")
    parser.add_argument("--short", action="store_true", help="one kind of large values, no random cases")
    parser.add_argument("--variants", action="store_true", help="schedules that a tuner may choose besides")
    args = parser.parse_args()
    dtype, rng = DTYPES[args.dtype], random.Random(args.head_dim)
    for name, config in chosen(args.head_dim, args.variants):
        check(LENGTHS, args.head_dim, dtype, config)
        nothing_to_do(args.head_dim, dtype, config)
        for change in () if name else (creeping,) if args.short else (creeping, growing, massive):
            check([100, 230, 5], args.head_dim, dtype, config, change)
        if not name:
            within_bounds(args.head_dim, dtype, config)
            nan_stays_in_its_frame(args.head_dim, dtype, config)
        for seed in range(0 if name or args.short else args.cases):
            lengths = [rng.choice([1, 4, 63, 64, 65, 128, rng.randint(1, 250)]) for _ in range(rng.randint(1, 4))]
            check([*lengths, 200], args.head_dim, dtype, config, seed=seed)
        print(f"right: {config}", flush=True)


if __name__ == "__main__":
    main()
