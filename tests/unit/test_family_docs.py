"""docs/families.md: its example is the registered record, and no field goes without a word."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fusedvit.families.base import Family
from fusedvit.families.registry import family_of
from fusedvit.model.spec import VisionSpec
from tests.support.families import TINY, class_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
QWEN2 = "Qwen2VisionTransformerPretrainedModel"


def example() -> Family:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "docs/families.md", "exec"), found)
    return found["FAMILY"]


def test_the_example_is_the_registered_record() -> None:
    written, registered = example(), family_of(QWEN2)
    assert registered is not None
    config = class_of(QWEN2).config_class(**TINY[QWEN2][1])
    assert written.spec_from_config(config) == registered.spec_from_config(config)
    for field in fields(Family):
        if field.name != "spec_from_config":
            assert getattr(written, field.name) == getattr(registered, field.name), field.name


@pytest.mark.parametrize("record", [VisionSpec, Family])
def test_every_field_is_named(record: Any) -> None:
    assert [field.name for field in fields(record) if not re.search(rf"\b{field.name}\b", PAGE)] == []


def test_every_file_is_there() -> None:
    paths = set(re.findall(r"`((?:fusedvit|tests|bench|kernels)/[\w./]+)`", PAGE))
    assert len(paths) >= 5 and [path for path in paths if not (ROOT / path).exists()] == []
