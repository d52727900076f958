"""`python -m tests.emulator.kernels.tuned`: the products that the shipped tables choose, emulated once.

A process without Triton's interpreter. Each distinct tile and schedule of the Hopper GEMMs and of plain Triton, with
the epilogue that it was chosen for, at sizes that leave a part of a tile in rows and in columns, with PDL. Prints a
line each.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fusedvit.kernels import backends
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.tuning_table import SHIPPED, config_of
from tests.emulator.kernels.linear import BACKENDS, CPU, bits
from tests.kernels.linear_cases import Layer, fused, scratch_for, tensors
from tests.kernels.support import assert_rounded_once

ACTIVATIONS = {"gelu", "gelu_tanh", "quick_gelu", "swiglu"}


def chosen() -> Iterator[tuple[str, str, Any]]:
    """(backend, kind, configuration), each once; walks of few programs, as there are few tiles."""
    found: dict[tuple[str, str, Any], None] = {}
    for path in sorted(SHIPPED.glob("*.json")):
        for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
            if entry["op"] != backends.LINEAR or entry["backend"] not in BACKENDS:
                continue
            backend = backends.backend_named(backends.LINEAR, entry["backend"])
            assert backend is not None, f"no backend {entry['backend']} in this Triton"
            config = replace(config_of(backend, entry["config"], path.name), pdl=True)
            few = {"max_programs": 3}
            config = replace(config, **{name: value for name, value in few.items() if hasattr(config, name)})
            found[entry["backend"], entry["kind"], config] = None
    yield from sorted(found, key=str)


def layer_for(kind: str, config: Any) -> Layer:
    """A tile and a half of rows, five 64s of columns or more, and as many steps of K as the configuration wants."""
    parts = set(kind.split("+"))
    tile = getattr(config, "block_m", 0) or config.rows
    steps = max(5, getattr(config, "stages", 3), 2 * getattr(config, "splits", 1) + 1)
    return Layer(
        rows=tile + 37,
        k=64 * steps,
        n=384 if "rope" in parts else 320,
        norm=bool(parts & {"norm", "rms"}),
        rms="rms" in parts,
        part=64,
        heads=2 if "rope" in parts else 0,
        taps="taps" in parts,
        activation=next(iter(parts & ACTIVATIONS), "none"),
        residual="residual" in parts,
        stats="stats" in parts,
    )


def check(backend: str, kind: str, config: Any, seed: int) -> None:
    layer = layer_for(kind, config)
    t = tensors(layer, torch.bfloat16, CPU, seed)
    scratch = scratch_for(config, layer.rows + 20, layer.n, CPU)
    out = bits(fused(layer, t, layer.rows + 20), BACKENDS[backend][0], config, seed, scratch)[0]
    assert_rounded_once(out, fused(layer, t, wide=torch.float64).run(linear_ref, config)[0], f"{backend} {config}:")


def main() -> None:
    for seed, (backend, kind, config) in enumerate(chosen()):
        check(backend, kind, config, seed)
        print(f"right: {kind}, {config}", flush=True)


if __name__ == "__main__":
    main()
