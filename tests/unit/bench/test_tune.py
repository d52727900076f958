"""The tuner on a CPU, where all candidates run as the torch twin: what is asked, pruned, kept, resumed and written."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from fusedvit.bench import cases, kernel_bench, prune, questions, shortlist, tune  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.kernels import tuning_table  # noqa: E402
from fusedvit.kernels.hopper.attention_configs import schedules  # noqa: E402
from fusedvit.kernels.hopper.gemm_configs import hopper_gemm_candidates, hopper_gemm_config  # noqa: E402
from fusedvit.kernels.tile_configs import LinearConfig, Target, budget  # noqa: E402
from fusedvit.model.plan import choose  # noqa: E402
from fusedvit.runtime.ahead_of_time import QWEN2_VL_7B, QWEN3_VL_4B, QWEN3_VL_8B  # noqa: E402

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
H200 = Target(name="NVIDIA H200")
small_case = prune.small_case
RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def asked() -> list[questions.Question]:
    """The tiny tower's questions at one budget, one kind of linear layer and attention."""
    every = questions.questions([kernel_bench.spec_of("tiny")], (64,), FP32)
    return [q for q in every if q.task.name in ("proj", "fc2", "attention")]


def times(monkeypatch: pytest.MonkeyPatch, us: Callable[[Any], float]) -> None:
    def timed(cases: Any, rows: int, configs: Any, device: Any) -> list[list[float]]:
        return [[us(config)] * len(cases) for config in configs]

    monkeypatch.setattr(tune, "time_candidates", timed)


def no_prune(pairs: Any) -> Iterator[tuple[int, str]]:
    yield from ((i, "") for i in range(len(pairs)))


def tuner(log: tune.Log, pruned: Any = no_prune, **options: Any) -> tune.Tuner:
    return tune.Tuner(CPU, FP32, log, pruned, **options)


def test_every_question_is_asked_once() -> None:
    one, two = (questions.questions([QWEN3_VL_8B] * n, (256, 1024), BF16) for n in (1, 2))
    assert one == two and len(one) == 2 * 8
    both = questions.questions([QWEN3_VL_8B, QWEN3_VL_4B], (1024,), BF16)
    assert len({q.task.key for q in both}) == len(both) == 16


def test_the_heuristic_is_the_first_candidate() -> None:
    for question in questions.questions([QWEN3_VL_8B], (256, 4096), BF16):
        found = questions.candidates(question, BF16, H200)
        first = choose(question.task, BF16, H200, tuning_table.Table())
        assert found[0].config == first and len(set(found)) == len(found) > 1


def test_a_budget_is_judged_by_contents_of_its_own() -> None:
    for rows in (64, 80, 448, 784, 1344, 2304, 6656, 7168, 20480):
        full, content = questions.contents_of(rows)
        assert full == rows == budget(content), "another budget's"
        assert budget(2 * content - rows) < rows or rows == 64, "halfway to the budget below"


