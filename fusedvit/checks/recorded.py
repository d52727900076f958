"""The parts of a tower's snapshot and their comparison: entries of dictionaries, attributes of modules, tensors.

A call compares thousands of entries, so each loop here runs in C.
"""

import functools
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from operator import attrgetter, is_, is_not
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fusedvit.checks import module_calls
from fusedvit.errors import attempted

REGISTRIES = ("_modules", "_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HIDING = frozenset({"forward", *module_calls.OF_INSTANCES})  # set on an instance, these hide its class's methods
KEYS: Any = type({}.keys())
_body_of = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_version_of_dictionary: Any = getattr(torch._C._dynamo.guards, "dict_version", None)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, torch.device, torch.Size})
_plainly: Any = torch._C.DisableTorchFunctionSubclass  # else engines' parameters run Python code for each attribute
_shape_of, _version_of, _wants_gradient = map(attrgetter, ("shape", "_version", "requires_grad"))
_LAYOUT: tuple[Callable[[torch.Tensor], Any], ...] = (
    type,
    attrgetter("dtype"),
    _shape_of,
    torch.Tensor.stride,
    torch.Tensor.is_neg,
)


@dataclass(frozen=True)
class Entries:
    """Entries of dictionaries (a module's `_modules`, `_parameters`, `__dict__`): each value and its slot."""

    registries: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @staticmethod
    def of(found: Iterable[tuple[dict[str, Any], str]]) -> "Entries":
        slots = list(found)
        registries, names = zip(*slots, strict=True) if slots else ((), ())
        return Entries(registries, names, tuple(map(dict.get, registries, names)))

    def current(self) -> Iterator[Any]:
        """The values that are in the slots now; None for an empty slot."""
        return map(dict.get, self.registries, self.names)

    def unchanged(self) -> bool:
        return all(map(is_, self.current(), self.values))


class Attributes:
    """Attributes of modules and of the config that a forward reads: values by identity, and the content of containers.

    Replacing a plain value by an equal one of the same type is no change: PEFT creates a new list of the same names
    whenever an adapter is chosen. The new value is compared from then on.

    Attributes:
        entries: the slots and values of the attributes.
    """

    def __init__(self, found: Iterable[tuple[dict[str, Any], str]], others: Iterable[dict[str, Any]] = ()) -> None:
        """`others`: further dictionaries of which only the content is compared."""
        self.entries = Entries.of(found)
        self._others = tuple(others)
        self._holding = [i for i, value in enumerate(self.entries.values) if isinstance(value, list | dict | set)]
        self._containers = self._containers_of(self.entries.values)
        self._held = [container.copy() for container in self._containers]

    def _containers_of(self, values: Sequence[Any]) -> list[Any]:
        return [*map(values.__getitem__, self._holding), *self._others]

    def hold_the_same(self) -> bool:
        """Whether the containers have the same content as before."""
        return self._containers == self._held

    def unchanged(self) -> bool:
        """Whether each value is the same object or was replaced by an equal one.

        The content of containers that were not replaced is left to `hold_the_same`.
        """
        return self.entries.unchanged() or self._replaced_by_equals()

    def _replaced_by_equals(self) -> bool:
        before, now = self.entries.values, tuple(self.entries.current())
        held = dict(zip(self._holding, self._held, strict=False))  # a replaced container may have been changed before
        for i in compress(count(), map(is_not, before, now)):
            if content_of(held.get(i, before[i])) != content_of(now[i]):
                return False
        self.entries = replace(self.entries, values=now)
        self._containers = self._containers_of(now)
        return True


