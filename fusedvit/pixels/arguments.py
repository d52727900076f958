"""Checks of the arguments of `fusedvit.pixels`' public functions."""

from typing import Any

import torch

from fusedvit.errors import shown

DEVICES = "'cpu', 'cuda' or 'cuda:N'"


def device_named(device: Any) -> torch.device:
    """`torch.device(device)`. Raises ValueError or TypeError where torch knows no such device, or sees no such GPU."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"fusedvit: device must be {DEVICES}, got {shown(device)}") from None
    except TypeError:
        raise TypeError(f"fusedvit: device must be {DEVICES}, got {type(device).__name__}") from None
    if found.type == "cuda" and (found.index or 0) >= _gpus():
        raise _unusable(device)
    return found


def usable_device(device: Any) -> torch.device:
    """The CPU or a GPU that torch sees; for None the current GPU, if any. Raises ValueError for other devices."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if _gpus() else torch.device("cpu")
    found = device_named(device)
    if found.type not in ("cpu", "cuda"):
        raise _unusable(device)
    return found


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _unusable(device: Any) -> ValueError:
    return ValueError(f"fusedvit: device must be the CPU or one of {_gpus()} GPUs that torch sees, got '{device}'")


def kind_of_argument(given: Any) -> str:
    """What was given instead of an expected argument: the name of its type, or "the class X" for a class."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
