"""The Hopper GEMM without a GPU: choices and their cost model, refusals, compilation, and how the encoder fits it."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.kernels import backends
from fusedvit.kernels.epilogue import Epilogue, Scratch
from fusedvit.kernels.hopper import gemm, gemm_configs, gluon_compat
from fusedvit.kernels.hopper.gemm_configs import (
    PROVEN,
    HopperGemmConfig,
    hopper_gemm_candidates,
    wrong_hopper_gemm,
)
from fusedvit.kernels.hopper.gemm_swap_ab_configs import OF_MERGED, RARE, hopper_gemm_config, hopper_swap_ab_config
from fusedvit.kernels.positions import packed_width
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.reference.linear import moments
from fusedvit.kernels.tile_configs import MAX_COUNTERS, MAX_SUMS, PDL_MAX_ROWS, Target, budget
from fusedvit.kernels.tma import rows_behind
from fusedvit.kernels.tuning_table import Table, config_of
from fusedvit.model import buffers
from fusedvit.model.buffers import Capacity, allocate
from fusedvit.model.plan import plan_for, tasks
from tests.kernels.linear_cases import EPS, Layer, fused, plain, tensors
from tests.kernels.support import assert_within
from tests.kernels.test_aot import run
from tests.support.specs import GLM_41V, QWEN2_VL_7B, QWEN3_VL_8B, QWEN25_VL_7B

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU, H200, A100 = torch.device("cpu"), Target(name="NVIDIA H200"), Target(80, 108, 163 * 1024)
H100 = Target(name="NVIDIA H100 80GB HBM3")
TIMES = {H200: "gemm_times.json", H100: "gemm_times_h100.json"}
KEYS = [task.key for spec in (QWEN3_VL_8B, QWEN2_VL_7B, QWEN25_VL_7B) for task in tasks(spec, 64, BF16)]
LINEAR = [(key.n, key.k, key.kind) for key in KEYS if key.op == backends.LINEAR]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 200_000).map(budget), st.sampled_from(LINEAR), st.sampled_from([BF16, FP16]))
def test_what_is_chosen_can_run(rows: int, shape: tuple[int, int, str], dtype: torch.dtype) -> None:
    n, k, kind = shape
    config = hopper_gemm_config(rows, n, k, dtype, H200, kind)
    assert config == hopper_gemm_config(rows, n, k, dtype, H200, kind)
    if config is None:
        return
    assert not wrong_hopper_gemm(config, H200, dtype)
    assert config in hopper_gemm_candidates(rows, n, k, H200, kind)
    assert config.block_n >= buffers.NARROWEST_TILE, "the statistics' buffer has no room for more parts"
    assert config.pdl == gemm_configs.uses_pdl(rows, kind)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200_000).map(budget), st.sampled_from(LINEAR))
def test_candidates_can_run(rows: int, shape: tuple[int, int, str]) -> None:
    n, k, kind = shape
    found = hopper_gemm_candidates(rows, n, k, H200, kind)
    assert len(set(found)) == len(found) > 0
    for config in found:
        assert not wrong_hopper_gemm(config, H200, BF16)


def test_newer_tritons_leave_out_what_spills_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 x 64 x 128 with a residual: 4 bytes as compiled with 3.9, none with 3.7."""
    offered = {}
    for newer in (False, True):
        monkeypatch.setattr(gluon_compat, "NEEDS_MORE_REGISTERS", newer)
        for kind in ("residual+stats", "norm+rope"):
            found = hopper_gemm_candidates(2048, 1152, 1152, H200, kind)
            offered[newer, kind] = {(c.rows, c.cols, c.consumers) for c in found}
    assert offered[False, "residual+stats"] - offered[True, "residual+stats"] == {(64, 128, 3)}
    assert offered[False, "norm+rope"] == offered[True, "norm+rope"]