def content_of(value: Any) -> object:
    """A key that is equal for equal plain values of one type, and for containers of one type with equal content."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind, [(_identity_of(key), _identity_of(held)) for key, held in value.items()]
    if kind in (list, tuple):
        return kind, list(map(_identity_of, value))
    if kind in (set, frozenset):
        return kind, set(map(_identity_of, value))
    return _identity_of(value)


def _identity_of(value: object) -> object:
    """A key for one value: its text if it is plain, which unlike `==` tells 1 from True and 0.0 from -0.0, and is equal
    for NaN."""
    kind = type(value)
    return (kind, repr(value)) if kind in _PLAIN else id(value)


class Written:
    """Detects writes to dictionaries by the version numbers that PyTorch's compiler reads from them.

    Every write, in whatever way, changes a dictionary's version. As long as it stays, the content need not be compared
    again: one check per dictionary instead of one per entry, and one in all if nothing was written anywhere.

    Attributes:
        versions: the versions when the content was last found unchanged; None if versions are not available.
    """

    def __init__(self, dictionaries: Iterable[dict[str, Any]]) -> None:
        self._dictionaries = tuple({id(d): d for d in dictionaries}.values())
        self._epoch = 0  # in which the dictionaries had `versions`; 0 if another may have begun
        self.versions: list[int] | None = None
        self.versions = self.now()

    def now(self) -> list[int] | None:
        """The current versions; to be read before the content."""
        if not _versions_work():
            return None
        epoch = _epochs.now()  # before the versions
        if epoch == self._epoch and self.versions is not None:
            return self.versions
        versions = list(map(_version_of_dictionary, self._dictionaries))
        self._epoch = epoch if versions == self.versions else 0
        return versions


class _Epochs:
    """Tells whether any dictionary was written to: an epoch ends with the first write to one whose version was read.

    From Python 3.12 on PyTorch numbers these writes, and a dictionary's version is the number of the last one to it.
    So if two writes to a dictionary of our own have consecutive numbers, nothing else was written in between. Before,
    CPython numbers writes to all dictionaries of the process, and epochs are too short to be of use.

    Threads may end an epoch twice; they cannot miss an end, as `_last` is set after `_epoch`.
    """

    def __init__(self) -> None:
        self._own, self._last = {"writes": 0}, 0
        self._numbers = count(1)  # an epoch's number is never used again
        self._epoch = next(self._numbers)

    def now(self) -> int:
        """The number of the current epoch, at least 1."""
        self._own["writes"] += 1
        number = _version_of_dictionary(self._own)
        if number != self._last + 1:
            self._epoch = next(self._numbers)
        self._last = number
        return self._epoch


_epochs = _Epochs()


@functools.cache
def _versions_work() -> bool:
    """Whether PyTorch's dictionary versions, which are no public interface, count each way to write, and end epochs."""
    return attempted(_versions_count) is True  # another release has other names or arguments


def _versions_count() -> bool:
    module = nn.Module()
    own = vars(module)
    ways: tuple[Callable[[], object], ...] = (
        lambda: setattr(module, "a", 1),
        lambda: object.__setattr__(module, "a", 2),
        lambda: own.__setitem__("a", 3),
        lambda: own.update(a=4, b=5),
        lambda: own.__ior__({"a": 6}),
        lambda: own.setdefault("c", 7),
        lambda: own.pop("c"),
        lambda: own.popitem(),
        lambda: delattr(module, "a"),
        lambda: module.register_module("d", nn.Identity()),
        own.clear,
    )
    for way in ways:
        written = module._modules if way is ways[-2] else own
        before, epoch = _version_of_dictionary(written), _epochs.now()
        if _version_of_dictionary(written) != before or (way(), _version_of_dictionary(written))[1] == before:
            return False
        if _epochs.now() == epoch:
            return False
    return True


@dataclass(frozen=True)
class Instances:
    """The instance dictionaries of modules: their registries, and the absence of attributes that would hide others.

    Attributes:
        live: `__dict__` of each module.
        lengths: how many entries each `__dict__` had.
        registries: the registries of modules, parameters, buffers and hooks in `live`.
        hidden: live keys, and names that they must not have, as these would hide registered objects or methods.
        hooks: registries of hooks that would fire. Backward hooks never do, as a call with gradients falls back.
    """

    live: tuple[dict[str, Any], ...]
    lengths: list[int]
    registries: Entries
    hidden: tuple[tuple[KeysView[str], ...], tuple[frozenset[str], ...]]
    hooks: tuple[dict[int, Any], ...]

    @staticmethod
    def of(modules: Sequence[nn.Module], called: Iterable[nn.Module]) -> "Instances":
        """`called`: the modules whose hooks would fire."""
        live = tuple(map(vars, modules))
        hidden = tuple(frozenset(registered(m) | HIDING - vars(m).keys()) for m in modules)
        return Instances(
            live,
            list(map(len, live)),
            Entries.of((attributes, name) for attributes in live for name in (*REGISTRIES, *HOOKS)),
            (tuple(map(dict.keys, live)), hidden),
            tuple(hooks for m in called for name in HOOKS if (hooks := vars(m).get(name)) is not None),
        )

    def unchanged(self) -> bool:
        """Whether the dictionaries are unchanged; the content of registries of hooks is not compared."""
        return (
            list(map(len, self.live)) == self.lengths
            and self.registries.unchanged()
            and all(map(KEYS.isdisjoint, *self.hidden))
        )


def registered(module: nn.Module) -> set[str]:
    """Names of the parameters, buffers and modules that are registered in `module`."""
    return {*module._parameters, *module._buffers, *module._modules}