def test_what_the_table_says_is_asked_again(asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the cost model thinks little of it: it was the fastest once."""
    (question,) = [q for q in asked if q.task.name == "proj"]
    now = LinearConfig(128, 32, 32, 4, 2)
    monkeypatch.setattr(tune, "candidates", three_tiles)
    monkeypatch.setattr(tuning_table, "table_for", lambda target: tuning_table.Table({question.task.key: now}))
    proposed = tuner(tune.Log(None, {})).proposed(question)
    assert [c.config.block_m for c in proposed] == [32, 64, 16, 128]
    monkeypatch.setattr(
        tuning_table, "table_for", lambda target: tuning_table.Table({question.task.key: proposed[1].config})
    )
    assert [c.config.block_m for c in tuner(tune.Log(None, {})).proposed(question)] == [32, 64, 16]


def test_the_fastest_is_taken_and_read_back(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: 1000.0 / config.block_m)
    entries = tuner(tune.Log(None, {})).run([q for q in asked if q.task.key.op == "linear"])
    assert [e["config"]["block_m"] for e in entries] == [64, 64]
    assert all(e["us"] < e["heuristic_us"] for e in entries)
    path = tmp_path / "cpu.json"
    tuning_table.write(path, tuning_table.passport("CPU", "0"), entries)
    table = tuning_table.read(path, "CPU")
    assert set(table.entries) == {q.task.key for q in asked if q.task.key.op == "linear"} and not table.stale


def three_tiles(question: Any, dtype: torch.dtype, target: Target) -> list[questions.Candidate]:
    return [questions.Candidate("triton", LinearConfig(m, 32, 32, 4, 2)) for m in (32, 64, 16)]


def test_a_pruned_or_wrong_candidate_is_never_taken(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    (question,) = [q for q in asked if q.task.name == "proj"]
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: 1000.0 / config.block_m)

    def spills(which: int) -> Any:
        def prune(pairs: list[Any]) -> Iterator[tuple[int, str]]:
            for i, (_, candidate) in enumerate(pairs):
                yield i, "8 bytes of spill stores" if candidate.config.block_m == which else ""

        return prune

    assert tuner(tune.Log(None, {}), spills(64)).run([question]) == [], "the heuristic's choice is the next"
    (entry,) = tuner(tune.Log(None, {}), spills(32)).run([question])
    assert entry["config"]["block_m"] == 64 and "heuristic_us" not in entry
    real = cases.compare
    monkeypatch.setattr(cases, "compare", lambda ours, ref, pt: real(ours * 1.01, ref, pt))
    assert tuner(tune.Log(None, {})).run([question]) == []


def test_who_is_wrong_once_is_asked_again(asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch) -> None:
    """On other data: of attention some draw in hundreds is beyond the rule by chance."""
    (question,) = [q for q in asked if q.task.name == "proj"]
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: 1000.0 / config.block_m)
    real, seen = cases.compare, list[torch.Tensor]()

    def wrong_at_first(ours: torch.Tensor, ref: torch.Tensor, pt: torch.Tensor) -> Any:
        seen.append(ref.clone())
        return real(ours * (1.01 if len(seen) == 1 else 1.0), ref, pt)

    monkeypatch.setattr(cases, "compare", wrong_at_first)
    (entry,) = tuner(tune.Log(None, {})).run([question])
    assert entry["config"]["block_m"] == 64 and len(seen) == 2
    assert not torch.equal(*seen), "the same data would say the same"
    seen.clear()
    pair = question, questions.Candidate("triton", LinearConfig(32, 32, 32, 4, 3))
    assert prune.problem_of(pair, FP32, CPU) == "" and len(seen) == 2


@pytest.mark.parametrize("path", sorted(tuning_table.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_nothing_ships_that_is_slower_than_the_heuristics(path: Path) -> None:
    """At a full budget, by what was timed."""
    timed = [e for e in json.loads(path.read_text(encoding="utf-8"))["entries"] if "heuristic_us" in e]
    assert timed
    for entry in timed:
        assert entry["us"] <= (1 + tune.MARGIN) * entry["heuristic_us"] + 0.01, entry


def test_what_is_slower_at_a_full_budget_is_not_taken(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it gains on the budget's other contents."""
    (question,) = [q for q in asked if q.task.name == "proj"]
    monkeypatch.setattr(tune, "candidates", three_tiles)
    for full, taken in ((10.1, True), (10.5, False)):
        of_tile = {32: [10.0, 10.0], 64: [full, 5.0], 16: [20.0, 20.0]}
        monkeypatch.setattr(tune, "time_candidates", lambda *a, of=of_tile: [of[c.block_m] for c in a[2]])
        assert [e["config"]["block_m"] for e in tuner(tune.Log(None, {})).run([question])] == [64] * taken


class Clock:
    """Stands for `time`: a second passes with every question or compilation that is told of."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def step(self, text: str, done: int, total: int) -> None:
        self.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(tune, "time", found)
    return found


def test_a_run_that_was_cut_goes_on(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock
) -> None:
    monkeypatch.setattr(tune, "candidates", three_tiles)
    monkeypatch.setattr(tune, "PRUNING", 1.0)
    linears = [q for q in asked if q.task.key.op == "linear"]
    measured: list[Any] = []
    times(monkeypatch, lambda config: measured.append(config) or 1000.0 / config.block_m)
    path, stamp = tmp_path / "log.jsonl", {"gpu": "CPU"}
    first = tuner(tune.Log(path, stamp), step=clock.step, deadline=6.5).run(linears)
    assert len(first) == 1 and len(measured) == 3, "six compilations, and one question before time is up"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"of": "cut in the mid')
    again = tuner(tune.Log(path, stamp)).run(linears)
    assert again[0] == first[0] and len(again) == 2 and len(measured) == 6
    tuner(tune.Log(path, {"gpu": "another"})).run(linears)
    assert len(measured) == 12, "another GPU's log is not gone on with"


def test_what_is_still_to_be_timed_is_compiled_again_side_by_side(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock
) -> None:
    """As another machine has nothing compiled; but not what failed, nor what is decided."""
    monkeypatch.setattr(tune, "candidates", three_tiles)
    monkeypatch.setattr(tune, "PRUNING", 1.0)
    times(monkeypatch, lambda config: float(config.block_m))
    linears = [q for q in asked if q.task.key.op == "linear"]
    pruned: list[list[tuple[str, int]]] = []

    def prune(pairs: list[tuple[questions.Question, questions.Candidate]]) -> Any:
        pruned.append([(question.task.name, candidate.config.block_m) for question, candidate in pairs])
        return ((i, "spills" if c.config.block_m == 64 else "") for i, (_, c) in enumerate(pairs))

    path, stamp = tmp_path / "log.jsonl", {"gpu": "CPU"}
    tuner(tune.Log(path, stamp), prune, step=clock.step, deadline=6.5).run(linears)
    tuner(tune.Log(path, stamp), prune).run(linears)
    first, second = (question.task.name for question in linears)
    assert sorted(pruned[0]) == sorted((name, m) for name in (first, second) for m in (16, 32, 64))
    assert sorted(pruned[1]) == [(second, 16), (second, 32)]


def test_short_of_time_what_was_checked_is_timed(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Time for two candidates of the first question; with more time the third is tried, and the other question."""
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: float(config.block_m))
    linears, log = [q for q in asked if q.task.key.op == "linear"], tune.Log(None, {})
    entries = tuner(log, step=clock.step, deadline=3.0).run(linears)
    assert entries == [] and [log.decided(q) for q in linears] == [False, False]
    assert log.found[linears[0].describe()]["tried"] == 2
    entries = tuner(log).run(linears)
    assert [e["config"]["block_m"] for e in entries] == [16, 16] and all(map(log.decided, linears))


