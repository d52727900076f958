"""The libraries whose code a tower may run: Hugging Face's, or a serving engine's, which builds its own towers.

A family's record says what is computed and what parameters are named. An `Engine` says how modules express that: which
packages define the code, and which classes and values correspond to the record. `checks` judges every tower by both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fusedvit.model.spec import VisionSpec, rope_frequencies

# Attributes of engines' linear layers, norms and tables whose value decides what these compute.
PLAIN_LAYERS: Mapping[str, object] = {"skip_bias_add": False, "variance_size_override": None, "max_norm": None}

Expected = Callable[[VisionSpec, tuple[int, ...]], torch.Tensor]


def rotary_table(spec: VisionSpec, shape: tuple[int, ...]) -> torch.Tensor:
    """The content of the engines' `cos_sin_cache`: cosines, then sines, of `shape[0]` positions times frequencies."""
    angles = torch.outer(torch.arange(shape[0], dtype=torch.float32, device="cpu"), rope_frequencies(spec))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@dataclass(frozen=True)
class Engine:
    """A library that defines towers' code, with the details of that code that a family's record does not know.

    Attributes:
        name: its name in messages.
        towers: prefixes of the modules that define tower classes.
        packages: prefixes of the modules, apart from torch's, whose sources define what a tower runs.
        decorators: prefixes of modules whose decorators do not change what a function or class computes.
        activations: `VisionSpec.activation` -> names of its classes, and its `approximate` if it is torch's GELU.
        libraries: prefixes of modules whose functions are trusted if the module's source defines them.
        renamed: name under which the code calls a function -> its name in its source, where they differ.
        values: attribute -> the value that it must have in any module that has the attribute.
        objects: attribute that holds a computing object -> the only classes that the object may have.
        buffers: name of a buffer that a forward reads -> the content that the buffer must have.
        tolerance: largest absolute difference allowed for a buffer's values.
        outside: paths of modules that the engine's adapter runs, as the fused encoder does not replace them.
        position_rows: rows of the position table are padded to a multiple of this.
    """

    name: str
    towers: tuple[str, ...]
    packages: tuple[str, ...]
    decorators: tuple[str, ...]
    activations: Mapping[str, tuple[tuple[str, ...], str | None]]
    libraries: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    objects: Mapping[str, frozenset[str]] = field(default_factory=dict)
    buffers: Mapping[str, Expected] = field(default_factory=dict)
    tolerance: float = 0.0
    outside: tuple[str, ...] = ()
    position_rows: int = 1


HUGGING_FACE = Engine(
    name="transformers",
    towers=("transformers.models.",),
    packages=("transformers.",),
    decorators=("transformers.", "torch.utils._contextlib"),
    activations={
        "gelu_tanh": (("GELUTanh", "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"), None),
        "gelu": (("GELUActivation",), None),
        "quick_gelu": (("QuickGELUActivation",), None),
        "swiglu": (("SiLUActivation", "SiLU"), None),
        "geglu_tanh": (("GELUTanh",), None),
    },
    buffers={"inv_freq": rope_frequencies},
)
