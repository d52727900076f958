"""The linear kernel and its reference against plain PyTorch: every epilogue alone and as combined."""

import dataclasses

import pytest
import torch

from fusedvit.kernels.epilogue import Epilogue, Scratch
from fusedvit.kernels.linear import linear
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.reference.linear import moments, store_moments
from fusedvit.kernels.tile_configs import LinearConfig
from tests.kernels.linear_cases import EPS, Fused, Layer, Tensors, fused, plain, scratch_for, tensors
from tests.kernels.support import NAN, assert_rounded_once, assert_within, count, padded, random

CONFIG = LinearConfig(16, 32, 16, 4, 2, max_programs=3)  # fewer programs than tiles: the persistent loop turns
DTYPES = (torch.float32, torch.float16)

CASES = {
    "one tile exactly": Layer(16, 16, 32),
    "ragged in every axis": Layer(21, 70, 50),  # 21 = 16 + 5 rows, 70 = 4 * 16 + 6 deep, 50 = 32 + 18 columns
    "one row": Layer(1, 24, 40),  # a count of 1 is where Triton specialises integers
    "narrower than a tile": Layer(5, 8, 8),
    "no bias": Layer(21, 70, 50, bias=False),
    "norm": Layer(21, 70, 50, norm=True),
    "norm, last part narrower": Layer(5, 72, 40, norm=True, part=64),
    "norm of massive channels": Layer(21, 70, 50, norm=True, massive=True),
    "rope": Layer(21, 48, 144, heads=2),  # heads of 24; v starts at a tile's border (96 = 3 * 32)
    "rope, v inside a tile": Layer(21, 40, 120, heads=1),  # 80 = 2.5 * 32: one tile holds rotated and plain columns
    "taps": Layer(21, 70, 50, taps=True),
    "gelu": Layer(21, 70, 50, activation="gelu"),
    "gelu_tanh": Layer(21, 70, 50, activation="gelu_tanh"),
    "quick_gelu": Layer(21, 70, 50, activation="quick_gelu"),
    "swiglu": Layer(21, 70, 50, activation="swiglu"),
    "swiglu, clamped": Layer(21, 70, 50, bias=False, activation="swiglu", limit=0.7),
    "swiglu, clamped to 0": Layer(21, 70, 50, activation="swiglu", limit=0.0),
    "geglu": Layer(21, 70, 50, bias=False, activation="geglu_tanh"),
    "geglu, clipped": Layer(21, 70, 54, activation="geglu_tanh", clipped=True),
    "rms": Layer(21, 70, 50, norm=True, rms=True),
    "rms, last part narrower": Layer(5, 72, 40, norm=True, rms=True, part=64, bias=False),
    "rms of massive channels": Layer(21, 70, 50, norm=True, rms=True, massive=True),
    "rms, qkv": Layer(21, 48, 144, norm=True, rms=True, heads=2),
    "heads, clipped": Layer(21, 48, 384, heads=2, normed=3, clipped=True),
    "rms, heads of q and k": Layer(21, 48, 384, bias=False, norm=True, rms=True, heads=2, normed=2),
    "rms, gate and up": Layer(21, 70, 54, norm=True, rms=True, activation="swiglu"),  # rows of 27: not of 16 bytes
    "residual": Layer(21, 70, 50, residual=True),
    "statistics": Layer(21, 70, 50, stats=True),
    "patch embed": Layer(21, 70, 50, taps=True, stats=True),
    "qkv": Layer(21, 48, 144, norm=True, heads=2),
    "proj, fc2": Layer(21, 70, 50, residual=True, stats=True),
    "fc1": Layer(21, 70, 50, norm=True, activation="gelu_tanh"),
    "merger fc1": Layer(9, 160, 50, activation="gelu"),
    "deepstack fc1": Layer(9, 160, 50, norm=True, merged=4, part=32, activation="gelu"),  # 4 x (32 + 8) channels
    "rms of merged rows": Layer(9, 160, 50, norm=True, rms=True, merged=4, part=32),  # 4 x (32 + 8) channels
    "deepstack fc1, more parts than a chunk": Layer(3, 4 * 72, 40, norm=True, merged=4, part=16),  # 4 x 5 parts
}


