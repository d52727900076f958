"""Attention's own bench on a CPU: outputs pass the tolerance rule before they are timed."""

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedvit.bench import attention, ops
from fusedvit.bench.ops import attention_case
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.tile_configs import AttentionConfig

CPU = torch.device("cpu")


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    assert attention.main(["--head-dim", "72", "--json", str(path), "--commit", "abc"]) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["passport"]["commit"] == "abc"
    (row,) = document["rows"]
    assert (row["head_dim"], row["layout"], row["wrong"]) == (72, "2 x 40", {})
    assert set(row["us"]) == {"ours", "torch", "triton"} and all(us > 0 for us in row["us"].values())


def test_two_lists_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case(2, 16, (700, 20, 512), torch.float32, CPU, False)
    long, short = AttentionConfig(64, 64, 4, 2), AttentionConfig(128, 64, 4, 2)
    assert case.check((long, short)).passed
    monkeypatch.setattr(ops, "SHORT_FRAME", 600)  # 20 and 512 still short
    launched: list[tuple[int, int]] = []
    attend = ops.ops_for(CPU).attention

    def noted(qkv: torch.Tensor, segments: Segments, *rest: Any) -> torch.Tensor:
        launched.append((int(segments.num_tiles), segments.tiles.shape[0]))
        return attend(qkv, segments, *rest)

    monkeypatch.setattr(ops, "ops_for", lambda device: types.SimpleNamespace(attention=noted))
    case.run((long, short), 0)
    assert launched == [(11, 20), (5, 11)], "tiles of each list, in lists that could hold all of them"


def test_a_wrong_output_is_not_timed() -> None:
    case = attention_case(2, 16, (130, 20), torch.float32, CPU, False, growth=9.0)
    good = case.check(AttentionConfig(64, 64, 4, 2))
    case = replace(case, check=lambda config: replace(good, reason="wrong") if config == "bad" else good)
    us, wrong = ops.times_us(case, {"ours": "bad", "triton": AttentionConfig(64, 64, 4, 2)}, CPU)
    assert wrong == {"ours": "wrong"} and set(us) == {"torch", "triton"}
