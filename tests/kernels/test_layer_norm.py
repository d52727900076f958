"""LayerNorm of rows against PyTorch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusedvit.kernels.epilogue import RowStats, Taps
from fusedvit.kernels.norms import After, layer_norm
from fusedvit.kernels.reference.linear import moments
from fusedvit.kernels.reference.norms import layer_norm as layer_norm_ref
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
    with pytest.raises(AssertionError, match="rows of one shape"):
        layer_norm(x, x[0], x[0], count(4, x.device), x, EPS, 1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Hugging Face: rounded, then scaled."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("massive", [False, True], ids=["even", "massive"])
@pytest.mark.parametrize("rows, n", [(1, 8), (4, 64), (21, 72), (5, 2056)])  # wide rows come two at a time
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_is_rms_norm(
    op: Callable[..., torch.Tensor], rows: int, n: int, massive: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = random(rows, n, device=device), random(n, seed=1, device=device)
    if massive:
        x[:, n // 3] += 200.0
    x, weight = x.to(dtype), weight.to(dtype)
    out = torch.full((rows + 5, n), NAN, dtype=dtype, device=device)
    op(torch.cat([x, out[rows:]]), weight, None, count(rows, device), out, EPS, 2)
    assert out[rows:].isnan().all(), "rows past the count were written"
    assert_within(out[:rows], rms_norm(x.double(), weight.double()), rms_norm(x, weight))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_what_follows(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    """GELU, positions and statistics, in place."""
    rows, n = 11, 40
    x, (weight, bias) = random(rows, n, device=device), random(2, n, seed=1, device=device)
    table, tap = random(9, n, seed=2, device=device), random(rows, 16, seed=3, device=device)
    index = random(rows, 16, seed=4, device=device).abs().mul(3).int().clamp(max=8)
    stats = RowStats.over(torch.full((rows * 2,), NAN, device=device), rows, n, n)
    expected = F.gelu(F.layer_norm(x, (n,), weight, bias, EPS)) + (table[index.long()] * tap[:, :, None]).sum(1)
    out = x.clone()
    after = After("gelu", Taps(table, index, tap), stats)
    op(out, weight, bias, count(rows, device), out, EPS, 2, after)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    mean, rstd = moments(stats, rows, EPS)
    torch.testing.assert_close(mean[:, 0], out.double().mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd[:, 0], torch.rsqrt(out.double().var(1, correction=0) + EPS), rtol=1e-5, atol=0)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_groups_of_rows_go_where_they_belong(op: Callable[..., torch.Tensor], unit: int, device: torch.device) -> None:
    groups, n = 5, 24
    x, weight = random(groups * unit, n, device=device), random(n, seed=1, device=device)
    order = torch.tensor([3, 0, 4, 1, 2, 2**30], dtype=torch.int32, device=device)
    out = torch.full((6 * unit, n), NAN, device=device)
    padded = torch.cat([x, out[:unit]])
    op(padded, weight, None, count(groups * unit, device), out, EPS, 2, After(order=order, unit=unit))
    there = out[: groups * unit].view(groups, unit, n)[order[:groups].long()].reshape(-1, n)
    torch.testing.assert_close(there, rms_norm(x, weight), rtol=1e-5, atol=1e-6)
    assert out[groups * unit :].isnan().all()


def test_impossible_successors() -> None:
    with pytest.raises(ValueError, match="'none' or 'gelu', got 'relu'"):
        After("relu")
    stats = RowStats.over(torch.zeros(2), 1, 8, 8)
    with pytest.raises(ValueError, match="in their own order"):
        After(stats=stats, order=torch.zeros(1, dtype=torch.int32))
