"""Qwen3-VL and the families that use its tower: LayerNorm, GELU, a bilinear position table, deepstack mergers.

Qwen3-VL's dense and MoE models have the same tower. Qwen3-Omni's has other parameter names. Qwen3.5 and later have no
deepstack mergers.
"""

from dataclasses import replace
from typing import Any

from fusedvit.families import base
from fusedvit.families.base import GELUS, Family, spec_with
from fusedvit.model.param_names import MergerNames
from fusedvit.model.spec import VisionSpec

_SIDE_IS_SQUARE = "num_position_embeddings must be a square number, got {}"


def _merger(at: str) -> MergerNames:
    return MergerNames(f"{at}.norm", f"{at}.linear_fc1", f"{at}.linear_fc2", f"{at}.act_fn")


def _omni_merger(at: str) -> MergerNames:
    return MergerNames(f"{at}.ln_q", f"{at}.mlp.0", f"{at}.mlp.2", f"{at}.mlp.1")


NAMES = replace(
    base.NAMES,
    position="pos_embed",
    fc1=("blocks.{}.mlp.linear_fc1",),
    fc2="blocks.{}.mlp.linear_fc2",
    act="blocks.{}.mlp.act_fn",
    merger=_merger("merger"),
    deepstack=_merger("deepstack_merger_list.{}"),
)
OMNI_NAMES = replace(NAMES, merger=_omni_merger("merger"), deepstack=_omni_merger("merger_list.{}"))


def spec_from_config(config: Any) -> VisionSpec:
    """The spec of a `vision_config` of towers without deepstack mergers, whose code reads no indexes.

    Raises:
        ValueError: the position table is not square, or the activation is unknown.
    """
    side = int(config.num_position_embeddings**0.5)
    if side * side != config.num_position_embeddings:
        raise ValueError(_SIDE_IS_SQUARE.format(config.num_position_embeddings))
    return spec_with(config, GELUS, position_side=side)


def deepstack_spec(config: Any) -> VisionSpec:
    """As `spec_from_config`, for towers with deepstack mergers. The engines' towers of this kind also serve Qwen3.5,
    whose configs may have no indexes."""
    return replace(spec_from_config(config), deepstack=tuple(getattr(config, "deepstack_visual_indexes", ())))


FAMILIES = (
    Family(
        name="Qwen3-VL",
        class_names=("Qwen3VLVisionModel", "Qwen3VLMoeVisionModel", "CohereCompassVisionModel"),
        spec_from_config=deepstack_spec,
        names=NAMES,
        output_class="BaseModelOutputWithDeepstackFeatures",
        also_in=("cosmos3_omni",),
    ),
    Family(
        name="Qwen3-Omni",
        class_names=("Qwen3OmniMoeVisionEncoder",),
        spec_from_config=deepstack_spec,
        names=OMNI_NAMES,
        output_class="BaseModelOutputWithDeepstackFeatures",
    ),
    Family(
        name="Qwen3.5, Qwen3.6, Qwen3.8, Qwen4-Exp",
        class_names=("Qwen3_5VisionModel", "Qwen3_5MoeVisionModel", "Qwen4ExpVisionModel"),
        spec_from_config=spec_from_config,
        names=NAMES,
    ),
)
