"""Every supported family, and the lookup by tower class."""

from collections.abc import Callable
from dataclasses import replace

from fusedvit.families import gemma4, glm, qwen2, qwen2_5, qwen3
from fusedvit.families.base import Family
from fusedvit.families.engine import Engine
from fusedvit.model.param_names import WeightNames

FAMILIES: tuple[Family, ...] = (
    *qwen2.FAMILIES,
    *qwen2_5.FAMILIES,
    *qwen3.FAMILIES,
    *glm.FAMILIES,
    *gemma4.FAMILIES,
)


def dialect(class_name: str, engine: Engine, renamed: Callable[[WeightNames], WeightNames]) -> Family:
    """The family of Hugging Face's class `class_name`, adapted to the towers that a serving engine builds.

    `renamed` maps the family's parameter names to the engine's.
    """
    family = family_of(class_name)
    assert family is not None, class_name
    return replace(family, names=renamed(family.names), aliases={}, engine=engine)


def family_of(class_name: str) -> Family | None:
    """The family of a tower class; None if the class is not supported."""
    return next((family for family in FAMILIES if class_name in family.class_names), None)
