"""Examples of the pages that call a tower run fused as they are written, on a model as `from_pretrained` gives it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import fusedvit
from fusedvit.cli.media import SAMPLE_IMAGE
from tests.support.checkpoint import checkpoint, tiny_processor  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CALLS = re.compile(r"\.visual\(|\.concatenated\(|DataParallelEncoder\(")
EXAMPLES = [
    (path.name, code)
    for path in PAGES
    for code in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    if CALLS.search(code)
]


@pytest.mark.parametrize("page, code", EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_an_example_runs_fused(page: str, code: str, checkpoint: Path) -> None:  # noqa: F811
    with torch.enable_grad():
        model, processor = AutoModelForImageTextToText.from_pretrained(checkpoint).eval(), tiny_processor()
        encoder = fusedvit.fuse(model, processor=processor)
        inputs = processor(images=[torch.zeros(3, 64, 64, dtype=torch.uint8)], return_tensors="pt")
        names: dict[str, Any] = {"torch": torch, "fusedvit": fusedvit, "paths": [SAMPLE_IMAGE]}
        names |= {"model": model, "processor": processor, "encoder": encoder}
        names |= {"pixel_values": inputs["pixel_values"], "grid_thw": inputs["image_grid_thw"]}
        levels = f"levels={len(encoder.spec.deepstack)}"
        here = code.replace('"cuda:0", "cuda:1"', '"cpu", "cpu"').replace("levels=3", levels)
        exec(compile(here, page, "exec"), names)
    stats = encoder.stats()
    assert stats["fused"] == stats["calls"] >= 1, stats["original"]


def test_there_are_some() -> None:
    assert [page for page, _ in EXAMPLES] == ["pixels.md", "serving.md", "using.md"]
