"""Notices when a tower is no longer what its prepared weights were made from.

A `Snapshot` holds every place where a module or parameter hangs, so that a call compares identities, versions and
pointers in a flat loop. What it cannot see (`param.data.copy_`) is left to the fingerprint.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, contains, is_
from typing import Any

import torch
from torch import nn

from fusedvit.checks import fallback
from fusedvit.checks.as_built import attributes_of, is_as_built, numbers_of
from fusedvit.families.base import Family
from fusedvit.model.spec import VisionSpec

_CAPTURING_HOOKS = "transformers.utils.output_capturing"  # installed lazily, idle unless hidden states are asked for
_HOOK_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FINGERPRINTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


_dtype_of, _version_of = attrgetter("dtype"), attrgetter("_version")


@dataclass(frozen=True)
class _Places:
    """Things, where each hangs, and its name there."""

    registries: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    things: tuple[Any, ...]

    @staticmethod
    def of(found: Iterable[tuple[dict[str, Any], str, Any]]) -> "_Places":
        registries, names, things = zip(*found, strict=True)
        return _Places(registries, names, things)

    def today(self) -> Iterator[Any]:
        """What hangs there now; None for nothing."""
        return map(dict.get, self.registries, self.names)

    def unchanged(self) -> bool:
        return all(map(is_, self.today(), self.things))


@dataclass(frozen=True)
class _Parameters:
    """Every parameter, and what it looked like.

    `versions` are of `counted`: those that are no inference tensors, and keep their counter whatever `p.data` becomes.
    """

    places: _Places
    pointers: list[int]
    dtypes: list[torch.dtype]
    counted: list[torch.Tensor]
    versions: list[int]

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> "_Parameters":
        places = _Places.of(
            (m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None
        )
        found = places.things
        counted = [p for p in found if not p.is_inference()]
        return _Parameters(
            places,
            [p.data_ptr() for p in found],
            [p.dtype for p in found],
            counted,
            [p._version for p in counted],
        )

    def unchanged(self) -> bool:
        found = self.places.things
        return (
            self.places.unchanged()
            and list(map(torch.Tensor.data_ptr, found)) == self.pointers
            and list(map(_dtype_of, found)) == self.dtypes
            and list(map(_version_of, self.counted)) == self.versions
        )


@dataclass(frozen=True)
class Snapshot:
    """A tower's modules and parameters at one moment. Looked at by each call: its loops are C's, not Python's.

    Attributes:
        children: every inner module.
        instances: `__dict__` of every inner module, where a `forward` would shadow the class's.
        hooks: hook registries of every inner module.
        parameters: every parameter.
        classes: the class of each of `inner`, which assigning `__class__` changes.
        inner: every inner module once.
        numbers: every norm's epsilon and the like, where it is kept.
        tower: the tower and the attributes that its forward goes by.
    """

    children: _Places
    instances: tuple[dict[str, Any], ...]
    hooks: tuple[dict[int, Any], ...]
    parameters: _Parameters
    classes: list[type]
    inner: tuple[nn.Module, ...]
    numbers: tuple[tuple[dict[str, Any], str, float], ...]
    tower: tuple[nn.Module, dict[str, object]]

    @staticmethod
    def of(tower: nn.Module) -> "Snapshot":
        modules = list(tower.modules())
        inner = modules[1:]
        return Snapshot(
            _Places.of((m._modules, name, c) for m in modules for name, c in m._modules.items() if c is not None),
            tuple(m.__dict__ for m in inner),
            tuple(getattr(m, name) for m in inner for name in _HOOK_REGISTRIES),
            _Parameters.of(modules),
            [type(m) for m in inner],
            tuple(inner),
            tuple((vars(m), name, value) for m in inner for name, value in numbers_of(m).items()),
            (tower, attributes_of(tower)),
        )

    def same_structure(self) -> bool:
        """No inner module replaced, none with a `forward` of its own, no hook that would fire."""
        return (
            self.children.unchanged()
            and not any(map(contains, self.instances, repeat("forward")))
            and not (any(self.hooks) and any(registry and _fires(registry) for registry in self.hooks))
            and list(map(type, self.inner)) == self.classes
            and all(kept.get(name) == value for kept, name, value in self.numbers)
            and attributes_of(self.tower[0]) == self.tower[1]
        )

    def first_parameter(self) -> nn.Parameter | None:
        """What hangs today where the first parameter did."""
        return next(self.parameters.places.today())

    def same_parameters(self) -> bool:
        """Every parameter is the same object with the same pointer, dtype and version."""
        return self.parameters.unchanged()


def _fires(hooks: dict[int, Callable[..., Any]]) -> bool:
    return any(_module_of(hook) != _CAPTURING_HOOKS for hook in hooks.values())


def _module_of(hook: Callable[..., Any]) -> str | None:
    return getattr(getattr(hook, "func", hook), "__module__", None)


def reason_of_tower(tower: nn.Module, family: Family, spec: VisionSpec) -> str | None:
    """Why `tower` as it stands cannot run fused, or None."""
    for name, module in tower.named_modules():
        if name and any(_fires(getattr(module, registry)) for registry in _HOOK_REGISTRIES):
            return fallback.HOOKS
    if not is_as_built(tower, family, spec):
        return fallback.MODIFIED
    return _reason_of_parameters(list(tower.parameters()))


def _reason_of_parameters(parameters: Sequence[torch.Tensor]) -> str | None:
    if any(p.device.type == "meta" for p in parameters):
        return fallback.META
    devices, dtypes = {p.device for p in parameters}, {p.dtype for p in parameters}
    if len(devices) > 1:
        return fallback.DEVICES
    if len(dtypes) > 1:
        return fallback.DTYPES
    device, dtype = next(iter(devices)), next(iter(dtypes))
    if not _device_runs(device):
        return fallback.UNSUPPORTED_DEVICE
    supported = FINGERPRINTED if device.type == "cpu" else FINGERPRINTED[:3]
    if dtype not in supported:
        return fallback.UNSUPPORTED_DTYPE
    return None if all(_is_dense(p) for p in parameters) else fallback.MODIFIED


def _device_runs(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _is_dense(p: torch.Tensor) -> bool:
    return p.is_contiguous() or (p.ndim == 5 and p.is_contiguous(memory_format=torch.channels_last_3d))
