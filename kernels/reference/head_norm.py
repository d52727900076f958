"""Torch twin of `kernels.head_norm`."""

import torch
import torch.nn.functional as F
from einops import rearrange


def head_norm_rope(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    rope: torch.Tensor,
    num_rows: torch.Tensor,
    heads: int,
    eps: float,
    max_programs: int,
) -> torch.Tensor:
    """See `fusedvit.kernels.head_norm.head_norm_rope`. `max_programs` is not used."""
    rows, d = int(num_rows), weight.shape[1]
    wide = qkv.dtype if qkv.dtype == torch.float64 else torch.float32
    cos, sin = rope[:rows].to(wide).unsqueeze(1).unbind(2)  # [rows, 1, head_dim / 2]
    for i, w in enumerate(weight.to(wide)):
        part = qkv[:rows, i * heads * d : (i + 1) * heads * d]
        x = F.rms_norm(rearrange(part.to(wide), "t (h d) -> t h d", d=d), (d,), w, eps)
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
        part.copy_(rearrange(turned, "t h p two -> t (h p two)"))
    return qkv
