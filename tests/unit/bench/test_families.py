"""The measurement of families on a CPU with tiny towers: its gate, its document. What it measures is another matter."""

import math
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit.bench import families as bench  # noqa: E402
from fusedvit.bench import timing  # noqa: E402
from fusedvit.bench.family_towers import Geometry  # noqa: E402
from tests.support import families  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TIMED", {"1024": [(1, 4, 4)], "4096": [(2, 4, 6)]})
    monkeypatch.setattr(bench, "CHECKED", {"mix": [(1, 2, 2), (1, 6, 4)]})
    monkeypatch.setattr(timing, "CALLS", ((3, math.inf),))  # however slow this machine is


def measured(name: str) -> dict[str, Any]:
    model, numbers = families.TINY[name]
    with torch.inference_mode():
        return bench.measure("tiny", Geometry(name, model, numbers, only_images=name.startswith("Glm4v")), CPU, 0)


@pytest.mark.parametrize("name", ["Glm4vVisionModel", "Qwen2VisionTransformerPretrainedModel"])
def test_turns_of_several_calls_behind_the_gate(name: str, small: None) -> None:
    found = measured(name)
    assert list(found["parity"]) == ["1024", "4096", "mix"] and all(v["passed"] for v in found["parity"].values())
    assert list(found["cost"]) == ["1024", "4096"]
    for row in found["cost"].values():
        assert row["calls_in_a_turn"] == 3 and set(row["first_ms"]) == {"hf", "ours"}
        assert all(row[key]["median"] > 0 for key in ("hf", "ours", "speedup"))
        assert row["ours"]["rounds"] == row["first_ms"]["ours"]["rounds"] == timing.LEAST_ROUNDS


def test_a_broken_rule_gets_no_time(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = bench.verdict_of

    def broken(ours: Any, ref: Any, pt: Any) -> dict[str, Any]:
        return verdict([t + 1 for t in ours] if ours[0].shape[0] == 16 else ours, ref, pt)

    monkeypatch.setattr(bench, "verdict_of", broken)
    found = measured("Qwen2VisionTransformerPretrainedModel")
    assert not found["parity"]["1024"]["passed"] and list(found["cost"]) == ["4096"]
