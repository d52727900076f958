"""The tests that the trust card and the mutants name are there, and every mutant can be planted."""

import re
from pathlib import Path

import pytest

from tests.support.mutants import MUTANTS, Mutant
from tests.trust import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]


def missing(tests: tuple[str, ...]) -> list[str]:
    """Selectors of no test."""
    found = []
    for test in tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
        found += [] if re.search(rf"^def {name or 'test_'}", text, re.MULTILINE) else [test]
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_have_tests(fault: str) -> None:
    assert missing(FAULTS[fault].tests) == []
    assert FAULTS[fault].on_cpu or FAULTS[fault].on_gpu


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guard)
def test_mutants_can_be_planted(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert missing(Fault("", mutant.tests).tests) == [] and mutant.tests


def test_mutants_are_told_apart() -> None:
    assert len({mutant.guard for mutant in MUTANTS}) == len(MUTANTS)
    assert missing(("tests/repo/test_trust.py::test_nothing",)) != []
