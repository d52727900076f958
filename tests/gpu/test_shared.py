"""A GPU that several processes share: kernels are taken off it in the middle and put back, and end nevertheless."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedvit.bench.ops import compiling_only
from fusedvit.kernels.hopper import gluon_compat
from fusedvit.kernels.hopper.attention_configs import LONG, TINY, schedules
from fusedvit.kernels.tile_configs import Target
from fusedvit.model import ops
from tests.gpu.test_hopper_gemm import CASES
from tests.kernels import attention_cases
from tests.kernels.attention_cases import packed, segments
from tests.kernels.linear_cases import fused, tensors

pytestmark = pytest.mark.gpu

PROCESSES, SECONDS, PATIENCE_S = 3, 2.0, 90.0
LINEARS = ("qkv", "proj", "fc1", "deepstack fc1", "fc2")
ATTENTIONS = {"windows": (72, TINY), "long heads of 64": (64, schedules(64)[-1]), "long": (72, LONG)}
NAMES = (*LINEARS, *ATTENTIONS)


def linear_of(name: str, device: torch.device) -> Callable[[], object]:
    layer, config = CASES[name]
    arguments = fused(layer, tensors(layer, torch.bfloat16, device), layer.rows + 70)
    config = replace(config, pdl=True)
    return lambda: arguments.run(ops.linear, config)


def attention_of(name: str, device: torch.device) -> Callable[[], object]:
    head_dim, config = ATTENTIONS[name]
    qkv, lengths = packed([4096], head_dim, torch.bfloat16, device, heads=16), [4096]
    segs = segments(lengths, config.block_m, device)
    return lambda: attention_cases.run(ops.attention, qkv, segs, head_dim, config)


def case_of(name: str, device: torch.device) -> Callable[[], object]:
    return linear_of(name, device) if name in CASES else attention_of(name, device)


def replay_all(done: Any) -> None:
    """One process: graphs of twenty launches, of every case for a while; `done` is told which it has finished."""
    device = torch.device("cuda")
    for name in NAMES:
        run = case_of(name, device)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                run()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for _ in range(8):
                graph.replay()
            torch.cuda.synchronize()
        done.put(name)


def test_quick_processes_side_by_side(device: torch.device) -> None:
    if not gluon_compat.usable(Target.of(device).capability):
        pytest.skip("for Hopper GPUs")
    with compiling_only():  # once, for all of them
        for name in NAMES:
            case_of(name, device)()
    spawn = multiprocessing.get_context("spawn")
    done = [spawn.SimpleQueue() for _ in range(PROCESSES)]
    processes = [spawn.Process(target=replay_all, args=(queue,)) for queue in done]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    finished = []
    for queue in done:
        names = []
        while not queue.empty():
            names.append(queue.get())
        finished.append(names)
    assert codes == [0] * PROCESSES, f"exit codes {codes}, None did not end; finished {finished}"
