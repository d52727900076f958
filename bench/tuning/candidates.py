"""The tuner's tasks and their order, the candidate configurations of each, and the checks of these.

tasks      : every operation of the chosen towers at every row budget, each once
order      : blocks of the most used towers at the usual budgets, their mergers, other towers, other budgets
candidates : the heuristic's choice, then the proposals of every available backend
shortlist  : the heuristic's choice, the few that the cost model ranks first, plain Triton's choice
checks     : compiled and run once, in other processes, as a candidate may crash or hang; the process that times it
             finds the kernel in Triton's cache
"""

import contextlib
import fcntl
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench.ops import Case, attention_case, linear_case, supported, wrong_twice
from fusedvit.bench.workloads import MERGED
from fusedvit.kernels import backends
from fusedvit.kernels.backends import Key
from fusedvit.kernels.codegen_checks import Compiled, compile_in_place
from fusedvit.kernels.hopper import attention_configs
from fusedvit.kernels.hopper.attention_configs import HopperAttentionConfig
from fusedvit.kernels.hopper.gemm_configs import HopperGemmConfig, cost_model
from fusedvit.kernels.hopper.gemm_swap_ab_configs import HopperSwapABConfig
from fusedvit.kernels.tile_configs import Target, ladder
from fusedvit.model.plan import Task, as_launched, heuristic, tasks
from fusedvit.model.spec import VisionSpec

BUDGETS = tuple(ladder(256, 65536))  # patch tokens: the graphs' budgets from 256 on
USUAL = range(256, 16384 + 1)  # patch tokens
AT_LAUNCH = ("max_programs",)  # fields of a configuration that change no code
BEST, BEST_OF_LONG = 3, 2  # how many the cost model selects; fewer above the usual budgets, which take long to time
PLAIN, PLAIN_ROWS = "triton", 2048  # with more rows plain Triton takes 1.1 to 3 x as long as other backends


@dataclass(frozen=True)
class TuningTask:
    """An operation at a row budget, and a tower that has it."""

    task: Task
    spec: VisionSpec

    def describe(self) -> str:
        key = self.task.key
        return f"{self.task.name} {key.kind} {key.n} x {key.k}, {key.rows} rows, {key.dtype}"


def tuning_tasks(specs: Iterable[VisionSpec], budgets: Sequence[int], dtype: torch.dtype) -> list[TuningTask]:
    """Every operation once, except those without a case in `bench.ops`: the heuristics decide these."""
    found: dict[Key, TuningTask] = {}
    for spec in specs:
        for rows in budgets:
            for task in tasks(spec, rows, dtype):
                if supported(task):
                    found.setdefault(task.key, TuningTask(task, spec))
    return list(found.values())


def in_waves(items: Iterable[TuningTask], most_used: Collection[VisionSpec]) -> list[list[TuningTask]]:
    """The most used towers at the usual budgets, then the other towers, then other budgets.

    Within each, blocks come before mergers, and powers of two before the budgets between them.
    """

    def rank(item: TuningTask) -> tuple[int, bool, bool]:
        merger = item.task.name.startswith(MERGED)
        rows = item.task.key.rows * (item.spec.merge_unit if merger else 1)
        wave = 2 if rows not in USUAL else int(item.spec not in most_used)
        return wave, merger and wave < 2, rows & (rows - 1) > 0

    return [list(wave) for _, wave in groupby(sorted(items, key=rank), key=lambda item: rank(item)[0])]


def candidates(item: TuningTask, dtype: torch.dtype, target: Target) -> list[Any]:
    """The heuristic's choice first, then every backend's proposals, each once."""
    task = item.task
    configs = [heuristic(task, dtype, target)]
    for backend in backends.available_backends(task.key.op, target, dtype):
        proposed = backend.candidates(task.key, dtype, target, task.widest)
        configs += [c for c in proposed if not backend.wrong(task.key, c, target, dtype)]
    return list(dict.fromkeys(configs))


def shortlist(item: TuningTask, proposed: Sequence[Any], dtype: torch.dtype, target: Target) -> list[Any]:
    """The candidates of `proposed` that are worth timing; all if plain Triton is the only backend."""
    key, own = item.task.key, proposed[0]
    others = [config for config in proposed[1:] if backends.backend_of(config).name != PLAIN]
    if not others:
        return list(proposed)
    best = BEST if key.rows <= USUAL.stop else BEST_OF_LONG
    chosen = [own, *sorted(others, key=lambda config: predicted_us(key, config, target))[:best]]
    if key.rows <= PLAIN_ROWS or backends.backend_of(own).name == PLAIN:
        plain = backends.backend_named(key.op, PLAIN)
        assert plain is not None, "every operation has a plain backend"
        chosen.append(plain.heuristic(key, dtype, target, item.task.widest))
    return list(dict.fromkeys(chosen))


def predicted_us(key: Key, config: Any, target: Target) -> float:
    """The time by the heuristics' own cost model, over the contents by which they judge a budget; 0 for configurations
    that the model does not know, so that they are timed."""
    if isinstance(config, HopperSwapABConfig | HopperGemmConfig):
        return cost_model(config, key.n, key.k, target, key.kind)(key.rows)
    if not isinstance(config, HopperAttentionConfig):
        return 0.0
    if key.k not in attention_configs.COSTS.get(config.consumers, {}):
        return 0.0
    held = attention_configs.contents(key.rows, key.kind)
    return sum(attention_configs.microseconds(config, *content, key.n, key.k, target.num_sms) for content in held)


def compilation(item: TuningTask, config: Any) -> str:
    """The name of a compilation. It does not depend on the rows, and windows and frames share one attention kernel."""
    key = item.task.key
    kind = "" if key.op == backends.ATTENTION else f" {key.kind}"
    compiled = {name: value for name, value in asdict(config).items() if name not in AT_LAUNCH}
    return f"{key.op}{kind} {key.n} x {key.k} {key.dtype} {backends.backend_of(config).name} {compiled}"


