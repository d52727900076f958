"""The measurement of families on a CPU with tiny towers: its gate, its document. What it measures is another matter."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit.bench import families as bench  # noqa: E402
from fusedvit.bench import timing  # noqa: E402
from fusedvit.bench.towers import Geometry  # noqa: E402
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
        return bench.measure(Geometry(name, model, numbers, only_images=name.startswith("Glm4v")), CPU, 0)


@pytest.mark.parametrize("name", ["Glm4vVisionModel", "Qwen2VisionTransformerPretrainedModel"])
def test_times_of_what_passed(name: str, small: None) -> None:
    found = measured(name)
    assert list(found["parity"]) == ["1024", "4096", "mix"] and all(v["passed"] for v in found["parity"].values())
    assert list(found["cost"]) == ["1024", "4096"]
    for row in found["cost"].values():
        assert row["calls_in_a_burst"] == 3 and set(row["first_ms"]) == {"hf", "ours"}
        assert all(row[key]["median"] > 0 for key in ("hf", "ours", "speedup"))
        assert row["ours"]["rounds"] == row["first_ms"]["ours"]["rounds"] == timing.LEAST_ROUNDS


def test_a_broken_rule_gets_no_time(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = bench.verdict_of

    def broken(ours: Any, ref: Any, pt: Any) -> dict[str, Any]:
        return verdict([t + 1 for t in ours] if ours[0].shape[0] == 16 else ours, ref, pt)

    monkeypatch.setattr(bench, "verdict_of", broken)
    found = measured("Qwen2VisionTransformerPretrainedModel")
    assert not found["parity"]["1024"]["passed"] and list(found["cost"]) == ["4096"]


OLD = {"passport": {"commit": "old"}, "families": {"GLM-OCR": {"passport": {"commit": "old"}, "parity": {}}}}


def test_the_command_adds_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(geometry: Geometry, *_: Any) -> dict[str, Any]:
        if geometry.model == "qwen2_vl":
            raise RuntimeError("no room")
        return {"parity": {"odd image": {"passed": True}}}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "need_gpus", lambda: None)
    path = tmp_path / "f.json"
    path.write_text(json.dumps(OLD))
    words = ["--json", str(path), "--commit", "c0ffee", "--family", "Qwen3-VL-4B", "Qwen2-VL-7B"]
    assert bench.main(words) == 0
    document = json.loads(path.read_text())
    commits = {name: family["passport"]["commit"] for name, family in document["families"].items()}
    assert commits == {"GLM-OCR": "old", "Qwen3-VL-4B": "c0ffee", "Qwen2-VL-7B": "c0ffee"}
    assert document["families"]["Qwen2-VL-7B"]["failed"] == "RuntimeError: no room"
    monkeypatch.setattr(bench, "class_of", lambda geometry: None)
    bench.main(["--json", str(path), "--family", "GLM-OCR", "GLM-5.3-Flash"])
    found = json.loads(path.read_text())["families"]
    assert "parity" in found["GLM-OCR"] and "absent" in found["GLM-5.3-Flash"], "an older transformers hides nothing"


def test_an_output_out_of_tolerance_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "need_gpus", lambda: None)
    monkeypatch.setattr(bench, "measure", lambda *_: {"parity": {"odd image": {"passed": False}}})
    assert bench.main(["--json", str(tmp_path / "f.json"), "--family", "Qwen3-VL-4B"]) == 1


def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEPTH_ON_CPU", 1)
    model, numbers = families.TINY["Qwen2VisionTransformerPretrainedModel"]
    with torch.no_grad():
        found = bench.measure_on_cpu(Geometry("Qwen2VisionTransformerPretrainedModel", model, numbers))
    assert found["blocks"] == 1 and set(found["parity"]) == set(bench.CHECKED_ON_CPU)
    assert all(verdict["passed"] for verdict in found["parity"].values())
