"""GLM-4.1V to GLM-5.3: RMSNorm, SwiGLU, a merger that downsamples by a convolution.

GLM-4.1V, 4.5V and 4.6V normalise embedded patches and add a bicubic position table; their linear layers have no biases.
GLM-OCR and GLM-5.3 have only rotary positions, and normalise q and k. GLM-5.3 clamps the SwiGLUs of blocks and merger.
"""

from dataclasses import replace
from typing import Any

from fusedvit.families.base import GATED, GATED_NAMES, Family, spec_with
from fusedvit.model.param_names import DownsampleNames
from fusedvit.model.spec import VisionSpec

NAMES = replace(
    GATED_NAMES,
    qk_norm=("blocks.{}.attn.q_norm", "blocks.{}.attn.k_norm"),
    merger=DownsampleNames(
        norm="post_layernorm",
        downsample="downsample",
        proj="merger.proj",
        proj_norm="merger.post_projection_norm",
        proj_act="merger.act1",
        fc1=("merger.gate_proj", "merger.up_proj"),
        fc2="merger.down_proj",
        act="merger.act_fn",
    ),
)
WITH_POSITIONS = replace(NAMES, qk_norm=(), position="embeddings.position_embedding", patch_norm="post_conv_layernorm")


def _spec(config: Any, intermediate_size: int, merger_size: int) -> VisionSpec:
    """The fields that these families share; `merger_size` is the width of the merger's MLP."""
    return spec_with(
        config,
        GATED,
        intermediate_size=intermediate_size,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        tail="downsample",
        merger_size=merger_size,
    )


def glm4v_spec(config: Any) -> VisionSpec:
    """The spec of GLM-4.1V to 4.6V: `out_hidden_size` is also the blocks' MLP width, `intermediate_size` the merger's.

    Raises:
        ValueError: the config has an activation other than SiLU.
    """
    without_bias = ("proj", "mlp", "merger") if config.attention_bias else ("qkv", "proj", "mlp", "merger")
    return replace(
        _spec(config, config.out_hidden_size, config.intermediate_size),
        position_side=config.image_size // config.patch_size,
        position_taps=16,
        patch_norm=True,
        without_bias=without_bias,
    )


def _qk_norm_spec(config: Any, merger_size: int) -> VisionSpec:
    without_bias = ("merger",) if config.attention_bias else ("qkv", "proj", "mlp", "merger")
    return replace(_spec(config, config.intermediate_size, merger_size), qk_norm=True, without_bias=without_bias)


def glm_ocr_spec(config: Any) -> VisionSpec:
    """The spec of GLM-OCR, whose merger's MLP is `out_hidden_size * in_channels` wide.

    Raises ValueError, as `glm4v_spec`.
    """
    return _qk_norm_spec(config, config.out_hidden_size * config.in_channels)


def glm5_spec(config: Any) -> VisionSpec:
    """The spec of GLM-5.3. Raises ValueError, as `glm4v_spec`."""
    return replace(_qk_norm_spec(config, config.projection_intermediate_size), glu_limit=float(config.swiglu_limit))


FAMILIES = (
    Family(
        name="GLM-4.1V, 4.5V, 4.6V",
        class_names=("Glm4vVisionModel", "Glm4vMoeVisionModel"),
        spec_from_config=glm4v_spec,
        names=WITH_POSITIONS,
        also_in=("glm46v", "glmga"),
    ),
    Family(
        name="GLM-OCR",
        class_names=("GlmOcrVisionModel",),
        spec_from_config=glm_ocr_spec,
        names=NAMES,
    ),
    Family(
        name="GLM-5.3",
        class_names=("Glm5NextVisionModel",),
        spec_from_config=glm5_spec,
        names=NAMES,
    ),
)
