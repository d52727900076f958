"""Results as JSON documents: plain values, valid JSON, written in one go."""

import json
import math
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """`value` with dataclasses as dicts, tuples as lists, paths as text; nan and inf, which JSON lacks, as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def write(document: Any, path: Path) -> None:
    """Write `document` to `path`, making its folder; whoever is cut off here leaves an older document as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain(document), indent=2, allow_nan=False) + "\n"
    if path.exists() and not path.is_file():  # a pipe, a terminal
        path.write_text(text, encoding="utf-8")
        return
    whole = path.with_name(path.name + ".new")
    whole.write_text(text, encoding="utf-8")
    whole.replace(path)
