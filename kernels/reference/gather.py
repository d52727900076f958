"""Torch twin of `kernels.gather`."""

import torch

from fusedvit.kernels.rows import RowsConfig


def gather_rows(
    x: torch.Tensor, order: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor, unit: int, config: RowsConfig
) -> torch.Tensor:
    """See `fusedvit.kernels.gather.gather_rows`. `config` is not used."""
    rows = int(num_rows)
    groups = order[: rows // unit].long()[:, None] * unit
    out[:rows] = x[(groups + torch.arange(unit, device=groups.device)).flatten()]
    return out
