"""`python -m tests.gpu.byte_times --json PATH`: a tower's time with bytes and with floats, nine workloads, one GPU.

Contenders run interleaved; medians of milliseconds. "plain" is the tower that nobody has brought bytes; the others are
one tower that takes all three kinds. Images come as still bytes, videos as bytes of all frames.
"""

from typing import Any

import torch

import fusedvit
from fusedvit.bench.records import arguments, passport, write
from fusedvit.bench.timing import Contender, interleaved, spread
from fusedvit.bench.towers import GEOMETRIES, build_one, shared_copy
from fusedvit.bench.workloads import WORKLOADS
from tests.support.byte_patches import HALF, bytes_for

DEVICE = torch.device("cuda")


def contenders(plain: Any, taking: Any, grid: Any, still: bool) -> list[Contender]:
    marked = bytes_for(taking, grid, still, **HALF).to(DEVICE)
    floats, rows = marked.pixels(), torch.tensor(grid, device=DEVICE)
    calls = {
        "plain, bf16": (plain, floats.bfloat16()),
        "bf16": (taking, floats.bfloat16()),
        "fp32": (taking, floats),
        "still bytes" if still else "bytes": (taking, marked),
    }
    return [
        Contender(f"{name} ({clock})", lambda tower=tower, pixels=pixels: tower(pixels, grid_thw=rows), clock)
        for name, (tower, pixels) in calls.items()
        for clock in ("gpu", "wall")
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=GEOMETRIES)
    parser.add_argument("--seconds", type=float, default=3.0, help="a workload")
    args = parser.parse_args()
    taking = build_one(GEOMETRIES[args.tower], torch.bfloat16, DEVICE).requires_grad_(False)
    plain = shared_copy(taking).requires_grad_(False)
    given = {"--tower": args.tower, "--seconds": args.seconds, "--json": args.json}
    of = passport("python -m tests.gpu.byte_times", given, args.commit)
    found: dict[str, Any] = {"passport": of, "gpu": of["gpu"], "tower": args.tower, "ms": {}}
    with torch.inference_mode():
        for tower in (plain, taking):
            handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
            for still in (True, False) if tower is taking else ():
                handle.normalizations.expect(bytes_for(taking, [(1, 2, 2)], still, **HALF).normalization, still)
            handle.warmup(calls=list(WORKLOADS.values()))
        for name, grid in WORKLOADS.items():
            still = all(t == 1 for t, _, _ in grid)
            timed = interleaved(contenders(plain, taking, grid, still), DEVICE, args.seconds)
            found["ms"][name] = {contender: spread(ms).median for contender, ms in timed.items()}
            print(f"{name:26}", {k: round(v, 4) for k, v in found["ms"][name].items()}, flush=True)
            write(args.json, found)


if __name__ == "__main__":
    main()
