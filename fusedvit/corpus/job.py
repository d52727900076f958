"""A corpus embedded into shards, on one GPU in this process or on several GPUs with a process each.

The committed shards (`shards.committed`) are a job's only state: a killed job continues when it is started again.
"""

import contextlib
import functools
import json
import os
import queue  # as in data_parallel.py
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from fusedvit.checkpoint import default_dtype, device_or_default
from fusedvit.children import interpreter, search_path
from fusedvit.corpus import origin, shards
from fusedvit.corpus.inputs import Input, collect, digest, sources
from fusedvit.corpus.loading import OUTPUTS
from fusedvit.corpus.shards import Failed
from fusedvit.errors import InputError, shown
from fusedvit.pixels.ahead import started_ahead

if TYPE_CHECKING:
    from fusedvit.corpus.embedder import Embedder  # it imports this module

VERSION = 4  # of the record `Job.document`
LISTED = 1000  # the most failed inputs that a run lists
UNWRITTEN = 2  # shards that may wait to be written
WORKER = "fusedvit.corpus.worker"


def check_count(name: str, value: Any) -> None:
    """Raises InputError unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}: a whole number of at least 1 expected, got {shown(value)}")


def _as_text(name: Any) -> Any:
    return str(name) if isinstance(name, Path) else name


@dataclass(frozen=True)
class Job:
    """What is embedded, how, and where to.

    Attributes:
        model: a checkpoint: a folder or a hub name.
        given: folders, files, lists and tables, as `inputs.collect` takes them.
        out: the folder of the shards.
        output, deepstack: as for `Embedder`.
        shard_size: inputs per shard.
        device: the device of a job in this process; None means the GPU if there is one.

    Names and paths may also be `Path`s.
    """

    model: str
    given: tuple[str, ...]
    out: str
    output: str = "mean"
    deepstack: bool = False
    shard_size: int = 512
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "out"):  # job.json and a worker's command line hold text only
            object.__setattr__(self, name, _as_text(getattr(self, name)))
        if isinstance(self.given, list | tuple):
            object.__setattr__(self, "given", tuple(map(_as_text, self.given)))

    def check(self) -> None:
        """Raises InputError for an invalid option."""
        if not isinstance(self.given, tuple):
            raise InputError(f"given: several folders, files, lists or tables expected, got {shown(self.given)}")
        for name, values in (("model", (self.model,)), ("given", self.given), ("out", (self.out,))):
            for value in values:
                if not isinstance(value, str) or not value:
                    raise InputError(f"{name}: a path or name expected, got {shown(value)}")
        try:
            self.out.encode()
        except UnicodeEncodeError:  # Python holds bytes that are not UTF-8 as surrogates
            expected = "a folder whose path is UTF-8 expected, as pyarrow and safetensors open no other"
            raise InputError(f"out: {expected}, got {self.out}") from None
        if self.output not in OUTPUTS:
            raise InputError(f"output: one of {', '.join(OUTPUTS)} expected, got {shown(self.output)}")
        if not isinstance(self.deepstack, bool):
            raise InputError(f"deepstack: True or False expected, got {shown(self.deepstack)}")
        check_count("shard_size", self.shard_size)

    def document(self, inputs: Sequence[Input], dtype: torch.dtype) -> dict[str, Any]:
        """The record that a run must match to continue this job: everything that determines a shard's content.

        `dtype` is the tower's dtype.

        Raises:
            InputError: the checkpoint cannot be read.
        """
        kept = {name: getattr(self, name) for name in ("model", "output", "deepstack", "shard_size")}
        return kept | {
            "version": VERSION,
            "inputs": len(inputs),
            "inputs_digest": digest(inputs),
            "tables_digest": origin.tables(inputs),
            "files_digest": origin.files(inputs),
            "given": origin.given(self.given),
            "working_directory": origin.working_directory(self.given),
            "dtype": str(dtype).removeprefix("torch."),
            **origin.checkpoint(self.model),
        }

    def dtype(self) -> torch.dtype:
        """The tower's dtype, in a process that sees the job's device."""
        return default_dtype(device_or_default(self.device))


@dataclass(frozen=True)
class ShardDone:
    """A committed shard: its number, counts of its content, and the seconds since its worker began.

    `tower_seconds` is the GPU's time in the tower, `waited_seconds` the time in which the tower waited for pixels.
    """

    number: int
    inputs: int
    errors: int
    patches: float
    seconds: float
    tower_seconds: float
    waited_seconds: float
    padding: float


@dataclass(frozen=True)
class JobResult:
    """The result of a run.

    Attributes:
        shards: the shards that this run has committed.
        others: counts of "shards", "inputs" and "errors" that other runs have committed, before or meanwhile.
        left_out: counts of the folders' files that are no inputs, by suffix.
        failed: the first inputs with an error, of any run.
    """

    shards: list[ShardDone]
    others: dict[str, int]
    left_out: dict[str, int]
    failed: list[Failed]


def run(
    job: Job,
    gpus: Sequence[int],
    build: "Callable[[Job], Embedder]",
    done: Callable[[ShardDone, int], None],
    left_out: Counter[str] | None = None,
) -> JobResult:
    """Embeds the shards that are not committed yet, the longest first.

    Args:
        gpus: one process runs on each of these GPUs; if empty, this process runs on `job.device`.
        build: builds the embedder of a job in this process.
        done: called with each committed shard and the job's number of shards.
        left_out: gets the counts of `inputs.collect`, even if the job fails later.

    Raises:
        InputError, UnsupportedModel: see `inputs.collect`, `shards.start`, `shards.commit` and `Embedder`. Committed
            shards stay.
    """
    left_out = Counter() if left_out is None else left_out
    found: list[ShardDone] = []

    def committed(shard: ShardDone) -> None:
        found.append(shard)
        done(shard, len(parts))

    with begun(job, job.dtype(), left_out) as (parts, todo):
        if todo and gpus:
            _run_on(job, gpus[: len(todo)], todo, committed)
        elif todo:
            work(build(job), parts, Path(job.out), iter(todo), committed)
    numbers, mine = set(range(len(parts))), {shard.number for shard in found}
    counts, failed = totals(Path(job.out), numbers - mine), shards.failed(Path(job.out), numbers, LISTED)
    return JobResult(found, counts, dict(left_out), failed)


@contextlib.contextmanager
def begun(
    job: Job, dtype: torch.dtype, left_out: Counter[str] | None = None
) -> Iterator[tuple[list[Sequence[Input]], list[int]]]:
    """A context for the work on a job: gives the inputs of each shard, and the numbers of the shards to do, the longest
    first. It creates or checks the folder and marks it as in use. If the job fails without a committed shard, the
    folder is free for another job.

    `dtype` is the dtype that the tower will have; `left_out` as for `inputs.collect`.

    Raises:
        InputError: see `Job.check`, `inputs.collect`, `shards.start` and `shards.in_use`; or a committed shard cannot
            be read.
    """
    out = Path(job.out)
    job.check()
    inputs = collect(job.given, left_out)
    parts, document = shards_of(inputs, job.shard_size), job.document(inputs, dtype)
    with contextlib.nullcontext() if shards.holds_job(out) else _taken_back(out, document):
        todo = _begin(out, parts, document)
        with shards.in_use(out) if todo else contextlib.nullcontext():
            yield parts, todo


def totals(out: Path, numbers: Iterable[int] | None = None) -> dict[str, int]:
    """Counts of "shards", "inputs" and "errors" that any run has committed, among `numbers` or in all."""
    there = shards.committed(out)
    counts = [shards.count(out, number) for number in sorted(there if numbers is None else there & set(numbers))]
    return {"shards": len(counts), "inputs": sum(n for n, _ in counts), "errors": sum(n for _, n in counts)}


def _begin(out: Path, parts: Sequence[Sequence[Input]], document: dict[str, Any]) -> list[int]:
    """Creates or checks the folder; returns the shards to do, the longest first."""
    shards.start(out, document)
    there = shards.committed(out) & set(range(len(parts)))
    for number in sorted(there):
        shards.check_committed(out, number, [each.id for each in parts[number]])
    todo = set(range(len(parts))) - there
    return sorted(todo, key=lambda n: (-_bytes_of(parts[n]), n))


@contextlib.contextmanager
def _taken_back(out: Path, document: dict[str, Any]) -> Iterator[None]:
    """A context that removes a new job's record if it fails before a shard is committed: its model does not load, or
    the user interrupts it."""
    try:
        yield
    except BaseException:
        shards.abandon(out, document)
        raise


def shards_of(inputs: Sequence[Input], size: int) -> list[Sequence[Input]]:
    """The inputs of each shard, determined by their order alone."""
    return [inputs[start : start + size] for start in range(0, len(inputs), size)]


def work(
    embedder: "Embedder",
    parts: Sequence[Sequence[Input]],
    out: Path,
    numbers: Iterable[int],
    committed: Callable[[ShardDone], None],
) -> None:
    """Embeds the shards `numbers` as one stream, and commits each while the next are computed.

    `numbers` is read ahead of the results, by as many inputs as are decoded ahead. `committed` is called with the
    shards that this call has committed, not with those that another process committed first.

    Raises:
        InputError: a table cannot be read, or a shard cannot be written; earlier shards are committed.
    """
    taken: list[int] = []

    def ahead() -> Iterator[Any]:
        for number in numbers:
            taken.append(number)
            yield from sources(parts[number])

    def write(number: int, found: list[shards.Embedded], counted: ShardDone) -> None:
        if shards.commit(out, number, found, embedder.width, embedder.dtype):  # else another process was first
            committed(counted)

    def writes() -> Iterator[Callable[[], None]]:
        start, before = time.perf_counter(), embedder.counters()
        results = embedder.embed(ahead())
        for position, first in enumerate(results):
            number = taken[position]
            rest = islice(results, len(parts[number]) - 1)
            found = [replace(each, id=given.id) for each, given in zip((first, *rest), parts[number], strict=True)]
            counters = embedder.counters()
            counted = _counted(number, found, before, counters, time.perf_counter() - start)
            before = counters
            yield functools.partial(write, number, found, counted)

    with ThreadPoolExecutor(1, "fusedvit-shards") as pool:
        for task in started_ahead(pool, writes(), UNWRITTEN):
            task.result()


def _counted(
    number: int, found: Sequence[shards.Embedded], before: dict[str, float], now: dict[str, float], seconds: float
) -> ShardDone:
    """The counters since the previous shard. A call of the tower may serve several shards, and counts for one."""
    spent = {name: now[name] - before[name] for name in ("patches", "tower_seconds", "waited_seconds")}
    errors = sum(bool(each.error) for each in found)
    return ShardDone(number, len(found), errors, seconds=seconds, padding=now["padding"], **spent)


def _bytes_of(part: Sequence[Input]) -> int:
    """The size of a shard's files, a rough measure of its time. A table's row counts as 1."""
    return sum(each.path.stat().st_size if each.row < 0 and os.path.isfile(each.path) else 1 for each in part)


# ── several processes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _run_on(job: Job, gpus: Sequence[int], todo: Sequence[int], committed: Callable[[ShardDone], None]) -> None:
    """Runs one process per GPU; each asks for its next shard, and ends when there is none.

    If a process dies, its shard is not committed; the job fails after the other processes have done the rest.
    """
    said: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    workers = [_started(job, gpu) for gpu in gpus]
    waiting, failures, running, dismissed = list(todo), [], len(workers), set[int]()
    try:
        for i, worker in enumerate(workers):
            Thread(target=_listen, args=(i, worker, said), daemon=True).start()
        while running:
            i, message = said.get()
            if "done" in message:
                committed(ShardDone(**message["done"]))
            elif "next" in message:
                number = waiting.pop(0) if waiting else -1
                dismissed |= {i} if number < 0 else set()
                _tell(workers[i], number)
            else:
                running -= 1
                told = i in dismissed  # where SIGCHLD is ignored its exit code is unknown
                if workers[i].wait() or "error" in message or not told:
                    failures.append(message.get("error") or f"the process on GPU {gpus[i]} died")
    finally:
        for worker in workers:
            _end(worker)
        shards.remove_unfinished(Path(job.out))
    if failures:
        raise InputError(failures[0])


def _started(job: Job, gpu: int) -> "subprocess.Popen[str]":
    environment = os.environ | search_path() | {"CUDA_VISIBLE_DEVICES": _visible(gpu)}
    command = [interpreter(), "-m", WORKER, json.dumps(asdict(job))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _visible(gpu: int) -> str:
    """The `CUDA_VISIBLE_DEVICES` of a child for this process's GPU `gpu`."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[gpu] if names else str(gpu)


def _tell(worker: "subprocess.Popen[str]", number: int) -> None:
    assert worker.stdin is not None
    try:
        worker.stdin.write(f"{number}\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return  # the worker died; `_listen` notices the end of its output


def _end(worker: "subprocess.Popen[str]") -> None:
    assert worker.stdin is not None
    worker.kill()
    worker.wait()
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.close()


def _listen(i: int, worker: "subprocess.Popen[str]", said: "queue.SimpleQueue[tuple[int, dict[str, Any]]]") -> None:
    """Passes on the messages of worker `i`; at the end of its output a last one, with its error if it sent one."""
    ended: dict[str, Any] = {}
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            message = json.loads(line)
            if "error" in message:
                ended = message
            else:
                said.put((i, message))
    said.put((i, ended))
