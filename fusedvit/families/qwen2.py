"""Qwen2-VL and ERNIE 4.5 VL: LayerNorm, quick GELU, head_dim 80, no position table.

ERNIE's tower takes single frames and ends with a norm: its token merger is a module outside the tower.
"""

from dataclasses import replace
from typing import Any

from fusedvit.families.base import GELUS, NAMES, Family, spec_with
from fusedvit.model.param_names import LastNormNames
from fusedvit.model.spec import VisionSpec

ERNIE_NAMES = replace(NAMES, merger=LastNormNames("ln"))


def spec_from_config(config: Any) -> VisionSpec:
    """The spec behind a `vision_config` of this family, whose `hidden_size` is the language model's.

    Raises:
        ValueError: an unknown activation.
    """
    return spec_with(
        config,
        GELUS,
        hidden_size=config.embed_dim,
        intermediate_size=int(config.embed_dim * config.mlp_ratio),
        out_size=config.hidden_size,
        without_bias=("patch",),
    )


def ernie_spec(config: Any) -> VisionSpec:
    """The spec of an ERNIE 4.5 VL tower's config. Raises ValueError, as `spec_from_config`."""
    return spec_with(
        config,
        GELUS,
        out_size=config.hidden_size,
        temporal_patch_size=1,
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
