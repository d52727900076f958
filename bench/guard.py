"""`python -m fusedvit.bench.guard`: every backend other than plain Triton once, as towers take it, against its twin.

In a process of its own, before a measurement: a backend that is wrong, crashes or does not end costs its own time only,
and the measurement does without it. What is compiled here is found in Triton's cache afterwards.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusedvit.bench.cases import attention_case
from fusedvit.bench.kernel_bench import Job, compile_jobs, linear_jobs, spec_of
from fusedvit.bench.workloads import Grid
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.tile_configs import Target, budget, note_failure
from fusedvit.model.plan import attention_task, choose

SMALLEST_ROWS, FRAME, LONGEST = 256, 784, 4096
TRUSTED = "triton"  # what is left where every other backend fails
PATIENCE_S = 10.0  # for a killed process


@dataclass(frozen=True)
class Guarded:
    """Why forms, by names like "linear/hopper", are not to be used; how many launches were right; whether all ran."""

    problems: dict[str, str]
    right: int
    complete: bool = True


def command(towers: Iterable[str], grids: Iterable[Grid]) -> list[str]:
    """What checks the forms that these workloads are run by."""
    rows = sorted({max(SMALLEST_ROWS, budget(sum(t * h * w for t, h, w in grid))) for grid in grids})
    return [sys.executable, "-m", "fusedvit.bench.guard", "--tower", *towers, "--rows", *map(str, rows)]


def guarded(words: list[str], seconds: float) -> Guarded:
    """Runs `words`, and what a backend has ended again without that backend, all for at most so long."""
    deadline, problems = time.monotonic() + seconds, dict[str, str]()
    while True:
        found = once([*words, "--without", *problems] if problems else words, deadline - time.monotonic())
        again = not found.complete and found.problems and time.monotonic() < deadline
        problems |= found.problems
        if not again:
            return Guarded(problems, found.right, found.complete)


def once(words: list[str], seconds: float) -> Guarded:
    """Runs `words` for at most so long; a backend that has begun and said nothing since is to blame for the end."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(words, stdout=log)
        try:
            end = f"ended its process with code {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = f"did not end within {seconds:.0f} s"
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may take its time over a hang
                process.wait(PATIENCE_S)
        log.seek(0)
        said = log.read()
    return _read(said, end)


def _read(said: str, end: str) -> Guarded:
    problems: dict[str, str] = {}
    right, open_form, complete = 0, "", False
    for line in said.splitlines():
        record = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
        open_form = record.get("begins", "" if record else open_form)
        if record.get("problem"):
            problems.setdefault(record["backend"], record["problem"])
        right += record.get("problem") == ""
        complete |= record.get("done", False)
    if open_form:
        problems[open_form] = end
    return Guarded(problems, right, complete)


def jobs(name: str, rows: Iterable[int], dtype: torch.dtype, device: torch.device) -> Iterator[Job]:
    """Every operation of a tower at every row budget; attention over frames where one sequence would be too long."""
    spec = spec_of(name)
    for size in rows:
        yield from linear_jobs(name, size, dtype, device)
        lengths = (size,) if size <= LONGEST else (FRAME,) * (size // FRAME)
        task = attention_task(spec, size, dtype, lengths[0])

        def make(lengths: tuple[int, ...] = lengths) -> Any:
            return attention_case(spec.num_heads, spec.head_dim, lengths, dtype, device, False)

        yield Job(name, task, f"{len(lengths)} x {lengths[0]}", make)


def check(job: Job, dtype: torch.dtype, device: torch.device, seen: set[Any]) -> Iterator[dict[str, str]]:
    """Records of one job, the first before its launch; none where plain Triton runs it, or its like was checked."""
    target = Target.of(device)
    config = choose(job.task, dtype, target, tuning_table.table_for(target))
    backend, like = backends.backend_of(config), (job.task.key.kind, job.task.key.n, job.task.key.k, config)
    if backend.name == TRUSTED or like in seen:
        return
    seen.add(like)
    name = f"{backend.op}/{backend.name}"
    yield {"begins": name, "of": f"{job.tower} {job.task.name} {job.shape}"}
    try:
        problem = job.make().check(config).reason
    except backends.BackendFailed as error:
        problem = str(error)
    yield {"backend": name, "problem": problem}


def main(argv: list[str] | None = None) -> int:
    """A line of JSON before and after each launch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tower", nargs="+", required=True)
    parser.add_argument("--rows", nargs="+", type=int, required=True)
    parser.add_argument("--without", nargs="*", default=[], metavar="FORM")
    args = parser.parse_args(argv)
    for backend in args.without:
        note_failure(backend, "found wanting before")
    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16
    every = [job for name in args.tower for job in jobs(name, args.rows, dtype, device)]
    if device.type == "cuda":
        compile_jobs(every, dtype, device)
    seen: set[Any] = set()
    with torch.inference_mode():
        for job in every:
            for record in check(job, dtype, device, seen):
                print(json.dumps(record), flush=True)
    print(json.dumps({"done": True}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
