"""Reference of `kernels.attention`: one `scaled_dot_product_attention` per frame."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange

from fusedvit.kernels.attention import Segments
from fusedvit.kernels.reference.linear import clamp
from fusedvit.kernels.tile_configs import AttentionConfig


def attention(
    qkv: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
    heads: int,
    head_dim: int,
    config: AttentionConfig,
    clip: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `fusedvit.kernels.attention.attention`. `config` is not used."""
    cu_seqlens = segments.cu_seqlens.tolist()
    for begin, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        if not segments.above < end - begin <= segments.up_to:
            continue
        q, k, v = rearrange(qkv[begin:end], "t (three h d) -> three 1 h t d", three=3, h=heads, d=head_dim)
        frame = F.scaled_dot_product_attention(q, k, v, scale=math.log(2))
        rows = rearrange(frame, "1 h t d -> t (h d)")
        out[begin:end] = rows if clip is None else clamp(rows, clip)
    return out
