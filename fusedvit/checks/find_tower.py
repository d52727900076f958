"""Finds the supported vision towers in a model."""

from torch import nn

from fusedvit.checks.ownership import fused_class, own_class
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
    held = dict.fromkeys(name for name in (type(m).__name__ for m in model.modules()) if name in UNSUPPORTED)
    why = "".join(f" {name} is not: {UNSUPPORTED[name]}." for name in held)
    return f"{type(model).__name__} holds no supported vision tower.{why} Supported: {known}"
