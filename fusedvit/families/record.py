"""What the encoder must know of a family of towers: a record, not an encoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusedvit.spec import VisionSpec
from fusedvit.weights import WeightNames


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: as its makers write it.
        class_names: names of its tower classes in transformers.
        spec_from_config: a tower's `config` -> its spec; raises ValueError for numbers it cannot have.
        names: where its parameters are.
    """

    name: str
    class_names: tuple[str, ...]
    spec_from_config: Callable[[Any], VisionSpec]
    names: WeightNames
