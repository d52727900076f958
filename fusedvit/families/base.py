"""A model family as a record: its tower classes, its parameter names, and how its config becomes a `VisionSpec`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusedvit.families.engine import HUGGING_FACE, Engine
from fusedvit.model.param_names import MergerNames, WeightNames
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import TensorSource

GELUS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),  # the same function in other operations
}
GATED = {"silu": "swiglu", "swish": "swiglu"}
# transformers' fusion_config={"patch_embeddings": True} replaces the patch embedding's convolution by a linear layer
LINEAR_PATCH_EMBED = {f"patch_embed.linear_proj.{kind}": f"patch_embed.proj.{kind}" for kind in ("weight", "bias")}

NAMES = WeightNames(  # Qwen2-VL's; most families change only a few of them
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
GATED_NAMES = replace(
    NAMES,
    fc1=("blocks.{}.mlp.gate_proj", "blocks.{}.mlp.up_proj"),
    fc2="blocks.{}.mlp.down_proj",
    act="blocks.{}.mlp.act_fn",
)
_CONFIG = {  # field of `VisionSpec` -> its name in a Qwen config
    "depth": "depth",
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "out_size": "out_hidden_size",
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "in_channels": "in_channels",
    "merge_size": "spatial_merge_size",
}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: as the model cards write it.
        class_names: names of its tower classes in transformers.
        spec_from_config: a tower's `config` -> its spec; raises ValueError for a config that no such tower can have.
        names: the towers' parameter names.
        output_class: class name of the towers' output record, in the module of the tower class; if several are given,
            the one that the tower's `forward` mentions.
        call: wraps the fused `forward(tower, pixels, grid, **others)` in a function with the argument names of these
            towers; None if their first two arguments are pixels, under any name, and `grid_thw`.
        also_in: `model_type`s of transformers that contain one of these towers and define no tower class.
        aliases: other parameter name -> name in `names`, for loading options that rename parameters.
        engine: the library that builds the towers. For a serving engine, a family's record is copied with `engine` and
            `names` replaced.
    """

    name: str
    class_names: tuple[str, ...]
    spec_from_config: Callable[[Any], VisionSpec]
    names: WeightNames
    output_class: str | tuple[str, ...] = "BaseModelOutputWithPooling"
    call: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    also_in: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=lambda: LINEAR_PATCH_EMBED)
    engine: Engine = HUGGING_FACE

    def source(self, parameters: Mapping[str, torch.Tensor]) -> TensorSource:
        """A lookup `name -> tensor` in `parameters`, for the names in `names`."""
        renamed = {self.aliases.get(name, name): tensor for name, tensor in parameters.items()}
        return renamed.__getitem__


def rope_theta_of(config: Any) -> float:
    """The rotary base of a config; 10000 if it gives none."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def spec_with(config: Any, activations: Mapping[str, str], **own: Any) -> VisionSpec:
    """The spec of a tower whose config has Qwen's names; fields in `own` override those of the config.

    Args:
        activations: a config's `hidden_act` -> `VisionSpec.activation`.

    Raises:
        ValueError: the config's `hidden_act` is not in `activations`.
    """
    if config.hidden_act not in activations:
        raise ValueError(f"hidden_act must be one of {sorted(activations)}, got {config.hidden_act!r}")
    usual = {field: getattr(config, name) for field, name in _CONFIG.items() if field not in own} | own
    return VisionSpec(
        head_dim=usual["hidden_size"] // usual["num_heads"],
        activation=activations[config.hidden_act],
        rope_theta=rope_theta_of(config),
        **usual,
    )
