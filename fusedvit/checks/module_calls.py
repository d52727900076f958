"""What calling a module runs before it comes to `forward`: torch's own functions, and what instances have instead.

`module.compile()` leaves a function on the instance that compiles the module's call. As torch makes it, for torch's own
compiler, it computes what the module does; a backend that somebody else wrote may compute anything.
"""

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fusedvit.checks.source_code import Definition, definition_of

COMPILED = "_compiled_call_impl"  # called instead of all else, unless it is None
CALL = ("__call__", "_call_impl", "_wrapped_call_impl", COMPILED)
OF_INSTANCES = frozenset({*CALL[1:], "_slow_forward"})  # Python finds `__call__` on the class alone
_WRAPPER = Definition("torch._dynamo.eval_frame", "_TorchDynamoContext.__call__.<locals>.compile_wrapper")
_PLAIN = (int, float, str, type(None))  # an option may be a pass over the graph as well


def replaced_calls(path: str, module: nn.Module) -> Iterator[str]:
    """What `module`, an inner one, runs when called that neither its class nor torch's compiler gave it."""
    for name in sorted(vars(module).keys() & OF_INSTANCES):
        value = vars(module)[name]
        if name != COMPILED:
            yield f"{path}.{name} is an attribute of the instance, expected the method of its class"
        elif value is not None and not _is_call_of(value, module) and not _is_compiled_by_torch(value, module):
            yield f"{path} is compiled by another backend than torch's inductor ({path}.{name})"


def slots_read(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where an instance keeps its compiled call, for change detection."""
    if COMPILED in vars(module):
        yield vars(module), COMPILED


def _is_call_of(value: object, module: nn.Module) -> bool:
    """Whether it is torch's own call, bound to `module`: what compiling leaves where it is switched off."""
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is nn.Module._call_impl


def _is_compiled_by_torch(value: object, module: nn.Module) -> bool:
    if not isinstance(value, FunctionType) or definition_of(value) != _WRAPPER:
        return False
    try:
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        held: dict[str, Any] = dict(zip(value.__code__.co_freevars, cells, strict=True))
        backend = _innermost(held["callback"])
    except (ValueError, KeyError, AttributeError):  # another release of torch keeps other things there
        return False
    options = getattr(backend, "config", {})
    ours = type(backend) is getattr(torch, "_TorchCompileInductorWrapper", None)
    return ours and _is_call_of(held["fn"], module) and all(isinstance(option, _PLAIN) for option in options.values())


def _innermost(callback: Any) -> Any:
    """The backend that Dynamo's callbacks lead to, each around the next."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback
