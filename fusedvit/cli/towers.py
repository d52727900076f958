"""The tower that a command looks at: one with random weights, or that of a user's checkpoint."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedvit.cli.processors import PatchLayout
from fusedvit.cli.weights import cast_parameters_, random_weights_

QWEN3_VL_8B: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
}
TINY: dict[str, Any] = {  # head dim 72 as the 8B's, intermediate size no multiple of 16
    "depth": 4,
    "hidden_size": 144,
    "num_heads": 2,
    "intermediate_size": 280,
    "out_hidden_size": 96,
    "deepstack_visual_indexes": [1, 2],
}


@dataclass(frozen=True)
class Tower:
    """A model to fuse: a tower, or what holds one. `dtype` is that of its parameters."""

    name: str
    model: nn.Module
    dtype: torch.dtype


def random_tower(device: torch.device, seed: int = 0) -> Tower:
    """Qwen3-VL-8B's tower in bf16 on a GPU; a small relative of it in fp32 on a CPU. Weights are random."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    on_gpu = device.type == "cuda"
    module = Qwen3VLVisionModel(Qwen3VLVisionConfig(**(QWEN3_VL_8B if on_gpu else TINY))).eval()
    random_weights_(module, seed)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    cast_parameters_(module, dtype)
    module.to(device)
    name = "Qwen3-VL-8B's tower, random weights" if on_gpu else "a small Qwen3-VL tower, random weights"
    return Tower(name, module, dtype)


def checkpoint_tower(model_id: str, device: torch.device) -> Tower:
    """A checkpoint (a folder or a hub name), loaded as its users load it. Raises OSError where there is none."""
    from transformers import AutoModelForImageTextToText

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(model_id, dtype=dtype).eval().to(device)
    return Tower(model_id, model, dtype)


def geometry_of(module: nn.Module) -> dict[str, Any]:
    """The numbers of a tower's config that say how large it is."""
    keys = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size", "deepstack_visual_indexes")
    return {key: getattr(module.config, key, None) for key in keys}


def layout_of(module: nn.Module) -> PatchLayout:
    """A tower's preprocessing. Those with patches of 14 (Qwen2, GLM) use CLIP's mean and deviation, later ones 0.5."""
    config: Any = module.config
    sizes = config.patch_size, config.temporal_patch_size, config.spatial_merge_size
    if config.patch_size == 14:
        clip_mean, clip_std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        return PatchLayout(*sizes, clip_mean, clip_std)
    return PatchLayout(*sizes)
