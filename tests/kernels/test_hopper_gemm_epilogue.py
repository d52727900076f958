"""The Hopper GEMM's own gelu: the kernel's text, run on torch's tensors, against erfc in double."""

import math
import types

import pytest
import torch

INF = math.inf
OFF = 4e-5  # of itself; fp16 rounds by 2.4e-4 to 4.9e-4
TINY, TORCH_OFF = 1e-37, 1e-6  # where fp32 ends, and what torch's cancellation leaves


class OnTorch:
    """What the formula takes of Gluon, as PTX has it: min drops a NaN, max keeps it if asked to."""

    abs, exp2 = staticmethod(torch.abs), staticmethod(torch.exp2)

    @staticmethod
    def minimum(x: torch.Tensor, most: float) -> torch.Tensor:
        return torch.fmin(x, torch.tensor(most))

    @staticmethod
    def maximum(x: torch.Tensor, least: float, propagate_nan: object = None) -> torch.Tensor:
        return (torch.fmax if propagate_nan is None else torch.maximum)(x, torch.tensor(least))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """`_gelu_erf` of fp32 values."""
    from fusedvit.kernels.hopper import gemm_epilogue

    found = {"gl": OnTorch, "tl": gemm_epilogue.tl, "_reciprocal": torch.reciprocal}
    return types.FunctionType(gemm_epilogue._gelu_erf.fn.__code__, found)(x)


def exact(x: torch.Tensor) -> torch.Tensor:
    """x Phi(x) in double, of which torch's own gelu leaves nothing below -8."""
    return x.double() * torch.special.erfc(x.double() * -math.sqrt(0.5)) / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    found, right = gelu(x.float()), exact(x)
    assert torch.allclose(found.double(), right, rtol=OFF, atol=TINY)
    kept = right.abs() >= torch.finfo(dtype).tiny
    stored = found.to(dtype)[kept].view(torch.int16).int() - right.to(dtype)[kept].view(torch.int16).int()
    assert stored.abs().max() <= 1 and stored.count_nonzero() < 0.02 * len(stored), "rounded the same way, nearly all"


def test_fp32_over_its_whole_range() -> None:
    x = torch.arange(0, 0x7F80_0000, 4999, dtype=torch.int32).view(torch.float32)
    for signed in (x, -x):
        found, theirs = gelu(signed), torch.nn.functional.gelu(signed)
        assert torch.allclose(found.double(), exact(signed), rtol=OFF, atol=TINY)
        assert torch.allclose(found[theirs.isfinite()], theirs[theirs.isfinite()], rtol=OFF, atol=TORCH_OFF)
        assert found.isfinite().all(), "torch's own overflows in the last octave"


def test_infinities_and_nan() -> None:
    """torch has NaN below too, where the limit is 0."""
    assert gelu(torch.tensor([INF, -INF])).tolist() == [INF, 0.0]
    assert gelu(torch.tensor([math.nan])).isnan().all()
