"""`python -m tests.emulator.kernels.linear --backend swap_ab`: products as compiled for Hopper, on the emulator.

A process without Triton's interpreter. Every kind of tile and epilogue of both Hopper GEMMs, and of plain Triton in
bf16, which its interpreter cannot run: the rule at its strictest against the reference, statistics, rows past the
count, the same bits in another order of warps and copies. Prints a line a case.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch

from fusedvit.kernels import linear as plain
from fusedvit.kernels.epilogue import Scratch
from fusedvit.kernels.hopper import gemm as hopper
from fusedvit.kernels.hopper import gemm_swap_ab
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from fusedvit.kernels.reference.linear import linear as linear_ref
from fusedvit.kernels.tile_configs import LinearConfig
from tests.emulator.launches import emulated
from tests.emulator.machine import promptness_for
from tests.kernels.linear_cases import Fused, Layer, fused, scratch_for, tensors
from tests.kernels.support import assert_rounded_once

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PROGRAMS = 4  # of a persistent grid: several tiles each
QKV = Layer(150, 192, 576, norm=True, part=64, heads=4)  # heads of 48, rows of three tiles and a part of one
FC1 = Layer(150, 256, 272, norm=True, part=128, activation="gelu_tanh")  # columns of four chunks and a quarter
FC2 = Layer(150, 272, 192, residual=True, stats=True)
SWIGLU = Layer(150, 192, 320, norm=True, rms=True, part=64, activation="swiglu")
GEGLU = Layer(150, 192, 320, bias=False, activation="geglu_tanh")
TAPS = Layer(150, 192, 192, taps=True, stats=True)
RMS_HEADS = Layer(90, 192, 384, norm=True, rms=True, part=64, heads=2, normed=2)
HEADS = Layer(150, 192, 384, bias=False, heads=2, normed=3, clipped=True)
DEEP = Layer(70, 512, 256, norm=True, merged=4, part=64, activation="gelu")
QKV_80 = Layer(90, 320, 480, norm=True, rms=True, part=64, heads=2)
HOPPER = {
    "taps": (TAPS, HopperGemmConfig(64, 192, 1, 5)),
    "patch embed, statistics alone": (Layer(290, 332, 320, stats=True), HopperGemmConfig(128, 128, 1, 4)),
    "qkv": (QKV, HopperGemmConfig(64, 192, 1, 5)),
    "qkv, rms, no heads": (Layer(150, 320, 272, norm=True, rms=True, part=64), HopperGemmConfig(128, 128, 1, 4)),
    "qkv, three consumers": (QKV, HopperGemmConfig(64, 192, 3, 3)),
    "qkv, 128 rows": (QKV, HopperGemmConfig(128, 128, 1, 4)),
    "qkv, heads of 80, rms": (QKV_80, HopperGemmConfig(64, 192, 2, 4)),
    "heads, clipped": (HEADS, HopperGemmConfig(128, 128, 1, 4)),
    "heads of q and k, rms": (RMS_HEADS, HopperGemmConfig(64, 192, 3, 3)),
    "heads, two accumulators": (HEADS, HopperGemmConfig(64, 256, 2, 3)),
    "fc1": (FC1, HopperGemmConfig(64, 256, 2, 3)),
    "fc1, quick": (replace(FC1, activation="quick_gelu"), HopperGemmConfig(64, 128, 3, 4)),
    "fc1, massive channels": (replace(FC1, massive=True), HopperGemmConfig(64, 128, 1, 6)),
    "swiglu": (SWIGLU, HopperGemmConfig(128, 128, 1, 4)),
    "geglu": (GEGLU, HopperGemmConfig(64, 192, 2, 4)),
    "geglu, clipped": (replace(GEGLU, clipped=True), HopperGemmConfig(128, 128, 1, 4)),
    "taps alone": (replace(TAPS, stats=False), HopperGemmConfig(64, 128, 1, 6)),
    "bias": (Layer(150, 192, 208), HopperGemmConfig(64, 192, 2, 4)),
    "fc2": (FC2, HopperGemmConfig(64, 64, 1, 8)),
    "fc2, three consumers": (FC2, HopperGemmConfig(64, 192, 3, 3)),
    "deepstack fc1": (DEEP, HopperGemmConfig(64, 256, 2, 3)),
    "merger fc2": (Layer(70, 256, 256, bias=False), HopperGemmConfig(64, 128, 1, 6)),
}
SWAP_AB = {
    "qkv, 112 rows": (replace(QKV, k=320), HopperSwapABConfig(112, 3, 5)),
    "qkv, 192 rows": (replace(QKV, k=256, rows=250), HopperSwapABConfig(192, 3, 4)),
    "qkv, 128 rows": (replace(QKV, k=320), HopperSwapABConfig(128, 1, 5)),
    "qkv, 56 rows, heads of 80, rms": (QKV_80, HopperSwapABConfig(56, 2, 5)),
    "proj, 112 rows": (replace(FC2, k=384), HopperSwapABConfig(112, 1, 6)),
    "proj, 144 rows": (replace(FC2, k=256), HopperSwapABConfig(144, 3, 4)),
    "proj, 24 rows": (replace(FC2, rows=61, k=384), HopperSwapABConfig(24, 1, 6)),
    "fc1, 112 rows": (FC1, HopperSwapABConfig(112, 4, 4)),
    "fc2, 96 rows": (replace(FC2, k=464), HopperSwapABConfig(96, 2, 6)),
    "fc2, 40 rows": (replace(FC2, k=464), HopperSwapABConfig(40, 1, 8)),
    "deepstack fc1, 64 rows": (DEEP, HopperSwapABConfig(64, 2, 8)),
    "merger fc2, 16 rows": (Layer(70, 512, 256, bias=False), HopperSwapABConfig(16, 1, 8)),
}
TRITON = {
    name: (layer, config)
    for name, layer, config in (
        ("taps", TAPS, LinearConfig(64, 64, 64, 4, 3)),
        ("qkv", QKV, LinearConfig(128, 64, 64, 4, 3)),
        ("heads, clipped", HEADS, LinearConfig(128, 128, 64, 8, 3)),
        ("heads of q and k, rms", RMS_HEADS, LinearConfig(64, 64, 64, 4, 3)),
        ("fc1", FC1, LinearConfig(128, 128, 64, 8, 3)),
        ("swiglu", SWIGLU, LinearConfig(64, 128, 64, 4, 3)),
        ("geglu, clipped", replace(GEGLU, clipped=True), LinearConfig(64, 128, 64, 4, 3)),
        ("fc2", FC2, LinearConfig(128, 64, 64, 4, 4)),
        ("fc2 in two", replace(FC2, k=320), LinearConfig(64, 64, 64, 4, 3, splits=2)),
        ("deepstack fc1", DEEP, LinearConfig(64, 64, 64, 4, 3)),
    )
}
BACKENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "hopper": (hopper.linear, HOPPER),
    "swap_ab": (gemm_swap_ab.linear, SWAP_AB),
    "triton": (plain.linear, TRITON),
}


def bits(arguments: Fused, op: Any, config: Any, seed: int, scratch: Scratch | None = None) -> list[torch.Tensor]:
    """Rows of the output, and of its statistics."""
    rows, e = arguments.layer.rows, arguments.epilogue
    norm, taps = e.norm, e.taps
    older = [arguments.weight, arguments.num_rows, e.bias, e.bounds, norm and norm.colsum, taps and taps.table]
    older.append(e.heads and e.heads.weight)
    ready = [t for t in older if t is not None]
    with emulated(seed=seed, promptness=promptness_for(seed), ready=ready):
        out, stats = arguments.run(op, config, scratch)
    if stats is None:
        return [out[:rows]]
    assert stats.partials[rows:].isnan().all(), "statistics of rows that do not exist"
    return [out[:rows], stats.partials[:rows]]


def check(op: Any, layer: Layer, config: Any, dtype: torch.dtype) -> None:
    config = replace(config, pdl=True)
    if hasattr(config, "max_programs"):
        config = replace(config, max_programs=PROGRAMS)
    t = tensors(layer, dtype, CPU)
    roomy = fused(layer, t, layer.rows + 70)
    scratch = scratch_for(config, layer.rows + 70, layer.n, CPU)  # over which launches follow one another
    first = bits(roomy, op, config, 0, scratch)
    again = first if scratch is None else bits(roomy, op, config, 1, scratch)
    expected, stats = fused(layer, t, wide=torch.float64).run(linear_ref, config)
    assert_rounded_once(first[0], expected, "against the reference:")
    if stats is not None:
        own = fused(layer, t).run(linear_ref, config)[1]
        assert own is not None
        torch.testing.assert_close(first[1], own.partials[: layer.rows], rtol=0.02, atol=0.05)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "other bits"
    for rows in (0, 1, layer.rows - 5):
        few = replace(layer, rows=rows)
        made = [fused(few, tensors(few, dtype, CPU), room) for room in (max(rows, 1), layer.rows + 70)]
        exact, more = (bits(arguments, op, config, seed) for seed, arguments in enumerate(made, start=2))
        assert all(torch.equal(a, b) for a, b in zip(exact, more, strict=True)), f"{rows} rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=list(BACKENDS), required=True)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--short", action="store_true", help="every third case")
    args = parser.parse_args()
    op, cases = BACKENDS[args.backend]
    for name, (layer, config) in list(cases.items())[:: 3 if args.short else 1]:
        check(op, layer, config, DTYPES[args.dtype])
        print(f"right: {name}", flush=True)


if __name__ == "__main__":
    main()
