"""Deepstack mergers overlapped with the blocks that follow them: a fixed rule.

A deepstack merger's output is needed only at the end of the run. With few rows a merger is bound by reading its large
weights, while a block leaves memory bandwidth and some SMs idle. So up to `MAX_VALUES` each merger runs on a side
stream, bounded to `num_sms // MERGER_SHARE` SMs, and the next `BLOCKS` blocks are bounded to the other SMs.

Measured on an H100 (bf16, whole towers), this saves 6 and 7 % of Qwen3-VL-8B's time at 196 and 400 patches, nothing at
784, and 9 % of Qwen3-VL-2B's time at 196. One SM in 6 or 5, or two blocks, are within 2 % of this, better or worse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper.attention_configs import HopperAttentionConfig
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig, hopper_gemm_config
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.spec import VisionSpec

MAX_VALUES = 800 * 1024  # patches x channels of the residual stream
MERGER_SHARE = 8  # a merger gets one SM in 8
BLOCKS = 3  # a merger takes about as long as three blocks
LINEARS, MERGER = ("qkv", "proj", "fc1", "fc2"), ("deepstack_fc1", "merger_fc2")
HOPPER = HopperGemmConfig, HopperSwapABConfig, HopperAttentionConfig
Chosen = Mapping[str, tuple[Key, Any]]  # key and configuration of each operation of a plan, by its name
Choose = Callable[[str, Target], Any]  # (operation's name, device) -> the heuristic's configuration


class SideStream(Protocol):
    """A second stream of launches; `graphs.side_stream` has one for captures."""

    def fork(self, launches: Callable[[], None]) -> None:
        """Runs `launches` after all launches so far, overlapped with the launches that follow until `join`."""

    def join(self) -> None:
        """Makes later launches wait for every fork."""


@dataclass(frozen=True)
class MergerOverlap:
    """How deepstack mergers are overlapped with blocks.

    Attributes:
        mergers: indices of the overlapped deepstack mergers; the others run in line.
        blocks: (operation, configuration) pairs of a block that a merger is overlapped with.
        fc1, fc2: configurations of an overlapped merger's layers. They do not use PDL, as the previous launch on the
            side stream may be another merger's.
    """

    mergers: tuple[int, ...]
    blocks: tuple[tuple[str, Any], ...]
    fc1: Any
    fc2: Any


def merger_overlap(
    spec: VisionSpec, chosen: Chosen, choose: Choose, dtype: torch.dtype, target: Target
) -> MergerOverlap | None:
    """The overlap of a token budget; None if mergers run in line, as with many rows or kernels other than Hopper's."""
    mergers = tuple(m for m, block in enumerate(spec.deepstack) if block < spec.depth - 1)
    hopper = all(isinstance(config, HOPPER) for _, config in chosen.values())
    if not (mergers and hopper) or chosen["qkv"][0].rows * spec.hidden_size > MAX_VALUES:
        return None
    few = target.share(target.num_sms // MERGER_SHARE)
    rest = target.share(target.num_sms - few.num_sms)
    fc1, fc2 = (_merger_layer(chosen[name][0], dtype, few) for name in MERGER)
    if fc1 is None or fc2 is None:
        return None
    blocks = {name: choose(name, rest) for name in LINEARS}
    for name, (_, config) in chosen.items():
        if "attention" in name:  # tile sizes must stay, as all blocks share one list of tiles
            blocks[name] = replace(config, max_programs=config.max_programs * rest.num_sms // target.num_sms)
    return MergerOverlap(mergers, tuple(blocks.items()), fc1, fc2)


def _merger_layer(key: Key, dtype: torch.dtype, target: Target) -> HopperGemmConfig | None:
    """A persistent product on `target`'s SMs. swap-AB does not qualify: it launches a program for every tile."""
    config = hopper_gemm_config(key.rows, key.n, key.k, dtype, target, key.kind)
    return None if config is None else replace(config, pdl=False)
