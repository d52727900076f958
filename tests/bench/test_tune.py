"""The tuner on a CPU, where all candidates run as the torch twin: what is asked, pruned, kept, resumed and written."""

import json
import os
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from fusedvit.aot import QWEN3_VL_4B, QWEN3_VL_8B  # noqa: E402
from fusedvit.bench import cases, kernel_bench, prune, tune  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.kernels import tables  # noqa: E402
from fusedvit.kernels.configs import LinearConfig, Target  # noqa: E402
from fusedvit.plan import choose  # noqa: E402

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
H200 = Target(name="NVIDIA H200")
RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def asked() -> list[tune.Question]:
    """The tiny tower's questions at one budget, one kind of linear layer and attention."""
    every = tune.questions([kernel_bench.spec_of("tiny")], (64,), FP32)
    return [q for q in every if q.task.name in ("proj", "fc2", "attention")]


def times(monkeypatch: pytest.MonkeyPatch, us: Callable[[Any], float]) -> None:
    monkeypatch.setattr(tune, "time_candidate", lambda cases, rows, config, device: [us(config)] * len(cases))


def no_prune(pairs: Any, step: Any) -> Iterator[tuple[int, str]]:
    yield from ((i, "") for i in range(len(pairs)))


def tuner(log: tune.Log, pruned: Any = no_prune, **options: Any) -> tune.Tuner:
    return tune.Tuner(CPU, FP32, log, pruned, **options)


def test_every_question_is_asked_once() -> None:
    one, two = (tune.questions([QWEN3_VL_8B] * n, (256, 1024), BF16) for n in (1, 2))
    assert one == two and len(one) == 2 * 8
    both = tune.questions([QWEN3_VL_8B, QWEN3_VL_4B], (1024,), BF16)
    assert len({q.task.key for q in both}) == len(both) == 16


def test_the_heuristic_is_the_first_candidate() -> None:
    for question in tune.questions([QWEN3_VL_8B], (256, 4096), BF16):
        found = tune.candidates(question, BF16, H200)
        first = choose(question.task, BF16, H200, tables.Table())
        assert found[0].config == first and len(set(found)) == len(found) > 1


def test_the_fastest_is_taken_and_read_back(
    asked: list[tune.Question], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: 1000.0 / config.block_m)
    entries = tuner(tune.Log(None, {})).run([q for q in asked if q.task.key.op == "linear"])
    assert [e["config"]["block_m"] for e in entries] == [64, 64]
    assert all(e["us"] < e["heuristic_us"] for e in entries)
    path = tmp_path / "cpu.json"
    tune.write(path, "CPU", entries)
    table = tables.read(path, "CPU")
    assert set(table.entries) == {q.task.key for q in asked if q.task.key.op == "linear"} and not table.stale


def three_tiles(question: Any, dtype: torch.dtype, target: Target) -> list[tune.Candidate]:
    return [tune.Candidate("triton", LinearConfig(m, 32, 32, 4, 2)) for m in (32, 64, 16)]


