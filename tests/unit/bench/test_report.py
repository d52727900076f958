"""Tables say what was measured, and nothing else."""

import copy
import json
from typing import Any

import pytest

from fusedvit.bench import report, tables, towers
from fusedvit.families.registry import FAMILIES
from fusedvit.families.unsupported import UNSUPPORTED

NONE: dict[str, Any] = {}


@pytest.fixture
def cpu() -> dict[str, Any]:
    return copy.deepcopy(report.load(report.FAMILIES_CPU)["families"])


def row_of(checkpoint: str, gpu: dict[str, Any], cpu: dict[str, Any]) -> dict[str, str]:
    head, rows = tables.family_table(gpu, cpu)
    (found,) = (dict(zip(head, row, strict=True)) for row in rows if row[2].startswith(checkpoint))
    return found


def test_every_class_has_a_row(cpu: dict[str, Any]) -> None:
    gpu = report.load(report.FAMILIES_GPU[0])["families"]
    text = json.dumps([tables.family_table(gpu, cpu), tables.unsupported_table()])
    names = [name for family in FAMILIES for name in (*family.class_names, *family.also_in)]
    assert [name for name in (*names, *UNSUPPORTED) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", towers.FAMILIES)
def test_every_geometry_has_a_row_that_names_its_checkpoints(name: str, cpu: dict[str, Any]) -> None:
    gpu = {k: v for document in report.FAMILIES_GPU for k, v in report.load(document)["families"].items()}
    said = row_of(name, gpu, cpu)["checkpoint"]
    assert towers.GEOMETRIES[name].others in said


def test_a_family_that_no_gpu_measured_says_so(cpu: dict[str, Any]) -> None:
    row = row_of("Qwen2.5-VL-7B", NONE, cpu)
    assert row["error ratio, bf16: largest / rms"] == tables.NOT_MEASURED != row["error ratio, fp32: largest / rms"]
    assert [text for head, text in row.items() if head.startswith("4096 patches")] == [tables.NOT_MEASURED]


def test_an_answer_out_of_tolerance_gets_no_ratio(cpu: dict[str, Any]) -> None:
    fp32 = "error ratio, fp32: largest / rms"
    assert "/" in row_of("GLM-OCR", NONE, cpu)[fp32]
    cpu["GLM-OCR"]["parity"]["video"]["passed"] = False
    assert row_of("GLM-OCR", NONE, cpu)[fp32].startswith("out of tolerance")


def test_a_family_without_any_measurement_is_refused(cpu: dict[str, Any]) -> None:
    del cpu["GLM-OCR"]
    with pytest.raises(ValueError, match="expected a measurement of GLM-OCR"):
        tables.family_table(NONE, cpu)


def test_what_is_wrong_gets_no_time() -> None:
    row = {"tower": "a", "op": "qkv", "shape": "64 x 8 x 8", "us": None, "peers_us": {tables.CUBLAS: 2.0}}
    assert tables.gemm_table([row]).rows == [["64", "wrong"]]
    shown = tables.operation_table([row | {"backend": "hopper", "floor_us": None}])
    assert shown.rows == [["qkv", "64 x 8 x 8", "hopper", "wrong", f"{tables.CUBLAS} 2.0"]]


def test_mergers_are_in_patch_rows() -> None:
    row = {"tower": "a", "op": "merger_fc1", "shape": "16 x 8 x 8", "us": 2.0, "peers_us": {tables.CUBLAS: 3.0}}
    assert tables.gemm_table([row]).rows == [["64", "2.0 (1.50)"]]


def test_a_check_is_taken_from_the_first_document_that_has_it() -> None:
    faults = {"F1": {"fault": "a", "tests": ["t"], "gpu": ["soak", "repeats"], "passed": 2}}
    documents = {
        "a.json": {"date": "1", "trust": {"soak": {"wrong": 0}}},
        "b.json": {"date": "2", "trust": {"soak": {"wrong": 3}}},
    }
    found = [row[2:] for row in tables.trust_table(faults, "cpu.json", documents).rows]
    none, file = [f"repeats: {tables.NOT_MEASURED}", tables.NONE, tables.NONE], "`a.json`"
    assert found == [["2 tests pass", "`cpu.json`", tables.NONE], ["soak: wrong 0", file, "1"], none]


def test_errors_are_those_of_every_workload() -> None:
    gates = [{"passed": i < 2, "largest": 1.0 + i, "rms": 0.5} for i in range(3)]
    towers = {"a": {"workloads": {str(i): {"parity": {"ours": gate}} for i, gate in enumerate(gates)}}}
    assert tables.error_table(towers).rows == [["a", "3", "2.00 / 3.00", "0.50 / 0.50", "1"]]


def test_the_origin_names_every_commit() -> None:
    said = report.origin(report.FAMILIES_GPU[0], "../")
    runs = [found["passport"]["commit"][:7] for found in report.load(report.FAMILIES_GPU[0])["families"].values()]
    assert all(commit in said for commit in runs) and f"](../bench/results/{report.FAMILIES_GPU[0]})" in said
