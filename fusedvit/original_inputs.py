"""A call's input as Hugging Face's code takes it, for calls that run it after all."""

from typing import Any

import torch
from torch import nn

from fusedvit.pixels.byte_pixels import as_floats
from fusedvit.runtime.inputs import check_grid


def for_original(tower: nn.Module, pixels: Any, grid: Any, padded: bool = False) -> tuple[Any, Any]:
    """A call's input as Hugging Face's code takes it: where that would take it as it is, the same objects.

    Bytes become floats, a list of rows a tensor, and tensors move to the device that the tower lies on. Where it lies
    on several, or is offloaded, whoever put it there moves them.

    Args:
        padded: `grid` is the positions of patches.

    Raises:
        ValueError: rows that are no integer triples.
    """
    pixels = as_floats(pixels)
    first = next(tower.parameters(), None)
    tensors = isinstance(pixels, torch.Tensor) and isinstance(grid, torch.Tensor)
    if tensors and (first is None or first.device == pixels.device == grid.device):
        return pixels, grid
    devices = {parameter.device for parameter in tower.parameters()}
    device = devices.pop() if len(devices) == 1 else None
    pixels = _moved(pixels, device)
    if isinstance(grid, list | tuple) and not padded:
        grid = check_grid(grid)
        device = pixels.device if device is None and isinstance(pixels, torch.Tensor) else device
    return pixels, _moved(grid, device)


def _moved(given: Any, device: torch.device | None) -> Any:
    """A tensor on `device`; without data, or without a place for any, it stays."""
    if not isinstance(given, torch.Tensor) or device is None or given.device == device:
        return given
    return given if given.is_meta or device.type == "meta" else given.to(device)
