"""Attention's own bench: outputs pass the tolerance rule before they are timed."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from fusedvit.bench import attention, ops
from fusedvit.bench.ops import attention_case
from fusedvit.kernels.tile_configs import AttentionConfig

CPU = torch.device("cpu")


def test_the_command(tmp_path: Path) -> None:
    path, on_gpu = tmp_path / "attention.json", torch.cuda.is_available()
    label = "1 x 196" if on_gpu else "2 x 40"
    given = ["--head-dim", "72", "--layout", label, "--json", str(path), "--commit", "abc"]
    assert attention.main(given) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["passport"]["commit"] == "abc"
    (row,) = document["rows"]
    assert (row["head_dim"], row["layout"], row["wrong"]) == (72, label, {})
    assert set(row["us"]) == {"ours", "torch", "triton"} | ({"cudnn"} if on_gpu else set()) and all(
        us > 0 for us in row["us"].values()
    )


def test_a_wrong_output_is_not_timed() -> None:
    case = attention_case(2, 16, (130, 20), torch.float32, CPU, False, growth=9.0)
    good = case.check(AttentionConfig(64, 64, 4, 2))
    case = replace(case, check=lambda config: replace(good, reason="wrong") if config == "bad" else good)
    us, wrong = ops.times_us(case, {"ours": "bad", "triton": AttentionConfig(64, 64, 4, 2)}, CPU)
    assert wrong == {"ours": "wrong"} and set(us) == {"torch", "triton"}
