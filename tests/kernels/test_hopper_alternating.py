"""What surrounds the alternating Hopper GEMM, without a GPU: what is offered, taken, refused, and how it compiles."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.bench import kernel_bench, questions
from fusedvit.kernels import backends
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.hopper.alternating_configs import (
    COLS,
    LEAST_BUDGET,
    TRIED,
    HopperAlternatingConfig,
    hopper_alternating_candidates,
    hopper_alternating_config,
    wrong_hopper_alternating,
)
from fusedvit.kernels.hopper.gemm_configs import uses_pdl
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.kernels.tuning_table import SHIPPED, Table, config_of, file_name
from fusedvit.model.plan import plan_for, tasks
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.ahead_of_time import QWEN2_VL_7B, QWEN3_VL_4B, QWEN3_VL_8B, QWEN25_VL_7B
from tests.kernels.linear_cases import Layer, fused, plain, tensors
from tests.kernels.support import assert_ring_elsewhere_is_told, assert_within
from tests.kernels.test_aot import run

if gluon_compat.AVAILABLE:
    from fusedvit.kernels.hopper import alternating

needs_gluon = pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU, H200 = torch.device("cpu"), Target(name="NVIDIA H200")
KEYS = [task.key for spec in (QWEN3_VL_8B, QWEN2_VL_7B, QWEN25_VL_7B) for task in tasks(spec, 64, BF16)]
LINEAR = [(key.n, key.k, key.kind) for key in KEYS if key.op == backends.LINEAR]
GOOD = HopperAlternatingConfig(112, 5)
FC1 = Layer(40, 704, 256, norm=True, part=64, activation="gelu_tanh")
FC2 = Layer(40, 704, 192, residual=True, stats=True)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200_000).map(budget), st.sampled_from(LINEAR))
def test_what_is_offered_can_run(rows: int, shape: tuple[int, int, str]) -> None:
    n, k, kind = shape
    found = hopper_alternating_candidates(rows, n, k, H200, kind)
    assert len(found) in (0, len(TRIED)) and len(found) == len(set(found))
    for config in found:
        assert not wrong_hopper_alternating(config, H200, BF16)
        assert config.stages <= -(-k // 64)
        assert config.pdl == uses_pdl(rows, kind)
        assert not config.pdl or rows < LEAST_BUDGET or "residual" in kind.split("+"), "these are long launches"
    left_out = {"rope", "taps", "swiglu"} & set(kind.split("+"))
    many = rows >= LEAST_BUDGET or (k >= 2048 and rows * n >= 2 * 132 * 128 * 128)
    assert bool(found) == (many and not left_out and n % 16 == 0), kind


@needs_gluon
def test_a_table_may_choose_it(on_hopper: None) -> None:
    form = backends.backend_of(GOOD)
    assert backends.named(backends.LINEAR, "alternating") is form and config_of(form, asdict(GOOD), "here") == GOOD
    (task,) = (task for task in tasks(QWEN3_VL_8B, 4096, BF16) if task.name == "proj")
    assert plan_for(QWEN3_VL_8B, 4096, BF16, H200, Table()).choices()["proj"] == "hopper"
    table = Table({task.key: replace(GOOD, rows=128)})
    assert plan_for(QWEN3_VL_8B, 4096, BF16, H200, table).choices()["proj"] == "alternating"


@needs_gluon
@pytest.mark.parametrize(
    "spec, rows, dtype, wanted",
    [
        (QWEN3_VL_8B, 4096, BF16, {"fc1"}),
        (QWEN3_VL_8B, 16384, BF16, {"fc1", "proj", "merger_fc1"}),
        (QWEN3_VL_8B, 2048, BF16, set()),
        (QWEN3_VL_8B, 16384, FP16, set()),
        (QWEN3_VL_4B, 16384, BF16, {"fc2", "merger_fc1"}),  # of the others K is 1024
        (QWEN25_VL_7B, 8192, BF16, {"patch", "proj", "fc2"}),
    ],
)
def test_where_heuristics_take_it(
    on_hopper: None, spec: VisionSpec, rows: int, dtype: torch.dtype, wanted: set[str]
) -> None:
    chosen = plan_for(spec, rows, dtype, H200, Table()).choices()
    assert {name for name, form in chosen.items() if form == "alternating"} == wanted
    assert "alternating" not in plan_for(spec, rows, dtype, replace(H200, capability=100), Table()).choices().values()


def test_its_height_is_what_the_tuner_finds() -> None:
    """Where heuristics take it, few entries of the table that ships say another height."""
    table = json.loads((SHIPPED / file_name("NVIDIA H200")).read_text())
    found = [entry for entry in table["entries"] if entry["form"] == "alternating"]
    heights = {(e["kind"], e["n"], e["k"], e["rows"]): e["config"]["rows"] for e in found}
    specs = [kernel_bench.spec_of(name) for name in kernel_bench.known() if name != "tiny"]
    asked = {
        (q.task.key.kind, q.task.key.n, q.task.key.k, q.task.key.rows)
        for q in questions.questions(specs, questions.BUDGETS, BF16)
        if q.task.key.op == backends.LINEAR
    }
    ours = {(kind, n, k, rows): hopper_alternating_config(rows, n, k, BF16, H200, kind) for kind, n, k, rows in asked}
    taken = {product: config.rows for product, config in ours.items() if config is not None}
    assert len(taken) > 200
    assert sum(heights.get(product, height) != height for product, height in taken.items()) < 0.1 * len(taken)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"rows": 120}, "rows must be 16 to 128 in 16s"),
        ({"rows": 144}, "rows must be 16 to 128"),
        ({"stages": 1}, "stages must be at least 2"),
        ({"max_programs": 0}, "max_programs positive"),
        ({"stages": 6}, "bytes of shared memory"),
    ],
)
def test_wrong_configurations_are_told(changed: dict[str, int], said: str) -> None:
    assert wrong_hopper_alternating(GOOD, H200, BF16) == ""
    assert said in wrong_hopper_alternating(replace(GOOD, **changed), H200, BF16)


@needs_gluon
@pytest.mark.parametrize(
    "layer, said",
    [
        (replace(FC1, activation="swiglu"), "no swiglu"),
        (replace(FC1, taps=True), "position taps"),
        (replace(FC1, n=264), "whole 16s of columns, got 264"),
        (replace(FC1, k=256), "as many steps of 64 in K as stages, got 4 and 5"),
        (replace(FC2, n=208), "statistics of whole 64s"),
    ],
    ids=str,
)
def test_what_it_cannot_run_is_refused_before_any_launch(layer: Layer, said: str) -> None:
    arguments = fused(layer, tensors(layer, BF16, CPU))
    with pytest.raises(ValueError, match=said):
        arguments.run(alternating.linear, GOOD)


def test_the_twin_takes_its_configurations() -> None:
    t = tensors(FC2, FP32, CPU)
    out, stats = fused(FC2, t).run(linear_ref, GOOD)
    assert_within(out, plain(FC2, t, torch.float64), plain(FC2, t, FP32))
    assert stats is not None and stats.parts == 3


COMPILED = """
import torch
from fusedvit.kernels.codegen_checks import _misplaced_ring, compile_launch, record
from fusedvit.kernels.hopper import alternating
from fusedvit.kernels.hopper.alternating_configs import HopperAlternatingConfig as Config
from tests.kernels.linear_cases import Layer, fused, tensors

