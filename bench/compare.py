"""`python -m fusedvit.bench.compare BEFORE`: this checkout against another one, towers and workloads, on one GPU.

Each checkout has a process of its own, which holds the tower and its graphs. Bursts of a few calls are interleaved, so
that a slow spell of the machine hits both. A figure is the median over bursts; `ratio` is the median of (this / other),
burst by burst. `wall` is the time from pixels and grid on the GPU to outputs that the caller owns, `replay` that of the
graph alone between two events, `host` their difference. The other checkout needs only `fuse`, `warmup(calls=)`,
`graphs()` and its own bench's towers, workloads and timing: this file imports nothing else of bench/.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fusedvit import fuse
from fusedvit.bench import towers
from fusedvit.bench.timing import gpu_ms
from fusedvit.bench.workloads import WORKLOADS, tokens

ROOT = Path(__file__).resolve().parent.parent
TOWERS = ("Qwen3-VL-8B", "Qwen3-VL-2B")
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
CALLS = 5  # per burst; 2 if a call takes more than 20 ms
METRICS = ("wall", "replay", "host")
MAX_REPLAY_US = 5000.0  # longer workloads do not count in the summary of `host`: noise drowns their host time


def serve(tower_name: str) -> int:
    """The process of one checkout: reads workload names, one per line, and writes a burst's microseconds as JSON."""
    tower, _ = towers.build(towers.GEOMETRIES[tower_name], DTYPE, DEVICE)
    handle = fuse(tower)
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = {}
    with torch.inference_mode():
        handle.warmup(progress=iter, calls=list(WORKLOADS.values()))
        for name, grid in WORKLOADS.items():
            pixels = torch.randn(tokens(grid), towers.patch_width(tower), device=DEVICE, generator=generator).to(DTYPE)
            inputs[name] = pixels, torch.tensor(grid, device=DEVICE)
            for _ in range(3):
                tower(inputs[name][0], grid_thw=inputs[name][1])
        print(json.dumps({"ready": True, "stats": handle.stats()["calls"]}), flush=True)
        for line in sys.stdin:
            print(json.dumps(burst(tower, handle, *inputs[line.strip()])), flush=True)
    return 0


def burst(tower: Any, handle: Any, pixels: torch.Tensor, grid: torch.Tensor) -> dict[str, float]:
    """Medians of a few calls, in microseconds; `replay` and `host` only if the call is one replay."""
    manager = handle.graphs().manager
    before = dict(manager.stats.replays)
    first = _wall_us(tower, pixels, grid)  # not counted: caches are cold after the other process's burst
    used = [budget for budget, count in manager.stats.replays.items() if count != before.get(budget, 0)]
    graph = manager.graph(used[0]) if len(used) == 1 else None
    taken: dict[str, list[float]] = {}
    for _ in range(CALLS if first < 20e3 else 2):
        wall = _wall_us(tower, pixels, grid)
        taken.setdefault("wall", []).append(wall)
        if graph is not None:
            replay = 1e3 * gpu_ms(graph.replay, DEVICE)
            taken.setdefault("replay", []).append(replay)
            taken.setdefault("host", []).append(wall - replay)
    return {name: statistics.median(us) for name, us in taken.items()}


def _wall_us(tower: Any, pixels: torch.Tensor, grid: torch.Tensor) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    tower(pixels, grid_thw=grid)
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


