"""The tuner on a CPU, where all candidates run as the reference: what is tried, checked, kept, resumed and written."""

import gc
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from fusedvit.bench import ops, timing  # noqa: E402
from fusedvit.bench.towers import GEOMETRIES, shallow, spec_of  # noqa: E402
from fusedvit.bench.tuning import candidates as tune_candidates  # noqa: E402
from fusedvit.bench.tuning import in_tower  # noqa: E402
from fusedvit.bench.tuning import tuner as tune  # noqa: E402
from fusedvit.bench.tuning.candidates import TuningTask, in_waves, tuning_tasks  # noqa: E402
from fusedvit.cli import tune as cli_tune  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.kernels import backends, tuning_table  # noqa: E402
from fusedvit.kernels.hopper.gemm_configs import hopper_gemm_candidates  # noqa: E402
from fusedvit.kernels.hopper.gemm_swap_ab_configs import hopper_gemm_config  # noqa: E402
from fusedvit.kernels.tile_configs import LinearConfig, Target, budget, contents_of, ladder  # noqa: E402
from fusedvit.model.plan import as_launched, choose, plan_for  # noqa: E402
from tests.support.specs import QWEN2_VL_7B, QWEN3_VL_4B, QWEN3_VL_8B  # noqa: E402

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
H200 = Target(name="NVIDIA H200")
RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def items() -> list[TuningTask]:
    """The tiny tower's questions at one budget, two linear layers and attention."""
    every = tuning_tasks([spec_of(GEOMETRIES["tiny"])], (64,), FP32)
    return [q for q in every if q.task.name in ("proj", "fc2", "attention")]


@pytest.fixture
def linears(items: list[TuningTask], monkeypatch: pytest.MonkeyPatch) -> list[TuningTask]:
    """Of these the linear layers, which have three candidates."""
    monkeypatch.setattr(tune, "candidates", three_tiles)
    return [q for q in items if q.task.key.op == "linear"]


def three_tiles(item: Any, dtype: torch.dtype, target: Target) -> list[Any]:
    """The heuristic's choice first."""
    return [LinearConfig(m, 32, 32, 4, 2) for m in (32, 64, 16)]


Times = Callable[[Callable[[Any], float]], None]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Makes a function of their configurations the candidates' times."""

    def of(us: Callable[[Any], float]) -> None:
        monkeypatch.setattr(tune, "time_candidates", lambda cases, rows, cs, device: [[us(c)] * len(cases) for c in cs])

    return of


def taller_is_faster(config: Any) -> float:
    return 1000.0 / config.block_m


def all_good(pairs: Any) -> Iterator[tuple[int, str]]:
    yield from ((i, "") for i in range(len(pairs)))


def tuner(log: tune.Log | None = None, check: Any = all_good, **options: Any) -> tune.Tuner:
    return tune.Tuner(CPU, FP32, log or tune.Log(None, {}), check, **options)


def tiles(entries: list[dict[str, Any]]) -> list[int]:
    """Rows of the tiles that were taken."""
    return [entry["config"]["block_m"] for entry in entries]


def say(monkeypatch: pytest.MonkeyPatch, item: TuningTask, config: Any) -> None:
    """The table in use says `config`."""
    monkeypatch.setattr(tuning_table, "table_for", lambda target: tuning_table.Table({item.task.key: config}))


def test_every_operation_is_tuned_once() -> None:
    one, two = (tuning_tasks([QWEN3_VL_8B] * n, (256, 1024), BF16) for n in (1, 2))
    assert one == two and len(one) == 2 * 9
    both = tuning_tasks([QWEN3_VL_8B, QWEN3_VL_4B], (1024,), BF16)
    assert len({q.task.key for q in both}) == len(both) == 18


def test_the_heuristic_is_the_first_candidate() -> None:
    for item in tuning_tasks([QWEN3_VL_8B], (256, 4096), BF16):
        found = tune_candidates.candidates(item, BF16, H200)
        first = choose(item.task, BF16, H200, tuning_table.Table())
        assert found[0] == first and len(set(found)) == len(found) > 1


