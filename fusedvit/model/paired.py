"""Which deepstack merger waits for the tower's last merger and runs beside it, each of the two on half of the SMs.

A merger in line has fewer tiles than there are SMs, or little more, and waits for its large weights; two at once wait
together. It is one with too few blocks behind it to run beside them, or too many rows.

    gain = two mergers in line, one after the other - (two at once, on half of the SMs each + what they wait for others)

where every time is that of the cost model of Hopper's product.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.merger_overlap import LEAST_GAIN, PRICED, Beside, Chosen, fastest, total_us
from fusedvit.model.spec import VisionSpec

MOST_ROWS = 2048  # of patches; above, a merger has tiles for all SMs, several times
Layer = tuple[Key, Any]


@dataclass(frozen=True)
class Paired:
    """A deepstack merger beside the tower's last one.

    Attributes:
        merger: which of the deepstack mergers, counted from 0.
        fc1, fc2: configurations of its layers. Neither begins early, as what comes before on their stream may be
            another merger; neither is split, as there is one scratch for both mergers.
        last_fc1, last_fc2: of the layers of the tower's last merger, not split either.
    """

    merger: int
    fc1: Any
    fc2: Any
    last_fc1: Any
    last_fc2: Any


def paired(
    spec: VisionSpec, chosen: Chosen, dtype: torch.dtype, target: Target, beside: Beside | None
) -> Paired | None:
    """The last merger that would be in line, if that is worth it; None for none.

    Args:
        beside: mergers that run beside the blocks.
    """
    hidden, late_us = (beside.mergers, beside.late_us) if beside is not None else ((), 0.0)
    # After the last block there is no stream to keep: the tower's last merger reads the same.
    in_line = [b for m, b in enumerate(spec.deepstack) if m not in hidden and b < spec.depth - 1]
    if spec.tail != "merger" or not in_line or chosen["qkv"][0].rows > MOST_ROWS:
        return None
    configs = _halves(chosen["merger_fc1"], chosen["merger_fc2"], dtype, target, late_us)
    if configs is None:
        return None
    fc1, fc2 = (replace(config, pdl=False) for config in configs)
    return Paired(spec.deepstack.index(max(in_line)), fc1, fc2, *configs)


@functools.lru_cache(maxsize=1024)
def _halves(
    fc1: Layer, fc2: Layer, dtype: torch.dtype, target: Target, late_us: float
) -> tuple[HopperGemmConfig, HopperGemmConfig] | None:
    """Configurations of a merger's layers on half of the SMs; None where two such mergers at once gain too little.

    Args:
        late_us: how much later than the tower's last merger the one beside it begins.
    """
    if not all(isinstance(config, PRICED) for _, config in (fc1, fc2)):
        return None
    half = replace(target, num_sms=target.num_sms // 2)
    found = fastest(fc1[0], dtype, half), fastest(fc2[0], dtype, half)
    if found[0] is None or found[1] is None:
        return None
    in_line_us = total_us((fc1, fc2), target)
    both_us = total_us(((fc1[0], found[0]), (fc2[0], found[1])), half)
    worth_it = 2 * in_line_us - both_us - late_us > LEAST_GAIN * in_line_us
    return (found[0], found[1]) if worth_it else None
