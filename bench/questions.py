"""What a tuner asks: every operation of the chosen towers at every row budget, each question once, and its answers."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fusedvit.bench.cases import Case, attention_case, linear_case, supported
from fusedvit.kernels import backends
from fusedvit.kernels.backends import Key
from fusedvit.kernels.hopper.attention_configs import contents
from fusedvit.kernels.tile_configs import Target, ladder
from fusedvit.model.plan import Task, heuristic, tasks
from fusedvit.model.spec import VisionSpec

SMALLEST = 64  # of any product's budgets
BUDGETS = tuple(ladder(256, 65536))  # patch tokens: graphs' own ladder, from 256

AT_LAUNCH = ("max_programs",)  # of a configuration, what changes no code


@dataclass(frozen=True)
class Question:
    """What is to be decided: a task of a tower."""

    task: Task
    spec: VisionSpec

    def describe(self) -> str:
        key = self.task.key
        return f"{self.task.name} {key.kind} {key.n} x {key.k}, {key.rows} rows, {key.dtype}"


@dataclass(frozen=True)
class Candidate:
    """A configuration by name and plain values, so that it travels between processes."""

    backend: str
    config: Any

    @staticmethod
    def of(config: Any) -> "Candidate":
        """The configuration of whichever backend it is of."""
        return Candidate(backends.backend_of(config).name, config)

    def as_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "config": asdict(self.config)}


def questions(specs: Iterable[VisionSpec], budgets: Sequence[int], dtype: torch.dtype) -> list[Question]:
    """Every operation once; what cannot be set up alone is left to the heuristics."""
    found: dict[Key, Question] = {}
    for spec in specs:
        for rows in budgets:
            for task in tasks(spec, rows, dtype):
                if supported(task):
                    found.setdefault(task.key, Question(task, spec))
    return list(found.values())


def candidates(question: Question, dtype: torch.dtype, target: Target) -> list[Candidate]:
    """The heuristic's choice first, then every backend's proposals, each once."""
    task = question.task
    configs = [heuristic(task, dtype, target)]
    for backend in backends.available_backends(task.key.op, target, dtype):
        proposed = backend.candidates(task.key, dtype, target, task.widest)
        configs += [c for c in proposed if not backend.wrong(task.key, c, target, dtype)]
    return [Candidate.of(config) for config in dict.fromkeys(configs)]


def compilation(question: Question, candidate: Candidate) -> str:
    """What is compiled once, whatever the rows; windows and frames are attended to by the same code."""
    key = question.task.key
    kind = "" if key.op == backends.ATTENTION else f" {key.kind}"
    compiled = {name: value for name, value in asdict(candidate.config).items() if name not in AT_LAUNCH}
    return f"{key.op}{kind} {key.n} x {key.k} {key.dtype} {candidate.backend} {compiled}"


def layouts(key: Key) -> list[tuple[int, ...]]:
    """Lengths of the sequences that attention is judged by."""
    return [(length,) * frames for frames, length in contents(key.rows, key.kind)]


def contents_of(rows: int) -> tuple[int, int]:
    """What a budget of `rows` is judged by: full, and as full as calls on average are for which the budget below is too
    small. How many waves a tile takes depends on it."""
    below = max(ladder(SMALLEST, rows - 1), default=0)
    return rows, (below + rows + 1) // 2


def cases_of(question: Question, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """The contents that a budget is judged by: one linear case that is filled, or attention over several layouts."""
    key = question.task.key
    if key.op == backends.LINEAR:
        return [linear_case(question.task, question.spec, dtype, device, key.rows)]
    return [attention_case(key.n, key.k, lengths, dtype, device, fa3=False) for lengths in layouts(key)]
