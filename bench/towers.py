"""Towers at released geometries with random weights, and what compares their outputs."""

import copy
import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusedvit.bench.workloads import Grid, tokens
from fusedvit.cli.towers import cast_parameters_, random_weights_
from fusedvit.families.registry import family_of
from fusedvit.model.spec import VisionSpec
from fusedvit.tolerance import compare


@dataclass(frozen=True)
class Geometry:
    """A released tower.

    Attributes:
        class_name: of the tower.
        model: the model that holds it, as transformers names its folder.
        numbers: its config, where it differs from the class's defaults.
        others: checkpoints with the same tower, up to the width of its output.
        only_images: it takes every frame as an image, with its own row of the grid.
        merge: patches on a side of a merged token.
    """

    class_name: str
    model: str
    numbers: dict[str, Any]
    others: str = ""
    only_images: bool = False
    merge: int = 2

    def but(self, **numbers: Any) -> "Geometry":
        """The same with other numbers in its config."""
        return replace(self, numbers=self.numbers | numbers)

    def rows(self, grid: Grid) -> Grid:
        """`grid` as the tower takes it: for some, every frame is an image, or sides go to the nearest multiple of 3."""
        if self.merge != 2:
            near = [[max(1, round(side / self.merge)) * self.merge for side in (h, w)] for _, h, w in grid]
            grid = [(t, h, w) for (t, _, _), (h, w) in zip(grid, near, strict=True)]
        return [(1, h, w) for t, h, w in grid for _ in range(t)] if self.only_images else grid


_QWEN25 = {"hidden_size": 1280, "out_hidden_size": 3584}
_DEEPSTACK = {"deepstack_visual_indexes": [8, 16, 24]}
_QWEN3_VL = "Qwen3VLVisionModel", "qwen3_vl"
_QWEN3_VL_4B = Geometry(
    *_QWEN3_VL,
    {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "2B",
)
GEOMETRIES = {
    "Qwen2-VL-7B": Geometry("Qwen2VisionTransformerPretrainedModel", "qwen2_vl", {"hidden_size": 3584}, "2B, 72B"),
    "Qwen2.5-VL-7B": Geometry(
        "Qwen2_5_VisionTransformerPretrainedModel", "qwen2_5_vl", _QWEN25, "3B; 32B and 72B with an MLP of 3456"
    ),
    "Qwen2.5-Omni-7B": Geometry("Qwen2_5OmniVisionEncoder", "qwen2_5_omni", _QWEN25),
    "Qwen3-VL-8B": Geometry(*_QWEN3_VL, _DEEPSTACK | {"out_hidden_size": 4096}, "32B, 30B-A3B, 235B-A22B"),
    "Qwen3-VL-4B": _QWEN3_VL_4B,
    "Qwen3-Omni-30B-A3B": Geometry(
        "Qwen3OmniMoeVisionEncoder", "qwen3_omni_moe", _DEEPSTACK | {"out_hidden_size": 2048}
    ),
    "Qwen3.5-9B": Geometry(
        "Qwen3_5VisionModel",
        "qwen3_5",
        {"out_hidden_size": 4096},
        "27B, 35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B, Qwen3.8-27B",
    ),
    "Qwen3.5-2B": Geometry(
        "Qwen3_5VisionModel",
        "qwen3_5",
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048},
        "4B",
    ),
    "Qwen3.5-0.8B": Geometry(
        "Qwen3_5VisionModel",
        "qwen3_5",
        {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072, "out_hidden_size": 1024},
    ),
    "Qwen4-Exp": Geometry("Qwen4ExpVisionModel", "qwen4_exp", {"out_hidden_size": 2560}),
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
    "Gemma-4-31B": Geometry(
        "Gemma4VisionModel",
        "gemma4",
        {
            "num_hidden_layers": 27,
            "hidden_size": 1152,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "intermediate_size": 4304,
            "standardize": True,
        },
        "26B-A4B",
        only_images=True,
        merge=3,
    ),
    "Gemma-4-E4B": Geometry(
        "Gemma4VisionModel", "gemma4", {"use_clipped_linears": True}, "E2B", only_images=True, merge=3
    ),
    "ERNIE-4.5-VL-28B-A3B": Geometry("Ernie4_5_VLMoeVisionTransformerPretrainedModel", "ernie4_5_vl_moe", {}),
    "Qwen3-VL-2B": _QWEN3_VL_4B.but(out_hidden_size=2048),
    "tiny": Geometry(
        *_QWEN3_VL,
        {
            "depth": 2,
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 280,
            "out_hidden_size": 96,
            "deepstack_visual_indexes": [0],
        },
    ),
}
FAMILIES = [name for name in GEOMETRIES if name not in ("Qwen3-VL-2B", "tiny")]  # different towers of every family


