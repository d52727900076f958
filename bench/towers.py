"""Qwen3-VL's towers at released geometries with random weights, and what compares their outputs."""

from typing import Any

import torch
from torch import nn

from fusedvit.cli.towers import cast_parameters_, random_weights_
from fusedvit.families.registry import family_of
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights
from fusedvit.tolerance import compare

GEOMETRIES: dict[str, dict[str, Any]] = {
    "Qwen3-VL-8B": {
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "Qwen3-VL-2B": {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tiny": {
        "depth": 2,
        "hidden_size": 144,
        "num_heads": 2,
        "intermediate_size": 280,
        "out_hidden_size": 96,
        "deepstack_visual_indexes": [0],
    },
}
COMMON = {"patch_size": 16, "num_position_embeddings": 2304}


def build(
    geometry: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """(tower in `dtype`, the same rounded weights in the next wider type), Hugging Face's modules on `sdpa`."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(**COMMON, **geometry)
    config._attn_implementation = "sdpa"
    with torch.device(device):  # half a billion numbers drawn twice take a CPU ten seconds
        tower = Qwen3VLVisionModel(config).eval()
    random_weights_(tower, seed, device)
    cast_parameters_(tower, dtype)
    wide = shared_copy(tower)
    cast_parameters_(wide, wider(dtype))
    return tower, wide


def prepared(tower: nn.Module) -> tuple[VisionSpec, EncoderWeights]:
    """The encoder's spec of `tower` and its prepared weights."""
    family = family_of(type(tower).__name__)
    assert family is not None, f"{type(tower).__name__} is of no family"
    spec = family.spec_from_config(tower.config)
    return spec, prepare(spec, family.names, family.source(dict(tower.named_parameters())))


def wider(dtype: torch.dtype) -> torch.dtype:
    """The type that the tolerance rule computes its reference in."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def shared_copy(tower: nn.Module) -> nn.Module:
    """Another module of the same class on the same parameters, to be fused or compiled by itself."""
    config: Any = tower.config
    with torch.device("meta"):
        other = type(tower)(config).eval()
    other.load_state_dict(tower.state_dict(), assign=True)
    other.rotary_pos_emb = tower.rotary_pos_emb  # whose buffers are in no state_dict
    return other


def patch_width(tower: nn.Module) -> int:
    """Values of a flattened patch."""
    config: Any = tower.config
    return int(config.in_channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2)


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
