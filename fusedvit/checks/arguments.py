"""Finds out what Hugging Face's tower does with a call's keyword arguments, from the tower's code, not from a list.

A tower passes `**kwargs` on: its decorators read some, helpers of `transformers.vision_utils` take precomputed tensors
out of them, and blocks and their attention pass the rest to the attention function. An argument that none of these
functions names changes nothing, so the call runs fused.
"""

import dis
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from fusedvit.checks.ownership import ORIGINAL, fused_class, own_class
from fusedvit.checks.source_code import Definition, UnreadSource, definition_of

_ATTENDED = {"query", "key", "value"}  # parameters of every attention function
HARMLESS = {"return_dict", "use_cache"}  # decorators read them; neither changes a tensor (`outputs` sees to the first)
_REGISTRY = "transformers.modeling_utils"  # where attention functions are registered
_CONFIGS = "transformers.configuration_utils"  # where the properties of every config are defined
_CAPTURING = "transformers.utils.output_capturing"  # where outputs that can be recorded are registered
# Output -> the option that asks for it, where that is not `output_<name>`.
_OPTIONS = dict.fromkeys(("cross_attentions", "mask_decoder_attentions"), "output_attentions")


@dataclass(frozen=True)
class ArgumentRules:
    """What a tower does with keyword arguments.

    Attributes:
        read: names that some function reads; any other name is ignored.
        precomputed: names in `read` of tensors that are otherwise computed from `grid_thw`.
        given: names in `read` that the tower's code itself passes to functions, so that a caller's argument would be a
            duplicate, even None. For any other name, None is the same as no argument.
    """

    read: frozenset[str]
    precomputed: frozenset[str]
    given: frozenset[str]


_own_properties: dict[str, CodeType] = {}  # of configs: their code
_known: weakref.WeakKeyDictionary[type, dict[Any, ArgumentRules]] = weakref.WeakKeyDictionary()


def rules_of(tower: nn.Module) -> ArgumentRules:
    """The rules of `tower`: those of `keep_rules`, else found by reading its code as it is now, in a few ms."""
    attention = configured(tower.__dict__.get("config"), "_attn_implementation")
    return _known.get(own_class(type(tower)), {}).get(attention) or _find_rules(tower, attention)


def keep_rules(tower: nn.Module) -> None:
    """Keeps the rules of a tower whose code is the engine's own, by its class and attention implementation.

    Rules of replaced code are never kept: they would still hold for the original code once it is back.
    """
    attention = configured(tower.__dict__.get("config"), "_attn_implementation")
    known = _known.setdefault(own_class(type(tower)), {})
    if attention not in known:
        known[attention] = _find_rules(tower, attention)