def class_of(geometry: Geometry) -> Any:
    """The tower's class; None where the installed transformers has no such model."""
    if importlib.util.find_spec(f"transformers.models.{geometry.model}") is None:
        return None
    module = importlib.import_module(f"transformers.models.{geometry.model}.modeling_{geometry.model}")
    return getattr(module, geometry.class_name)


def shallow(geometry: Geometry, depth: int) -> Geometry:
    """The same widths with `depth` blocks; blocks that the config names by index keep their relative depth."""
    config = class_of(geometry).config_class(**geometry.numbers)
    named = [name for name in ("deepstack_visual_indexes", "fullatt_block_indexes") if hasattr(config, name)]
    numbers = {name: [block * depth // config.depth for block in getattr(config, name)] for name in named}
    return geometry.but(**{depth_name(config): depth}, **numbers)


def depth_name(config: Any) -> str:
    """What a config calls its number of blocks."""
    return "depth" if hasattr(config, "depth") else "num_hidden_layers"


def spec_of(geometry: Geometry) -> VisionSpec:
    """The spec of a geometry whose class is installed."""
    cls = class_of(geometry)
    family = family_of(geometry.class_name)
    assert cls is not None and family is not None, f"{geometry.class_name} is not installed, or of no family"
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


def known() -> list[str]:
    """Names of geometries that the installed transformers has."""
    return [name for name, geometry in GEOMETRIES.items() if class_of(geometry) is not None]


def wider(dtype: torch.dtype) -> torch.dtype:
    """The type that the tolerance rule computes its reference in."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def shared_copy(tower: nn.Module) -> nn.Module:
    """Another module of the same class on the same parameters, to be fused or compiled by itself."""
    config: Any = tower.config
    with torch.device("meta"):
        other = type(tower)(config).eval()
    other.load_state_dict(tower.state_dict(), assign=True)
    modules = dict(tower.named_modules())
    for path, module in other.named_modules():  # buffers that are in no state_dict
        module._buffers |= {name: modules[path]._buffers[name] for name in module._non_persistent_buffers_set}
    return other


def patch_width(tower: nn.Module) -> int:
    """Values of a flattened patch."""
    config: Any = tower.config
    return int(getattr(config, "in_channels", 3) * getattr(config, "temporal_patch_size", 1) * config.patch_size**2)


def pixels_for(tower: nn.Module, grid: Grid, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Random normalised pixels `[tokens, patch_width]`, drawn in fp32: the same for every tower of a patch width."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tokens(grid), patch_width(tower), device=device, generator=generator).to(dtype)


def verdict_of(ours: list[torch.Tensor], ref: list[torch.Tensor], pt: list[torch.Tensor]) -> dict[str, Any]:
    """The tolerance rule over all outputs, and the worst error ratios."""
    verdicts = [compare(*outputs) for outputs in zip(ours, ref, pt, strict=True)]
    return {
        "passed": all(v.passed for v in verdicts),
        "reason": next((v.reason for v in verdicts if not v.passed), ""),
        "largest": max(v.ratio_max for v in verdicts),
        "rms": max(v.ratio_rms for v in verdicts),
    }


def outputs_of(outputs: Any) -> list[torch.Tensor]:
    """Every tensor that a tower returns."""
    return [
        *(outputs[name] for name in ("last_hidden_state", "pooler_output") if outputs.get(name) is not None),
        *(outputs.get("deepstack_features") or []),
    ]
