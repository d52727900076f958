"""The figures of README and docs/ are those of bench/results/."""

import re
from pathlib import Path

import pytest

from fusedvit.bench.readme import DOCUMENTS, rewritten

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_come_from_the_results(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert rewritten(text, document) == text, "run python -m fusedvit.bench.readme"


@pytest.mark.parametrize(
    "document, before, written",
    [
        ("README.md", r"\| 1 x 448 px \| ", "784"),
        ("README.md", "", "`Glm4vVisionModel`"),
        ("docs/hopper.md", r"<!-- gemms: .*?\| 784 \| ", r"\d\.\d\d"),
        ("docs/speed.md", r"\| image 448 px \| ", "784"),
        ("docs/hopper-attention.md", r"<!-- attention: .*?\| 72 \| ", r"[\d.]+ \(\d\.\d\d\)"),
    ],
)
def test_what_is_typed_is_noticed(document: str, before: str, written: str) -> None:
    """The first that is `written` behind what stands `before` it."""
    text = (ROOT / document).read_text(encoding="utf-8")
    changed = re.sub(f"({before}){written}", r"\g<1>0.01", text, count=1, flags=re.DOTALL)
    assert changed != text and rewritten(changed, document) == text