fc1 = Layer(40, 640, 1152, norm=True, part=64, activation="gelu_tanh")
fc2 = Layer(40, 640, 192, residual=True, stats=True)
for layer, config, dtype in (
    (fc1, Config(128, 5), torch.bfloat16),
    (fc1, Config(112, 5, overlap=True), torch.float16),
    (fc2, Config(128, 5), torch.bfloat16),
    (fc2, Config(48, 6), torch.bfloat16),
):
    arguments = fused(layer, tensors(layer, dtype, torch.device("cpu")))
    (launch,) = record(lambda: arguments.run(alternating.linear, config))
    found = compile_launch(launch, 90)
    assert found.problems == () and found.shared_bytes <= config.shared_bytes(), found
    assert "something lies at" in _misplaced_ring(launch, "st.shared.b32 [global_smem], %r1;")[0]
"""


@needs_gluon
def test_compiled_code_has_its_ring_where_shared_memory_begins() -> None:
    """And no spill, nor a product that waits for another."""
    done = run("-c", COMPILED)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_gluon
def test_a_triton_that_puts_the_ring_elsewhere_costs_the_form_only(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = fused(FC1, tensors(FC1, BF16, CPU))
    assert_ring_elsewhere_is_told(monkeypatch, alternating, lambda: arguments.run(alternating.linear, GOOD))


def test_a_tile_is_both_halves() -> None:
    assert GOOD.cols == COLS == 128 and GOOD.tiles(225, 129) == 3 * 2
