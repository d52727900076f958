"""Candidates compiled, checked and run once in processes of their own: a hang or a crash there stops nothing here.

What is compiled there is found in Triton's cache by whoever times it.
"""

import contextlib
import fcntl
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench.cases import Case, attention_case, linear_case, wrong_twice
from fusedvit.bench.questions import Candidate, Question
from fusedvit.kernels import backends
from fusedvit.kernels.codegen_checks import Compiled, Launch, compile_in_place
from fusedvit.kernels.tile_configs import Target

ROWS, LENGTHS = 300, (196, 104)  # neither a multiple of a tile
PATIENCE_S = 60.0  # for one pair, a process's start included
TURN_S = 20.0  # that a process waits for its turn on the GPU: the one before it may never end

Pair = tuple[Question, Candidate]
Found = Generator[tuple[int, str], None, None]  # (index, problem or ""), as they are found
Prune = Callable[[Sequence[Pair]], Found]


def small_case(question: Question, dtype: torch.dtype, device: torch.device) -> Case:
    """The question's operation at a size that runs in no time."""
    key = question.task.key
    if key.op == backends.LINEAR:
        rows = max(1, min(ROWS, key.rows - 1))  # a split product has room for its budget alone
        return linear_case(question.task, question.spec, dtype, device, rows, sets=1)
    return attention_case(key.n, key.k, LENGTHS, dtype, device, fa3=False)


def problem_of(
    pair: Pair,
    dtype: torch.dtype,
    device: torch.device,
    known: dict[Launch, Compiled] | None = None,
    turn: Path | None = None,
) -> str:
    """Why the candidate may not be used, or "". Without a GPU: by its answer alone.

    Args:
        known: see `compile_in_place`.
        turn: a file to be locked while the candidate runs.
    """
    question, candidate = pair
    case = small_case(question, dtype, device)
    if device.type == "cuda":
        capability, known = Target.of(device).capability, {} if known is None else known
        for compiled in compile_in_place(lambda: case.run(candidate.config, 0), capability, known):
            if compiled.problems:
                return "; ".join(compiled.problems)
    with contextlib.nullcontext() if turn is None else _in_turn(turn):
        return wrong_twice(candidate.config, (case,), lambda: (small_case(question, dtype, device),))


@contextlib.contextmanager
def _in_turn(path: Path) -> Iterator[None]:
    """Alone with the file at `path` locked, or after `TURN_S` without; a process that dies gives its lock back.

    Candidates run one at a time: they are judged by their answers, not by how they share a GPU.
    """
    end = time.monotonic() + TURN_S
    with path.open("wb") as file:
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield


def here(dtype: torch.dtype, device: torch.device) -> Prune:
    """Prunes in this process, one after another."""

    def prune(pairs: Sequence[Pair]) -> Found:
        for i, pair in enumerate(pairs):
            yield i, problem_of(pair, dtype, device)

    return prune


def in_processes(jobs: int, dtype: torch.dtype, device: torch.device) -> Prune:
    """Prunes in `jobs` processes at a time; one that dies or does not end takes only its own pair along."""

    def prune(pairs: Sequence[Pair]) -> Found:
        todo, folder = list(range(len(pairs))), tempfile.TemporaryDirectory()
        arguments = (dtype, device, Path(folder.name) / "turn")
        workers = [_Worker.start(arguments) for _ in range(min(jobs, len(pairs)))]
        try:
            while todo or any(worker.pair is not None for worker in workers):
                for place, worker in enumerate(workers):
                    if worker.pair is None and todo:
                        worker.give(todo[0], pairs[todo.pop(0)])
                    said = worker.answer()
                    if said is not None and worker.pair is not None:
                        yield worker.pair, said
                        workers[place] = worker.after(said, arguments)
                time.sleep(0.02)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()
            folder.cleanup()

    return prune


LOST = "crashed, or did not end"


@dataclass
class _Worker:
    """A process that answers one pair at a time; `pair` is the number of the one it has, `since` when it got it."""

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
        with contextlib.suppress(BrokenPipeError):  # it is dead, which `answer` finds
            self.pipe.send(pair)

    def answer(self) -> str | None:
        """What it says of its pair, `LOST` where nothing will come any more, None while it works."""
        if self.pair is None:
            return None
        try:
            if self.pipe.poll():
                return str(self.pipe.recv())
        except (EOFError, ConnectionError):
            return LOST
        return None if self.process.is_alive() and time.monotonic() - self.since < PATIENCE_S else LOST

    def after(self, said: str, arguments: tuple[Any, ...]) -> "_Worker":
        """Who takes the next pair: itself, or another in its place."""
        self.pair = None
        if said != LOST:
            return self
        self.process.kill()
        self.process.join()
        return _Worker.start(arguments)


def _work(pipe: Any, dtype: torch.dtype, device: torch.device, turn: Path) -> None:
    known: dict[Launch, Compiled] = {}
    with torch.inference_mode(), contextlib.suppress(EOFError):
        while True:
            pair = pipe.recv()
            try:
                said = problem_of(pair, dtype, device, known, turn)
            except Exception as error:  # whatever a compiler dies of is this candidate's problem
                said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            pipe.send(said)
