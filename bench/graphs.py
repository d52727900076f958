"""`python -m fusedvit.bench.graphs`: the graph manager on this machine's GPU: right answers first, then what it costs.

Trust (bench/graph_trust.py) runs on a Qwen3-VL-8B-wide tower of four blocks, so that tens of thousands of calls fit in
a minute; cost runs on the whole tower.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse, unfuse
from fusedvit.bench import graph_trust as trust
from fusedvit.bench import overhead, towers
from fusedvit.bench.parity import build, pixels_for
from fusedvit.bench.passport import passport
from fusedvit.bench.timing import gpu_ms
from fusedvit.bench.workloads import WORKLOADS, Grid, tokens
from fusedvit.config import FuseConfig
from fusedvit.fused_encoder import FusedEncoder

DEVICE = torch.device("cuda")
BUDGETS = (64, 256, 1024, 2048, 4096, 8192)  # merged tokens; six, as the nine workloads need no more
CONFIG = FuseConfig(token_budgets=BUDGETS, max_items=64, max_frames=256)
PARTS = ("workloads", "overhead", "content", "trust")
ROOMS: list[float] = [4096, 256, 128, 64, 32, 16, 8, 4, 2, 2048]  # MiB
LEAST_ROUNDS, MOST_MS = 5, 600.0


def trust_report(scale: float) -> dict[str, Any]:
    """Every trust check; `scale` shortens them all."""
    tower, _ = build(4, torch.bfloat16, False)
    handle = fuse(tower, FuseConfig(token_budgets=(64, 256, 1024), max_items=16, max_frames=64))
    handle.warmup()

    def times(n: int) -> int:
        return max(1, int(n * scale))

    checks: dict[str, Callable[[], Any]] = {
        "graph_equals_eager": lambda: trust.graph_equals_eager(tower, handle, times(500)),
        "equal_totals": lambda: trust.equal_totals(tower, handle, times(2000)),
        "held_outputs": lambda: trust.held_outputs(tower, times(10_000)),
        "threads_and_streams": lambda: trust.threads_and_streams(tower, handle, 8, 4, times(1250)),
        "captures_beside_others": lambda: trust.captures_beside_others(tower, handle, times(100)),
        "out_of_memory": lambda: list(trust.out_of_memory(tower, handle, ROOMS)),
    }
    report: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name, check in checks.items():
        begin = time.perf_counter()
        report[name] = check()
        seconds[name] = time.perf_counter() - begin
    unfuse(tower)
    return report | {"took_s": seconds}


def graph_us(handle: FusedEncoder, budget: int, grid: Grid, rounds: int = 15) -> float:
    """Microseconds of one replay of `budget`'s graph on `grid`, by events, median."""
    program, manager = handle.graphs().encoder, handle.graphs().manager
    manager.ready(budget)
    program.buffers(budget).pixels[: tokens(grid)].copy_(pixels_for(grid, torch.bfloat16))
    program.load_grid(budget, tuple(grid))
    graph = manager.graph(budget)
    for _ in range(3):
        graph.replay()
    return 1e3 * statistics.median(gpu_ms(graph.replay, DEVICE) for _ in range(rounds))


