"""The Hopper GEMMs on a Hopper GPU: every kind of tile and epilogue within the tolerance rule, the same bits every
time, poison wherever nobody should look. `-k quick` is what a short session can afford: a case per kind of tile."""

import random as pseudo_random
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedvit.bench.ops import compiling_only
from fusedvit.kernels.epilogue import RowStats
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig, hopper_gemm_candidates
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig, hopper_swap_ab_candidates
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.reference.linear import moments, store_moments
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.model.ops import linear
from fusedvit.tolerance import summarize
from tests.kernels.linear_cases import EPS, Fused, Layer, fused, tensors
from tests.kernels.support import assert_rounded_once, count

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
ROWS, MERGED = 1021, 253  # prime, and no multiple of a tile
REPEATS = 50
PING_PONG, COOPERATIVE, WIDE = (
    HopperGemmConfig(128, 128, 1, 4),
    HopperGemmConfig(64, 192, 3, 3),
    HopperGemmConfig(64, 256, 2, 3),
)
NARROW, SIX = HopperGemmConfig(64, 128, 1, 6), HopperGemmConfig(64, 192, 1, 5)
CASES = {
    "patch embed": (Layer(ROWS, 1536, 1152, taps=True, stats=True), SIX),
    "patch embed without taps": (Layer(ROWS, 1176, 1280, bias=False, stats=True), PING_PONG),
    "qkv without heads, rms": (Layer(ROWS, 1280, 3840, norm=True, rms=True, part=64), PING_PONG),
    "qkv": (Layer(ROWS, 1152, 3456, norm=True, part=128, heads=16), PING_PONG),
    "qkv, heads of 80, rms": (
        Layer(ROWS, 1280, 3840, norm=True, rms=True, part=64, heads=16),
        HopperGemmConfig(64, 192, 2, 4),
    ),
    "qkv, heads of 64": (Layer(ROWS, 1024, 3072, norm=True, part=192, heads=16), NARROW),
    "proj": (Layer(ROWS, 1152, 1152, residual=True, stats=True), COOPERATIVE),
    "fc1": (Layer(ROWS, 1152, 4304, norm=True, part=192, activation="gelu_tanh"), PING_PONG),
    "fc1 of Qwen2-VL": (
        Layer(ROWS, 1280, 5120, norm=True, part=256, activation="quick_gelu"),
        HopperGemmConfig(64, 128, 3, 4),
    ),
    "swiglu": (Layer(ROWS, 1280, 6848, norm=True, rms=True, part=128, activation="swiglu"), PING_PONG),
    "fc2": (Layer(ROWS, 4304, 1152, residual=True, stats=True), HopperGemmConfig(64, 64, 1, 8)),
    "deepstack fc1": (Layer(MERGED, 4608, 4608, norm=True, merged=4, part=128, activation="gelu"), WIDE),
    "merger fc1": (Layer(MERGED, 4608, 4608, activation="gelu"), PING_PONG),
    "merger fc2": (Layer(61, 4608, 4096), NARROW),
}
SWAP_AB = {
    "qkv, 112 rows": (Layer(780, 1152, 3456, norm=True, part=64, heads=16), HopperSwapABConfig(112, 3, 5)),
    "qkv, 128 rows, part 192": (
        Layer(250, 1152, 3456, norm=True, part=192, heads=16),
        HopperSwapABConfig(128, 1, 9),
    ),
    "qkv, 192 rows, heads of 64": (
        Layer(ROWS, 1024, 3072, norm=True, part=64, heads=16),
        HopperSwapABConfig(192, 3, 4),
    ),
    "qkv, 56 rows, heads of 80, rms": (
        Layer(190, 1280, 3840, norm=True, rms=True, part=128, heads=16),
        HopperSwapABConfig(56, 2, 9),
    ),
    "proj, 112 rows": (Layer(780, 1152, 1152, residual=True, stats=True), HopperSwapABConfig(112, 1, 9)),
    "proj, 144 rows": (Layer(ROWS, 1152, 1152, residual=True, stats=True), HopperSwapABConfig(144, 3, 4)),
    "proj, 24 rows": (Layer(61, 1152, 1152, residual=True, stats=True), HopperSwapABConfig(24, 1, 9)),
    "fc1, 112 rows": (
        Layer(780, 1152, 4304, norm=True, part=64, activation="gelu_tanh"),
        HopperSwapABConfig(112, 4, 4),
    ),
    "fc1 of Qwen2-VL, 80 rows": (
        Layer(ROWS, 1280, 5120, norm=True, part=256, activation="quick_gelu"),
        HopperSwapABConfig(80, 2, 6),
    ),
    "fc2, 96 rows": (Layer(ROWS, 4304, 1152, residual=True, stats=True), HopperSwapABConfig(96, 2, 6)),
    "fc2, 40 rows": (Layer(190, 4304, 1152, residual=True, stats=True), HopperSwapABConfig(40, 1, 12)),
    "deepstack fc1, 64 rows": (
        Layer(MERGED, 4608, 4608, norm=True, merged=4, part=64, activation="gelu"),
        HopperSwapABConfig(64, 2, 8),
    ),
    "merger fc1, 48 rows": (Layer(MERGED, 4608, 4608, activation="gelu"), HopperSwapABConfig(48, 1, 12)),
    "merger fc2, 16 rows": (Layer(61, 4608, 4096, bias=False), HopperSwapABConfig(16, 1, 12)),
}
CASES |= SWAP_AB
SHIPS = (  # as heuristics choose
    "qkv", "qkv, heads of 64", "qkv, heads of 80, rms", "proj", "fc1", "swiglu",
    "fc2", "patch embed", "deepstack fc1", "merger fc1", *SWAP_AB, "patch embed without taps", "qkv without heads, rms",
)  # fmt: skip
QUICK = (
    *SHIPS, "merger fc2", "fc1 of Qwen2-VL",
)  # fmt: skip
NAMES = [
    pytest.param(name, id=f"quick, ships: {name}" if name in SHIPS else f"quick: {name}" if name in QUICK else name)
    for name in CASES
]
CANDIDATES = {"hopper": hopper_gemm_candidates, "swap_ab": hopper_swap_ab_candidates}
KINDS = {  # what `CANDIDATES` know the layers by
    "qkv": "norm+rope", "proj": "residual+stats", "fc1": "norm+gelu_tanh", "fc2": "residual+stats",
    "patch embed": "taps+stats", "deepstack fc1": "norm+gelu", "swiglu": "rms+swiglu",
    "patch embed without taps": "stats", "qkv without heads, rms": "rms",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled(device: torch.device, request: pytest.FixtureRequest) -> None:
    """Every case that was asked for, compiled beforehand, side by side."""
    if not gluon_compat.usable(Target.of(device).capability):
        pytest.skip("for Hopper GPUs")
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    with compiling_only():
        for name, (layer, config) in CASES.items():
            if name in asked:
                few = replace(layer, rows=1)
                fused(few, tensors(few, BF16, device), layer.rows + 70).run(linear, config)


def assert_statistics(out: torch.Tensor, stats: RowStats | None, rows: int) -> None:
    """Those of the rounded rows, and none of rows that do not exist."""
    if stats is None:
        return
    mean, rstd = moments(stats, rows, EPS)
    wide = out[:rows].double()
    torch.testing.assert_close(mean[:, 0], wide.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd[:, 0], torch.rsqrt(wide.var(1, correction=0) + EPS), rtol=1e-4, atol=0)
    expected = replace(stats, partials=torch.zeros_like(stats.partials))
    store_moments(out[:rows], expected)
    torch.testing.assert_close(stats.partials[:rows], expected.partials[:rows], rtol=1e-4, atol=1e-4)
    assert stats.partials[rows:].isnan().all(), "statistics of rows that do not exist"


@pytest.mark.parametrize("name", NAMES)
def test_within_the_rule(name: str, device: torch.device) -> None:
    layer, config = CASES[name]
    t = tensors(layer, BF16, device)
    out, stats = fused(layer, t, layer.rows + 70).run(linear, config)
    reference = fused(layer, t, wide=torch.float64).run(linear_ref, config)[0]
    assert_rounded_once(out[: layer.rows], reference, "against the reference:")
    assert_statistics(out, stats, layer.rows)


def bits(arguments: Fused, config: Any) -> tuple[torch.Tensor, ...]:
    rows = arguments.layer.rows
    out, stats = arguments.run(linear, config)
    return (out[:rows],) if stats is None else (out[:rows], stats.partials[:rows])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time(name: str, device: torch.device) -> None:
    """Fifty launches."""
    layer, config = CASES[name]
    arguments = fused(layer, tensors(layer, BF16, device), layer.rows + 70)
    first = bits(arguments, config)
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(bits(arguments, config), first, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_rows_past_the_count_change_nothing(name: str, device: torch.device) -> None:
    """In room for many more rows, the rest NaN: bit for bit what exactly enough room gives."""
    layer, config = CASES[name]
    for rows in (0, 1, 64, layer.rows - 5):
        few = replace(layer, rows=rows)
        t = tensors(few, BF16, device)
        exact = bits(fused(few, t, max(rows, 1)), config)
        roomy = bits(fused(few, t, layer.rows + 70), config)
        assert all(torch.equal(a, b) for a, b in zip(roomy, exact, strict=True)), rows
        assert roomy[0].isfinite().all(), rows


@pytest.mark.parametrize(
    "name", [pytest.param(name, id=f"quick, ships: {name}") for name in ("qkv", "fc2", "proj, 112 rows")]
)
def test_a_graph_follows_the_count(name: str, device: torch.device) -> None:
    layer, config = CASES[name]
    arguments = fused(layer, tensors(layer, BF16, device))
    kept, out = arguments.residual.clone(), torch.empty_like(arguments.residual)
    stats = RowStats.over(torch.empty(layer.rows * layer.n, device=device), layer.rows, layer.n, config.block_n)
    epilogue = replace(
        arguments.epilogue, residual=out if layer.residual else None, stats=stats if layer.stats else None,
    )  # fmt: skip

    def launch(num_rows: torch.Tensor) -> None:
        linear(arguments.x, arguments.weight, num_rows, out, epilogue, config)

    launch(arguments.num_rows)
    num_rows, graph = count(layer.rows, device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(num_rows)
    for rows in (layer.rows, 1, 100, layer.rows, 0, 65):
        out.copy_(kept)
        num_rows.fill_(rows)
        graph.replay()
        replayed = out[:rows].clone()
        out.copy_(kept)
        launch(count(rows, device))
        assert torch.equal(replayed, out[:rows]), rows


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("backend", CANDIDATES)
def test_random_cases_within_the_rule(backend: str, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Three hundred a backend in all, of any row count, in any configuration that a tuner may try; prints how errors
    spread."""
    rng, verdicts, base = pseudo_random.Random(f"{name} {dtype}"), [], CASES[name][0]
    if not CANDIDATES[backend](64, base.n, base.k, Target.of(device), KINDS[name]):
        pytest.skip(f"{backend} has no {KINDS[name]}")
    cases = []
    for seed in range(25 if backend == "hopper" else 40):
        most = 192 * (132 // -(-base.n // 192)) if backend == "swap_ab" else 3000  # the former: of one wave
        rows = rng.choice([1, 63, 64, 65, 192, rng.randint(1, 300), rng.randint(1, most)])
        room = min(most, budget(rows))
        configs = CANDIDATES[backend](room, base.n, base.k, Target.of(device), KINDS[name])
        if configs:  # from Triton 3.8 on, erf has none for the most rows
            cases.append((replace(base, rows=rows, massive=base.norm and seed % 5 == 4), rng.choice(configs), seed))
    with compiling_only():
        for config in dict.fromkeys(config for _, config, _ in cases):
            few = replace(base, rows=1)
            fused(few, tensors(few, dtype, device)).run(linear, config)
    for layer, config, seed in cases:
        t = tensors(layer, dtype, device, seed)
        out, stats = fused(layer, t, layer.rows + rng.randint(0, 200)).run(linear, config)
        reference = fused(layer, t, wide=torch.float64).run(linear_ref, config)[0]
        verdicts.append(assert_rounded_once(out[: layer.rows], reference, f"{layer.rows} rows, {config}:"))
        assert_statistics(out, stats, layer.rows)
    print(f"{name}, {dtype}: {summarize(verdicts)}")
