"""Checks attributes of modules, and of the classes that `fuse` gives them, under names that the code mentions: Python
may find these attributes instead of what the code's source defines."""

from collections.abc import Iterable
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fusedvit.checks.adapters import Plain
from fusedvit.checks.module_calls import replaced_calls
from fusedvit.checks.own_code.findings import CALLED
from fusedvit.checks.own_code.walk import LOOKUP, CodeWalk
from fusedvit.checks.ownership import ORIGINAL, describe, name_of, own_class
from fusedvit.checks.recorded import registered
from fusedvit.checks.source_code import definition_of, names_in

_METHODS = (property, FunctionType, staticmethod, classmethod)


def follow_classes(walk: CodeWalk, plain: Plain) -> None:
    """Notes class attributes that Python finds before an instance's attribute of the same name.

    Any class attribute hides a registered object, and a data descriptor hides other attributes. Properties and methods
    must be those that their class's source defines.
    """
    known: set[tuple[type, str]] = set()
    for module in plain.modules.values():
        cls, inside = own_class(type(module)), registered(module)
        held = {(cls, name) for name in (inside | vars(module).keys()) & (walk.found.names | walk.found.optional)}
        optional = {(cls, name) for name in walk.found.optional - vars(module).keys()}
        for of, name in (held | optional) - known:
            value = next((vars(c)[name] for c in of.__mro__ if name in vars(c)), None)
            first = name in inside or hasattr(type(value), "__set__") or name not in vars(module)
            if first and isinstance(value, _METHODS):
                walk.follow_method(of, name)
            elif first and value is not None:
                walk.found.note_foreign(f"{name_of(of)}.{name} is {describe(value)}", of, name)
        known |= held | optional
    for cls in {cls for cls, _ in known}:
        for base in cls.__mro__[:-1]:
            walk.found.note_absent(base, walk.found.optional - vars(base).keys())


def follow_calls(walk: CodeWalk, plain: Plain) -> None:
    """Notes functions on inner modules that replace what calling the module runs; the caller runs the tower's."""
    inside = (layer.named_modules(prefix=path) for path, layer in plain.layers.items())
    for path, module in chain(plain.modules.items(), *inside):
        for what in replaced_calls(path, module) if path else ():
            walk.found.note_foreign(what)


def follow_called_by_others(walk: CodeWalk, inner: Iterable[nn.Module]) -> None:
    """Follows methods of an engine's inner modules that the code of the tower's file names: it calls more of them than
    `forward`, such as those of a rotary table. What a method calls in its own class `follow_method` finds."""
    functions = [f for f in walk.found.functions.values() if f.__module__.startswith(walk.engine.towers)]
    mentioned = sorted({name for function in functions for name in names_in(function.__code__)})
    for cls in dict.fromkeys(map(type, inner)):
        for name in mentioned:
            home = next((c for c in cls.__mro__ if name in vars(c)), nn.Module)
            if home.__module__.startswith(walk.engine.packages):
                walk.follow_method(cls, name)


def follow_attributes(walk: CodeWalk, path: str, module: nn.Module) -> None:
    """Follows bound methods that a module keeps as attributes, and the code of the engine's `objects`."""
    for name, value in vars(module).items():
        if name not in walk.found.names:
            continue
        if type(value) is MethodType and value.__self__ is module:
            walk.follow_method(type(module), value.__func__.__name__)
            if getattr(type(module), value.__func__.__name__, None) is not value.__func__:
                walk.found.note_foreign(f"{path}.{name} is {describe(value.__func__)}")
        elif type(value) is MethodType:  # it would compute with another object's weights
            walk.found.note_foreign(f"{path}.{name} is a method of another object")
        elif name in walk.engine.objects:
            _follow_object(walk, f"{path}.{name}", value)


def _follow_object(walk: CodeWalk, where: str, value: object) -> None:
    """Follows what a module's code would call on the object `value`: its methods, and functions that it keeps."""
    for method in sorted(walk.found.names & vars(type(value)).keys()):
        walk.follow_method(type(value), method)
    for name in sorted(walk.found.names & getattr(value, "__dict__", {}).keys()):
        kept = vars(value)[name]
        walk.found.registries.append((vars(value), name))
        found = definition_of(kept.func if isinstance(kept, partial) else kept)
        if callable(kept) and (found is None or not found.module.startswith(walk.engine.packages)):
            walk.found.note_foreign(f"{where}.{name} is {describe(kept)}")


def follow_ours(walk: CodeWalk, tower: nn.Module) -> None:
    """Notes foreign attributes of the tower and of the classes that `fuse` and torch put before the tower's own."""
    cls: Any = type(tower)
    for name in sorted(vars(tower).keys() & walk.found.methods().get(own_class(cls), ())):
        walk.found.note_foreign(f"{name_of(cls)}.{name} of the instance is {describe(vars(tower)[name])}")
    for ours in cls.__mro__[: cls.__mro__.index(own_class(cls))]:
        names = (walk.found.names | {*CALLED, *LOOKUP}) - {"forward"}
        hidden = sorted(vars(ours).keys() & names) if ORIGINAL in vars(ours) else []
        for name in hidden:
            walk.found.note_foreign(f"{name_of(cls)}.{name} is {describe(vars(ours)[name])}", ours, name)
        walk.found.note_absent(ours, names - vars(ours).keys())
