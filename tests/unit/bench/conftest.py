"""What several tests of this folder stand on."""

import pytest
import torch

from fusedvit.bench import beside, towers
from fusedvit.graphs.side_stream import NoSideStream
from fusedvit.model.ops import TORCH
from tests.unit.graphs.stand_in import CpuCapture

GEOMETRY = {
    "depth": 5,
    "hidden_size": 128,
    "num_heads": 2,
    "intermediate_size": 256,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [0, 1, 2],
}


@pytest.fixture
def on_cpu(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole towers as `fusedvit.bench.beside` measures them, planned as for Hopper and run by PyTorch."""
    monkeypatch.setitem(towers.GEOMETRIES, "Qwen3-VL-8B", GEOMETRY)
    monkeypatch.setattr(beside, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(beside, "TRITON", TORCH)
    monkeypatch.setattr(beside, "CudaCapture", lambda device, priority: CpuCapture())
    monkeypatch.setattr(beside, "CapturedSideStream", lambda device, priority: NoSideStream())
