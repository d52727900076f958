"""Attention's own bench: on a CPU what ships there is held to the rule and timed; its schedules by layout."""

import json
import sys
from pathlib import Path

import pytest
import torch

from fusedvit.bench import attention
from fusedvit.bench.cases import attention_case
from fusedvit.kernels.configs import AttentionConfig, Target
from fusedvit.kernels.hopper import compat, configs

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attention.json"
    monkeypatch.setattr(sys, "argv", ["attention", "--head-dim", "72", "--json", str(path), "--commit", "abc"])
    attention.main()
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["passport"]["commit"] == "abc"
    (row,) = document["rows"]
    assert (row["head_dim"], row["layout"], row["wrong"]) == (72, "2 x 40", {})
    assert set(row["us"]) == {"ships", "triton"} and all(us > 0 for us in row["us"].values())


def test_schedules_of_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target()
    assert set(attention.forms((4096,), 72, torch.float32, target)) == {"ships", "triton"}
    monkeypatch.setattr(compat, "usable", lambda capability: True)
    found = attention.forms((16384,), 72, BF16, target)
    assert (
        set(found) == {"ships", "triton", "2 x 64", "2 x 128", "3 x 64", "3 x 64 by heads", "2 x 64 early"}
        and found["ships"] == configs.LONG
    )
    assert "1 x 64" in attention.forms((64,) * 256, 72, BF16, target)
    assert "3 x 64 early" in attention.forms((4096,), 64, BF16, target)
    found = attention.forms((4096,), 128, BF16, target)
    assert set(found) == {"ships", "triton", "2 x 64", "2 x 64 early"} and found["ships"] == found["triton"]


def test_an_answer_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case(2, 16, (130, 20), torch.float32, CPU, False, growth=9.0)
    monkeypatch.setattr(attention, "_why_wrong", lambda case, config: "wrong" if config == "bad" else "")
    row = attention._row(case, {"ships": "bad", "triton": AttentionConfig(64, 64, 4, 2)}, CPU)
    assert row["wrong"] == {"ships": "wrong"} and set(row["us"]) == {"triton"}


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = attention.measure((64,), CPU, False, ("triton",))
    assert set(row["us"]) == {"triton"} and "ratio" not in row
