"""The two tables of operations that the encoder can run on; each operation is in both."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusedvit.kernels import backends, fingerprint, load_inputs, metadata, norms, store_outputs
from fusedvit.kernels.reference import attention as attention_ref
from fusedvit.kernels.reference import fingerprint as fingerprint_ref
from fusedvit.kernels.reference import linear as linear_ref
from fusedvit.kernels.reference import load_inputs as load_inputs_ref
from fusedvit.kernels.reference import metadata as metadata_ref
from fusedvit.kernels.reference import norms as gather_ref
from fusedvit.kernels.reference import norms as head_norm_ref
from fusedvit.kernels.reference import norms as layer_norm_ref
from fusedvit.kernels.reference import store_outputs as store_outputs_ref


@dataclass(frozen=True)
class Ops:
    """Operations of one kind; signatures are those of the functions in `fusedvit.kernels`.

    On the GPU, `linear` and `attention` run in the form that their configuration's type stands for.
    """

    name: str
    vision_metadata: Callable[..., metadata.Metadata]
    linear: Callable[..., torch.Tensor]
    attention: Callable[..., torch.Tensor]
    layer_norm: Callable[..., torch.Tensor]
    gather_rows: Callable[..., torch.Tensor]
    head_norm_rope: Callable[..., torch.Tensor]
    fingerprint: Callable[..., torch.Tensor]
    load_inputs: Callable[..., torch.Tensor]
    store_outputs: Callable[..., None]


TRITON = Ops(
    "triton",
    metadata.vision_metadata,
    backends.linear,
    backends.attention,
    norms.layer_norm,
    norms.gather_rows,
    norms.head_norm_rope,
    fingerprint.fingerprint,
    load_inputs.load_inputs,
    store_outputs.store_outputs,
)
TORCH = Ops(
    "torch",
    metadata_ref.vision_metadata,
    linear_ref.linear,
    attention_ref.attention,
    layer_norm_ref.layer_norm,
    gather_ref.gather_rows,
    head_norm_ref.head_norm_rope,
    fingerprint_ref.fingerprint,
    load_inputs_ref.load_inputs,
    store_outputs_ref.store_outputs,
)


def ops_for(device: torch.device) -> Ops:
    """The table that runs on `device`: Triton on CUDA, the torch references elsewhere."""
    return TRITON if device.type == "cuda" else TORCH