@pytest.mark.parametrize(
    "n, k, kind, why",
    [
        (6840, 1280, "rms+swiglu", "rows of the output are no multiples of 16 bytes"),
        (1160, 1152, "residual+stats", "statistics are of whole chunks"),
        (3480, 1160, "norm+rope", "rotary columns end inside a chunk"),
        (1152, 64, "bias", "one step of K"),
        (1152, 1152, "norm+silu", "an activation that nobody knows"),
    ],
)
def test_unsupported_shapes_are_left_to_plain_triton(n: int, k: int, kind: str, why: str) -> None:
    assert hopper_gemm_config(16384, n, k, BF16, H200, kind) is None, why
    assert hopper_gemm_candidates(16384, n, k, H200, kind) == [], why


def measured(device: Target) -> dict[tuple[int, int, int, str], dict[tuple[int, ...], float]]:
    """us of every tile of both GEMMs that was timed, by (rows, n, k, kind): (rows, cols, consumers) and (rows,
    consumers)."""
    times = json.loads(Path(__file__).with_name(TIMES[device]).read_text(encoding="utf-8"))["times"]
    return {tuple(key): {tuple(tile): us for *tile, us in tiles} for *key, tiles in times}


def choices(device: Target, rare: bool) -> Iterator[tuple[str, float]]:
    """(product, how much slower the chosen tile is than the best) of products whose chosen tile was timed, at row
    budgets that graphs have by default; of layers that a tower has once or a few times, or of the others."""
    for (rows, n, k, kind), us in measured(device).items():
        least = 64 if kind in OF_MERGED else 256
        if (kind in RARE) is not rare or rows < least:
            continue
        swapped = hopper_swap_ab_config(rows, n, k, BF16, device, kind)
        config = hopper_gemm_config(rows, n, k, BF16, device, kind)
        tile = (config.rows, config.cols, config.consumers) if swapped is None else (swapped.rows, swapped.consumers)
        if tile in us:
            yield f"{kind} {rows} x {n} x {k}: {tile}", us[tile] / min(us.values()) - 1


@pytest.mark.parametrize(
    "device, rare, least, most, mean",
    [
        (H200, False, 36, 0.09, 0.008),
        (H200, True, 24, 0.115, 0.0235),  # on purpose: see `RARE`
        (H100, False, 270, 0.27, 0.0205),  # most at N = 1152, K = 4304: the model was fitted to an H200's times
    ],
    ids=["H200-often", "H200-rare", "H100-often"],
)
def test_choices_are_near_the_best_measured(device: Target, rare: bool, least: int, most: float, mean: float) -> None:
    slower = dict(choices(device, rare))
    assert len(slower) >= least and max(slower.values()) < most, slower
    assert sum(slower.values()) / len(slower) < mean, slower


def test_other_devices_and_dtypes_are_left_to_plain_triton() -> None:
    assert hopper_gemm_config(4096, 1152, 4304, BF16, H200, "residual+stats") is not None
    assert hopper_gemm_config(4096, 1152, 4304, BF16, A100, "residual+stats") is None
    assert hopper_gemm_config(4096, 1152, 4304, FP32, H200, "residual+stats") is None


@pytest.mark.parametrize("n, k, kind", LINEAR)
def test_what_is_not_proven_on_a_device_is_the_tuners_alone(n: int, k: int, kind: str) -> None:
    for rows, dtype in itertools.product((64, 4096, 16384), (BF16, FP16)):
        assert bool(hopper_gemm_config(rows, n, k, dtype, H200, kind)) == (kind in PROVEN)
    assert hopper_gemm_candidates(4096, n, k, H200, kind), "the tuner compares each with the reference"


@pytest.mark.parametrize("rows, count", [(PDL_MAX_ROWS, 5), (PDL_MAX_ROWS + 256, 4), (3072, 4), (3328, 2), (65536, 2)])
def test_which_epilogues_use_pdl(rows: int, count: int) -> None:
    kinds = ("residual+stats", "residual", "norm+gelu_tanh", "rms+swiglu", "norm+rope", "bias", "taps+stats", "stats")
    assert [gemm_configs.uses_pdl(rows, kind) for kind in kinds] == [i < count for i in range(len(kinds))]


