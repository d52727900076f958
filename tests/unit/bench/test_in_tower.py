"""Tiles chosen in their tower, on the CPU: what is tried, what it takes to win, and the table that comes of it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedvit.bench import in_tower
from fusedvit.bench.questions import Question
from fusedvit.kernels import tuning_table
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.tile_configs import Target
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.plan import Task, choose, tasks
from fusedvit.runtime.ahead_of_time import QWEN3_VL_8B

pytestmark = pytest.mark.skipif(not gluon_compat.AVAILABLE, reason=gluon_compat.MISSING)
BF16, H200 = torch.bfloat16, Target(name="NVIDIA H200")
Asked = list[tuple[str, list[Any]]]


def task_of(name: str) -> Task:
    return next(task for task in tasks(QWEN3_VL_8B, 784, BF16) if task.name == name)


@pytest.fixture
def at_h200(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_tower.Target, "of", staticmethod(lambda device: H200))
    monkeypatch.setattr(in_tower, "wrong_twice", lambda config, cases, again: "")
    monkeypatch.setattr(in_tower, "cases_of", lambda *arguments: ())


def rigged(monkeypatch: pytest.MonkeyPatch, us: dict[str, list[list[float]]]) -> Asked:
    """Replays take, operation by operation, what `us` says, 100 us where it says nothing; returns what was asked."""
    asked: Asked = []

    def times(self: Any, task: Task, table: Table, configs: list[Any]) -> list[float]:
        asked.append((task.name, configs))
        said = us.get(task.name, [])
        taken = said.pop(0) if said else []
        return [*taken, *[100.0] * (len(configs) - len(taken))]

    monkeypatch.setattr(in_tower.Budget, "_times", times)
    return asked


def decided() -> tuple[Table, list[in_tower.Decided]]:
    nobodys: Any = None
    return in_tower.Budget(QWEN3_VL_8B, nobodys, 784, 0.0).decide(Table())


def test_grids_are_as_square_as_they_can_be() -> None:
    assert in_tower.grid_of(560, 2) == [(1, 20, 28)]
    assert in_tower.grid_of(784, 2) == [(1, 28, 28)]
    assert in_tower.grid_of(1984, 2) == [(1, 32, 62)]


def test_likely_tiles_are_tried_early_and_late(on_hopper: None) -> None:
    task = task_of("fc2")
    planned = choose(task, BF16, H200, Table())
    found = in_tower.tried(Question(task, QWEN3_VL_8B), planned, BF16, H200)
    assert found[0] == planned and len(found) == len(set(found)) > 4
    for config in found:
        if hasattr(config, "pdl"):
            assert replace(config, pdl=not config.pdl) in found
    patch = task_of("patch")
    first = in_tower.tried(Question(patch, QWEN3_VL_8B), choose(patch, BF16, H200, Table()), BF16, H200)
    assert not any(getattr(config, "pdl", False) for config in first), "the count is written before it"


def test_another_tile_must_save_something_twice(at_h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: dict[str, list[list[float]]] = {
        "fc2": [[100, 99, 98], [100, 98]],  # the third, confirmed
        "fc1": [[100, 95], [100, 99.9]],  # not confirmed
        "qkv": [[100, 99.8]],  # too little
    }
    asked = rigged(monkeypatch, cases)
    table, (found,) = decided()
    assert found.task.name == "fc2" and (found.us, found.planned_us) == (98, 100)
    assert table.entries == {found.task.key: asked[0][1][2]}
    assert asked[1][1] == [asked[0][1][0], asked[0][1][2]]
    assert [name for name, _ in asked] == ["fc2", "fc2", "fc1", "fc1", "qkv", "proj"]


def test_a_wrong_tile_does_not_win(at_h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = rigged(monkeypatch, {"fc2": [[100, 90, 95], [100, 95]]})
    checked: list[Any] = []

    def wrong(config: Any, cases: Any, again: Any) -> str:
        checked.append(config)
        return "it is wrong" if len(checked) == 1 else ""

    monkeypatch.setattr(in_tower, "wrong_twice", wrong)
    _, (found,) = decided()
    assert checked == asked[0][1][1:3] and found.config == checked[1]


def test_what_heuristics_say_needs_no_entry(on_hopper: None) -> None:
    task = task_of("fc2")
    own = choose(task, BF16, H200, Table())
    assert in_tower.Decided(task, own, 1.0, 2.0).entry(own) is None
    other = replace(own, pdl=not own.pdl)
    entry = in_tower.Decided(task, other, 1.0, 2.0).entry(own)
    assert entry is not None and (entry["tower_us"], entry["config"]["pdl"]) == (1.0, other.pdl)


def test_it_writes_a_table(
    at_h200: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over real lines and stand-ins for graphs; of all that are tried the last is fastest."""
    monkeypatch.setattr(
        in_tower, "in_turns", lambda some, device, seconds: {c.name: [1.0 / (2 + int(c.name))] for c in some}
    )
    monkeypatch.setattr(in_tower, "OPERATIONS", ("proj",))
    path = tmp_path / "table.json"
    words = ["in_tower", "--tower", "Qwen3-VL-8B", "--rows", "256", "320", "--seconds", "0", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    assert in_tower.main() == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[-1] == {"budgets": 2, "of": 2} and [line["rows"] for line in said[:-1]] == [256, 320]
    entries = json.loads(path.read_text())["entries"]
    assert (
        entries and {entry["rows"] for entry in entries} <= {256, 320} and all("tower_us" in entry for entry in entries)
    )
    assert len(tuning_table.read(path, H200.name).entries) == len(entries)
