"""The autotuner behind `fusedvit tune`: finds the fastest backend and tile of every operation on this GPU.

    tasks      : the operations to decide, in order (candidates.py)
    candidates : the heuristic's choice, then the most promising ones of every available backend
    checked    : compiled and run once, in parallel processes: no spills, fits shared memory, right outputs
    timed      : interleaved in CUDA graphs, weights rotated, several contents of a budget, by mean time over the
                 heuristic's
    verified   : the winner is compared with the reference once more, at its own size

An entry is written only if another configuration is more than `MARGIN` faster than the heuristic's, or if the
heuristic's may not be used; otherwise the heuristic decides, even after it changes. An entry of the table in use stays
unless the heuristic's choice is as fast now, or another is more than `MARGIN` faster than both. Every result is
appended to a log next to the table, so that an interrupted run can continue; the table is written during the run.
"""

import contextlib
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench.ops import Case, wrong_twice
from fusedvit.bench.timing import Contender, captured, interleaved
from fusedvit.bench.tuning.candidates import (
    Check,
    Pair,
    TuningTask,
    candidates,
    cases_of,
    compilation,
    kernel_of,
    shortlist,
)
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.backends import Key
from fusedvit.kernels.tile_configs import Target, contents_of
from fusedvit.kernels.tuning_table import Entry

CHECKING = 0.6  # the most of the time that checks may take
MARGIN = 0.02  # by which another configuration must be faster
KEEP_S = 10.0  # between two writes of the table
Measured = tuple[Any, list[float]]  # a configuration, and its microseconds at each content


