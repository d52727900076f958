"""`fusedvit embed`."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from fusedvit.cli.console import Outcome, new_console, progress_bar
from fusedvit.cli.towers import device_of
from fusedvit.corpus import job as corpus_job
from fusedvit.corpus.embedder import embedder_of
from fusedvit.corpus.inputs import in_words
from fusedvit.corpus.job import LISTED, Job, JobResult, ShardDone
from fusedvit.corpus.shards import INDEX, Failed
from fusedvit.errors import InputError

SHOWN = 5  # failed inputs


def run(
    model: str,
    given: Sequence[str],
    output: str = "mean",
    deepstack: bool = False,
    shard_size: int = 512,
    gpus: str | None = None,
    device: str | None = None,
    json: Any = None,
) -> Outcome:
    """Embeds a corpus; passes if every input has an embedding, from this run or another.

    The last of `given` is the output folder.
    """
    for package in ("PIL", "pyarrow"):
        import_module(package)  # if it is missing, fail before the work
    *inputs, out = given
    if not inputs or not all(given):
        got = " ".join(map(repr, (model, *given)))
        raise InputError(f"embed: MODEL, one INPUT or more, and OUT expected, got {got}")
    job = Job(model, tuple(inputs), out, output, deepstack, shard_size, device)
    if device is not None:
        device_of(device)
    start, left_out = time.perf_counter(), Counter[str]()
    with _said_at_the_end(left_out), progress_bar() as step:
        workers = _gpus(gpus, device)
        so_far: list[ShardDone] = []

        def done(shard: ShardDone, total: int) -> None:
            so_far.append(shard)
            figures = _figures(_rates(so_far, max(1, len(workers))))
            shown = ", ".join(f"{name} {figure}" for name, figure in figures.items())
            step(f"shard {shard.number}: {shard.inputs} inputs, {shard.errors} errors; {shown}", len(so_far), total)

        ran = corpus_job.run(job, workers, embedder_of, done, left_out)
    summary = _summary(ran, time.perf_counter() - start) | _rates(ran.shards, max(1, len(workers)))
    _show(summary, Path(out))
    _show_failed(ran.failed, summary["errors"])
    document = {"job": asdict(job), "summary": summary, "shards": [asdict(s) for s in ran.shards]}
    return Outcome(document | {"failed": [each._asdict() for each in ran.failed]}, not summary["errors"])


def _show_failed(failed: Sequence[Failed], errors: int) -> None:
    """Prints the first failed inputs, one per line, to standard error."""
    console = new_console(stderr=True)
    lines = [_named_once(each.id, each.error) for each in failed[:SHOWN]]
    if errors > len(lines):
        lines.append(f"and {errors - len(lines)} more: --json has {LISTED}, column `error` of each {INDEX} has all")
    for line in lines:
        console.out("".join(c if c.isprintable() else "?" for c in line), highlight=False)


def _named_once(name: str, error: str) -> str:
    """An input's name and its error, without the file's path if the error begins with it."""
    before, found, rest = error.partition(f"{Path(name).name}: ")
    is_path = found and (not before or before.endswith(os.sep))
    return f"{name}: {rest if is_path else error}"


@contextlib.contextmanager
def _said_at_the_end(left_out: Counter[str]) -> Iterator[None]:
    """Prints the counts of the folders' files that were no inputs, however the job ends."""
    try:
        yield
    finally:
        if left_out:
            new_console(stderr=True).out(in_words(left_out), highlight=False)


def _gpus(named: str | None, device: str | None) -> list[int]:
    """GPUs that get one process each; if none, this process embeds."""
    if named is None:
        return []
    if device is not None:
        raise InputError("--gpus and --device: give one of them")
    count = torch.cuda.device_count()
    if not count:
        raise InputError("--gpus: torch sees no GPU here; without --gpus a job runs on the CPU")
    numbers = range(count) if named == "all" else [int(n) if n.isdecimal() else -1 for n in named.split(",")]
    if not numbers or not set(numbers) <= set(range(count)):
        raise InputError(f"--gpus: 'all' or numbers below {count} such as 0,1 expected, got {named!r}")
    return list(dict.fromkeys(numbers))


def _summary(ran: JobResult, wall: float) -> dict[str, Any]:
    """Counts of the whole job so far; `others` is the part that other runs have committed."""
    return {
        "shards": len(ran.shards) + ran.others["shards"],
        "inputs": sum(s.inputs for s in ran.shards) + ran.others["inputs"],
        "errors": sum(s.errors for s in ran.shards) + ran.others["errors"],
        "others": ran.others,
        "left_out": ran.left_out,
        "wall_seconds": wall,
    }


def _rates(found: Sequence[ShardDone], workers: int) -> dict[str, float]:
    """Rates of this run since its workers were ready, and shares of the workers' total time."""
    inputs, patches = sum(s.inputs for s in found), sum(s.patches for s in found)
    seconds = max((s.seconds for s in found), default=0.0)  # since the workers were ready
    return {
        "seconds": seconds,
        "images_per_second": inputs / seconds if seconds else 0.0,
        "patches_per_second": patches / seconds if seconds else 0.0,
        "gpu_busy": sum(s.tower_seconds for s in found) / seconds / workers if seconds else 0.0,
        "waited_for_pixels": sum(s.waited_seconds for s in found) / seconds / workers if seconds else 0.0,
        "padding": max((s.padding for s in found), default=0.0),
    }


def _show(summary: dict[str, Any], out: Path) -> None:
    console = new_console()
    if summary["shards"] == summary["others"]["shards"]:
        console.out(f"nothing left to do: every shard is in {out}", highlight=False)
        if summary["errors"]:
            console.print(f"{summary['errors']} of {summary['inputs']} inputs are errors", highlight=False)
        return
    table = Table(title=f"embedded into {escape(str(out))}", title_justify="left")
    row = {"inputs": str(summary["inputs"]), "errors": str(summary["errors"])} | _figures(summary)
    for column in row:
        table.add_column(column, justify="right")
    table.add_row(*row.values())
    console.print(table)
    if summary["others"]["shards"]:
        others = "{shards} shards, {inputs} inputs and {errors} errors".format(**summary["others"])
        console.print(f"of these, {others} were committed by other runs", highlight=False)


def _figures(rates: dict[str, Any]) -> dict[str, str]:
    """Rates and shares, as they are shown."""
    return {
        "images/s": f"{rates['images_per_second']:.0f}",
        "patches/s": f"{rates['patches_per_second']:.0f}",
        "tower busy": f"{rates['gpu_busy']:.0%}",
        "waited for pixels": f"{rates['waited_for_pixels']:.0%}",
        "padding": f"{rates['padding']:.0%}",
    }
