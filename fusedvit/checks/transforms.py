"""Detects code that observes a call's torch operations: such a call must run Hugging Face's code, not kernels.

`torch.func` wraps values in tensors of plain type, forward-mode AD adds tangents to them, a dispatch or function mode
sees every operation, and a tensor subclass sees the operations on it. None of these reaches inside a kernel.
"""

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from fusedvit.checks.fallback import COMPILING, TRANSFORM
from fusedvit.errors import Reason

_plain = torch.Tensor.__torch_dispatch__
_no_function = torch.nn.Parameter.__torch_function__
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by an older vmap, which leaves the type torch.Tensor


def active(pixels: object, grid: object = None) -> Reason | None:
    """The transform that a call with `pixels` and `grid` runs under, or None; each of torch's checks takes 0.1 us."""
    if torch._C._are_functorch_transforms_active():
        return Reason(TRANSFORM, "torch.func (vmap, grad, jvp, …)")
    if forward_ad._current_level >= 0:
        return Reason(TRANSFORM, "forward-mode AD")
    if torch._C._len_torch_dispatch_stack():
        if torch.compiler.is_compiling():  # a non-strict export
            return Reason(COMPILING)
        mode = torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)
        return Reason(TRANSFORM, f"the dispatch mode {type(mode).__name__}")
    if torch._C._len_torch_function_stack():
        modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
        found = next((mode for mode in modes if not isinstance(mode, DeviceContext)), None)
        if found is not None:
            return Reason(TRANSFORM, f"the function mode {type(found).__name__}")
    for name, given in ("pixel_values", pixels), ("grid_thw", grid):
        if isinstance(given, torch.Tensor) and _is_batched(given):
            return Reason(TRANSFORM, f"{name} is batched by torch._vmap_internals")
        if type(given) is not torch.Tensor and isinstance(given, torch.Tensor) and _sees_operations(type(given)):
            return Reason(TRANSFORM, f"{name} is a {type(given).__name__}, which sees the operations on it")
    return None


def _sees_operations(cls: type[torch.Tensor]) -> bool:
    return cls.__torch_dispatch__ is not _plain or cls.__torch_function__ is not _no_function
