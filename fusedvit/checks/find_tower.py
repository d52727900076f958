"""Finds the supported vision towers in a model."""

from torch import nn

from fusedvit.checks.ownership import ORIGINAL, fused_class, name_of, own_class
from fusedvit.errors import UnsupportedModel
from fusedvit.families.registry import FAMILIES, family_of
from fusedvit.families.unsupported import UNSUPPORTED


def find_tower(model: nn.Module) -> nn.Module:
    """The one supported tower in `model`.

    Raises:
        UnsupportedModel: there is none, or several; the message names the supported towers, or those found.
    """
    found = towers_in(model)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise UnsupportedModel(nothing_in(model))
    names = ", ".join(map(repr, found))
    raise UnsupportedModel(f"{type(model).__name__} holds {len(found)} vision towers ({names}): fuse each by itself")


def towers_in(model: nn.Module) -> dict[str, nn.Module]:
    """Supported towers by their paths. Raises TypeError if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fusedvit: model must be a torch.nn.Module, got {type(model).__name__}")
    return {name: m for name, m in model.named_modules() if _is_tower(type(m))}


def _is_tower(cls: type) -> bool:
    """Whether `cls` is a family's tower class or a fused class; engines' tower classes belong to no family."""
    return family_of(own_class(cls).__name__) is not None or fused_class(cls) is not None


def nothing_in(model: nn.Module) -> str:
    """Message: why nothing in `model` can be fused, and which towers are supported."""
    known = "; ".join(f"{family.name} ({', '.join(family.class_names)})" for family in FAMILIES)
    classes = dict.fromkeys(type(m) for m in model.modules())
    held = {cls.__name__: UNSUPPORTED[cls.__name__] for cls in classes if cls.__name__ in UNSUPPORTED}
    held |= {name_of(cls): reason for cls in classes if (reason := derived(cls))}
    why = "".join(f" {name} is not: {reason}." for name, reason in held.items())
    return f"{type(model).__name__} holds no supported vision tower.{why} Supported: {known}"


def derived(cls: type) -> str:
    """Why `cls` is not supported, if it derives from a supported tower class or a fused class; else ""."""
    bases = (c.__name__ for c in cls.__mro__ if ORIGINAL in vars(c) or family_of(c.__name__) is not None)
    base = next(bases, cls.__name__)
    advice = f"it derives from {base}, and only {base} itself is taken: set the tower's __class__ to {base}"
    return "" if base == cls.__name__ else advice
