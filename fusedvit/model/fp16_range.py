"""Checks whether fp16 can hold prepared weights: products of parameters that the original code never forms.

fp16 ends at 65504, and below 6.1e-5 its numbers lose a bit with each halving. Rounding a normal number costs at most
2^-11 of it. So fp16 can hold a row of a product if the error of rounding it is

    ||exact - rounded|| <= max(2^-11 ||(exact, bias)||, 2^-25)

which is true for a row whose large entries are normal numbers. The original code rounds the row's outputs to fp16 and
loses as much: 2^-11 of each, or 2^-25 of tiny ones. The error of a product that overflows is infinite. Parameters that
are not finite themselves are not refused, as the outputs of the original code are not finite either.
"""

import torch

_LARGEST, _TINY = torch.finfo(torch.float16).max, torch.finfo(torch.float16).tiny
_EPS, _LEAST = 2.0**-11, 2.0**-25  # rounding error: relative for normal numbers, absolute below them


class BeyondFp16(Exception):
    """A product that fp16 cannot hold; the message names it."""


class Products:
    """Rounded products, which are judged together so that one read from their device suffices."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._costs: list[torch.Tensor] = []

    def add(self, name: str, exact: torch.Tensor, rounded: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Adds a product: its name, its exact and rounded values `[N, ...]`, and the bias `[N]` of its outputs."""
        if rounded.dtype != torch.float16 or rounded.is_meta:
            return
        cost = torch.linalg.vector_norm((exact - rounded).flatten(1), dim=1)
        size = torch.linalg.vector_norm(exact.flatten(1), dim=1)
        if bias is not None:
            finite = bias.to(size).nan_to_num(0.0, 0.0, 0.0)  # a bias computed from rounded values may not be
            size = torch.hypot(size, finite)
        self._names.append(name)
        self._costs.append((cost / (_EPS * size).clamp(min=_LEAST)).nan_to_num(0.0, torch.inf).max().double())

    def check(self) -> None:
        """Raises BeyondFp16 for the first product that fp16 cannot hold; waits for the GPU."""
        if not self._names:
            return
        for name, cost in zip(self._names, torch.stack(self._costs).tolist(), strict=True):
            if cost > 1:
                wrong = f"exceeds {_LARGEST:g}" if cost == torch.inf else f"loses bits below {_TINY:.2g}"
                raise BeyondFp16(f"{name} {wrong}")
