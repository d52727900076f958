"""What Hugging Face's tower does with a call's keyword arguments, found in its code and not in a list of ours.

A tower hands `**kwargs` on: its decorators read some, helpers of `transformers.vision_utils` take precomputed tensors
out of them, blocks and their attention pass the rest to the attention function. An argument that none of these
functions names changes nothing, whatever it is called, so the call runs fused.
"""

import dis
import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_ATTENDED = {"query", "key", "value"}  # parameters of every attention function
_OURS = __name__.partition(".")[0]
_HARMLESS = {"return_dict", "use_cache"}  # decorators read them; neither changes a tensor (`api` sees to `return_dict`)
_REGISTRY = "transformers.modeling_utils"  # where attention functions are registered


@dataclass(frozen=True)
class ArgumentRules:
    """What a tower does with keyword arguments.

    Attributes:
        read: names that some function on their way reads; any other name is ignored.
        precomputed: those of `read` that stand for what `grid_thw` gives.
        given: those of `read` that the code itself gives to what it calls, so that a caller's would be one too many.
            Of any other name None is as good as nothing.
        recorded: what the output record gets if `output_<name>` is true, in the record's order, and whether any module
            of the tower gives it; where none does, Hugging Face's record holds an empty tuple.
        options: `output_<name>` of each.
    """

    read: frozenset[str]
    precomputed: frozenset[str]
    given: frozenset[str]
    recorded: tuple[tuple[str, bool], ...]
    options: tuple[str, ...]


_known: weakref.WeakKeyDictionary[type, dict[Any, ArgumentRules]] = weakref.WeakKeyDictionary()


def rules_of(tower: nn.Module) -> ArgumentRules:
    """The rules of `tower`, by its class and its attention implementation."""
    cls, attention = type(tower), configured(tower.__dict__.get("config"), "_attn_implementation")
    known = _known.get(cls)
    if known is None:
        known = _known[cls] = {}
    rules = known.get(attention)
    if rules is None:
        rules = known[attention] = _find_rules(cls, frozenset(map(type, tower.modules())), attention)
    return rules


def asked_for(tower: nn.Module, rules: ArgumentRules, given: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The entries of `rules.recorded` that the call or the tower's config asks for."""
    config = tower.__dict__.get("config")
    options = zip(rules.recorded, rules.options, strict=True)
    return [entry for entry, name in options if (given[name] if name in given else configured(config, name))]


def configured(config: object, name: str) -> Any:
    """An option of Hugging Face's config, past its own `__getattribute__`, which takes 3 us; False if there is none."""
    if config is None:
        return False
    kept = object.__getattribute__(config, "__dict__")
    if name in kept:
        return kept[name]
    if f"_{name}" in kept:
        return kept[f"_{name}"]
    return getattr(config, name, False) if hasattr(type(config), name) else False


def _find_rules(cls: type, inner: frozenset[type], attention: str | None) -> ArgumentRules:
    roots = [*_chain(cls.__dict__.get("forward", cls.forward))]  # type: ignore[attr-defined]
    if _hands_on(roots[-1]):
        for module in inner:
            if module is not cls:
                roots += _chain(getattr(module, "forward", None))
        roots += _chain(_attention_function(attention))
    read: set[str] = set()
    precomputed: set[str] = set()
    given: set[str] = set()
    attended: set[str] = set()
    for function in _reached(roots):
        given |= _names_given(function) if not hasattr(function, "__wrapped__") else set()
        names = _names_in(function)
        if _takes_a_mapping(function):
            precomputed |= names
        elif names >= _ATTENDED:
            attended |= _required(function)
        read |= names
    precomputed -= attended  # a helper's call of something else may have a keyword of that name
    recorded = getattr(cls, "_can_record_outputs", None) or {}
    entries = tuple((name, _gives(specs, inner)) for name, specs in recorded.items())
    options = tuple(f"output_{name}" for name, _ in entries)
    read -= {*_HARMLESS, *options}
    return ArgumentRules(frozenset(read), frozenset(precomputed), frozenset(given), entries, options)


def _attention_function(implementation: str | None) -> Any:
    registry = getattr(sys.modules.get(_REGISTRY), "ALL_ATTENTION_FUNCTIONS", {})
    return registry.get(implementation) if implementation in registry else None


def _gives(specs: Any, inner: frozenset[type]) -> bool:
    """Whether a module of the classes `inner` is one that these specs of `_can_record_outputs` record."""
    for spec in specs if isinstance(specs, list) else [specs]:
        target = getattr(spec, "target_class", spec)
        if not isinstance(target, type) or any(issubclass(cls, target) for cls in inner):
            return True
    return False


def _chain(function: Any) -> Iterator[FunctionType]:
    """A function and those that it wraps, without ours."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType) and not function.__globals__["__name__"].startswith(_OURS):
            yield function
        function = getattr(function, "__wrapped__", None)


def _reached(roots: list[FunctionType]) -> Iterator[FunctionType]:
    """Those of `roots`, and of what they call by name, that keyword arguments reach."""
    seen: set[CodeType] = set()
    left = list(roots)
    while left:
        function = left.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        if not (function.__code__.co_flags & inspect.CO_VARKEYWORDS or _takes_a_mapping(function)):
            continue
        yield function
        for name in _names_called(function.__code__):
            left += _chain(function.__globals__.get(name))


def _hands_on(function: FunctionType) -> bool:
    """Whether a function calls another with `**kwargs`."""
    return any(instruction.opname == "DICT_MERGE" for instruction in dis.get_instructions(function))


def _names_given(function: FunctionType) -> set[str]:
    """Parameters that whoever calls it must give, and whatever could be a keyword of its own calls."""
    return _required(function) | _strings_in(function.__code__.co_consts)


def _required(function: FunctionType) -> set[str]:
    return {p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty}


def _takes_a_mapping(function: FunctionType) -> bool:
    """A parameter `kwargs`, out of which a helper pops what it need not compute."""
    return "kwargs" in _parameters(function.__code__)


def _parameters(code: CodeType) -> tuple[str, ...]:
    """Without `*args` and `**kwargs`."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _names_called(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_called(c) for c in code.co_consts if isinstance(c, CodeType)))


def _names_in(function: FunctionType) -> set[str]:
    """Parameters and string constants that could name an argument."""
    code = function.__code__
    return {*_parameters(code)} | _strings_in(code.co_consts) | _strings_in(function.__defaults__ or ())


def _strings_in(constants: tuple[Any, ...]) -> set[str]:
    found: set[str] = set()
    for value in constants:
        if isinstance(value, str) and value.isidentifier():
            found.add(value)
        elif isinstance(value, tuple):
            found |= _strings_in(value)
        elif isinstance(value, CodeType):
            found |= _strings_in(value.co_consts)
    return found
