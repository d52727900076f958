"""Towers at released geometries with random weights, and comparisons of their outputs."""

import copy
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from einops import rearrange
from torch import nn

from fusedvit.bench.workloads import Grid, tokens
from fusedvit.checks.ownership import own_class
from fusedvit.families.base import Family
from fusedvit.families.registry import family_of
from fusedvit.model.spec import VisionSpec
from fusedvit.tolerance import compare


@dataclass(frozen=True)
class Geometry:
    """A released tower.

    Attributes:
        class_name: the tower's class.
        model: the model that holds the tower, as transformers names its folder.
        numbers: its config, as far as it differs from the class's defaults.
        others: checkpoints with the same tower, except for the width of its output.
        only_images: the tower takes every frame as an image, with its own row of the grid.
        merge: patches on a side of a merged token.
    """

    class_name: str
    model: str
    numbers: dict[str, Any]
    others: str = ""
    only_images: bool = False
    merge: int = 2

    def but(self, **numbers: Any) -> "Geometry":
        """The same geometry with other numbers in its config."""
        return replace(self, numbers=self.numbers | numbers)

    def rows(self, grid: Grid) -> Grid:
        """`grid` as the tower takes it: for some, every frame is an image, or sides are rounded to multiples of 3."""
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
MOST_USED = ("Qwen3-VL-8B", "Qwen3-VL-2B")


def class_of(geometry: Geometry) -> Any:
    """The tower's class; None if the installed transformers has no such model."""
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
    """The name of the number of blocks in a config."""
    return "depth" if hasattr(config, "depth") else "num_hidden_layers"


def family_and_spec(geometry: Geometry) -> tuple[Family, VisionSpec]:
    """The family and the spec of a geometry whose class is installed."""
    cls = class_of(geometry)
    family = family_of(geometry.class_name)
    assert cls is not None and family is not None, f"{geometry.class_name} is not installed, or of no family"
    return family, family.spec_from_config(cls.config_class(**geometry.numbers))


def spec_of(geometry: Geometry) -> VisionSpec:
    """The spec of a geometry whose class is installed."""
    return family_and_spec(geometry)[1]


