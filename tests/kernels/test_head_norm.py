"""RMSNorm of the heads of q and k, and their rotation, against PyTorch's."""

from collections.abc import Callable

import pytest
import torch

from fusedvit.kernels.norms import head_norm_rope
from fusedvit.kernels.reference.norms import head_norm_rope as head_norm_rope_ref
from tests.kernels.support import NAN, assert_within, count, random

OPS = {"kernel": head_norm_rope, "twin": head_norm_rope_ref}
EPS = 1e-5


def plain(x: torch.Tensor, weight: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`x` `[T, heads, d]` with pairs as neighbours; each op rounds as Hugging Face's does."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    a, b = y.to(wide)[..., 0::2], y.to(wide)[..., 1::2]
    cos, sin = rope.to(wide)[:, None].unbind(2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("rows, heads, d", [(0, 2, 64), (1, 1, 64), (9, 2, 24), (17, 4, 64)])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_head_norm_rope(
    op: Callable[..., torch.Tensor], rows: int, heads: int, d: int, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = random(rows + 3, 3 * heads * d, device=device).to(dtype)
    qkv[rows:] = NAN
    weight = random(2, d, seed=1, device=device).to(dtype)
    angle = random(rows + 3, d // 2, seed=2, scale=3.0, device=device)
    rope = torch.stack([angle.cos(), angle.sin()], 1)
    q, k, v = (part.clone() for part in qkv[:rows].view(rows, 3, heads, d).unbind(1))
    out = op(qkv, weight, rope, count(rows, device), heads, EPS, 2)
    assert out is qkv and out[rows:].isnan().all()
    ours = out[:rows].view(rows, 3, heads, d).unbind(1)
    for got, x, w in zip(ours, (q, k), weight, strict=False):
        if rows:
            assert_within(got, plain(x.double(), w.double(), rope[:rows]), plain(x, w, rope[:rows]))
    assert torch.equal(ours[2], v)


def test_other_widths_are_refused(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="2 heads of 24"):
        head_norm_rope(torch.zeros(4, 100), torch.zeros(2, 24), torch.zeros(4, 2, 12), count(4, device), 2, EPS, 1)
