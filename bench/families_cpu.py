"""`python -m fusedvit.bench.families_cpu`: a tower of every family against Hugging Face in fp32, without a GPU.

At the widths of a released checkpoint and some blocks of its depth, by the tolerance rule with fp64 as the reference:
what there is to show of families that no GPU has measured.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse
from fusedvit.bench.families import numbers_of, rows_of
from fusedvit.bench.family_towers import GEOMETRIES, Geometry, build_one, class_of, shallow
from fusedvit.bench.passport import passport
from fusedvit.bench.towers import patch_width
from fusedvit.bench.verdict import outputs_of, verdict_of
from fusedvit.bench.workloads import Grid, tokens
from fusedvit.cli.towers import cast_parameters_
from fusedvit.config import FuseConfig
from fusedvit.families.registry import family_of

DEPTH = 8
GRIDS: dict[str, Grid] = {
    "odd image": [(1, 10, 12)],  # a window and what is left of three
    "video": [(2, 4, 10)],
    "mix": [(1, 2, 14), (2, 2, 6), (1, 2, 2)],
}


def measure(geometry: Geometry, depth: int) -> dict[str, Any]:
    """The rule's verdict on every grid. One tower is widened and narrowed again, which is exact: two would not fit."""
    family = family_of(geometry.class_name)
    assert family is not None, "geometries are of registered families"
    config = class_of(geometry).config_class(**geometry.numbers)
    tower = build_one(shallow(geometry, min(depth, config.depth)), torch.float32, torch.device("cpu"))
    cast_parameters_(tower, torch.float64)
    ref = answers(tower, geometry, torch.float64)
    cast_parameters_(tower, torch.float32)
    pt = answers(tower, geometry, torch.float32)
    fuse(tower, FuseConfig(strict=True))
    ours = answers(tower, geometry, torch.float32)
    return {
        "tower": numbers_of(family.spec_from_config(config)),
        "class": geometry.class_name,
        "others": geometry.others,
        "blocks": min(depth, config.depth),
        "parity": {name: verdict_of(ours[name], ref[name], pt[name]) for name in GRIDS},
    }


def answers(tower: nn.Module, geometry: Geometry, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """Every output for every grid, of the same pixels in any dtype."""
    made = {}
    for name, grid in GRIDS.items():
        generator = torch.Generator().manual_seed(tokens(grid))
        pixels = torch.randn(tokens(grid), patch_width(tower), generator=generator)
        made[name] = outputs_of(tower(pixels.to(dtype), grid_thw=torch.tensor(rows_of(geometry, grid))))
    return made


def main(argv: list[str] | None = None) -> int:
    """Writes the document; the exit code is 1 where an answer broke the rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", required=True)
    parser.add_argument("--family", nargs="*", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--depth", type=int, default=DEPTH, help="blocks, at most the checkpoint's; all of them: 99")
    args = parser.parse_args(argv)
    document: dict[str, Any] = {"passport": passport("families_cpu", ("--json", args.json), ""), "families": {}}
    for name in args.family:
        if class_of(GEOMETRIES[name]) is None:
            document["families"][name] = {"absent": "not in this version of transformers"}
            continue
        with torch.no_grad():
            document["families"][name] = measure(GEOMETRIES[name], args.depth)
        gc.collect()  # a fused tower and its handle hold each other, gigabytes of them
        print(name, json.dumps(document["families"][name]["parity"]), file=sys.stderr, flush=True)
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    found = [f.get("parity", {}) for f in document["families"].values()]
    return int(any(not verdict["passed"] for parity in found for verdict in parity.values()))


if __name__ == "__main__":
    sys.exit(main())
