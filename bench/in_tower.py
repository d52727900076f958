"""`python -m fusedvit.bench.in_tower`: tiles of the blocks' products by what a replay of the whole tower takes.

`fusedvit tune` times an operation alone, launch after launch of the same: each begins under the end of its own kind,
and finds its place on the GPU as that leaves it. In a tower both are others' (docs/hopper.md: fc2 begun when it is its
turn is 4 us a launch faster at 1296 patches, and no faster alone). So the tiles that the cost model thinks best are
timed once more in their place: an operation at a time, what takes longest first, each beside what was found before, and
the best twice. Needs a GPU.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusedvit import __version__
from fusedvit.bench import beside
from fusedvit.bench.beside import HIGH, Line, tower_of
from fusedvit.bench.cases import wrong_twice
from fusedvit.bench.questions import BUDGETS, Candidate, Question, candidates, cases_of
from fusedvit.bench.shortlist import shortlist
from fusedvit.bench.timing import Contender, in_turns
from fusedvit.bench.workloads import Grid
from fusedvit.kernels import tuning_table
from fusedvit.kernels.hopper.gemm_configs import uses_pdl
from fusedvit.kernels.launch import compiling_only
from fusedvit.kernels.tile_configs import PDL_MAX_ROWS, Target
from fusedvit.kernels.tuning_table import Entry, Table
from fusedvit.model.plan import EncoderPlan, Task, choose, heuristic, plan_for, tasks
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights

OPERATIONS = ("fc2", "fc1", "qkv", "proj")  # what takes longest first
MARGIN = 0.003  # of the tower, that another tile must save


@dataclass(frozen=True)
class Tabled:
    """A tower as planned by a table of its own."""

    table: Table
    priorities: tuple[int, int] = HIGH

    def plan(self, spec: VisionSpec, rows: int, dtype: torch.dtype, target: Target) -> EncoderPlan:
        return plan_for(spec, rows, dtype, target, self.table)


@dataclass(frozen=True)
class Decided:
    """One operation at one budget: what it runs on, and what a replay of the tower takes, in us, with that and with
    what was planned before."""

    task: Task
    config: Any
    us: float
    planned_us: float

    def entry(self, own: Any) -> Entry | None:
        """The table's; None where heuristics say the same, which is their `own`."""
        if self.config == own:
            return None
        took = {"tower_us": round(self.us, 1), "planned_tower_us": round(self.planned_us, 1)}
        return {**asdict(self.task.key), **Candidate.of(self.config).as_dict(), **took}


def grid_of(rows: int, merge: int) -> Grid:
    """An image of `rows` patches, as square as it can be."""
    merged = rows // merge**2
    high = next(h for h in range(math.isqrt(merged), 0, -1) if merged % h == 0)
    return [(1, high * merge, merged // high * merge)]


def tried(question: Question, planned: Any, dtype: torch.dtype, target: Target) -> list[Any]:
    """`planned` first, then the likely ones, each begun early, where that is allowed, and when it is its turn."""
    key = question.task.key
    likely = shortlist(question, candidates(question, dtype, target), dtype, target)
    begins = (True, False) if uses_pdl(key.rows, key.kind) else (False,)
    found = [planned]
    for config in (planned, *(candidate.config for candidate in likely)):
        found += [replace(config, pdl=early) for early in begins] if hasattr(config, "pdl") else [config]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Budget:
    """A tower at one row budget."""

    spec: VisionSpec
    weights: EncoderWeights
    rows: int
    seconds: float  # of timing for an operation

    def decide(self, table: Table) -> tuple[Table, list[Decided]]:
        """`table` with what was found put over it, and that: of every operation that another tile is better for."""
        dtype, target, found = beside.DTYPE, Target.of(beside.DEVICE), list[Decided]()
        named = {task.name: task for task in tasks(self.spec, self.rows, dtype)}
        for task in (named[name] for name in OPERATIONS):
            question, planned = Question(task, self.spec), choose(task, dtype, target, table)
            configs = tried(question, planned, dtype, target)
            times = functools.partial(self._times, task, table)
            best = self._best(question, configs, times(configs))
            if best == planned:
                continue
            before, after = times([planned, best])  # the least of many is too little: once more, these two
            if after <= (1 - MARGIN) * before:
                found.append(Decided(task, best, after, before))
                table = Table({task.key: best}).over(table)
        return table, found

    def _times(self, task: Task, table: Table, configs: Sequence[Any]) -> list[float]:
        """us of a replay with each of `configs` for `task`, and `table` for others; inf where it cannot be captured."""
        grid = grid_of(self.rows, self.spec.merge_size)
        ways = [Tabled(Table({task.key: config}).over(table)) for config in configs]
        lines = [Line(self.spec, self.weights, way, grid) for way in ways]
        with compiling_only():
            for line in lines:
                line.compile()
        replays = []
        for i, line in enumerate(lines):
            try:
                replays.append(Contender(str(i), line.capture(), "gpu"))
            except RuntimeError:
                continue  # the manager has warned of it
        times = in_turns(replays, beside.DEVICE, self.seconds)
        for line in lines:
            line.manager.release()
        return [1e3 * statistics.median(times.get(str(i), [math.inf])) for i in range(len(ways))]

    def _best(self, question: Question, configs: list[Any], us: list[float]) -> Any:
        """The fastest that is right, if it saves `MARGIN` of the first, which is planned; else that."""
        cases = functools.partial(cases_of, question, beside.DTYPE, beside.DEVICE)
        for config, taken in sorted(zip(configs, us, strict=True), key=lambda pair: pair[1]):
            if config == configs[0] or taken > (1 - MARGIN) * us[0]:
                break
            if not wrong_twice(config, cases(), cases):
                return config
        return configs[0]


def main() -> int:
    """Writes the table, a budget at a time, and prints what it changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=sorted(beside.towers.GEOMETRIES))
    parser.add_argument("--rows", type=int, nargs="*", default=[b for b in BUDGETS if b <= PDL_MAX_ROWS])
    parser.add_argument("--seconds", type=float, default=0.2, help="of timing for an operation at a budget")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after so long")
    parser.add_argument("--out", type=Path, required=True, help="the table, of which other entries stay")
    args = parser.parse_args()
    end, target = time.monotonic() + 60 * args.minutes, Target.of(beside.DEVICE)
    spec, weights = tower_of(args.tower)
    table, done = tuning_table.table_for(target), 0
    with torch.inference_mode():
        for rows in args.rows:
            if time.monotonic() > end:
                break
            table, found = Budget(spec, weights, rows, args.seconds).decide(table)
            entries = [d.entry(heuristic(d.task, beside.DTYPE, target)) for d in found]
            kept = [entry for entry in entries if entry is not None]
            passport = tuning_table.passport(target.name, __version__)
            tuning_table.write(args.out, passport, kept, [d.task.key for d in found])
            for d in found:
                print(json.dumps({"name": d.task.name, "rows": rows, "us": d.us, "planned_us": d.planned_us}))
            done += 1
    print(json.dumps({"budgets": done, "of": len(args.rows)}))
    return int(done < len(args.rows))


if __name__ == "__main__":
    sys.exit(main())
