"""Checks of the arguments of `fusedvit.pixels`' public functions."""

from numbers import Integral
from typing import Any

import torch

DEVICES = "'cpu', 'cuda' or 'cuda:N'"


def check_counts(**given: Any) -> None:
    """Raises TypeError or ValueError where an argument, by its name, is no int of at least 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"fusedvit: {name} must be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"fusedvit: {name} must be at least 1, got {value}")


def device_named(device: Any) -> torch.device:
    """`torch.device(device)`. Raises ValueError or TypeError where torch knows no such device."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"fusedvit: device must be {DEVICES}, got {device!r}") from None
    except TypeError:
        raise TypeError(f"fusedvit: device must be {DEVICES}, got {type(device).__name__}") from None


def usable_device(device: Any) -> torch.device:
    """The CPU or a GPU that torch sees; for None the current GPU, if any. Raises ValueError for other devices."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    found = device_named(device)
    if found.type != "cpu" and (found.type != "cuda" or (found.index or 0) >= count):
        raise ValueError(f"fusedvit: device must be the CPU or one of {count} GPUs that torch sees, got '{device}'")
    return found


def kind_of_argument(given: Any) -> str:
    """What was given instead of an expected argument: the name of its type, or "the class X" for a class."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