class Bodies:
    """The code, defaults and keyword defaults of functions.

    Reading one of these raises an audit event (`sys.audit`), 0.5 us where somebody listens. The garbage collector's
    list of what functions refer to, these among it, is one event for all. Where the list differs, as by annotations
    that somebody reads, code and defaults are read. Defaults are compared by identity, as 1 equals True; and so is what
    dictionaries of keyword defaults hold, as a function keeps its dictionary when somebody writes to it.
    """

    def __init__(self, functions: tuple[FunctionType, ...]) -> None:
        self._functions = functions
        referents, bodies = gc.get_referents(*functions), list(map(_body_of, functions))
        self._note(referents, bodies, list(map(_key_of, bodies)))

    def _note(self, referents: list[Any], bodies: list[Any], keys: list[Any]) -> None:
        self._referents, self._bodies, self._keys = referents, bodies, keys  # a key may hold the `id` of a default
        there = {*map(id, referents)}
        self._listed = all(id(part) in there for body in bodies for part in body if part is not None)
        defaults = {id(part) for _, *parts in bodies for part in parts if part is not None}
        self._at = [i for i, part in enumerate(referents) if id(part) in defaults]
        self._defaults = list(map(referents.__getitem__, self._at))
        self._named = [part for part in self._defaults if isinstance(part, dict)]
        self._held = gc.get_referents(*self._named)

    def unchanged(self) -> bool:
        referents = gc.get_referents(*self._functions)
        if self._listed and referents == self._referents and self._have_defaults(referents):
            return True
        bodies = list(map(_body_of, self._functions))
        keys = list(map(_key_of, bodies))
        if keys != self._keys:
            return False
        self._note(referents, bodies, keys)
        return True

    def _have_defaults(self, referents: list[Any]) -> bool:
        held = gc.get_referents(*self._named)
        return (
            all(map(is_, map(referents.__getitem__, self._at), self._defaults))
            and len(held) == len(self._held)
            and all(map(is_, held, self._held))
        )


def _key_of(body: tuple[Any, Any, Any]) -> tuple[Any, object, object]:
    code, defaults, named = body
    return code, content_of(defaults), content_of(named)


class Layouts:
    """Class, dtype, shape and strides of tensors, and whether they hold negated values.

    PyTorch's guards for compiled code compare all of these in one call: 20 us instead of 125 for 351 parameters. They
    compare more (`requires_grad`, inference mode, autocast), so there is one guard for each state that calls run in,
    and if a guard sees a difference, the properties are compared one by one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._facts = _facts(tensors)
        self._guards: dict[tuple[bool, ...], Any] = {}

    def unchanged(self) -> bool:
        state = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
        guard = self._guards.get(state)
        if guard is not None and guard.check(*self._tensors):
            return True
        guard = _guard_of(self._tensors) if _guards_work() else None  # built before the comparison that justifies it
        if _facts(self._tensors) != self._facts:
            return False
        self._guards[state] = guard
        return True


def _facts(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    return [list(map(fact, tensors)) for fact in _LAYOUT]


def _guard_of(tensors: Sequence[torch.Tensor]) -> Any:
    shapes, strides = ([list(map(int, fact(t))) for t in tensors] for fact in (_shape_of, torch.Tensor.stride))
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)


@functools.cache
def _guards_work() -> bool:
    """Whether PyTorch's guards, which are not a public interface, notice a change of each property in `_LAYOUT`."""
    plain = torch.zeros(2, 2, dtype=torch.float32, device="cpu")
    others = plain.double(), plain.t(), plain.view(1, 4), plain._neg_view(), nn.Parameter(plain, requires_grad=False)

    def notice() -> bool:
        guard = _guard_of([plain])
        return bool(guard.check(plain)) and not any(map(guard.check, others))

    return attempted(notice) is True  # another release has other names or arguments


@dataclass(frozen=True)
class Tensors:
    """Parameters or buffers, and the address, layout and version of each.

    Layouts are compared because assigning `p.data` or `p.__class__` counts no version. `versions` belong to `counted`,
    the tensors that were not created in inference mode; they keep their counter whatever is assigned to `p.data`.
    """

    entries: Entries
    present: tuple[torch.Tensor, ...]
    pointers: list[int]
    layouts: Layouts
    counted: list[torch.Tensor]
    versions: list[int]

    @staticmethod
    def of(found: Iterable[tuple[dict[str, Any], str]]) -> "Tensors":
        """The tensors in the given slots of registries."""
        entries = Entries.of(found)
        present = tuple(t for t in entries.values if t is not None)
        counted = [t for t in present if version_of(t) is not None]
        with _plainly():
            layouts = Layouts(present)
        return Tensors(entries, present, _addresses(present), layouts, counted, [t._version for t in counted])

    def renewed(self) -> "Tensors":
        """The same tensors with their current addresses and versions."""
        with _plainly():
            versions = list(map(_version_of, self.counted))
        return replace(self, pointers=_addresses(self.present), versions=versions)

    def in_place(self) -> bool:
        return _addresses(self.present) == self.pointers

    def unchanged(self) -> bool:
        """Whether layouts and versions are unchanged; `in_place` compares addresses, `entries` registrations."""
        with _plainly():
            return self.layouts.unchanged() and list(map(_version_of, self.counted)) == self.versions

    def wants_gradients(self) -> bool:
        with _plainly():
            return any(map(_wants_gradient, self.present))


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    with _plainly():
        return list(map(torch.Tensor.data_ptr, tensors))


def version_of(tensor: torch.Tensor) -> int | None:
    """The version of a tensor's content; None for a tensor created in inference mode, whatever its `data` is now."""
    try:
        return tensor._version
    except RuntimeError:
        return None
