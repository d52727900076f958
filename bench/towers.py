"""The towers that are measured: real geometries with random weights, and further modules on the same parameters."""

from typing import Any

import torch
from torch import nn

from fusedvit.cli.towers import cast_parameters_, random_weights_
from fusedvit.families.registry import family_of
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights

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


def build(
    geometry: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """(tower in `dtype`, the same rounded weights in the next wider type), Hugging Face's own modules on `sdpa`."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(patch_size=16, num_position_embeddings=2304, **geometry)
    config._attn_implementation = "sdpa"
    with torch.device(device):  # half a billion numbers drawn twice take a CPU ten seconds
        tower = Qwen3VLVisionModel(config).eval()
    random_weights_(tower, seed, device)
    cast_parameters_(tower, dtype)
    wide = twin(tower)
    cast_parameters_(wide, wider(dtype))
    return tower, wide


def prepared(tower: nn.Module) -> tuple[VisionSpec, EncoderWeights]:
    """What the encoder knows of `tower`, and its weights as the kernels want them."""
    family = family_of(type(tower).__name__)
    assert family is not None, f"{type(tower).__name__} is of no family"
    spec = family.spec_from_config(tower.config)
    return spec, prepare(spec, family.names, family.source(dict(tower.named_parameters())))


def wider(dtype: torch.dtype) -> torch.dtype:
    """The type of the reference by the tolerance rule."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def twin(tower: nn.Module) -> nn.Module:
    """Another module of Hugging Face's on the same parameters, to be fused or compiled by itself."""
    config: Any = tower.config
    with torch.device("meta"):
        other = type(tower)(config).eval()
    other.load_state_dict(tower.state_dict(), assign=True)
    other.rotary_pos_emb = tower.rotary_pos_emb  # whose buffers are in no state_dict
    return other


def with_linear_patches(tower: nn.Module) -> nn.Module | None:
    """A twin with what `fusion_config={"patch_embeddings": True}` does at loading; None where transformers lacks it, or
    the tower's patch embedding is not Qwen3-VL's."""
    if type(tower).__name__ != "Qwen3VLVisionModel":
        return None
    try:
        from transformers.fusion_mapping import PatchEmbeddingsFusionSpec
    except ImportError:
        return None
    other: Any = twin(tower)
    convolution = other.patch_embed.proj
    with torch.device("meta"):
        fused = PatchEmbeddingsFusionSpec().make_fused_class(type(other.patch_embed))(other.config)
    fused.linear_proj.weight = nn.Parameter(convolution.weight.detach().flatten(1))
    fused.linear_proj.bias = convolution.bias
    other.patch_embed = fused
    return other


def patch_width(tower: nn.Module) -> int:
    """Values of a flattened patch."""
    config: Any = tower.config
    return int(config.in_channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2)