def wall_ms(call: Callable[[], Any], rounds: int = 30) -> float:
    """Milliseconds of one call, the GPU waited for, median; fewer rounds of what takes long."""
    for _ in range(3):
        call()
    times: list[float] = []
    while len(times) < rounds and (len(times) < LEAST_ROUNDS or sum(times) < MOST_MS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def cost_report(only: str | None = None) -> dict[str, Any]:
    """The nine workloads, the host's share, and what a small content costs in a large budget; or `only` one of them."""
    with torch.inference_mode(False):
        tower, _ = build(27, torch.bfloat16, False)
        plain = towers.twin(tower)
    handle, _ = fuse(tower, CONFIG), fuse(plain, FuseConfig(graphs=False))
    begin = time.perf_counter()
    handle.warmup(calls=[] if only else list(WORKLOADS.values()))
    torch.cuda.synchronize()
    report: dict[str, Any] = {"warmup_s": time.perf_counter() - begin}
    if only in (None, "workloads"):
        report["workloads"] = {name: _workload(tower, plain, handle, grid) for name, grid in WORKLOADS.items()}
    if only in (None, "overhead"):
        report["host"] = overhead.host(tower, handle, pixels_for)
    report["stats"] = handle.stats()
    if only in (None, "content"):
        report["content"] = _content(tower, handle)
    handle.release()
    return report | {"took_s": time.perf_counter() - begin}


def _workload(tower: nn.Module, plain: nn.Module, handle: FusedEncoder, grid: Grid) -> dict[str, Any]:
    """One workload through the graphs of `tower`, and eagerly through `plain`, on the same parameters."""
    pixels, grid_thw = pixels_for(grid, torch.bfloat16), torch.tensor(grid, device=DEVICE)
    before, calls = handle.stats()["graphs"], handle.stats()["calls"]
    graph = wall_ms(lambda: tower(pixels, grid_thw=grid_thw))
    after, calls = handle.stats()["graphs"], handle.stats()["calls"] - calls
    launched = after["launched_tokens"] - before["launched_tokens"]
    eager = wall_ms(lambda: plain(pixels, grid_thw=grid_thw), 10)
    replays = {b: n - before["replays_by_budget"].get(b, 0) for b, n in after["replays_by_budget"].items()}
    return {
        "tokens": tokens(grid),
        "graph_wall_ms": graph,
        "eager_wall_ms": eager,
        "eager_over_graph": eager / graph,
        "replays_a_call": sum(replays.values()) / calls,
        "budgets": [budget for budget, count in replays.items() if count],
        "mispredictions": after["mispredictions"] - before["mispredictions"],
        "padding": 1 - (after["tokens"] - before["tokens"]) / launched if launched else 0.0,
        "held_mib": after["held_mib"],
    }


def _content(tower: nn.Module, handle: FusedEncoder) -> dict[str, dict[str, float]]:
    """A content in a larger budget's graph against the graph of its own size, in turns; and as a call runs it.

    A call is handed the large budget alone, whose ladder has smaller ones; its graph in the largest takes the bar of
    `1.1 x own + 30 us`, or `1.03 x own` where that is what the two budgets stand for.
    """
    found = {}
    for name, grid, own, large, factor, more in (
        ("64 tokens under a budget of 4096", [(1, 16, 16)], 64, 4096, 1.1, 30.0),
        ("176 tokens under a budget of 256", [(1, 22, 32)], 176, 256, 1.03, 0.0),
    ):
        pixels, grid_thw = pixels_for(grid, torch.bfloat16), torch.tensor(grid)
        us: dict[str, float] = {}
        for size, ladder in (("own", (own,)), ("large", (large,))):
            handle.reconfigure(FuseConfig(token_budgets=ladder, max_items=64, max_frames=64))
            us[f"{size}_us"] = 1e3 * wall_ms(lambda: tower(pixels, grid_thw=grid_thw))  # noqa: B023
        handle.reconfigure(FuseConfig(token_budgets=(own, large), max_items=64, max_frames=64))
        tower(pixels, grid_thw=grid_thw)
        rounds = [[graph_us(handle, budget, grid) for budget in (own, large)] for _ in range(3)]
        us["own_graph_us"], us["large_graph_us"] = (statistics.median(times) for times in zip(*rounds, strict=True))
        bar = factor * us["own_graph_us"] + more
        found[name] = us | {
            "ratio": us["large_us"] / us["own_us"],
            "extra_us": us["large_us"] - us["own_us"],
            "ratio_in_the_largest_graph": us["large_graph_us"] / us["own_graph_us"],
            "bar_in_the_largest_graph_us": bar,
            "over_the_bar_us": us["large_graph_us"] - bar,
        }
    return found


def main() -> int:
    """Writes everything as JSON; exit code 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", required=True)
    parser.add_argument("--commit", default="", help="recorded as it is; read from git when left out")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trust checks' repetitions")
    parser.add_argument("--only", choices=PARTS, help="one part of the report")
    args = parser.parse_args()
    result: dict[str, Any] = {"passport": passport("graphs", sys.argv[1:], args.commit)}
    with torch.inference_mode():
        if args.only != "trust":
            result["cost"] = cost_report(args.only)
            print(json.dumps(result["cost"], indent=1), flush=True)
        if args.only in (None, "trust"):
            result["trust"] = trust_report(args.scale)
            print(json.dumps(result["trust"], indent=1))
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    return int(_wrong(result["trust"]) > 0) if "trust" in result else 0


def _wrong(checks: dict[str, Any]) -> int:
    """Wrong answers of all trust checks."""
    wrong = sum(checks[name]["wrong"] for name in ("graph_equals_eager", "equal_totals", "threads_and_streams"))
    return (
        wrong
        + sum(row["answer"] == "wrong" or row["afterwards"] != "right" for row in checks["out_of_memory"])
        + checks["held_outputs"]["changed"]
    )


if __name__ == "__main__":
    sys.exit(main())
