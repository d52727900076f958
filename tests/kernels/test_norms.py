"""Norms of rows and of heads against PyTorch's, and rows gathered in another order."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from fusedvit.kernels import norms
from fusedvit.kernels.epilogue import RowStats, Taps
from fusedvit.kernels.norms import After, gather_rows, head_norm_rope, layer_norm
from fusedvit.kernels.reference import norms as reference
from fusedvit.kernels.reference.linear import moments
from tests.kernels.support import NAN, assert_within, count, padded, random

EPS = 1e-6
either = pytest.mark.parametrize("ops", [norms, reference], ids=["kernel", "reference"])


def normalise(
    op: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rows: int, capacity: int
) -> torch.Tensor:
    """`op` on fewer programs than there are blocks of rows."""
    padded = torch.cat([x, x.new_full((capacity - len(x), x.shape[1]), NAN)])
    return op(padded, weight, bias, count(rows, x.device), torch.full_like(padded, NAN), EPS, 2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("massive", [False, True], ids=["even", "massive"])
@pytest.mark.parametrize("rows, n", [(1, 8), (4, 64), (21, 48), (21, 72)])  # blocks have 4 rows
@either
def test_is_layer_norm(
    ops: ModuleType, rows: int, n: int, massive: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = random(rows, n, device=device), random(n, seed=1, device=device), random(n, seed=2, device=device)
    if massive:
        x[:, n // 3] += 200.0
        x[:, n // 2] -= 2000.0
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    out = normalise(ops.layer_norm, x, weight, bias, rows, rows + 6)
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


def test_strided_columns_are_refused(device: torch.device) -> None:
    x = torch.zeros(4, 16, device=device)[:, ::2]
    with pytest.raises(AssertionError, match="expected equal shapes"):
        layer_norm(x, x[0], x[0], count(4, x.device), x, EPS, 1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Hugging Face: rounded, then scaled."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("massive", [False, True], ids=["even", "massive"])
@pytest.mark.parametrize("rows, n", [(1, 8), (4, 64), (21, 72), (5, 2056)])  # wide rows come two at a time
@either
def test_is_rms_norm(
    ops: ModuleType, rows: int, n: int, massive: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = random(rows, n, device=device), random(n, seed=1, device=device)
    if massive:
        x[:, n // 3] += 200.0
    x, weight = x.to(dtype), weight.to(dtype)
    out = torch.full((rows + 5, n), NAN, dtype=dtype, device=device)
    ops.layer_norm(torch.cat([x, out[rows:]]), weight, None, count(rows, device), out, EPS, 2)
    assert out[rows:].isnan().all(), "rows past the count were written"
    assert_within(out[:rows], rms_norm(x.double(), weight.double()), rms_norm(x, weight))


@either
def test_what_follows(ops: ModuleType, device: torch.device) -> None:
    """GELU, positions and statistics, in place."""
    rows, n = 11, 40
    x, (weight, bias) = random(rows, n, device=device), random(2, n, seed=1, device=device)
    table, tap = random(9, n, seed=2, device=device), random(rows, 16, seed=3, device=device)
    index = random(rows, 16, seed=4, device=device).abs().mul(3).int().clamp(max=8)
    stats = RowStats.over(torch.full((rows * 2,), NAN, device=device), rows, n, n)
    expected = F.gelu(F.layer_norm(x, (n,), weight, bias, EPS)) + (table[index.long()] * tap[:, :, None]).sum(1)
    out = x.clone()
    after = After("gelu", Taps(table, index, tap), stats)
    ops.layer_norm(out, weight, bias, count(rows, device), out, EPS, 2, after)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    mean, rstd = moments(stats, rows, EPS)
    torch.testing.assert_close(mean[:, 0], out.double().mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd[:, 0], torch.rsqrt(out.double().var(1, correction=0) + EPS), rtol=1e-5, atol=0)


@pytest.mark.parametrize("unit", [1, 4])
@either
def test_groups_of_rows_are_written_in_order(ops: ModuleType, unit: int, device: torch.device) -> None:
    groups, n = 5, 24
    x, weight = random(groups * unit, n, device=device), random(n, seed=1, device=device)
    order = torch.tensor([3, 0, 4, 1, 2, 2**30], dtype=torch.int32, device=device)
    out = torch.full((6 * unit, n), NAN, device=device)
    padded = torch.cat([x, out[:unit]])
    ops.layer_norm(padded, weight, None, count(groups * unit, device), out, EPS, 2, After(order=order, unit=unit))
    moved = out[: groups * unit].view(groups, unit, n)[order[:groups].long()].reshape(-1, n)
    torch.testing.assert_close(moved, rms_norm(x, weight), rtol=1e-5, atol=1e-6)
    assert out[groups * unit :].isnan().all()


def test_what_cannot_follow_a_norm() -> None:
    with pytest.raises(ValueError, match="'none' or 'gelu', got 'relu'"):
        After("relu")
    stats = RowStats.over(torch.zeros(2), 1, 8, 8)
    with pytest.raises(ValueError, match="expected statistics or an order, got both"):
        After(stats=stats, order=torch.zeros(1, dtype=torch.int32))


HEAD_EPS = 1e-5


def normed_and_rotated(x: torch.Tensor, weight: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`x` `[T, heads, d]` with pairs as neighbours; each op rounds as Hugging Face's does."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + HEAD_EPS)).to(x.dtype)
    a, b = y.to(wide)[..., 0::2], y.to(wide)[..., 1::2]
    cos, sin = rope.to(wide)[:, None].unbind(2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("rows, heads, d", [(0, 2, 64), (1, 1, 64), (9, 2, 24), (17, 4, 64), (11, 3, 72)])
@pytest.mark.parametrize("parts", (2, 3))
@either
def test_head_norm_rope(
    ops: ModuleType, parts: int, rows: int, heads: int, d: int, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = random(rows + 3, 3 * heads * d, device=device).to(dtype)
    qkv[rows:] = NAN
    weight = random(parts, d, seed=1, device=device).to(dtype)
    angle = random(rows + 3, d // 2, seed=2, scale=3.0, device=device)
    rope = torch.stack([angle.cos(), angle.sin()], 1)
    q, k, v = (part.clone() for part in qkv[:rows].view(rows, 3, heads, d).unbind(1))
    out = ops.head_norm_rope(qkv, weight, rope, count(rows, device), heads, HEAD_EPS, 2)
    assert out is qkv and out[rows:].isnan().all()
    ours = out[:rows].view(rows, 3, heads, d).unbind(1)
    turned, still = rope[:rows], torch.stack([torch.ones_like(angle), torch.zeros_like(angle)], 1)[:rows]
    for got, x, w, by in zip(ours, (q, k, v), weight, (turned, turned, still), strict=False):
        if rows:
            assert_within(got, normed_and_rotated(x.double(), w.double(), by), normed_and_rotated(x, w, by))
    assert parts == 3 or torch.equal(ours[2], v)


@either
def test_heads_are_clamped_first(ops: ModuleType, device: torch.device) -> None:
    rows, heads, d = 5, 3, 24
    qkv, bounds = random(rows, 3 * heads * d, device=device), torch.tensor([[-0.5, 0.7], [-0.1, 0.2], [0.1, 0.3]])
    parts = qkv.view(rows, 3, heads, d).unbind(1)
    clamped = torch.stack([x.clamp(*b.tolist()) for x, b in zip(parts, bounds, strict=True)], 1).reshape(rows, -1)
    weight, rope = random(3, d, seed=1, device=device), random(rows, 2, d // 2, seed=2, device=device)
    given = weight, rope, count(rows, device), heads, HEAD_EPS, 2
    expected = ops.head_norm_rope(clamped.clone(), *given)
    assert torch.equal(ops.head_norm_rope(qkv, *given, bounds.to(device)), expected)


def test_heads_of_another_width_are_refused(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="2 heads of 24"):
        head_norm_rope(torch.zeros(4, 100), torch.zeros(2, 24), torch.zeros(4, 2, 12), count(4, device), 2, HEAD_EPS, 1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("groups, unit, n", [(0, 4, 24), (1, 4, 24), (7, 4, 25), (5, 1, 8), (3, 9, 130)])
@either
def test_gather_rows(ops: ModuleType, groups: int, unit: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows may be padded; those past the count are neither read nor written."""
    rows = groups * unit
    x = random(rows, n, device=device).to(dtype)
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(groups)).int().to(device)
    poisoned = torch.cat([order, order.new_full((2,), 2**30)])
    out = padded(x[:0], rows + 2 * unit)
    ops.gather_rows(padded(x, rows + 2 * unit), poisoned, count(rows, device), out, unit, 2)
    expected = x.view(groups, unit, n)[order.long()].reshape(rows, n)
    assert torch.equal(out[:rows], expected) and out[rows:].isnan().all()


def test_gathering_into_another_shape_is_refused(device: torch.device) -> None:
    x = torch.full((4, 8), NAN, device=device)
    with pytest.raises(AssertionError, match="expected equal shapes"):
        gather_rows(x, torch.zeros(1, dtype=torch.int32), count(4, x.device), x[:, :4], 4, 1)
