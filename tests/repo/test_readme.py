"""The figures of README and docs/ are those of bench/results/."""

from pathlib import Path

import pytest

from fusedvit.bench.readme import DOCUMENTS, rewritten

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_come_from_the_results(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert rewritten(text, document) == text, "run python -m fusedvit.bench.readme"


@pytest.mark.parametrize(
    "document, written, typed",
    [
        ("README.md", "| 1 x 448 px | 784 |", "| 1 x 448 px | 785 |"),
        ("README.md", "`Glm4vVisionModel`", "`Glm4vTower`"),
        ("docs/hopper.md", "| fc2 | patch |", "| fc2 | patches |"),
        ("docs/hopper-attention.md", "| head_dim | 64 x 256 |", "| head_dim | 64 x 265 |"),
    ],
)
def test_what_is_typed_is_noticed(document: str, written: str, typed: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    changed = text.replace(written, typed)
    assert changed != text and rewritten(changed, document) == text