def test_which_layers_use_pdl() -> None:
    """The first layer follows the launch that writes its row count."""
    choose = hopper_gemm_config.__wrapped__  # past its cache
    for spec in (QWEN3_VL_8B, QWEN25_VL_7B, GLM_41V):
        for task in tasks(spec, 784, BF16):
            if task.key.op == backends.LINEAR and task.key.kind in PROVEN:
                config = choose(784, task.key.n, task.key.k, BF16, H200, task.key.kind)
                assert config in hopper_gemm_candidates(784, task.key.n, task.key.k, H200, task.key.kind)
                assert config.pdl == (task.name in {"qkv", "proj", "fc1", "fc2"} or "norm" in task.key.kind)
                assert not (config.pdl and task.name == "patch")


GOOD = HopperGemmConfig(64, 128, 1, 6)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({}, ""),
        ({"rows": 32}, "rows must be one of (64, 128), got 32"),
        ({"cols": 160}, "cols must be one of (64, 128, 192, 256), got 160"),
        ({"stages": 1}, "stages must be at least 2"),
        ({"rows": 128, "cols": 256}, "a consumer's 128 x 256 sums do not fit its registers"),
        ({"consumers": 3, "cols": 256}, "a consumer's 64 x 256 sums do not fit its registers"),
        ({"stages": 9}, "bytes of shared memory, limit 232448"),
    ],
)
def test_wrong_configurations_say_why(changed: dict[str, int], said: str) -> None:
    found = wrong_hopper_gemm(replace(GOOD, **changed), H200, BF16)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    "layer, dtype, config, said",
    [
        (Layer(16, 128, 64), FP32, GOOD, "operands of 16 bits only, got torch.float32"),
        (Layer(16, 128, 136, activation="swiglu"), FP16, GOOD, "gated activations of whole 16s of columns"),
        (Layer(16, 64, 64), FP16, GOOD, "at least two steps of 64 in K, got 1"),
        (Layer(16, 128, 72, stats=True), FP16, GOOD, "statistics of whole 64s in parts of 128, got 72"),
        (Layer(16, 128, 72, heads=1), FP16, GOOD, "rotary columns of whole 64s and no residual, got 48"),
    ],
)
def test_what_it_cannot_run_is_refused_before_any_launch(
    layer: Layer, dtype: torch.dtype, config: HopperGemmConfig, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "launch", lambda *arguments: pytest.fail("launched"))
    arguments = fused(layer, tensors(layer, dtype, CPU))
    with pytest.raises(ValueError, match="the hopper GEMM takes") as error:
        arguments.run(gemm.linear, config)
    assert said in str(error.value)


def test_rotary_factors_are_needed_as_packed_cos_sin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "launch", lambda *arguments: pytest.fail("launched"))
    layer = Layer(16, 128, 192, heads=1)
    arguments = fused(layer, tensors(layer, FP16, CPU))
    rope = replace(arguments.epilogue.rope, packed=None)
    x = arguments.x
    with pytest.raises(ValueError, match="rotary factors as packed cos/sin"):
        gemm.linear(x, arguments.weight, arguments.num_rows, x, Epilogue(rope=rope), GOOD)


@pytest.mark.parametrize("config", [GOOD, replace(GOOD, cols=192)], ids=str)
def test_the_reference_takes_its_configurations(config: HopperGemmConfig) -> None:
    layer = Layer(21, 512, 384, residual=True, stats=True)
    t = tensors(layer, FP32, CPU)
    out, stats = fused(layer, t).run(linear_ref, config)
    assert_within(out, plain(layer, t, torch.float64), plain(layer, t, FP32))
    assert stats is not None and stats.width == config.cols
    torch.testing.assert_close(moments(stats, 21, EPS)[0][:, 0], out.double().mean(1), rtol=1e-5, atol=1e-5)


def test_tables_hold_its_configurations() -> None:
    backend = backends.backend_of(GOOD)
    assert backend.name == "hopper" and config_of(backend, asdict(GOOD), "here") == GOOD


def test_plans_take_it_where_it_can(on_hopper: None) -> None:
    chosen = plan_for(QWEN3_VL_8B, 8192, FP16, H200, Table()).choices()
    linears = ("patch", "qkv", "proj", "fc1", "fc2", "deepstack_fc1", "merger_fc1", "merger_fc2")
    assert {chosen[name] for name in linears} == {"hopper"}
    assert plan_for(QWEN2_VL_7B, 4096, FP16, H200, Table()).choices()["fc1"] == "hopper"
    assert plan_for(QWEN2_VL_7B, 4096, FP16, H200, Table()).choices()["patch"] == "hopper"
    failed = replace(H200, without=(("linear/hopper", "does not compile"),))
    for target, dtype in ((failed, BF16), (H200, FP32), (A100, BF16)):
        plan = plan_for(QWEN3_VL_8B, 4096, dtype, target, Table())
        assert not any(isinstance(getattr(plan, name), HopperGemmConfig) for name in plan.choices())


