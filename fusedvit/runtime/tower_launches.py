"""Every kernel that a fused tower launches on a GPU, listed without one: loading, each token budget, storing, the
fingerprint of the weights, and eager runs beyond the largest budget.

The launches are recorded from the code that makes them, run on meta tensors.
"""

import itertools
from collections.abc import Callable

import torch
from triton.compiler import CompiledKernel

from fusedvit.graphs.limits import Limits
from fusedvit.kernels.codegen_checks import Launch, compilations
from fusedvit.kernels.tile_configs import Target, ladder
from fusedvit.model.normalization import Normalization
from fusedvit.model.param_names import buffer_shapes, parameter_shapes, plain_names
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.captured_encoder import limits_for
from fusedvit.runtime.kernel_loader import Run
from fusedvit.runtime.meta_runs import MetaRuns

BEYOND = 4  # eager runs of up to so many times the largest budget are listed
MEMORY = 80 << 30  # bytes: the default ladder of a GPU with less is the first part of this one's


def default_limits(spec: VisionSpec, dtype: torch.dtype) -> Limits:
    """The ladder of a tower where memory does not bound it."""
    return limits_for(spec, dtype, MEMORY)


def tower_launches(
    spec: VisionSpec, dtype: torch.dtype, target: Target, takes_bytes: bool = False
) -> dict[Launch, Callable[[], CompiledKernel]]:
    """Each distinct kernel once, in the order of first use, and what compiles it (see `codegen_checks.compilations`).

    Args:
        takes_bytes: whether somebody brings `BytePixels`.
    """
    limits, weights = default_limits(spec, dtype), meta_weights(spec, dtype, takes_bytes)
    runs, largest = MetaRuns(spec, dtype, limits, lambda: target), limits.token_budgets[-1] * spec.merge_unit

    def launches() -> None:
        for budget in limits.token_budgets:
            runs.launch(Run(budget, True, ()), weights)
        for tokens in itertools.islice(ladder(largest, BEYOND * largest), 1, None):
            runs.launch(Run(tokens, False, ()), weights)

    return compilations(launches)


def meta_weights(spec: VisionSpec, dtype: torch.dtype, takes_bytes: bool = False) -> EncoderWeights:
    """Weights of the right shapes and no content; if `takes_bytes`, for bytes too."""
    names = plain_names(spec)
    shapes = dict(parameter_shapes(names, spec)) | dict(buffer_shapes(names, spec))
    any_bytes = Normalization(1 / 255, None, None, spec.patch_size, spec.temporal_patch_size, spec.in_channels)
    normalizations = dict.fromkeys((False, True), any_bytes) if takes_bytes else None

    def source(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=dtype, device="meta")

    return prepare(spec, names, source, normalizations=normalizations)
