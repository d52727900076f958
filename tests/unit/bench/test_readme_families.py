"""The README's table of families says what was measured, and nothing else."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fusedvit.bench.readme_families import NOT_MEASURED, explanation, family_table, unsupported_table
from fusedvit.families.registry import FAMILIES
from fusedvit.families.unsupported import UNSUPPORTED

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
NONE: dict[str, Any] = {}


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))["families"]


def row_of(checkpoint: str, gpu: dict[str, Any], cpu: dict[str, Any]) -> dict[str, str]:
    head, rows = family_table(gpu, cpu)
    (found,) = (dict(zip(head, row, strict=True)) for row in rows if row[2].startswith(checkpoint))
    return found


def test_every_class_has_a_row() -> None:
    gpu, cpu = load("h200-families.json"), load("cpu-families.json")
    text = json.dumps(family_table(gpu, cpu)) + json.dumps(unsupported_table())
    names = [name for family in FAMILIES for name in (*family.class_names, *family.also_in)]
    assert [name for name in (*names, *UNSUPPORTED) if f"`{name}`" not in text] == []


def test_what_was_not_measured_says_so() -> None:
    row = row_of("Qwen2.5-VL-7B", NONE, load("cpu-families.json"))
    assert row["error, bf16"] == row["4096 patches"] == NOT_MEASURED != row["error, fp32"]


def test_a_broken_rule_gets_no_ratio() -> None:
    cpu = copy.deepcopy(load("cpu-families.json"))
    assert "/" in row_of("GLM-OCR", NONE, cpu)["error, fp32"]
    cpu["GLM-OCR"]["parity"]["video"]["passed"] = False
    assert row_of("GLM-OCR", NONE, cpu)["error, fp32"].startswith("breaks the rule")


def test_turns_of_several_calls_have_a_first() -> None:
    """Beside rows of an older run, of which each turn was one call."""
    gpu = copy.deepcopy(load("h200-families.json"))
    older = {name: "".join(row_of(name, gpu, NONE).values()) for name in ("GLM-OCR", "Qwen2-VL-7B")}
    assert "first" not in "".join(older.values())
    cost = gpu["GLM-OCR"]["cost"]["1024"]
    cost |= {"first_ms": {name: {"median": 9.87} for name in ("hf", "ours")}, "calls_in_a_turn": 5}
    gpu["GLM-OCR"]["cost"]["6272"] |= {"first_ms": {}, "calls_in_a_turn": 1}
    row = row_of("GLM-OCR", gpu, NONE)
    assert f" → {cost['ours']['median']:.1f}, first 9.9 (" in row["1024 patches"] and "first" not in row["6272 patches"]
    assert "".join(row_of("Qwen2-VL-7B", gpu, NONE).values()) == older["Qwen2-VL-7B"]
    said = " ".join(explanation(gpu))
    assert "A turn is 1 to 5 calls in a row" in said and "where there is none, a turn is one call" in said
    assert "A turn" not in " ".join(explanation({"GLM-OCR": {"failed": "no room"}}))


def test_a_family_without_any_measurement_is_refused() -> None:
    cpu = copy.deepcopy(load("cpu-families.json"))
    del cpu["GLM-OCR"]
    with pytest.raises(ValueError, match="GLM-OCR is registered"):
        family_table(NONE, cpu)