def config_of(layer: Layer) -> LinearConfig:
    """One with whole heads, where they are normalised."""
    return dataclasses.replace(CONFIG, block_n=64) if layer.normed else CONFIG


def made(name: str, dtype: torch.dtype, device: torch.device, capacity: int | None = None) -> tuple[Tensors, Fused]:
    t = tensors(CASES[name], dtype, device)
    return t, fused(CASES[name], t, capacity)


@pytest.mark.parametrize("name", CASES)
def test_reference_is_the_formula(name: str, device: torch.device) -> None:
    """In fp64 nothing is left between the folded form and PyTorch's but the fp32 of statistics, bias and angles."""
    layer = CASES[name]
    t = tensors(layer, torch.float64, device)
    out, _ = fused(layer, t, layer.rows + 3).run(linear_ref, config_of(layer))
    torch.testing.assert_close(out[: layer.rows], plain(layer, t, torch.float64), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_is_within_the_rule(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Against PyTorch's layer in fp64, and against the reference on the same rounded weights in fp64."""
    layer = CASES[name]
    t, arguments = made(name, dtype, device, layer.rows + 5)
    ours = arguments.run(linear, config_of(layer))[0][: layer.rows]
    assert_within(ours, plain(layer, t, torch.float64), plain(layer, t, dtype), "against PyTorch:")
    ref = fused(layer, t, wide=torch.float64).run(linear_ref, config_of(layer))[0]
    if dtype is torch.float32:
        assert_within(ours, ref, arguments.run(linear_ref, config_of(layer))[0][: layer.rows], "against the reference:")
    else:
        assert_rounded_once(ours, ref, "against the reference:")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_the_rounded_rows(dtype: torch.dtype, device: torch.device) -> None:
    layer = dataclasses.replace(CASES["proj, fc2"], massive=True)
    out, stats = fused(layer, tensors(layer, dtype, device), layer.rows + 5).run(linear, config_of(layer))
    assert stats is not None
    rows = out[: layer.rows].double()
    mean, rstd = moments(stats, layer.rows, EPS)
    torch.testing.assert_close(mean[:, 0], rows.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd[:, 0], torch.rsqrt(rows.var(1, correction=0) + EPS), rtol=1e-5, atol=0)
    expected = dataclasses.replace(stats, partials=torch.zeros_like(stats.partials))
    store_moments(out[: layer.rows], expected)
    torch.testing.assert_close(stats.partials[: layer.rows], expected.partials[: layer.rows], rtol=1e-5, atol=1e-5)
    assert stats.partials[layer.rows :].isnan().all(), "statistics of rows that do not exist"


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 32])  # around a tile's 16 rows
@pytest.mark.parametrize("name", ["qkv", "proj, fc2", "patch embed", "rms, gate and up", "heads, clipped"])
def test_rows_past_the_count_change_nothing(name: str, rows: int, device: torch.device) -> None:
    """`rows` of them in room for 37, the rest NaN: bit for bit what exactly enough room gives."""
    layer = dataclasses.replace(CASES[name], rows=rows)
    t = tensors(layer, torch.float32, device)
    roomy, roomy_stats = fused(layer, t, 37).run(linear, config_of(layer))
    exact, exact_stats = fused(layer, t).run(linear, config_of(layer))
    assert roomy[:rows].isfinite().all()
    assert torch.equal(roomy[:rows], exact)
    if roomy_stats is not None and exact_stats is not None:
        assert torch.equal(roomy_stats.partials[:rows], exact_stats.partials)


def test_tiles_with_a_part_of_a_head_that_is_normalised_are_refused(device: torch.device) -> None:
    _, arguments = made("heads, clipped", torch.float32, device)
    with pytest.raises(ValueError, match="whole heads of 64, got 32 of 384 columns"):
        arguments.run(linear, CONFIG)


def test_no_rows_write_nothing(device: torch.device) -> None:
    x, weight = random(20, 24, device=device), random(40, 24, seed=1, device=device)
    out = random(20, 40, seed=2, device=device)
    before = out.clone()
    linear(x, weight, count(0, device), out, Epilogue(), CONFIG)
    assert torch.equal(out, before)


