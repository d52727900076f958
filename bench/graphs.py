"""`python -m fusedvit.bench.graphs`: the graph manager on this machine's GPU: right answers first, then what it costs.

Trust (bench/graph_trust.py) runs on a Qwen3-VL-8B-wide tower of four blocks, so that tens of thousands of calls fit in
a minute; cost runs on the whole tower.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedvit.bench import graph_trust as trust
from fusedvit.bench.parity import build, pixels_for
from fusedvit.bench.passport import passport
from fusedvit.bench.workloads import WORKLOADS, Grid, tokens
from fusedvit.config import FuseConfig
from fusedvit.handle import FusedEncoder
from fusedvit.huggingface import fuse, unfuse

DEVICE = torch.device("cuda")
BUDGETS = (64, 256, 1024, 2048, 4096, 8192)  # merged tokens; six, as the nine workloads need no more


def trust_report(scale: float) -> dict[str, Any]:
    """Every trust check; `scale` shortens them all."""
    tower, _ = build(4, torch.bfloat16, False)
    handle = fuse(tower, FuseConfig(token_budgets=(64, 256, 1024), max_items=16, max_frames=64))
    handle.warmup()

    def times(n: int) -> int:
        return max(1, int(n * scale))

    report: dict[str, Any] = {
        "graph_equals_eager": trust.graph_equals_eager(tower, handle, times(500)),
        "equal_totals": trust.equal_totals(tower, handle, times(2000)),
        "held_outputs": trust.held_outputs(tower, times(10_000)),
        "threads_and_streams": trust.threads_and_streams(tower, handle, 8, 4, times(1250)),
        "captures_beside_others": trust.captures_beside_others(tower, handle, times(100)),
        "out_of_memory": list(trust.out_of_memory(tower, handle, [4096, 256, 128, 64, 32, 16, 8, 4, 2, 2048])),
    }
    unfuse(tower)
    return report


def graph_us(handle: FusedEncoder, budget: int, grid: Grid, rounds: int = 15) -> float:
    """Microseconds of one replay of `budget`'s graph on `grid`, by events, median."""
    program, manager = handle.graphs().program, handle.graphs().manager
    manager.ready(budget)
    program.buffers(budget).pixels[: tokens(grid)].copy_(pixels_for(grid, torch.bfloat16))
    program.load_grid(budget, tuple(grid))
    graph = manager.graph(budget)
    return 1e3 * _event_ms(graph.replay, rounds)


def _event_ms(run: Callable[[], None], rounds: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def wall_ms(call: Callable[[], Any], rounds: int = 30) -> float:
    """Milliseconds of one call, the GPU waited for, median."""
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def cost_report() -> dict[str, Any]:
    """The nine workloads, the host's share, and what a small content costs in a large budget."""
    tower, _ = build(27, torch.bfloat16, False)
    handle = fuse(tower, FuseConfig(token_budgets=BUDGETS, max_items=64, max_frames=256))
    begin = time.perf_counter()
    handle.warmup()
    torch.cuda.synchronize()
    warmup = time.perf_counter() - begin
    rows = {name: _workload(tower, handle, grid) for name, grid in WORKLOADS.items()}
    report = {
        "warmup_s": warmup,
        "workloads": rows,
        "host": _host(tower, handle),
        "stats": handle.stats(),
        "content": _content(tower, handle),
    }
    handle.release()
    return report


def _workload(tower: nn.Module, handle: FusedEncoder, grid: Grid) -> dict[str, Any]:
    pixels, grid_thw = pixels_for(grid, torch.bfloat16), torch.tensor(grid, device=DEVICE)
    before = handle.stats()["graphs"]
    graph = wall_ms(lambda: tower(pixels, grid_thw=grid_thw))
    after = handle.stats()
    graphs = after["graphs"]
    launched = graphs["launched_tokens"] - before["launched_tokens"]
    handle.reconfigure(FuseConfig(graphs=False))
    eager = wall_ms(lambda: tower(pixels, grid_thw=grid_thw), 10)
    handle.reconfigure(FuseConfig(token_budgets=BUDGETS, max_items=64, max_frames=256))
    handle.warmup()
    return {
        "tokens": tokens(grid),
        "graph_wall_ms": graph,
        "eager_wall_ms": eager,
        "eager_over_graph": eager / graph,
        "replays_a_call": (graphs["replays"] - before["replays"]) / 35,
        "padding": 1 - (graphs["tokens"] - before["tokens"]) / launched if launched else 0.0,
        "held_mib": graphs["held_mib"],
    }


def _host(tower: nn.Module, handle: FusedEncoder) -> dict[str, float]:
    """Wall time beyond the graph's own, in microseconds."""
    one: Grid = [(1, 28, 28)]
    many: Grid = [(1, 8, 8)] * 32
    found = {}
    for name, grid, budget in (("1 x 448 px", one, 256), ("32 x 128 px", many, 1024)):
        pixels = pixels_for(grid, torch.bfloat16)
        for where in ("cpu", "cuda"):
            grid_thw = torch.tensor(grid, device=where)
            wall = 1e3 * wall_ms(functools.partial(tower, pixels, grid_thw=grid_thw), 60)
            found[f"{name}, grid on {where}"] = wall - graph_us(handle, budget, grid)
    return found


def _content(tower: nn.Module, handle: FusedEncoder) -> dict[str, dict[str, float]]:
    """A content under a larger budget against the graph of its own size: as a call runs it, and in the graph alone."""
    found = {}
    for name, grid, own, large in (
        ("64 tokens under a budget of 4096", [(1, 16, 16)], 64, 4096),
        ("176 tokens under a budget of 256", [(1, 22, 32)], 176, 256),
    ):
        pixels, grid_thw = pixels_for(grid, torch.bfloat16), torch.tensor(grid)
        us: dict[str, float] = {}
        for size, budget in (("own", own), ("large", large)):
            handle.reconfigure(FuseConfig(token_budgets=(budget,), max_items=64, max_frames=64))
            handle.warmup()
            us[f"{size}_us"] = 1e3 * wall_ms(lambda: tower(pixels, grid_thw=grid_thw))  # noqa: B023
            us[f"{size}_graph_us"] = graph_us(handle, budget, grid)
        found[name] = us | {
            "ratio": us["large_us"] / us["own_us"],
            "extra_us": us["large_us"] - us["own_us"],
            "ratio_in_the_largest_graph": us["large_graph_us"] / us["own_graph_us"],
        }
    return found


def main() -> int:
    """Writes everything as JSON; exit code 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", required=True)
    parser.add_argument("--commit", default="", help="recorded as it is; read from git when left out")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trust checks' repetitions")
    args = parser.parse_args()
    with torch.inference_mode():
        result: dict[str, Any] = {"passport": passport("graphs", args.json, args.commit), "cost": cost_report()}
        print(json.dumps(result["cost"], indent=1), flush=True)
        result["trust"] = trust_report(args.scale)
    print(json.dumps(result["trust"], indent=1))
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    checks = result["trust"]
    wrong = sum(checks[name]["wrong"] for name in ("graph_equals_eager", "equal_totals", "threads_and_streams"))
    wrong += checks["held_outputs"]["changed"] + sum(
        row["answer"] == "wrong" or row["afterwards"] != "right" for row in checks["out_of_memory"]
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
