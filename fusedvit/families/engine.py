"""Whose code a tower runs: Hugging Face's, or a serving engine's, which builds towers of its own from the same weights.

A family's record says what is computed and how parameters are called; an `Engine` says what that looks like in modules:
which packages define the code, which classes and values stand for what the record means. `checks` judges every tower
by both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fusedvit.model.spec import VisionSpec, rope_frequencies

Expected = Callable[[VisionSpec, tuple[int, ...]], torch.Tensor]


def rotary_table(spec: VisionSpec, shape: tuple[int, ...]) -> torch.Tensor:
    """What the engines' `cos_sin_cache` holds: cosines, then sines, of `shape[0]` positions times the frequencies."""
    angles = torch.outer(torch.arange(shape[0], dtype=torch.float32, device="cpu"), rope_frequencies(spec))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@dataclass(frozen=True)
class Engine:
    """Who defines a tower's code, and what of it a record cannot know.

    Attributes:
        name: as messages put it.
        towers: prefixes of the modules that define tower classes.
        packages: prefixes of the modules whose sources define what a tower runs, beside torch's.
        decorators: prefixes of modules whose decorators leave a function or class as it is.
        activations: `VisionSpec.activation` -> class name, and its `approximate` if it is torch's GELU.
        libraries: prefixes of modules whose functions are taken as they are, if their source defines them.
        renamed: names under which the code calls functions -> what their source calls them, where that differs.
        values: attributes that must have this value wherever a module has them.
        objects: attributes that hold an object which computes: the only classes that it may have.
        buffers: buffers that a forward reads, by name: what they must hold.
        tolerance: largest difference of a buffer's values, relative to 1.
        outside: paths of modules that the engine's adapter stands for, which the fused encoder does not replace.
        position_rows: rows of the position table are padded to a multiple of this.
    """

    name: str
    towers: tuple[str, ...]
    packages: tuple[str, ...]
    decorators: tuple[str, ...]
    activations: Mapping[str, tuple[str, str | None]]
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
        "gelu_tanh": ("GELUTanh", None),
        "gelu": ("GELUActivation", None),
        "quick_gelu": ("QuickGELUActivation", None),
        "swiglu": ("SiLUActivation", None),
        "geglu_tanh": ("GELUTanh", None),
    },
    buffers={"inv_freq": rope_frequencies},
)
