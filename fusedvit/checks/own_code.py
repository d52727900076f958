"""Whether what a tower would run is the code that transformers, or the engine whose tower it is, defines.

The walk begins with `forward` of every class in the tower and follows the names that its code mentions: methods of the
class, functions of its module and of transformers' helpers, functions of torch, and the attention function that would
be looked up; in an engine's tower also the methods and objects that modules hold and call. Each must be the one that
its module's source defines. The walk also lists where these things are kept, so that change detection can compare them
by identity.
"""

import builtins
import sys
from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fusedvit.checks import accelerate_hooks, adapters
from fusedvit.checks.adapters import Plain
from fusedvit.checks.module_calls import CALL, COMPILED, replaced_calls
from fusedvit.checks.operators import operators_in
from fusedvit.checks.ownership import (
    ORIGINAL,
    describe,
    functions_of_c,
    held_function,
    is_builtin,
    is_foreign_function,
    is_foreign_object,
    is_of_c,
    is_of_python,
    is_torchs,
    own_class,
    sets_gradients,
)
from fusedvit.checks.source_code import (
    Definition,
    code_of,
    decorators_of,
    defines,
    definition_of,
    names_in,
    optional_in,
    wrapped_by,
)
from fusedvit.families.engine import HUGGING_FACE, Engine

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"
_INTERFACE_CLASS = ("transformers.modeling_utils", "AttentionInterface")
_FLASH = Definition("transformers.integrations.flash_attention", "flash_attention_forward")
# What transformers registers, by the name in a config; "eager" is a function of the modeling module.
_ATTENTION = {
    "sdpa": Definition("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    "flash_attention_2": _FLASH,
    "flash_attention_3": _FLASH,
    "flash_attention_4": _FLASH,
    "flex_attention": Definition("transformers.integrations.flex_attention", "flex_attention_forward"),
}
_FOLLOWED = ("sdpa",)  # the others load their kernels at their first call
_MASKS = "ALL_MASK_ATTENTION_FUNCTIONS"
_MASKS_CLASS = ("transformers.masking_utils", "AttentionMaskInterface")
_MASK = {  # as `_ATTENTION`, of masks
    name: Definition(_MASKS_CLASS[0], f"{kind}_mask")
    for kind, names in {
        "sdpa": ("sdpa", None),
        "eager": ("eager",),
        "flash_attention": ("flash_attention_2", "flash_attention_3", "flash_attention_4"),
        "flex_attention": ("flex_attention",),
    }.items()
    for name in names
}
_ASKED = ("get_interface", "__getitem__", "__contains__")  # how code looks a registry up
_CHECKPOINTING = "GradientCheckpointingLayer"  # wraps `forward` of every class that is derived from it
_CALL = ("forward", *CALL)
_METHODS = (property, FunctionType, staticmethod, classmethod)
_CONTEXTS = "torch.utils._contextlib"  # whose wrapper enters a context around a function
# By these a forward finds modules.
_LOOKUP = (
    "__getattribute__",
    "__getattr__",
    "__iter__",
    "__getitem__",
    "__len__",
    "__contains__",
    "keys",
    "values",
    "items",
)
_ALIASES = {"__call__": "Module._wrapped_call_impl", "forward": "_forward_unimplemented"}  # in the body of nn.Module
_TENSOR_METHODS = {name for name in dir(torch.Tensor) if not name.startswith("_")}
_OURS = ("fusedvit.kernels.reference.", "fusedvit.model.")  # what runs on a CPU, and prepares weights everywhere
_AROUND_C = ("torch.functional", "torch.nn.functional", "torch._tensor")  # functions around those of C
_HARMLESS_BUILTINS = {"print", "input"}  # others replace them to be quiet
_GENERAL = ("torch.nn.modules.module", "transformers.modeling_utils")  # classes whose other methods do not compute


@dataclass(frozen=True)
class OwnCode:
    """What a tower's original code consists of.

    Attributes:
        foreign: what is not transformers' or torch's own, and where; "" if nothing is.
        slots: (class or module, name) of everything that was followed.
        registries: (registry of attention functions, name) of what would be looked up.
        functions: every function that was followed.
        names: every name that the code mentions, attributes among them, and what the engine's record names.
        optional: attributes that the code asks for by `getattr` or `hasattr`, and does without.
        methods: names of the methods, beside `forward`, that a class's code calls.
        absent: names that nobody has given a class or module so far, which would hide what the code finds by them now.
    """

    foreign: str
    slots: tuple[tuple[Any, str], ...]
    registries: tuple[tuple[dict[str, Any], str], ...]
    functions: tuple[FunctionType, ...]
    names: frozenset[str]
    optional: frozenset[str]
    methods: Mapping[type, tuple[str, ...]]
    absent: tuple[tuple[KeysView[str], frozenset[str]], ...]


def own_code(plain: Plain, engine: Engine = HUGGING_FACE) -> OwnCode:
    """Follows what a tower would run."""
    walk = _Walk(engine)
    tower, *inner = plain.modules.values()
    for cls in dict.fromkeys([own_class(type(tower)), *map(type, inner)]):
        walk.follow_class(cls)
    if engine != HUGGING_FACE:
        for path, module in plain.modules.items():
            walk.follow_attributes(path, module)
    walk.follow_calls(plain)
    layers = _code_of_layers(plain, engine)
    for module in _distinct_configs(plain.modules.values()):
        walk.follow_attention(module)
    walk.follow_masks(tower)
    walk.follow_classes(plain)
    walk.follow_operators(o for function in walk.functions.values() for o in operators_in(function.__code__))
    walk.follow_ours(tower)
    ours = _fused_code(engine)  # on a GPU it prepares weights and no more
    slots = walk.slots | ours.slots if next(tower.parameters()).device.type == "cpu" else walk.slots
    hooks = accelerate_hooks.code_slots(plain)
    return OwnCode(
        walk.foreign or layers.foreign or ours.foreign,
        (*(slots | layers.slots).values(), *hooks),
        tuple(walk.registries),
        tuple((walk.functions | layers.functions | accelerate_hooks.functions_of(hooks)).values()),
        frozenset(walk.names | walk.optional | engine.values.keys() | engine.objects.keys()),
        frozenset(walk.optional),
        walk.methods() | layers.methods(),
        tuple((vars(o).keys(), frozenset(names)) for w in (walk, layers) for o, names in w.absent.values()),
    )


def _code_of_layers(plain: Plain, engine: Engine) -> "_Walk":
    """What calling PEFT's layers runs; their names say nothing of the tower's attributes."""
    walk = _Walk(replace(engine, packages=(*engine.packages, "peft.")), skipped=adapters.NOT_RUN)
    for path, layer in plain.layers.items():
        for cls in dict.fromkeys(map(type, adapters.modules_run(layer))):
            walk.follow_class(cls)
        for name in sorted(vars(layer).keys() & walk.methods().get(type(layer), ())):
            if callable(getattr(type(layer), name)):  # a property wins over the instance
                walk.found_foreign(f"{path}.{name} of the instance is {describe(vars(layer)[name])}")
    return walk


def _distinct_configs(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """A module for each config and class whose code looks up an attention function."""
    found = {
        (id(vars(m)["config"]), type(m)): m
        for m in modules
        if "config" in vars(m) and _INTERFACE in _forward_names(type(m))
    }
    return found.values()


def _forward_names(cls: type) -> set[str]:
    forward: object = getattr(cls, "forward", None)
    while isinstance(forward, FunctionType) and (inner := wrapped_by(forward)) is not None:
        forward = inner
    return names_in(forward.__code__) if isinstance(forward, FunctionType) else set()


@dataclass
class _Walk:
    """The walk of `own_code`: what was found so far."""

    engine: Engine
    foreign: str = ""
    slots: dict[tuple[int, str], tuple[Any, str]] = field(default_factory=dict)
    registries: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    functions: dict[int, FunctionType] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    absent: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    skipped: frozenset[str] = frozenset()  # methods that are not run

    def follow_class(self, cls: type) -> None:
        self.slots[id(cls), "__mro__"] = cls, "__mro__"  # which another base changes
        for name in (*_CALL, *_LOOKUP):
            self._follow_method(cls, name)

    def follow_classes(self, plain: Plain) -> None:
        """What classes have by names of what their instances hold, and Python finds first: anything before what is
        registered, a descriptor before other attributes. Properties and methods are followed elsewhere."""
        known: set[tuple[type, str]] = set()
        for module in plain.modules.values():
            cls, registered = own_class(type(module)), {*module._parameters, *module._buffers, *module._modules}
            held = {(cls, name) for name in (registered | vars(module).keys()) & (self.names | self.optional)}
            optional = {(cls, name) for name in self.optional - vars(module).keys()}
            for of, name in (held | optional) - known:
                value = next((vars(c)[name] for c in of.__mro__ if name in vars(c)), None)
                first = name in registered or hasattr(type(value), "__set__") or name not in vars(module)
                if value is not None and first and not isinstance(value, _METHODS):
                    self.found_foreign(f"{of.__qualname__}.{name} is {describe(value)}")
            known |= held | optional
        for cls in {cls for cls, _ in known}:
            for base in cls.__mro__[:-1]:
                self._note_absent(base, self.optional - vars(base).keys())

    def follow_calls(self, plain: Plain) -> None:
        """What instances have in the place of what calling them runs: not the tower, whose call is the caller's."""
        inside = (layer.named_modules(prefix=path) for path, layer in plain.layers.items())
        for path, module in chain(plain.modules.items(), *inside):
            for what in replaced_calls(path, module) if path else ():
                self.found_foreign(what)

    def follow_attributes(self, path: str, module: nn.Module) -> None:
        """Methods of its class that a module keeps to call them, and what the engine's `objects` would run."""
        for name, value in vars(module).items():
            if name not in self.names:
                continue
            if isinstance(value, MethodType) and value.__self__ is module:
                self._follow_method(type(module), value.__func__.__name__)
                if getattr(type(module), value.__func__.__name__, None) is not value.__func__:
                    self.found_foreign(f"{path}.{name} is {describe(value.__func__)}")
            elif name in self.engine.objects:
                self._follow_object(f"{path}.{name}", value)

    def _follow_object(self, where: str, value: object) -> None:
        """What the code of a module would call of an object that it holds: methods, and functions that it keeps."""
        for method in sorted(self.names & vars(type(value)).keys()):
            self._follow_method(type(value), method)
        for name in sorted(self.names & getattr(value, "__dict__", {}).keys()):
            kept = vars(value)[name]
            self.registries.append((vars(value), name))
            found = definition_of(kept.func if isinstance(kept, partial) else kept)
            if callable(kept) and (found is None or not found.module.startswith(self.engine.packages)):
                self.found_foreign(f"{where}.{name} is {describe(kept)}")

    def follow_attention(self, module: nn.Module) -> None:
        """What `module` would call for attention, by its config."""
        scope = vars(sys.modules[type(module).__module__])
        interface, name = scope.get(_INTERFACE), getattr(vars(module)["config"], "_attn_implementation", None)
        if interface is None:
            return
        if not self._is_registry(interface, _INTERFACE, _INTERFACE_CLASS):
            return
        self._follow_registry(interface, name)
        found = interface.get(name, scope.get(_EAGER)) if name is not None else scope.get(_EAGER)
        eager = Definition(type(module).__module__, _EAGER)
        expected = eager if name in (None, "eager") else _ATTENTION.get(name)
        if expected is None or definition_of(found) != expected:
            self.found_foreign(f"the attention function {name!r} is {describe(found)}")
        elif isinstance(found, FunctionType) and (name in _FOLLOWED or expected == eager):
            self._follow(found, expected, f"the attention function {name!r}")

    def follow_masks(self, tower: nn.Module) -> None:
        """What builds the masks of attention, where the code looks that up by the tower's config."""
        module = sys.modules.get(_MASKS_CLASS[0])
        if module is None or (id(module), _MASKS) not in self.slots:
            return
        interface = vars(module)[_MASKS]
        name = getattr(vars(tower).get("config"), "_attn_implementation", None)
        if self._is_registry(interface, _MASKS, _MASKS_CLASS):
            self._follow_registry(interface, name)
            found, expected = interface.get(name), _MASK.get(name)
            if found is not None and expected is not None:
                self._follow(found, expected, f"the mask function {name!r}")
            elif found is not None:
                self.found_foreign(f"the mask function {name!r} is {describe(found)}")

    def _is_registry(self, interface: Any, where: str, expected: tuple[str, str]) -> bool:
        """Whether it is transformers' registry, and nothing but the entries is its own."""
        if (type(interface).__module__, type(interface).__qualname__) != expected:
            self.found_foreign(f"{where} is {describe(interface)}")
            return False
        for name in sorted(vars(interface).keys() - {"_local_mapping"}):
            self.found_foreign(f"{where}.{name} of the instance is {describe(vars(interface)[name])}")
        return True

    def _follow_registry(self, interface: Any, name: object) -> None:
        for owner in (interface, type(interface)):
            for mapping in ("_local_mapping", "_global_mapping"):
                if mapping in vars(owner):
                    self.slots.setdefault((id(owner), mapping), (owner, mapping))
                    self.registries.append((vars(owner)[mapping], str(name)))
        self.slots[id(interface), "__class__"] = interface, "__class__"
        self._note_absent(interface, (*_ASKED, "get", "_global_mapping"))
        for method in _ASKED:
            self._follow_method(type(interface), method)

    def follow_operators(self, used: Iterable[str]) -> None:
        """What code does with tensors without naming it."""
        for name in sorted({*used}):
            self._follow_tensor(name)

    def follow_torch_names(self, mentioned: set[str]) -> None:
        """What code that mentions these names could mean of torch's."""
        for module in (torch, torch.nn.functional):
            self._follow_names_of(module, {n for n in mentioned if not isinstance(vars(module).get(n), ModuleType)})
        for name in sorted(mentioned & _TENSOR_METHODS):
            self._follow_tensor(name)

    def follow_ours(self, tower: nn.Module) -> None:
        """The instance, and the classes that `fuse` and torch put before a tower's own: nobody else may give them
        anything."""
        cls: Any = type(tower)
        for name in sorted(vars(tower).keys() & self.methods().get(own_class(cls), ())):
            self.found_foreign(f"{cls.__qualname__}.{name} of the instance is {describe(vars(tower)[name])}")
        for ours in cls.__mro__[: cls.__mro__.index(own_class(cls))]:
            names = (self.names | {*_CALL, *_LOOKUP}) - {"forward"}
            hidden = sorted(vars(ours).keys() & names) if ORIGINAL in vars(ours) else []
            for name in hidden:
                self.found_foreign(f"{cls.__qualname__}.{name} is {describe(vars(ours)[name])}")
            self._note_absent(ours, names - vars(ours).keys())

    def _note_absent(self, owner: Any, names: Iterable[str]) -> None:
        self.absent.setdefault(id(owner), (owner, set()))[1].update(names)

    def methods(self) -> dict[type, tuple[str, ...]]:
        """Methods that were followed, by their class."""
        found: dict[type, tuple[str, ...]] = {}
        for owner, name in self.slots.values():
            if isinstance(owner, type) and name not in _CALL and not name.startswith("__"):  # these of classes alone
                found[owner] = (*found.get(owner, ()), name)
        return found

    def found_foreign(self, what: str) -> None:
        self.foreign = self.foreign or what

    def _home_of(self, cls: type, name: str) -> type | None:
        """The class whose method `name` of `cls` is, if it is to be followed."""
        home = next((c for c in cls.__mro__ if name in vars(c)), None)
        if home is None or (home is object and name not in _LOOKUP) or (id(cls), name) in self.slots:
            return None
        self.slots[id(cls), name] = cls, name
        if is_of_python(home):
            return None
        if not home.__module__.startswith(("torch.", *self.engine.packages)):
            self.found_foreign(f"{cls.__qualname__} derives from {describe(home)}")
        return home

    def _follow_method(self, cls: type, name: str) -> None:
        home = self._home_of(cls, name)
        if home is None:
            return
        value = held_function(vars(home)[name])
        if isinstance(value, staticmethod | classmethod):
            value = held_function(value.__func__)
        elif isinstance(value, property):
            value = value.fget
        elif name == COMPILED and value is not None:
            self.found_foreign(f"{cls.__qualname__}.{name} is {describe(value)}")
        elif not callable(value):
            return
        path = _ALIASES.get(name, f"{home.__qualname__}.{name}") if home is nn.Module else f"{home.__qualname__}.{name}"
        found = self._follow(value, Definition(home.__module__, path), f"{cls.__qualname__}.{name}")
        if found is None or home.__module__ in _GENERAL:
            return
        for other in sorted(names_in(found.__code__) - self.skipped):
            if hasattr(cls, other) and not any(hasattr(general, other) for general in (nn.Module, object)):
                self._follow_method(cls, other)

    def _follow(self, value: object, expected: Definition, where: str) -> FunctionType | None:
        """Follows the function at `where`, through decorators; returns the one that `expected` names, if that is it."""
        found, function = definition_of(value), value
        wrappers: list[FunctionType] = []
        while found is not None and found != expected and found.module.startswith(self.engine.decorators):
            assert isinstance(function, FunctionType)
            self.functions[id(function)] = function
            wrappers.append(function)
            if expected.path.endswith(".__call__") and found.path.endswith(".__call__"):  # of a class's decorator
                return None
            function = wrapped_by(function)
            found = definition_of(function)
        if found != expected or not isinstance(function, FunctionType):
            self.found_foreign(f"{where} is {describe(value)}")
            return None
        decorators = decorators_of(function.__code__, expected.module) if wrappers else None
        for wrapper in wrappers:
            if not _is_of_source(wrapper, decorators):
                self.found_foreign(f"{where} is wrapped by {describe(wrapper)}")
        if id(function) not in self.functions:
            self.functions[id(function)] = function
            if not found.module.startswith("torch.nn.modules.module"):
                self._follow_names(function)
        return function

    def _follow_names(self, function: FunctionType) -> None:
        """Follows the globals that a function mentions, and what it mentions of torch's modules."""
        mentioned, scope = names_in(function.__code__), function.__globals__
        self.names |= mentioned
        self.optional |= optional_in(function.__code__)
        for name in sorted(mentioned & scope.keys()):
            self._follow_global(sys.modules[scope["__name__"]], name, mentioned)
        for name in sorted(mentioned & _TENSOR_METHODS):
            self._follow_tensor(name)
        built_in = mentioned & vars(builtins).keys() - scope.keys() - _HARMLESS_BUILTINS
        self._note_absent(sys.modules[scope["__name__"]], built_in)
        for name in sorted(built_in):
            self.slots[id(builtins), name] = builtins, name
            if not is_builtin(vars(builtins)[name]):
                self.found_foreign(f"builtins.{name} is {describe(vars(builtins)[name])}")

    def _follow_tensor(self, name: str) -> None:
        if not hasattr(torch.Tensor, name):
            self._note_absent(torch.Tensor, [name])
            return
        self.slots[id(torch.Tensor), name] = torch.Tensor, name
        value = getattr(torch.Tensor, name)
        if isinstance(value, FunctionType) and not is_torchs(value):
            self.found_foreign(f"torch.Tensor.{name} is {describe(value)}")
        self._keep(value)
        self._follow_inside(value)

    def _follow_global(self, module: ModuleType, name: str, mentioned: set[str]) -> None:
        value, where = vars(module)[name], f"{module.__name__}.{name}"
        if isinstance(value, ModuleType) and not is_foreign_object(value, self.engine):
            self._follow_torch(value, mentioned)
        if (id(module), name) in self.slots:
            return
        self.slots[id(module), name] = module, name
        value = held_function(value)
        if isinstance(value, type):
            if defines(module.__name__, name) and (value.__module__, value.__qualname__) != (module.__name__, name):
                self.found_foreign(f"{where} is {describe(value)}")
        elif isinstance(value, FunctionType):
            self._follow_function(value, module, name)
        elif is_foreign_object(value, self.engine):
            self.found_foreign(f"{where} is {describe(value)}")

    def _follow_function(self, value: FunctionType, module: ModuleType, name: str) -> None:
        where = f"{module.__name__}.{name}"
        origin, defined_here = self._undecorated(value), defines(module.__name__, name)
        in_library = origin is not None and origin.module.startswith(self.engine.libraries)
        if origin is not None and in_library and (origin.path == name or not defined_here):
            return  # a module may define what it could not import
        if defined_here:
            self._follow(value, Definition(module.__name__, name), where)
            return
        own_name = self.engine.renamed.get(name, name)
        if origin is not None and origin.path == own_name and origin.module.startswith(self.engine.packages):
            self._follow(value, origin, where)
        elif not is_torchs(value):
            self.found_foreign(f"{where} is {describe(value)}")

    @staticmethod
    def _undecorated(value: FunctionType) -> Definition | None:
        function: FunctionType | None = value
        while function is not None and (inner := wrapped_by(function)) is not None and definition_of(function):
            function = inner
        return definition_of(function)

    def _follow_torch(self, module: ModuleType, mentioned: set[str]) -> None:
        """Names of a module of torch that a function mentions: they must be torch's own."""
        pending, seen = [module], set[str]()
        while pending:
            module = pending.pop()
            if module.__name__ in seen or not f"{module.__name__}.".startswith("torch."):
                continue
            seen.add(module.__name__)
            pending += self._follow_names_of(module, mentioned)

    def _follow_names_of(self, module: ModuleType, mentioned: set[str]) -> list[ModuleType]:
        """Those of a module of torch that are mentioned; returns the modules among them."""
        inner: list[ModuleType] = []
        for name in sorted(mentioned & vars(module).keys()):
            value = vars(module)[name]
            self.slots[id(module), name] = module, name
            if is_foreign_object(value, self.engine) or is_foreign_function(value, name):
                self.found_foreign(f"{module.__name__}.{name} is {describe(value)}")
            elif isinstance(value, ModuleType):
                inner.append(value)
            self._keep(value)
            self._follow_inside(value)
        return inner

    def _follow_inside(self, value: object) -> None:
        """What a function of torch that is written in Python calls: functions of C, and methods of tensors."""
        value = inner if isinstance(value, FunctionType) and (inner := wrapped_by(value)) is not None else value
        self._keep(value)
        if not isinstance(value, FunctionType) or id(value) in self.inside or value.__module__ not in _AROUND_C:
            return
        self.inside.add(id(value))
        mentioned = names_in(value.__code__)
        for module in (torch, torch._C._nn):
            if module.__name__.rpartition(".")[2] in mentioned:
                for name in sorted(mentioned & functions_of_c(module) & vars(module).keys()):
                    self._follow_of_c(module, name)
        if "_VF" in mentioned:  # it has none of its own, and runs Python to find each
            names = mentioned & functions_of_c(torch)
            self._note_absent(torch._VF, names)
            for name in sorted(names & vars(torch._VF).keys()):
                self.found_foreign(f"torch._VF.{name} is {describe(vars(torch._VF)[name])}")
        if value.__module__ != torch.Tensor.__module__:
            for name in sorted(mentioned & _TENSOR_METHODS):
                self._follow_tensor(name)

    def _keep(self, value: object) -> None:
        """Its body is compared at each call."""
        if isinstance(value, FunctionType):
            self.functions.setdefault(id(value), value)

    def _follow_of_c(self, module: ModuleType, name: str) -> None:
        self.slots[id(module), name] = module, name
        if not is_of_c(vars(module)[name], name):
            self.found_foreign(f"{module.__name__}.{name} is {describe(vars(module)[name])}")


def _is_of_source(wrapper: FunctionType, decorators: frozenset[str] | None) -> bool:
    """Whether a decorator's wrapper is one that the source puts there, or sets a mode of gradients.

    An engine's decorators choose a wrapper of another name; they are taken wherever they are.
    """
    found = definition_of(wrapper)
    if found is None:
        return False
    if found.module == _CONTEXTS:
        return sets_gradients(wrapper)
    if decorators is None or not found.module.startswith(HUGGING_FACE.packages):
        return True
    return found.path.partition(".")[0] in (*decorators, _CHECKPOINTING)


def _fused_code(engine: Engine) -> _Walk:
    """What of torch's our own operations use: as tensors they are no safer from replacements than the tower's."""
    walk = _Walk(engine)
    names, operators = _names_of_ours(tuple(sorted(name for name in sys.modules if name.startswith(_OURS))))
    walk.follow_torch_names({*names})
    walk.follow_operators(operators)
    return walk


@lru_cache(maxsize=4)
def _names_of_ours(modules: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Names that the code of our modules mentions, and what its operators lead to."""
    codes = [code for code in map(code_of, map(sys.modules.__getitem__, modules)) if code is not None]
    return frozenset().union(*map(names_in, codes)), frozenset(o for code in codes for o in operators_in(code))
