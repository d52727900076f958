"""A tower with random weights, and what the commands need to know of any tower: its pixels' layout, its size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import nn

from fusedvit.cli.media import PatchLayout
from fusedvit.errors import InputError
from fusedvit.model.spec import VisionSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QWEN3_VL_8B: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
}
TINY: dict[str, Any] = {  # head dim 72 as the 8B's, intermediate size no multiple of 16
    "depth": 4,
    "hidden_size": 144,
    "num_heads": 2,
    "intermediate_size": 280,
    "out_hidden_size": 96,
    "deepstack_visual_indexes": [1, 2],
}


@dataclass(frozen=True)
class Tower:
    """A model to fuse: a tower, or what holds one. `dtype` is that of its parameters."""

    name: str
    model: nn.Module
    dtype: torch.dtype


def random_tower(device: torch.device, seed: int = 0) -> Tower:
    """Qwen3-VL-8B's tower in bf16 on a GPU; a small relative of it in fp32 on a CPU. Weights are random."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    on_gpu = device.type == "cuda"
    module = Qwen3VLVisionModel(Qwen3VLVisionConfig(**(QWEN3_VL_8B if on_gpu else TINY))).eval()
    random_weights_(module, seed)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    cast_parameters_(module, dtype)
    module.to(device)
    name = "Qwen3-VL-8B's tower, random weights" if on_gpu else "a small Qwen3-VL tower, random weights"
    return Tower(name, module, dtype)


def device_of(name: str | None) -> torch.device:
    """The device of that name; the GPU if there is one, else the CPU, without a name.

    Raises:
        InputError: no such device, or none that is here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device: cpu, cuda or cuda:N expected, got {name!r}") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= count):
        raise InputError(f"--device: no {name!r} here; torch sees the CPU and {count} GPUs")
    return device


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """bf16, fp16 or fp32 by name; without one bf16 on a GPU and fp32 on a CPU. Raises InputError for other names."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise InputError(f"--dtype: one of {', '.join(DTYPES)} expected, got {name!r}")
    return DTYPES[name]


def geometry_of(spec: VisionSpec) -> dict[str, Any]:
    """The numbers of a tower that say how large it is."""
    names = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_size", "deepstack")
    return {name: getattr(spec, name) for name in names}


def layout_of(spec: VisionSpec) -> PatchLayout:
    """A tower's preprocessing. Those with patches of 14 (Qwen2, GLM) use CLIP's mean and deviation, later ones 0.5."""
    sizes = spec.patch_size, spec.temporal_patch_size, spec.merge_size
    if spec.patch_size == 14:
        clip_mean, clip_std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        return PatchLayout(*sizes, clip_mean, clip_std)
    return PatchLayout(*sizes)


def takes_single_frames(spec: VisionSpec) -> bool:
    """Whether Hugging Face's tower needs a row of `grid_thw` per frame. GLM-4V's do, with bicubic positions: their
    models cut videos into frames first."""
    return spec.position_taps == 16


def call_tower(tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor, **arguments: Any) -> Any:
    """Calls a tower of any family on rows of patches; towers that take padded images get them, every frame as one.

    Args:
        pixels: `[tokens, patch_width]`, patches of merged tokens side by side.
        grid: `[items, 3]` integers (t, h, w), on the device of `pixels`.
        arguments: the call's other arguments.
    """
    inputs, named = inputs_of(tower, pixels, grid)
    return tower(inputs, **named, **arguments)


def inputs_of(
    tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `call_tower` calls a tower with: pixels, and what goes with them by its name."""
    merge = getattr(tower.config, "pooling_kernel_size", 0)
    if not merge:
        return pixels, {"grid_thw": grid}
    images, positions = padded_images(pixels, grid.tolist(), merge)
    return images, {"pixel_position_ids": positions}


def padded_images(pixels: torch.Tensor, grid: Sequence[Sequence[int]], merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of patches as `[images, patches, patch_width]` from 0 to 1, row by row, and the patches' positions.

    The largest image has one merged token of padding.

    Args:
        pixels: `[tokens, patch_width]` from -1 to 1, patches of merged tokens side by side.
        grid: (t, h, w) of items; frames become images.
        merge: patches on a side of a merged token.
    """
    frames = [(h, w) for t, h, w in grid for _ in range(t)]
    most = max((h * w for h, w in frames), default=0) + merge**2
    images = pixels.new_zeros(len(frames), most, pixels.shape[1])
    positions = torch.full((len(frames), most, 2), -1, device=pixels.device)
    for i, (rows, (h, w)) in enumerate(zip(pixels.split([h * w for h, w in frames]), frames, strict=True)):
        raster = rearrange(rows, "(bh bw mh mw) c -> (bh mh bw mw) c", mh=merge, mw=merge, bh=h // merge, bw=w // merge)
        images[i, : h * w] = raster / 2 + 0.5
        at = torch.arange(h * w, device=pixels.device)
        positions[i, : h * w] = torch.stack([at % w, at // w], 1)
    return images, positions


def random_weights_(module: nn.Module, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Fill every parameter of `module` in place; drawn on the CPU, the same for the same seed on every machine.

    Drawn on another `device`, where it goes faster: the same on machines that have that device.

    Hugging Face's initialisation has zero biases, and norms that do nothing: a fused tower that forgets them would look
    right. Here matrices keep the variance of what passes through them (std = 1 / sqrt(fan in), 0.029 for 1152 inputs),
    norm weights spread around 1, and biases are small and not zero.
    """
    generator = torch.Generator(device).manual_seed(seed)
    norms = {id(p) for m in module.modules() if _is_norm(m) for p in m.parameters(recurse=False)}
    _random_buffers_(module)
    for name, parameter in module.named_parameters():
        mean, std = 0.0, 0.05  # a bias
        if id(parameter) in norms and name.endswith("weight"):
            mean, std = 1.0, 0.2
        elif parameter.ndim > 1:
            std = 0.3 if "pos_embed" in name or "position_embedding" in name else 1.0 / math.sqrt(parameter[0].numel())
        values = torch.normal(mean, std, parameter.shape, generator=generator, device=device)
        with torch.no_grad():
            parameter.copy_(values)


def _random_buffers_(module: nn.Module) -> None:
    """Gemma 4's: what standardises its tokens, and bounds that cut off the tails of what is of order 1."""
    values = {"std_bias": 0.1, "std_scale": 1.2, "input_min": -2.0, "input_max": 1.75, "output_min": -2.5}
    for path, buffer in module.named_buffers():
        value = (values | {"output_max": 3.0}).get(path.rpartition(".")[2])
        if value is not None:
            ramp = torch.linspace(0.5, 1.5, buffer.numel(), device=buffer.device).view(buffer.shape)
            buffer.copy_(value * ramp if buffer.numel() > 1 else torch.full_like(buffer, value))


def cast_parameters_(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, in place, and leave buffers alone.

    `module.to(dtype)` would round the rotary frequencies as well, which loading a checkpoint in `dtype` does not.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
