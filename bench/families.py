"""`python -m fusedvit.bench.families`: one tower of every family against Hugging Face, on this machine's GPU.

By the tolerance rule (fusedvit/tolerance.py) at whole towers in bf16, over images, a video, a mix and grids that no
window fits; then wall time through graphs beside Hugging Face eager, in turns of a few calls, behind that gate; the
first call of a turn is a figure of its own ("first_ms", as in `tower_bench`).

Of a file that is there already the other families stay: several runs make one document, each family with the passport
of its own run. `--family` without a name and `--from` only put documents together.
"""

import argparse
import functools
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from fusedvit.api import fuse
from fusedvit.bench import family_documents
from fusedvit.bench.family_towers import GEOMETRIES, Geometry, build, class_of
from fusedvit.bench.passport import passport
from fusedvit.bench.timing import Contender, first_ms, in_long_turns, ratios, spread
from fusedvit.bench.towers import patch_width, twin, wider
from fusedvit.bench.verdict import outputs_of, verdict_of
from fusedvit.bench.workloads import Grid, tokens
from fusedvit.config import FuseConfig
from fusedvit.errors import UnsupportedModel
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
BUDGETS = (256, 1024, 2048)  # merged tokens


def measure(name: str, geometry: Geometry, device: torch.device, seconds: float) -> dict[str, Any]:
    """Parity over every grid, then times of those that passed it."""
    with torch.inference_mode(False):
        tower, wide = build(geometry, torch.bfloat16, device)
        ours = twin(tower)
        handle = fuse(ours, FuseConfig(strict=True, token_budgets=BUDGETS))
        handle.warmup()
    found: dict[str, Any] = {"tower": numbers_of(handle.spec), "class": geometry.class_name, "others": geometry.others}
    parity, cost = {}, {}
    for workload, grid in (TIMED | CHECKED).items():
        rows = rows_of(geometry, grid)
        generator = torch.Generator(device).manual_seed(tokens(rows))
        pixels = torch.randn(tokens(rows), patch_width(tower), device=device, generator=generator).bfloat16()
        grid_thw = torch.tensor(rows, device=device)
        modules = (ours, torch.bfloat16), (wide, wider(torch.bfloat16)), (tower, torch.bfloat16)
        parity[workload] = verdict_of(*(outputs_of(m(pixels.to(d), grid_thw=grid_thw)) for m, d in modules))
        if workload in TIMED and parity[workload]["passed"]:
            calls = [
                Contender(label, functools.partial(module, pixels, grid_thw=grid_thw))
                for label, module in (("hf", tower), ("ours", ours))
            ]
            cost[workload] = cost_of(calls, device, seconds)
    found |= {"parity": parity, "cost": cost, "graphs": _replays(handle)}
    handle.release()
    return found


def cost_of(calls: list[Contender], device: torch.device, seconds: float) -> dict[str, Any]:
    """Times of "hf" and "ours", of each turn's median call, and their ratios turn by turn."""
    turns = in_long_turns(calls, device, seconds)
    found: dict[str, Any] = {name: asdict(spread(turn.ms)) for name, turn in turns.items()}
    found["speedup"] = asdict(ratios(turns["hf"].ms, turns["ours"].ms))
    return found | {"first_ms": first_ms(calls, turns), "calls_in_a_turn": turns["ours"].calls}


def numbers_of(spec: VisionSpec) -> dict[str, Any]:
    """The spec, but for what is left at its default."""
    return {f.name: getattr(spec, f.name) for f in fields(spec) if getattr(spec, f.name) != f.default}


def rows_of(geometry: Geometry, grid: Grid) -> Grid:
    """`grid` as the tower takes it: for some, every frame is an image."""
    return [(1, h, w) for t, h, w in grid for _ in range(t)] if geometry.only_images else grid


def _replays(handle: FusedEncoder) -> dict[str, Any]:
    stats = handle.stats()
    graphs = stats.get("graphs", {})
    kept = {name: graphs.get(name) for name in ("replays", "held_mib", "token_budgets")}
    return kept | {"weights_mib": stats["weights_mib"], "eager": stats["eager"]}


def main(argv: list[str] | None = None) -> int:
    """Writes the document; the exit code is 1 where an answer broke the rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", required=True)
    parser.add_argument("--family", nargs="*", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each workload")
    parser.add_argument("--commit", default="", help="where the sources are no checkout")
    parser.add_argument("--from", dest="earlier", nargs="*", type=Path, default=[], help="documents to put in first")
    args = parser.parse_args(argv)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    path, made = Path(args.json), passport("families", ("--json", args.json), args.commit)
    begun = [{"passport": made, "families": {}}] if args.family else []
    document = family_documents.merged([*family_documents.load([path, *args.earlier]), *begun])
    for name in args.family:
        found = _found(name, args.seconds)
        document = family_documents.merged([document, {"passport": made, "families": {name: found}}])
        print(name, json.dumps({k: found.get(k) for k in ("failed", "parity", "cost")}), file=sys.stderr, flush=True)
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")
        torch.cuda.empty_cache()
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    asked = [document["families"][name] for name in args.family]
    return int(any(not verdict["passed"] for found in asked for verdict in found.get("parity", {}).values()))


def _found(name: str, seconds: float) -> dict[str, Any]:
    """What was measured of a family, or why nothing was: one's failure is its own."""
    if class_of(GEOMETRIES[name]) is None:
        return {"absent": "not in this version of transformers"}
    try:
        with torch.inference_mode():
            return measure(name, GEOMETRIES[name], torch.device("cuda"), seconds)
    except (RuntimeError, UnsupportedModel) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    sys.exit(main())
