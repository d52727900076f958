"""Notices when a tower is no longer what its weights were prepared from.

A `Snapshot` holds every registry entry of modules and parameters, so that a call compares identities, versions and
pointers in a flat loop. What it cannot notice (`param.data.copy_`) is left to the fingerprint of the content.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter, contains, is_
from typing import Any

import torch
from torch import nn

from fusedvit.checks.as_built import attributes_of, numbers_of

_CAPTURING_HOOKS = "transformers.utils.output_capturing"  # installed lazily, idle unless hidden states are asked for
HOOK_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_dtype_of, _version_of = attrgetter("dtype"), attrgetter("_version")


@dataclass(frozen=True)
class _Entries:
    """Entries of registries (a module's `_modules`, `_parameters`): each value, its registry and its name there."""

    registries: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @staticmethod
    def of(found: Iterable[tuple[dict[str, Any], str, Any]]) -> "_Entries":
        registries, names, values = zip(*found, strict=True)
        return _Entries(registries, names, values)

    def current(self) -> Iterator[Any]:
        """What is registered there now; None for nothing."""
        return map(dict.get, self.registries, self.names)

    def unchanged(self) -> bool:
        return all(map(is_, self.current(), self.values))


@dataclass(frozen=True)
class _Parameters:
    """Every parameter, and its address, dtype and version.

    `versions` are of `counted`: those that are no inference tensors, and keep their counter whatever `p.data` becomes.
    """

    entries: _Entries
    pointers: list[int]
    dtypes: list[torch.dtype]
    counted: list[torch.Tensor]
    versions: list[int]

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> "_Parameters":
        entries = _Entries.of(
            (m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None
        )
        found = entries.values
        counted = [p for p in found if not p.is_inference()]
        return _Parameters(
            entries,
            [p.data_ptr() for p in found],
            [p.dtype for p in found],
            counted,
            [p._version for p in counted],
        )

    def in_place(self) -> bool:
        return list(map(torch.Tensor.data_ptr, self.entries.values)) == self.pointers

    def unchanged(self) -> bool:
        found = self.entries.values
        return (
            self.entries.unchanged()
            and list(map(_dtype_of, found)) == self.dtypes
            and list(map(_version_of, self.counted)) == self.versions
        )


@dataclass(frozen=True)
class Snapshot:
    """A tower's modules and parameters at one moment. Compared by each call: its loops are C's, not Python's.

    Attributes:
        children: every inner module.
        instances: `__dict__` of every inner module, where a `forward` would shadow the class's.
        hooks: hook registries of every inner module.
        parameters: every parameter.
        classes: the class of each of `inner`, which assigning `__class__` changes.
        inner: every inner module once.
        numbers: every norm's epsilon and the like, where it is kept.
        tower: the tower, held weakly, and the attributes that its forward goes by.
    """

    children: _Entries
    instances: tuple[dict[str, Any], ...]
    hooks: tuple[dict[int, Any], ...]
    parameters: _Parameters
    classes: list[type]
    inner: tuple[nn.Module, ...]
    numbers: tuple[tuple[dict[str, Any], str, float], ...]
    tower: tuple[weakref.ref[nn.Module], dict[str, object]]

    @staticmethod
    def of(tower: nn.Module) -> "Snapshot":
        modules = list(tower.modules())
        inner = modules[1:]
        return Snapshot(
            _Entries.of((m._modules, name, c) for m in modules for name, c in m._modules.items() if c is not None),
            tuple(m.__dict__ for m in inner),
            tuple(getattr(m, name) for m in inner for name in HOOK_REGISTRIES),
            _Parameters.of(modules),
            [type(m) for m in inner],
            tuple(inner),
            tuple((vars(m), name, value) for m in inner for name, value in numbers_of(m).items()),
            (weakref.ref(tower), attributes_of(tower)),  # weakly: the tower goes when its owner drops it
        )

    def first_parameter(self) -> nn.Parameter | None:
        """What is registered now where the first parameter was."""
        return next(self.parameters.entries.current())

    def in_place(self) -> bool:
        """Every parameter at the address where it was: asked before a kernel reads through addresses of then."""
        return self.parameters.in_place()

    def readdressed(self) -> "Snapshot":
        """This snapshot, with the addresses that parameters have now."""
        pointers = [p.data_ptr() for p in self.parameters.entries.values]
        return replace(self, parameters=replace(self.parameters, pointers=pointers))

    def unchanged(self) -> bool:
        """No inner module replaced, none with a `forward` of its own, no hook that would fire; every parameter the same
        object with the same dtype and version. Their addresses are what `in_place` compares."""
        tower = self.tower[0]()
        return tower is not None and (
            self.children.unchanged()
            and not any(map(contains, self.instances, repeat("forward")))
            and not (any(self.hooks) and any(registry and fires(registry) for registry in self.hooks))
            and list(map(type, self.inner)) == self.classes
            and all(kept.get(name) == value for kept, name, value in self.numbers)
            and attributes_of(tower) == self.tower[1]
            and self.parameters.unchanged()
        )


def fires(hooks: dict[int, Callable[..., Any]]) -> bool:
    """Whether a hook of this registry is more than transformers' own, idle one."""
    return any(_module_of(hook) != _CAPTURING_HOOKS for hook in hooks.values())


def _module_of(hook: Callable[..., Any]) -> str | None:
    return getattr(getattr(hook, "func", hook), "__module__", None)
