"""A tiny tower of every registered class, with random weights of different scales."""

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from fusedvit.bench.towers import random_weights_
from fusedvit.families.registry import family_of

# Heads of 24 are no power of two; 70 floats are no multiple of 16 bytes.
_QWEN2: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 48,
    "hidden_size": 40,
    "mlp_ratio": 2,
    "num_heads": 2,
    "patch_size": 4,
}
_QWEN3: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 40,
    "num_position_embeddings": 36,
}
_QWEN25: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 71,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 40,
    "window_size": 32,  # 8 x 8 patches, as in the released towers
    "fullatt_block_indexes": [1, 7],  # the second of them is past the last block
}
_GLM: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 40,
    "intermediate_size": 70,
    "image_size": 24,
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 40,
    "use_clipped_linears": True,
    "standardize": True,
}
_DEEPSTACK = _QWEN3 | {"deepstack_visual_indexes": [0, 1]}

# Tower class: the model that it is of, and its tiny config.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2VisionTransformerPretrainedModel": ("qwen2_vl", _QWEN2),
    "Qwen3VLVisionModel": ("qwen3_vl", _DEEPSTACK),
    "Qwen3VLMoeVisionModel": ("qwen3_vl_moe", _DEEPSTACK),
    "Qwen3_5VisionModel": ("qwen3_5", _QWEN3),
    "Qwen3_5MoeVisionModel": ("qwen3_5_moe", _QWEN3),
    "Qwen4ExpVisionModel": ("qwen4_exp", _QWEN3),
    "CohereCompassVisionModel": ("cohere_compass", _DEEPSTACK),
    "Qwen3OmniMoeVisionEncoder": ("qwen3_omni_moe", _DEEPSTACK),
    "Qwen2_5_VisionTransformerPretrainedModel": ("qwen2_5_vl", _QWEN25),
    "Qwen2_5OmniVisionEncoder": ("qwen2_5_omni", _QWEN25),
    "Exaone4_5_VisionModel": ("exaone4_5", _QWEN25 | {"hidden_size": 96, "num_heads": 4, "num_key_value_heads": 2}),
    "Ernie4_5_VLMoeVisionTransformerPretrainedModel": (
        "ernie4_5_vl_moe",
        {"depth": 2, "hidden_size": 48, "intermediate_size": 70, "num_heads": 2, "patch_size": 4},
    ),
    "Glm4vVisionModel": ("glm4v", _GLM),
    "Glm4vMoeVisionModel": ("glm4v_moe", _GLM),
    "GlmOcrVisionModel": ("glm_ocr", _GLM),
    "Gemma4VisionModel": ("gemma4", _GEMMA4),
    "Glm5NextVisionModel": ("glm5_next", _GLM | {"projection_intermediate_size": 90, "swiglu_limit": 0.5}),
}


def is_installed(name: str) -> bool:
    """Whether this version of transformers has the tower class at all."""
    return importlib.util.find_spec(f"transformers.models.{TINY[name][0]}") is not None


INSTALLED = [name for name in TINY if is_installed(name)]
BY_GRID = [name for name in INSTALLED if family_of(name).call is None]  # others have arguments of their own
# One class per shape of encoder; the others differ in names of modules and parameters.
SHAPES = [
    name
    for name in (
        "Qwen2VisionTransformerPretrainedModel",
        "Qwen3VLVisionModel",
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Exaone4_5_VisionModel",
        "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
        "Glm4vVisionModel",
        "Glm5NextVisionModel",
        "Gemma4VisionModel",
    )
    if name in INSTALLED
]


def each_of(names: Sequence[str]) -> pytest.MarkDecorator:
    """A test of each of these classes; `make test` runs it for one of each shape."""
    shaped = [name if name in SHAPES else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", shaped)


def class_of(name: str) -> Any:
    """The tower class of this name."""
    model = TINY[name][0]
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def family_tower(name: str, seed: int = 0, **vision: Any) -> Any:
    """A tower of the class `name`, frozen, in fp32, random weights; `vision` overrides its tiny config."""
    cls = class_of(name)
    if "depth" in vision and "num_hidden_layers" in TINY[name][1]:
        vision["num_hidden_layers"] = vision.pop("depth")
    tower = cls._from_config(cls.config_class(**(TINY[name][1] | vision))).eval().requires_grad_(False)
    random_weights_(tower, seed)
    return tower
