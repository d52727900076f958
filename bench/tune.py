"""The autotuner: candidates of every form, pruned ahead of time, verified against the twin, timed in CUDA graphs.

    tasks      : every operation of the chosen towers at every row budget, each question once
    candidates : what heuristics would take now, then what every form that the device has proposes
    pruned     : spills, serialised products (C75xx), shared memory, wrong or endless runs: in processes, in parallel
    timed      : weights rotated, several contents of a budget; the least mean of time over the heuristic's wins
    verified   : the winner once more at its own size

Every result is appended to a log beside the table, so that a run that was cut goes on where it ended.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from fusedvit import __version__
from fusedvit.bench.cases import Case, attention_case, linear_case, supported
from fusedvit.bench.timing import Contender, captured, in_turns
from fusedvit.kernels import forms, tables
from fusedvit.kernels.configs import Target
from fusedvit.kernels.forms import FORMS, Key
from fusedvit.plan import Task, heuristic, tasks
from fusedvit.spec import VisionSpec

CONTENTS = (1.0, 0.88)  # shares of a budget: there are four to an octave, so that it is at least 0.8 full
FRAMES = (196, 784)  # lengths of a video's frames of 224 and 448 px
PRUNING = 0.7  # of the time, at most
WINDOW = 64  # patches of a window
BUDGETS = (*(n << i for i in range(5, 14) for n in (4, 5, 6, 7)), 65536)  # patch tokens, from 128


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

    form: str
    config: Any

    def as_dict(self) -> dict[str, Any]:
        return {"form": self.form, "config": asdict(self.config)}


@dataclass
class Log:
    """What was found so far, a line of JSON each; `path` None keeps it in memory only."""

    path: Path | None
    stamp: dict[str, Any]
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def open(self) -> None:
        """Reads what an earlier run of the same sources on the same GPU left; anything else begins anew."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0] if self.path.exists() else ""
        records = [json.loads(line) for line in whole.splitlines()]  # a last line without an end was cut
        if records and records[0] == self.stamp:
            self.found = {record["of"]: record for record in records[1:]}
        lines = [self.stamp, *self.found.values()]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def add(self, of: str, **values: Any) -> dict[str, Any]:
        record = self.found[of] = {"of": of, **values}
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        return record


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
    """The heuristic's choice first, then every form's proposals, each once."""
    task = question.task
    configs = [heuristic(task, dtype, target)]
    for form in FORMS:
        if form.op == task.key.op and not forms.why_absent(form, target, dtype):
            proposed = form.candidates(task.key, dtype, target, task.widest)
            configs += [c for c in proposed if not form.wrong(c, target, dtype)]
    return [Candidate(forms.form_of(config).name, config) for config in dict.fromkeys(configs)]


