"""A configuration's type decides what runs; a backend that fails is out of every later plan."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from fusedvit.graphs.limits import check_limits
from fusedvit.kernels import backends, tile_configs
from fusedvit.kernels.tile_configs import AttentionConfig, LinearConfig, Target
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.ops import TORCH
from fusedvit.model.plan import plan_for, tasks
from fusedvit.runtime import captured_encoder
from fusedvit.runtime.ahead_of_time import QWEN3_VL_8B
from fusedvit.stats import choices

BF16, FP32 = torch.bfloat16, torch.float32
H200, A100 = Target(name="NVIDIA H200"), Target(80, 108, 163 * 1024)


@dataclass(frozen=True)
class OtherConfig:
    block_n: int = 192


def other(run: Any) -> backends.Backend:
    """A linear backend for bf16 on sm_90, of one kind of epilogue."""
    return backends.Backend(
        name="other",
        op=backends.LINEAR,
        config=OtherConfig,
        run=run,
        absent=lambda target, dtype: "" if target.capability == 90 and dtype == BF16 else "bf16 on sm_90 only",
        wrong=lambda config, target, dtype: "",
        heuristic=lambda key, dtype, target, widest: OtherConfig() if key.kind == "residual+stats" else None,
        candidates=lambda key, dtype, target, widest: [OtherConfig()],
        modules=(tile_configs,),
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls that the other backend got."""
    calls: list[Any] = []
    backend = other(lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(backends, "BACKENDS", (backend, *backends.BACKENDS))
    monkeypatch.setitem(backends._BY_CONFIG, OtherConfig, backend)
    yield calls
    tile_configs._failed.clear()


def test_every_plan_is_of_forms_that_are_known() -> None:
    plan = plan_for(QWEN3_VL_8B, 784, FP32, A100, Table())
    assert set(plan.choices().values()) == {"triton"}
    assert isinstance(plan.qkv, LinearConfig) and isinstance(plan.attention, AttentionConfig)
    assert list(plan.choices()) == [task.name for task in tasks(QWEN3_VL_8B, 784, FP32)]


def test_a_form_answers_where_it_can(registered: list[Any]) -> None:
    plan = plan_for(QWEN3_VL_8B, 784, BF16, H200, Table())
    assert plan.proj == plan.fc2 == OtherConfig() and not isinstance(plan.qkv, OtherConfig)
    for dtype, target in ((FP32, H200), (BF16, A100)):
        assert "other" not in plan_for(QWEN3_VL_8B, 784, dtype, target, Table()).choices().values()
    assert "  without linear in its other backend: bf16 on sm_90 only" in choices(QWEN3_VL_8B, FP32, H200, [784])


def test_the_table_answers_first(registered: list[Any]) -> None:
    by_name = {task.name: task.key for task in tasks(QWEN3_VL_8B, 784, BF16)}
    mine = LinearConfig(64, 64, 64, 4, 3)
    table = Table({by_name["proj"]: mine, by_name["fc1"]: OtherConfig()})
    plan = plan_for(QWEN3_VL_8B, 784, BF16, H200, table)
    assert plan.proj == mine and plan.fc1 == OtherConfig() == plan.fc2
    plan = plan_for(QWEN3_VL_8B, 784, BF16, replace(H200, without=(("linear/other", "no"),)), table)
    assert plan.proj == mine and "other" not in plan.choices().values()


def test_the_type_of_the_config_decides(registered: list[Any]) -> None:
    backends.linear("x", "w", "rows", "out", "epilogue", OtherConfig())
    assert registered == [("x", "w", "rows", "out", "epilogue", OtherConfig())]
    with pytest.raises(AssertionError, match="no backend runs a str"):
        backends.attention(None, None, None, 1, 64, "config")


@pytest.mark.parametrize("error", [OutOfResources(3, 2, "shared memory"), RuntimeError("PassManager::run failed")])
def test_a_failed_form_is_out_of_later_plans(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: Any) -> torch.Tensor:
        raise error

    monkeypatch.setitem(backends._BY_CONFIG, OtherConfig, other(fail))
    with pytest.raises(backends.BackendFailed, match="linear in its other backend"):
        backends.linear(None, None, None, None, None, OtherConfig())
    without = replace(H200, without=tuple(tile_configs._failed.items()))
    assert "other" not in plan_for(QWEN3_VL_8B, 784, BF16, without, Table()).choices().values()
    assert any("linear in its other backend: " in line for line in choices(QWEN3_VL_8B, BF16, without, [784]))


def test_errors_of_the_device_are_nobodys_fallback(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setitem(backends._BY_CONFIG, OtherConfig, other(fail))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        backends.linear(None, None, None, None, None, OtherConfig())
    assert not tile_configs._failed


def test_an_encoder_goes_on_without_a_failed_form(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def encode(spec: Any, weights: Any, buffers: Any, ops: Any, plan: Any, branch: Any) -> None:
        seen.append(plan.choices()["proj"])
        if seen[-1] == "other":
            tile_configs.note_failure("linear/other", "does not compile")
            raise backends.BackendFailed

    monkeypatch.setattr(captured_encoder, "encode", encode)
    monkeypatch.setattr(Target, "of", lambda device: replace(H200, without=tuple(tile_configs._failed.items())))
    cpu = torch.device("cpu")
    made = captured_encoder.EncoderProgram(replace(QWEN3_VL_8B, depth=1, deepstack=()), TORCH, BF16, cpu, lambda: None)
    made.allocate(check_limits((16, 64), 4, 8))
    made.run(64)
    made.run(64)
    assert seen == ["other", "triton", "triton"]
