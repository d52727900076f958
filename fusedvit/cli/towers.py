"""A tower with random weights, and facts that the commands need about any tower: its pixels' layout, its size."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedvit.bench.towers import GEOMETRIES, build_one
from fusedvit.checkpoint import default_dtype, device_or_default
from fusedvit.cli.media import InputLayout
from fusedvit.errors import InputError, unnamed
from fusedvit.model.spec import VisionSpec
from fusedvit.pixels.arguments import usable_device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMALL = GEOMETRIES["tiny"].but(depth=4, deepstack_visual_indexes=[1, 2])  # heads of 72, like the 8B's
TINY = SMALL.numbers


@dataclass(frozen=True)
class Tower:
    """A model to fuse: a tower, or a model that holds one. `dtype` is that of its parameters."""

    name: str
    model: nn.Module
    dtype: torch.dtype


def random_tower(device: torch.device) -> Tower:
    """Qwen3-VL-8B's tower in bf16 on a GPU; a small relative of it in fp32 on a CPU. Weights are random."""
    on_gpu, dtype = device.type == "cuda", default_dtype(device)
    module = build_one(GEOMETRIES["Qwen3-VL-8B"] if on_gpu else SMALL, dtype, torch.device("cpu")).to(device)
    name = "Qwen3-VL-8B's tower, random weights" if on_gpu else "a small Qwen3-VL tower, random weights"
    return Tower(name, module, dtype)


def device_of(name: str | None) -> torch.device:
    """The device called `name`; for None the GPU if there is one, else the CPU.

    Raises:
        InputError: there is no such device here.
    """
    if name is None:
        return device_or_default(None)
    try:
        return usable_device(name)
    except ValueError as error:
        raise InputError(f"--{unnamed(error)}") from None


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """bf16, fp16 or fp32 by name; for None bf16 on a GPU and fp32 on a CPU. Raises InputError for other names."""
    if name is None:
        return default_dtype(device)
    if name not in DTYPES:
        raise InputError(f"--dtype: one of {', '.join(DTYPES)} expected, got {name!r}")
    return DTYPES[name]


def geometry_of(spec: VisionSpec) -> dict[str, Any]:
    """The numbers that describe a tower's size."""
    names = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_size", "deepstack")
    return {name: getattr(spec, name) for name in names}


def input_layout_of(spec: VisionSpec) -> InputLayout:
    """A tower's preprocessing. Those with patches of 14 (Qwen2, GLM) use CLIP's mean and deviation, later ones 0.5."""
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    sizes = spec.patch_size, spec.temporal_patch_size, spec.merge_size
    clip = (tuple(OPENAI_CLIP_MEAN), tuple(OPENAI_CLIP_STD)) if spec.patch_size == 14 else ()
    return InputLayout(*sizes, *clip)


def takes_single_frames(spec: VisionSpec) -> bool:
    """Whether Hugging Face's tower needs a row of `grid_thw` per frame. GLM-4V's towers, with bicubic positions, do:
    their models cut videos into frames first."""
    return spec.position_taps == 16
