"""How many cores a process counts as its own."""

import os
from pathlib import Path

import pytest

from fusedvit import cores


@pytest.mark.parametrize(
    "quota, allowed, found",
    [
        (None, 4, 4),
        ("max 100000", 4, 4),
        ("150000 100000", 4, 2),
        ("30000 100000", 4, 1),
        ("800000 100000", 3, 3),
        ("", 4, 4),
    ],
)
def test_affinity_and_the_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, allowed: int, found: int
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(cores, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    assert cores.available_cores() == found