@pytest.mark.parametrize("splits", [2, 3, 8])  # of 5 or 10 steps; parts may be empty
@pytest.mark.parametrize("name", ["qkv", "proj, fc2", "patch embed", "deepstack fc1", "rms, gate and up"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_k_is_within_the_rule(name: str, dtype: torch.dtype, splits: int, device: torch.device) -> None:
    layer, config = CASES[name], dataclasses.replace(CONFIG, splits=splits)
    t, arguments = made(name, dtype, device, layer.rows + 20)
    scratch = scratch_for(config, layer.rows + 20, layer.n, device)
    assert scratch is not None
    ours, stats = arguments.run(linear, config, scratch)
    assert_within(ours[: layer.rows], plain(layer, t, torch.float64), plain(layer, t, dtype))
    assert not scratch.counters.any(), "the next launch counts from 0"
    again, more = arguments.run(linear, config, scratch)
    assert torch.equal(again[: layer.rows], ours[: layer.rows])
    assert stats is None or torch.equal(stats.partials[: layer.rows], more.partials[: layer.rows])


def test_split_k_without_scratch_is_refused(device: torch.device) -> None:
    _, arguments = made("fc1", torch.float16, device)
    config = dataclasses.replace(CONFIG, splits=2)
    for scratch in (Scratch.zeros(0, 0, device), Scratch.zeros(10**6, 1, device)):
        with pytest.raises(ValueError, match="split-K takes scratch for 4096 sums and 4 counters, got"):
            arguments.run(linear, config, scratch)


@pytest.mark.parametrize("max_programs", [1, 2, 1000])
def test_the_schedule_does_not_show(max_programs: int, device: torch.device) -> None:
    """Which program computes a tile, and in which order, is no part of the answer."""
    layer = dataclasses.replace(CASES["fc1"], rows=50)  # 4 tile rows: no multiple of a group of 8
    arguments = fused(layer, tensors(layer, torch.float32, device))
    expected, _ = arguments.run(linear, config_of(layer))
    config = dataclasses.replace(CONFIG, max_programs=max_programs)
    assert torch.equal(arguments.run(linear, config)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["norm", "qkv", "proj, fc2", "patch embed", "deepstack fc1", "rms, gate and up"])
def test_without_a_copy_engine(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Descriptors made in the kernel read and write the same, and nothing past the last row."""
    if device.type == "cuda":
        pytest.skip("such devices are older than the GPU here")
    layer = CASES[name]
    _, arguments = made(name, dtype, device, layer.rows + 20)
    expected, _ = arguments.run(linear, config_of(layer))
    out, _ = arguments.run(linear, dataclasses.replace(CONFIG, copy_engine=False))
    assert torch.equal(out[: layer.rows], expected[: layer.rows])
    assert out[layer.rows :].isnan().all()


def test_residual_may_be_another_tensor(device: torch.device) -> None:
    layer = CASES["residual"]
    t = tensors(layer, torch.float32, device)
    in_place, _ = fused(layer, t).run(linear, config_of(layer))
    out = padded(torch.full_like(t.residual, NAN), layer.rows)
    residual = padded(t.residual, layer.rows)
    arguments = fused(layer, t)
    epilogue = dataclasses.replace(arguments.epilogue, residual=residual)
    linear(arguments.x, arguments.weight, arguments.num_rows, out, epilogue, CONFIG)
    assert torch.equal(out, in_place)
    assert torch.equal(residual, t.residual)


def test_mismatch_says_what_came(device: torch.device) -> None:
    x, weight, out = torch.zeros(4, 16), torch.zeros(8, 24), torch.zeros(4, 8)
    with pytest.raises(AssertionError, match=r"\[4, 16\]\), weight torch.Size\(\[8, 24\]\)"):
        linear(x.to(device), weight.to(device), count(4, device), out.to(device), Epilogue(), CONFIG)
    with pytest.raises(ValueError, match="got 'relu'"):
        Epilogue(activation="relu")
    with pytest.raises(ValueError, match="neither residual nor statistics"):
        Epilogue(activation="swiglu", residual=out)