def cases_of(question: Question, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """The contents that a budget is judged by: one linear case that is filled, or attention over several layouts."""
    key = question.task.key
    if key.op == forms.LINEAR:
        return [linear_case(question.task, question.spec, dtype, device, key.rows)]
    if key.kind == "window":
        return [attention_case(key.n, key.k, (WINDOW,) * (key.rows // WINDOW), dtype, device, fa3=False)]
    layouts = [(key.rows,)] + [(n,) * (key.rows // n) for n in FRAMES if n <= key.rows]
    return [attention_case(key.n, key.k, lengths, dtype, device, fa3=False) for lengths in layouts]


def time_candidate(cases: Sequence[Case], rows: int, config: Any, device: torch.device) -> list[float]:
    """Microseconds of each content."""
    found = []
    for case in cases:
        replay = captured(functools.partial(case.run, config), case.sets, device)
        for share in CONTENTS if case.fill is not None else (1.0,):
            if case.fill is not None:
                case.fill(max(1, int(share * rows)))
            times = in_turns([Contender("", replay, "gpu")], device, seconds=0)[""]
            found.append(1e3 * statistics.median(times) / case.sets)
        if case.fill is not None:
            case.fill(rows)
    return found


Prune = Callable[[list[tuple[Question, Candidate]], Callable[[str], None]], Iterator[tuple[int, str]]]


@dataclass
class Tuner:
    """One run over `questions`; `prune` yields (index, problem or "") for every distinct compilation."""

    device: torch.device
    dtype: torch.dtype
    log: Log
    prune: Prune
    step: Callable[[str], None] = lambda text: None
    deadline: float = float("inf")

    def run(self, asked: Sequence[Question]) -> list[dict[str, Any]]:
        """The table's entries: of the questions that there was time for."""
        self.log.open()
        target = Target.of(self.device)
        proposals = {q.describe(): candidates(q, self.dtype, target) for q in asked}
        self._prune(asked, proposals)
        entries = []
        for at, question in enumerate(asked):
            if time.monotonic() > self.deadline:
                self.step(f"time is up after {at} of {len(asked)} questions")
                break
            self.step(f"{at + 1} of {len(asked)}: {question.describe()}")
            record = self.log.found.get(question.describe()) or self._decide(question, proposals[question.describe()])
            if record.get("entry"):
                entries.append(record["entry"])
        return entries

    def _prune(self, asked: Sequence[Question], proposals: dict[str, list[Candidate]]) -> None:
        """Compilation depends on an operation and a configuration, not on rows: each pair once, what is proposed
        first first. Where time is short a part of it is kept for timing what was checked by then."""
        ranked = [(i, q, c) for q in asked for i, c in enumerate(proposals[q.describe()])]
        todo: dict[str, tuple[Question, Candidate]] = {}
        for _, question, candidate in sorted(ranked, key=lambda item: item[0]):
            todo.setdefault(_compilation(question, candidate), (question, candidate))
        left = [(name, pair) for name, pair in todo.items() if name not in self.log.found]
        begun = time.monotonic()
        last = begun + PRUNING * (self.deadline - begun)
        for done, (index, problem) in enumerate(self.prune([pair for _, pair in left], self.step)):
            self.log.add(left[index][0], problem=problem)
            self.step(f"compiled and checked {done + 1} of {len(left)}")
            if time.monotonic() > last:
                break

    def _decide(self, question: Question, proposed: list[Candidate]) -> dict[str, Any]:
        key = question.task.key
        good = [c for c in proposed if self.log.found.get(_compilation(question, c), {"problem": "?"})["problem"] == ""]
        cases = cases_of(question, self.dtype, self.device)
        measured = []
        for candidate in good:
            try:
                measured.append((candidate, time_candidate(cases, key.rows, candidate.config, self.device)))
            except forms.FormFailed as error:
                self.log.add(_compilation(question, candidate), problem=str(error))
        best_first = sorted(measured, key=lambda pair: _against(pair[1], measured[0][1]))
        for candidate, us in best_first:
            if all(case.check(candidate.config).passed for case in cases):
                first = {"heuristic_us": round(measured[0][1][0], 2)} if measured[0][0] == proposed[0] else {}
                entry = {**asdict(key), **candidate.as_dict(), "us": round(us[0], 2), **first}
                return self.log.add(question.describe(), entry=entry, tried=len(measured))
        return self.log.add(question.describe(), entry=None, tried=len(measured))


def _against(us: list[float], first: list[float]) -> float:
    """Mean over the contents of time over the first candidate's."""
    return statistics.mean(a / b for a, b in zip(us, first, strict=True))


def _compilation(question: Question, candidate: Candidate) -> str:
    key = question.task.key
    return f"{key.op} {key.kind} {key.n} x {key.k} {key.dtype} {candidate.form} {candidate.config}"


def passport(gpu: str) -> dict[str, Any]:
    """What a table must say of itself, see `kernels.tables`."""
    sources = {f"{form.op}/{form.name}": tables.fingerprint(form) for form in FORMS}
    versions = {"torch": torch.__version__, "fusedvit": __version__, "triton_version": triton.__version__}
    return {"gpu": gpu, "triton": tables.TRITON, "sources": sources, **versions}


def write(path: Path, gpu: str, entries: list[dict[str, Any]]) -> None:
    """The table, an entry a line; entries of an older table of the same sources stay where nothing new was found."""
    made = passport(gpu)
    kept: dict[str, dict[str, Any]] = {}
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["passport"]["sources"] == made["sources"] and old["passport"]["triton"] == made["triton"]:
            kept = {_identity(entry): entry for entry in old["entries"]}
    kept |= {_identity(entry): entry for entry in entries}
    lines = ",\n".join("  " + json.dumps(entry) for entry in kept.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f'{{\n "passport": {json.dumps(made)},\n "entries": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")
    tables.forget()


def _identity(entry: dict[str, Any]) -> str:
    return json.dumps([entry[name] for name in ("op", "kind", "n", "k", "rows", "dtype")])
