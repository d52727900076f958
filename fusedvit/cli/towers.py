"""The tower that a command looks at: one with random weights, or that of a user's checkpoint."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedvit.cli.processors import PatchLayout
from fusedvit.cli.weights import cast_parameters_, random_weights_
from fusedvit.errors import UnsupportedModel

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
    """A tower in place: `module` is the tower, `model` what fusedvit.fuse is called with (the tower, or its owner)."""

    name: str
    module: nn.Module
    model: nn.Module
    dtype: torch.dtype

    @property
    def geometry(self) -> dict[str, Any]:
        keys = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size", "deepstack_visual_indexes")
        return {key: getattr(self.module.config, key, None) for key in keys}

    @property
    def layout(self) -> PatchLayout:
        """The family's preprocessing: towers with patches of 14 (Qwen2, GLM) use CLIP's mean and deviation."""
        config: Any = self.module.config
        patch, merge, frames = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        if patch == 14:
            clip_mean, clip_std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
            return PatchLayout(patch, frames, merge, clip_mean, clip_std)
        return PatchLayout(patch, frames, merge)


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
    return Tower(name, module, module, dtype)


def checkpoint_tower(model_id: str, device: torch.device) -> Tower:
    """The tower of a checkpoint (a folder or a hub name), loaded as its users load it.

    Raises:
        UnsupportedModel: the model holds no module that takes `grid_thw`.
    """
    from transformers import AutoModelForImageTextToText

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(model_id, dtype=dtype).eval().to(device)
    return Tower(model_id, find_tower(model), model, dtype)


def find_tower(model: nn.Module) -> nn.Module:
    """The outermost module called `visual` or `vision_...` whose forward takes `grid_thw`.

    Raises:
        UnsupportedModel: there is none.
    """
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name.startswith(("visual", "vision_")) and "grid_thw" in inspect.signature(module.forward).parameters:
            return module
    raise UnsupportedModel(f"{type(model).__name__} holds no vision tower that takes grid_thw")
