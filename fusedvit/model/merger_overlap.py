"""Which deepstack mergers run beside the blocks that follow them, and on how many SMs.

Nothing waits for a deepstack merger but the end of the run, and with few rows it is bound by its large weights while
the blocks leave memory idle, and some SMs: launches have fewer programs than there are SMs, or would take as many
rounds with fewer. A merger beside the blocks is bounded to some SMs, and the blocks meanwhile to the others.

    gain of a merger = what it takes in line - blocks meanwhile (their time on the others - on all) - what sticks out
                       - a share of these blocks

where every time is that of the cost model of Hopper's product, and attention a share of its block's products.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedvit.kernels.backends import LINEAR, Backend, Key, available_backends
from fusedvit.kernels.hopper.attention_configs import HopperAttentionConfig
from fusedvit.kernels.hopper.gemm_configs import (
    HopperGemmConfig,
    hopper_gemm_candidates,
    hopper_gemm_mean_us,
    wrong_hopper_gemm,
)
from fusedvit.kernels.hopper.gemm_swap_ab_configs import OF_LINEAR, HopperSwapABConfig
from fusedvit.kernels.hopper.gemm_swap_ab_configs import mean_us as transposed_mean_us
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.spec import VisionSpec

MOST_ROWS = 1024  # of patches; with more it lost: docs/hopper.md
SMS = range(2, 26, 2)  # that mergers may have: with more they take too much of what blocks need
ATTENTION_SHARE = 0.25  # of a block's products
LEAST_GAIN = 0.2  # of what a merger takes in line
# Of a block beside a merger, for memory, L2 and power that they share: Qwen3-VL-8B's tower gained less than the costs
# promise without it by 0.04 to 0.1, at 196 to 1024 patches (H200, bench/results/h200-beside.json).
MEANWHILE = 0.07
LINEARS, MERGER = ("qkv", "proj", "fc1", "fc2"), ("merger_fc1", "merger_fc2")
PRICED = HopperGemmConfig, HopperSwapABConfig  # forms whose times are known
Chosen = Mapping[str, tuple[Key, Any]]  # key and configuration of each operation of a plan, by its name


@dataclass(frozen=True)
class Beside:
    """Deepstack mergers that run beside what follows them.

    Attributes:
        mergers: which of them, counted from 0.
        blocks: how many of the following blocks each is reckoned to overlap.
        sms: what they are bounded to.
        chain: (operation, configuration) that these blocks run with instead of the plan's.
        fc1, fc2: configurations of a merger's layers. Neither begins early, as what comes before on their stream may be
            another merger; neither is split, as there is one scratch, which the blocks use at the same time.
        late_us: how long after the last block the last of them is reckoned to end.
    """

    mergers: tuple[int, ...]
    blocks: tuple[int, ...]
    sms: int
    chain: tuple[tuple[str, Any], ...]
    fc1: Any
    fc2: Any
    late_us: float = 0.0


def beside(spec: VisionSpec, chosen: Chosen, dtype: torch.dtype, target: Target) -> Beside | None:
    """The mergers that are worth it; None for none. Known for Hopper's forms alone, whose times are."""
    attentions = {name: config for name, (_, config) in chosen.items() if "attention" in name}
    hopper = all(isinstance(chosen[name][1], PRICED) for name in chosen if name not in attentions)
    hopper = hopper and all(isinstance(config, HopperAttentionConfig) for config in attentions.values())
    if not (spec.deepstack and hopper) or chosen["qkv"][0].rows > MOST_ROWS:
        return None
    return _best(spec, tuple(chosen.items()), dtype, target)


@functools.lru_cache(maxsize=1024)
def _best(
    spec: VisionSpec, chosen: tuple[tuple[str, tuple[Key, Any]], ...], dtype: torch.dtype, target: Target
) -> Beside | None:
    found = [on_sms(spec, dict(chosen), dtype, target, sms) for sms in SMS]
    gain, best = max((pair for pair in found if pair is not None), key=lambda pair: pair[0], default=(0.0, None))
    return best if gain > 0 else None


