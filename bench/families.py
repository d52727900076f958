"""`python -m fusedvit.bench.families`: a tower of every family, as large as a released one, against Hugging Face.

On a GPU it compares in bf16 by the tolerance rule (fusedvit/tolerance.py) with fp32 as the reference: images, a video,
a mix and grids that no window fits. Workloads that pass are timed: wall time through graphs and of Hugging Face eager,
interleaved. With `--cpu` it compares in fp32 with fp64 as the reference, at the same widths with fewer blocks, without
times.

Other families in the file stay in it, so several runs can make one document. Every family has the passport of its run.
"""

import argparse
import functools
import gc
import json
import sys
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse
from fusedvit.bench import baselines
from fusedvit.bench.records import arguments, need_gpus, passport, run_program, write
from fusedvit.bench.timing import Contender, first_ms, interleaved_bursts, ratios, spread
from fusedvit.bench.towers import (
    FAMILIES,
    GEOMETRIES,
    Geometry,
    build,
    build_one,
    call_tower,
    cast_parameters_,
    class_of,
    depth_name,
    inputs_of,
    outputs_of,
    pixels_for,
    shallow,
    shared_copy,
    spec_of,
    verdict_of,
    wider,
)
from fusedvit.bench.workloads import Grid, tokens
from fusedvit.config import FuseConfig
from fusedvit.errors import UnsupportedModel, named_line
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.model.spec import VisionSpec

TIMED: dict[str, Grid] = {
    "1024": [(1, 32, 32)],
    "4096": [(1, 64, 64)],
    "6272": [(1, 28, 28)] * 8,
}
CHECKED: dict[str, Grid] = {
    "odd image": [(1, 34, 46)],
    "video": [(4, 20, 26)],
    "mix": [(1, 16, 40), (3, 14, 18), (1, 2, 2), (1, 30, 10)],
}
# For towers that take padded images: sizes that processors produce, 70 to 1120 merged tokens, and a batch of them.
PADDED_TIMED: dict[str, Grid] = {"672 x 960": [(1, 42, 60)], "8 x 672 x 960": [(1, 42, 60)] * 8}
PADDED_CHECKED: dict[str, Grid] = {
    "70 tokens": [(1, 21, 30)],
    "140 tokens": [(1, 42, 30)],
    "560 tokens": [(1, 60, 84)],
    "1120 tokens": [(1, 96, 105)],
    "padded batch": [(1, 42, 60), (1, 3, 9), (1, 60, 42), (1, 30, 30)],
}
CHECKED_ON_CPU: dict[str, Grid] = {
    "odd image": [(1, 10, 12)],  # a whole window and parts of three
    "video": [(2, 4, 10)],
    "mix": [(1, 2, 14), (2, 2, 6), (1, 2, 2)],
}
DEPTH_ON_CPU = 8
BUDGETS = (256, 1024, 2048)  # merged tokens


def measure(geometry: Geometry, device: torch.device, seconds: float) -> dict[str, Any]:
    """Parity in bf16 for every grid, and times of the timed grids that pass."""
    padded = geometry.merge != 2
    timed = TIMED | PADDED_TIMED if padded else TIMED
    grids = timed | CHECKED | PADDED_CHECKED if padded else timed | CHECKED
    with torch.inference_mode(False):
        tower, wide = build(geometry, torch.bfloat16, device)
        ours = shared_copy(tower)
        handle = fuse(ours, FuseConfig(strict=True, token_budgets=None if padded else BUDGETS))
        handle.warmup(calls=[geometry.rows(grid) for grid in grids.values()] if padded else None)
    parity, cost = {}, {}
    for workload, grid in grids.items():
        rows = geometry.rows(grid)
        pixels = pixels_for(tower, rows, tokens(rows))
        grid_thw = torch.tensor(rows, device=device)
        modules = (ours, torch.bfloat16), (wide, wider(torch.bfloat16)), (tower, torch.bfloat16)
        parity[workload] = verdict_of(*(outputs_of(call_tower(m, pixels.to(d), grid_thw)) for m, d in modules))
        if workload in timed and parity[workload]["passed"]:
            inputs, named = inputs_of(tower, pixels, grid_thw)
            calls = [Contender(who, functools.partial(module, inputs, **named))
                     for who, module in (("hf", tower), ("ours", ours))]  # fmt: skip
            cost[workload] = cost_of(calls, device, seconds)
            print(workload, json.dumps([parity[workload], cost[workload]]), file=sys.stderr, flush=True)
            if workload in PADDED_TIMED:  # after the figures above are printed, as these peers may fail
                peers = baselines.padded_in_graphs(tower, inputs, **named)
                calls += [Contender(who, call) for who, call in peers.items()]
                cost[workload] = cost_of(calls, device, seconds)
    found = {**_described(geometry, handle.spec), "parity": parity, "cost": cost, "graphs": _replays(handle)}
    handle.release()
    return found


