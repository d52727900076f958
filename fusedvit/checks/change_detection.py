"""Notices when a tower is no longer what its weights were prepared from.

A `Snapshot` holds every registry entry of modules and parameters, every plain attribute that a forward reads, and the
slots of the code that would run, so that a call compares identities, versions and pointers in flat loops. Writes that
leave no trace there (`param.data.copy_`) are left to the fingerprint of the content.
"""

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

from torch import nn

from fusedvit.checks import accelerate_hooks, adapters, module_calls
from fusedvit.checks.as_built import CAUSAL, dropouts
from fusedvit.checks.forward_hooks import NEVER_CALLED, fires, hooks_on_embedding
from fusedvit.checks.own_code.findings import OwnCode
from fusedvit.checks.ownership import own_class
from fusedvit.checks.recorded import (
    KEYS,
    REGISTRIES,
    Attributes,
    Bodies,
    Entries,
    Instances,
    Tensors,
    Written,
    registered,
)
from fusedvit.checks.source_code import UnreadSource, cells_of

HANDLE = "_fusedvit"  # key of the handle in the `__dict__` of a fused tower
_held_by = attrgetter("cell_contents")
_CONTAINERS = (*NEVER_CALLED, nn.Sequential)
_CONFIG = ("_attn_implementation", "attribute_map", "__getattribute__", "__getattr__", "__mro__")  # of its class
_parts_of_partial = attrgetter("func", "args", "keywords")
_wants_gradient = attrgetter("requires_grad")
_is_training = attrgetter("training")


@dataclass(frozen=True)
class _Code:
    """The code that would run: its slots and their values, functions and their bodies (code, defaults, keyword
    defaults), and functions that decorators wrap.

    `descriptors`: of slots whose value is a new object each time, as that of a class method is: namespaces in which
    Python may find what makes it, the name, and what each holds.
    `absent`: (live key views of classes and modules, names that each must not have). A class or module that gains one
    of the names would shadow what the code resolves to now. Comparing keys takes a tenth of the time of failing
    lookups.
    """

    owners: tuple[Any, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    descriptors: tuple[list[MappingProxyType[str, Any]], list[str], list[Any]]
    registries: Attributes
    bodies: Bodies
    wrapped: tuple[tuple[Any, ...], tuple[Any, ...]]
    absent: tuple[tuple[KeysView[str], ...], tuple[frozenset[str], ...]]

    @staticmethod
    def of(own: OwnCode, modules: Sequence[nn.Module]) -> "_Code":
        """`modules` are checked for properties of their classes that could hide attributes."""
        shadows = {(own_class(type(m)), name) for m in modules for name in _attributes(m) & own.names}
        configs = _configs_of(modules)
        shadows |= {(type(c), name) for c in configs for name in vars(c).keys() & own.names}
        shadows |= {(type(c), name) for c in configs for name in _CONFIG if hasattr(type(c), name)}
        there = {(cls, name) for cls, name in shadows if hasattr(cls, name)}
        missing: dict[type, set[str]] = defaultdict(set)
        for cls, name in shadows - there:
            for base in cls.__mro__[:-1]:
                missing[base].add(name)
        absent = (
            *own.absent,
            *((vars(cls).keys(), frozenset(names)) for cls, names in missing.items()),
        )
        views, hidden = zip(*absent, strict=True)
        slots = [(owner, name, getattr(owner, name, None)) for owner, name in (*own.slots, *there)]
        kept = [getattr(owner, name, None) is value for owner, name, value in slots]
        owners, names, values = zip(*compress(slots, kept), strict=True)
        entries = [
            (mapping, s[1])
            for s, is_kept in zip(slots, kept, strict=True)
            if not is_kept
            for mapping in _namespaces(s[0])
        ]
        holders, keys = [mapping for mapping, _ in entries], [name for _, name in entries]
        descriptors = holders, keys, list(map(MappingProxyType.get, holders, keys))
        cells = tuple(cell for function in own.functions for cell in cells_of(function))
        wrapped = cells, tuple(map(_held_by, cells))
        registries = Attributes(own.registries)
        return _Code(owners, names, values, descriptors, registries, Bodies(own.functions), wrapped, (views, hidden))

    def unchanged(self) -> bool:
        return (
            all(map(is_, map(getattr, self.owners, self.names, repeat(None)), self.values))
            and all(map(is_, map(MappingProxyType.get, *self.descriptors[:2]), self.descriptors[2]))
            and all(map(KEYS.isdisjoint, *self.absent))
            and self.registries.hold_the_same()
            and self.registries.unchanged()
            and self.bodies.unchanged()
            and all(map(is_, map(_held_by, self.wrapped[0]), self.wrapped[1]))
        )


def _namespaces(owner: Any) -> Iterator[MappingProxyType[str, Any]]:
    """The namespaces in which Python looks an attribute of `owner` up."""
    own = owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__)
    return (MappingProxyType(vars(part)) for part in own if hasattr(part, "__dict__"))


