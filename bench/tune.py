"""The autotuner: candidates of every backend, compiled and checked side by side, timed in CUDA graphs, winners verified.

    asked      : questions (questions.py), what matters most first (shortlist.py)
    candidates : what heuristics would take now, then what every backend that the device has proposes, or the likely best
    pruned     : spills, serialised products (C75xx), shared memory, wrong or endless runs: in processes, in parallel
    timed      : in turns, weights rotated, several contents of a budget, by the mean of time over the heuristic's
    verified   : the winner once more at its own size

An entry is made only where another configuration than the heuristic's is more than `MARGIN` faster, or the heuristic's
may not be used: elsewhere the heuristic keeps its say, also when it changes. What the table in use says stays unless
the heuristic's is as fast now, or another more than `MARGIN` faster than either. Every result is appended to a log
beside the table, so that a run that was cut goes on where it ended, and the table is written as it goes.
"""

import contextlib
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench.cases import Case, wrong_twice
from fusedvit.bench.prune import Prune
from fusedvit.bench.questions import Candidate, Question, candidates, cases_of, compilation, contents_of
from fusedvit.bench.shortlist import shortlist
from fusedvit.bench.timing import Contender, captured, in_turns
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.backends import Key
from fusedvit.kernels.tile_configs import Target
from fusedvit.kernels.tuning_table import Entry

PRUNING = 0.6  # of the time, at most
MARGIN = 0.02  # that another configuration must be faster by
KEEP_S = 10.0  # between two writings of the table


@dataclass
class Log:
    """What was found so far, a line of JSON each; `path` None keeps it in memory only."""

    path: Path | None
    stamp: dict[str, Any]
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def open(self) -> None:
        """Reads what an earlier run of the same sources on the same GPU left; anything else begins anew.

        What passed its check is checked again, side by side, if it is still to be timed: another machine has it not
        compiled, and would compile it when its turn comes, one by one.
        """
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0] if self.path.exists() else ""
        records = [json.loads(line) for line in whole.splitlines()]  # a last line without an end was cut
        if records and records[0] == self.stamp:
            self.found = {record["of"]: record for record in records[1:] if record.get("problem") != ""}
        lines = [self.stamp, *self.found.values()]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def add(self, of: str, **values: Any) -> None:
        record = self.found[of] = {"of": of, **values}
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def decided(self, question: Question) -> bool:
        """Whether nothing is left to be tried."""
        return not self.found.get(question.describe(), {"unchecked": 1})["unchecked"]


def time_candidates(
    cases: Sequence[Case], rows: int, configs: Sequence[Any], device: torch.device
) -> list[list[float] | str]:
    """Microseconds of each content for each configuration, all in turns; why, for one that failed."""
    found: list[list[float] | str] = [[] for _ in configs]
    for case in cases:
        contenders = []
        for i, config in enumerate(configs):
            try:
                replay = captured(functools.partial(case.run, config), case.sets, device)
            except backends.BackendFailed as error:
                found[i] = str(error)
                continue
            contenders.append(Contender(str(i), replay, "gpu"))
        for content in contents_of(rows) if case.fill is not None else (rows,):
            if case.fill is not None:
                case.fill(content)
            for name, times in in_turns(contenders, device, seconds=0).items():
                us = found[int(name)]
                if isinstance(us, list):
                    us.append(1e3 * statistics.median(times) / case.sets)
        if case.fill is not None:
            case.fill(rows)
    return found


