"""`python -m fusedvit.bench.parity`: fused eager against Hugging Face on the nine workloads, on this machine's GPU.

By the tolerance rule (fusedvit/tolerance.py) at kernel, block and tower level, with weights at realistic scale and with
a few massive residual channels planted; then wall time, launches, peak memory and host syncs of the same calls.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse, unfuse
from fusedvit.bench import towers
from fusedvit.bench.passport import passport
from fusedvit.bench.stages import lay_out, stages
from fusedvit.bench.workloads import WORKLOADS, Grid, tokens
from fusedvit.cli.measure import gpu_launches, latency, peak_mib, synchronisations
from fusedvit.config import FuseConfig
from fusedvit.model.ops import TRITON
from fusedvit.tolerance import Comparison, compare, summarize

MASSIVE_CHANNELS, MASSIVE = (7, 130, 600, 1021), 200.0
DEVICE = torch.device("cuda")
EAGER = FuseConfig(graphs=False)


def build(depth: int, dtype: torch.dtype, massive: bool) -> tuple[nn.Module, nn.Module]:
    """(tower in `dtype`, the same rounded weights in fp32) of Qwen3-VL-8B's geometry."""
    deepstack = [i for i in (8, 16, 24) if i < depth] or [0]
    geometry = towers.GEOMETRIES["Qwen3-VL-8B"] | {"depth": depth, "deepstack_visual_indexes": deepstack}
    tower, wide = towers.build(geometry, dtype, DEVICE, seed=depth)
    if massive:
        with torch.no_grad():
            modules: tuple[Any, Any] = (tower, wide)
            for module in modules:
                for i, channel in enumerate(MASSIVE_CHANNELS):
                    module.patch_embed.proj.bias[channel] = MASSIVE * (-1) ** i
    return tower, wide


def pixels_for(grid: Grid, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random normalised pixels `[T, 1536]`."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(tokens(grid), 1536, device=DEVICE, generator=generator).to(dtype)


def named_outputs(outputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the tower returns."""
    yield "last_hidden_state", outputs.last_hidden_state
    yield "pooler_output", outputs.pooler_output
    for i, features in enumerate(outputs.deepstack_features):
        yield f"deepstack {i}", features


def tower_parity(level: str, depth: int, massive: bool) -> Iterator[dict[str, Any]]:
    """Rows of one level: `depth` blocks (1 is the block level), every workload, every output."""
    tower, wide = build(depth, torch.bfloat16, massive)
    for name, grid in WORKLOADS.items():
        pixels, grid_thw = pixels_for(grid, torch.bfloat16), torch.tensor(grid, device=DEVICE)
        pt = tower(pixels, grid_thw=grid_thw)
        ref = wide(pixels.float(), grid_thw=grid_thw)
        handle = fuse(tower, EAGER)
        ours = tower(pixels, grid_thw=grid_thw)
        assert handle.stats()["fused"] == 1, handle.report()
        unfuse(tower)
        for (output, a), (_, b), (_, c) in zip(*map(named_outputs, (ours, ref, pt)), strict=True):
            yield _row(level, massive, name, output, compare(a, b, c))


def kernel_parity(massive: bool) -> Iterator[dict[str, Any]]:
    """Rows of the kernel level: block 1's operations on block 0's output."""
    tower, wide = build(2, torch.bfloat16, massive)
    spec, weights = towers.prepared(tower)
    for name, grid in WORKLOADS.items():
        pixels, grid_thw = pixels_for(grid, torch.bfloat16), torch.tensor(grid, device=DEVICE)
        hidden = tower(pixels, grid_thw=grid_thw, output_hidden_states=True).hidden_states[1].contiguous()
        setting = lay_out(spec, weights, TRITON, grid, pixels)
        for stage in stages(setting, tower, wide, hidden, 1):
            yield _row("kernel", massive, name, stage.name, compare(stage.ours, stage.ref, stage.pt))


def _row(level: str, massive: bool, workload: str, output: str, verdict: Comparison) -> dict[str, Any]:
    return {"level": level, "massive": massive, "workload": workload, "output": output, **asdict(verdict)}


def fp32_error() -> dict[str, float]:
    """Largest relative error |ours - hf| / |hf| (norms) of the fp32 tower over its outputs, by workload."""
    tower, _ = build(27, torch.float32, False)
    worst = {}
    for name, grid in WORKLOADS.items():
        if tokens(grid) > 7000:
            continue  # fp32 runs on FMA units: two long workloads would take minutes and show nothing new
        pixels, grid_thw = pixels_for(grid, torch.float32), torch.tensor(grid, device=DEVICE)
        want = dict(named_outputs(tower(pixels, grid_thw=grid_thw)))
        fuse(tower, EAGER)
        got = dict(named_outputs(tower(pixels, grid_thw=grid_thw)))
        unfuse(tower)
        worst[name] = max(float((got[k] - want[k]).norm() / want[k].norm()) for k in want)
    return worst


def cost() -> dict[str, dict[str, Any]]:
    """Wall time, kernels, peak memory and host syncs of one call, Hugging Face and fused, by workload."""
    tower, _ = build(27, torch.bfloat16, False)
    original, _ = build(27, torch.bfloat16, False)
    handle = fuse(tower, EAGER)
    rows: dict[str, dict[str, Any]] = {}
    for name, grid in WORKLOADS.items():
        pixels, grid_thw = pixels_for(grid, torch.bfloat16), torch.tensor(grid, device=DEVICE)
        calls: dict[str, Callable[[], Any]] = {
            "hf": functools.partial(original, pixels, grid_thw=grid_thw),
            "fused": functools.partial(tower, pixels, grid_thw=grid_thw),
        }
        times = latency(calls, DEVICE, seconds=2.0)
        rows[name] = {"tokens": tokens(grid), "speedup": times["hf"].median / times["fused"].median}
        for who, call in calls.items():
            rows[name][who] = {
                "ms": times[who].median,
                "best_ms": times[who].best,
                "kernels": gpu_launches(call).kernels,
                "peak_mib": peak_mib(call, DEVICE),
                "host_syncs": len(synchronisations(call)),
            }
    rows["weights"] = {"held_mib": handle.stats()["weights_mib"]}
    return rows


def main() -> int:
    """Prints a summary, writes everything as JSON; exit code 1 if a comparison broke the rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", required=True)
    parser.add_argument("--commit", default="", help="recorded as it is; read from git when left out")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"passport": passport("parity", sys.argv[1:], args.commit), "summary": {}}
    with torch.inference_mode():
        for massive in (False, True):
            for level, found in (
                ("kernel", kernel_parity(massive)),
                ("block", tower_parity("block", 1, massive)),
                ("tower", tower_parity("tower", 27, massive)),
            ):
                new = list(found)
                rows += new
                label = f"{level}, {'massive channels' if massive else 'realistic'}"
                fields = Comparison.__dataclass_fields__
                spread = summarize(Comparison(**{k: r[k] for k in fields}) for r in new)
                result["summary"][label] = asdict(spread)
                print(label, spread, flush=True)
        result |= {"fp32_relative_error": fp32_error(), "cost": cost(), "rows": rows}
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    for name, row in result["cost"].items():
        print(name, json.dumps(row), flush=True)
    print("fp32", result["fp32_relative_error"])
    return int(any(not r["passed"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
