"""Devices and streams, as a call meets them."""

import contextlib

import torch


def lies_on_gpu(grid: torch.Tensor) -> bool:
    """Whether reading `grid` would wait for a device."""
    return grid.device.type != "cpu"


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Where the current stream of `device` is; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def is_current(device: torch.device) -> bool:
    """Whether what is launched now goes to `device`, and is run there and not captured."""
    if device.type != "cuda":
        return True
    return device.index == torch.cuda.current_device() and not torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes `device` current, if it is a GPU and is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
