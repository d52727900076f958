"""Reasons why a call takes the original code: their names in `stats()`, and the checks that need only the call."""

from collections.abc import Mapping
from typing import Any

import torch

from fusedvit.checks.arguments import HARMLESS, asked_for, gives, option_of, recordable, rules_of
from fusedvit.checks.forward_hooks import marks_for_gradients
from fusedvit.errors import BEYOND_FP16, EMPTY_ITEMS, ODD_POSITIONS, SPARSE, Reason
from fusedvit.families.registry import family_of
from fusedvit.model.param_names import LastNormNames

GRADIENTS = "gradients"
HIDDEN_STATES = "output_hidden_states"
ATTENTIONS = "output_attentions"
PRECOMPUTED = "precomputed metadata"
UNKNOWN_ARGUMENTS = "unknown arguments"
COMPILING = "compiling"
CAPTURING = "capturing"
AUTOCAST = "autocast"
HOOKS = "hooks"
BYPASSED = "forward of its own"
MODIFIED = "modified modules"
ADAPTER = "adapter"
FOREIGN_CODE = "replaced code"
UNREAD = "unread code"
META = "meta parameters"
DEVICES = "several devices"
DTYPES = "several dtypes"
FREED = "freed parameters"
ANOTHER_TOWER = "another tower"
TRANSFORM = "transform"
CHANGED_DURING_CALL = "changing weights"
CHANGED_BETWEEN_CALLS = "changed weights"
REPLACED_BETWEEN_CALLS = "replaced parameters"
RELEASED = "unfused during the call"
INTERRUPTING = "inside another call"
NOT_READY = "kernels not ready"
ENGINE = "engine"
UNSUPPORTED_DEVICE = "unsupported device"
UNSUPPORTED_DTYPE = "unsupported dtype"

ADVICE = {
    GRADIENTS: "call it under torch.no_grad() or torch.inference_mode(), or freeze the tower's parameters",
    HIDDEN_STATES: "with return_dict=False they cannot be left to be computed when they are first read",
    ATTENTIONS: "the fused encoder never holds attention weights",
    PRECOMPUTED: "the fused encoder builds its metadata from grid_thw",
    UNKNOWN_ARGUMENTS: "the original code reads them; the fused encoder takes pixel values and grid_thw",
    COMPILING: "tracing, export and fullgraph=True see the original code; torch.compile with graph breaks runs fused",
    CAPTURING: "pass grid_thw as a CPU tensor or a list inside a CUDA graph capture",
    AUTOCAST: "load the tower in the dtype that autocast computes in",
    HOOKS: "a hook on an inner module would not fire in the fused encoder",
    BYPASSED: "it does not call the fused encoder: remove it, call fuse(), and set it again",
    MODIFIED: "an inner module or parameter is not the plain one that the tower was built with",
    FOREIGN_CODE: "what would run is not the code that transformers, or the engine, defines",
    UNREAD: "Python could not read the source of the code that would run; the next call tries again",
    ADAPTER: "LoRA without dropout is folded into the weights; merge_and_unload() any other adapter to run fused",
    META: "some parameters are offloaded",
    DEVICES: "the tower's parameters lie on several devices",
    DTYPES: "the tower's parameters have several dtypes",
    FREED: "somebody freed their memory, as sharding and offloading do between uses",
    ANOTHER_TOWER: "fuse it by itself; torch.nn.DataParallel makes new ones at every call",
    TRANSFORM: "torch.func, forward-mode AD, dispatch and function modes see the original code",
    ODD_POSITIONS: "patches must come in row-major order, padding last, and sides be multiples of the pooling size",
    EMPTY_ITEMS: "leave out rows of zeros; with items without frames, Hugging Face's GLM-4V takes another item's shape",
    SPARSE: "the fused encoder takes dense pixels",
    CHANGED_DURING_CALL: "somebody writes the tower's parameters all the time",
    CHANGED_BETWEEN_CALLS: "they changed before each of many calls; calls run fused again if two after a pause find "
    "the same weights",
    REPLACED_BETWEEN_CALLS: "offloading brings them in so: keep the tower on its device",
    RELEASED: "unfuse() ran meanwhile",
    INTERRUPTING: "a signal's handler made it while its thread was in a call; the original code answers it",
    NOT_READY: 'calls run fused once they are compiled; warmup() and FuseConfig(compile="now") wait for that',
    ENGINE: "the serving engine computes something else for such calls",
    UNSUPPORTED_DEVICE: "kernels run on NVIDIA GPUs of compute capability 8.0 and newer, torch operations on the CPU",
    UNSUPPORTED_DTYPE: "kernels take float32, float16 and bfloat16",
    BEYOND_FP16: "what is prepared of weights takes a wider range: load the tower in bfloat16 or float32",
}