def on_sms(
    spec: VisionSpec, chosen: Chosen, dtype: torch.dtype, target: Target, sms: int, all_of_them: bool = False
) -> tuple[float, Beside] | None:
    """(Gain in us, mergers on so many SMs): those that gain, or every one; None where no configuration fits."""
    fc1, fc2 = (fastest(chosen[name][0], dtype, replace(target, num_sms=sms)) for name in MERGER)
    if fc1 is None or fc2 is None:
        return None
    fc1, fc2 = replace(fc1, pdl=False), replace(fc2, pdl=False)
    narrow = replace(target, num_sms=target.num_sms - sms)
    chain = _chain(chosen, dtype, target, narrow)
    block_us, merger_us = (total_us((chosen[name] for name in names), target) for names in (LINEARS, MERGER))
    attention_us = ATTENTION_SHARE * block_us
    slower_us = total_us(((chosen[name][0], chain[name]) for name in LINEARS), narrow) - block_us
    slower_us += attention_us * (_rounds(*chosen["attention"], narrow.num_sms, target) - 1)
    slower_us += MEANWHILE * (block_us + attention_us)
    own_us = total_us(((chosen["merger_fc1"][0], fc1), (chosen["merger_fc2"][0], fc2)), target)
    block_us += attention_us
    total, busy_until, mergers = 0.0, 0.0, {}
    for merger, block in sorted(enumerate(spec.deepstack), key=lambda pair: pair[1]):
        begin, left = (block + 1) * block_us, spec.depth - block - 1
        ends = max(busy_until, begin) + own_us
        blocks = min(left, math.ceil((ends - begin) / block_us))
        gain = merger_us - blocks * slower_us - max(0.0, ends - spec.depth * block_us - merger_us)
        if left and (all_of_them or gain > LEAST_GAIN * merger_us):
            mergers[merger] = blocks
            total, busy_until = total + gain, ends
    late_us = max(0.0, busy_until - spec.depth * block_us)
    return total, Beside(tuple(mergers), tuple(mergers.values()), sms, tuple(chain.items()), fc1, fc2, late_us)


def fastest(key: Key, dtype: torch.dtype, target: Target) -> HopperGemmConfig | None:
    """In one part; None where nothing fits."""
    found = hopper_gemm_candidates(key.rows, key.n, key.k, target, key.kind)
    whole = [c for c in found if c.splits == 1 and not wrong_hopper_gemm(c, target, dtype)]
    return min(whole, key=lambda config: mean_us(key, config, target), default=None)


def _chain(chosen: Chosen, dtype: torch.dtype, target: Target, narrow: Target) -> dict[str, Any]:
    """Configurations of a block on the SMs of `narrow`; attention keeps its tiles, of which there is one list."""
    found: dict[str, Any] = {}
    for name, (key, config) in chosen.items():
        narrowed = config
        if not isinstance(config, HopperSwapABConfig):  # which has as many programs as tiles, whatever the SMs
            narrowed = replace(config, max_programs=config.max_programs * narrow.num_sms // target.num_sms)
        if "attention" in name:
            found[name] = narrowed
        if name in LINEARS:
            others = [backend.heuristic(key, dtype, narrow, 0) for backend in _forms(target, dtype)]
            tried = [narrowed, *(other for other in others if other is not None)]
            found[name] = min(tried, key=functools.partial(mean_us, key, target=narrow))
    return found


def _forms(target: Target, dtype: torch.dtype) -> list[Backend]:
    """Those of a product whose times are known and that `target` has."""
    return [backend for backend in available_backends(LINEAR, target, dtype) if backend.config in PRICED]


def mean_us(key: Key, config: Any, target: Target) -> float:
    """As the configuration was chosen by: the mean over what a budget may hold."""
    if isinstance(config, HopperSwapABConfig):
        return transposed_mean_us(config, key.rows, key.n, key.k, target, key.kind)
    return hopper_gemm_mean_us(config, key.rows, key.n, key.k, key.kind)


def total_us(layers: Iterable[tuple[Key, Any]], target: Target) -> float:
    """Of layers one after another, in the us of `linear_configs`."""
    return sum(
        mean_us(key, config, target) * (OF_LINEAR if isinstance(config, HopperSwapABConfig) else 1.0)
        for key, config in layers
    )


def _rounds(key: Key, config: HopperAttentionConfig, sms: int, target: Target) -> float:
    """How many times the rounds that one frame's attention takes on all SMs it takes on so many."""
    tiles = -(-key.rows // config.block_m) * key.n
    on_some, on_all = (-(-tiles // (config.ctas * n)) for n in (sms, target.num_sms))
    return on_some / on_all
