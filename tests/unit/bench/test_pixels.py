"""`fusedvit bench pixels` on a tiny tower, and its verdict."""

import copy
from typing import Any

import pytest
import torch

from fusedvit.bench.pixels import report, table
from fusedvit.bench.pixels.corpus import jpegs
from fusedvit.bench.pixels.table import HF_CPU, HF_CPU_HF, OURS, Workload, pictures, processor_for

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    kept: list[int] = []
    work = {"2 x 100 to 64 px": Workload(2, 100, 64, bar=1e9)}
    options = report.Options("tiny", work, images=20, seconds=0.01)
    found = report.measure(options, torch.device("cpu"), lambda said: None, lambda part: kept.append(len(part)))
    assert kept == sorted(kept) and len(kept) == 4
    return found


def test_document(document: dict[str, Any]) -> None:
    (row,) = document["rows"]
    assert set(row["ms"]) == {HF_CPU_HF, HF_CPU, OURS} and all(ms["median"] > 0 for ms in row["ms"].values())
    assert set(row["stages_ms"]) == {f"{name}: {stage}" for name in row["ms"] for stage in ("pixels", "tower")}
    assert row["calls_in_a_burst"] in (5, 3, 1)  # by how fast the machine is
    assert set(row["first_ms"]) == (set(row["ms"]) if row["calls_in_a_burst"] > 1 else set())
    assert row["bytes"] == {
        "fp32_patches": 2 * 64 * 64 * 3 * 2 * 4,
        "images": 2 * 100 * 100 * 3,
        "ratio": 100**2 / (64**2 * 8),
        "byte_patches": 2 * 64 * 64 * 3,
    }
    assert document["corpus"]["images"] == 20 and OURS in document["corpus"]["images_per_s"]
    assert all(difference["share"] == 0 for difference in document["differences"].values())
    assert report.passed(document)


def test_a_wrong_answer_or_a_missed_bar_fails(document: dict[str, Any]) -> None:
    wrong = copy.deepcopy(document)
    wrong["rows"][0]["tokens"][OURS]["passed"] = False
    assert not report.passed(wrong)
    slow = copy.deepcopy(document) | {"tower": "Qwen3-VL-8B"}
    assert report.passed(slow) and report.missed(slow) == []
    slow["rows"][0]["bar_ms"] = 0.0001
    assert report.missed(slow) == ["2 x 100 to 64 px"] and not report.passed(slow)
    assert report.missed(slow | {"tower": "tiny"}) == []


@pytest.mark.parametrize("suffix, start", [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".jpg", b"\xff\xd8")])
def test_picture(document: dict[str, Any], suffix: str, start: bytes) -> None:
    drawn = report.draw(document, suffix)
    assert drawn.startswith(start) and len(drawn) > 5000


@pytest.mark.parametrize("work", [*table.WORKLOADS.values(), *table.TINY.values()], ids=str)
@pytest.mark.parametrize("patch", (14, 16))
def test_processors_resize_as_workloads_say(work: Workload, patch: int) -> None:
    target = work.target // (2 * patch) * 2 * patch
    patches = processor_for(work.target, patch).get_number_of_image_patches(work.side, work.side)
    assert patches == (target // patch) ** 2


def test_inputs_are_not_all_alike() -> None:
    first, second = pictures(2, 64)
    assert first.shape == (64, 64, 3) and (first != second).any()
    assert len(set(jpegs(70, 32))) == 64
