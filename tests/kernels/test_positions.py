"""cos and sin of the metadata kernel against float64, over all angles that it takes."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fusedvit.kernels.positions import _cos_sin

FARTHEST, BOUND = 16384.0, 1.2e-7  # radians; twice what rounding to fp32 near 1 is off by
BLOCK = 8192


@triton.jit
def _kernel(angle_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cos, sin = _cos_sin(tl.load(angle_ptr + offs, mask=offs < n, other=0.0))
    tl.store(out_ptr + offs, cos, mask=offs < n)
    tl.store(out_ptr + n + offs, sin, mask=offs < n)


def quarters() -> torch.Tensor:
    """Multiples of pi / 4: where cos or sin is 0, and where the reduction changes its mind; and their neighbours."""
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
    _kernel[(triton.cdiv(len(angle), BLOCK),)](angle.to(device), out, len(angle), BLOCK=BLOCK)
    exact = torch.stack([angle.double().cos(), angle.double().sin()])
    assert (out.cpu().double() - exact).abs().max() <= BOUND
    assert out.abs().max() <= 1, "past what a word holds"
