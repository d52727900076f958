"""Who defines a class, a function or an object: torch, the engine whose tower it is, Python, or somebody else."""

import sys
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from fusedvit.checks.source_code import defines, definition_of, wrapped_by
from fusedvit.families.engine import HUGGING_FACE, Engine

ORIGINAL = "_fusedvit_original"  # on the class that `fuse` gives a tower: the class that it had
_WRAPPING = ("torch.distributed.", "torch.nn.utils.")
_ARRAYS = ("numpy",)


def own_class(cls: Any) -> Any:
    """The class that a module was made as: past ours, and past torch's, which wrap a class under another name
    (`fully_shard`, parametrizations)."""
    return next(c for c in cls.__mro__ if ORIGINAL not in vars(c) and not c.__module__.startswith(_WRAPPING))


def fused_class(cls: type) -> type | None:
    """The class that `fuse` gave a module of this class: itself or, where somebody derived from it, a base."""
    return next((c for c in cls.__mro__ if ORIGINAL in vars(c)), None)


def foreign_class(tower: nn.Module, engine: Engine = HUGGING_FACE) -> str:
    """The class of `tower`, if it is not one of the engine's own."""
    cls = own_class(type(tower))
    own = cls.__module__.startswith(engine.towers) and defines(cls.__module__, cls.__qualname__)
    return "" if own else f"the tower's class is {name_of(cls)}"


def is_own(cls: type, engine: Engine = HUGGING_FACE) -> bool:
    """Whether torch or the engine define `cls`, or join it of classes of theirs without adding to them."""
    if not cls.__module__.startswith(("torch.", *engine.packages)):
        return False
    adds = any(isinstance(value, FunctionType) for value in vars(cls).values())
    return defines(cls.__module__, cls.__qualname__) or (not adds and all(is_own(c, engine) for c in cls.__bases__))


def is_of_c(value: object, name: str) -> bool:
    """Whether it is a function of C by this name, or one of torch's that stands before it."""
    if isinstance(value, FunctionType):
        return is_torchs(value)
    return isinstance(value, BuiltinFunctionType) and value.__name__ == name


@lru_cache(maxsize=2)
def functions_of_c(module: ModuleType) -> frozenset[str]:
    """Names of functions that torch's modules have from C, whatever is there by now."""
    origin = torch._C._nn if module is torch._C._nn else torch._C._VariableFunctions
    return frozenset(name for name in dir(origin) if not name.startswith("__"))


def is_foreign_function(value: object, name: str) -> bool:
    """Whether what torch should have by this name is a function that is not torch's, or that torch calls otherwise."""
    if isinstance(value, BuiltinFunctionType):
        return value.__name__ != name
    return isinstance(value, FunctionType) and not (is_torchs(value) and value.__name__ == name)


def held_function(value: object) -> object:
    """What a cache of functools or a kernel of Triton holds; anything else itself."""
    kind = name_of(type(value))
    if kind == "functools._lru_cache_wrapper":
        return held_function(getattr(value, "__wrapped__", None))
    return held_function(getattr(value, "fn", None)) if kind.startswith("triton.runtime.") else value


def is_torchs(value: FunctionType) -> bool:
    """Whether torch defines a function, and what it wraps."""
    function: FunctionType | None = value
    while function is not None:
        found = definition_of(function)
        if found is None or not found.module.startswith("torch.") or found.module.startswith("torch._dynamo"):
            return False
        function = wrapped_by(function)
    return True


def is_of_python(cls: type) -> bool:
    """Whether Python's library defines `cls`."""
    return cls.__module__.partition(".")[0] in sys.stdlib_module_names


def sets_gradients(wrapper: FunctionType) -> bool:
    """Whether a wrapper of torch's, which enters a context around a function, enters one that is about gradients."""
    try:
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        context = cells["ctx_factory"].cell_contents.__self__
    except (ValueError, KeyError, AttributeError):  # any other context, or another release of torch
        return False
    return type(context) in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled)


def is_builtin(value: object) -> bool:
    """Whether Python itself defines `value`: its functions and classes, constants, and what `site` adds."""
    if isinstance(value, type | BuiltinFunctionType):
        return value.__module__ in ("builtins", "io", "_io")  # `open` is of the latter two
    home = type(value).__module__
    return home == "_sitebuiltins" or (home == "builtins" and not callable(value))


def is_foreign_object(value: object, engine: Engine) -> bool:
    """Whether `value` is a module that was never imported, or an object, neither function nor class, that torch, the
    engine and what Python brings along do not make."""
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return False
    home = f"{type(value).__module__}."
    if home.startswith(("torch.", *engine.packages)):  # modules too: torch's operators, what stands for a library
        return False
    if isinstance(value, ModuleType):
        return sys.modules.get(value.__name__) is not value
    if home.startswith(("typing.", "builtins.")):
        return False
    root = home.partition(".")[0]
    return callable(value) or root == "types" or root not in {*sys.stdlib_module_names, *_ARRAYS}


def name_of(defined: FunctionType | type) -> str:
    """Module and name of a class or function."""
    return f"{defined.__module__}.{defined.__qualname__}"


def describe(value: object) -> str:
    """A function by where it was defined, anything else by its type."""
    if isinstance(value, FunctionType | type):
        return name_of(value)
    return "missing" if value is None else f"an object of {name_of(type(value))}"
