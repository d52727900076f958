"""accelerate's wrappers of `forward` that only see to devices, in a tower that lies on one.

`device_map="auto"` gives every module a `forward` of its own that moves its input to where the module is. In a tower
whose modules all run on one device these do nothing, so it may run fused. Offloading moves weights: that is not
nothing. accelerate itself is not imported.
"""

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from fusedvit.checks.adapters import Plain

_MODULE = "accelerate.hooks"
_HOOK, _OLD = "_hf_hook", "_old_forward"
_STATE = ("execution_device", "offload", "io_same_device", "hooks")  # what a hook goes by


def own_forwards(plain: Plain) -> set[str]:
    """Paths of inner modules with a `forward` of their own that may compute something."""
    modules = [*plain.modules.items(), *plain.layers.items()]
    inner = [(path, m) for path, m in modules if path and "forward" in vars(m)]
    if not inner:
        return set()
    device = next(plain.tower.parameters()).device
    return {path for path, module in inner if not _only_moves_inputs(module, device)}


def slots_read(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where such a wrapper is kept, and what it goes by, for change detection."""
    attributes = vars(module)
    if "forward" not in attributes:
        return
    yield from ((attributes, name) for name in ("forward", _OLD, _HOOK))
    for hook in _hooks_of(attributes.get(_HOOK)):
        yield from ((vars(hook), name) for name in _STATE)


def _hooks_of(hook: Any) -> Iterator[Any]:
    if hook is not None:
        yield hook
    for part in getattr(hook, "hooks", ()):
        yield from _hooks_of(part)


def _only_moves_inputs(module: nn.Module, device: torch.device) -> bool:
    attributes = vars(module)
    forward, old, hook = (attributes.get(name) for name in ("forward", _OLD, _HOOK))
    if _is_of_class(forward, module):  # what removing a hook leaves
        return True
    function = forward.func if isinstance(forward, partial) else None
    wraps = getattr(function, "__module__", None) == _MODULE and _is_of_class(old, module)
    return wraps and _is_harmless(hook, device)


def _is_of_class(forward: Any, module: nn.Module) -> bool:
    """Whether it is the `forward` of the module's class, bound to it."""
    cls: Any = type(module)
    return isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is cls.forward


def _is_harmless(hook: Any, device: torch.device) -> bool:
    cls = type(hook)
    if cls.__module__ != _MODULE:
        return False
    if cls.__name__ == "SequentialHook":
        return all(_is_harmless(part, device) for part in hook.hooks)
    if cls.__name__ != "AlignDevicesHook" or hook.offload:
        return False
    there = hook.execution_device
    return there is None or (torch.device("cuda", there) if isinstance(there, int) else torch.device(there)) == device
