"""The list of slow tests names tests that are there: one that is renamed must not slip into `make test`."""

import ast
from pathlib import Path

import pytest

from tests.conftest import SLOW

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("listed", SLOW)
def test_what_is_listed_as_slow_is_there(listed: str) -> None:
    path, _, name = listed.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert not name or name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
