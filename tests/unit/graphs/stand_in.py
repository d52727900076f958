"""Graphs without a GPU: a captured run is kept and run again, on torch operations, over real static buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fusedvit.fused_encoder import FusedEncoder
from fusedvit.graphs.limits import Limits
from fusedvit.graphs.manager import GraphManager
from fusedvit.model.ops import TORCH
from fusedvit.runtime.captured_encoder import CapturedEncoder, TowerGraphs
from fusedvit.runtime.runner import Runtime


class Kept:
    """Stands for a captured graph."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run
        self.reset = lambda: None


class CpuCapture:
    """Has the methods of `graphs.capture.CudaCapture`."""

    def capture(self, run: Callable[[], None]) -> Kept:
        run()
        return Kept(run)

    def held_bytes(self) -> int:
        return 0

    def nothing(self) -> None:
        pass

    before_use = after_use = wait = forget = give_back = nothing


@contextmanager
def graphs_on_cpu(handle: FusedEncoder, limits: Limits) -> Iterator[TowerGraphs]:
    """Within, calls of a tower on the CPU replay such graphs; a grid tensor counts as unread, as one on a GPU does."""
    dtype, device = next(handle.tower.parameters()).dtype, torch.device("cpu")
    encoder = CapturedEncoder(handle.spec, TORCH, dtype, device, handle.weights.get)
    graphs = TowerGraphs(GraphManager(limits, encoder, CpuCapture()), encoder)
    handle.prepared.runtime = Runtime(handle.spec, handle.weights, device, dtype, graphs, limits=limits)
    with mock.patch("fusedvit.runtime.inputs.is_on_gpu", lambda grid: True):
        yield graphs
