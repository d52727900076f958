"""`python -m fusedvit.bench.compare BEFORE`: this checkout against another one, towers and workloads, on one GPU.

Each checkout has a process of its own, which holds the tower and its graphs. Bursts of a few calls are interleaved, so
that a slow spell of the machine hits both. A figure is the median over bursts; `ratio` is the median of (this / other),
burst by burst. `wall` is the time from pixels and grid on the GPU to outputs that the caller owns, `replay` that of the
graph alone between two events, `host` their difference.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench.records import ROOT, arguments, commit_of, passport, run_program, write
from fusedvit.bench.workloads import WORKLOADS

SERVER = Path(__file__).with_name("compare_server.py")
TOWERS = ("Qwen3-VL-8B", "Qwen3-VL-2B")
METRICS = ("wall", "replay", "host")
MAX_REPLAY_US = 5000.0  # longer workloads do not count in the summary of `host`: noise drowns their host time


class Checkout:
    """The process of one checkout, for one tower."""

    def __init__(self, root: Path, tower: str) -> None:
        self.process = subprocess.Popen(  # the text, not the module: the other checkout may lack it
            [sys.executable, "-c", SERVER.read_text(encoding="utf-8"), tower],
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
    parser = arguments(__doc__)
    parser.add_argument("before", type=Path, help="the root of another checkout")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each workload in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tower", nargs="*", action="extend")
    parser.add_argument("--workload", nargs="*", action="extend", choices=list(WORKLOADS))
    parser.add_argument("--before-commit", default="", help="of the other one")
    args = parser.parse_args(argv)
    if not (args.before / "bench" / "towers.py").is_file():
        parser.error(f"BEFORE: the root of a checkout of fusedvit expected, got {args.before}")
    if not torch.cuda.is_available():
        parser.error("1 NVIDIA GPU expected, got 0")
    args.tower, args.workload = args.tower or list(TOWERS), args.workload or list(WORKLOADS)
    roots = {"before": args.before.resolve(), "after": ROOT}
    given = {"--rounds": args.rounds, "--seconds": args.seconds, "--tower": args.tower}
    given |= {"--workload": args.workload if args.workload != list(WORKLOADS) else None, "--json": args.json}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    document = {
        "passport": passport("python -m fusedvit.bench.compare BEFORE", given, args.commit),
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
                    write(args.json, document)
    document["geometric_mean"] = summary(found)
    write(args.json, document)
    print(json.dumps(document["geometric_mean"]))
    return 0


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
    run_program(main)
