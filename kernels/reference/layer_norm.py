"""Torch twin of `kernels.layer_norm`."""

import torch
import torch.nn.functional as F

from fusedvit.kernels.layer_norm import NOTHING, After
from fusedvit.kernels.reference.linear import add_taps, store_moments


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    max_programs: int,
    after: After = NOTHING,
) -> torch.Tensor:
    """See `fusedvit.kernels.layer_norm.layer_norm`. `max_programs` is not used."""
    rows, shape = int(num_rows), (x.shape[1],)
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    y = x[:rows].to(wide)
    if bias is None:
        y = F.rms_norm(y, shape, weight.to(wide), eps)
    else:
        y = F.layer_norm(y, shape, weight.to(wide), bias.to(wide), eps)
    if after.activation == "gelu":
        y = F.gelu(y)
    if after.taps is not None:
        y = add_taps(y, after.taps)
    y = y.to(out.dtype)
    if after.stats is not None:
        store_moments(y, after.stats)
    if after.order is not None:
        groups = after.order[: rows // after.unit].long()[:, None] * after.unit
        out[(groups + torch.arange(after.unit, device=groups.device)).flatten()] = y
    else:
        out[:rows] = y
    return out
