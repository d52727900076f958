"""Recognises accelerate's wrappers of `forward` that only move inputs, in a tower that lies on one device.

`device_map="auto"` gives every module a `forward` that moves its input to the module's device. If all modules of a
tower run on one device, these wrappers have no effect, so the tower may run fused. Wrappers that offload move weights,
so such a tower may not. accelerate itself is not imported.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fusedvit.checks.adapters import Plain
from fusedvit.checks.source_code import Definition, cells_of, definition_of, wrapped_by

_MODULE = "accelerate.hooks"
_HOOK = "_hf_hook"
OLD = "_old_forward"  # the module's attribute with the function that such a wrapper calls
_STATE = ("execution_device", "offload", "io_same_device", "hooks")  # attributes that determine what a hook does
_METHODS = ("pre_forward", "post_forward")  # methods that a hook runs
_HELPERS = ("send_to_device", "find_device")  # functions that these methods call if nothing is offloaded
_COMPILED = "_compiled_fn"  # attribute in which a decorator of `_METHODS` keeps torch's wrapper after its first run
_MAKES_COMPILED = Definition("torch.compiler", "disable")
_WRAPPER = Definition(_MODULE, "add_hook_to_module.<locals>.new_forward")


@dataclass(frozen=True)
class _Decorated:
    """A function decorated by accelerate, with the function that it runs as an attribute that can be compared."""

    wrapper: FunctionType

    @property
    def runs(self) -> FunctionType | None:
        """The wrapped function, if that is what the wrapper runs; the same before and after its first run."""
        return _run_by(self.wrapper)


def own_forwards(plain: Plain) -> set[str]:
    """Paths of inner modules with an own `forward` that may do more than move inputs."""
    modules = [*plain.modules.items(), *plain.layers.items()]
    inner = [(path, m) for path, m in modules if path and "forward" in vars(m)]
    if not inner:
        return set()
    device = next(plain.tower.parameters()).device
    return {path for path, module in inner if not _only_moves_inputs(module, device)}


def slots_read(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Slots of such a wrapper and of the state of its hooks, for change detection."""
    attributes = vars(module)
    if "forward" not in attributes:
        return
    yield from ((attributes, name) for name in ("forward", OLD, _HOOK))
    for hook in hooks_of(module):
        yield from ((vars(hook), name) for name in (*_STATE, *_METHODS))


def hooks_of(module: nn.Module) -> list[Any]:
    """accelerate's hooks on `module`, including nested ones."""
    return list(_hooks_of(vars(module).get(_HOOK)))


def code_slots(plain: Plain) -> tuple[tuple[Any, str], ...]:
    """Slots of the code that the hooks run: (class or module, name)."""
    modules = (m for m in (*plain.modules.values(), *plain.layers.values()) if "forward" in vars(m))
    classes = dict.fromkeys(type(hook) for module in modules for hook in hooks_of(module))
    home = sys.modules.get(_MODULE)
    helpers = [(home, name) for name in _HELPERS if hasattr(home, name)] if classes else []
    methods = [(cls, name) for cls in classes for name in _METHODS]
    found = functions_of(methods).values()
    decorated = ((_Decorated(f), "runs") for f in found if _is_decorated(f))
    return (*methods, *helpers, *decorated)


def functions_of(slots: Iterable[tuple[Any, str]]) -> dict[int, FunctionType]:
    """The functions in `slots`, and the functions that their decorators wrap, by id."""
    found: dict[int, FunctionType] = {}
    for owner, name in slots:
        function = getattr(owner, name, None)
        while type(function) is FunctionType:
            found[id(function)] = function
            function = wrapped_by(function)
    return found


def _hooks_of(hook: Any) -> Iterator[Any]:
    if hook is not None:
        yield hook
    for part in getattr(hook, "__dict__", {}).get("hooks", ()):
        yield from _hooks_of(part)


def _only_moves_inputs(module: nn.Module, device: torch.device) -> bool:
    attributes = vars(module)
    forward, old, hook = (attributes.get(name) for name in ("forward", OLD, _HOOK))
    if is_of_class(forward, module):  # as accelerate leaves it when a hook is removed
        return True
    if not isinstance(forward, partial):
        return False
    calls_class = wraps(forward, module) and is_of_class(old, module)
    return calls_class and not forward.keywords and _runs_accelerates(hook) and _is_harmless(hook, device)


def wraps(forward: partial[Any], module: nn.Module) -> bool:
    """Whether `forward` is accelerate's wrapper, which calls the attribute `OLD` of `module`."""
    return definition_of(forward.func) == _WRAPPER and forward.args == (module,)


def is_of_class(forward: Any, module: nn.Module, cls: Any = None) -> bool:
    """Whether `forward` is the `forward` of the module's class, or of `cls`, bound to `module`."""
    expected = (cls or type(module)).forward
    return type(forward) is MethodType and forward.__self__ is module and forward.__func__ is expected


def _runs_accelerates(hook: Any) -> bool:
    """Whether a hook and its nested hooks are accelerate's, and run the code that accelerate's source defines."""
    home: Any = sys.modules.get(_MODULE)
    for part in _hooks_of(hook):
        cls = type(part)
        if vars(home).get(cls.__name__) is not cls or not vars(part).keys().isdisjoint(_METHODS):
            return False
        if not all(_undecorated(getattr(cls, m)) == (_MODULE, f"{cls.__name__}.{m}") for m in _METHODS):
            return False
    return all(_is_accelerates(getattr(home, name, None), name) for name in _HELPERS)


def _undecorated(function: Any) -> Definition | None:
    """Where the function inside accelerate's decorators is defined."""
    while type(function) is FunctionType and _is_decorated(function):
        function = _run_by(function)
    return definition_of(function)


def _is_decorated(function: FunctionType) -> bool:
    found = definition_of(function)
    return found is not None and found.module == _MODULE and wrapped_by(function) is not None


def _run_by(wrapper: FunctionType) -> FunctionType | None:
    """The function that a wrapper of accelerate's wraps, if that is what the wrapper runs; else None.

    The wrapper calls its own attribute `_COMPILED`, in which it keeps the function with torch's compiler disabled.
    """
    inner = wrapped_by(wrapper)
    if any(cell.cell_contents not in (inner, wrapper) for cell in cells_of(wrapper)):
        return None
    if _COMPILED not in vars(wrapper):
        return inner if definition_of(torch.compiler.disable) == _MAKES_COMPILED else None
    compiled = vars(wrapper)[_COMPILED]
    return inner if compiled is inner or _only_calls(compiled, inner) else None


def _only_calls(compiled: object, inner: FunctionType | None) -> bool:
    """Whether `compiled` is torch's wrapper of `inner`, and calls nothing else."""
    found = definition_of(compiled)
    if type(compiled) is not FunctionType or found is None or not found.module.startswith("torch._dynamo."):
        return False
    return wrapped_by(compiled) is inner and all(cell.cell_contents is inner for cell in cells_of(compiled))


def _is_accelerates(function: object, name: str) -> bool:
    found = definition_of(function)
    return found is not None and found.module.startswith("accelerate.") and found.path == name


def _is_harmless(hook: Any, device: torch.device) -> bool:
    cls = type(hook)
    if cls.__name__ == "SequentialHook":
        return all(_is_harmless(part, device) for part in hook.hooks)
    if cls.__name__ != "AlignDevicesHook" or hook.offload:
        return False
    there = hook.execution_device
    return there is None or (torch.device("cuda", there) if isinstance(there, int) else torch.device(there)) == device