@dataclass
class Log:
    """Results so far, one line of JSON each; with a `path` of None they are in memory only."""

    path: Path | None
    stamp: dict[str, Any]
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def open(self) -> None:
        """Reads the results of an earlier run with the same stamp; with another stamp the log starts empty.

        Candidates that passed their check are checked again if they are not timed yet: on another machine their kernels
        are not in the cache, and timing would compile them one by one.
        """
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stamp, *records = _lines(self.path) if self.path.exists() else [{}]
        if stamp == self.stamp:
            self.found = {record["of"]: record for record in records if "of" in record and record.get("problem") != ""}
        lines = [self.stamp, *self.found.values()]
        unfinished = self.path.with_name(self.path.name + ".new")  # a full disk must not lose results
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        unfinished.replace(self.path)

    def add(self, of: str, **values: Any) -> None:
        record = self.found[of] = {"of": of, **values}
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def decided(self, item: TuningTask) -> bool:
        """Whether every candidate of `item` has been tried."""
        return not self.found.get(item.describe(), {"unchecked": 1})["unchecked"]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records of a log. A damaged or incomplete line gives an empty record, and its candidate is tried again."""
    found = []
    for line in path.read_bytes().splitlines() or [b""]:
        try:
            record = json.loads(line)
        except ValueError:  # no JSON, or no text
            record = {}
        found.append(record if isinstance(record, dict) else {})
    return found


def time_candidates(
    cases: Sequence[Case], rows: int, configs: Sequence[Any], device: torch.device
) -> list[list[float] | str]:
    """Microseconds of each content for each configuration, interleaved; for a failed configuration the reason."""
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
            for name, times in interleaved(contenders, device, seconds=0).items():
                us = found[int(name)]
                if isinstance(us, list):
                    us.append(1e3 * statistics.median(times) / case.sets)
        if case.fill is not None:
            case.fill(rows)
    return found


@dataclass
class Tuner:
    """One run over tuning tasks.

    Attributes:
        check: yields (index, problem or "") for every distinct compilation.
        step: called with (what is done, number done, number in all).
        keep: called with entries and decided keys, every `KEEP_S` and at the end, however the run ends.
        deadline: on `time.monotonic`'s clock.
        thorough: time all candidates, not the shortlist.
        only: names of the compilations that may be tried, besides the heuristic's choice and the table's entry; None
            for any.
    """

    device: torch.device
    dtype: torch.dtype
    log: Log
    check: Check
    step: Callable[[str, int, int], None] = lambda text, done, total: None
    keep: Callable[[list[Entry], list[Key]], None] = lambda entries, decided: None
    deadline: float = float("inf")
    thorough: bool = False
    only: Collection[str] | None = None

    def run(self, *waves: Sequence[TuningTask]) -> list[Entry]:
        """Tunes wave after wave until the deadline; returns the table's entries for the decided tasks."""
        self.log.open()
        items = [item for wave in waves for item in wave]
        proposals = {q.describe(): self.proposed(q) for q in items}
        try:
            for wave in waves:
                self._check_all(wave, proposals)
                self._decide_all(wave, items, proposals)
        finally:
            self._keep(items)
        return self.entries(items)

    def proposed(self, item: TuningTask) -> list[Any]:
        """The candidates to try: the heuristic's choice first; the table's entry is always among them."""
        target = Target.of(self.device)
        every = self._allowed(item, candidates(item, self.dtype, target))
        promising = every if self.thorough else self._allowed(item, shortlist(item, every, self.dtype, target))
        now = self.in_use(item)
        return promising if now is None else list(dict.fromkeys([*promising, now]))

    def _allowed(self, item: TuningTask, proposed: list[Any]) -> list[Any]:
        """The heuristic's choice, which is the first, and the other candidates that `only` allows."""
        own, *others = proposed
        return [own, *(c for c in others if self.only is None or kernel_of(item, c) in self.only)]

    def in_use(self, item: TuningTask) -> Any | None:
        """The configuration of the table in use; None without an entry."""
        target = Target.of(self.device)
        return tuning_table.table_for(target).find(item.task.key, target, self.dtype)

    def entries(self, items: Sequence[TuningTask]) -> list[Entry]:
        """The entries of decided tasks whose best configuration is not the heuristic's."""
        records = [self.log.found.get(q.describe(), {}) for q in items]
        return [record["entry"] for record in records if record.get("entry")]

    def _keep(self, items: Sequence[TuningTask]) -> None:
        self.keep(self.entries(items), [q.task.key for q in items if q.describe() in self.log.found])

    def _check_all(self, items: Sequence[TuningTask], proposals: dict[str, list[Any]]) -> None:
        """Compiles and checks candidates, each distinct compilation once: code depends on the operation and the
        configuration, not on rows. A share of the time is left for timing the checked ones."""
        if time.monotonic() > self.deadline:
            return
        todo: dict[str, Pair] = {}
        for item in items:
            for candidate in () if self.log.decided(item) else proposals[item.describe()]:
                todo.setdefault(compilation(item, candidate), (item, candidate))
        left = [(name, pair) for name, pair in todo.items() if name not in self.log.found]
        begun = time.monotonic()
        last = begun + CHECKING * (self.deadline - begun)
        with contextlib.closing(self.check([pair for _, pair in left])) as checked:
            for done, (index, problem) in enumerate(checked):
                self.log.add(left[index][0], problem=problem)
                self.step("compiled and checked", done + 1, len(left))
                if time.monotonic() > last:
                    break

    def _decide_all(
        self, wave: Sequence[TuningTask], items: Sequence[TuningTask], proposals: dict[str, list[Any]]
    ) -> None:
        kept, first = time.monotonic(), items.index(wave[0]) if wave else 0
        for at, item in enumerate(wave, first):
            now = time.monotonic()
            if now > self.deadline:
                self.step("time is up", at, len(items))
                return
            if now - kept > KEEP_S:
                self._keep(items)
                kept = now
            self.step(item.describe(), at, len(items))
            if not self.log.decided(item):
                self._decide(item, proposals[item.describe()])
        self.step("decided", first + len(wave), len(items))

    def _decide(self, item: TuningTask, proposed: list[Any]) -> None:
        problems = [self.log.found.get(compilation(item, c), {}).get("problem") for c in proposed]
        good = [c for c, problem in zip(proposed, problems, strict=True) if problem == ""]
        if not good:
            return
        cases = cases_of(item, self.dtype, self.device)
        measured: list[Measured] = []
        found = time_candidates(cases, item.task.key.rows, good, self.device)
        for config, us in zip(good, found, strict=True):
            if isinstance(us, str):
                self.log.add(compilation(item, config), problem=us)
            else:
                measured.append((config, us))
        again = functools.partial(cases_of, item, self.dtype, self.device)
        won = self._winner(measured, (proposed[0], self.in_use(item)), cases, again)
        tried = {"tried": len(measured), "unchecked": problems.count(None)}
        self.log.add(item.describe(), entry=_entry(item, won, measured, proposed[0]), **tried)

    def _winner(
        self,
        measured: list[Measured],
        chosen: tuple[Any, Any | None],
        cases: Sequence[Case],
        again: Callable[[], Sequence[Case]],
    ) -> Measured | None:
        """The fastest candidate with right outputs. Any other than the `chosen` (the heuristic's and the table's) must
        be faster by `MARGIN`. At a full budget none may be slower by `MARGIN` than the first measured: a mean over few
        contents may hide the loss of one of them, or a slow spell."""

        def rank(pair: Measured) -> float:
            full, *_ = ratios = [a / b for a, b in zip(pair[1], measured[0][1], strict=True)]
            mean = statistics.mean(ratios) - MARGIN * (pair[0] in chosen)
            return mean if full <= 1 + MARGIN else math.inf

        for config, us in sorted(measured, key=rank):
            if not wrong_twice(config, cases, again):
                return config, us
        return None


def _entry(
    item: TuningTask,
    won: Measured | None,
    measured: list[Measured],
    own: Any,
) -> Entry | None:
    """The table's entry; None if the heuristic's choice has won, or if no candidate is right."""
    if won is None or won[0] == own:
        return None
    entry = tuning_table.entry_of(item.task.key, won[0], us=round(won[1][0], 2))
    beaten = dict(measured).get(own)
    return entry if beaten is None else entry | {"heuristic_us": round(beaten[0], 2)}
