"""Why a call takes the original code: the names counted in `stats()`, and the checks that need only the call."""

from collections.abc import Mapping
from typing import Any

import torch

from fusedvit.errors import Reason

GRADIENTS = "gradients"
HIDDEN_STATES = "output_hidden_states"
ATTENTIONS = "output_attentions"
PRECOMPUTED = "precomputed metadata"
UNKNOWN_ARGUMENTS = "unknown arguments"
COMPILING = "compiling"
CAPTURING = "capturing"
AUTOCAST = "autocast"
HOOKS = "hooks"
MODIFIED = "modified modules"
FOREIGN_CODE = "replaced code"
META = "meta parameters"
DEVICES = "several devices"
DTYPES = "several dtypes"
FREED = "freed parameters"
ANOTHER_TOWER = "another tower"
TRANSFORM = "transform"
CHANGING = "changing weights"
RELEASED = "unfused during the call"
UNSUPPORTED_DEVICE = "unsupported device"
UNSUPPORTED_DTYPE = "unsupported dtype"

ADVICE = {
    GRADIENTS: "call it under torch.no_grad() or torch.inference_mode(), or freeze the tower's parameters",
    HIDDEN_STATES: "the fused encoder keeps only the last hidden state",
    ATTENTIONS: "the fused encoder never holds attention weights",
    PRECOMPUTED: "the fused encoder builds its metadata from grid_thw",
    UNKNOWN_ARGUMENTS: "the fused encoder takes pixel values and grid_thw",
    COMPILING: "torch.compile and tracing see the original code",
    CAPTURING: "pass grid_thw as a CPU tensor or a list inside a CUDA graph capture",
    AUTOCAST: "load the tower in the dtype it should run in",
    HOOKS: "a hook on an inner module would not fire in the fused encoder",
    MODIFIED: "an inner module or parameter is not the plain one that the tower was built with",
    FOREIGN_CODE: "what would run is not the code that transformers defines",
    META: "some parameters are offloaded",
    DEVICES: "the tower's parameters lie on several devices",
    DTYPES: "the tower's parameters have several dtypes",
    FREED: "somebody freed their memory, as sharding and offloading do between uses",
    ANOTHER_TOWER: "fuse it by itself; torch.nn.DataParallel makes new ones at every call",
    TRANSFORM: "torch.func, forward-mode AD and dispatch modes see the original code",
    CHANGING: "somebody writes the tower's parameters all the time",
    RELEASED: "calls that are under way end in the original code",
    UNSUPPORTED_DEVICE: "kernels run on NVIDIA GPUs of compute capability 8.0 and newer, torch operations on the CPU",
    UNSUPPORTED_DTYPE: "kernels take float32, float16 and bfloat16",
}

_PRECOMPUTED_NAMES = {
    "cu_seqlens",
    "cu_window_seqlens",
    "interp_indices",
    "interp_weights",
    "max_seqlen",
    "position_ids",
    "window_index",
}
_global = vars(torch.nn.modules.module)  # where hooks for every module of the process are registered
_HARMLESS_NAMES = {"return_dict", "use_cache"}


def message(tower: str, reason: Reason, state: str = "runs its original code") -> str:
    """The one text of a reason, for warnings, errors and reports.

    Args:
        tower: the name of the tower's class.
        state: what follows from the reason.
    """
    return f"fusedvit: {tower} {state}: {with_advice(reason)}"


def with_advice(reason: Reason) -> str:
    """A reason and what to do about it, as messages and reports put it."""
    return f"{reason} ({ADVICE[reason.kind]})"


def reason_of_call(module: torch.nn.Module, pixels: object, grid: object, extra: Mapping[str, Any]) -> Reason | None:
    """The first reason in the call itself, or None."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return Reason(COMPILING)
    reason = _reason_of_arguments(getattr(module, "config", None), extra)
    if reason is not None:
        return reason
    if _global.get("_global_forward_hooks") or _global.get("_global_forward_pre_hooks"):
        return Reason(HOOKS)
    if torch.is_grad_enabled() and _wants_grad(module, pixels):
        return Reason(GRADIENTS)
    if isinstance(pixels, torch.Tensor) and _autocasts(pixels.device.type):
        return Reason(AUTOCAST)
    on_gpu = isinstance(grid, torch.Tensor) and grid.is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return Reason(CAPTURING)
    return None


def _reason_of_arguments(config: object, extra: Mapping[str, Any]) -> Reason | None:
    for name in (HIDDEN_STATES, ATTENTIONS):
        if extra[name] if name in extra else _configured(config, name):
            return Reason(name)
    if not extra:
        return None
    given = {name for name, value in extra.items() if value is not None} - _HARMLESS_NAMES - {HIDDEN_STATES, ATTENTIONS}
    precomputed = given & _PRECOMPUTED_NAMES
    if precomputed:
        return Reason(PRECOMPUTED, ", ".join(sorted(precomputed)))
    return Reason(UNKNOWN_ARGUMENTS, ", ".join(sorted(given))) if given else None


def _configured(config: object, name: str) -> object:
    """An option of Hugging Face's config, past its own `__getattribute__`, which takes 3 us."""
    if config is None:
        return False
    kept = object.__getattribute__(config, "__dict__")
    return kept[name] if name in kept else kept[f"_{name}"] if f"_{name}" in kept else getattr(config, name, False)


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _wants_grad(module: torch.nn.Module, pixels: object) -> bool:
    if isinstance(pixels, torch.Tensor) and pixels.requires_grad:
        return True
    return any(p.requires_grad for p in module.parameters())
