"""What several tests of this folder stand on."""

import pytest

from fusedvit.kernels.hopper import compat


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a Hopper GPU; the interpreter, which runs no Gluon, is not asked."""
    monkeypatch.setattr(compat, "usable", lambda capability: capability == 90)
