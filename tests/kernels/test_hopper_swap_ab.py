"""The swap-AB Hopper GEMM without a GPU: choices, refusals, compilation, and how plans take it."""

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.kernels import backends
from fusedvit.kernels.hopper import gemm_swap_ab, gluon_compat
from fusedvit.kernels.hopper.gemm_configs import uses_pdl
from fusedvit.kernels.hopper.gemm_swap_ab_configs import (
    MOST_BUDGET,
    MOST_ROWS,
    MOST_WAVES,
    PROVEN,
    HopperSwapABConfig,
    hopper_swap_ab_candidates,
    hopper_swap_ab_config,
    wrong_hopper_swap_ab,
)
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.kernels.tuning_table import Table, config_of
from fusedvit.model import buffers
from fusedvit.model.plan import plan_for, tasks
from tests.kernels.linear_cases import Layer, fused, plain, tensors
from tests.kernels.support import assert_misplaced_stages_are_refused, assert_within
from tests.kernels.test_aot import run
from tests.support.specs import QWEN2_VL_7B, QWEN3_VL_8B, QWEN25_VL_7B

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU, H200, A100 = torch.device("cpu"), Target(name="NVIDIA H200"), Target(80, 108, 163 * 1024)
KEYS = [task.key for spec in (QWEN3_VL_8B, QWEN2_VL_7B, QWEN25_VL_7B) for task in tasks(spec, 64, BF16)]
LINEAR = [(key.n, key.k, key.kind) for key in KEYS if key.op == backends.LINEAR]
GOOD = HopperSwapABConfig(112, 1, 9)
OFF = (("linear/swap_ab", "off"),)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200_000).map(budget), st.sampled_from(LINEAR), st.sampled_from([BF16, FP16]))
def test_what_is_chosen_can_run(rows: int, shape: tuple[int, int, str], dtype: torch.dtype) -> None:
    n, k, kind = shape
    config = hopper_swap_ab_config(rows, n, k, dtype, H200, kind)
    assert config == hopper_swap_ab_config(rows, n, k, dtype, H200, kind)
    for candidate in hopper_swap_ab_candidates(rows, n, k, H200, kind):
        assert not wrong_hopper_swap_ab(candidate, H200, dtype)
        waves = 1 if rows <= MOST_BUDGET else MOST_WAVES  # nothing hides the end of a tile
        assert candidate.tiles(rows, n) <= waves * H200.num_sms
        assert candidate.pdl <= uses_pdl(rows, kind)
    if config is not None:
        assert kind in PROVEN[dtype] and not wrong_hopper_swap_ab(config, H200, dtype)
        assert rows <= MOST_BUDGET and config.tiles(rows, n) <= H200.num_sms
        assert config.block_n >= buffers.NARROWEST_TILE, "the statistics' buffer has no room for more parts"


@pytest.mark.parametrize(
    "rows, n, k, kind, why",
    [
        (784, 1160, 1152, "bias", "columns are no whole 16s"),
        (784, 1168, 1152, "residual+stats", "statistics are of whole 64s"),
        (784, 1152, 128, "bias", "too few steps of K for a pipeline"),
        (784, 6848, 1280, "rms+swiglu", "two columns make one"),
        (784, 1152, 1536, "taps+stats", "position taps"),
        (32768, 1152, 1152, "residual+stats", "more than four waves"),
    ],
)
def test_unsupported_shapes_are_left_to_others(rows: int, n: int, k: int, kind: str, why: str) -> None:
    assert hopper_swap_ab_config(rows, n, k, BF16, H200, kind) is None, why
    assert hopper_swap_ab_candidates(rows, n, k, H200, kind) == (), why


@pytest.mark.parametrize("rows, height", [(4608, 112), (6144, 144), (6656, 152), (8192, 192)])
def test_long_products_are_offered_in_full_waves(rows: int, height: int) -> None:
    """Two waves are 44 rows of six tiles; heuristics leave them to the tuner."""
    found = {(c.rows, c.consumers): c for c in hopper_swap_ab_candidates(rows, 1152, 4304, H200, "residual+stats")}
    tiles = found[height, 3].tiles(rows, 1152)
    assert H200.num_sms < tiles <= 2 * H200.num_sms < found[height, 3].tiles(44 * height + 1, 1152)
    assert hopper_swap_ab_config(rows, 1152, 4304, BF16, H200, "residual+stats") is None


def test_other_devices_and_dtypes_are_left_to_others() -> None:
    arguments = 784, 1152, 4304
    assert hopper_swap_ab_config(*arguments, BF16, H200, "residual+stats") is not None
    assert hopper_swap_ab_config(*arguments, BF16, A100, "residual+stats") is None
    assert hopper_swap_ab_config(*arguments, FP32, H200, "residual+stats") is None


def test_what_is_not_proven_on_a_device_is_the_tuners_alone() -> None:
    for kind, dtype in (("norm", BF16), ("norm+quick_gelu", FP16)):
        assert hopper_swap_ab_config(784, 3456, 1152, dtype, H200, kind) is None
        assert hopper_swap_ab_candidates(784, 3456, 1152, H200, kind)


