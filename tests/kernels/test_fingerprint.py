"""Fingerprints: the kernel reads real addresses, even in the interpreter, and agrees with the reference bit for bit."""

from collections.abc import Callable

import pytest
import torch

from fusedvit.kernels.fingerprint import SAMPLES, FingerprintSources, fingerprint
from fusedvit.kernels.reference.fingerprint import fingerprint as fingerprint_ref
from tests.kernels.support import random

OPS = {"kernel": fingerprint, "reference": fingerprint_ref}
Op = Callable[..., torch.Tensor]


def sources(device: torch.device) -> list[torch.Tensor]:
    return [
        random(40, 24, device=device).half(),
        random(3, device=device).bfloat16(),  # fewer words than samples
        random(SAMPLES, seed=1, device=device).half(),  # a sample a word exactly
        random(7, 300, seed=2, device=device),  # 4200 words, samples 16.4 words from each other
        random(16, 8, seed=3, device=device).half().T,  # dense but not contiguous
        torch.zeros(5, device=device),
        torch.zeros(6, device=device),  # the same words, but another length
    ]


def hashes(op: Op, tensors: list[torch.Tensor]) -> torch.Tensor:
    found = FingerprintSources.of(tensors)
    return op(found, torch.zeros(len(tensors), dtype=torch.int32, device=found.pointers.device))


def test_kernel_matches_the_reference(device: torch.device) -> None:
    tensors = sources(device)
    assert torch.equal(hashes(fingerprint, tensors), hashes(fingerprint_ref, tensors))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_equal_bits_give_equal_hashes(op: Op, device: torch.device) -> None:
    tensors = sources(device)
    assert torch.equal(hashes(op, tensors), hashes(op, [t.clone() for t in tensors]))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.data.mul_(1.01),
        lambda t: t.data.copy_(t.flip(0)),  # the same values elsewhere
        lambda t: t.data.neg_(),
        lambda t: t.data.zero_(),
    ],
    ids=["scaled", "moved", "negated", "zeroed"],
)
def test_writes_to_all_of_a_tensor_show(write: Callable[[torch.Tensor], object], op: Op, device: torch.device) -> None:
    tensors = sources(device)[:4]
    before = hashes(op, tensors)
    for t in tensors:
        write(t)
    assert (hashes(op, tensors) != before).all()


def test_small_tensors_are_read_whole(device: torch.device) -> None:
    """Up to SAMPLES words every one is sampled: one changed bit shows."""
    t = random(SAMPLES // 2, device=device)
    before = hashes(fingerprint, [t])
    for i in (0, 63, SAMPLES // 2 - 1):
        changed = t.clone()
        changed.view(torch.int32)[i] ^= 1
        assert not torch.equal(hashes(fingerprint, [changed]), before), f"element {i}"


def test_no_sources(device: torch.device) -> None:
    assert hashes(fingerprint, []).numel() == 0


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("items", [0, 1, 5, SAMPLES])
@pytest.mark.parametrize("hashing", [True, False])
def test_a_grid_is_copied_with_them(
    hashing: bool, items: int, dtype: torch.dtype, op: Op, device: torch.device
) -> None:
    """Its values as they are, of any sign; nothing past its last row is written."""
    found = FingerprintSources.of(sources(device))
    wide = torch.arange(8 * items, device=device).reshape(items, 8).to(dtype) * 2**20 - 3
    rows = torch.full((items + 2, 3), -7, dtype=torch.int64, device=device)
    out = torch.zeros(len(found.tensors) if hashing else 0, dtype=torch.int32, device=device)
    for grid in (wide[:, ::3], wide[:, :3].T.contiguous().T, wide[:, 1:4]):
        op(found, out, grid, rows)
        assert torch.equal(rows[:items], grid.long()) and (rows[items:] == -7).all()
    if hashing:
        assert torch.equal(out, hashes(op, list(found.tensors)))
