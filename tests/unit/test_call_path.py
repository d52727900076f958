"""docs/architecture.md follows one call hop by hop: a call on stand-ins for graphs takes them in that order."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.runtime import inputs
from tests.support.graphs_on_cpu import GRID, Case, case  # noqa: F401  # a fixture
from tests.support.towers import Call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
PACKAGE = Path(fusedvit.__file__).parent
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)`, .*?`(?:\w+\.)?(\w+)`(?: and `(\w+)`)? \|", re.MULTILINE)
HOPS = {int(hop): (path, name) for hop, path, name, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def entered_and_left(tower: Any, pixels: torch.Tensor, grid: Any) -> list[tuple[str, str]]:
    """(file, function) of every entry and every return of our functions during a call."""
    seen: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event in ("call", "return") and PACKAGE in path.parents:
            seen.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        tower(pixels, grid_thw=grid)
    finally:
        sys.setprofile(None)
    return seen


def test_the_table_is_whole() -> None:
    assert list(HOPS) == list(range(1, 14))
    for _, path, *names in ROW.findall(PAGE.read_text(encoding="utf-8")):
        code = (PACKAGE / path).read_text(encoding="utf-8")
        assert [name for name in names if name and f"def {name}(" not in code] == [], path


@pytest.mark.parametrize("unread, skipped", [(True, 9), (False, 11)], ids=["speculative", "planned"])
def test_a_call_takes_these_hops_in_this_order(
    case: Case,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    unread: bool,
    skipped: int,
) -> None:
    monkeypatch.setattr(inputs, "is_on_gpu", lambda grid: unread)
    tower, pixels = case[0], Call.of(case[0], GRID).pixels
    grid = torch.tensor(GRID) if unread else GRID
    for _ in range(2):  # captures
        tower(pixels, grid_thw=grid)
    pixels = pixels if unread else pixels[None]  # a batch of one: nothing is replayed before it is read
    seen = entered_and_left(tower, pixels, grid)
    assert HOPS[skipped] not in seen
    left = iter(seen)
    assert [hop for hop, where in HOPS.items() if hop != skipped and where not in left] == []