def _attributes(module: nn.Module) -> set[str]:
    """Names of an instance's own attributes, and of its registered parameters, buffers and modules."""
    return {*vars(module), *registered(module)}


def _configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The distinct configs of `modules`."""
    return [*{id(c): c for m in modules if (c := vars(m).get("config")) is not None}.values()]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tower's modules, parameters and code at one moment. Each call compares it, so its loops run in C.

    It has slots: a library that walks over the attributes of a fused tower (TorchLens) would reach all modules of torch
    and transformers through those of `code`, and fail there.

    Attributes:
        children: entries of the tower's registries, and of every inner module.
        registries: registries of modules, parameters and buffers.
        lengths: lengths of `registries`.
        orders: registries of modules that run in their order, and that order.
        instances: `__dict__` of every inner module, in which a new entry may hide one of the class or of a registry.
        parameters: every parameter that the tower as it stands computes with; not those of inactive adapters.
        buffers: every buffer that the tower computes with.
        embedding: the registry of `hooks_on_embedding`.
        classes: the class of each of `classed`, which an assignment to `__class__` changes.
        checkpointing: modules that may be checkpointed, and whether by others: see `module_calls`.
        classed: every inner module once, the configs of all modules, and accelerate's hooks.
        homes: `__dict__` of each of `classed`.
        attributes: attributes of modules and of the config that a forward reads.
        partials: partial functions among the attributes, and their parts, which can be replaced.
        tower: a weak reference to the tower, its class as transformers defines it, and its `__dict__`.
        hidden: live keys of the tower's `__dict__`, and names that they must not have. Other names may be added, for
            example by transformers.
        empty: registries that held nothing.
        written: the dictionaries of all these entries, except the empty ones.
        code: the code that would run.
        idle: parameters of inactive adapters.
    """

    children: Entries
    registries: tuple[dict[str, Any], ...]
    lengths: list[int]
    orders: tuple[tuple[dict[str, Any], ...], list[tuple[str, ...]]]
    instances: Instances
    parameters: Tensors
    buffers: Tensors
    embedding: dict[int, Any]
    checkpointing: tuple[list[nn.Module], list[bool]]
    classes: list[type]
    classed: tuple[Any, ...]
    homes: tuple[dict[str, Any], ...]
    attributes: Attributes
    partials: tuple[tuple[Any, ...], list[Any]]
    tower: tuple[weakref.ref[nn.Module], type, dict[str, Any]]
    code: _Code
    hidden: tuple[KeysView[str], frozenset[str]]
    empty: tuple[dict[str, Any], ...]
    written: Written
    idle: tuple[nn.Parameter, ...]

    @staticmethod
    def of(tower: nn.Module, own: OwnCode, buffers: Collection[str]) -> "Snapshot":
        """A snapshot of the tower as it stands.

        Args:
            own: the code that the tower would run.
            buffers: names of the buffers that the tower computes with.
        """
        modules = list(tower.modules())
        inner = modules[1:]
        checkpointing = list(filter(module_calls.may_checkpoint, inner))
        read = dict.fromkeys(module for _, module in adapters.modules_read(tower))
        configs = _configs_of(modules)
        classed = (*inner, *configs, *(hook for m in inner for hook in accelerate_hooks.hooks_of(m)))
        holding: list[dict[str, Any]] = [m._modules for m in modules if m._modules or isinstance(m, _CONTAINERS)]
        registries = (*holding, *(m._parameters for m in modules), *(m._buffers for m in modules))
        ordered = tuple(m._modules for m in modules if isinstance(m, _CONTAINERS))
        maps = (m for c in configs if isinstance(m := getattr(c, "attribute_map", None), dict))
        attributes = Attributes(_slots_read(tower, modules, own), maps)
        own_registries = ((vars(tower), name) for name in REGISTRIES)  # `Instances` compares those of inner modules
        partials = tuple(value for value in attributes.entries.values if isinstance(value, partial))
        return Snapshot(
            children=Entries.of((*own_registries, *((m._modules, name) for m in modules for name in m._modules))),
            registries=registries,
            lengths=list(map(len, registries)),
            orders=(ordered, list(map(tuple, ordered))),
            instances=Instances.of(inner, (m for m in inner if not isinstance(m, NEVER_CALLED))),
            parameters=Tensors.of((m._parameters, name) for m in read for name in m._parameters),
            buffers=Tensors.of((m._buffers, name) for m in read for name in m._buffers if name in buffers),
            embedding=hooks_on_embedding(tower),
            checkpointing=(checkpointing, list(map(module_calls.is_checkpointed_by_others, checkpointing))),
            classes=list(map(type, classed)),
            classed=classed,
            homes=tuple(map(vars, classed)),
            attributes=attributes,
            partials=(partials, [(p.func, p.args, dict(p.keywords)) for p in partials]),
            tower=(weakref.ref(tower), own_class(type(tower)), vars(tower)),
            code=_Code.of(own, modules),
            hidden=(vars(tower).keys(), own.names - vars(tower).keys() - {"forward"}),
            empty=tuple(registry for registry in registries if not registry),
            written=Written((*filter(None, registries), *map(vars, modules), *attributes.entries.registries)),
            idle=tuple(p for m in modules if m not in read for p in m._parameters.values() if p is not None),
        )

    def first_parameter(self) -> nn.Parameter | None:
        """The parameter that is now registered where the first one was."""
        return next((t for t in self.parameters.entries.current() if t is not None), None)

    def in_place(self) -> bool:
        """Whether every parameter is at its old address; checked before a kernel reads through old addresses."""
        return self.parameters.in_place()

    def trained(self) -> bool:
        """Whether a parameter requires a gradient, also one of an inactive adapter: `fallback` counts these too."""
        return self.parameters.wants_gradients() or any(map(_wants_gradient, self.idle))

    def renewed(self) -> "Snapshot":
        """This snapshot with the addresses and versions that parameters have now."""
        return replace(self, parameters=self.parameters.renewed())

    def versions(self) -> list[int]:
        """Versions of the parameters that count one."""
        return self.parameters.versions

    def unchanged(self) -> bool:
        """Whether the tower is unchanged, apart from addresses of parameters, which `in_place` compares.

        No module was added, replaced or removed or got an own `forward`; no hook would fire; no attribute that a
        forward reads has changed; every tensor is the same object with the same dtype, layout and version; no buffer
        requires a gradient; the code is the same. False also if a source that tells cannot be read for now.
        """
        try:
            return self._compare()
        except UnreadSource:
            return False

    def _compare(self) -> bool:
        return (
            self._has_its_entries()
            and list(map(tuple, self.orders[0])) == self.orders[1]
            and not any(map(fires, filter(None, self.instances.hooks), repeat(self.embedding)))
            and list(map(type, self.classed)) == self.classes
            and self.attributes.hold_the_same()
            and list(map(_parts_of_partial, self.partials[0])) == self.partials[1]
            and self._is_of_its_class()
            and self.parameters.unchanged()
            and self.buffers.unchanged()
            and self.buffers.in_place()
            and not self.buffers.wants_gradients()
            and self.code.unchanged()
        )

    def _has_its_entries(self) -> bool:
        """Whether registries and attributes hold what they held. Entries are compared one by one only if one of the
        dictionaries was written to since the last comparison."""
        versions = self.written.now()
        if not all(map(is_, map(vars, self.classed), self.homes)):
            return False
        if versions is not None and versions == self.written.versions and not any(self.empty):
            return True
        unchanged = (
            self.children.unchanged()
            and list(map(len, self.registries)) == self.lengths
            and self.instances.unchanged()
            and self.attributes.unchanged()
            and self.hidden[0].isdisjoint(self.hidden[1])
            and self.parameters.entries.unchanged()
            and self.buffers.entries.unchanged()
            and self._checkpointed_as_before()
        )
        self.written.versions = versions if unchanged else None
        return unchanged

    def _checkpointed_as_before(self) -> bool:
        modules, before = self.checkpointing
        if not any(map(_is_training, modules)):  # the usual case, in a microsecond: no block is checkpointed
            return not any(before)
        return list(map(module_calls.is_checkpointed_by_others, modules)) == before

    def _is_of_its_class(self) -> bool:
        """Whether the tower has its class, apart from changes by `fuse` and `unfuse`, and its `__dict__`."""
        held, cls, attributes = self.tower
        tower = held()
        return tower is None or (own_class(type(tower)) is cls and vars(tower) is attributes)


def _slots_read(tower: nn.Module, modules: Iterable[nn.Module], own: OwnCode) -> Iterator[tuple[dict[str, Any], str]]:
    """Slots of the attributes of modules and configs that the code mentions, of attributes that shadow a method, and of
    `training` where it matters."""
    for module in modules:
        attributes = vars(module)
        read = attributes.keys() & own.names - {"training", *REGISTRIES}
        yield from ((attributes, name) for name in read)
        yield from ((attributes, name) for name in own.methods.get(own_class(type(module)), ()))
        yield from adapters.slots_read(module)
        yield from module_calls.slots_read(module)
        yield from (accelerate_hooks.slots_read(module) if module is not tower else ())
    for config in _configs_of(modules):
        attributes = vars(config)
        yield from ((attributes, name) for name in attributes.keys() & own.names)
        yield from ((attributes, name) for name in ("_attn_implementation_internal", CAUSAL))
    yield from ((vars(module), "training") for module in dropouts(tower))
