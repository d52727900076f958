"""LayerNorm of rows against PyTorch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusedvit.kernels.layer_norm import layer_norm
from fusedvit.kernels.reference.layer_norm import layer_norm as layer_norm_ref
from tests.kernels.support import NAN, assert_within, count, random

OPS = {"kernel": layer_norm, "twin": layer_norm_ref}
EPS = 1e-6


def normalise(
    op: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rows: int, capacity: int
) -> torch.Tensor:
    """`op` on fewer programs than there are blocks of rows."""
    padded = torch.cat([x, x.new_full((capacity - len(x), x.shape[1]), NAN)])
    return op(padded, weight, bias, count(rows, x.device), torch.full_like(padded, NAN), EPS, 2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("massive", [False, True], ids=["even", "massive"])
@pytest.mark.parametrize("rows, n", [(1, 8), (4, 64), (21, 48), (21, 72)])  # blocks have 4 rows
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_is_layer_norm(
    op: Callable[..., torch.Tensor], rows: int, n: int, massive: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = random(rows, n, device=device), random(n, seed=1, device=device), random(n, seed=2, device=device)
    if massive:
        x[:, n // 3] += 200.0
        x[:, n // 2] -= 2000.0
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    out = normalise(op, x, weight, bias, rows, rows + 6)
    assert out[rows:].isnan().all(), "rows past the count were written"
    ref = F.layer_norm(x.double(), (n,), weight.double(), bias.double(), EPS)
    assert_within(out[:rows], ref, F.layer_norm(x, (n,), weight, bias, EPS))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 21])
def test_rows_past_the_count_change_nothing(rows: int, device: torch.device) -> None:
    x, (weight, bias) = random(21, 72, device=device), random(2, 72, seed=1, device=device)
    whole = normalise(layer_norm, x, weight, bias, 21, 21)
    part = normalise(layer_norm, x[:rows], weight, bias, rows, 30)
    assert torch.equal(part[:rows], whole[:rows])


def test_a_constant_row_is_the_bias(device: torch.device) -> None:
    """Variance 0: epsilon keeps it finite."""
    bias = random(40, seed=2, device=device)
    out = normalise(layer_norm, torch.full((2, 40), 3.0, device=device), torch.ones_like(bias), bias, 2, 2)
    torch.testing.assert_close(out, bias.expand(2, -1), rtol=0, atol=1e-4)


def test_other_layouts_are_refused(device: torch.device) -> None:
    x = torch.zeros(4, 16, device=device)[:, ::2]
    with pytest.raises(AssertionError, match="contiguous"):
        layer_norm(x, x[0], x[0], count(4, x.device), x, EPS, 1)