def test_a_run_that_is_interrupted_keeps_what_it_found(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "candidates", three_tiles)
    linears = [q for q in asked if q.task.key.op == "linear"]
    left = iter([64.0, 32.0, 16.0])
    times(monkeypatch, lambda config: next(left))
    kept: list[Any] = []
    with pytest.raises(StopIteration):
        tuner(tune.Log(None, {}), keep=lambda entries, decided: kept.append((entries, decided))).run(linears)
    ((entries, decided),) = kept
    assert [e["us"] for e in entries] == [16.0] and decided == [linears[0].task.key]


def test_the_table_is_written_as_it_goes(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(tune, "candidates", three_tiles)
    monkeypatch.setattr(tune, "KEEP_S", 0.5)
    times(monkeypatch, lambda config: 1000.0 / config.block_m)
    kept: list[int] = []
    linears = [q for q in asked if q.task.key.op == "linear"]
    tuner(tune.Log(None, {}), step=clock.step, keep=lambda entries, _: kept.append(len(entries))).run(linears)
    assert kept == [1, 2]


@pytest.mark.parametrize("gain, taken", [(1.01, False), (1.05, True)])
def test_a_configuration_must_beat_the_heuristics_by_a_margin(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch, gain: float, taken: bool
) -> None:
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: 10.0 if config.block_m == 32 else 10.0 / gain)
    (question,) = [q for q in asked if q.task.name == "proj"]
    log = tune.Log(None, {})
    assert len(tuner(log).run([question])) == taken and log.decided(question)


@pytest.mark.parametrize("of_table, other, taken", [(9.9, 9.8, 16), (9.9, 9.6, 64), (10.1, 9.9, None)])
def test_what_the_table_says_stays_unless_something_is_clearly_faster(
    asked: list[questions.Question],
    monkeypatch: pytest.MonkeyPatch,
    of_table: float,
    other: float,
    taken: int | None,
) -> None:
    """The heuristic's takes 10."""
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: {32: 10.0, 16: of_table, 64: other}[config.block_m])
    (question,) = [q for q in asked if q.task.name == "proj"]
    (said,) = [c for c in three_tiles(question, BF16, H200) if c.config.block_m == 16]
    monkeypatch.setattr(tuning_table, "table_for", lambda target: tuning_table.Table({question.task.key: said.config}))
    assert [e["config"]["block_m"] for e in tuner(tune.Log(None, {})).run([question])] == [taken] * (taken is not None)