@dataclass
class Tuner:
    """One run over questions.

    Attributes:
        prune: yields (index, problem or "") for every distinct compilation.
        step: is told what is done, how much of it, of how much.
        keep: is given entries and the keys that were decided, every `KEEP_S` and at the end, however it ends.
        deadline: on `time.monotonic`'s clock.
        thorough: all candidates, not the likely best alone.
    """

    device: torch.device
    dtype: torch.dtype
    log: Log
    prune: Prune
    step: Callable[[str, int, int], None] = lambda text, done, total: None
    keep: Callable[[list[Entry], list[Key]], None] = lambda entries, decided: None
    deadline: float = float("inf")
    thorough: bool = False

    def run(self, *waves: Sequence[Question]) -> list[Entry]:
        """The table's entries: of the questions that there was time for, wave after wave."""
        self.log.open()
        asked = [question for wave in waves for question in wave]
        proposals = {q.describe(): self.proposed(q) for q in asked}
        try:
            for wave in waves:
                self._prune(wave, proposals)
                self._decide_all(wave, asked, proposals)
        finally:
            self._keep(asked)
        return self.entries(asked)

    def proposed(self, question: Question) -> list[Candidate]:
        """What is tried: the heuristic's choice first, and what the table in use says, which no cost model may drop."""
        target = Target.of(self.device)
        every = candidates(question, self.dtype, target)
        likely = every if self.thorough else shortlist(question, every, self.dtype, target)
        now = self.in_use(question)
        return likely if now is None else list(dict.fromkeys([*likely, now]))

    def in_use(self, question: Question) -> Candidate | None:
        """What the table in use says."""
        target = Target.of(self.device)
        found = tuning_table.table_for(target).find(question.task.key, target, self.dtype)
        return None if found is None else Candidate.of(found)

    def entries(self, asked: Sequence[Question]) -> list[Entry]:
        """Of what is decided, where it is not the heuristic's choice."""
        records = [self.log.found.get(q.describe(), {}) for q in asked]
        return [record["entry"] for record in records if record.get("entry")]

    def _keep(self, asked: Sequence[Question]) -> None:
        self.keep(self.entries(asked), [q.task.key for q in asked if q.describe() in self.log.found])

    def _prune(self, asked: Sequence[Question], proposals: dict[str, list[Candidate]]) -> None:
        """Compilation depends on an operation and a configuration, not on rows: each pair once, in the order of the
        questions. Where time is short a part of it is kept for timing what was checked by then."""
        if time.monotonic() > self.deadline:
            return
        todo: dict[str, tuple[Question, Candidate]] = {}
        for question in asked:
            for candidate in () if self.log.decided(question) else proposals[question.describe()]:
                todo.setdefault(compilation(question, candidate), (question, candidate))
        left = [(name, pair) for name, pair in todo.items() if name not in self.log.found]
        begun = time.monotonic()
        last = begun + PRUNING * (self.deadline - begun)
        with contextlib.closing(self.prune([pair for _, pair in left])) as pruned:
            for done, (index, problem) in enumerate(pruned):
                self.log.add(left[index][0], problem=problem)
                self.step("compiled and checked", done + 1, len(left))
                if time.monotonic() > last:
                    break

    def _decide_all(
        self, wave: Sequence[Question], asked: Sequence[Question], proposals: dict[str, list[Candidate]]
    ) -> None:
        kept, first = time.monotonic(), asked.index(wave[0]) if wave else 0
        for at, question in enumerate(wave, first):
            now = time.monotonic()
            if now > self.deadline:
                self.step("time is up", at, len(asked))
                return
            if now - kept > KEEP_S:
                self._keep(asked)
                kept = now
            self.step(question.describe(), at, len(asked))
            if not self.log.decided(question):
                self._decide(question, proposals[question.describe()])
        self.step("decided", first + len(wave), len(asked))

    def _decide(self, question: Question, proposed: list[Candidate]) -> None:
        problems = [self.log.found.get(compilation(question, c), {}).get("problem") for c in proposed]
        good = [c for c, problem in zip(proposed, problems, strict=True) if problem == ""]
        if not good:
            return
        cases = cases_of(question, self.dtype, self.device)
        measured: list[tuple[Candidate, list[float]]] = []
        found = time_candidates(cases, question.task.key.rows, [c.config for c in good], self.device)
        for candidate, us in zip(good, found, strict=True):
            if isinstance(us, str):
                self.log.add(compilation(question, candidate), problem=us)
            else:
                measured.append((candidate, us))
        again = functools.partial(cases_of, question, self.dtype, self.device)
        won = self._winner(measured, (proposed[0], self.in_use(question)), cases, again)
        tried = {"tried": len(measured), "unchecked": problems.count(None)}
        self.log.add(question.describe(), entry=_entry(question, won, measured, proposed[0]), **tried)

    def _winner(
        self,
        measured: list[tuple[Candidate, list[float]]],
        chosen: tuple[Candidate, Candidate | None],
        cases: Sequence[Case],
        again: Callable[[], Sequence[Case]],
    ) -> tuple[Candidate, list[float]] | None:
        """The fastest that is right; one of the `chosen`, the heuristic's and the table's, unless another is faster by
        `MARGIN`, and at a full budget not slower than the first measured by as much: a mean of few contents may hide
        what one of them loses, or a slow spell."""

        def rank(pair: tuple[Candidate, list[float]]) -> float:
            full, *_ = ratios = [a / b for a, b in zip(pair[1], measured[0][1], strict=True)]
            mean = statistics.mean(ratios) - MARGIN * (pair[0] in chosen)
            return mean if full <= 1 + MARGIN else math.inf

        for candidate, us in sorted(measured, key=rank):
            if not wrong_twice(candidate.config, cases, again):
                return candidate, us
        return None


def _entry(
    question: Question,
    won: tuple[Candidate, list[float]] | None,
    measured: list[tuple[Candidate, list[float]]],
    own: Candidate,
) -> Entry | None:
    """The table's entry; None where the heuristic says the same, or nothing is right."""
    if won is None or won[0] == own:
        return None
    entry = tuning_table.entry_of(question.task.key, won[0].config, us=round(won[1][0], 2))
    beaten = dict(measured).get(own)
    return entry if beaten is None else entry | {"heuristic_us": round(beaten[0], 2)}