def test_newer_tritons_leave_out_what_spills_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """erf for three consumers: 24 bytes as compiled with 3.9, none with 3.7; for four always."""
    offered = {}
    for newer in (False, True):
        monkeypatch.setattr(gluon_compat, "NEEDS_MORE_REGISTERS", newer)
        hopper_swap_ab_candidates.cache_clear()
        for kind in ("norm+gelu", "norm+gelu_tanh"):
            found = hopper_swap_ab_candidates(336, 4608, 4608, H200, kind)
            offered[newer, kind] = {c.consumers for c in found}
    hopper_swap_ab_candidates.cache_clear()
    assert offered[False, "norm+gelu"] - offered[True, "norm+gelu"] == {3}
    assert offered[False, "norm+gelu_tanh"] == offered[True, "norm+gelu_tanh"] == {2, 3, 4}


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"rows": 100}, "rows must be 16 to 192 in 8s"),
        ({"rows": MOST_ROWS + 8}, "rows must be 16 to 192"),
        ({"consumers": 5}, "consumers 1 to 4"),
        ({"stages": 1}, "stages must be 2 or more"),
        ({"rows": 192, "stages": 2}, "as many as the 3 chunks"),
        ({"rows": 136, "consumers": 4, "stages": 3}, "do not fit the registers"),
        ({"stages": 10}, "bytes of shared memory"),
    ],
)
def test_wrong_configurations_say_why(changed: dict[str, int], said: str) -> None:
    assert wrong_hopper_swap_ab(GOOD, H200, BF16) == ""
    assert said in wrong_hopper_swap_ab(replace(GOOD, **changed), H200, BF16)


def test_tiles_bound_by_loads_use_no_pdl() -> None:
    """Tall tiles of one consumer and a long K: measured in whole towers on an H200."""
    cases = ((784, 4304, 112, 1), (448, 4304, 64, 1), (784, 1152, 112, 1), (1568, 4304, 112, 2))
    found = []
    for rows, k, height, consumers in cases:
        candidates = hopper_swap_ab_candidates(rows, 1152, k, H200, "residual+stats")
        (config,) = (c for c in candidates if (c.rows, c.consumers) == (height, consumers))
        found.append(config.pdl)
    assert found == [False, True, True, True]


@pytest.mark.parametrize(
    "layer, config, said",
    [
        (Layer(40, 640, 256, activation="swiglu"), GOOD, "no gated activation"),
        (Layer(40, 640, 256, taps=True), GOOD, "position taps"),
        (Layer(40, 256, 264), replace(GOOD, stages=4), "whole 16s of columns, got 264"),
        (Layer(40, 256, 256), GOOD, "as many steps of 64 in K as stages, got 4 and 9"),
        (Layer(40, 640, 208, residual=True, stats=True), GOOD, "statistics of whole 64s"),
    ],
    ids=str,
)
def test_what_it_cannot_run_is_refused_before_any_launch(layer: Layer, config: HopperSwapABConfig, said: str) -> None:
    arguments = fused(layer, tensors(layer, BF16, CPU))
    with pytest.raises(ValueError, match=said):
        arguments.run(gemm_swap_ab.linear, config)


@pytest.mark.parametrize("config", [GOOD, replace(GOOD, rows=24)], ids=str)
def test_the_reference_takes_its_configurations(config: HopperSwapABConfig) -> None:
    layer = Layer(40, 128, 192, residual=True, stats=True)
    t = tensors(layer, FP32, CPU)
    out, stats = fused(layer, t).run(linear_ref, config)
    assert_within(out, plain(layer, t, torch.float64), plain(layer, t, FP32))
    assert stats is not None and stats.parts == 3


def test_tables_hold_its_configurations() -> None:
    backend = backends.backend_of(GOOD)
    assert (
        backends.backend_named(backends.LINEAR, "swap_ab") is backend
        and config_of(backend, asdict(GOOD), "here") == GOOD
    )


def test_plans_take_it_where_it_can(on_hopper: None) -> None:
    plan = plan_for(QWEN3_VL_8B, 784, BF16, H200, Table())
    assert plan.choices()["qkv"] == plan.choices()["fc2"] == "swap_ab" and plan.choices()["patch"] == "hopper"
    assert plan.qkv == HopperSwapABConfig(112, 3, plan.qkv.stages, pdl=True)
    without = plan_for(QWEN3_VL_8B, 704, BF16, replace(H200, without=OFF), Table())
    used = {**without.choices(), **{name: backends.backend_of(config).name for name, config in without.overlap.blocks}}
    assert "swap_ab" not in used.values(), "nor with a merger overlapped"


COMPILED = """
import torch
from fusedvit.kernels.codegen_checks import _misplaced_operands, compile_job
from fusedvit.kernels.launch import record
from fusedvit.kernels.hopper import gemm_swap_ab
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig as Config
from tests.kernels.linear_cases import Layer, fused, tensors

qkv, fc2 = Layer(40, 640, 1152, norm=True, part=64, heads=16), Layer(40, 640, 192, residual=True, stats=True)
for layer, config, dtype in (
    (qkv, Config(112, 3, 5), torch.bfloat16),
    (qkv, Config(24, 4, 5), torch.bfloat16),  # moments of a few rows a consumer
    (fc2, Config(24, 1, 9, True), torch.float16),
):
    arguments = fused(layer, tensors(layer, dtype, torch.device("cpu")))
    (job,) = record(lambda: arguments.run(gemm_swap_ab.linear, config)).values()
    found = compile_job(job, 90)
    assert found.problems == () and found.shared_bytes <= config.shared_bytes(), found
    behind = "mov.b32 %r2, global_smem; add.s32 %r1, %r2, 999999; mbarrier.init.shared::cta.b64 [%r1], 1;"
    assert not _misplaced_operands(job, behind)
    assert "something lies at" in _misplaced_operands(job, "st.shared.b32 [global_smem], %r1;")[0]
"""


def test_compiled_code_has_its_operands_where_shared_memory_begins() -> None:
    """And no spill, nor a product that waits for another. Where something else lies there, it is told."""
    done = run("-c", COMPILED)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_triton_that_puts_operands_elsewhere_costs_the_backend_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(40, 640, 256)
    arguments = fused(layer, tensors(layer, BF16, CPU))
    assert_misplaced_stages_are_refused(monkeypatch, gemm_swap_ab, lambda: arguments.run(gemm_swap_ab.linear, GOOD))
