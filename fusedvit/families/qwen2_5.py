"""Qwen2.5-VL and the families that use its tower: RMSNorm, SwiGLU, window attention, full attention in a few blocks.

Qwen2.5-Omni has separate linear layers for q, k and v. EXAONE 4.5 uses grouped-query attention.
"""

from dataclasses import replace
from typing import Any

from fusedvit.families.base import GATED, GATED_NAMES, Family, spec_with
from fusedvit.model.spec import VisionSpec

SEPARATE_QKV_NAMES = replace(GATED_NAMES, qkv=tuple(f"blocks.{{}}.attn.{part}" for part in "qkv"))


def spec_from_config(config: Any) -> VisionSpec:
    """The spec of a `vision_config` of Qwen2.5-VL or Omni. A window is rounded down to whole merged tokens.

    Raises:
        ValueError: the activation is not SiLU, or the window is smaller than a merged token.
    """
    pixels = config.patch_size * config.spatial_merge_size  # side of a merged token
    if config.window_size < pixels:  # Hugging Face's code divides by 0
        raise ValueError(f"window_size must be at least {pixels} (a merged token), got {config.window_size}")
    return spec_with(
        config,
        GATED,
        norm="rms",
        window=config.window_size // pixels,
        full_attention=tuple(sorted(set(config.fullatt_block_indexes) & set(range(config.depth)))),
        without_bias=("patch",),
    )


def exaone_spec(config: Any) -> VisionSpec:
    """The spec of EXAONE 4.5. Raises ValueError, as `spec_from_config`."""
    return replace(spec_from_config(config), kv_heads=config.num_key_value_heads)


FAMILIES = (
    Family(
        name="Qwen2.5-VL",
        class_names=("Qwen2_5_VisionTransformerPretrainedModel",),
        spec_from_config=spec_from_config,
        names=GATED_NAMES,
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
        spec_from_config=exaone_spec,
        names=GATED_NAMES,
    ),
)