class Checkout:
    """The process of one checkout, for one tower."""

    def __init__(self, root: Path, tower: str) -> None:
        program = f"import sys; from fusedvit.bench.compare import serve; sys.exit(serve({tower!r}))"
        if root != ROOT:  # the other checkout may lack this file
            text = Path(__file__).read_text(encoding="utf-8")
            names = f"__file__, __name__ = {__file__!r}, 'fusedvit.bench.compare'"
            program = f"import sys; {names}; exec({text!r}, globals()); sys.exit(serve({tower!r}))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(root)},
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def reply(self) -> dict[str, Any]:
        """The next line that the process writes.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self.process.stdout is not None, "its standard output is ours"
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a checkout's process ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def burst(self, workload: str) -> dict[str, float]:
        assert self.process.stdin is not None, "its standard input is ours"
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        return self.reply()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def checkouts(roots: Mapping[str, Path], tower: str) -> Iterator[dict[str, Checkout]]:
    """Starts both processes, which compile in parallel, and waits until they are ready."""
    with ExitStack() as stack:
        found = {name: Checkout(root, tower) for name, root in roots.items()}
        for checkout in found.values():
            stack.callback(checkout.close)
        for checkout in found.values():
            checkout.reply()
        yield found


def compare(both: Mapping[str, Checkout], workload: str, seconds: float) -> dict[str, Any]:
    """One round of one workload: medians by checkout, and the median ratio of bursts."""
    bursts: dict[str, list[dict[str, float]]] = {name: [] for name in both}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(bursts["after"]) < 5:
        for name, checkout in both.items():
            bursts[name].append(checkout.burst(workload))
    found: dict[str, Any] = {"bursts": len(bursts["after"])}
    for metric in METRICS:
        if metric not in bursts["after"][0] or metric not in bursts["before"][0]:
            continue
        values = {name: [one[metric] for one in taken] for name, taken in bursts.items()}
        medians = {name: statistics.median(us) for name, us in values.items()}
        ratios = [a / b for a, b in zip(values["after"], values["before"], strict=True)]
        found[metric] = {**medians, "ratio": statistics.median(ratios)}
    return found


def main(argv: list[str] | None = None) -> int:
    """Prints a line per workload and round, and writes the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the root of another checkout")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each workload in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tower", nargs="*", action="extend")
    parser.add_argument("--workload", nargs="*", action="extend", choices=list(WORKLOADS))
    parser.add_argument("--json", type=Path, help="where the document goes; without it figures are only printed")
    parser.add_argument("--commit", default="", help="of this checkout, where git does not tell")
    parser.add_argument("--before-commit", default="", help="of the other one")
    args = parser.parse_args(argv)
    if not (args.before / "bench" / "towers.py").is_file():
        parser.error(f"BEFORE: the root of a checkout of fusedvit expected, got {args.before}")
    if not torch.cuda.is_available():
        parser.error("1 NVIDIA GPU expected, got 0")
    args.tower, args.workload = args.tower or list(TOWERS), args.workload or list(WORKLOADS)
    roots = {"before": args.before.resolve(), "after": ROOT}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    document = {
        "passport": _passport(args),
        "before": args.before_commit or commit_of(args.before),
        "unit": "microseconds",
        "towers": found,
    }
    for tower in args.tower:
        rounds = found[tower] = {name: [] for name in args.workload}
        with checkouts(roots, tower) as both:
            for _ in range(args.rounds):
                for name in args.workload:
                    rounds[name].append(compare(both, name, args.seconds))
                    print(tower, name, describe(rounds[name][-1]), flush=True)
                    _write(args.json, document)
    document["geometric_mean"] = summary(found)
    _write(args.json, document)
    print(json.dumps(document["geometric_mean"]))
    return 0


def _write(path: Path | None, document: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def _passport(args: argparse.Namespace) -> dict[str, str]:
    command = f"python -m fusedvit.bench.compare BEFORE --rounds {args.rounds} --seconds {args.seconds} --tower"
    command += " " + " ".join(args.tower)
    if args.workload != list(WORKLOADS):
        command += " --workload " + shlex.join(args.workload)
    if args.json is not None:
        command += f" --json {args.json.name}"
    return {
        "command": command,
        "commit": args.commit or commit_of(ROOT),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def commit_of(root: Path) -> str:
    """The commit of a checkout; "unknown" if `root` is not a checkout's root."""
    asked = ["git", "-C", str(root), "rev-parse", "HEAD", "--show-toplevel"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    commit, _, top = done.stdout.strip().partition("\n")
    return commit if top and Path(top).resolve() == root.resolve() else "unknown"


def describe(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{m} {found[m]['before']:.0f} -> {found[m]['after']:.0f} us ({found[m]['ratio']:.3f})"
        for m in METRICS
        if m in found
    )


def summary(towers: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> dict[str, float]:
    """Geometric means over towers, workloads and rounds, and the largest ratio that one workload reached in every
    round."""
    found: dict[str, float] = {}
    for metric in METRICS:
        rounds = [[r for r in rs if metric in r] for tower in towers.values() for rs in tower.values()]
        if metric == "host":
            rounds = [[r for r in rs if r["replay"]["before"] <= MAX_REPLAY_US] for rs in rounds]
        by_workload = [[r[metric]["ratio"] for r in rs] for rs in rounds if rs]
        found[metric] = statistics.geometric_mean([ratio for ratios in by_workload for ratio in ratios])
        found[f"{metric}, worst in every round"] = max(min(ratios) for ratios in by_workload)
    return found


if __name__ == "__main__":
    sys.exit(main())
