"""The README's figures are those of bench/results/."""

from pathlib import Path

from fusedvit.bench.readme import rewritten

README = Path(__file__).resolve().parents[2] / "README.md"


def test_figures_come_from_the_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert rewritten(text) == text, "run python -m fusedvit.bench.readme"


def test_a_typed_figure_is_noticed() -> None:
    text = README.read_text(encoding="utf-8")
    assert rewritten(text.replace("| 1 x 448 px | 784 |", "| 1 x 448 px | 785 |")) == text


def test_a_typed_family_is_noticed() -> None:
    text = README.read_text(encoding="utf-8")
    typed = text.replace("`Glm4vVisionModel`", "`Glm4vTower`")
    assert typed != text and rewritten(typed) == text
