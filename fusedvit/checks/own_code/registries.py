"""Checks the registries of transformers in which code looks up attention functions and mask functions.

Each registry must be transformers' own, and so must be its entry for the name in the tower's config.
"""

import sys
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any

from torch import nn

from fusedvit.checks.own_code.walk import CodeWalk
from fusedvit.checks.ownership import describe
from fusedvit.checks.source_code import Definition, definition_of, names_in, wrapped_by

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"
_INTERFACE_CLASS = ("transformers.modeling_utils", "AttentionInterface")
_FLASH = Definition("transformers.integrations.flash_attention", "flash_attention_forward")
# Name in a config -> the function that transformers registers; "eager" is a function of the modeling module.
_ATTENTION: dict[str | None, Definition] = {
    "sdpa": Definition("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    "flash_attention_2": _FLASH,
    "flash_attention_3": _FLASH,
    "flash_attention_4": _FLASH,
    "flex_attention": Definition("transformers.integrations.flex_attention", "flex_attention_forward"),
    "paged|eager": Definition("transformers.integrations.eager_paged", "eager_paged_attention_forward"),
    "paged|sdpa": Definition("transformers.integrations.sdpa_paged", "sdpa_attention_paged_forward"),  # until 5.20
}
# Repositories of flash attention that transformers takes where flash-attn is not installed. It registers its own
# `flash_attention_forward` under their names, which may end in "@" and a revision.
_FLASH_REPOSITORIES = {
    f"kernels-community/{name}" for name in ("flash-attn2", "flash-attn3", "flash-attn4", "vllm-flash-attn3")
}
_FOLLOWED = ("sdpa",)  # the other functions load their kernels at their first call
_MASKS = "ALL_MASK_ATTENTION_FUNCTIONS"
_MASKS_CLASS = ("transformers.masking_utils", "AttentionMaskInterface")
_MASK = {  # as `_ATTENTION`, for masks
    name: Definition(_MASKS_CLASS[0], f"{kind}_mask")
    for kind, names in {
        "sdpa": ("sdpa", None),
        "eager": ("eager",),
        "flash_attention": ("flash_attention_2", "flash_attention_3", "flash_attention_4"),
        "flex_attention": ("flex_attention",),
    }.items()
    for name in names
}
_ASKED = ("get_interface", "__getitem__", "__contains__")  # methods by which code reads a registry


def follow_registries(walk: CodeWalk, modules: Collection[nn.Module]) -> None:
    """Follows what `modules`, the tower first, would look up by their configs."""
    for module in _distinct_configs(modules):
        _follow_attention(walk, module)
    _follow_masks(walk, next(iter(modules)))


def _distinct_configs(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """One module for each config and class whose code looks up an attention function."""
    found = {
        (id(vars(m)["config"]), type(m)): m
        for m in modules
        if "config" in vars(m) and _INTERFACE in _forward_names(type(m))
    }
    return found.values()


def _forward_names(cls: type) -> set[str]:
    forward: object = getattr(cls, "forward", None)
    while type(forward) is FunctionType and (inner := wrapped_by(forward)) is not None:
        forward = inner
    return names_in(forward.__code__) if type(forward) is FunctionType else set()


def _follow_attention(walk: CodeWalk, module: nn.Module) -> None:
    """Follows the attention function that `module` would call by its config."""
    scope = vars(sys.modules[type(module).__module__])
    interface, name = scope.get(_INTERFACE), getattr(vars(module)["config"], "_attn_implementation", None)
    if interface is None:
        return
    if not _is_registry(walk, interface, _INTERFACE, _INTERFACE_CLASS):
        return
    _follow_registry(walk, interface, name)
    found = interface.get(name, scope.get(_EAGER)) if name is not None else scope.get(_EAGER)
    eager = Definition(type(module).__module__, _EAGER)
    expected = eager if name in (None, "eager") else _ATTENTION.get(_kind_of(name))
    if expected is None or definition_of(found) != expected:
        walk.found.note_foreign(f"the attention function {name!r} is {describe(found)}")
    elif type(found) is FunctionType and (name in _FOLLOWED or expected == eager):
        walk.follow(found, expected, f"the attention function {name!r}")


def _kind_of(name: str | None) -> str | None:
    """The name of transformers' own for an attention implementation: that of flash attention for its repositories."""
    return "flash_attention_2" if name is not None and name.partition("@")[0] in _FLASH_REPOSITORIES else name


def _follow_masks(walk: CodeWalk, tower: nn.Module) -> None:
    """Follows the function that builds attention masks, if the code looks it up by the tower's config."""
    module = sys.modules.get(_MASKS_CLASS[0])
    if module is None or (id(module), _MASKS) not in walk.found.slots:
        return
    interface = vars(module)[_MASKS]
    name = getattr(vars(tower).get("config"), "_attn_implementation", None)
    if _is_registry(walk, interface, _MASKS, _MASKS_CLASS):
        _follow_registry(walk, interface, name)
        found, expected = interface.get(name), _MASK.get(_kind_of(name))
        if name not in vars(type(interface)).get("_global_mapping", ()):  # where transformers' code looks first
            walk.found.note_foreign(f"no mask function {name!r} is registered, so that padding would be attended to")
        elif expected is not None:
            walk.follow(found, expected, f"the mask function {name!r}")
        else:
            walk.found.note_foreign(f"the mask function {name!r} is {describe(found)}")


def _is_registry(walk: CodeWalk, interface: Any, where: str, expected: tuple[str, str]) -> bool:
    """Whether `interface` is transformers' registry; notes attributes of the instance other than its entries."""
    if (type(interface).__module__, type(interface).__qualname__) != expected:
        walk.found.note_foreign(f"{where} is {describe(interface)}")
        return False
    for name in sorted(vars(interface).keys() - {"_local_mapping"}):
        walk.found.note_foreign(f"{where}.{name} of the instance is {describe(vars(interface)[name])}", interface, name)
    return True


def _follow_registry(walk: CodeWalk, interface: Any, name: object) -> None:
    for owner in (interface, type(interface)):
        for mapping in ("_local_mapping", "_global_mapping"):
            if mapping in vars(owner):
                walk.found.slots.setdefault((id(owner), mapping), (owner, mapping))
                walk.found.registries.append((vars(owner)[mapping], str(name)))
    walk.found.note_slot(interface, "__class__")
    walk.found.note_absent(interface, (*_ASKED, "get", "_global_mapping"))
    for method in _ASKED:
        walk.follow_method(type(interface), method)
