"""One side of `compare`: a tower of one checkout, which runs bursts of calls when asked to.

`compare` runs this file's text with the other checkout on Python's path, too: of that it needs only `fuse`,
`warmup(calls=)`, `graphs()` and its own bench's towers, workloads and timing.
"""

import json
import statistics
import sys
import time
from typing import Any

import torch

from fusedvit import fuse
from fusedvit.bench import towers
from fusedvit.bench.timing import gpu_ms
from fusedvit.bench.workloads import WORKLOADS, tokens

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
CALLS = 5  # per burst; 2 if a call takes more than 20 ms


def serve(tower_name: str) -> int:
    """The process of one checkout: reads workload names, one per line, and writes a burst's microseconds as JSON."""
    tower, _ = towers.build(towers.GEOMETRIES[tower_name], DTYPE, DEVICE)
    handle = fuse(tower)
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = {}
    with torch.inference_mode():
        handle.warmup(progress=iter, calls=list(WORKLOADS.values()))
        for name, grid in WORKLOADS.items():
            pixels = torch.randn(tokens(grid), towers.patch_width(tower), device=DEVICE, generator=generator).to(DTYPE)
            inputs[name] = pixels, torch.tensor(grid, device=DEVICE)
            for _ in range(3):
                tower(inputs[name][0], grid_thw=inputs[name][1])
        print(json.dumps({"ready": True, "stats": handle.stats()["calls"]}), flush=True)
        for line in sys.stdin:
            print(json.dumps(burst(tower, handle, *inputs[line.strip()])), flush=True)
    return 0


def burst(tower: Any, handle: Any, pixels: torch.Tensor, grid: torch.Tensor) -> dict[str, float]:
    """Medians of a few calls, in microseconds; `replay` and `host` only if the call is one replay."""
    manager = handle.graphs().manager
    before = dict(manager.stats.replays)
    first = _wall_us(tower, pixels, grid)  # not counted: caches are cold after the other process's burst
    used = [budget for budget, count in manager.stats.replays.items() if count != before.get(budget, 0)]
    graph = manager.graph(used[0]) if len(used) == 1 else None
    taken: dict[str, list[float]] = {}
    for _ in range(CALLS if first < 20e3 else 2):
        wall = _wall_us(tower, pixels, grid)
        taken.setdefault("wall", []).append(wall)
        if graph is not None:
            replay = 1e3 * gpu_ms(graph.replay, DEVICE)
            taken.setdefault("replay", []).append(replay)
            taken.setdefault("host", []).append(wall - replay)
    return {name: statistics.median(us) for name, us in taken.items()}


def _wall_us(tower: Any, pixels: torch.Tensor, grid: torch.Tensor) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    tower(pixels, grid_thw=grid)
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
