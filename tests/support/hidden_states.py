"""Runs of original towers that compute hidden states."""

import pytest

from fusedvit.outputs.lazy import HiddenStates
from fusedvit.outputs.unread import Hidden


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each run of the original tower that computes hidden states."""
    found: list[int] = []

    def counted(self: HiddenStates) -> Hidden:
        hidden = compute(self)
        found.append(1)
        return hidden

    compute = HiddenStates.compute
    monkeypatch.setattr(HiddenStates, "compute", counted)
    return found
