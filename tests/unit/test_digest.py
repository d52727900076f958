"""A digest tells any two contents apart, wherever they differ."""

import pytest
import torch

from fusedvit.model import digest
from fusedvit.model.digest import digest_of

SHAPES = [(3, 5), (1,), (0,), (7,), (4, 4, 2)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=[digest.CHUNK, 8], ids=["one chunk", "many chunks"], autouse=True)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", request.param)


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=drawn).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_counts(dtype: torch.dtype) -> None:
    before = digest_of(tensors(dtype))
    assert before == digest_of(tensors(dtype))
    for i, shape in enumerate(SHAPES):
        for at in range(torch.Size(shape).numel()):
            changed = tensors(dtype)
            flat = changed[i].view(-1)
            flat[at] = (
                torch.nextafter(flat[at].double(), torch.tensor(9.0).double())
                if dtype == torch.float64
                else (-flat[at])
            )
            assert digest_of(changed) != before, (i, at)


def test_changes_that_would_cancel_in_a_sum_count() -> None:
    a, b = torch.arange(1.0, 65.0), torch.arange(1.0, 65.0)
    before = digest_of([a, b])
    for change in (
        lambda a, b: a.view(8, 8)[[0, 1]].neg_(),
        lambda a, b: (a[0].neg_(), b[0].neg_()),
        lambda a, b: a.copy_(a.flip(0)),
        lambda a, b: (a[:2].copy_(b[2:4]), a[2:4].copy_(b[:2])),
        lambda a, b: (a[::8].neg_(), a[1::8].neg_()),
        lambda a, b: (a[0].add_(1), a[1].sub_(1)),
    ):
        mine, other = a.clone(), b.clone()
        change(mine, other)
        same = torch.equal(mine, a) and torch.equal(other, b)
        assert (digest_of([mine, other]) == before) == same


def test_memory_is_read_in_its_own_order_wherever_it_lies() -> None:
    a = torch.randn(6, 4)
    shifted = torch.zeros(25)[1:].view(6, 4).copy_(a)
    assert digest_of([a]) == digest_of([shifted]) == digest_of([a.t()]) != digest_of([a.t().contiguous()])
    assert digest_of([]) == []