def test_a_pruned_or_wrong_candidate_is_never_taken(
    asked: list[tune.Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    (question,) = [q for q in asked if q.task.name == "proj"]
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: 1000.0 / config.block_m)

    def spills(pairs: list[Any], step: Any) -> Iterator[tuple[int, str]]:
        for i, (_, candidate) in enumerate(pairs):
            yield i, "8 bytes of spill stores" if candidate.config.block_m == 64 else ""

    (entry,) = tuner(tune.Log(None, {}), spills).run([question])
    assert entry["config"]["block_m"] == 32
    real = cases.compare
    monkeypatch.setattr(cases, "compare", lambda ours, ref, pt: real(ours * 1.01, ref, pt))
    assert tuner(tune.Log(None, {})).run([question]) == []


def test_a_run_that_was_cut_goes_on(
    asked: list[tune.Question], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter([0.0, *[0.3] * 6, 0.4, 1.0])
    monkeypatch.setattr(tune, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(tune, "candidates", three_tiles)
    linears = [q for q in asked if q.task.key.op == "linear"]
    measured: list[Any] = []
    times(monkeypatch, lambda config: measured.append(config) or float(config.block_m))
    path, stamp = tmp_path / "log.jsonl", {"gpu": "CPU"}
    first = tuner(tune.Log(path, stamp), deadline=0.5).run(linears)
    assert len(first) == 1 and len(measured) == 3
    with path.open("a", encoding="utf-8") as file:
        file.write('{"of": "cut in the mid')
    clock = iter([0.0] * 20)
    again = tuner(tune.Log(path, stamp)).run(linears)
    assert again[0] == first[0] and len(again) == 2 and len(measured) == 6
    clock = iter([0.0] * 20)
    anew = tune.Log(path, {"gpu": "another"})
    tuner(anew).run(linears)
    assert len(measured) == 12, "another GPU's log is not gone on with"


def test_short_of_time_what_was_checked_is_timed(asked: list[tune.Question], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three candidates of two questions: the first of each come first; time is up after these and one more."""
    clock = iter([0.0, 1.0, 2.0, 8.0, *[8.5] * 2])
    monkeypatch.setattr(tune, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(tune, "candidates", three_tiles)
    times(monkeypatch, lambda config: 1000.0 / config.block_m)
    linears = [q for q in asked if q.task.key.op == "linear"]
    entries = tuner(tune.Log(None, {}), deadline=10.0).run(linears)
    assert [e["config"]["block_m"] for e in entries] == [64, 32]


def test_a_table_keeps_what_was_not_asked_again(tmp_path: Path) -> None:
    def entry(rows: int, us: float) -> dict[str, Any]:
        key = {"op": "linear", "kind": "bias", "n": 64, "k": 64, "rows": rows, "dtype": "bfloat16"}
        return {**key, "form": "triton", "config": vars(LinearConfig(64, 64, 64, 4, 3)), "us": us}

    path = tmp_path / "cpu.json"
    tune.write(path, "CPU", [entry(64, 1.0), entry(128, 2.0)])
    tune.write(path, "CPU", [entry(128, 3.0)])
    assert [e["us"] for e in json.loads(path.read_text())["entries"]] == [1.0, 3.0]
    old = path.read_text().replace(tables.fingerprint(tables.FORMS[0]), "0" * 16)
    path.write_text(old)
    tune.write(path, "CPU", [entry(128, 4.0)])
    assert [e["us"] for e in json.loads(path.read_text())["entries"]] == [4.0], "measured on other sources"


@pytest.mark.parametrize("name", ["patch", "qkv", "proj", "fc1", "fc2", "merger_fc1", "merger_fc2", "attention"])
def test_every_case_checks_against_its_twin(name: str) -> None:
    question = next(q for q in tune.questions([kernel_bench.spec_of("tiny")], (64,), FP32) if q.task.name == name)
    candidate = tune.candidates(question, FP32, Target.of(CPU))[0]
    assert prune.problem_of((question, candidate), FP32, CPU) == ""


def test_pruning_survives_a_crash_and_a_hang(monkeypatch: pytest.MonkeyPatch, asked: list[tune.Question]) -> None:
    """Real processes. A candidate that kills its process, and one that never ends, are problems of theirs alone."""
    monkeypatch.setattr(prune, "PATIENCE_S", 15.0)
    good = (asked[0], tune.candidates(asked[0], FP32, Target.of(CPU))[0])
    pairs: list[Any] = [(Killer(), good[1]), good, (Sleeper(), good[1])]
    found = dict(prune.in_processes(2, FP32, CPU)(pairs, lambda text: None))
    assert found == {0: "crashed, or did not end", 1: "", 2: "crashed, or did not end"}


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
    assert len(tables.read(tmp_path / "t.json", "CPU").entries) == 8
    assert {"passport", "entries", "log"} == set(json.loads((tmp_path / "d.json").read_text()))


def test_the_commands_dry_run_and_refusals(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["tune", "--dry-run", "--budget", "1024", "--tower", "Qwen3-VL-8B"])
    assert result.exit_code == 0 and "qkv norm+rope 3456 x 1152, 1024 rows" in result.output
    result = RUNNER.invoke(app, ["tune", "--dry-run", "--budget", "1024", "--tower", "all", "--op", "fc1"])
    assert result.exit_code == 0 and all(f"fc1 {kind}" in result.output for kind in ("norm+gelu_tanh", "rms+swiglu"))
    result = RUNNER.invoke(app, ["tune", "--tower", "huge"])
    assert result.exit_code == 2 and "no 'huge'" in result.output
    if not torch.cuda.is_available():
        result = RUNNER.invoke(app, ["tune"])
        assert result.exit_code == 2 and "needs an NVIDIA GPU" in result.output
