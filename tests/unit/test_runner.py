"""How a call is cut into batches, and what of the ladder it needs."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedvit.api import fuse, unfuse
from fusedvit.config import FuseConfig
from fusedvit.graphs.limits import check_limits
from fusedvit.model.items import Item
from fusedvit.runtime.runner import Runtime, budgets_of
from tests.support.towers import tiny_tower

LIMITS = check_limits((4, 16, 64), 4, 8)
UNIT = 4


@pytest.mark.parametrize(
    "calls, budgets",
    [
        ([[Item(1, 4, 4)]], {4}),
        ([[Item(1, 4, 6)], [Item(1, 8, 8)]], {16}),
        ([[Item(1, 4, 4)], [Item(1, 16, 16)]], {4, 64}),
        ([[Item(1, 32, 32)]], set()),  # 256 merged tokens: an image is never cut, it runs eagerly
        ([], set()),
    ],
)
def test_the_budgets_that_calls_replay(calls: list[list[Item]], budgets: set[int]) -> None:
    assert budgets_of(calls, UNIT, LIMITS) == budgets


def test_a_warmup_for_calls_refuses_what_is_no_grid() -> None:
    tower = tiny_tower()
    handle = fuse(tower, FuseConfig())
    handle.warmup(calls=[[[1, 4, 4]], torch.tensor([[2, 4, 4]])])  # without a GPU there is nothing to capture
    with pytest.raises(ValueError, match="multiple of the merge size 2, got 3"):
        handle.warmup(calls=[[[1, 3, 4]]])


def test_eager_runs_take_the_configurations_of_the_graph_they_would_replay() -> None:
    """Also inside somebody else's capture, where no graph is replayed: the same bits."""
    handle = fuse(tiny_tower(), FuseConfig())
    plain = Runtime(handle.spec, handle.weights, torch.device("cpu"), torch.float32)
    inside = dataclasses.replace(plain, no_graphs="inside another capture", limits=LIMITS)
    assert [inside.plan_tokens(tokens) for tokens in (4, 20, 256, 260)] == [16, 64, 256, plain.plan_tokens(260)]


@pytest.mark.parametrize("end", ["release", "unfuse"])
def test_whoever_captured_the_tower_is_told_when_what_the_graph_reads_is_freed(
    end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tower, device = tiny_tower(), torch.device("cuda:0")
    handle = fuse(tower, FuseConfig())
    runtime = Runtime(handle.spec, handle.weights, device, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    handle.release()
    handle.prepared.runtime = runtime
    parameter: Any = SimpleNamespace(device=device, dtype=torch.float32)
    assert handle.prepared.runtime_on(parameter).no_graphs == "inside another capture"
    handle.refresh()
    assert "capture it again" not in caplog.text
    unfuse(tower) if end == "unfuse" else handle.release()
    handle.release()
    assert caplog.text.count("capture it again") == 1
