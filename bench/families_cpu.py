"""`python -m fusedvit.bench.families_cpu`: a tower of every family against Hugging Face in fp32, without a GPU.

At the geometry and depth of a released checkpoint, by the tolerance rule with fp64 as the reference: what the figures
of `fusedvit.bench.families` rest on for families that no GPU has measured.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench.families import numbers_of, outputs_of, rows_of, verdict_of
from fusedvit.bench.family_towers import GEOMETRIES, Geometry, build, class_of
from fusedvit.bench.passport import passport
from fusedvit.bench.towers import patch_width, twin, wider
from fusedvit.bench.workloads import Grid, tokens
from fusedvit.config import FuseConfig
from fusedvit.huggingface import fuse

GRIDS: dict[str, Grid] = {
    "odd image": [(1, 18, 12)],
    "video": [(3, 8, 10)],
    "mix": [(1, 6, 20), (2, 4, 10), (1, 2, 2)],
}


def measure(geometry: Geometry) -> dict[str, Any]:
    """The rule's verdict on every grid. fp64 goes first and away: both at once need twice the memory."""
    tower, wide = build(geometry, torch.float32, torch.device("cpu"))
    grids = {name: rows_of(geometry, grid) for name, grid in GRIDS.items()}
    pixels = {
        name: torch.randn(tokens(rows), patch_width(tower), generator=torch.Generator().manual_seed(tokens(rows)))
        for name, rows in grids.items()
    }
    grid_thw = {name: torch.tensor(rows) for name, rows in grids.items()}
    double = wider(torch.float32)
    ref = {name: outputs_of(wide(pixels[name].to(double), grid_thw=grid_thw[name])) for name in grids}
    del wide
    pt = {name: outputs_of(tower(pixels[name], grid_thw=grid_thw[name])) for name in grids}
    ours = twin(tower)
    handle = fuse(ours, FuseConfig(strict=True))
    parity = {
        name: verdict_of(outputs_of(ours(pixels[name], grid_thw=grid_thw[name])), ref[name], pt[name]) for name in grids
    }
    return {
        "tower": numbers_of(handle.spec),
        "class": geometry.class_name,
        "others": geometry.others,
        "parity": parity,
    }


def main(argv: list[str] | None = None) -> int:
    """Writes the document; the exit code is 1 where an answer broke the rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", required=True)
    parser.add_argument("--family", nargs="*", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    args = parser.parse_args(argv)
    document: dict[str, Any] = {"passport": passport("families_cpu", args.json, ""), "families": {}}
    for name in args.family:
        if class_of(GEOMETRIES[name]) is None:
            document["families"][name] = {"absent": "not in this version of transformers"}
            continue
        with torch.no_grad():
            document["families"][name] = measure(GEOMETRIES[name])
        print(name, json.dumps(document["families"][name]["parity"]), file=sys.stderr, flush=True)
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    found = [f.get("parity", {}) for f in document["families"].values()]
    return int(any(not verdict["passed"] for parity in found for verdict in parity.values()))


if __name__ == "__main__":
    sys.exit(main())