def test_what_matters_most_comes_first() -> None:
    every = questions.questions([QWEN2_VL_7B, QWEN3_VL_8B], questions.BUDGETS, BF16)
    waves = shortlist.in_waves(every, [QWEN3_VL_8B])
    assert sorted(repr(q) for wave in waves for q in wave) == sorted(map(repr, every)) and len(waves) == 3
    first = [(q.task.name.startswith("merger"), q.task.key.rows) for q in waves[0]]
    assert {q.spec for q in waves[0]} == {QWEN3_VL_8B} and {q.spec for q in waves[1]} == {QWEN2_VL_7B}
    assert first[:36] == [(False, 256 << i) for i in range(6) for _ in range(6)], "powers of two"
    assert [merger for merger, _ in first] == sorted(merger for merger, _ in first), "blocks before mergers"
    assert min(q.task.key.rows for q in waves[2] if q.task.name == "fc1") > 16384


def test_waves_are_decided_one_after_another(
    asked: list[questions.Question], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Time for the first alone: nothing of the second is compiled before that."""
    monkeypatch.setattr(tune, "candidates", three_tiles)
    monkeypatch.setattr(tune, "PRUNING", 1.0)
    times(monkeypatch, lambda config: 1000.0 / config.block_m)
    told: list[tuple[str, int, int]] = []

    def step(*words: Any) -> None:
        told.append(words)
        clock.step(*words)

    one, two = [q for q in asked if q.task.key.op == "linear"]
    log = tune.Log(None, {})
    assert len(tuner(log, step=step, deadline=4.5).run([one], [two])) == 1 and log.decided(one) and not log.decided(two)
    assert [words for words in told if "compiled" not in words[0]][1:] == [("decided", 1, 2), ("time is up", 1, 2)]
    assert len(tuner(log).run([one], [two])) == 2


def test_the_shortlist_holds_the_heuristics_choice_and_the_likely_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the Hopper backend only names and numbers are needed, which are there without a GPU."""
    question = next(q for q in questions.questions([QWEN3_VL_8B], (1024,), BF16) if q.task.name == "qkv")
    offered = hopper_gemm_candidates(1024, 3456, 1152, H200, "norm+rope")
    plain = [c for c in questions.candidates(question, BF16, H200) if c.backend == "triton"]
    own = questions.Candidate("hopper", offered[-1])
    every = list(dict.fromkeys([own, *(questions.Candidate("hopper", config) for config in offered), *plain]))
    found = shortlist.shortlist(question, every, BF16, H200)
    predicted = {c: shortlist.mean_us(question.task.key, c.config, H200) for c in every if c.backend == "hopper"}
    best = sorted((c for c in predicted if c != own), key=predicted.__getitem__)[: shortlist.BEST]
    assert found == [own, *best, plain[0]] and all(0 < us < 100 for us in predicted.values())
    assert shortlist.shortlist(question, plain, BF16, H200) == plain, "nothing to choose from"
    chosen = hopper_gemm_config(1024, 3456, 1152, BF16, H200, "norm+rope")
    assert min(predicted, key=predicted.__getitem__).config == chosen, "the model is the heuristic's own"


@pytest.mark.parametrize("rows", [4096, 16384])
def test_what_no_model_knows_is_timed(on_hopper: None, rows: int) -> None:
    """Of every backend that an H200 has; each that has a cost is ranked by it, none stops the tuner."""
    asked = [q for q in questions.questions([QWEN3_VL_8B], (rows,), BF16) if q.task.key.op == "linear"]
    for question in asked:
        every = questions.candidates(question, BF16, H200)
        found, unpriced = shortlist.shortlist(question, every, BF16, H200), set(shortlist.UNPRICED)
        assert found[0] == every[0] and len(found) < len(every)
        assert [c for c in found if c.backend in unpriced] == [c for c in every if c.backend in unpriced]


def test_of_attention_the_model_ranks_schedules() -> None:
    every = questions.questions([QWEN3_VL_4B], (1024,), BF16)
    question = next(q for q in every if q.task.name == "attention")
    own, known = questions.candidates(question, BF16, H200)[0], schedules(64)
    configs = [*known, *(replace(config, late=not config.late) for config in known)]
    offered = [questions.Candidate("hopper", config) for config in configs]
    found = shortlist.shortlist(question, [own, *offered], BF16, H200)
    us = {c: shortlist._attention_us(question.task.key, c.config, H200) for c in offered}
    assert (
        found[0] == own and sorted(map(us.get, found[1 : shortlist.BEST + 1])) == sorted(us.values())[: shortlist.BEST]
    )


def test_the_estimate_counts_what_is_compiled_once() -> None:
    asked = questions.questions([QWEN3_VL_8B], (256, 1024), BF16)
    own = {q.describe(): questions.candidates(q, BF16, H200)[:1] for q in asked}
    found = shortlist.estimate(asked, lambda q: own[q.describe()], BF16, 4)
    distinct = {questions.compilation(q, c) for q in asked for c in own[q.describe()]}
    assert found.questions == 16 and found.compilations == len(distinct) <= 16
    faster = shortlist.estimate(asked, lambda q: own[q.describe()], BF16, 8)
    assert faster.compile_s < found.compile_s and faster.timing_s == found.timing_s > 16 * shortlist.QUESTION_S


@pytest.mark.parametrize("name", ["patch", "qkv", "proj", "fc1", "fc2", "merger_fc1", "merger_fc2", "attention"])
def test_every_case_checks_against_its_twin(name: str) -> None:
    question = next(q for q in questions.questions([kernel_bench.spec_of("tiny")], (64,), FP32) if q.task.name == name)
    candidate = questions.candidates(question, FP32, Target.of(CPU))[0]
    assert prune.problem_of((question, candidate), FP32, CPU) == ""


def test_pruning_survives_a_crash_and_a_hang(monkeypatch: pytest.MonkeyPatch, asked: list[questions.Question]) -> None:
    """Real processes. A candidate that kills its process, and one that never ends, are problems of theirs alone."""
    monkeypatch.setattr(prune, "PATIENCE_S", 30.0)  # processes that import torch, on a busy machine
    good = (asked[0], questions.candidates(asked[0], FP32, Target.of(CPU))[0])
    pairs: list[Any] = [(Killer(), good[1]), good, (Sleeper(), good[1])]
    found = dict(prune.in_processes(2, FP32, CPU)(pairs))
    assert found == {0: "crashed, or did not end", 1: "", 2: "crashed, or did not end"}


def test_candidates_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who comes while another has its turn waits for it, though not for ever."""
    monkeypatch.setattr(prune, "TURN_S", 2.0)
    begun = time.monotonic()
    with prune._in_turn(tmp_path / "turn"):
        assert time.monotonic() - begun < 1.0
        with prune._in_turn(tmp_path / "turn"):
            assert time.monotonic() - begun >= 2.0
    begun = time.monotonic()
    with prune._in_turn(tmp_path / "turn"):
        assert time.monotonic() - begun < 1.0, "given back"


class Killer:
    """Ends the process that unpacks it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


class Sleeper:
    """Keeps the process that unpacks it."""

    def __reduce__(self) -> Any:
        return time.sleep, (600,)


def test_the_command(tmp_path: Path) -> None:
    arguments = [
        "tune",
        "--tower",
        "tiny",
        "--budget",
        "64",
        "--out",
        tmp_path / "t.json",
        "--json",
        tmp_path / "d.json",
    ]
    result = RUNNER.invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert "8 of 8 decided" in result.output
    written = tuning_table.read(tmp_path / "t.json", "CPU")
    assert f"{len(written.entries)} unlike the heuristics" in result.output and not written.stale
    assert {"passport", "entries", "log"} == set(json.loads((tmp_path / "d.json").read_text()))


def test_the_commands_dry_run_and_refusals(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["tune", "--dry-run", "--budget", "1024", "--tower", "Qwen3-VL-8B"])
    assert result.exit_code == 0 and "qkv norm+rope 3456 x 1152, 1024 rows" in result.output
    assert "8 questions" in result.output and "s to compile and check" in result.output
    result = RUNNER.invoke(app, ["tune", "--dry-run", "--budget", "1024", "--tower", "all", "--op", "fc1"])
    assert result.exit_code == 0 and all(f"fc1 {kind}" in result.output for kind in ("norm+gelu_tanh", "rms+swiglu"))
    result = RUNNER.invoke(app, ["tune", "--tower", "huge"])
    assert result.exit_code == 2 and "no 'huge'" in result.output
    if not torch.cuda.is_available():
        result = RUNNER.invoke(app, ["tune"])
        assert result.exit_code == 2 and "needs an NVIDIA GPU" in result.output