def kernel_of(item: TuningTask, config: Any) -> str:
    """`compilation` of the configuration that a plan launches if `config` is chosen for `item`."""
    return compilation(item, as_launched(item.spec, item.task.name, item.task.key.rows, config))


def cases_of(item: TuningTask, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """The cases by which a budget is timed: a linear case for several row counts, or attention over several layouts."""
    key = item.task.key
    if key.op == backends.LINEAR:
        return [linear_case(item.task, item.spec, dtype, device, key.rows)]
    layouts = [(length,) * frames for frames, length in attention_configs.contents(key.rows, key.kind)]
    return [attention_case(key.n, key.k, lengths, dtype, device, fa3=False) for lengths in layouts]


# Checks

CHECKED_ROWS, CHECKED_LENGTHS = 300, (196, 104)  # not multiples of a tile
PATIENCE_S = 60.0  # the most for one pair, a process's start included
LOCK_S = 20.0  # the most that a process waits for the GPU, as the process that holds it may hang

Pair = tuple[TuningTask, Any]  # and a configuration
Found = Generator[tuple[int, str], None, None]  # (index, problem or ""), as they are found
Check = Callable[[Sequence[Pair]], Found]


def small_case(item: TuningTask, dtype: torch.dtype, device: torch.device) -> Case:
    """A case of the operation at a very small size."""
    key = item.task.key
    if key.op == backends.LINEAR:
        rows = max(1, min(CHECKED_ROWS, key.rows - 1))  # split-K has scratch for its budget only
        return linear_case(item.task, item.spec, dtype, device, rows, sets=1)
    return attention_case(key.n, key.k, CHECKED_LENGTHS, dtype, device, fa3=False)


def problem_of(
    pair: Pair,
    dtype: torch.dtype,
    device: torch.device,
    known: dict[object, Compiled] | None = None,
    lock: Path | None = None,
) -> str:
    """Why the candidate may not be used, or "". Without a GPU only its output is checked.

    Args:
        known: see `compile_in_place`.
        lock: a file that is locked while the candidate runs.
    """
    item, config = pair
    case = small_case(item, dtype, device)
    if device.type == "cuda":
        capability, known = Target.of(device).capability, {} if known is None else known
        for compiled in compile_in_place(lambda: case.run(config, 0), capability, known):
            if compiled.problems:
                return "; ".join(compiled.problems)
    with contextlib.nullcontext() if lock is None else locked(lock):
        return wrong_twice(config, (case,), lambda: (small_case(item, dtype, device),))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on the file at `path`; continues without it after `LOCK_S`. A process that dies releases its lock.

    The lock makes candidates run one at a time: their outputs are checked, not how they share a GPU.
    """
    end = time.monotonic() + LOCK_S
    with path.open("wb") as file:
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield


def here(dtype: torch.dtype, device: torch.device) -> Check:
    """Checks in this process, one after another."""

    def check(pairs: Sequence[Pair]) -> Found:
        for i, pair in enumerate(pairs):
            yield i, problem_of(pair, dtype, device)

    return check


def in_processes(jobs: int, dtype: torch.dtype, device: torch.device) -> Check:
    """Checks in `jobs` processes at a time; a process that dies or hangs fails only its own pair."""

    def check(pairs: Sequence[Pair]) -> Found:
        todo, folder = list(range(len(pairs))), tempfile.TemporaryDirectory()
        arguments = (dtype, device, Path(folder.name) / "lock")
        workers = [_Worker.start(arguments) for _ in range(min(jobs, len(pairs)))]
        try:
            while todo or any(worker.pair is not None for worker in workers):
                for i, worker in enumerate(workers):
                    if worker.pair is None and todo:
                        worker.give(todo[0], pairs[todo.pop(0)])
                    said = worker.result()
                    if said is not None and worker.pair is not None:
                        yield worker.pair, said
                        workers[i] = worker.after(said, arguments)
                time.sleep(0.02)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()
            folder.cleanup()

    return check


LOST = "crashed, or did not end"


@dataclass
class _Worker:
    """A process that checks one pair at a time. `pair`: the number of its pair; `since`: when it got the pair."""

    process: SpawnProcess
    pipe: Any
    pair: int | None = None
    since: float = 0.0

    @staticmethod
    def start(arguments: tuple[Any, ...]) -> "_Worker":
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def give(self, number: int, pair: Pair) -> None:
        self.pair, self.since = number, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # the process is dead, which `result` notices
            self.pipe.send(pair)

    def result(self) -> str | None:
        """The pair's problem or ""; `LOST` if the process died or hangs; None while it works."""
        if self.pair is None:
            return None
        try:
            if self.pipe.poll():
                return str(self.pipe.recv())
        except (EOFError, ConnectionError):
            return LOST
        return None if self.process.is_alive() and time.monotonic() - self.since < PATIENCE_S else LOST

    def after(self, said: str, arguments: tuple[Any, ...]) -> "_Worker":
        """The worker for the next pair: this one, or a new process in its place if this one is lost."""
        self.pair = None
        if said != LOST:
            return self
        self.process.kill()
        self.process.join()
        return _Worker.start(arguments)


def _work(pipe: Any, dtype: torch.dtype, device: torch.device, lock: Path) -> None:
    known: dict[object, Compiled] = {}
    with torch.inference_mode(), contextlib.suppress(EOFError):
        while True:
            pair = pipe.recv()
            try:
                said = problem_of(pair, dtype, device, known, lock)
            except Exception as error:  # any error of a compiler is this candidate's problem
                said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            pipe.send(said)
