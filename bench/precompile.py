"""`python -m fusedvit.bench.precompile`: fills Triton's cache for a tower's budgets, a process per budget.

One block stands for all, so that a process needs little memory; what it compiles is what the whole tower launches.
"""

import argparse
import subprocess
import sys
from typing import Any

import torch

from fusedvit.bench import towers
from fusedvit.bench.tower_bench import BUDGETS
from fusedvit.config import FuseConfig
from fusedvit.huggingface import fuse


def compile_budget(name: str, budget: int) -> None:
    """Runs `budget` merged tokens once, without graphs, whose smaller budgets would be compiled here as well."""
    geometry: dict[str, Any] = towers.GEOMETRIES[name] | {"depth": 1, "deepstack_visual_indexes": [0]}
    tower, _ = towers.build(geometry, torch.bfloat16, torch.device("cuda"))
    fuse(tower, FuseConfig(graphs=False))
    pixels = torch.randn(4 * budget, towers.patch_width(tower), dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        tower(pixels, grid_thw=torch.tensor([(1, 2, 2 * budget)]))
    torch.cuda.synchronize()


def main() -> int:
    """Waits for every process; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tower", nargs="*", default=["Qwen3-VL-8B", "Qwen3-VL-2B"], choices=list(towers.GEOMETRIES))
    parser.add_argument("--budget", type=int, nargs="*", default=list(BUDGETS))
    args = parser.parse_args()
    pairs = [(tower, budget) for tower in args.tower for budget in args.budget]
    if len(pairs) == 1:
        compile_budget(*pairs[0])
        return 0
    command = [sys.executable, "-m", "fusedvit.bench.precompile"]
    running = [subprocess.Popen([*command, "--tower", tower, "--budget", str(budget)]) for tower, budget in pairs]
    return int(any([process.wait() for process in running]))


if __name__ == "__main__":
    sys.exit(main())
