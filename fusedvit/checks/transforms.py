"""Whether somebody looks at a call's operations themselves: they see Hugging Face's, not a launch.

`torch.func` wraps values in tensors of plain type, forward-mode AD adds tangents to them, and a dispatch or function
mode gets to see every operation. None of that reaches a kernel.
"""

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from fusedvit.checks.fallback import COMPILING, TRANSFORM
from fusedvit.errors import Reason

_plain = torch.Tensor.__torch_dispatch__


def active(pixels: object) -> Reason | None:
    """The transform that a call with `pixels` runs under, or None; four questions of torch's own, 0.1 us."""
    if torch._C._are_functorch_transforms_active():
        return Reason(TRANSFORM, "torch.func (vmap, grad, jvp, …)")
    if forward_ad._current_level >= 0:
        return Reason(TRANSFORM, "forward-mode AD")
    if torch._C._len_torch_dispatch_stack():
        if torch.compiler.is_compiling():  # an export that is not strict
            return Reason(COMPILING)
        mode = torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)
        return Reason(TRANSFORM, f"the dispatch mode {type(mode).__name__}")
    if torch._C._len_torch_function_stack():
        modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
        found = next((mode for mode in modes if not isinstance(mode, DeviceContext)), None)
        if found is not None:
            return Reason(TRANSFORM, f"the function mode {type(found).__name__}")
    if type(pixels) is not torch.Tensor and isinstance(pixels, torch.Tensor) and _dispatches(type(pixels)):
        return Reason(TRANSFORM, f"pixel_values is a {type(pixels).__name__}, which has a dispatch of its own")
    return None


def _dispatches(cls: type[torch.Tensor]) -> bool:
    return cls.__torch_dispatch__ is not _plain
