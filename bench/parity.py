"""`python -m fusedvit.bench.parity`: accuracy of the fused tower without graphs, on the nine workloads. Needs a GPU.

Block and tower are compared by the tolerance rule (fusedvit/tolerance.py) in bf16, with weights at realistic scale and
with a few massive residual channels planted. Then come wall time, kernels, peak memory and host synchronisations of one
call, Hugging Face and fused.
"""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse, unfuse
from fusedvit.bench import towers
from fusedvit.bench.records import arguments, need_gpus, passport, run_program, write
from fusedvit.bench.timing import gpu_launches, latency, peak_mib, synchronisations
from fusedvit.bench.towers import outputs_of, pixels_for
from fusedvit.bench.workloads import WORKLOADS, tokens
from fusedvit.config import FuseConfig
from fusedvit.tolerance import Comparison, compare, summarize

MASSIVE_CHANNELS, MASSIVE = (7, 130, 600, 1021), 200.0
DEVICE = torch.device("cuda")
EAGER = FuseConfig(graphs=False, compile="now")
LEVELS = {"block": 1, "tower": 27}  # blocks
MOST_TOKENS_FP32 = 7000  # fp32 runs on FMA units: longer workloads take minutes and show nothing new


def build(depth: int, dtype: torch.dtype, massive: bool) -> tuple[nn.Module, nn.Module]:
    """(tower in `dtype`, the same rounded weights in fp32) of Qwen3-VL-8B's geometry with `depth` blocks."""
    deepstack = [i for i in (8, 16, 24) if i < depth] or [0]
    geometry = towers.GEOMETRIES["Qwen3-VL-8B"].but(depth=depth, deepstack_visual_indexes=deepstack)
    tower, wide = towers.build(geometry, dtype, DEVICE, seed=depth)
    if massive:
        with torch.no_grad():
            modules: tuple[Any, Any] = (tower, wide)
            for module in modules:
                for i, channel in enumerate(MASSIVE_CHANNELS):
                    module.patch_embed.proj.bias[channel] = MASSIVE * (-1) ** i
    return tower, wide


def compared(level: str, massive: bool) -> Iterator[dict[str, Any]]:
    """A row for every workload and output."""
    tower, wide = build(LEVELS[level], torch.bfloat16, massive)
    for name, grid in WORKLOADS.items():
        pixels, grid_thw = pixels_for(tower, grid, torch.bfloat16, DEVICE), torch.tensor(grid, device=DEVICE)
        pt = tower(pixels, grid_thw=grid_thw)
        ref = wide(pixels.float(), grid_thw=grid_thw)
        handle = fuse(tower, EAGER)
        ours = tower(pixels, grid_thw=grid_thw)
        assert handle.stats()["fused"] == 1, handle.report()
        unfuse(tower)
        for i, (a, b, c) in enumerate(zip(*map(outputs_of, (ours, ref, pt)), strict=True)):
            output = ("last_hidden_state", "pooler_output")[i] if i < 2 else f"deepstack {i - 2}"
            at = {"level": level, "massive": massive, "workload": name, "output": output}
            yield at | asdict(compare(a, b, c))


def fp32_error() -> dict[str, float]:
    """Largest relative error |ours - hf| / |hf| (norms) of the fp32 tower over its outputs, by workload."""
    tower, _ = build(27, torch.float32, False)
    worst = {}
    for name, grid in WORKLOADS.items():
        if tokens(grid) > MOST_TOKENS_FP32:
            continue
        pixels, grid_thw = pixels_for(tower, grid, torch.float32, DEVICE), torch.tensor(grid, device=DEVICE)
        want = outputs_of(tower(pixels, grid_thw=grid_thw))
        fuse(tower, EAGER)
        got = outputs_of(tower(pixels, grid_thw=grid_thw))
        unfuse(tower)
        worst[name] = max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))
    return worst


def cost() -> dict[str, dict[str, Any]]:
    """Wall time, kernels, peak memory and host synchronisations of one call by workload, Hugging Face and fused."""
    tower, original = (build(27, torch.bfloat16, False)[0] for _ in range(2))
    handle = fuse(tower, EAGER)
    rows: dict[str, dict[str, Any]] = {}
    for name, grid in WORKLOADS.items():
        pixels, grid_thw = pixels_for(tower, grid, torch.bfloat16, DEVICE), torch.tensor(grid, device=DEVICE)
        calls: dict[str, Callable[[], Any]] = {
            "hf": functools.partial(original, pixels, grid_thw=grid_thw),
            "fused": functools.partial(tower, pixels, grid_thw=grid_thw),
        }
        times = latency(calls, DEVICE, seconds=2.0)
        rows[name] = {"tokens": tokens(grid), "speedup": times["hf"].median / times["fused"].median}
        for who, call in calls.items():
            rows[name][who] = {
                "ms": times[who].median,
                "low_ms": times[who].low,
                "kernels": gpu_launches(call).kernels,
                "peak_mib": peak_mib(call, DEVICE),
                "host_syncs": len(synchronisations(call)),
            }
    rows["weights"] = {"held_mib": handle.stats()["weights_mib"]}
    return rows


def main(argv: list[str] | None = None) -> int:
    """Prints a summary, writes everything as JSON; the exit code is 1 where an output is out of tolerance."""
    args = arguments(__doc__).parse_args(argv)
    need_gpus()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    here = passport("python -m fusedvit.bench.parity", {"--json": args.json}, args.commit)
    result: dict[str, Any] = {"passport": here, "summary": {}}
    with torch.inference_mode():
        for massive in (False, True):
            for level in LEVELS:
                new = list(compared(level, massive))
                rows += new
                label = f"{level}, {'massive channels' if massive else 'realistic'}"
                summary = summarize(Comparison(**{k: r[k] for k in Comparison.__dataclass_fields__}) for r in new)
                result["summary"][label] = asdict(summary)
                print(label, summary, flush=True)
        result |= {"fp32_relative_error": fp32_error(), "cost": cost(), "rows": rows}
    write(args.json, result)
    for name, row in result["cost"].items():
        print(name, json.dumps(row), flush=True)
    print("fp32", result["fp32_relative_error"])
    return int(any(not r["passed"] for r in rows))


if __name__ == "__main__":
    run_program(main)
