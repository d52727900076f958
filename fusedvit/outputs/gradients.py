"""Outputs that require gradients without anything behind them that takes any.

Gradient checkpointing in transformers marks the output of a tower's patch embedding for gradients, so that all outputs
of the tower require them. In a frozen tower these gradients reach no parameter, so they end at the fused encoder's
outputs. A language model that computes with these outputs gets the gradients that it gets with Hugging Face's.
"""

from collections.abc import Iterable
from typing import Any

import torch


class _End(torch.autograd.Function):
    """The identity in the forward pass, nothing in the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *planes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same values in tensors that are neither leaves nor views, so that in-place operations may write to them.

        Args:
            anchor: a tensor that requires a gradient, which makes all outputs require one. It is saved, and is not
                empty, because hooks on saved tensors may look for a largest value, as those that quantise do.
        """
        ctx.save_for_backward(anchor)
        ctx.set_materialize_grads(False)
        return tuple(plane.detach() for plane in planes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        """Raises RuntimeError in a second backward pass through a freed graph, as Hugging Face's graph does."""
        return (None,) * (len(ctx.saved_tensors) + len(gradients))


def with_gradients(planes: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same values in new tensors in the same memory, which require gradients and pass none on.

    Args:
        planes: at least one tensor, floats of any shape and device. None of them requires a gradient.
    """
    found = tuple(planes)
    with torch.enable_grad():
        marked: tuple[torch.Tensor, ...] = _End.apply(found[0].new_ones(1).requires_grad_(), *found)
    return marked
