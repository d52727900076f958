"""The walk over code: it follows a class's methods, and the names that they mention, to their definitions in source."""

import builtins
import sys
from types import FunctionType, ModuleType

from torch import nn

from fusedvit.checks.module_calls import CHECKPOINTING, COMPILED, compiled_by_torch
from fusedvit.checks.own_code.findings import CALLED, Findings
from fusedvit.checks.own_code.torch_names import TorchNames
from fusedvit.checks.ownership import (
    describe,
    held_function,
    homes_of,
    is_builtin,
    is_foreign_name,
    is_foreign_object,
    is_of_python,
    is_operator,
    is_pythons,
    name_of,
    sets_gradients,
)
from fusedvit.checks.source_code import (
    Definition,
    cells_of,
    decorators_of,
    defines,
    defines_function,
    definition_of,
    names_in,
    optional_in,
    wrapped_by,
)
from fusedvit.families.engine import HUGGING_FACE, Engine

# Methods by which a forward finds modules.
LOOKUP = (
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
_ROOTS = {"torch": "torch", "nn": "torch", "F": "torch", "einops": "einops"}  # names of modules everywhere: package
_HARMLESS_BUILTINS = {"print", "input"}  # some programs replace them to suppress output
_GENERAL = ("torch.nn.modules.module", "transformers.modeling_utils")  # their classes' other methods do not compute
_CHECKPOINTING = "GradientCheckpointingLayer"  # wraps the `forward` of every derived class
_FOR_GRADIENTS = {*CHECKPOINTING}  # `module_calls` judges them: torch's function only recomputes the same
_CONTEXTS = "torch.utils._contextlib"  # its wrapper enters a context around a function
_COMPILER = "torch._dynamo."
# gptqmodel, which transformers imports to load AWQ and GPTQ checkpoints, puts it over the method that it calls for
# every name but this one.
_PASSES_ON = Definition("gptqmodel.utils.hf", "_patch_transformers_remote_code_compat.<locals>.__getattr__")
_KEPT_BACK = "all_tied_weights_keys"
_KEPT_FROM_COMPILER = Definition("torch._dynamo.eval_frame", "DisableContext.__call__.<locals>._fn")
# Decorators of these modules may run anything, or lower the precision: only where the source itself applies them.
_NAMED_IN_SOURCE = (*HUGGING_FACE.packages, "contextlib")


class CodeWalk:
    """Follows classes and functions.

    Attributes:
        found: the findings so far.
        torch_names: follows names into torch.
    """

    def __init__(self, engine: Engine, skipped: frozenset[str] = frozenset()) -> None:
        """
        Args:
            skipped: names of methods that are mentioned but not run.
        """
        self.engine = engine
        self.found = Findings()
        self.torch_names = TorchNames(self.found, engine)
        self._skipped = skipped
        self._modules: set[tuple[int, frozenset[str]]] = set()

    def follow_class(self, cls: type) -> None:
        self.found.note_slot(cls, "__mro__")  # changes if bases are replaced
        for name in (*CALLED, *LOOKUP):
            self.follow_method(cls, name)

    def _home_of(self, cls: type, name: str) -> type | None:
        """The class that defines method `name` of `cls`; None if the method need not be followed."""
        homes = homes_of(cls, name)
        if len(homes) > 1 and _passes_on(vars(homes[0])[name], vars(homes[1])[name]):
            self.found.keep(vars(homes[0])[name])
            del homes[0]
        home = homes[0] if homes else None
        if home is None or (home is object and name not in LOOKUP) or (id(cls), name) in self.found.slots:
            return None
        self.found.note_slot(cls, name)
        if is_of_python(home):  # its functions are not followed, but must be Python's
            self._keep_of_python(cls, name, vars(home)[name])
            return None
        if not home.__module__.startswith(("torch.", *self.engine.packages)):
            self.found.note_foreign(f"{name_of(cls)} derives from {describe(home)}")
        return home

    def _keep_of_python(self, cls: type, name: str, value: object) -> None:
        if type(value) is FunctionType and not is_pythons(value):
            self.found.note_foreign(f"{name_of(cls)}.{name} is {describe(value)}")
        self.found.keep(value)

    def follow_method(self, cls: type, name: str) -> None:
        home = self._home_of(cls, name)
        if home is None:
            return
        value = held_function(vars(home)[name])
        # Exactly these classes: a derived one may give another function than it holds.
        if type(value) is staticmethod or type(value) is classmethod:
            value = held_function(value.__func__)
        elif type(value) is property:
            value = value.fget
        elif name == COMPILED and value is not None:
            self.found.note_foreign(f"{name_of(cls)}.{name} is {describe(value)}")
        elif _is_data(value) and not defines_function(home.__module__, f"{home.__qualname__}.{name}"):
            return
        path = _ALIASES.get(name, f"{home.__qualname__}.{name}") if home is nn.Module else f"{home.__qualname__}.{name}"
        found = self.follow(value, Definition(home.__module__, path), f"{name_of(cls)}.{name}")
        if found is None or home.__module__ in _GENERAL:
            return
        for other in sorted(names_in(found.__code__) - self._skipped - _FOR_GRADIENTS):
            if hasattr(cls, other) and not any(hasattr(general, other) for general in (nn.Module, object)):
                self.follow_method(cls, other)

    def follow(self, value: object, expected: Definition, where: str) -> FunctionType | None:
        """Follows the function at `where` through decorators; returns the innermost if `expected` defines it."""
        found, function = definition_of(value), value
        wrappers: list[FunctionType] = []
        while found is not None and found != expected and found.module.startswith(self.engine.decorators):
            assert type(function) is FunctionType
            self.found.functions[id(function)] = function
            wrappers.append(function)
            if expected.path.endswith(".__call__") and found.path.endswith(".__call__"):  # from a class decorator
                return None
            function = wrapped_by(function)
            found = definition_of(function)
        if found != expected or type(function) is not FunctionType:
            self.found.note_foreign(f"{where} is {describe(value)}")
            self.found.keep(function)  # its body may be what differs
            return None
        decorators = decorators_of(function.__code__, expected.module) if wrappers else None
        for wrapper in wrappers:
            if not _is_of_source(wrapper, decorators):  # `functools.wraps` gives it the name of what it wraps
                self.found.note_foreign(f"{where} is wrapped by {'.'.join(definition_of(wrapper) or ())}")
        if id(function) not in self.found.functions:
            self.found.functions[id(function)] = function
            if not found.module.startswith("torch.nn.modules.module"):
                self._follow_names(function)
        return function

    def _follow_names(self, function: FunctionType) -> None:
        """Follows the globals, tensor methods and builtins that a function mentions."""
        mentioned, scope = names_in(function.__code__) - _FOR_GRADIENTS, function.__globals__
        self.found.names |= mentioned
        self.found.optional |= optional_in(function.__code__)
        for name in sorted(mentioned & scope.keys()):
            self._follow_global(sys.modules[scope["__name__"]], name, mentioned)
        self.torch_names.follow_methods(mentioned)
        built_in = mentioned & vars(builtins).keys() - scope.keys() - _HARMLESS_BUILTINS
        self.found.note_absent(sys.modules[scope["__name__"]], built_in)
        for name in sorted(built_in):
            self.found.note_slot(builtins, name)
            if not is_builtin(vars(builtins)[name]):
                self.found.note_foreign(f"builtins.{name} is {describe(vars(builtins)[name])}")

    def _follow_global(self, module: ModuleType, name: str, mentioned: set[str]) -> None:
        value, where = vars(module)[name], f"{module.__name__}.{name}"
        if isinstance(value, ModuleType) and not is_foreign_object(value, self.engine):
            self._follow_module(value, mentioned)
        if (id(module), name) in self.found.slots:
            return
        self.found.note_slot(module, name)
        value = held_function(value)
        if is_operator(value, self.engine.towers[0].partition(".")[0], name):
            return  # an engine may keep, in place of its function, the operator that it made of it
        if type(value) is FunctionType or defines_function(module.__name__, name):
            self._follow_function(value, module, name)
        elif is_foreign_object(value, self.engine) or self._is_of_others(value, module, name):
            self.found.note_foreign(f"{where} is {describe(value)}")

    def _follow_module(self, module: ModuleType, mentioned: set[str]) -> None:
        """Follows the mentioned names of a module that code calls functions of: torch's, or the engine's."""
        self.torch_names.follow_module(module, mentioned)
        names = frozenset(mentioned & vars(module).keys())
        known = f"{module.__name__}.".startswith((*self.engine.packages, *self.engine.libraries))
        if known and (id(module), names) not in self._modules:
            self._modules.add((id(module), names))  # modules may hold each other
            for name in sorted(names):
                self._follow_global(module, name, mentioned)

    def _is_of_others(self, value: object, module: ModuleType, name: str) -> bool:
        """Whether a module, a class or a function of C is not the one that the source defines or imports."""
        if isinstance(value, ModuleType):
            root = value.__name__.partition(".")[0]
            return _ROOTS.get(name, root) != root
        if defines(module.__name__, name):
            return not isinstance(value, type) or (value.__module__, value.__qualname__) != (module.__name__, name)
        if self.engine is not HUGGING_FACE:  # engines import classes and C functions of many packages, more on a GPU
            bases = value.__mro__ if isinstance(value, type) else ()
            own = [base.__module__.startswith(self.engine.packages) for base in bases]
            return any(own) and not own[0]  # but none that somebody else derived from theirs
        homes = ("torch.", *self.engine.packages, *self.engine.libraries)
        return is_foreign_name(value, self.engine.renamed.get(name, name), homes)

    def _follow_function(self, value: object, module: ModuleType, name: str) -> None:
        where = f"{module.__name__}.{name}"
        origin, defined_here = self._undecorated(value), defines(module.__name__, name)
        in_library = origin is not None and origin.module.startswith(self.engine.libraries)
        if origin is not None and in_library and (origin.path == name or not defined_here):
            return  # a module may define a stand-in for a function that it could not import
        if defined_here:
            self.follow(value, Definition(module.__name__, name), where)
            return
        own_name = self.engine.renamed.get(name, name)
        if origin is not None and origin.path == own_name and origin.module.startswith(self.engine.packages):
            self.follow(value, origin, where)
        elif is_foreign_name(value, own_name):
            self.found.note_foreign(f"{where} is {describe(value)}")

    @staticmethod
    def _undecorated(value: object) -> Definition | None:
        function = value if type(value) is FunctionType else None
        while function is not None and (inner := wrapped_by(function)) is not None and definition_of(function):
            function = inner
        return definition_of(function)


def _is_of_source(wrapper: FunctionType, decorators: frozenset[str] | None) -> bool:
    """Whether a decorator's wrapper is one that the source applies, or sets a gradient mode, or is torch's compiler's.

    A serving engine's own decorators may return a wrapper of another name, so their wrappers are accepted anywhere.
    """
    found = definition_of(wrapper)
    if found is None:
        return False
    if found.module == _CONTEXTS:
        return sets_gradients(wrapper)
    if found.module.startswith(_COMPILER):
        return found == _KEPT_FROM_COMPILER or compiled_by_torch(wrapper) is not None
    if decorators is None or not found.module.startswith(_NAMED_IN_SOURCE):
        return True
    return found.path.partition(".")[0] in (*decorators, _CHECKPOINTING)


def _passes_on(method: object, inner: object) -> bool:
    """Whether `method` is gptqmodel's, and calls `inner` for every name that a forward may look up."""
    if definition_of(method) != _PASSES_ON or type(method) is not FunctionType:
        return False
    texts = [constant for constant in method.__code__.co_consts if isinstance(constant, str)]
    return texts == [_KEPT_BACK] and [cell.cell_contents for cell in cells_of(method)] == [inner]


def _is_data(value: object) -> bool:
    """Whether a class's attribute is neither called nor asked for a value as it is found."""
    return not callable(value) and not hasattr(type(value), "__get__")
