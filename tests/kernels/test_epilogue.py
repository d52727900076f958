"""Row statistics of the epilogue: written, merged, and exact where sums of squares are not. Its other functions are
tested with the GEMM that calls them (test_linear.py)."""

import pytest
import torch
import triton
import triton.language as tl

from fusedvit.kernels.epilogue import RowStats, merge_moments
from fusedvit.kernels.epilogue import store_moments as store_moments_of_tile
from fusedvit.kernels.reference.linear import moments, store_moments
from tests.kernels.support import NAN, random

EPS = 1e-6


@triton.jit
def _merge_kernel(
    stats_ptr, mean_ptr, rstd_ptr, num_rows, PARTS: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    mask = rows < num_rows
    mean, rstd = merge_moments(stats_ptr, rows, mask, 1e-6, PARTS, WIDTH, LENGTH, CHUNK)
    tl.store(mean_ptr + rows, mean, mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=mask)


@triton.jit
def _part_kernel(
    y_ptr, stats_ptr, num_rows, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    part = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = rows < num_rows, cols < N
    y = tl.load(y_ptr + rows[:, None] * N + cols[None, :], mask=mask_m[:, None] & mask_n[None, :], other=7.0)
    store_moments_of_tile(y, stats_ptr, rows, mask_m, mask_n, part, tl.minimum(N - part * BLOCK_N, BLOCK_N), PARTS)


def rows_of(rows: int, length: int, massive: bool, device: torch.device) -> torch.Tensor:
    x = random(rows, length, device=device)
    if massive:
        x[:, length // 3] = 2000.0
        x += 50.0
    return x


def blank(rows: int, length: int, width: int, device: torch.device) -> RowStats:
    storage = torch.full((rows * -(-length // width) * 2 + 5,), NAN, device=device)
    return RowStats.over(storage, rows, length, width)


def assert_moments(mean: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor) -> None:
    wide = x.double()
    torch.testing.assert_close(mean.double(), wide.mean(1), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(rstd.double(), torch.rsqrt(wide.var(1, correction=0) + EPS), rtol=2e-6, atol=0)


@pytest.mark.parametrize("massive", [False, True], ids=["even", "massive"])
@pytest.mark.parametrize(
    "length, width, factor",
    [
        (64, 64, 1),  # one part
        (72, 32, 1),  # a last part of 8
        (72, 32, 4),  # the same, four rows merged: narrow parts in the middle
        (96, 16, 3),  # 18 parts: more than a chunk of 16
        (40, 64, 1),  # a part wider than the row
    ],
)
def test_merged_moments(length: int, width: int, factor: int, massive: bool, device: torch.device) -> None:
    """Merged by the kernel and by the reference, against the moments of the whole row."""
    rows = 5
    x = rows_of(rows * factor, length, massive, device)
    stats = blank(rows * factor, length, width, device)
    store_moments(x, stats)
    merged = stats.merged(factor)
    assert merged.parts == factor * -(-length // width)
    mean, rstd = torch.full((2, rows), NAN, device=device)
    _merge_kernel[(1,)](
        merged.partials, mean, rstd, rows, PARTS=merged.parts, WIDTH=width, LENGTH=length, CHUNK=16, BLOCK_M=8
    )
    assert_moments(mean, rstd, x.view(rows, -1))
    assert_moments(*(m[:, 0] for m in moments(merged, rows, EPS)), x.view(rows, -1))


@pytest.mark.parametrize("massive", [False, True], ids=["even", "massive"])
@pytest.mark.parametrize("length", [64, 72])  # parts of 32: even, and a last one of 8
def test_stored_moments(length: int, massive: bool, device: torch.device) -> None:
    x = rows_of(5, length, massive, device)
    ours, ref = blank(5, length, 32, device), blank(5, length, 32, device)
    _part_kernel[(ours.parts,)](x, ours.partials, 5, N=length, PARTS=ours.parts, BLOCK_M=8, BLOCK_N=32)
    store_moments(x, ref)
    torch.testing.assert_close(ours.partials, ref.partials, rtol=2e-5, atol=1e-5)
    assert_moments(*(m[:, 0] for m in moments(ours, 5, EPS)), x)


def test_storage_past_the_parts_is_left(device: torch.device) -> None:
    storage = torch.full((5 * 3 * 2 + 4,), NAN, device=device)
    store_moments(random(5, 72, device=device), RowStats.over(storage, 5, 72, 32))
    assert storage[:-4].isfinite().all() and storage[-4:].isnan().all()
