"""`python -m fusedvit.runtime.ahead_of_time`: compiles every kernel that the encoder launches, without a GPU.

The launches are recorded from the encoder itself, run on meta tensors over towers x dtypes x budgets, so that what is
checked is what is launched.
"""

import argparse
import itertools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
import triton

from fusedvit.errors import named_line
from fusedvit.kernels.codegen_checks import (
    MAX_SHARED,
    Compiled,
    Launch,
    compile_launch,
    record,
)
from fusedvit.kernels.load_inputs import GRID_DTYPES, PIXEL_DTYPES
from fusedvit.kernels.patches import PatchLayout, Taps, patches_from_images
from fusedvit.kernels.store_outputs import PLANES
from fusedvit.kernels.tile_configs import Target, ladder
from fusedvit.model.ops import TRITON
from fusedvit.model.plan import plan_for
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.meta_runs import fingerprints_on_meta, run_on_meta
from fusedvit.runtime.tower_launches import meta_weights

QWEN3_VL_8B = VisionSpec(27, 1152, 16, 72, 4304, 4096, 16, position_side=48, deepstack=(8, 16, 24))
QWEN3_VL_4B = VisionSpec(24, 1024, 16, 64, 4096, 2560, 16, position_side=48, deepstack=(5, 11, 17))
QWEN35_08B = VisionSpec(12, 768, 12, 64, 3072, 1024, 16, position_side=48)
QWEN2_VL_7B = VisionSpec(32, 1280, 16, 80, 5120, 3584, 14, activation="quick_gelu", without_bias=("patch",))
QWEN25_VL_7B = replace(
    QWEN2_VL_7B, intermediate_size=3420, activation="swiglu", norm="rms", window=4, full_attention=(7, 15, 23, 31)
)
GLM_45V = VisionSpec(
    24, 1536, 12, 128, 4096, 4096, 14, activation="swiglu", norm="rms", norm_eps=1e-5, position_side=24,
    position_taps=16, patch_norm=True, tail="downsample", merger_size=10944,
    without_bias=("qkv", "proj", "mlp", "merger"),
)  # fmt: skip
GLM_5 = VisionSpec(
    24, 1024, 16, 64, 4096, 1536, 14, activation="swiglu", glu_limit=10.0, norm="rms", norm_eps=1e-5, qk_norm=True,
    tail="downsample", merger_size=10240, without_bias=("merger",),
)  # fmt: skip
GEMMA_4_31B = VisionSpec(
    27, 1152, 16, 72, 4304, 1152, 16, temporal_patch_size=1, merge_size=3, activation="geglu_tanh", norm="rms",
    rope_theta=100.0, rope_axial=True, attention_scale=1.0, position_side=10240, position_taps=2, qk_norm=True,
    v_norm=True, sandwich=True, tail="pool", standardized=True, without_bias=("patch", "qkv", "proj", "mlp"),
    padded=True,
)  # fmt: skip
GEMMA_4_E4B = replace(
    GEMMA_4_31B, depth=16, hidden_size=768, num_heads=12, head_dim=64, intermediate_size=3072, out_size=768,
    clipped=True, standardized=False,
)  # fmt: skip
EXAONE_45 = replace(
    QWEN25_VL_7B, depth=28, hidden_size=2048, num_heads=32, head_dim=64, kv_heads=8, intermediate_size=5120,
    out_size=5120, full_attention=(6, 13, 20, 27),
)  # fmt: skip
TOWERS = {
    "hd72": QWEN3_VL_8B,
    "hd64": QWEN3_VL_4B,
    "narrow": QWEN35_08B,
    "hd80": QWEN2_VL_7B,
    "hd128": GLM_45V,
    "windows": QWEN25_VL_7B,
    "qk_norm": GLM_5,
    "sandwich": GEMMA_4_31B,
    "clipped": GEMMA_4_E4B,
    "grouped": EXAONE_45,
    # mergers alone differ from those above
    "qwen35_2b": replace(QWEN3_VL_4B, out_size=2048, deepstack=()),
    "qwen4_exp": replace(QWEN3_VL_8B, out_size=2560, deepstack=()),
    "qwen3_omni": replace(QWEN3_VL_8B, out_size=2048),
    "glm_41v": replace(GLM_45V, merger_size=13696),
    "glm_ocr": replace(GLM_5, glu_limit=0.0, merger_size=4608),
    "ernie": replace(QWEN2_VL_7B, out_size=1280, temporal_patch_size=1, tail="norm", rows_only=True),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BUDGETS = tuple(ladder(64, 65536))  # patch tokens
FEW_BUDGETS: dict[str, tuple[int, ...]] = {  # of towers most of whose kernels are the others'
    **dict.fromkeys(("hd64", "hd80", "narrow"), (64, 256, 1024, 4096, 16384)),
    **dict.fromkeys(("hd128", "windows", "qk_norm", "sandwich", "clipped", "grouped"), (64, 1024, 4096)),
    **dict.fromkeys(("qwen35_2b", "qwen4_exp", "qwen3_omni", "glm_41v", "glm_ocr", "ernie"), (64, 1024, 4096)),
}
ONE_BUDGET = (1024,)  # of other dtypes than bf16, whose tiles are the same
SIZES = {  # of a layer: kernels that differ in nothing else are alike in what a compiler makes of them
    "N", "K", "EPS", "IN_PARTS", "IN_WIDTH", "IN_LENGTH", "ROPE_COLS",
    "X_PITCH", "W_PITCH", "OUT_PITCH", "RESIDUAL_PITCH",
}  # fmt: skip
SMS = {90: 132, 80: 108, 86: 84, 89: 142, 100: 148, 120: 170}


@dataclass(frozen=True)
class Matrix:
    """What to compile.

    Attributes:
        budgets: of patch tokens; None for those that a tower's kernels differ in.
        alike: the first alone of those that `kind_of` does not tell apart.
    """

    arches: tuple[int, ...]
    dtypes: tuple[str, ...]
    towers: tuple[str, ...]
    budgets: tuple[int, ...] | None
    alike: bool = False


def launches_of(spec: VisionSpec, dtype: torch.dtype, tokens: int, target: Target) -> list[Launch]:
    """What one call of `tokens` patch tokens launches, each distinct kernel once."""
    plan, weights = plan_for(spec, tokens, dtype, target), meta_weights(spec, dtype, takes_bytes=True)
    return record(lambda: run_on_meta(spec, weights, plan, dtype, tokens, len(plan.overlapped)))


def _launches_around_encoder() -> list[Launch]:
    """What a call launches around the encoder: the fingerprint of the weights, its input taken over, its outputs."""
    table = torch.empty(64, 3, dtype=torch.int32, device="meta")
    grids = [torch.empty(1, 3, dtype=dtype, device="meta") for dtype in GRID_DTYPES]
    pixels = [torch.empty(4, 1536, dtype=dtype, device="meta") for dtype in PIXEL_DTYPES]
    bytes_of_kinds = [torch.empty(4, width, dtype=torch.uint8, device="meta") for width in (1536, 768)]
    counts = torch.empty(3, 4, dtype=torch.int32, device="meta")

    def launches() -> None:
        fingerprints_on_meta()
        for grid in grids:
            TRITON.load_inputs(grid, 4, 256, 2, table, None, None, counts)
            for given, kept in itertools.product((*pixels, *bytes_of_kinds), pixels):
                TRITON.load_inputs(grid, 4, 256, 2, table, given, kept, counts)
        for like in pixels:
            hidden, merged = like.new_empty(4, 1152), like.new_empty(1, 4096)
            for planes in range(PLANES + 1):
                TRITON.store_outputs(hidden, [merged] * planes, hidden, [merged] * planes)

    return record(launches) + record(_launches_of_pixels)


def _launches_of_pixels() -> None:
    """What turns an image or a video, and an image of planes, into patches."""

    def taps(size: int) -> Taps:
        table = torch.empty(9, size, dtype=torch.int32, device="meta")
        return Taps(table[0], table, 22)

    frames = torch.empty(2, 50, 52, 3, dtype=torch.uint8, device="meta")
    planes = torch.empty(2, 3, 50, 52, dtype=torch.uint8, device="meta").movedim(1, -1)
    for patch, temporal, images, down_first in itertools.product((14, 16), (1, 2), (frames, planes), (False, True)):
        layout, grid = PatchLayout(patch, 2, temporal), (2 // temporal, 4, 4)
        out = torch.empty(16 * grid[0], 3 * temporal * patch**2, dtype=torch.uint8, device="meta")
        patches_from_images(images, taps(4 * patch), taps(4 * patch), layout, grid, out, down_first)
        patches_from_images(images, taps(4 * patch) if down_first else None, None, layout, grid, out)


@lru_cache(maxsize=1)  # once per process: it takes as long as some compilations
def jobs_of(matrix: Matrix) -> list[tuple[Launch, int]]:
    """Each distinct kernel of a matrix once, with its architecture."""
    jobs: list[tuple[Launch, int]] = []
    for arch in matrix.arches:
        target = Target(arch, SMS[arch], MAX_SHARED[arch])
        launches = dict.fromkeys(_launches_around_encoder())
        for tower, dtype in itertools.product(matrix.towers, matrix.dtypes):
            few = FEW_BUDGETS.get(tower, BUDGETS) if dtype == "bf16" else ONE_BUDGET
            for tokens in matrix.budgets or few:
                launches |= dict.fromkeys(launches_of(TOWERS[tower], DTYPES[dtype], tokens, target))
        chosen = {kind_of(launch): launch for launch in reversed(launches)}.values() if matrix.alike else launches
        jobs += [(launch, arch) for launch in chosen]
    return jobs


def kind_of(launch: Launch) -> tuple[object, ...]:
    """A launch without its layer's sizes (only whether there are any), its 16-bit type either."""
    constants = tuple((name, bool(value) if name in SIZES else value) for name, value in launch.constants)
    signature = tuple((name, kind.replace("bf16", "fp16")) for name, kind in launch.signature)
    return launch.kernel, signature, constants, launch.aligned, launch.options


def _compile(index: int, matrix: Matrix) -> Compiled:
    """One job by its number: launches hold kernels, which do not travel between processes."""
    return compile_or_fail(*jobs_of(matrix)[index])


def compile_or_fail(launch: Launch, arch: int) -> Compiled:
    """`compile_launch`, but whatever a compiler dies of is this launch's problem and not the run's end."""
    try:
        return compile_launch(launch, arch)
    except Exception as error:
        return Compiled(launch.describe(), arch, 0, 0, 0, (named_line(error),))


def compile_all(matrix: Matrix, processes: int = 1) -> list[Compiled]:
    """Compiles the whole matrix in so many processes."""
    jobs = jobs_of(matrix)
    if processes == 1:
        return [compile_or_fail(*job) for job in jobs]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(partial(_compile, matrix=matrix), range(len(jobs)), chunksize=4))


def main(argv: list[str] | None = None) -> int:
    """Prints a line per problem and a summary; the exit code is the number of failures, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", default=sorted(SMS), choices=sorted(SMS))
    parser.add_argument("--dtype", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--tower", nargs="*", default=list(TOWERS), choices=list(TOWERS))
    parser.add_argument("--budget", type=int, nargs="*", help="patch tokens; all that matter if left out")
    parser.add_argument("--alike", action="store_true", help="one of those that differ in sizes or bf16/fp16 alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", metavar="PATH", help="write every result here ('-' for standard output)")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    budgets = None if args.budget is None else tuple(args.budget)
    matrix = Matrix(tuple(args.arch), tuple(args.dtype), tuple(args.tower), budgets, args.alike)
    results = compile_all(matrix, args.jobs)
    bad = [r for r in results if r.problems]
    for r in bad:
        print(f"FAIL sm_{r.capability} {r.launch}: {'; '.join(r.problems)}", file=sys.stderr)
    summary = {"triton": triton.__version__, "compiled": len(results), "failed": len(bad)}
    _write(summary | {"results": [asdict(r) for r in results]}, args.json)
    print(f"triton {triton.__version__}: {len(results)} kernels compiled, {len(bad)} failed", file=sys.stderr)
    return int(bool(bad))


def _write(document: dict[str, object], path: str | None) -> None:
    text = json.dumps(document, indent=1)
    if path == "-":
        print(text)
    elif path:
        Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