def test_scratch_and_packed_cos_sin_are_held_only_where_used_and_counted() -> None:
    spec, capacity = replace(QWEN3_VL_8B, depth=1, deepstack=()), Capacity(64, 1, 1, 1)
    packed, scratch = 64 * packed_width(72), MAX_SUMS + MAX_COUNTERS
    for tower, dtype, held in (
        (spec, BF16, packed + scratch),
        (replace(spec, qk_norm=True), BF16, scratch),
        (spec, FP32, 0),
    ):
        made = allocate(tower, capacity, dtype, CPU)
        meta = replace(made.meta, packed_cos_sin=made.meta.packed_cos_sin[:0])
        without = replace(made, meta=meta, scratch=Scratch.zeros(0, 0, CPU))
        assert made.held_bytes() - without.held_bytes() == 4 * held


COMPILED = """
from dataclasses import replace
import torch
from fusedvit.kernels.codegen_checks import compile_job
from fusedvit.kernels.launch import record
from fusedvit.kernels.hopper.gemm import linear
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig
from tests.kernels.linear_cases import Layer, fused, tensors
CPU, FP16, BF16, narrow = torch.device("cpu"), torch.float16, torch.bfloat16, HopperGemmConfig(64, 128, 1, 6)
for layer, dtype, config in (
    (Layer(64, 256, 192, taps=True, stats=True), BF16, narrow),
    (Layer(64, 2304, 256, norm=True, part=32, merged=2, activation="gelu"), BF16, HopperGemmConfig(64, 256, 2, 3)),
    (Layer(64, 256, 272, norm=True, rms=True, part=128, activation="swiglu", limit=7.0), BF16, narrow),
    (Layer(64, 256, 272, activation="swiglu", limit=0.0), BF16, narrow),
    (Layer(64, 256, 384, norm=True, rms=True, part=64, heads=2), FP16, HopperGemmConfig(64, 192, 3, 3)),
    (Layer(64, 1024, 208, activation="quick_gelu"), FP16, replace(narrow, pdl=True)),
    (Layer(64, 4608, 256, norm=True, part=128, merged=4, activation="gelu"), FP16, HopperGemmConfig(128, 128, 1, 4)),
):
    arguments = fused(layer, tensors(layer, dtype, CPU))
    for job in record(lambda: arguments.run(linear, config)).values():
        found = compile_job(job, 90)
        assert not found.problems and found.registers >= 128, found
"""


def test_what_the_tuner_may_choose_compiles_clean() -> None:
    """Epilogues, fp16 and PDL that heuristics seldom choose; what they do choose: make aot-matrix."""
    done = run("-c", COMPILED)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "held, first, rows, tile, found",
    [
        (1000, 0, 704, 112, 784),  # a whole tile's
        (1000, 0, 784, 112, 784),
        (720, 0, 704, 112, 720),  # as many as there are
        (704, 0, 704, 112, 704),
        (1000, 990, 8, 64, 10),  # from a later row on
        (1000, 0, 1, 192, 192),
        (1000, 0, 0, 192, 0),
    ],
)
@pytest.mark.parametrize("pitch", [64, 72])
def test_descriptors_reach_rows_behind_a_view(
    held: int, first: int, rows: int, tile: int, found: int, pitch: int
) -> None:
    buffer = torch.empty(held, pitch)
    assert rows_behind(buffer[first : first + rows, :64], tile) == found


def test_rows_behind_a_flat_buffers_views_are_whole_rows() -> None:
    flat = torch.empty(10 * 64 + 63)
    assert rows_behind(flat[: 4 * 64].view(4, 64), 64) == 10
    assert rows_behind(flat[64 : 5 * 64].view(4, 64), 64) == 9
