"""The two tables of operations that the encoder can run on: Triton kernels and torch references of each operation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError

from fusedvit.kernels import attention as triton_attention
from fusedvit.kernels import fingerprint, load_inputs, metadata, norms, store_outputs, tile_configs
from fusedvit.kernels import linear as triton_linear
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.backends import BackendFailed, backend_of
from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.hopper import attention as hopper_attention
from fusedvit.kernels.hopper import gemm as hopper_gemm
from fusedvit.kernels.hopper import gemm_swap_ab as hopper_swap_ab
from fusedvit.kernels.hopper.attention_configs import HopperAttentionConfig
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from fusedvit.kernels.reference import attention as attention_ref
from fusedvit.kernels.reference import fingerprint as fingerprint_ref
from fusedvit.kernels.reference import linear as linear_ref
from fusedvit.kernels.reference import load_inputs as load_inputs_ref
from fusedvit.kernels.reference import metadata as metadata_ref
from fusedvit.kernels.reference import norms as norms_ref
from fusedvit.kernels.reference import store_outputs as store_outputs_ref
from fusedvit.kernels.tile_configs import AttentionConfig, LinearConfig

# Type of a configuration -> the function that runs it.
KERNELS: dict[type, Callable[..., torch.Tensor]] = {
    LinearConfig: triton_linear.linear,
    AttentionConfig: triton_attention.attention,
    HopperGemmConfig: hopper_gemm.linear,
    HopperSwapABConfig: hopper_swap_ab.linear,
    HopperAttentionConfig: hopper_attention.attention,
}


def linear(
    x: torch.Tensor, weight: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, config: Any
) -> torch.Tensor:
    """`kernels.linear.linear` on the backend of `config`. Raises `BackendFailed`."""
    return _run(config, x, weight, num_rows, out, epilogue)


def attention(
    qkv: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
    heads: int,
    head_dim: int,
    config: Any,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.attention.attention` on the backend of `config`. Raises `BackendFailed`."""
    return _run(config, qkv, segments, out, heads, head_dim, clip=clip)


def _run(config: Any, *arguments: Any, **more: Any) -> torch.Tensor:
    backend = backend_of(config)
    kernel = KERNELS[backend.config]
    if backend.name == "triton":  # nothing to fall back to
        return kernel(*arguments, config, **more)
    try:
        return kernel(*arguments, config, **more)
    except (torch.cuda.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (TritonError, RuntimeError) as error:  # compilation and passes, ptxas, resources
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        tile_configs.note_failure(backend.id, reason)
        raise BackendFailed(f"{backend.op} in its {backend.name} backend: {reason}") from error


@dataclass(frozen=True)
class Ops:
    """One table of operations, with the signatures of the functions in `fusedvit.kernels`."""

    name: str
    vision_metadata: Callable[..., metadata.Metadata]
    linear: Callable[..., torch.Tensor]
    attention: Callable[..., torch.Tensor]
    layer_norm: Callable[..., torch.Tensor]
    gather_rows: Callable[..., torch.Tensor]
    head_norm_rope: Callable[..., torch.Tensor]
    residual_norm: Callable[..., torch.Tensor]
    pool_rows: Callable[..., torch.Tensor]
    fingerprint: Callable[..., torch.Tensor]
    load_inputs: Callable[..., torch.Tensor]
    patch_grid: Callable[..., torch.Tensor]
    load_patches: Callable[..., torch.Tensor]
    store_outputs: Callable[..., None]


# Operation -> its kernels' host function, and its torch reference.
_OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "vision_metadata": (metadata.vision_metadata, metadata_ref.vision_metadata),
    "linear": (linear, linear_ref.linear),
    "attention": (attention, attention_ref.attention),
    "layer_norm": (norms.layer_norm, norms_ref.layer_norm),
    "gather_rows": (norms.gather_rows, norms_ref.gather_rows),
    "head_norm_rope": (norms.head_norm_rope, norms_ref.head_norm_rope),
    "residual_norm": (norms.residual_norm, norms_ref.residual_norm),
    "pool_rows": (norms.pool_rows, norms_ref.pool_rows),
    "fingerprint": (fingerprint.fingerprint, fingerprint_ref.fingerprint),
    "load_inputs": (load_inputs.load_inputs, load_inputs_ref.load_inputs),
    "patch_grid": (load_inputs.patch_grid, load_inputs_ref.patch_grid),
    "load_patches": (load_inputs.load_patches, load_inputs_ref.load_patches),
    "store_outputs": (store_outputs.store_outputs, store_outputs_ref.store_outputs),
}
TRITON = Ops("triton", **{name: kernel for name, (kernel, _) in _OPERATIONS.items()})
TORCH = Ops("torch", **{name: reference for name, (_, reference) in _OPERATIONS.items()})


def ops_for(device: torch.device) -> Ops:
    """The table that runs on `device`: Triton on CUDA, the torch references elsewhere."""
    return TRITON if device.type == "cuda" else TORCH
