"""Converts a call's input for Hugging Face's original code, for calls that fall back."""

from typing import Any

import torch
from torch import nn

from fusedvit.pixels.byte_pixels import as_floats
from fusedvit.runtime.inputs import check_grid


def for_original(tower: nn.Module, pixels: Any, grid: Any, padded: bool = False) -> tuple[Any, Any]:
    """Pixels and grid as Hugging Face's code takes them: the same objects if nothing needs converting.

    Bytes become floats, a list of rows becomes a tensor, and tensors move to the tower's device. For a tower on several
    devices, or offloaded, moving pixels is left to the code that placed the tower there.

    Args:
        padded: `grid` holds the positions of patches.

    Raises:
        TypeError, ValueError: rows of the grid are not integer triples.
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
    """`given` on `device` if it is a tensor; unchanged if either is on the meta device or `device` is None."""
    if not isinstance(given, torch.Tensor) or device is None or given.device == device:
        return given
    return given if given.is_meta or device.type == "meta" else given.to(device)