@pytest.mark.parametrize("merge_unit", [1, 4])
def test_a_budget_is_judged_by_contents_of_its_own(merge_unit: int) -> None:
    for patches in ladder(64, 65536):
        full, content = contents_of(patches // merge_unit, merge_unit)
        assert merge_unit * full == patches == budget(merge_unit * content), "another budget's"
        below = 2 * content - full
        assert budget(merge_unit * below) < patches or patches == 64, "halfway to the budget below"
        assert budget(merge_unit * (below + 2)) == patches, "no further than that"


def test_the_entry_in_use_is_always_tried(linears: list[TuningTask], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the cost model thinks little of it: it was the fastest once."""
    say(monkeypatch, linears[0], LinearConfig(128, 32, 32, 4, 2))
    proposed = tuner().proposed(linears[0])
    assert [c.block_m for c in proposed] == [32, 64, 16, 128]
    say(monkeypatch, linears[0], proposed[1])
    assert [c.block_m for c in tuner().proposed(linears[0])] == [32, 64, 16]


def test_the_fastest_is_taken_and_read_back(linears: list[TuningTask], times: Times, tmp_path: Path) -> None:
    times(taller_is_faster)
    entries = tuner().run(linears)
    assert tiles(entries) == [64, 64] and all(e["us"] < e["heuristic_us"] for e in entries)
    path = tmp_path / "cpu.json"
    tuning_table.write(path, tuning_table.passport("CPU", "0"), entries)
    table = tuning_table.read(path, "CPU")
    assert set(table.entries) == {q.task.key for q in linears} and not table.stale


def test_a_refused_or_wrong_candidate_is_never_taken(
    linears: list[TuningTask], times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    times(taller_is_faster)

    def spills(which: int) -> Any:
        def check(pairs: list[Any]) -> Iterator[tuple[int, str]]:
            for i, (_, candidate) in enumerate(pairs):
                yield i, "8 bytes of spill stores" if candidate.block_m == which else ""

        return check

    assert tuner(check=spills(64)).run(linears[:1]) == [], "the heuristic's choice is the next"
    (entry,) = tuner(check=spills(32)).run(linears[:1])
    assert entry["config"]["block_m"] == 64 and "heuristic_us" not in entry
    real = ops.compare
    monkeypatch.setattr(ops, "compare", lambda ours, ref, pt: real(ours * 1.01, ref, pt))
    assert tuner().run(linears[:1]) == []


def test_a_wrong_output_is_checked_on_other_data(
    linears: list[TuningTask], times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other data: of attention some draw in hundreds is beyond the rule by chance."""
    times(taller_is_faster)
    real, seen = ops.compare, list[torch.Tensor]()

    def wrong_at_first(ours: torch.Tensor, ref: torch.Tensor, pt: torch.Tensor) -> Any:
        seen.append(ref.clone())
        return real(ours * (1.01 if len(seen) == 1 else 1.0), ref, pt)

    monkeypatch.setattr(ops, "compare", wrong_at_first)
    assert tiles(tuner().run(linears[:1])) == [64] and len(seen) == 2
    assert not torch.equal(*seen), "the same data would say the same"
    seen.clear()
    pair = linears[0], LinearConfig(32, 32, 32, 4, 3)
    assert tune_candidates.problem_of(pair, FP32, CPU) == "" and len(seen) == 2


@pytest.mark.parametrize("path", sorted(tuning_table.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_nothing_ships_that_is_slower_than_the_heuristics(path: Path) -> None:
    """At a full budget, by what was timed."""
    timed = [e for e in json.loads(path.read_text(encoding="utf-8"))["entries"] if "heuristic_us" in e]
    assert timed
    for entry in timed:
        assert entry["us"] <= (1 + tune.MARGIN) * entry["heuristic_us"] + 0.01, entry


def test_what_is_slower_at_a_full_budget_is_not_taken(
    linears: list[TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it gains on the budget's other contents."""
    for full, taken in ((10.1, True), (10.5, False)):
        of_tile = {32: [10.0, 10.0], 64: [full, 5.0], 16: [20.0, 20.0]}
        monkeypatch.setattr(tune, "time_candidates", lambda *a, of=of_tile: [of[c.block_m] for c in a[2]])
        assert tiles(tuner().run(linears[:1])) == [64] * taken


class Clock:
    """Stands for `time`: a second passes with every item or compilation that is told of."""

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


@pytest.fixture
def checks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "CHECKING", 1.0)


def test_a_run_that_was_cut_goes_on(
    linears: list[TuningTask], times: Times, tmp_path: Path, clock: Clock, checks_all: None
) -> None:
    measured: list[Any] = []
    times(lambda config: measured.append(config) or taller_is_faster(config))
    path, stamp = tmp_path / "log.jsonl", {"gpu": "CPU"}
    first = tuner(tune.Log(path, stamp), step=clock.step, deadline=6.5).run(linears)
    assert len(first) == 1 and len(measured) == 3, "six compilations, and one item before time is up"
    with path.open("ab") as file:
        file.write(b'\0\0\xff\n[]\n{}\n{"of": "cut in the mid')
    again = tuner(tune.Log(path, stamp)).run(linears)
    assert again[0] == first[0] and len(again) == 2 and len(measured) == 6
    tuner(tune.Log(path, {"gpu": "another"})).run(linears)
    assert len(measured) == 12, "another GPU's log is not gone on with"


def test_a_run_that_is_interrupted_keeps_what_it_found(linears: list[TuningTask], times: Times) -> None:
    left = iter([64.0, 32.0, 16.0])
    times(lambda config: next(left))
    kept: list[Any] = []
    with pytest.raises(StopIteration):
        tuner(keep=lambda entries, decided: kept.append((entries, decided))).run(linears)
    ((entries, decided),) = kept
    assert [e["us"] for e in entries] == [16.0] and decided == [linears[0].task.key]


@pytest.mark.parametrize("gain, taken", [(1.01, False), (1.05, True)])
def test_a_configuration_must_beat_the_heuristics_by_a_margin(
    linears: list[TuningTask], times: Times, gain: float, taken: bool
) -> None:
    times(lambda config: 10.0 if config.block_m == 32 else 10.0 / gain)
    log = tune.Log(None, {})
    assert len(tuner(log).run(linears[:1])) == taken and log.decided(linears[0])


@pytest.mark.parametrize("of_table, other, taken", [(9.9, 9.8, [16]), (9.9, 9.6, [64]), (10.1, 9.9, [])])
def test_what_the_table_says_stays_unless_something_is_clearly_faster(
    linears: list[TuningTask],
    times: Times,
    monkeypatch: pytest.MonkeyPatch,
    of_table: float,
    other: float,
    taken: list[int],
) -> None:
    """The heuristic's takes 10."""
    times(lambda config: {32: 10.0, 16: of_table, 64: other}[config.block_m])
    say(monkeypatch, linears[0], LinearConfig(16, 32, 32, 4, 2))
    assert tiles(tuner().run(linears[:1])) == taken


def test_what_matters_most_comes_first() -> None:
    every = tuning_tasks([QWEN2_VL_7B, QWEN3_VL_8B], tune_candidates.BUDGETS, BF16)
    waves = in_waves(every, [QWEN3_VL_8B])
    assert sorted(repr(q) for wave in waves for q in wave) == sorted(map(repr, every)) and len(waves) == 3
    first = [(q.task.name.startswith(tune_candidates.MERGED), q.task.key.rows) for q in waves[0]]
    assert {q.spec for q in waves[0]} == {QWEN3_VL_8B} and {q.spec for q in waves[1]} == {QWEN2_VL_7B}
    assert first[:36] == [(False, 256 << i) for i in range(6) for _ in range(6)], "powers of two"
    assert [merger for merger, _ in first] == sorted(merger for merger, _ in first), "blocks before mergers"
    assert min(q.task.key.rows for q in waves[2] if q.task.name == "fc1") > 16384


def test_the_shortlist_holds_the_heuristics_choice_and_the_likely_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the Hopper backend only names and numbers are needed, which are there without a GPU."""
    item = next(q for q in tuning_tasks([QWEN3_VL_8B], (1024,), BF16) if q.task.name == "qkv")
    offered = hopper_gemm_candidates(1024, 3456, 1152, H200, "norm+rope")
    plain = [c for c in tune_candidates.candidates(item, BF16, H200) if isinstance(c, LinearConfig)]
    triton = backends.backend_named("linear", "triton")
    assert triton is not None
    usual = triton.heuristic(item.task.key, BF16, H200, item.task.widest)
    own = offered[-1]
    every = list(dict.fromkeys([own, *offered, *plain]))
    found = tune_candidates.shortlist(item, every, BF16, H200)
    predicted = {c: tune_candidates.predicted_us(item.task.key, c, H200) for c in (own, *offered)}
    best = sorted((c for c in predicted if c != own), key=predicted.__getitem__)[: tune_candidates.BEST]
    assert found == [own, *best, usual] and all(0 < us < 100 for us in predicted.values())
    assert tune_candidates.shortlist(item, plain, BF16, H200) == plain, "nothing to choose from"
    chosen = hopper_gemm_config(1024, 3456, 1152, BF16, H200, "norm+rope")
    assert min(predicted, key=predicted.__getitem__) == chosen, "the model is the heuristic's own"


NAMES = ["patch", "qkv", "proj", "fc1", "fc2", "deepstack_fc1", "merger_fc1", "merger_fc2", "attention"]


@pytest.mark.parametrize("name", NAMES)
def test_every_case_checks_against_its_reference(name: str) -> None:
    item = next(q for q in tuning_tasks([spec_of(GEOMETRIES["tiny"])], (64,), FP32) if q.task.name == name)
    candidate = tune_candidates.candidates(item, FP32, Target.of(CPU))[0]
    assert tune_candidates.problem_of((item, candidate), FP32, CPU) == ""


def test_checking_survives_a_crash_and_a_hang(monkeypatch: pytest.MonkeyPatch, items: list[TuningTask]) -> None:
    """Real processes. A candidate that kills its process, and one that never ends, are problems of theirs alone."""
    monkeypatch.setattr(tune_candidates, "PATIENCE_S", 30.0)  # processes that import torch, on a busy machine
    good = (items[0], tune_candidates.candidates(items[0], FP32, Target.of(CPU))[0])
    pairs: list[Any] = [(Killer(), good[1]), good, (Sleeper(), good[1])]
    found = dict(tune_candidates.in_processes(2, FP32, CPU)(pairs))
    assert found == {0: "crashed, or did not end", 1: "", 2: "crashed, or did not end"}


def test_candidates_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who comes while another has its turn waits for it, though not for ever."""
    monkeypatch.setattr(tune_candidates, "LOCK_S", 5.0)
    begun = time.monotonic()
    with tune_candidates.locked(tmp_path / "turn"):
        assert time.monotonic() - begun < 5.0
        with tune_candidates.locked(tmp_path / "turn"):
            assert time.monotonic() - begun >= 5.0
    begun = time.monotonic()
    with tune_candidates.locked(tmp_path / "turn"):
        assert time.monotonic() - begun < 5.0, "given back"


class Killer:
    """Ends the process that unpacks it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


class Sleeper:
    """Keeps the process that unpacks it."""

    def __reduce__(self) -> Any:
        return time.sleep, (600,)


def test_the_command(tmp_path: Path) -> None:
    out, document = tmp_path / "t.json", tmp_path / "d.json"
    words = f"tune --tower tiny --budget 64 --out {out} --json {document}".split()
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "9 of 9 decided" in result.output
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else cli_tune.CPU_NAME
    written = tuning_table.read(out, gpu) if out.exists() else tuning_table.Table()
    assert f"{len(written.entries)} unlike the heuristics" in result.output and not written.stale
    assert ("no table is written" in result.output) != out.exists()
    assert {"passport", "entries", "log", "gains", "refused"} == set(json.loads(document.read_text()))


@pytest.mark.parametrize(
    "words, code, said",
    [
        (
            "--dry-run --budget 1024 --tower Qwen3-VL-8B",
            0,
            ["qkv norm+rope 3456 x 1152, 1024 rows", "9 operations, ", " compilations"],
        ),
        ("--dry-run --budget 1024 --op fc3", 2, ["--op: no 'fc3'; there are 'patch'"]),
        ("--dry-run --budget 1024 --tower all --op fc1", 0, ["fc1 norm+gelu_tanh", "fc1 rms+swiglu"]),
        ("--tower huge", 2, ["no 'huge'"]),
        ("--tower tiny --out .", 2, ["cannot be written (a folder)"]),
        pytest.param("", 2, ["needs an NVIDIA GPU"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="one")),
    ],
)
def test_the_commands_dry_run_and_refusals(words: str, code: int, said: list[str]) -> None:
    result = RUNNER.invoke(app, ["tune", *words.split()])
    assert result.exit_code == code and all(part in result.output for part in said), result.output


@pytest.mark.parametrize(
    "gains, worth",
    [
        ({}, True),  # no workload runs at a budget that has entries
        ({"a": [1.02, 1.02], "b": [1.01, 1.03]}, True),
        ({"a": [1.05, 1.0], "b": [1.05, 1.0]}, False),
        ({"a": [1.005, 1.005]}, False),
    ],
)
def test_a_table_is_worth_it_if_whole_towers_are_faster_in_every_round(gains: Any, worth: bool) -> None:
    assert in_tower.worth_it(gains) == worth


def test_whole_towers_are_timed_where_choices_differ() -> None:
    spec = spec_of(GEOMETRIES["tiny"])
    qkv = next(q.task.key for q in tuning_tasks([spec], (64,), FP32) if q.task.name == "qkv")
    entries = [tuning_table.entry_of(qkv, LinearConfig(32, 32, 32, 4, 2), us=1.0)]
    tower = in_tower.WholeTower(GEOMETRIES["tiny"], FP32, CPU)
    found = in_tower.tower_gains(tower, entries, {"one": [(1, 8, 8)], "other": [(1, 32, 32)]})
    assert list(found) == ["one"] and len(found["one"]) == in_tower.ROUNDS and all(0.1 < r < 10 for r in found["one"])
    assert in_tower.table_of(entries).entries == {qkv: LinearConfig(32, 32, 32, 4, 2)}


def entries_of(*names: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Entries of these operations of the tiny tower at 64 patches, and the operation of each configuration."""
    every = [q for q in tuning_tasks([spec_of(GEOMETRIES["tiny"])], (64,), FP32) if q.task.name in names]
    configs = {q.task.name: LinearConfig(32, 32, 32, 4, 2 + i) for i, q in enumerate(every)}
    entries = [tuning_table.entry_of(q.task.key, configs[q.task.name]) for q in every]
    return entries, {name: repr(config) for name, config in configs.items()}


def kept_where(monkeypatch: pytest.MonkeyPatch, saved: dict[str, float]) -> list[str]:
    """Operations whose entries are kept, where each saves so many of a tower's 100 ms."""
    entries, names = entries_of(*saved)
    asked: list[str] = []

    def ms(tower: Any, items: Any, plans: dict[str, Any], seconds: float) -> dict[str, list[float]]:
        asked.extend(plans)
        return {who: [100.0 - sum(saved[name] for name, of in names.items() if of in repr(plan))] * 2
                for who, plan in plans.items()}  # fmt: skip

    monkeypatch.setattr(in_tower.WholeTower, "ms", ms)
    tower = in_tower.WholeTower(GEOMETRIES["tiny"], FP32, CPU)
    kept = in_tower.proven(tower, entries)
    assert asked[:2] == [in_tower.HEURISTICS, in_tower.TUNED] or not asked
    by_key = {tuning_table.key_of(entry, "entry"): entry for entry in kept}
    return [name for name, of in names.items() if any(repr(c) == of for c in in_tower.table_of(kept).entries.values())
            and len(by_key) == len(kept)]  # fmt: skip


@pytest.mark.parametrize(
    "saved, kept",
    [
        ({"qkv": 5.0, "proj": 1.0}, ["qkv", "proj"]),
        ({"qkv": 5.0, "proj": 0.1}, ["qkv"]),  # too little for a kernel to compile
        ({"qkv": 5.0, "proj": -2.0}, ["qkv"]),  # faster alone, and slower between its neighbours
        ({"qkv": 0.2, "proj": 0.2}, []),
        ({"qkv": 2.0}, ["qkv"]),
        ({"qkv": -1.0}, []),
        ({"merger_fc1": 3.0, "qkv": -1.0}, ["merger_fc1"]),  # whose rows are merged tokens
    ],
)
def test_entries_are_proven_in_the_whole_tower(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, float], kept: list[str]
) -> None:
    assert sorted(kept_where(monkeypatch, saved)) == sorted(kept)


def test_overlapped_mergers_are_timed_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = in_tower.WholeTower.__new__(in_tower.WholeTower)
    tower.spec, tower.dtype, tower.device = spec_of(GEOMETRIES["Qwen3-VL-8B"]), BF16, CPU
    tower._weights, tower._side = mock.Mock(), mock.Mock()
    made, ran = mock.Mock(), mock.Mock()
    monkeypatch.setattr(in_tower, "allocate", made)
    monkeypatch.setattr(in_tower, "encode", ran)
    layout = plan_for(tower.spec, 196, BF16, Target(), tuning_table.Table()).layout
    for mergers in ((0, 1, 2), ()):
        plan = mock.Mock(overlapped=mergers, layout=layout)
        tower._replay(in_tower.content_of(tower.spec, 196), plan)()
        assert made.call_args.kwargs["overlap"] == (len(mergers), 196)
        assert ran.call_args.args[-2:] == (plan, tower._side)


@pytest.mark.parametrize("name", ["Qwen3-VL-8B", "Qwen2.5-VL-7B", "GLM-4.1V-9B", "Gemma-4-31B"])
def test_what_fills_a_budget_falls_into_no_smaller_one(name: str) -> None:
    spec = spec_of(GEOMETRIES[name])
    for rows in tune_candidates.BUDGETS:
        items = in_tower.content_of(spec, rows)
        tokens = sum(item.tokens for item in items)
        assert tokens <= rows and not any(item.h % spec.merge_size or item.w % spec.merge_size for item in items)
        assert budget(tokens) == rows or rows % spec.merge_unit, (rows, items)
        assert len(items) == 1 + (rows > in_tower.LARGEST_IMAGE)


def test_a_captured_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator would give a graph's buffers to the next one, as nothing else holds them."""
    monkeypatch.setattr(timing.torch, "cuda", mock.MagicMock())

    class Buffers:
        def run(self, index: int) -> None:
            pass

    buffers = Buffers()
    alive = weakref.ref(buffers)
    replay = timing.captured(buffers.run, 1, torch.device("cuda"))
    del buffers
    gc.collect()
    assert alive() is not None
    replay()
    del replay
    gc.collect()
    timing.torch.cuda.reset_mock()
    assert alive() is None


@pytest.mark.parametrize("name", ["Qwen3-VL-8B", "Gemma-4-31B"])
def test_without_new_kernels_only_what_the_tower_compiles_is_tried(on_hopper: None, name: str) -> None:
    spec, target = spec_of(GEOMETRIES[name]), Target()
    usual = cli_tune._usual((name,), BF16, target)
    free, bound = tuner(), tuner(only=usual)
    free.dtype = bound.dtype = BF16
    items, new = tuning_tasks([spec], (256, 832, 4096), BF16), 0
    for item in items:
        for candidate in bound.proposed(item):
            launched = as_launched(spec, item.task.name, item.task.key.rows, candidate)
            assert tune_candidates.compilation(item, launched) in usual
        new += len(free.proposed(item)) - len(bound.proposed(item))
    assert new > 20


KEPT = {"one": ["qkv", "proj"], "other": ["qkv"]}  # by tower, of the operations that they share


@pytest.mark.parametrize(
    "gains, left, refused",
    [
        ({"one": {"a": [1.1, 1.1]}, "other": {"a": [1.1, 1.1]}}, ["fc2", "qkv"], []),
        ({"one": {"a": [1.1, 1.1]}, "other": {"a": [1.0, 1.1]}}, ["fc2"], ["other"]),
        ({"one": {}, "other": {}}, ["fc2", "qkv"], []),  # at budgets of no workload
    ],
)
def test_an_entry_is_kept_if_every_tower_that_has_it_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gains: Any, left: list[str], refused: list[str]
) -> None:
    entries, _ = entries_of("qkv", "proj", "fc2")
    names = ["qkv", "proj", "fc2"]
    named = dict(zip(names, sorted(entries, key=lambda e: names.index(operation_of(e))), strict=True))
    monkeypatch.setattr(cli_tune, "GEOMETRIES", {name: GEOMETRIES["tiny"] for name in KEPT})
    monkeypatch.setattr(in_tower, "entries_of", lambda spec, dtype, of: [e for e in of if e is not named["fc2"]])
    asked: list[list[str]] = []

    def of_tower(name: str, tuner: Any, own: list[Any]) -> Any:
        asked.append([operation_of(entry) for entry in own])
        return [entry for entry in own if operation_of(entry) in KEPT[name]], gains[name]

    monkeypatch.setattr(cli_tune, "_of_tower", of_tower)
    run = tuner()
    monkeypatch.setattr(run, "entries", lambda items: entries)
    passport = tuning_table.passport("CPU", "0")
    found = cli_tune._prove(run, [], tuple(KEPT), tmp_path / "t.json", passport, cli_tune.Console(quiet=True))
    assert sorted(map(operation_of, found["entries"])) == left and found["refused"] == refused
    assert len(tuning_table.read(tmp_path / "t.json", "CPU").entries) == len(left)
    assert sorted(asked[0]) == ["proj", "qkv"] and sorted(asked[1]) == ["proj", "qkv"]


def operation_of(entry: dict[str, Any]) -> str:
    """The tiny tower's operation at 64 patches that an entry is of."""
    every = tuning_tasks([spec_of(GEOMETRIES["tiny"])], (64,), FP32)
    return next(q.task.name for q in every if q.task.key == tuning_table.key_of(entry, "entry"))


@pytest.mark.parametrize("name", ["Gemma-4-E4B", "GLM-5.3-Flash", "Qwen2.5-VL-7B"])
def test_whole_towers_of_every_kind_are_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = shallow(GEOMETRIES[name], 1)
    spec, grid = spec_of(geometry), geometry.rows([(1, 6, 6)])
    proj = next(q.task.key for q in tuning_tasks([spec], (64,), FP32) if q.task.name == "proj")
    entries = [tuning_table.entry_of(proj, LinearConfig(32, 32, 32, 4, 2), us=1.0)]
    monkeypatch.setattr(in_tower, "ROUND_S", 0.01)
    with torch.inference_mode():
        tower = in_tower.WholeTower(geometry, FP32, CPU)
        assert list(in_tower.tower_gains(tower, entries, {"one": grid})) == ["one"]


def test_what_gains_nothing_is_refused(tmp_path: Path) -> None:
    tuner = tune.Tuner(CPU, FP32, tune.Log(None, {}), lambda pairs: iter(()))
    items, console = tuning_tasks([QWEN3_VL_8B], (256,), FP32), cli_tune.Console(quiet=True)
    entry = tuning_table.entry_of(items[0].task.key, LinearConfig(32, 32, 32, 4, 2))
    passport = tuning_table.passport("CPU", "0")
    cli_tune._write(tmp_path / "t.json", passport, tuner, items, [], console)
    assert not (tmp_path / "t.json").exists()
    cli_tune._write(tmp_path / "t.json", passport, tuner, items, [entry], console)
    assert len(tuning_table.read(tmp_path / "t.json", "CPU").entries) == 1
