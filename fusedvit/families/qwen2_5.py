"""Qwen2.5-VL and the families that use its tower: RMSNorm, SwiGLU, window attention, full attention in a few blocks.

Qwen2.5-Omni has separate linear layers for q, k and v. EXAONE 4.5 uses grouped-query attention.
"""

from dataclasses import replace
from typing import Any

from fusedvit.families.base import Family, activation_of, spec_with
from fusedvit.model.param_names import MergerNames, WeightNames
from fusedvit.model.spec import VisionSpec

NAMES = WeightNames(
    patch="patch_embed.proj",
    norm1="blocks.{}.norm1",
    qkv=("blocks.{}.attn.qkv",),
    proj="blocks.{}.attn.proj",
    norm2="blocks.{}.norm2",
    fc1=("blocks.{}.mlp.gate_proj", "blocks.{}.mlp.up_proj"),
    fc2="blocks.{}.mlp.down_proj",
    act="blocks.{}.mlp.act_fn",
    merger=MergerNames("merger.ln_q", "merger.mlp.0", "merger.mlp.2", "merger.mlp.1"),
)
SEPARATE_QKV_NAMES = replace(NAMES, qkv=tuple(f"blocks.{{}}.attn.{part}" for part in "qkv"))


def spec_from_config(config: Any) -> VisionSpec:
    """The spec behind a `vision_config` of these families.

    Raises:
        ValueError: an activation other than SiLU, or a window that is no multiple of a merged token.
    """
    pixels = config.patch_size * config.spatial_merge_size  # side of a merged token
    if config.window_size < pixels or config.window_size % pixels:
        raise ValueError(f"window_size must be a multiple of {pixels} (a merged token), got {config.window_size}")
    return spec_with(
        config,
        config.hidden_size,
        intermediate_size=config.intermediate_size,
        out_size=config.out_hidden_size,
        temporal_patch_size=config.temporal_patch_size,
        activation=activation_of(config.hidden_act, {"silu": "swiglu"}),
        norm="rms",
        kv_heads=getattr(config, "num_key_value_heads", 0),
        window=config.window_size // pixels,
        full_attention=tuple(sorted(set(config.fullatt_block_indexes) & set(range(config.depth)))),
        without_bias=("patch",),
    )


FAMILIES = (
    Family(
        name="Qwen2.5-VL",
        class_names=("Qwen2_5_VisionTransformerPretrainedModel",),
        spec_from_config=spec_from_config,
        names=NAMES,
        also_in=("hyperclovax_vision_v2",),
    ),
    Family(
        name="Qwen2.5-Omni",
        class_names=("Qwen2_5OmniVisionEncoder",),
        spec_from_config=spec_from_config,
        names=SEPARATE_QKV_NAMES,
    ),
    Family(
        name="EXAONE 4.5",
        class_names=("Exaone4_5_VisionModel",),
        spec_from_config=spec_from_config,
        names=NAMES,
    ),
)
