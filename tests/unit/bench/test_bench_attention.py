"""Attention's own bench: on a CPU what ships there is held to the rule and timed; its schedules by layout."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedvit.bench import attention, cases
from fusedvit.bench.cases import attention_case
from fusedvit.bench.power import Drawn
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.hopper import attention_configs, gluon_compat
from fusedvit.kernels.tile_configs import AttentionConfig, Target

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
    monkeypatch.setattr(gluon_compat, "usable", lambda capability: True)
    found = attention.forms((16384,), 72, BF16, target)
    by_heads = {"2 x 64 by heads", "3 x 64 by heads"}
    others = {"2 x 64", "2 x 64, other turns", "2 x 64, other barriers", "2 x 128", "3 x 64"}
    assert set(found) == {"ships", "apart", "triton"} | others | by_heads
    assert found["apart"] == (found["3 x 64 by heads"], attention_configs.SHORT)
    assert (found["3 x 64 by heads"].together, found["3 x 64"].together) == (4, 0)
    assert [config.pdl for config in found["ships"]] == [True, True]
    found = attention.forms((4096,), 72, BF16, target)
    assert found["apart"] == attention_configs.SHORT and found["ships"].pdl
    assert attention.forms((64,) * 64, 72, BF16, target)["ships"].block_m == 64
    found = attention.forms((4096,), 64, BF16, target)
    assert found["2 x 64"].near and not found["2 x 64, other offsets"].near
    found = attention.forms((4096,), 128, BF16, target)
    assert (
        set(found) == {"ships", "apart", "triton", "1 x 64", "2 x 64", "in turns"}
        and found["apart"] == attention_configs.WIDE
    )


def test_two_lists_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case(2, 16, (700, 20, 512), torch.float32, CPU, False)
    long, short = AttentionConfig(64, 64, 4, 2), AttentionConfig(128, 64, 4, 2)
    assert case.check((long, short)).passed
    monkeypatch.setattr(cases, "SHORT_FRAME", 600)  # 20 and 512 still short
    launched: list[tuple[int, int]] = []
    attend = cases.ops_for(CPU).attention

    def noted(qkv: torch.Tensor, segments: Segments, *rest: Any) -> torch.Tensor:
        launched.append((int(segments.num_tiles), segments.tiles.shape[0]))
        return attend(qkv, segments, *rest)

    monkeypatch.setattr(cases, "ops_for", lambda device: types.SimpleNamespace(attention=noted))
    case.run((long, short), 0)
    assert launched == [(11, 20), (5, 11)], "tiles of each list, in lists that could hold all of them"


def test_an_answer_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case(2, 16, (130, 20), torch.float32, CPU, False, growth=9.0)
    monkeypatch.setattr(attention, "_why_wrong", lambda case, config: "wrong" if config == "bad" else "")
    row = attention._row(case, {"ships": "bad", "triton": AttentionConfig(64, 64, 4, 2)}, CPU)
    assert row["wrong"] == {"ships": "wrong"} and set(row["us"]) == {"triton"}


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = attention.measure((64,), CPU, False, ("triton",))
    assert set(row["us"]) == {"triton"} and "ratio" not in row


def test_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn(watts=700.0, limit_watts=700.0, mhz=1700.0, capped=True, samples=9)
    monkeypatch.setattr(attention, "sustained", lambda run, device, seconds: (seconds, drawn))
    (row,) = attention.measure((64,), CPU, False, ("triton",), seconds=2.0)
    (found,) = row["sustained"]
    assert (found["name"], found["us"], found["watts"], found["capped"]) == ("triton", 200.0, 700.0, True)
