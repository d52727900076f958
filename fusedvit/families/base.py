"""What the encoder must know of a family of towers: a record, not an encoder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedvit.model.param_names import WeightNames
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import TensorSource

# fusion_config={"patch_embeddings": True} makes the convolution a linear layer in memory
LINEAR_PATCH_EMBED = {f"patch_embed.linear_proj.{kind}": f"patch_embed.proj.{kind}" for kind in ("weight", "bias")}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: as its makers write it.
        class_names: names of its tower classes in transformers.
        spec_from_config: a tower's `config` -> its spec; raises ValueError for numbers it cannot have.
        names: where its parameters are.
        output_class: name of the record that its towers return, in their module.
        has_deepstack: that record has `deepstack_features`.
        also_in: model types of transformers that hold one of these towers and have none of their own.
        aliases: parameter names as some loading options leave them -> as in `names`.
    """

    name: str
    class_names: tuple[str, ...]
    spec_from_config: Callable[[Any], VisionSpec]
    names: WeightNames
    output_class: str
    has_deepstack: bool = False
    also_in: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def source(self, parameters: Mapping[str, torch.Tensor]) -> TensorSource:
        """Looks parameters up by the names of `names`."""
        renamed = {self.aliases.get(name, name): tensor for name, tensor in parameters.items()}
        return renamed.__getitem__


def rope_theta_of(config: Any) -> float:
    """The base of a config's rotary frequencies."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
