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
        random(4 * SAMPLES, seed=1, device=device).half(),  # a sample a group exactly
        random(4 * SAMPLES + 7, seed=1, device=device).half(),  # one group more, and three words
        random(70, 300, seed=2, device=device),  # samples 20.5 words from each other
        random(3001, seed=4, device=device).half()[1:],  # at no multiple of 8 bytes
        random(16, 8, seed=3, device=device).half().T,  # dense but not contiguous
        random(20001, seed=5, device=device).half()[3:],
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
    tensors = sources(device)[:6]
    before = hashes(op, tensors)
    for t in tensors:
        write(t)
    assert (hashes(op, tensors) != before).all()


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_writes_to_a_part_of_a_wide_tensor_show(dtype: torch.dtype, op: Op, device: torch.device) -> None:
    """tests/unit/test_fingerprint_coverage.py has every pattern and every shape."""
    t = random(3456, 1152, device=device).to(dtype)
    before = hashes(op, [t])
    for rows, columns in (
        (slice(None), slice(700, 712)),
        (slice(None), slice(3, None, 100)),
        (slice(72, 144), slice(None)),
        (slice(99, None, 100), slice(None)),
        (slice(1000, 1346), slice(500, 616)),
    ):
        changed = t.clone()
        changed[rows, columns] *= 1.01
        assert not torch.equal(hashes(op, [changed]), before), (rows, columns)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_small_tensors_are_read_whole(op: Op, device: torch.device) -> None:
    """Up to SAMPLES groups every one is read: one changed bit shows."""
    t = random(2 * SAMPLES + 1, device=device)
    before = hashes(op, [t])
    for i in (0, 63, SAMPLES // 2 - 1, 2 * SAMPLES - 1, 2 * SAMPLES):
        changed = t.clone()
        changed.view(torch.int32)[i] ^= 1
        assert not torch.equal(hashes(op, [changed]), before), f"element {i}"


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
