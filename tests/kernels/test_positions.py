"""cos and sin of the metadata kernel against float64, and packed: what is unpacked is what was packed."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from fusedvit.kernels.metadata import vision_metadata
from fusedvit.kernels.positions import PAIRS_AT_A_TIME, cos_sin, packed_width
from fusedvit.kernels.reference.metadata import vision_metadata as vision_metadata_ref
from fusedvit.kernels.reference.positions import packed_cos_sin
from tests.kernels.metadata_cases import UNWRITTEN, assert_same_packed, fill, frames_of
from tests.kernels.support import count, random

FARTHEST, BOUND = 16384.0, 1.2e-7  # radians; twice what rounding to fp32 near 1 is off by
BLOCK = 8192
HEADS = [24, 64, 72, 80, 128]  # one of fewer pairs than are repeated; Qwen's and GLM's
GRID = [(1, 2, 256), (0, 0, 0), (2, 6, 4), (1, 38, 2)]


@triton.jit
def _cos_sin_kernel(angle_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cos, sin = cos_sin(tl.load(angle_ptr + offs, mask=offs < n, other=0.0))
    tl.store(out_ptr + offs, cos, mask=offs < n)
    tl.store(out_ptr + n + offs, sin, mask=offs < n)


def quarters() -> torch.Tensor:
    """Multiples of pi / 4: where cos or sin is 0, and where the quadrant changes; and their neighbours."""
    at = (torch.arange(int(FARTHEST / math.pi * 4), dtype=torch.float64) * (math.pi / 4)).float()
    return torch.cat([at, torch.nextafter(at, at + 1), torch.nextafter(at, torch.zeros(()))])


@pytest.mark.parametrize(
    "angle",
    [
        torch.linspace(0, FARTHEST, 200_001, dtype=torch.float64).float(),
        torch.linspace(0, 8, 100_001, dtype=torch.float64).float(),
        torch.arange(FARTHEST + 1),  # of frequency 1
        2.0 ** torch.arange(-40, 15),
        quarters(),
        torch.tensor([0.0, FARTHEST]),
    ],
    ids=["all", "first", "integers", "powers of two", "quarters", "ends"],
)
def test_cos_and_sin_are_off_by_little(angle: torch.Tensor, device: torch.device) -> None:
    out = torch.full((2, len(angle)), float("nan"), device=device)
    _cos_sin_kernel[(triton.cdiv(len(angle), BLOCK),)](angle.to(device), out, len(angle), BLOCK=BLOCK)
    exact = torch.stack([angle.double().cos(), angle.double().sin()])
    assert (out.cpu().double() - exact).abs().max() <= BOUND
    assert out.abs().max() <= 1, "past what 16 bits hold"


def table(rows: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Angles from everywhere, and those where cos or sin is 0 or 1 or -1."""
    angle = random(rows, head_dim // 2, scale=50.0, device=device)
    angle[0, :5] = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0], device=device) * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1)


@pytest.mark.parametrize("head_dim", HEADS)
def test_the_kernel_packs_what_it_would_store_in_fp32(head_dim: int, device: torch.device) -> None:
    """Every bit of the packed table; cos and sin of the reference differ from the kernel's in their last bits."""
    options = {"head_dim": head_dim, "side": 0, "room": 7}
    ours, ref = (fill(op, GRID, device, packed=True, **options) for op in (vision_metadata, vision_metadata_ref))
    assert_same_packed(ours, ref)
    tokens = sum(frames_of(GRID))
    assert ours.rope.isnan().all(), "both were written"
    without = fill(vision_metadata, GRID, device, **options)
    packed = torch.full_like(ours.packed_cos_sin, UNWRITTEN)
    assert torch.equal(ours.packed_cos_sin, packed_cos_sin(without.rope, count(tokens, device), packed))


def test_windows_have_packed_cos_sin(device: torch.device) -> None:
    options = {"head_dim": 80, "side": 0, "window": 8, "packed": True}
    assert_same_packed(*(fill(op, [(2, 18, 26)], device, **options) for op in (vision_metadata, vision_metadata_ref)))


@pytest.mark.parametrize("head_dim", HEADS)
def test_packed_columns_hold_cos_and_sin(head_dim: int) -> None:
    t = table(100, head_dim, torch.device("cpu"))
    packed = torch.full((130, packed_width(head_dim)), UNWRITTEN, dtype=torch.int32)
    packed_cos_sin(t, count(100, t.device), packed)
    assert (packed[100:] == UNWRITTEN).all(), "rows past the count"
    pairs, whole = head_dim // 2, packed[:100].long()
    for i, half in enumerate((whole & 0xFFFF, whole >> 16 & 0xFFFF)):
        back = half.double() / 32768 - 1
        first = torch.arange(packed.shape[1]) % pairs
        assert (back - t[:, i, first]).abs().max() <= 2**-15
    for col in range(0, 6 * head_dim, 2 * PAIRS_AT_A_TIME):  # neighbours, wherever in a head a read begins
        first, wanted = col // 2 % pairs, (col // 2 + torch.arange(PAIRS_AT_A_TIME)) % pairs
        assert torch.equal(packed[:, first : first + PAIRS_AT_A_TIME], packed[:, wanted])
    assert packed_width(head_dim) * 4 % 16 == 0, "rows that the copy engine takes"


def test_widths_must_fit(device: torch.device) -> None:
    def narrower(grid, inv_freq, out, layout):  # type: ignore[no-untyped-def]
        return vision_metadata(grid, inv_freq, replace(out, packed_cos_sin=out.packed_cos_sin[:, :36]), layout)

    with pytest.raises(AssertionError, match="expected 68 columns, or 0, got 36"):
        fill(narrower, [(1, 2, 2)], device, head_dim=72, packed=True)
