"""The type of a configuration decides which backend runs; one that fails is left out of every later plan."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from fusedvit.graphs.limits import check_limits
from fusedvit.kernels import backends, tile_configs
from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.hopper.attention_configs import HopperAttentionConfig
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from fusedvit.kernels.tile_configs import AttentionConfig, LinearConfig, Target
from fusedvit.kernels.tuning_table import Table
from fusedvit.model import ops
from fusedvit.model.ops import TORCH
from fusedvit.model.plan import plan_for, tasks
from fusedvit.runtime import captured_encoder
from fusedvit.stats import choices
from tests.support.specs import QWEN3_VL_8B

BF16, FP32 = torch.bfloat16, torch.float32
H200, A100 = Target(name="NVIDIA H200"), Target(80, 108, 163 * 1024)


@dataclass(frozen=True)
class OtherConfig:
    block_n: int = 192


OTHER = backends.Backend(
    name="other",
    op=backends.LINEAR,
    version=1,
    config=OtherConfig,
    absent=lambda capability, dtype: "" if capability == 90 and dtype == BF16 else "bf16 on sm_90 only",
    wrong=lambda key, config, target, dtype: "",
    heuristic=lambda key, dtype, target, widest: OtherConfig() if key.kind == "residual+stats" else None,
    candidates=lambda key, dtype, target, widest: [OtherConfig()],
)  # a linear backend for bf16 on sm_90, of one kind of epilogue


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls that the other backend got."""
    calls: list[Any] = []
    monkeypatch.setattr(backends, "BACKENDS", (OTHER, *backends.BACKENDS))
    monkeypatch.setitem(backends._BY_CONFIG, OtherConfig, OTHER)
    monkeypatch.setitem(ops.KERNELS, OtherConfig, lambda *arguments: calls.append(arguments))
    yield calls
    tile_configs._failed.clear()


def test_every_plan_is_of_known_backends() -> None:
    plan = plan_for(QWEN3_VL_8B, 784, FP32, A100, Table())
    assert set(plan.choices().values()) == {"triton"}
    assert isinstance(plan.qkv, LinearConfig) and isinstance(plan.attention, AttentionConfig)
    assert list(plan.choices()) == [task.name for task in tasks(QWEN3_VL_8B, 784, FP32)]


def test_a_backends_heuristic_is_asked_where_it_can_run(registered: list[Any]) -> None:
    plan = plan_for(QWEN3_VL_8B, 784, BF16, H200, Table())
    assert plan.proj == plan.fc2 == OtherConfig() and not isinstance(plan.qkv, OtherConfig)
    for dtype, target in ((FP32, H200), (BF16, A100)):
        assert "other" not in plan_for(QWEN3_VL_8B, 784, dtype, target, Table()).choices().values()
    assert "  without linear in its other backend: bf16 on sm_90 only" in choices(QWEN3_VL_8B, FP32, H200, [784])


def test_the_table_comes_before_heuristics(registered: list[Any]) -> None:
    by_name = {task.name: task.key for task in tasks(QWEN3_VL_8B, 784, BF16)}
    mine = LinearConfig(64, 64, 64, 4, 3)
    table = Table({by_name["proj"]: mine, by_name["fc1"]: OtherConfig()})
    plan = plan_for(QWEN3_VL_8B, 784, BF16, H200, table)
    assert plan.proj == mine and plan.fc1 == OtherConfig() == plan.fc2
    plan = plan_for(QWEN3_VL_8B, 784, BF16, replace(H200, without=(("linear/other", "no"),)), table)
    assert plan.proj == mine and "other" not in plan.choices().values()


def test_the_type_of_the_config_decides(registered: list[Any]) -> None:
    ops.linear("x", "w", "rows", "out", "epilogue", OtherConfig())
    assert registered == [("x", "w", "rows", "out", "epilogue", OtherConfig())]
    with pytest.raises(AssertionError, match="no backend runs a str"):
        ops.attention(None, None, None, 1, 64, "config")


@pytest.mark.parametrize("error", [OutOfResources(3, 2, "shared memory"), RuntimeError("PassManager::run failed")])
def test_a_failed_backend_is_out_of_later_plans(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: Any) -> torch.Tensor:
        raise error

    monkeypatch.setitem(ops.KERNELS, OtherConfig, fail)
    with pytest.raises(backends.BackendFailed, match="linear in its other backend"):
        ops.linear(None, None, None, None, None, OtherConfig())
    without = replace(H200, without=tuple(tile_configs._failed.items()))
    assert "other" not in plan_for(QWEN3_VL_8B, 784, BF16, without, Table()).choices().values()
    assert any("linear in its other backend: " in line for line in choices(QWEN3_VL_8B, BF16, without, [784]))


def test_device_errors_are_not_a_reason_to_fall_back(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setitem(ops.KERNELS, OtherConfig, fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ops.linear(None, None, None, None, None, OtherConfig())
    assert not tile_configs._failed


def test_an_encoder_goes_on_without_a_failed_backend(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def encode(spec: Any, weights: Any, buffers: Any, ops: Any, plan: Any, *rest: Any) -> None:
        seen.append(plan.choices()["proj"])
        if seen[-1] == "other":
            tile_configs.note_failure("linear/other", "does not compile")
            raise backends.BackendFailed

    monkeypatch.setattr(captured_encoder, "encode", encode)
    monkeypatch.setattr(Target, "of", lambda device: replace(H200, without=tuple(tile_configs._failed.items())))
    cpu = torch.device("cpu")
    program = captured_encoder.CapturedEncoder(
        replace(QWEN3_VL_8B, depth=1, deepstack=()), TORCH, BF16, cpu, lambda: None
    )
    program.allocate(check_limits((16, 64), 4, 8))
    program.run(64)
    program.run(64)
    assert seen == ["other", "triton", "triton"]


def test_an_encoder_whose_plan_stays_the_same_does_not_try_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*arguments: Any) -> None:
        raise backends.BackendFailed("linear in its triton backend: no")

    monkeypatch.setattr(captured_encoder, "encode", encode)
    spec = replace(QWEN3_VL_8B, depth=1, deepstack=())
    program = captured_encoder.CapturedEncoder(spec, TORCH, BF16, torch.device("cpu"), lambda: None)
    program.allocate(check_limits((16,), 4, 8))
    with pytest.raises(backends.BackendFailed):
        program.run(16)


@pytest.mark.parametrize(
    "name, key, config",
    [
        ("hopper", Key("linear", "residual+stats", 1152, 1152, 2048, "bfloat16"), HopperGemmConfig(64, 128, 3, 4)),
        ("swap_ab", Key("linear", "norm+gelu", 4608, 4608, 336, "bfloat16"), HopperSwapABConfig(112, 3, 5)),
        ("hopper", Key("attention", "", 16, 64, 65536, "bfloat16"), HopperAttentionConfig(3, 4, late=True)),
    ],
)
def test_what_spills_on_a_newer_triton_is_refused_there(
    monkeypatch: pytest.MonkeyPatch, name: str, key: Key, config: Any, on_hopper: None
) -> None:
    backend = backends.backend_named(key.op, name)
    assert backend is backends.backend_of(config)
    for newer in (False, True):
        monkeypatch.setattr(gluon_compat, "NEEDS_MORE_REGISTERS", newer)
        assert (backend.wrong(key, config, H200, BF16) == "spills registers") == newer
        assert (Table({key: config}).find(key, H200, BF16) is None) == newer
