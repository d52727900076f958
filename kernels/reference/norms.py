"""Reference of `kernels.norms`, in fp32 (fp64 for fp64 inputs)."""

import torch
import torch.nn.functional as F
from einops import rearrange

from fusedvit.kernels.norms import NOTHING, After, NextNorm
from fusedvit.kernels.reference.linear import add_taps, clamp, rotated, store_moments, wide


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
    """See `fusedvit.kernels.norms.layer_norm`. `max_programs` is not used."""
    rows, shape = int(num_rows), (x.shape[1],)
    y = wide(x[:rows])
    if bias is None:
        y = F.rms_norm(y, shape, wide(weight), eps)
    else:
        y = F.layer_norm(y, shape, wide(weight), wide(bias), eps)
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


def head_norm_rope(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    rope: torch.Tensor,
    num_rows: torch.Tensor,
    heads: int,
    eps: float,
    max_programs: int,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `fusedvit.kernels.norms.head_norm_rope`. `max_programs` is not used."""
    d = weight.shape[1]
    for i, (w, part) in enumerate(zip(weight, qkv[: int(num_rows)].split(heads * d, dim=1), strict=False)):
        x = wide(part) if clip is None else clamp(wide(part), clip[i])
        x = F.rms_norm(rearrange(x, "t (h d) -> t h d", d=d), (d,), w.to(x.dtype), eps)
        part.copy_((x if i == 2 else rotated(x, rope)).flatten(1))
    return qkv


def residual_norm(
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    hidden: torch.Tensor,
    num_rows: torch.Tensor,
    eps: float,
    max_programs: int,
    following: NextNorm | None = None,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `fusedvit.kernels.norms.residual_norm`. `max_programs` is not used."""
    rows, shape = int(num_rows), (hidden.shape[1],)
    if y is not None and weight is not None:
        x = wide(y[:rows]) if clip is None else clamp(wide(y[:rows]), clip)
        hidden[:rows] = (hidden[:rows] + F.rms_norm(x, shape, wide(weight), eps)).to(hidden.dtype)
    if following is not None:
        x = F.rms_norm(wide(hidden[:rows]), shape, wide(following.weight), eps)
        following.out[:rows] = (x if following.clip is None else clamp(x, following.clip)).to(hidden.dtype)
    return hidden


def pool_rows(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    unit: int,
    max_programs: int,
) -> torch.Tensor:
    """See `fusedvit.kernels.norms.pool_rows`. `max_programs` is not used."""
    rows = int(num_rows)
    y = wide(wide(x[: rows * unit]).unflatten(0, (rows, unit)).mean(1).to(x.dtype)) * x.shape[1] ** 0.5
    if bias is not None and scale is not None:
        y = (y - bias) * scale
    out[:rows] = y.to(out.dtype)
    return out


def gather_rows(
    x: torch.Tensor, order: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor, unit: int, max_programs: int
) -> torch.Tensor:
    """See `fusedvit.kernels.norms.gather_rows`. `max_programs` is not used."""
    rows = int(num_rows)
    groups = order[: rows // unit].long()[:, None] * unit
    out[:rows] = x[(groups + torch.arange(unit, device=groups.device)).flatten()]
    return out
