"""Deepstack mergers overlapped with blocks, on a GPU: a graph has the bits of the same launches in line."""

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit.bench import towers
from fusedvit.bench.workloads import WORKLOADS, Grid, tokens
from fusedvit.families.registry import family_of
from fusedvit.graphs.capture import CudaCapture
from fusedvit.graphs.limits import check_limits
from fusedvit.graphs.manager import GraphManager
from fusedvit.model.ops import TRITON
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.captured_encoder import CapturedEncoder

pytestmark = pytest.mark.gpu
GEOMETRY = {"depth": 10, "deepstack_visual_indexes": [1, 3, 7]}
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
BATCHES = 50

Tower = tuple[VisionSpec, EncoderWeights]


@pytest.fixture(scope="module", params=["Qwen3-VL-8B", "Qwen3-VL-2B"])
def tower(request: pytest.FixtureRequest) -> Tower:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("mergers are overlapped on Hopper alone")
    geometry = towers.GEOMETRIES[request.param].but(**GEOMETRY)
    spec, family = towers.spec_of(geometry), family_of(geometry.class_name)
    assert family is not None, geometry.class_name
    parameters = dict(towers.build_one(geometry, DTYPE, DEVICE).named_parameters())
    return spec, prepare(spec, family.names, family.source(parameters))


class Overlapped:
    """The encoder on one budget: captured with a side stream, and launched in line on the same buffers."""

    def __init__(self, spec: VisionSpec, weights: EncoderWeights, grid: Grid) -> None:
        self.grid, self.rows = grid, tokens(grid)
        self.budget = -(-self.rows // spec.merge_unit)
        self.encoder = CapturedEncoder(spec, TRITON, DTYPE, DEVICE, lambda: weights)
        self.in_line = CapturedEncoder(spec, TRITON, DTYPE, DEVICE, lambda: weights)  # outside a capture
        limits = check_limits((self.budget,), 8, 64)
        self.manager = GraphManager(limits, self.encoder, CudaCapture(DEVICE))
        assert self.manager.ready(self.budget)
        self.in_line.allocate(limits)

    def answer(self, encoder: CapturedEncoder, seed: int) -> list[torch.Tensor]:
        """Outputs of random pixels, replayed or launched in line."""
        part = encoder.buffers(self.budget)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        part.pixels[: self.rows].normal_(generator=generator)
        encoder.load_grid(self.budget, tuple(self.grid), part.pixels[: self.rows])
        if encoder is self.encoder:
            self.manager.graph(self.budget).replay()
        else:
            encoder.run(self.budget)
        return [part.hidden[: self.rows].clone(), *(plane[: self.budget].clone() for plane in part.merged)]


@pytest.mark.parametrize("size", ["1 x 224 px", "video, 8 frames 224 px"])
def test_graphs_have_the_bits_of_launches_in_line(tower: Tower, size: str) -> None:
    both = Overlapped(*tower, WORKLOADS[size])
    if both.encoder.whole().overlap is None:
        pytest.skip("in line at this size")
    for seed in range(BATCHES):
        ours, theirs = both.answer(both.encoder, seed), both.answer(both.in_line, seed)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), seed
