"""The linear layer in its cublaslt form, on PyTorch's product of the CPU: what it takes, what it refuses, how a table
holds it, and that heuristics never choose it."""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedvit.bench import tune
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.backends import Key
from fusedvit.kernels.codegen_checks import compile_in_place, record
from fusedvit.kernels.cublaslt import CublasLtConfig, linear, unsupported
from fusedvit.kernels.epilogue import Epilogue, NormFold, Rope, RowStats, Taps
from fusedvit.kernels.launch import compiling_only
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.tile_configs import LinearConfig, Target
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.plan import plan_for, tasks
from fusedvit.runtime.ahead_of_time import GLM_45V, QWEN3_VL_8B
from fusedvit.stats import choices
from tests.kernels.linear_cases import Layer, apart, fused, tensors
from tests.kernels.support import NAN, assert_rounded_once, count, random

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CONFIG, H200, A100 = CublasLtConfig(), Target(name="NVIDIA H200"), Target(80, 108, 163 * 1024)
LAYERS = {
    "bias": Layer(21, 72, 56),
    "no bias": Layer(21, 72, 56, bias=False),
    "one row": Layer(1, 24, 40),
    "rows of out apart": Layer(9, 64, 50),  # rows of 100 bytes, 112 apart
}


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_within_the_rule(name: str, dtype: torch.dtype) -> None:
    """x and weight are views, columns and rows between and after them NaN."""
    layer = LAYERS[name]
    t = tensors(layer, dtype, CPU)
    given = fused(layer, t, layer.rows + 5)
    arguments = replace(given, x=apart(given.x, layer.k + 8), weight=apart(given.weight, layer.k + 8))
    assert arguments.x.stride(0) > layer.k
    out, _ = arguments.run(linear, CONFIG)
    twin, _ = fused(layer, t, wide=torch.float64).run(linear_ref, CONFIG)
    assert_rounded_once(out[: layer.rows], twin, "against the twin:")
    outside = out.as_strided((out.shape[0], out.stride(0) - layer.n), out.stride(), layer.n)
    assert outside.isnan().all(), "written between rows"


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_rows_past_the_count_change_nothing(rows: int) -> None:
    """In buffers of the same size, on whose rows the bits depend."""
    layer = replace(LAYERS["bias"], rows=rows)
    t = tensors(layer, BF16, CPU)
    poisoned = fused(layer, t, 21)
    clean = replace(poisoned, x=poisoned.x.nan_to_num(0.0))
    assert torch.equal(poisoned.run(linear, CONFIG)[0][:rows], clean.run(linear, CONFIG)[0][:rows])


STATS = RowStats.over(torch.zeros(4 * 2), 4, 8, 8)
REFUSED = {
    "norm": Epilogue(norm=NormFold(STATS, torch.zeros(8), 1e-6)),
    "taps": Epilogue(taps=Taps(torch.zeros(2, 8), torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, 1))),
    "rope": Epilogue(rope=Rope(torch.zeros(4, 2, 2), 8, 4)),
    "residual": Epilogue(residual=torch.zeros(4, 8)),
    "stats": Epilogue(stats=STATS),
    "residual, stats": Epilogue(residual=torch.zeros(4, 8), stats=STATS),
    **{name: Epilogue(activation=name) for name in ("gelu", "gelu_tanh", "quick_gelu", "swiglu")},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_else_follows_is_refused_before_any_launch(said: str) -> None:
    x, weight = random(4, 16).bfloat16(), random(8, 16, seed=1).bfloat16()
    out = torch.full((4, 4 if said == "swiglu" else 8), NAN, dtype=BF16)
    with pytest.raises(ValueError, match=f"cublaslt form takes a bias at most behind the product, got {said}$"):
        linear(x, weight, count(4, CPU), out, REFUSED[said], CONFIG)
    assert out.isnan().all()


def test_other_dtypes_and_shapes_are_refused() -> None:
    x = torch.zeros(4, 16)
    assert unsupported(Epilogue(), x) == "operands of 16 bits only, got torch.float32"
    assert unsupported(Epilogue(), torch.zeros(4, 12).half()) == "rows of whole 16 bytes, got 12 columns"
    said = unsupported(Epilogue(bias=torch.zeros(8)), x.half())
    assert said == "a bias of torch.float16, got torch.float32"
    with pytest.raises(AssertionError, match=r"\[4, 16\]\), weight torch.Size\(\[8, 24\]\)"):
        linear(x.half(), torch.zeros(8, 24).half(), count(4, CPU), torch.zeros(4, 8).half(), Epilogue(), CONFIG)
    for dtype, why in ((FP32, "bfloat16 and float16 only"), (BF16, ""), (FP16, "")):
        form = backends.backend_of(CONFIG)
        assert backends.why_unavailable(form, H200, dtype) == backends.why_unavailable(form, A100, dtype) == why
        assert form.wrong(CONFIG, H200, dtype) == why


def test_sums_of_fp16_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting of the user's, which stays; the form is out of later plans, by name."""
    noted: list[tuple[str, str]] = []
    monkeypatch.setattr(backends.configs, "note_failure", lambda *words: noted.append(words))
    arguments = {dtype: fused(LAYERS["bias"], tensors(LAYERS["bias"], dtype, CPU)) for dtype in (FP16, BF16)}
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        with pytest.raises(
            backends.BackendFailed, match="linear in its cublaslt form: RuntimeError: .*sums would be of 16"
        ):
            arguments[FP16].run(backends.linear, CONFIG)
        arguments[BF16].run(backends.linear, CONFIG)
        assert torch.backends.cuda.matmul.allow_fp16_accumulation
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before
    assert [name for name, _ in noted] == ["linear/cublaslt"]
    arguments[FP16].run(backends.linear, CONFIG)


