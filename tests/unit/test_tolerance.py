"""The tolerance rule: what passes, what cannot, and that its floor does not soften it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.tolerance import FACTOR_MAX, FACTOR_RMS, compare, distribution, summarize, ulp


def _tower_like(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """ref [60, 96] in fp32 and pt in the working dtype, with an error of 1 % (as a deep bf16 tower's)."""
    generator = torch.Generator().manual_seed(seed)
    ref = torch.randn(60, 96, generator=generator)
    return ref, (ref + 0.01 * torch.randn(60, 96, generator=generator)).to(dtype)


def test_same_as_pytorch_passes_with_ratio_one() -> None:
    ref, pt = _tower_like()
    verdict = compare(pt.clone(), ref, pt)
    assert verdict.passed and verdict.reason == ""
    assert verdict.ratio_max == verdict.ratio_rms == 1.0
    assert verdict.max_ours == verdict.max_pt > 0
    assert verdict.elements == ref.numel()


def test_a_better_result_passes() -> None:
    ref, pt = _tower_like()
    verdict = compare(ref.clone(), ref, pt)
    assert verdict.passed and verdict.ratio_max == 0.0


@pytest.mark.parametrize(("factor", "passes"), [(0.5, True), (1.2, True), (1.3, False), (2.5, False)])
def test_rms_factor_decides(factor: float, passes: bool) -> None:
    ref, pt = _tower_like(dtype=torch.float32)
    verdict = compare(ref + factor * (pt - ref), ref, pt)
    assert verdict.passed is passes
    assert verdict.ratio_rms == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize(("factor", "passes"), [(1.9, True), (2.1, False)])
def test_max_factor_decides(factor: float, passes: bool) -> None:
    """One element alone: the rms does not notice it, the maximum does."""
    ref, pt = _tower_like(dtype=torch.float32)
    ours = pt.clone()
    ours[7, 11] = ref[7, 11] + factor * (pt - ref).abs().max()
    verdict = compare(ours, ref, pt)
    assert verdict.passed is passes
    assert ("max error" in verdict.reason) is not passes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["ours", "ref", "pt"])
def test_not_finite_fails(value: float, which: str) -> None:
    ref, pt = _tower_like()
    tensors = {"ours": pt.clone(), "ref": ref, "pt": pt}
    tensors[which][3, 3] = value
    verdict = compare(**tensors)
    assert not verdict.passed and math.isnan(verdict.ratio_max)
    assert verdict.reason == f"NaN or Inf in {which}"


def test_not_finite_everywhere_alike_fails_too() -> None:
    ref, pt = _tower_like()
    ref[0], pt[0] = math.nan, math.nan
    assert not compare(pt.clone(), ref, pt).passed


def test_floor_is_silent_for_a_tower() -> None:
    """pt is worse than its storage: nothing but two ulps of ref is added, to either bound."""
    ref, pt = _tower_like()
    verdict = compare(pt, ref, pt)
    assert verdict.floor_max == 2 * float(ulp(ref.double().abs().max(), torch.float32))
    assert verdict.floor_rms < 1e-4 * verdict.rms_pt


def test_floor_credits_pytorch_with_its_storage_rounding() -> None:
    """pt hits ref exactly: one ulp off is within twice half an ulp, two ulps are not."""
    ref = torch.full((8,), 1.5)
    pt = ref.bfloat16()
    step = torch.finfo(torch.bfloat16).eps  # ulp at 1.5
    ours = pt.clone()
    ours[0] += step
    # one element of eight: the rms (0.35 ulp) is within 1.25 * 0.29 ulp
    assert compare(ours, ref, pt).passed
    ours[0] += step
    verdict = compare(ours, ref, pt)
    assert not verdict.passed and verdict.ratio_max == math.inf


def test_working_dtype_can_be_told() -> None:
    ref = torch.full((8,), 1.5)
    ours = ref.clone()
    ours[0] += torch.finfo(torch.bfloat16).eps
    assert not compare(ours, ref, ref.clone()).passed
    assert compare(ours, ref, ref.clone(), dtype=torch.bfloat16).passed


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.floats(1e-3, 1e3),
    st.floats(1.01, 50.0),
)
def test_never_softer_than_one_ulp_of_storage(seed: int, dtype: torch.dtype, scale: float, worse: float) -> None:
    """Whatever pt does, an error past 2 x max(pt, half an ulp) + 2 ulps of ref fails."""
    generator = torch.Generator().manual_seed(seed)
    ref = torch.randn(32, generator=generator, dtype=torch.float64) * scale
    pt = ref.to(dtype)
    half = float(ulp(ref.abs().max(), dtype)) / 2
    limit = FACTOR_MAX * max(float((pt.double() - ref).abs().max()), half)
    ours = ref.clone()
    ours[0] += worse * limit
    assert not compare(ours, ref, pt).passed


def test_ulp_of_known_numbers() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        info = torch.finfo(dtype)
        magnitude = torch.tensor([1.0, 1.99, 2.0, -3.0, 0.0], dtype=torch.float64)
        expected = [info.eps, info.eps, 2 * info.eps, 2 * info.eps, info.tiny * info.eps]
        assert ulp(magnitude, dtype).tolist() == expected


def test_empty_passes() -> None:
    empty = torch.empty(0, 96)
    verdict = compare(empty, empty, empty)
    assert verdict.passed and verdict.elements == 0


def test_mismatch_is_refused_with_what_came() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\), \(3, 2\) and \(2, 3\)"):
        compare(torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3))
    with pytest.raises(TypeError, match="torch.int64"):
        compare(torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.zeros(2))


def test_distribution_uses_values_that_occurred() -> None:
    spread = distribution([0.5, 0.7, 0.9, 1.1])
    assert (spread.count, spread.p50, spread.p99, spread.max) == (4, 0.7, 1.1, 1.1)
    assert distribution([1.0, math.nan]).max == math.inf
    with pytest.raises(ValueError, match="at least one"):
        distribution([])


def test_summary_counts_failures() -> None:
    ref, pt = _tower_like(dtype=torch.float32)
    cases = [compare(ref + f * (pt - ref), ref, pt) for f in (0.5, 1.0, FACTOR_RMS * 1.1)]
    summary = summarize(cases)
    assert summary.failures == 1
    assert summary.ratio_rms.p50 == pytest.approx(1.0)
    assert summary.ratio_rms.max == pytest.approx(1.375, rel=1e-4)
