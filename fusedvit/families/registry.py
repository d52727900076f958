"""Every supported family, and the lookup by tower class."""

from fusedvit.families import gemma4, glm, qwen2, qwen2_5, qwen3
from fusedvit.families.base import Family

FAMILIES: tuple[Family, ...] = (
    *qwen2.FAMILIES,
    *qwen2_5.FAMILIES,
    *qwen3.FAMILIES,
    *glm.FAMILIES,
    *gemma4.FAMILIES,
)


def family_of(class_name: str) -> Family | None:
    """The family that a tower class belongs to; None if it is not supported."""
    return next((family for family in FAMILIES if class_name in family.class_names), None)
