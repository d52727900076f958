"""Checks the functions that run when a module is called, before or around `forward`: torch's own, or replacements.

`module.compile()` stores a function on the instance that compiles the module's call. If torch created it for its own
compiler, it computes what the module computes; a third-party backend may compute anything.

Gradient checkpointing gives a block's `forward` to a function that the block holds. torch's computes the same; a user's
own may compute anything.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fusedvit.checks.ownership import described_call
from fusedvit.checks.source_code import Definition, definition_of, wrapped_by

COMPILED = "_compiled_call_impl"  # if it is not None, `__call__` runs nothing else
CALL = ("__call__", "_call_impl", "_wrapped_call_impl", COMPILED)
OF_INSTANCES = frozenset({*CALL[1:], "_slow_forward"})  # without `__call__`, which Python finds on the class only
_WRAPPER = Definition("torch._dynamo.eval_frame", "_TorchDynamoContext.__call__.<locals>.compile_wrapper")
_PLAIN = (int, float, str, type(None))  # other options, such as passes over the graph, may change what is computed
# A class's flag, and the function that its blocks then run in training mode, if gradients are enabled.
CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")
_OPTIONS = {bool, str, type(None)}  # types of its plain options
_REMEDY = "; a frozen tower needs none: switch gradient checkpointing off for the tower"
_CHECKPOINT = Definition("torch.utils.checkpoint", "checkpoint")
_OFFLOADED_CHECKPOINT = [  # transformers' own around torch's, as each of its releases names it
    Definition("transformers.modeling_utils", f"PreTrainedModel.{method}.<locals>.checkpoint_func")
    for method in ("gradient_checkpointing_enable", "_activation_checkpointing_enable")
]


def replaced_calls(path: str, module: nn.Module) -> Iterator[str]:
    """Functions that run when `module`, an inner one, is called and that are neither its class's nor torch's."""
    for name in sorted(vars(module).keys() & OF_INSTANCES):
        value = vars(module)[name]
        if name != COMPILED:
            yield f"{path}.{name} is an attribute of the instance, expected the method of its class"
        elif value is not None and not _is_call_of(value, module) and not _is_compiled_by_torch(value, module):
            yield f"{path} is compiled by another backend than torch's inductor ({path}.{name})"
    if is_checkpointed_by_others(module):
        function = getattr(module, CHECKPOINTING[1], None)
        odd = "".join(f", with {name}" for name in _odd_options(function))
        expected = "expected torch's checkpoint with plain options"
        yield f"{path}.{CHECKPOINTING[1]} is {described_call(function)}{odd}, {expected}{_REMEDY}"


def may_checkpoint(module: nn.Module) -> bool:
    """Whether the class of `module` is one whose blocks may be checkpointed."""
    return hasattr(type(module), CHECKPOINTING[0])


def is_checkpointed_by_others(module: nn.Module) -> bool:
    """Whether the next call of `module` with gradients enabled runs a checkpointing function that is not torch's."""
    if not may_checkpoint(module) or not module.training or not getattr(module, CHECKPOINTING[0]):
        return False
    return not _is_torchs_checkpoint(getattr(module, CHECKPOINTING[1], None))


def _is_torchs_checkpoint(function: object) -> bool:
    """Whether `function` is torch's checkpoint, with plain options: a `context_fn` may change what is computed."""
    if type(function) is partial:
        if function.args or _odd_options(function):
            return False
        function = function.func
    if type(function) is FunctionType and definition_of(function) in _OFFLOADED_CHECKPOINT:
        function = function.__globals__.get("checkpoint")
    while type(function) is FunctionType and (inner := wrapped_by(function)) is not None:
        found = definition_of(function)  # torch wraps it to keep its compiler away
        if found is None or not found.module.startswith("torch.") or found.module.startswith("torch._dynamo"):
            return False
        function = inner
    return definition_of(function) == _CHECKPOINT


def _odd_options(function: object) -> list[str]:
    """Names of a partial function's options that are not plain."""
    options = function.keywords if isinstance(function, partial) else {}
    return [name for name, value in options.items() if type(value) not in _OPTIONS]


def slots_read(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The slot of an instance's compiled call, for change detection."""
    if COMPILED in vars(module):
        yield vars(module), COMPILED


def class_slots(modules: Iterable[nn.Module]) -> Iterator[tuple[type, str]]:
    """Slots of the classes of `modules` that decide on checkpointing; instances may have entries of their own."""
    yield from ((cls, name) for cls in {type(m) for m in modules if may_checkpoint(m)} for name in CHECKPOINTING)


def _is_call_of(value: object, module: nn.Module) -> bool:
    """Whether `value` is torch's own call bound to `module`, which `compile()` leaves if compilation is disabled."""
    return type(value) is MethodType and value.__self__ is module and value.__func__ is nn.Module._call_impl


def _is_compiled_by_torch(value: object, module: nn.Module) -> bool:
    return type(value) is FunctionType and _is_call_of(compiled_by_torch(value), module)


def compiled_by_torch(wrapper: FunctionType) -> object:
    """The function that torch's own compiler runs in place of `wrapper`; None if `wrapper` is anything else."""
    if definition_of(wrapper) != _WRAPPER:
        return None
    try:
        cells = (cell.cell_contents for cell in wrapper.__closure__ or ())
        held: dict[str, Any] = dict(zip(wrapper.__code__.co_freevars, cells, strict=True))
        backend = _innermost(held["callback"])
    except (ValueError, KeyError, AttributeError):  # another release of torch has other closure variables
        return None
    options = getattr(backend, "config", {})
    ours = type(backend) is getattr(torch, "_TorchCompileInductorWrapper", None)
    return held["fn"] if ours and all(isinstance(option, _PLAIN) for option in options.values()) else None


def _innermost(callback: Any) -> Any:
    """The backend inside Dynamo's nested callbacks."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback
