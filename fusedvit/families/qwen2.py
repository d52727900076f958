"""Qwen2-VL and ERNIE 4.5 VL: LayerNorm, quick GELU, head_dim 80, no position table.

ERNIE's tower takes single frames and ends with a norm: its token merger is a module outside the tower.
"""

from dataclasses import replace
from typing import Any

from fusedvit.families.base import GELUS, Family, activation_of, spec_with
from fusedvit.model.param_names import LastNormNames, MergerNames, WeightNames
from fusedvit.model.spec import VisionSpec

NAMES = WeightNames(
    patch="patch_embed.proj",
    norm1="blocks.{}.norm1",
    qkv=("blocks.{}.attn.qkv",),
    proj="blocks.{}.attn.proj",
    norm2="blocks.{}.norm2",
    fc1=("blocks.{}.mlp.fc1",),
    fc2="blocks.{}.mlp.fc2",
    act="blocks.{}.mlp.act",
    merger=MergerNames("merger.ln_q", "merger.mlp.0", "merger.mlp.2", "merger.mlp.1"),
)

ERNIE_NAMES = replace(NAMES, merger=LastNormNames("ln"))


def spec_from_config(config: Any) -> VisionSpec:
    """The spec behind a `vision_config` of this family, whose `hidden_size` is the language model's.

    Raises:
        ValueError: an unknown activation.
    """
    return spec_with(
        config,
        config.embed_dim,
        intermediate_size=int(config.embed_dim * config.mlp_ratio),
        out_size=config.hidden_size,
        temporal_patch_size=config.temporal_patch_size,
        activation=activation_of(config.hidden_act, GELUS),
        without_bias=("patch",),
    )


def ernie_spec(config: Any) -> VisionSpec:
    """The spec behind an ERNIE 4.5 VL tower's config. Raises ValueError, as `spec_from_config`."""
    return spec_with(
        config,
        config.hidden_size,
        intermediate_size=config.intermediate_size,
        out_size=config.hidden_size,
        temporal_patch_size=1,
        activation=activation_of(config.hidden_act, GELUS),
        norm_eps=config.rms_norm_eps,
        tail="norm",
        without_bias=("patch",),
        rows_only=True,
    )


FAMILIES = (
    Family(
        name="Qwen2-VL",
        class_names=("Qwen2VisionTransformerPretrainedModel",),
        spec_from_config=spec_from_config,
        names=NAMES,
        also_in=("colqwen2",),
    ),
    Family(
        name="ERNIE 4.5 VL",
        class_names=("Ernie4_5_VLMoeVisionTransformerPretrainedModel",),
        spec_from_config=ernie_spec,
        names=ERNIE_NAMES,
        aliases={},
    ),
)