_global = vars(torch.nn.modules.module)  # holds the hooks that apply to every module of the process
_AUTOCASTING = ("cuda", "cpu")


def message(tower: str, reason: Reason, state: str = "runs its original code") -> str:
    """The text of a reason, the same in warnings, errors and reports.

    Args:
        tower: the name of the tower's class.
        state: the consequence of the reason.
    """
    return f"fusedvit: {tower} {state}: {with_advice(reason)}"


def refused(tower: str, reason: Reason) -> RuntimeError:
    """The error for a user who wants no original code in place of what cannot run fused, as with `strict=True`."""
    return RuntimeError(message(tower, reason, "cannot run fused"))


def with_advice(reason: Reason) -> str:
    """A reason and what to do about it, for messages and reports."""
    return f"{reason} ({ADVICE[reason.kind]})"


def reason_of_call(module: torch.nn.Module, pixels: object, grid: object, extra: Mapping[str, Any]) -> Reason | None:
    """The first reason to fall back that the call's arguments and context give, or None."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return Reason(COMPILING)
    reason = _reason_of_arguments(module, extra)
    if reason is not None:
        return reason
    reason = reason_of_global_hooks()
    if reason is not None:
        return reason
    if torch.is_grad_enabled():
        reason = _reason_of_gradients(module, pixels)
        if reason is not None:
            return reason
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        reason = _reason_of_autocast(module)
        if reason is not None:
            return reason
    on_gpu = isinstance(grid, torch.Tensor) and (
        grid.is_cuda or (grid.ndim == 3 and next(module.parameters(), grid).is_cuda)
    )
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return Reason(CAPTURING)
    return None


def reason_of_global_hooks() -> Reason | None:
    """The hook that fires for every module of the process, or None."""
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        if _global.get(name):
            return Reason(HOOKS, f"on every module, in torch.nn.modules.module.{name}")
    return None


def _reason_of_arguments(module: torch.nn.Module, extra: Mapping[str, Any]) -> Reason | None:
    for name, specs in asked_for(module, extra):
        if name == "hidden_states":
            wants_dict = extra.get("return_dict", getattr(module.__dict__.get("config"), "return_dict", True))
            if wants_dict is False:
                return Reason(HIDDEN_STATES, "return_dict=False")
        elif gives(module, specs):
            return Reason(ATTENTIONS) if name == "attentions" else Reason(UNKNOWN_ARGUMENTS, f"output_{name}")
    names = extra.keys() - HARMLESS - {*map(option_of, recordable(module))} if extra else ()
    if not names:
        return None
    rules = rules_of(module)
    read = {name for name in rules.read.intersection(names) if extra[name] is not None or name in rules.given}
    instead = sorted(name for name in read & rules.precomputed if extra[name] is not None)
    if instead:
        return Reason(PRECOMPUTED, ", ".join(instead))
    others = sorted(read - rules.precomputed)
    return Reason(UNKNOWN_ARGUMENTS, ", ".join(others)) if others else None


def _reason_of_autocast(module: torch.nn.Module) -> Reason | None:
    """A reason to fall back under autocast. Autocast to the tower's own dtype is none: it only computes norms in fp32,
    unless a norm gives the output, which autocast leaves in fp32."""
    parameter = next(module.parameters(), None)
    device = "" if parameter is None else parameter.device.type
    if parameter is None or device not in _AUTOCASTING or not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    if dtype != parameter.dtype:
        return Reason(AUTOCAST, f"to {dtype}, the tower is in {parameter.dtype}")
    family = family_of(type(module).__name__)
    if device == "cuda" and family is not None and isinstance(family.names.merger, LastNormNames):
        return Reason(AUTOCAST, f"gives the output of {family.names.merger.norm} in torch.float32")
    return None


def _reason_of_gradients(module: torch.nn.Module, pixels: object) -> Reason | None:
    taken = isinstance(pixels, torch.Tensor) and pixels.requires_grad
    if taken:
        return Reason(GRADIENTS, "pixel_values require them")
    trained = next((name for name, p in module.named_parameters() if p.requires_grad), None)
    if trained is not None:
        return Reason(GRADIENTS, f"parameter {trained} requires them")
    if _is_checkpointed() and marks_for_gradients(module):  # only a marked call saves tensors
        return Reason(GRADIENTS, "a checkpoint that is not reentrant counts the tensors that the call saves")
    return None


def _is_checkpointed() -> bool:
    """Whether `torch.utils.checkpoint(..., use_reentrant=False)` runs the call, now or a second time.

    It raises if the two runs save different numbers of tensors for the backward pass, as they would if the first ran
    the original code (`kernels not ready`) and the second ran fused.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__
