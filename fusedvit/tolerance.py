"""The error rule by which every kernel, block and tower is compared with PyTorch.

    max|ours - ref| <= 2    * max|pt - ref| + floor_max
    rms(ours - ref) <= 1.25 * rms(pt - ref) + floor_rms

`ref` is the same computation in a wider dtype (fp32, or fp64 where that is cheap). `pt` is PyTorch or Hugging Face in
the working dtype. No epsilon is chosen by hand: the limit is a multiple of the error that PyTorch itself makes.

The floors cover one case. With few elements, or values that happen to be representable, `pt` can be closer to `ref`
than its dtype allows in general, and a multiple of an error near zero is too strict a limit. Storing a result in the
working dtype costs up to half a unit in the last place (ulp), so `pt` is credited with at least that error:

    storage_max = ulp_w(max|ref|) / 2              the largest rounding error of a stored result
    storage_rms = rms(ulp_w(ref_i)) / sqrt(12)     rms of errors spread evenly over half an ulp to both sides
    floor_max   = 2    * max(storage_max - max|pt - ref|, 0) + 2 * ulp_r(max|ref|)
    floor_rms   = 1.25 * max(storage_rms - rms(pt - ref), 0) + 2 * ulp_r(rms(ref))

with ulp_w in the working dtype and ulp_r in ref's dtype. If pt's error exceeds its storage rounding, as in any block or
tower, the floor is two ulps of ref. A flat floor of two ulps of the working dtype at ref's largest value is too loose:
on a 27-layer tower in bf16 it passes an rms error of five times pt's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

FACTOR_MAX = 2.0
FACTOR_RMS = 1.25


@dataclass(frozen=True)
class Comparison:
    """The result of one comparison. Errors are absolute. Ratios are ours / pt: 1 if both are 0, inf if only pt's is 0,
    nan if either is NaN."""

    max_ours: float
    max_pt: float
    rms_ours: float
    rms_pt: float
    ratio_max: float
    ratio_rms: float
    floor_max: float
    floor_rms: float
    elements: int
    passed: bool
    reason: str  # empty when passed


@dataclass(frozen=True)
class Distribution:
    """How a ratio (ours / pt) spreads over many comparisons."""

    count: int
    p50: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """Many comparisons at once: the spread of both ratios, and how many failed."""

    ratio_max: Distribution
    ratio_rms: Distribution
    failures: int


def ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring numbers of `dtype` at `magnitude` (any shape, float64), subnormals included."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def compare(ours: torch.Tensor, ref: torch.Tensor, pt: torch.Tensor, dtype: torch.dtype | None = None) -> Comparison:
    """Compare `ours` with `ref` by the rule in this file's docstring.

    Args:
        ours, ref, pt: floating tensors of one shape, on one device.
        dtype: the working dtype; None for pt's (pass it if pt has been upcast for storage).

    Raises:
        ValueError: the shapes differ.
        TypeError: a tensor or `dtype` is not floating point.
    """
    working = pt.dtype if dtype is None else dtype
    _check_comparable(ours, ref, pt, working)
    if not ref.numel():
        return _verdict((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), 0, "")
    ours64, ref64, pt64 = ours.double(), ref.double(), pt.double()
    bad = [n for n, x in (("ours", ours64), ("ref", ref64), ("pt", pt64)) if not bool(torch.isfinite(x).all())]
    if bad:
        nan = (math.nan, math.nan)
        return _verdict(nan, nan, nan, ref.numel(), f"NaN or Inf in {', '.join(bad)}")
    error_ours, error_pt = _errors(ours64 - ref64), _errors(pt64 - ref64)
    return _verdict(error_ours, error_pt, _floors(ref64, error_pt, ref.dtype, working), ref.numel(), "")


def summarize(comparisons: Iterable[Comparison]) -> Summary:
    """The spread of the ratios of `comparisons`; a ratio that is NaN counts as inf.

    Raises:
        ValueError: `comparisons` is empty.
    """
    cases = list(comparisons)
    return Summary(
        distribution(c.ratio_max for c in cases),
        distribution(c.ratio_rms for c in cases),
        sum(not c.passed for c in cases),
    )


def distribution(ratios: Iterable[float]) -> Distribution:
    """p50, p99 and max of `ratios`, each an actual ratio (the nearest rank); NaN counts as inf.

    Raises:
        ValueError: `ratios` is empty.
    """
    ordered = sorted(math.inf if math.isnan(r) else float(r) for r in ratios)
    if not ordered:
        raise ValueError("a distribution needs at least one ratio, got none")

    def rank(q: float) -> float:
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

    return Distribution(len(ordered), rank(0.5), rank(0.99), ordered[-1])


def _check_comparable(ours: torch.Tensor, ref: torch.Tensor, pt: torch.Tensor, working: torch.dtype) -> None:
    if not ours.shape == ref.shape == pt.shape:
        raise ValueError(
            f"ours, ref and pt need one shape, got {tuple(ours.shape)}, {tuple(ref.shape)} and {tuple(pt.shape)}"
        )
    dtypes = (ours.dtype, ref.dtype, pt.dtype, working)
    if not all(d.is_floating_point for d in dtypes):
        raise TypeError(f"ours, ref, pt and dtype need floating point, got {', '.join(map(str, dtypes))}")


def _errors(difference: torch.Tensor) -> tuple[float, float]:
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def _floors(
    ref: torch.Tensor, error_pt: tuple[float, float], ref_dtype: torch.dtype, working: torch.dtype
) -> tuple[float, float]:
    largest, rms = ref.abs().max(), ref.square().mean().sqrt()
    storage_max = float(ulp(largest, working)) / 2
    storage_rms = float(ulp(ref, working).square().mean().sqrt()) / math.sqrt(12)
    floor_max = FACTOR_MAX * max(storage_max - error_pt[0], 0.0) + 2 * float(ulp(largest, ref_dtype))
    floor_rms = FACTOR_RMS * max(storage_rms - error_pt[1], 0.0) + 2 * float(ulp(rms, ref_dtype))
    return floor_max, floor_rms


def _verdict(
    ours: tuple[float, float], pt: tuple[float, float], floors: tuple[float, float], elements: int, reason: str
) -> Comparison:
    limits = FACTOR_MAX * pt[0] + floors[0], FACTOR_RMS * pt[1] + floors[1]
    if not reason and ours[0] > limits[0]:
        reason = f"max error {ours[0]:.3g} is over {limits[0]:.3g} (2 x {pt[0]:.3g} + {floors[0]:.3g})"
    if not reason and ours[1] > limits[1]:
        reason = f"rms error {ours[1]:.3g} is over {limits[1]:.3g} (1.25 x {pt[1]:.3g} + {floors[1]:.3g})"
    ratios = _ratio(ours[0], pt[0]), _ratio(ours[1], pt[1])
    return Comparison(ours[0], pt[0], ours[1], pt[1], *ratios, *floors, elements, not reason, reason)


def _ratio(ours: float, pt: float) -> float:
    if math.isnan(ours) or math.isnan(pt):
        return math.nan
    if pt == 0.0:
        return 1.0 if ours == 0.0 else math.inf
    return ours / pt
