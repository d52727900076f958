"""Torch twin of `kernels.gather`."""

import torch


def gather_rows(
    x: torch.Tensor, order: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor, unit: int, max_programs: int
) -> torch.Tensor:
    """See `fusedvit.kernels.gather.gather_rows`. `max_programs` is not used."""
    rows = int(num_rows)
    groups = order[: rows // unit].long()[:, None] * unit
    out[:rows] = x[(groups + torch.arange(unit, device=groups.device)).flatten()]
    return out
