"""How much a tower may hold: the budgets that fit, and options that contradict each other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedvit.api import fuse
from fusedvit.config import FuseConfig
from fusedvit.graphs.manager import MIB
from fusedvit.model.ops import TORCH
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.captured_encoder import GRAPH_BYTES, CapturedEncoder, limits_for, limits_within
from tests.support.specs import QWEN3_VL_8B, QWEN25_VL_7B
from tests.support.towers import tiny_tower

ROOT = Path(__file__).resolve().parents[2]


def held(spec: VisionSpec, budget: int) -> int:
    """Bytes that the ladder up to `budget` holds, allocated without memory."""
    limits, device = limits_for(spec, torch.bfloat16, 0, (budget,)), torch.device("meta")
    encoder: Any = CapturedEncoder(spec, TORCH, torch.bfloat16, device, lambda: None)  # type: ignore[arg-type,return-value]
    encoder.allocate(limits)
    return int(encoder.held_bytes()) + len(limits.token_budgets) * GRAPH_BYTES


@pytest.mark.parametrize("spec", [QWEN3_VL_8B, QWEN25_VL_7B], ids=["Qwen3-VL-8B", "Qwen2.5-VL-7B"])
@pytest.mark.parametrize("room", [150, 400])
def test_the_most_budgets_that_fit(spec: VisionSpec, room: int) -> None:
    limits = limits_within(spec, torch.bfloat16, room * MIB)
    ladder = limits_for(spec, torch.bfloat16, 0, (16384,)).token_budgets
    following = ladder[ladder.index(limits.largest) + 1]
    assert held(spec, limits.largest) <= room * MIB < held(spec, following)


def test_a_graph_counts_for_as_much_as_was_measured() -> None:
    measured = json.loads((ROOT / "bench/results/h100-first-call.json").read_text(encoding="utf-8"))["scenarios"]
    for graphs in (measured[name]["graphs"] for name in ("loop", "warmup_cold", "warmup_warm")):
        held = (graphs["held_mib"] - graphs["buffers_mib"]) * MIB
        assert held <= graphs["captures"] * GRAPH_BYTES <= 1.3 * held


def test_a_cap_that_nothing_fits_is_said(caplog: pytest.LogCaptureFixture) -> None:
    limits_within(QWEN3_VL_8B, torch.bfloat16, 150 * MIB)
    assert not caplog.records
    limits_within(QWEN3_VL_8B, torch.bfloat16, -300 * MIB)
    (said,) = (record.getMessage() for record in caplog.records)
    held_mib = -(-held(QWEN3_VL_8B, 64) // MIB)
    assert said.startswith(f"fusedvit: FuseConfig(memory=…) is too small for this tower by {300 + held_mib} MiB: ")
    assert f"holds {held_mib} MiB of buffers and graphs, and the prepared weights leave -300 MiB" in said
    assert said.endswith(f"raise memory by {300 + held_mib}")
    caplog.clear()
    limits_within(QWEN3_VL_8B, torch.bfloat16, -300 * MIB + (300 + held_mib) * MIB)
    assert not caplog.records, "the advice is enough"


def test_there_is_always_a_budget_with_room_for_the_items() -> None:
    assert limits_within(QWEN3_VL_8B, torch.bfloat16, 0).token_budgets == (64,)
    assert limits_within(QWEN3_VL_8B, torch.bfloat16, 0, max_items=100).largest >= 100


@pytest.mark.parametrize("memory, most", [("small", 1.2), (64, None)])
def test_a_handle_chooses_by_what_its_weights_hold(memory: Any, most: float | None) -> None:
    tower = tiny_tower()
    handle = fuse(tower, FuseConfig(memory=memory))
    handle.refresh()
    weights = handle.weights.held_bytes()
    room = weights * (most - 1) if most else 64 * MIB - weights
    limits = handle.prepared.limits(torch.float32, 1 << 40)
    assert limits == limits_within(handle.spec, torch.float32, int(room))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"memory": "large"}, ValueError, "memory must be 'small', a whole number of MiB or None, got 'large'"),
        ({"memory": True}, TypeError, "memory must be"),
        ({"memory": [1]}, TypeError, r"memory must be .*got \[1\]"),
        ({"memory": 0}, ValueError, "memory must be at least 1 MiB, got 0"),
        ({"memory": 100, "token_budgets": (64,)}, ValueError, "give one of them"),
        ({"compile": "later"}, ValueError, "compile must be 'background' or 'now', got 'later'"),
        ({"compile": 1}, TypeError, "compile must be 'background' or 'now', got 1"),
        ({"compile": None}, TypeError, "compile must be"),
    ],
)
def test_options_that_no_tower_can_meet(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FuseConfig(**options)


def test_token_budgets_cannot_be_changed_behind_the_check() -> None:
    given = [64, 128]
    config = FuseConfig(token_budgets=given)
    given.clear()
    assert config.token_budgets == (64, 128) and config == FuseConfig(token_budgets=(64, 128))
    assert hash(config) == hash(FuseConfig(token_budgets=[64, 128]))
