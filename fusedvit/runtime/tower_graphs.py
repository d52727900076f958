"""The graphs of a tower on one device: how large, over which program."""

from collections.abc import Callable, Collection, Iterable

import torch
from tqdm import tqdm

from fusedvit.config import FuseConfig
from fusedvit.graphs.capture import CudaCapture
from fusedvit.graphs.limits import Limits, infer_limits
from fusedvit.graphs.manager import GraphManager
from fusedvit.kernels.tile_configs import DENSE
from fusedvit.model.ops import ops_for
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.captured_encoder import EncoderProgram, bytes_per_token
from fusedvit.runtime.runner import Graphs

SMALLEST_BUDGET, LARGEST_BUDGET = 64, 16384  # merged tokens
SHARE_OF_FREE_MEMORY = 0.1


def new_graphs(
    spec: VisionSpec,
    config: FuseConfig,
    weights: Callable[[], EncoderWeights],
    device: torch.device,
    dtype: torch.dtype,
) -> Graphs:
    """Nothing captured yet, nothing allocated."""
    limits = limits_for(spec, config, dtype, torch.cuda.mem_get_info(device)[0])
    program = EncoderProgram(spec, ops_for(device), dtype, device, weights)
    return Graphs(GraphManager(limits, program, CudaCapture(device)), program)


def limits_for(spec: VisionSpec, config: FuseConfig, dtype: torch.dtype, free_bytes: int) -> Limits:
    """The budgets of a tower where `free_bytes` of device memory are free.

    Raises:
        TypeError, ValueError: the configuration's budgets; the message names the option.
    """
    return infer_limits(
        smallest=SMALLEST_BUDGET,
        largest=LARGEST_BUDGET,
        dense=[rows // spec.merge_unit for rows in DENSE],
        bytes_per_token=bytes_per_token(spec, dtype),
        free_bytes=free_bytes,
        share=SHARE_OF_FREE_MEMORY,
        token_budgets=config.token_budgets,
        max_items=config.max_items,
        max_frames=config.max_frames,
    )


def capture_budgets(
    graphs: Graphs,
    progress: Callable[[Iterable[int]], Iterable[int]] | None,
    only: Collection[int] | None = None,
) -> None:
    """Captures every budget, or those of `only`, the largest first."""
    graphs.manager.warmup(progress or _bar, only)


def _bar(budgets: Iterable[int]) -> Iterable[int]:
    return tqdm(budgets, desc="capturing token budgets", unit="graph", disable=None)  # None: only on a terminal
