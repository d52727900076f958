"""Whether fp16 can hold what preparing weights makes of parameters: products that the original code never forms.

fp16 ends at 65504, and below 6.1e-5 its numbers lose a bit with each halving. Rounding a normal number costs at most
2^-11 of it. So a row of a product is fit for fp16 if all that rounding it costs is

    ||exact - rounded|| <= max(2^-11 ||(exact, bias)||, 2^-25)

which holds for a row whose large entries are normal numbers. The original code rounds the row's outputs to fp16, and
loses as much: 2^-11 of each, or 2^-25 of tiny ones. A product that overflows costs infinitely much. Where parameters
are not finite themselves nothing is refused: the outputs of the original code are not finite either.
"""

import torch

_LARGEST, _TINY = torch.finfo(torch.float16).max, torch.finfo(torch.float16).tiny
_EPS, _LEAST = 2.0**-11, 2.0**-25  # what rounding costs: a share of a normal number, and below these


class BeyondFp16(Exception):
    """A product that fp16 cannot hold; the message names it."""


class Products:
    """Products that were rounded, judged together: one read from their device."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._costs: list[torch.Tensor] = []

    def add(self, name: str, exact: torch.Tensor, rounded: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """A product by its name, `[N, ...]` as it is and as it was rounded, and the bias `[N]` of its outputs."""
        if rounded.dtype != torch.float16 or rounded.is_meta:
            return
        cost = torch.linalg.vector_norm((exact - rounded).flatten(1), dim=1)
        size = torch.linalg.vector_norm(exact.flatten(1), dim=1)
        if bias is not None:
            finite = bias.to(size).nan_to_num(0.0, 0.0, 0.0)  # one that comes of what was rounded may not be
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
