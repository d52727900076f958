"""Every tower of transformers that takes `grid_thw`, or positions of patches, is a family's, or is known and says why
it is not fused."""

import ast
import functools
import importlib
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

import fusedvit
from fusedvit.families.registry import FAMILIES
from fusedvit.families.unsupported import UNSUPPORTED

MODELS = Path(transformers.__file__).parent / "models"
REGISTERED = {name for family in FAMILIES for name in family.class_names}
GRIDS = {"grid_thw", "image_grid_thw", "pixel_position_ids"}
INSIDE = {"PaddleOCRVisionTransformer"}  # of PaddleOCRVisionModel


@functools.cache
def towers() -> dict[str, str]:
    """Class name -> model: models of their own whose forward takes pixels and a grid, read from the sources."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if any(name in text for name in GRIDS):
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
            found |= {node.name: path.parent.name for node in classes if _is_tower(node)}
    return {name: model for name, model in found.items() if name not in INSIDE}


def _is_tower(node: ast.ClassDef) -> bool:
    if not any("PreTrainedModel" in ast.unparse(base) for base in node.bases):
        return False
    forward = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "forward"]
    names = {arg.arg for part in forward for arg in part.args.args}
    return bool(GRIDS & names) and "input_ids" not in names


def test_every_tower_is_known() -> None:
    assert towers().keys() <= REGISTERED | UNSUPPORTED.keys()
    assert len(towers().keys() & REGISTERED) >= 16


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="some of them are newer")
def test_nothing_is_known_that_is_not_there() -> None:
    assert REGISTERED | UNSUPPORTED.keys() <= towers().keys()


@pytest.mark.parametrize("name", sorted(towers().keys() & UNSUPPORTED.keys()))
def test_the_real_tower_says_why(name: str) -> None:
    module = importlib.import_module(f"transformers.models.{towers()[name]}.modeling_{towers()[name]}")
    cls = getattr(module, name)
    with torch.device("meta"):
        tower = cls._from_config(cls.config_class())
    with pytest.raises(fusedvit.UnsupportedModel) as info:
        fusedvit.fuse(tower)
    assert f"{name} is not: {UNSUPPORTED[name]}." in str(info.value)
