"""Tells who defines a class, a function or an object: torch, the tower's engine, Python, or other code (foreign).

Functions are known by their exact type: a proxy around one (`wrapt`, which OpenTelemetry and other tracers use) passes
for it under `isinstance`, has its name and code, and may call anything.
"""

import gc
import sys
from functools import lru_cache, partial
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import nn

from fusedvit.checks.source_code import defines, defines_function, definition_of, wrapped_by
from fusedvit.families.engine import HUGGING_FACE, Engine

ORIGINAL = "_fusedvit_original"  # attribute of the class that `fuse` gives a tower: the tower's original class
FUSED = "_fusedvit_forward"  # attribute of that class: the `forward` that `fuse` gave it
_WRAPPING = ("torch.distributed.", "torch.nn.utils.")
_ARRAYS = ("numpy",)
_DECORATORS = ("transformers.", "torch._compile")  # of every tower's own forward, of torch's own checkpoint
# Packages whose modules Hugging Face's towers call. Serving engines call many, and more on a GPU.
_CALLED = {"torch", "triton", "transformers", *_ARRAYS, *sys.stdlib_module_names}


def own_class(cls: Any) -> Any:
    """The class that a module was created with: bypasses fused classes, and torch's classes that wrap another
    (`fully_shard`, parametrizations)."""
    return next(c for c in cls.__mro__ if ORIGINAL not in vars(c) and not c.__module__.startswith(_WRAPPING))


def fused_class(cls: type) -> type | None:
    """The fused class among `cls` and its bases: `cls` itself, or a base if a user derived from it; None if neither."""
    return next((c for c in cls.__mro__ if ORIGINAL in vars(c)), None)


def foreign_class(tower: nn.Module, engine: Engine = HUGGING_FACE) -> str:
    """A message with the class of `tower`, if that is not one of the engine's own; else ""."""
    cls = own_class(type(tower))
    theirs = cls.__module__.startswith(engine.towers)
    if theirs and defines(cls.__module__, cls.__qualname__):
        return ""
    return f"the tower's class is {name_of(cls)}{', which that module does not define' if theirs else ''}"


def is_own(cls: type, engine: Engine = HUGGING_FACE) -> bool:
    """Whether torch or the engine defines `cls`, or composes it of its own classes without adding functions."""
    if not cls.__module__.startswith(("torch.", *engine.packages)):
        return False
    adds = any(type(value) is FunctionType for value in vars(cls).values())
    return defines(cls.__module__, cls.__qualname__) or (not adds and all(is_own(c, engine) for c in cls.__bases__))


@lru_cache(maxsize=2)
def functions_of_c(module: ModuleType) -> frozenset[str]:
    """Names of the C functions that `module` had when torch was imported, whether or not they were replaced."""
    origin = torch._C._nn if module is torch._C._nn else torch._C._VariableFunctions
    return frozenset(name for name in dir(origin) if not name.startswith("__"))


def is_foreign_name(value: object, name: str, homes: tuple[str, ...] = ("torch.",)) -> bool:
    """Whether `value`, found under `name`, is a function or class of other code, or one of another name.

    Args:
        homes: prefixes of modules whose classes, and functions written in C, are known.
    """
    if type(value) is FunctionType:
        return not (is_torchs(value) and value.__name__ == name)
    if not _is_class(value) and type(value) is not BuiltinFunctionType:
        return False
    home = f"{value.__module__}."  # a method bound to an object of C has no module
    known = home.startswith(homes) or (isinstance(value, type) and is_of_python(value))
    return not known or value.__name__ != name


def is_operator(value: object, namespace: str, name: str) -> bool:
    """Whether `value` is an operator that torch keeps as `torch.ops.NAMESPACE.NAME`."""
    kept = f"{namespace}::{name}"
    return name_of(type(value)) == "torch._ops.OpOverloadPacket" and getattr(value, "_qualified_op_name", "") == kept


def held_function(value: object) -> object:
    """The function inside a functools cache or a Triton kernel; any other value itself.

    `functools.wraps` may make a cache name another function than the one that it calls, so its references decide.
    """
    kind = name_of(type(value))
    if kind == "functools._lru_cache_wrapper":
        inner = getattr(value, "__wrapped__", None)
        return held_function(inner) if any(held is inner for held in gc.get_referents(value)) else value
    return held_function(getattr(value, "fn", None)) if kind.startswith("triton.runtime.") else value


def is_torchs(value: FunctionType) -> bool:
    """Whether torch defines a function and the functions that it wraps."""
    function: FunctionType | None = value
    while function is not None:
        found = definition_of(function)
        if found is None or not found.module.startswith("torch.") or found.module.startswith("torch._dynamo"):
            return False
        function = wrapped_by(function)
    return True


