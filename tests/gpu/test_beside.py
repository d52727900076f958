"""Deepstack mergers beside the blocks or the last merger, on a GPU: the bits of launches in line on any memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit.bench import beside, towers
from fusedvit.bench.beside import DEVICE, DTYPE, WAYS, Line
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights

pytestmark = pytest.mark.gpu
GEOMETRY = towers.GEOMETRIES["Qwen3-VL-8B"] | {"depth": 10, "deepstack_visual_indexes": [1, 3, 7]}
BATCHES = 50


Tower = tuple[VisionSpec, EncoderWeights]


@pytest.fixture(scope="module")
def tower() -> Tower:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("mergers are beside on Hopper alone")
    module, _ = towers.build(GEOMETRY, DTYPE, DEVICE)
    return towers.prepared(module)


@pytest.mark.parametrize("way", ["planned", "all SMs, equal", "24 SMs", "last paired"])
@pytest.mark.parametrize("size", ["1 x 224 px", "video, 8 frames 224 px"])
def test_graphs_have_the_bits_of_launches_in_line(tower: Tower, way: str, size: str) -> None:
    line = Line(*tower, WAYS[way], beside.GRIDS[size])
    assert line.plan.apart, "nothing is tested in line"
    assert line.wrong(line.capture(), BATCHES) == 0


@pytest.mark.parametrize(("way", "size"), [("planned", "1 x 224 px"), ("last paired", "1 x 448 px")])
def test_eager_runs_have_the_same_bits(tower: Tower, way: str, size: str) -> None:
    """In buffers without room for mergers beside, where they run in line in place."""
    line = Line(*tower, WAYS[way], beside.GRIDS[size])
    assert line.plan.apart, "nothing is tested in line"
    replay = line.capture()
    for seed in range(5):
        line.load(seed)
        ours = line.answer(replay)
        line.load(seed)
        parts: dict[int, Any] = line.program._parts
        kept = parts[line.budget]
        parts[line.budget] = replace(kept, apart=None)
        theirs = line.answer(lambda: line.program.run(line.budget))
        parts[line.budget] = kept
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
