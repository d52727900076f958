"""Every kernel that a fused tower launches on a GPU, listed without one: loading, each token budget, storing, the
fingerprint of the weights, and eager runs beyond the largest budget.

The launches are recorded from the code that makes them, run on meta tensors.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from fusedvit.kernels.tile_configs import Target, ladder
from fusedvit.model.normalization import Normalization
from fusedvit.model.param_names import WeightNames, buffer_shapes, parameter_shapes
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.captured_encoder import limits_for
from fusedvit.runtime.kernel_loader import Run
from fusedvit.runtime.meta_runs import MetaRuns

BEYOND = 4  # eager runs are listed up to this multiple of the largest budget
MEMORY = 80 << 30  # bytes: the default ladder of a GPU with less memory is the first part of the ladder for this size


def launch_tower(
    spec: VisionSpec,
    names: WeightNames,
    dtype: torch.dtype,
    target: Target,
    takes_bytes: bool = False,
    budgets: Sequence[int] | None = None,
) -> None:
    """Makes every launch of a tower on the meta device, within a context that notes launches and makes none.

    Args:
        names: the tower's parameter names.
        takes_bytes: whether calls may bring `BytePixels`.
        budgets: merged tokens of each graph; None for the default ladder, and eager runs beyond it.
    """
    limits, weights = limits_for(spec, dtype, MEMORY), meta_weights(spec, names, dtype, takes_bytes)
    largest = limits.largest * spec.merge_unit
    eager = list(itertools.islice(ladder(largest, BEYOND * largest), 1, None)) if budgets is None else []
    limits = limits if budgets is None else replace(limits, token_budgets=tuple(budgets))
    runs = MetaRuns(spec, dtype, limits, lambda: target)
    for budget in limits.token_budgets:
        runs.launch(Run((), graph_budget=budget), weights)
    for tokens in eager:
        runs.launch(Run((), eager_patch_tokens=tokens), weights)


def meta_weights(spec: VisionSpec, names: WeightNames, dtype: torch.dtype, takes_bytes: bool = False) -> EncoderWeights:
    """Weights of the right shapes without content; if `takes_bytes`, for byte pixels too."""
    shapes = dict(parameter_shapes(names, spec)) | dict(buffer_shapes(names, spec))
    any_bytes = Normalization(1 / 255, None, None, spec.patch_size, spec.temporal_patch_size, spec.in_channels)
    normalizations = dict.fromkeys((False, True), any_bytes) if takes_bytes else None

    def source(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=dtype, device="meta")

    return prepare(spec, names, source, normalizations=normalizations)