def asked_for(tower: nn.Module, given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The entries of `recordable` that the call or the tower's config asks for, in the output record's order."""
    config = tower.__dict__.get("config")
    found = []
    for name, specs in recordable(tower).items():
        option = option_of(name)
        if given[option] if option in given else configured(config, option):
            found.append((name, specs))
    return found


def recordable(tower: nn.Module) -> Mapping[str, Any]:
    """What transformers can record of `tower`, by name, and of which modules. Read at each call, as it does: the class
    may have gained an entry."""
    registry = getattr(sys.modules.get(_CAPTURING), "_CAN_RECORD_REGISTRY", None)
    found = None if registry is None else dict.get(registry, str(type(tower)))  # its own `get` differs among releases
    return found or {}


def option_of(name: str) -> str:
    """The argument, or option of a config, that asks for an entry of `recordable`."""
    return _OPTIONS.get(name) or f"output_{name}"


def gives(tower: nn.Module, specs: Any) -> bool:
    """Whether any module of `tower` gives what `specs`, of an entry of `recordable`, record. If none does, Hugging
    Face's record holds an empty tuple."""
    for spec in specs if isinstance(specs, list) else [specs]:
        target = getattr(spec, "target_class", spec)
        if not isinstance(target, type) or any(isinstance(module, target) for module in tower.modules()):
            return True
    return False


def configured(config: object, name: str) -> Any:
    """An option of a Hugging Face config; False if there is none. Bypasses its `__getattribute__`, which takes 3 us."""
    if config is None:
        return False
    kept, of_class = object.__getattribute__(config, "__dict__"), getattr(type(config), name, None)
    if type(of_class) is property and f"_{name}" in kept and _gives_what_is_kept(of_class, name):
        return kept[f"_{name}"]
    if name in kept and not hasattr(type(of_class), "__set__"):
        return kept[name]
    return getattr(config, name, False) if hasattr(type(config), name) else False


def _gives_what_is_kept(option: property, name: str) -> bool:
    """Whether a property of a config is transformers' own, which gives what the config keeps under `_<name>`."""
    code = getattr(option.fget, "__code__", None)
    if code is None or _own_properties.get(name) is code:
        return code is not None
    try:
        own = definition_of(option.fget) == Definition(_CONFIGS, f"PreTrainedConfig.{name}")
    except UnreadSource:
        return False
    if own:
        _own_properties[name] = code
    return own


def _find_rules(tower: nn.Module, attention: str | None) -> ArgumentRules:
    cls = type(tower)
    fused = fused_class(cls)
    original: Any = cls if fused is None else vars(fused)[ORIGINAL]
    roots = [*_chain(original.forward)]
    if _hands_on(roots[-1]):
        for module in {*map(type, tower.modules())}:
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
    precomputed -= attended  # a helper may use one of these names as a keyword in an unrelated call
    # Of its class, not those of `recordable`: under another name (`fully_shard`) a tower records nothing for an option.
    read -= {*HARMLESS, *map(option_of, getattr(cls, "_can_record_outputs", None) or ())}
    return ArgumentRules(frozenset(read), frozenset(precomputed), frozenset(given))


def _attention_function(implementation: str | None) -> Any:
    registry = getattr(sys.modules.get(_REGISTRY), "ALL_ATTENTION_FUNCTIONS", {})
    return registry.get(implementation) if implementation in registry else None


def _chain(function: Any) -> Iterator[FunctionType]:
    """A function and the functions that it wraps."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if type(function) is FunctionType:
            yield function
        function = getattr(function, "__wrapped__", None)


def _reached(roots: list[FunctionType]) -> Iterator[FunctionType]:
    """The functions among `roots`, and among the functions that they call by name, that keyword arguments reach."""
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
    """Whether a function passes `**kwargs` to another."""
    return any(instruction.opname == "DICT_MERGE" for instruction in dis.get_instructions(function))


def _names_given(function: FunctionType) -> set[str]:
    """Required parameters of `function`, and strings that could be keywords of calls in its body."""
    return _required(function) | _strings_in(function.__code__)


def _required(function: FunctionType) -> set[str]:
    return {p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty}


def _takes_a_mapping(function: FunctionType) -> bool:
    """Whether `function` has a parameter `kwargs`, from which helpers pop what they need not compute."""
    return "kwargs" in _parameters(function.__code__)


def _parameters(code: CodeType) -> tuple[str, ...]:
    """Names of parameters, without `*args` and `**kwargs`."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _names_called(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_called(c) for c in code.co_consts if isinstance(c, CodeType)))


def _names_in(function: FunctionType) -> set[str]:
    """String constants that could name an argument, and parameters, unless `function` gets the arguments as a mapping
    alone."""
    code = function.__code__
    parameters = _parameters(code) if code.co_flags & inspect.CO_VARKEYWORDS else ()
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return {*parameters} | _strings_in(code) | _identifiers(defaults)


def _strings_in(code: CodeType) -> set[str]:
    """Constants of `code` that could name an argument, except names that it writes itself in calls without `**kwargs`:
    no caller's argument gets there."""
    skipped = _keywords(code)
    return _identifiers(value for index, value in enumerate(code.co_consts) if index not in skipped)


def _identifiers(constants: Iterable[Any]) -> set[str]:
    found: set[str] = set()
    for value in constants:
        if isinstance(value, str) and value.isidentifier():
            found.add(value)
        elif isinstance(value, tuple | frozenset):
            found |= _identifiers(value)
        elif isinstance(value, CodeType):
            found |= _strings_in(value)
    return found


def _keywords(code: CodeType) -> set[int]:
    """Indices of constants of `code` that only hold the keywords of calls such as `f(a=1)`."""
    keywords, others = set[int](), set[int]()
    following = ""
    for instruction in reversed([*dis.get_instructions(code)]):
        if instruction.opcode in dis.hasconst and instruction.arg is not None:
            names = instruction.opname == "KW_NAMES" or following in ("CALL_KW", "CALL_FUNCTION_KW")
            (keywords if names else others).add(instruction.arg)
        following = instruction.opname
    return keywords - others