def is_of_python(cls: type) -> bool:
    """Whether Python's standard library defines `cls`."""
    return cls.__module__.partition(".")[0] in sys.stdlib_module_names


def is_pythons(function: FunctionType) -> bool:
    """Whether a module of Python's standard library defines `function`; its code is not compared with the source's."""
    return str(function.__globals__.get("__name__")).partition(".")[0] in sys.stdlib_module_names


def sets_gradients(wrapper: FunctionType) -> bool:
    """Whether `wrapper`, torch's wrapper that enters a context around a function, enters a gradient mode."""
    try:
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        context = cells["ctx_factory"].cell_contents.__self__
    except (ValueError, KeyError, AttributeError):  # another context, or another release of torch
        return False
    return type(context) in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled)


def is_builtin(value: object) -> bool:
    """Whether Python itself defines `value`: built-in functions, classes and constants, and what `site` adds."""
    if _is_class(value) or type(value) is BuiltinFunctionType:
        return value.__module__ in ("builtins", "io", "_io")  # `open` is from io or _io
    home = type(value).__module__
    return home == "_sitebuiltins" or (home == "builtins" and not callable(value))


def is_foreign_object(value: object, engine: Engine) -> bool:
    """Whether `value` is a module of other code, an object to call, or an object of a foreign class.

    Functions and classes are not judged here. Foreign means defined neither by torch, the engine nor Python. An object
    to call is foreign unless the engine defines its class: objects of torch's classes (modules, custom operators,
    scripted functions) and of Python's (bound methods, partial functions) may hold anybody's code.
    """
    if _is_class(value) or type(value) in (FunctionType, BuiltinFunctionType):
        return False
    home = f"{type(value).__module__}."
    root = home.partition(".")[0]
    if home.startswith(("typing.", *engine.packages)):
        return False
    if isinstance(value, ModuleType):  # torch has module objects of its own for operators and libraries
        known = engine is not HUGGING_FACE or value.__name__.partition(".")[0] in _CALLED
        return root != "torch" and not (known and sys.modules.get(value.__name__) is value)
    return callable(value) or root == "types" or root not in {"torch", *sys.stdlib_module_names, *_ARRAYS}


def name_of(defined: FunctionType | type) -> str:
    """Module and name of a class or function."""
    return f"{defined.__module__}.{defined.__qualname__}"


def describe(value: Any) -> str:
    """A function or class by where it was defined, a module by its name, anything else by its type."""
    if type(value) is FunctionType:
        return _describe_function(value)
    if _is_class(value):
        return name_of(value)
    if issubclass(type(value), ModuleType):
        return f"module {value.__name__}"
    return "missing" if value is None else f"an object of {name_of(type(value))}"


def _describe_function(value: Any) -> str:
    """Module and name of a function, and how it differs from the one that its source defines under that name.

    A wrapper has the name of the function that it wraps, so its own module is given too.
    """
    named, home = name_of(value), value.__globals__.get("__name__", "")
    if hasattr(value, "_torchdynamo_orig_callable"):
        return f"torch.compile of {named}"
    if home in sys.modules and vars(sys.modules[home]) is not value.__globals__:  # as of an earlier import
        return f"{named} with other globals than those of {home}"
    inner = getattr(value, "__wrapped__", None)
    if inner is not None and not home.startswith(_DECORATORS):
        return f"a wrapper, by {home}, around {named}"
    if inner is not None and definition_of(value) is None:  # as type checkers compile them
        return f"a wrapper, defined in no source, around {named}"
    if type(inner) is FunctionType:
        return _describe_function(inner)
    if home != value.__module__:  # as `functools.update_wrapper` leaves it where `__wrapped__` is deleted
        return f"{named}, defined in {home or 'no module'}"
    known = home in sys.modules and defines_function(home, value.__qualname__)
    return f"{named} with other code than its source's" if known and definition_of(value) is None else named


def described_call(value: Any) -> str:
    """`describe` of the function behind `value`, a bound method or a partial."""
    while type(value) in (MethodType, partial):
        value = value.__func__ if type(value) is MethodType else value.func
    return describe(value)


def _is_class(value: Any) -> TypeGuard[type]:
    return issubclass(type(value), type)


def homes_of(cls: type, name: str) -> list[type]:
    """The classes that define attribute `name` of `cls`, without those that hold the very object that they inherit.

    Who takes a patch back by assignment (`cls.name = old`) leaves such a class, where `old` was inherited.
    """
    homes = [c for c in cls.__mro__ if name in vars(c)]
    return [c for c, inner in pairwise(homes) if vars(c)[name] is not vars(inner)[name]] + homes[-1:]
