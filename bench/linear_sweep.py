"""`python -m fusedvit.bench.linear_sweep`: what every tile of the Hopper GEMMs takes, beside cuBLAS and plain Triton.

What their heuristics are fitted to. A line of JSON per operation, row budget and content; candidates are compiled and
compared with the twin in processes of their own first. Plain launches come first: what hangs costs what follows only.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench.cases import linear_case
from fusedvit.bench.kernel_bench import spec_of
from fusedvit.bench.prune import in_processes
from fusedvit.bench.questions import Candidate, Question, compilation, contents_of
from fusedvit.bench.timing import Contender, captured, in_turns
from fusedvit.kernels import backends, tile_configs
from fusedvit.kernels.hopper.gemm_configs import hopper_gemm_candidates, hopper_gemm_config
from fusedvit.kernels.hopper.gemm_swap_ab_configs import hopper_swap_ab_candidates, mean_us
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.plan import tasks

ROWS = (256, 896, 1536, 4096, 7168, 16384)
NEAR = 1.3  # times the least of the transposed backend by its costs
Pair = tuple[Question, Candidate]


def questions(tower: str, rows: tuple[int, ...], names: tuple[str, ...]) -> list[Question]:
    """Every linear layer of the tower at every budget; `names`: only these."""
    spec = spec_of(tower)
    found = [task for n in rows for task in tasks(spec, n, torch.bfloat16) if task.key.op == backends.LINEAR]
    return [Question(task, spec) for task in found if not names or task.name in names]


def variants(question: Question, target: Target, transposed: bool = False) -> list[Any]:
    """Every tile, begun after the previous launch and before its end; or the likely tiles of the transposed backend, as
    they would be chosen, and the best of the other."""
    key = question.task.key
    shape = key.rows, key.n, key.k, target, key.kind
    if not transposed:
        found = hopper_gemm_candidates(*shape)
        return [replace(config, pdl=pdl) for config in found for pdl in (False, True)]
    likely = {config: mean_us(config, *shape) for config in hopper_swap_ab_candidates(*shape)}
    best = hopper_gemm_config(key.rows, key.n, key.k, torch.bfloat16, target, key.kind)
    near = [config for config, us in likely.items() if us < NEAR * min(likely.values())]
    return near if best is None else [best, *near]


def checked(asked: list[Question], jobs: int, device: torch.device, seconds: float, transposed: bool) -> dict[str, str]:
    """What is wrong with each distinct kernel, "" if nothing, of those that there was time for."""
    target, todo = Target.of(device), dict[str, Pair]()
    for question in sorted(asked, key=lambda q: -q.task.key.rows):  # a split product has room for its budget alone
        for config in variants(question, target, transposed):
            candidate = Candidate.of(config)
            todo.setdefault(compilation(question, candidate), (question, candidate))
    pairs = sorted(todo.items(), key=lambda item: item[1][1].config.pdl)
    end, problems = time.monotonic() + seconds, dict[str, str]()
    prune = in_processes(jobs, torch.bfloat16, device)
    for index, problem in prune([pair for _, pair in pairs]):
        problems[pairs[index][0]] = problem
        if time.monotonic() > end:
            break
    print(f"{len(problems)} of {len(pairs)} kernels checked", file=sys.stderr)
    return problems


def timed(question: Question, found: list[Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """A record for each content of the budget, in us."""
    key, dtype = question.task.key, torch.bfloat16
    plain = tile_configs.linear_config(
        key.rows, key.n, key.k, dtype, Target.of(device), max_block_n=question.task.widest
    )
    case = linear_case(question.task, question.spec, dtype, device, key.rows)
    assert case.fill is not None
    replays = [captured(functools.partial(case.run, c), case.sets, device) for c in (plain, *found)]
    for rows in contents_of(key.rows):
        case.fill(rows)
        contenders = [Contender(str(i), replay, "gpu") for i, replay in enumerate(replays)]
        peer = linear_case(question.task, question.spec, dtype, device, rows)
        contenders += [Contender(n, captured(run, peer.sets, device), "gpu") for n, run in peer.peers.items()]
        sets = [case.sets] * len(replays) + [peer.sets] * len(peer.peers)
        times = in_turns(contenders, device, seconds=0).values()
        us = [round(1e3 * statistics.median(t) / n, 2) for t, n in zip(times, sets, strict=True)]
        ours = [
            {"backend": backends.backend_of(c).name, **asdict(c), "us": t} for c, t in zip(found, us[1:], strict=False)
        ]
        yield {
            "name": question.task.name, **asdict(key), "content": rows, "triton_us": us[0],
            "peers_us": dict(zip(peer.peers, us[len(replays) :], strict=True)), "ours": ours,
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Writes the records to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tower", default="Qwen3-VL-8B")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="row budgets, in patches")
    parser.add_argument("--op", nargs="*", default=[], help="patch, qkv, …; all if left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=150.0, help="for all of it, about")
    parser.add_argument("--transposed", action="store_true", help="the transposed backend's likely tiles")
    parser.add_argument("--no-overlap", action="store_true", help="leave out launches that begin early")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    device, end = torch.device("cuda"), time.monotonic() + args.seconds
    asked = questions(args.tower, tuple(args.rows), tuple(args.op))
    problems = checked(asked, args.jobs, device, 0.6 * args.seconds, args.transposed)
    with args.json.open("w", encoding="utf-8") as file:
        bad = {name: problem for name, problem in problems.items() if problem}
        file.write(json.dumps({"gpu": torch.cuda.get_device_name(device), "problems": bad}) + "\n")
        passes: list[set[bool]] = [{False}] if args.no_overlap else [{False}, {True}]
        for begun_early in [{False, True}] if args.transposed else passes:
            for question in asked:
                if time.monotonic() > end:
                    break
                tiles = [c for c in variants(question, Target.of(device), args.transposed) if c.pdl in begun_early]
                good = [c for c in tiles if problems.get(compilation(question, Candidate.of(c))) == ""]
                for record in timed(question, good, device):
                    file.write(json.dumps(record) + "\n")
                file.flush()
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
