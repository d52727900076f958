"""Poison for what a run works in: an answer that a launch made of anything but this run's own bits shows."""

import torch

from fusedvit.model.buffers import EncoderBuffers


def poison_buffers(buffers: EncoderBuffers) -> None:
    """NaN into every float, garbage into the integers, the same each time.

    Not into the counters of split products, which every launch leaves as it found them, at zero.
    """
    for name, tensor in buffers.tensors().items():
        if name == "scratch.counters":
            continue
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.random_(-(2**30), 2**30, generator=torch.Generator(tensor.device).manual_seed(0))
