"""Random weights that exercise a tower as trained ones would."""

import math

import torch
from torch import nn


def random_weights_(module: nn.Module, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Fill every parameter of `module` in place; drawn on the CPU, the same for the same seed on every machine.

    Drawn on another `device`, where it goes faster: the same on machines that have that device.

    Hugging Face's initialisation has zero biases, and norms that do nothing: a fused tower that forgets them would look
    right. Here matrices keep the variance of what passes through them (std = 1 / sqrt(fan in), 0.029 for 1152 inputs),
    norm weights spread around 1, and biases are small and not zero.
    """
    generator = torch.Generator(device).manual_seed(seed)
    norms = {id(p) for m in module.modules() if _is_norm(m) for p in m.parameters(recurse=False)}
    for name, parameter in module.named_parameters():
        mean, std = 0.0, 0.05  # a bias
        if id(parameter) in norms and name.endswith("weight"):
            mean, std = 1.0, 0.2
        elif parameter.ndim > 1:
            std = 0.3 if "pos_embed" in name else 1.0 / math.sqrt(parameter[0].numel())
        values = torch.normal(mean, std, parameter.shape, generator=generator, device=device)
        with torch.no_grad():
            parameter.copy_(values)


def cast_parameters_(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, in place, and leave buffers alone.

    `module.to(dtype)` would round the rotary frequencies as well, which loading a checkpoint in `dtype` does not.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