def measure_on_cpu(geometry: Geometry) -> dict[str, Any]:
    """Parity in fp32. One tower is cast to fp64 and back, which is exact: two towers would not fit in memory."""
    config = class_of(geometry).config_class(**geometry.numbers)
    blocks = min(DEPTH_ON_CPU, getattr(config, depth_name(config)))
    tower = build_one(shallow(geometry, blocks), torch.float32, torch.device("cpu"))
    cast_parameters_(tower, torch.float64)
    ref = _outputs(tower, geometry, torch.float64)
    cast_parameters_(tower, torch.float32)
    pt = _outputs(tower, geometry, torch.float32)
    fuse(tower, FuseConfig(strict=True))
    ours = _outputs(tower, geometry, torch.float32)
    parity = {name: verdict_of(ours[name], ref[name], pt[name]) for name in CHECKED_ON_CPU}
    return {**_described(geometry, spec_of(geometry)), "blocks": blocks, "parity": parity}


def _outputs(tower: nn.Module, geometry: Geometry, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """Every output for every grid; the pixels are the same in any dtype."""
    found = {}
    for name, grid in CHECKED_ON_CPU.items():
        rows = geometry.rows(grid)
        pixels = pixels_for(tower, rows, tokens(rows))
        found[name] = outputs_of(call_tower(tower, pixels, torch.tensor(rows)))
    return found


def cost_of(calls: list[Contender], device: torch.device, seconds: float) -> dict[str, Any]:
    """Times of "hf", "ours" and peers, as the median call of each burst, and ratios to "ours" burst by burst."""
    bursts = interleaved_bursts(calls, device, seconds)
    found: dict[str, Any] = {name: asdict(spread(burst.ms)) for name, burst in bursts.items()}
    found["speedup"] = asdict(ratios(bursts["hf"].ms, bursts["ours"].ms))
    peers = bursts.keys() - {"hf", "ours"}
    found |= {f"speedup over {who}": asdict(ratios(bursts[who].ms, bursts["ours"].ms)) for who in sorted(peers)}
    return found | {"first_ms": first_ms(calls, bursts), "calls_in_a_burst": bursts["ours"].calls}


def _described(geometry: Geometry, spec: VisionSpec) -> dict[str, Any]:
    """The tower's names, and its numbers that differ from their defaults."""
    numbers = {f.name: getattr(spec, f.name) for f in fields(spec) if getattr(spec, f.name) != f.default}
    return {"tower": numbers, "class": geometry.class_name, "others": geometry.others}


def _replays(handle: FusedEncoder) -> dict[str, Any]:
    stats = handle.stats()
    graphs = stats.get("graphs", {})
    kept = {name: graphs.get(name) for name in ("replays", "held_mib", "token_budgets")}
    return kept | {"weights_mib": stats["weights_mib"], "eager": stats["eager_runs"]}


def main(argv: list[str] | None = None) -> int:
    """Writes the document after every family; the exit code is 1 if an output is out of tolerance."""
    parser = arguments(__doc__)
    parser.add_argument("--family", nargs="*", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--cpu", action="store_true", help="fp32 against fp64, without times")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each workload")
    args = parser.parse_args(argv)
    if not args.cpu:
        need_gpus()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    path = args.json
    here = passport("python -m fusedvit.bench.families", {"--cpu": args.cpu, "--json": path}, args.commit)
    kept = path is not None and path.exists()
    document = json.loads(path.read_text(encoding="utf-8")) if kept else {"families": {}}
    broken = False
    for name in args.family:
        found = _found(name, args)
        if "absent" not in found or name not in document["families"]:
            document["families"][name] = {"passport": here, **found}
        print(name, json.dumps({k: found.get(k) for k in ("failed", "parity", "cost")}), file=sys.stderr, flush=True)
        write(path, {**document, "passport": here})
        broken |= any(not verdict["passed"] for verdict in found.get("parity", {}).values())
        gc.collect()  # a fused tower and its handle are a reference cycle, of gigabytes
        torch.cuda.empty_cache()
    return int(broken)


def _found(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The measurements of one family, or why there are none, so that other families are still measured."""
    geometry = GEOMETRIES[name]
    if class_of(geometry) is None:
        return {"absent": "not in this version of transformers"}
    try:
        if args.cpu:
            with torch.no_grad():
                return measure_on_cpu(geometry)
        with torch.inference_mode():
            return measure(geometry, torch.device("cuda"), args.seconds)
    except (RuntimeError, UnsupportedModel) as error:
        return {"failed": named_line(error)}


if __name__ == "__main__":
    run_program(main)
