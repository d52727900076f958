"""Gemma 4: padded images with positions, norms before and after attention and MLP, pooled tokens instead of a merger.

The 31B and the 26B-A4B share one tower, which standardises its tokens. E4B and E2B share a smaller one, whose linear
layers are clipped. DiffusionGemma and EmbeddingGemma 2 contain the same class.
"""

from collections.abc import Callable
from typing import Any

from fusedvit.families.base import Family, rope_theta_of
from fusedvit.model.param_names import PoolNames, WeightNames
from fusedvit.model.spec import VisionSpec

_BLOCK = "encoder.layers.{}."
_ATTENTION, _MLP = _BLOCK + "self_attn.", _BLOCK + "mlp."
_TABLE = "patch_embedder.position_embedding_table"
_ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh"}

NAMES = WeightNames(
    patch="patch_embedder.input_proj",
    position=_TABLE,
    norm1=_BLOCK + "input_layernorm",
    qkv=tuple(_ATTENTION + f"{part}_proj.linear" for part in "qkv"),
    proj=_ATTENTION + "o_proj.linear",
    norm2=_BLOCK + "pre_feedforward_layernorm",
    fc1=tuple(_MLP + f"{part}_proj.linear" for part in ("gate", "up")),
    fc2=_MLP + "down_proj.linear",
    act=_MLP + "act_fn",
    merger=PoolNames("std_bias", "std_scale"),
    qk_norm=(_ATTENTION + "q_norm", _ATTENTION + "k_norm"),
    post_norms=(_BLOCK + "post_attention_layernorm", _BLOCK + "post_feedforward_layernorm"),
)


def spec_from_config(config: Any) -> VisionSpec:
    """The spec of a `Gemma4VisionConfig`.

    Raises:
        ValueError: the config has another activation, does not pool tokens, or has another rotary embedding.
    """
    if config.hidden_activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_activation must be one of {sorted(_ACTIVATIONS)}, got {config.hidden_activation!r}")
    if config.pooling_kernel_size < 2:
        raise ValueError(f"pooling_kernel_size must be at least 2, got {config.pooling_kernel_size}")
    kind = (config.rope_parameters or {}).get("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise ValueError(f"rope_type must be 'axial', got {kind!r}")
    return VisionSpec(
        depth=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        out_size=config.hidden_size,
        patch_size=config.patch_size,
        temporal_patch_size=1,
        merge_size=config.pooling_kernel_size,
        activation=_ACTIVATIONS[config.hidden_activation],
        norm="rms",
        norm_eps=config.rms_norm_eps,
        rope_theta=rope_theta_of(config),
        rope_axial=True,
        attention_scale=1.0,
        position_side=config.position_embedding_size,
        position_taps=2,
        kv_heads=config.num_key_value_heads % config.num_attention_heads,
        qk_norm=True,
        v_norm=True,
        sandwich=True,
        clipped=config.use_clipped_linears,
        tail="pool",
        standardized=config.standardize,
        without_bias=("patch", "qkv", "proj", "mlp"),
        padded=True,
    )


def with_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the argument names of Gemma 4's tower."""

    def call(self: Any, pixel_values: Any, pixel_position_ids: Any, **kwargs: Any) -> Any:
        return forward(self, pixel_values, pixel_position_ids, **kwargs)

    return call


FAMILIES = (
    Family(
        name="Gemma 4",
        class_names=("Gemma4VisionModel",),
        spec_from_config=spec_from_config,
        names=NAMES,
        output_class=("BaseModelOutputWithPooling", "BaseModelOutputWithPast"),
        call=with_positions,
        also_in=("diffusion_gemma", "embedding_gemma2"),
        aliases={_TABLE: f"{_TABLE}.weight"},
    ),
)
