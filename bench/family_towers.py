"""A tower of every family at the geometry of a released checkpoint, with random weights."""

import copy
import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusedvit.bench.towers import wider
from fusedvit.cli.towers import cast_parameters_, random_weights_
from fusedvit.families.registry import family_of
from fusedvit.model.spec import VisionSpec


@dataclass(frozen=True)
class Geometry:
    """A released tower.

    Attributes:
        class_name: of the tower.
        model: the model it is of, as transformers names its folder.
        numbers: of its config, where they are not the class's defaults.
        others: checkpoints with the same tower but for the width of its output.
        only_images: it takes frames as images, one row of the grid each.
    """

    class_name: str
    model: str
    numbers: dict[str, Any]
    others: str = ""
    only_images: bool = False


_QWEN25 = {"hidden_size": 1280, "out_hidden_size": 3584}
_QWEN3: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_DEEPSTACK = {"deepstack_visual_indexes": [8, 16, 24]}
GEOMETRIES = {
    "Qwen2-VL-7B": Geometry("Qwen2VisionTransformerPretrainedModel", "qwen2_vl", {"hidden_size": 3584}, "2B, 72B"),
    "Qwen2.5-VL-7B": Geometry(
        "Qwen2_5_VisionTransformerPretrainedModel", "qwen2_5_vl", _QWEN25, "3B; 32B and 72B with an MLP of 3456"
    ),
    "Qwen2.5-Omni-7B": Geometry("Qwen2_5OmniVisionEncoder", "qwen2_5_omni", _QWEN25),
    "Qwen3-VL-8B": Geometry(
        "Qwen3VLVisionModel", "qwen3_vl", _QWEN3 | _DEEPSTACK | {"out_hidden_size": 4096}, "32B, 30B-A3B, 235B-A22B"
    ),
    "Qwen3-VL-4B": Geometry(
        "Qwen3VLVisionModel",
        "qwen3_vl",
        _QWEN3
        | {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        "2B",
    ),
    "Qwen3-Omni-30B-A3B": Geometry(
        "Qwen3OmniMoeVisionEncoder", "qwen3_omni_moe", _QWEN3 | _DEEPSTACK | {"out_hidden_size": 2048}
    ),
    "Qwen3.5-9B": Geometry(
        "Qwen3_5VisionModel", "qwen3_5", _QWEN3 | {"out_hidden_size": 4096}, "27B, 35B-A3B, 122B-A10B, 397B-A17B"
    ),
    "GLM-4.1V-9B": Geometry("Glm4vVisionModel", "glm4v", {}, "4.5V with a merger of 10944", only_images=True),
    "GLM-OCR": Geometry("GlmOcrVisionModel", "glm_ocr", {}),
    "GLM-5.3-Flash": Geometry("Glm5NextVisionModel", "glm5_next", {}),
    "EXAONE-4.5-33B": Geometry(
        "Exaone4_5_VisionModel",
        "exaone4_5",
        {
            "depth": 28,
            "hidden_size": 2048,
            "num_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 5120,
            "out_hidden_size": 5120,
            "fullatt_block_indexes": [6, 13, 20, 27],
        },
    ),
    "ERNIE-4.5-VL-28B-A3B": Geometry("Ernie4_5_VLMoeVisionTransformerPretrainedModel", "ernie4_5_vl_moe", {}),
}


def class_of(geometry: Geometry) -> Any:
    """The tower's class; None where the installed transformers has no such model."""
    if importlib.util.find_spec(f"transformers.models.{geometry.model}") is None:
        return None
    module = importlib.import_module(f"transformers.models.{geometry.model}.modeling_{geometry.model}")
    return getattr(module, geometry.class_name)


def shallow(geometry: Geometry, depth: int) -> Geometry:
    """The same widths `depth` blocks deep; blocks that are named keep their share of the way."""
    config = class_of(geometry).config_class(**geometry.numbers)
    numbers = geometry.numbers | {"depth": depth}
    for name in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        if hasattr(config, name):
            numbers[name] = [block * depth // config.depth for block in getattr(config, name)]
    return replace(geometry, numbers=numbers)


def spec_of(geometry: Geometry) -> VisionSpec:
    """The spec of a geometry whose class is installed."""
    cls = class_of(geometry)
    family = family_of(geometry.class_name)
    assert cls is not None and family is not None, f"{geometry.class_name} is not here, or of no family"
    return family.spec_from_config(cls.config_class(**geometry.numbers))


def build(geometry: Geometry, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """(tower in `dtype`, the same rounded weights in the next wider type), Hugging Face's own modules on `sdpa`."""
    tower = build_one(geometry, dtype, device, seed)
    wide = copy.deepcopy(tower)
    cast_parameters_(wide, wider(dtype))
    return tower, wide


def build_one(geometry: Geometry, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """A tower in `dtype`, Hugging Face's own module on `sdpa`."""
    cls = class_of(geometry)
    config = cls.config_class(**geometry.numbers)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        tower: nn.Module = cls(config).eval()
    random_weights_(tower, seed, device)
    cast_parameters_(tower, dtype)
    return tower
