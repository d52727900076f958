"""Rows in another order."""

from collections.abc import Callable

import pytest
import torch

from fusedvit.kernels.norms import gather_rows
from fusedvit.kernels.reference.norms import gather_rows as gather_rows_ref
from tests.kernels.support import NAN, count, padded, random

OPS = {"kernel": gather_rows, "twin": gather_rows_ref}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("groups, unit, n", [(0, 4, 24), (1, 4, 24), (7, 4, 25), (5, 1, 8), (3, 9, 130)])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_gather(
    op: Callable[..., torch.Tensor], groups: int, unit: int, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows may be apart; those past the count are neither read nor written."""
    rows = groups * unit
    x = random(rows, n, device=device).to(dtype)
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(groups)).int().to(device)
    poisoned = torch.cat([order, order.new_full((2,), 2**30)])
    out = padded(x[:0], rows + 2 * unit)
    op(padded(x, rows + 2 * unit), poisoned, count(rows, device), out, unit, 2)
    expected = x.view(groups, unit, n)[order.long()].reshape(rows, n)
    assert torch.equal(out[:rows], expected) and out[rows:].isnan().all()


def test_other_shapes_are_refused(device: torch.device) -> None:
    x = torch.full((4, 8), NAN, device=device)
    with pytest.raises(AssertionError, match="rows of one shape"):
        gather_rows(x, torch.zeros(1, dtype=torch.int32), count(4, x.device), x[:, :4], 4, 1)