def test_nothing_is_launched_where_kernels_are_only_compiled() -> None:
    arguments = fused(LAYERS["bias"], tensors(LAYERS["bias"], BF16, CPU))
    with compiling_only():
        assert arguments.run(linear, CONFIG)[0].isnan().all()
    assert arguments.run(linear, CONFIG)[0].isfinite().all()


def test_recording_kernels_finds_none_of_it() -> None:
    def on_meta() -> torch.Tensor:
        x, weight, out = (torch.empty(n, m, dtype=BF16, device="meta") for n, m in ((4, 16), (8, 16), (4, 8)))
        bias = torch.empty(8, dtype=BF16, device="meta")
        return linear(x, weight, torch.empty(1, device="meta"), out, Epilogue(bias), CONFIG)

    assert record(on_meta) == [] == compile_in_place(on_meta, 90, {})


def keys(spec: Any, rows: int = 1024) -> dict[str, Key]:
    return {task.name: task.key for task in tasks(spec, rows, BF16)}


def test_a_table_is_what_chooses_it() -> None:
    odd = Key(backends.LINEAR, "bias", 1280, 3420, 1024, "bfloat16")
    assert not backends.backend_of(CONFIG).candidates(odd, BF16, H200, 256)
    for spec, asked in ((QWEN3_VL_8B, {"merger_fc2"}), (GLM_45V, {"patch", "downsample", "merger_proj", "merger_fc2"})):
        offered = {n for n, key in keys(spec).items() if backends.backend_of(CONFIG).candidates(key, BF16, H200, 256)}
        assert offered == asked
        for target in (H200, A100):
            assert "cublaslt" not in plan_for(spec, 1024, BF16, target, Table()).choices().values()
        table = Table({keys(spec)[name]: CONFIG for name in asked})
        plan = plan_for(spec, 1024, BF16, H200, table)
        assert {name for name, form in plan.choices().items() if form == "cublaslt"} == asked and plan.whole
        without = replace(H200, without=(("linear/cublaslt", "no"),))
        assert not plan_for(spec, 1024, BF16, without, table).whole


def entry(key: Key) -> dict[str, Any]:
    return {**asdict(key), "form": "cublaslt", "config": asdict(CONFIG), "us": 12.5}


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An H200's table, read from a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning_table, "SHIPPED", tmp_path / "shipped")
    tuning_table.forget()
    yield tmp_path / "shipped" / tuning_table.file_name(H200.name)
    tuning_table.forget()


def test_written_to_a_table_and_read_back(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = keys(QWEN3_VL_8B)["merger_fc2"]
    tune.write(shipped, H200.name, [entry(key)])
    assert tuning_table.read(shipped, H200.name) == Table({key: CONFIG})
    assert plan_for(QWEN3_VL_8B, 1024, BF16, H200).merger_fc2 == CONFIG
    (line,) = [line for line in choices(QWEN3_VL_8B, BF16, H200, [1024]) if "per-op choice" in line]
    assert "cublaslt: merger_fc2" in line
    bad = entry(key) | {"config": {"block_n": 64}}
    tune.write(shipped, H200.name, [bad])
    with pytest.raises(tuning_table.TableError, match="CublasLtConfig has no block_n"):
        tuning_table.read(shipped, H200.name)


def test_another_pytorch_makes_it_stale_and_no_other_form(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """cuBLAS comes with PyTorch: what was faster there need not be here."""
    both = keys(QWEN3_VL_8B)
    plain = LinearConfig(64, 64, 64, 4, 3)
    other = {**asdict(both["proj"]), "form": "triton", "config": asdict(plain), "us": 9.0}
    tune.write(shipped, H200.name, [entry(both["merger_fc2"]), other])
    monkeypatch.setattr(tuning_table, "TORCH", "2.0")
    found = tuning_table.read(shipped, H200.name)
    assert found.entries == {both["proj"]: plain} and found.elsewhere
    assert found.stale == ("linear/cublaslt was measured with another PyTorch than 2.0",)
    with caplog.at_level(logging.INFO, "fusedvit"):
        assert "cublaslt" not in plan_for(QWEN3_VL_8B, 1024, BF16, H200).choices().values()
        tuning_table.user_folder().mkdir(parents=True)
        shipped.rename(tuning_table.user_folder() / shipped.name)
        tuning_table.forget()
        tuning_table.table_for(H200)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"], "shipped, then the user's own"
    tune.write(tuning_table.user_folder() / shipped.name, H200.name, [])
    assert tuning_table.read(tuning_table.user_folder() / shipped.name, H200.name) == Table({both["proj"]: plain})


def test_the_other_forms_are_as_tables_know_them() -> None:
    """No table that was made before this form is out of date by it."""
    parts = {f"{form.op}/{form.name}": {module.__name__ for module in form.modules} for form in backends.BACKENDS}
    own = parts.pop("linear/cublaslt")
    assert own == {"fusedvit.kernels.cublaslt"} and not any(own & others for others in parts.values())
    assert [form.name for form in backends.BACKENDS if form.library] == ["cublaslt"]