def build(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """(tower in `dtype`, the same rounded weights in the next wider type): Hugging Face's own modules with `sdpa`."""
    tower = build_one(geometry, dtype, device)
    wide = copy.deepcopy(tower)
    cast_parameters_(wide, wider(dtype))
    return tower, wide


def build_one(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A tower in `dtype`: Hugging Face's own module with `sdpa`."""
    cls = class_of(geometry)
    config = cls.config_class(**geometry.numbers)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        tower: nn.Module = cls(config).eval()
    random_weights_(tower, device=device)
    cast_parameters_(tower, dtype)
    return tower


def known() -> list[str]:
    """Names of geometries that the installed transformers has."""
    return [name for name, geometry in GEOMETRIES.items() if class_of(geometry) is not None]


def wider(dtype: torch.dtype) -> torch.dtype:
    """The type in which the tolerance rule computes its reference."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def shared_copy(tower: nn.Module) -> nn.Module:
    """Another module of the same class with the same parameters, which can be fused or compiled on its own."""
    config: Any = tower.config
    with torch.device("meta"):
        other = type(tower)(config).eval()
    other.load_state_dict(tower.state_dict(), assign=True)
    modules = dict(tower.named_modules())
    for path, module in other.named_modules():  # state_dict lacks these buffers
        module._buffers |= {name: modules[path]._buffers[name] for name in module._non_persistent_buffers_set}
    return other


def patch_width(tower: nn.Module) -> int:
    """The number of values of a flattened patch."""
    config: Any = tower.config
    return int(getattr(config, "in_channels", 3) * getattr(config, "temporal_patch_size", 1) * config.patch_size**2)


def pixels_for(tower: nn.Module, grid: Grid, seed: int = 0) -> torch.Tensor:
    """Random normalised pixels `[tokens, patch_width]` as the tower's parameters are, drawn in fp32: the same for all
    towers with one patch width."""
    weight = next(tower.parameters())
    generator = torch.Generator(weight.device).manual_seed(seed)
    return torch.randn(tokens(grid), patch_width(tower), device=weight.device, generator=generator).to(weight.dtype)


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


# ── random weights, and calls of towers of any family ─────────────────────────────────────────────────────────────────


def call_tower(tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor, **arguments: Any) -> Any:
    """Calls a tower of any family on rows of patches; towers that take padded images get every frame as an image.

    Args:
        pixels: `[tokens, patch_width]`, patches of merged tokens side by side.
        grid: `[items, 3]` integers (t, h, w), on the device of `pixels`.
        arguments: the call's other arguments.
    """
    inputs, named = inputs_of(tower, pixels, grid)
    return tower(inputs, **named, **arguments)


def inputs_of(
    tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The arguments with which `call_tower` calls a tower: pixels, and the grid or positions by name."""
    own = getattr(tower, "_orig_mod", tower)  # of a tower that torch.compile has wrapped
    family, config = family_of(own_class(type(own)).__name__), cast(Any, tower.config)
    if family is None or family.call is None:
        return pixels, {"grid_thw": grid}
    images, positions = padded_images(pixels, grid.tolist(), config.pooling_kernel_size)
    return images, {"pixel_position_ids": positions}


def padded_images(pixels: torch.Tensor, grid: Sequence[Sequence[int]], merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of patches as `[images, patches, patch_width]` from 0 to 1, row by row, and the patches' positions.

    The largest image has one merged token of padding.

    Args:
        pixels: `[tokens, patch_width]` from -1 to 1, patches of merged tokens side by side.
        grid: (t, h, w) of items; frames become images.
        merge: patches on a side of a merged token.
    """
    frames = [(h, w) for t, h, w in grid for _ in range(t)]
    most = max((h * w for h, w in frames), default=0) + merge**2
    images = pixels.new_zeros(len(frames), most, pixels.shape[1])
    positions = torch.full((len(frames), most, 2), -1, device=pixels.device)
    for i, (rows, (h, w)) in enumerate(zip(pixels.split([h * w for h, w in frames]), frames, strict=True)):
        raster = rearrange(rows, "(bh bw mh mw) c -> (bh mh bw mw) c", mh=merge, mw=merge, bh=h // merge, bw=w // merge)
        images[i, : h * w] = raster / 2 + 0.5
        at = torch.arange(h * w, device=pixels.device)
        positions[i, : h * w] = torch.stack([at % w, at // w], 1)
    return images, positions


def random_weights_(module: nn.Module, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Fill every parameter of `module` in place. Values drawn on the CPU are the same for a seed on every machine.

    Drawing on another `device` is faster; values are then the same on machines that have that device.

    Hugging Face's initialisation has zero biases and norms that do nothing, so a fused tower that forgets them would
    look right. Here matrices keep the variance of their inputs (std = 1 / sqrt(fan in), 0.029 for 1152 inputs), norm
    weights spread around 1, and biases are small and not zero.
    """
    generator = torch.Generator(device).manual_seed(seed)
    norms = {id(p) for m in module.modules() if _is_norm(m) for p in m.parameters(recurse=False)}
    _random_buffers_(module)
    for name, parameter in module.named_parameters():
        mean, std = 0.0, 0.05  # a bias
        if id(parameter) in norms and name.endswith("weight"):
            mean, std = 1.0, 0.2
        elif parameter.ndim > 1:
            std = 0.3 if "pos_embed" in name or "position_embedding" in name else 1.0 / math.sqrt(parameter[0].numel())
        values = torch.normal(mean, std, parameter.shape, generator=generator, device=device)
        with torch.no_grad():
            parameter.copy_(values)


def _random_buffers_(module: nn.Module) -> None:
    """Fills Gemma 4's buffers: the standardisation of its tokens, and bounds that clip tails of values of order 1."""
    values = {"std_bias": 0.1, "std_scale": 1.2, "input_min": -2.0, "input_max": 1.75, "output_min": -2.5}
    for path, buffer in module.named_buffers():
        value = (values | {"output_max": 3.0}).get(path.rpartition(".")[2])
        if value is not None:
            ramp = torch.linspace(0.5, 1.5, buffer.numel(), device=buffer.device).view(buffer.shape)
            buffer.copy_(value * ramp if buffer.numel() > 1 else torch.full_like(buffer, value))


def cast_parameters_(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, in place, and leave buffers alone.

    `module.to(dtype)` would round the rotary frequencies as well, which loading a checkpoint in `dtype` does not.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
