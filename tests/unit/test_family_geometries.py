"""Every family at the width of a released tower, two blocks deep, in fp32 on the CPU, by the tolerance rule.

More blocks take minutes: `python -m fusedvit.bench.families --cpu` runs them.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.bench import towers
from fusedvit.bench.towers import GEOMETRIES, build_one, cast_parameters_, class_of, outputs_of, verdict_of
from fusedvit.families.registry import FAMILIES
from tests.support.towers import Grid, pixels_for

# The towers of Qwen2.5-VL-7B and Qwen3-VL-8B with other parameter names, which tests on tiny towers cover.
SAME = {"Qwen2.5-Omni-7B", "Qwen3-Omni-30B-A3B", "Qwen3.5-9B"}
PADDED = {"Gemma-4-31B", "Gemma-4-E4B"}  # their tests are tests/hf/test_gemma4.py, and bench.families at real widths
INSTALLED = [name for name in towers.FAMILIES if name in towers.known() and name not in SAME | PADDED]
# Five kinds of tower in `make test`; of the others two take 28 processor seconds, the rest differ in numbers alone.
QUICK = ("Qwen2-VL-7B", "Qwen2.5-VL-7B", "Qwen3-VL-8B", "GLM-5.3-Flash", "ERNIE-4.5-VL-28B-A3B")
MIX: Grid = [(1, 6, 10), (2, 2, 4)]  # narrower than a window, cut by one, two frames
SHALLOW: dict[str, Any] = {"depth": 2, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}


@pytest.fixture(autouse=True)
def one_tower_in_memory() -> Iterator[None]:
    """A fused tower and its handle hold each other until they are collected."""
    yield
    gc.collect()


def test_every_family_has_a_real_geometry() -> None:
    held = {geometry.class_name for geometry in GEOMETRIES.values()}
    assert [family.name for family in FAMILIES if not held & set(family.class_names)] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in INSTALLED]
)
def test_two_blocks(name: str) -> None:
    geometry = GEOMETRIES[name]
    numbers = vars(class_of(geometry).config_class())
    shallow = {key: value for key, value in SHALLOW.items() if key in numbers}
    tower = build_one(geometry.but(**shallow), torch.float32, torch.device("cpu")).requires_grad_(False)
    grid = geometry.rows(list(MIX))
    pixels, grid_thw = pixels_for(tower, grid), torch.tensor(grid)
    pt = outputs_of(tower(pixels, grid_thw=grid_thw))
    cast_parameters_(tower, torch.float64)
    ref = outputs_of(tower(pixels.double(), grid_thw=grid_thw))
    cast_parameters_(tower, torch.float32)
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    assert handle.spec.depth == 2
    verdict = verdict_of(outputs_of(tower(pixels, grid_thw=grid_thw)), ref, pt)
    assert verdict["passed"], verdict["reason"]
