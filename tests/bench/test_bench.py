"""The bench on a CPU with the tiny tower: gates, schema, ratios, files. What it measures is another matter."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from fusedvit.bench import engine_like, kernel_bench, plots, readme_speed, roofline, rows, split, timing, tower_bench  # noqa: E402
from fusedvit.bench import towers as bench_towers  # noqa: E402
from fusedvit.bench.workloads import WORKLOADS, image, sweep, tokens, video  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402

CPU = torch.device("cpu")
SMALL = {"one": [(1, 4, 4)], "two and a video": [(1, 4, 6), (1, 2, 4), (2, 4, 4)]}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    options = tower_bench.Options(("tiny",), SMALL, seconds=0, dtype=torch.float32)
    return tower_bench.measure(options, CPU)


def test_every_contender_is_gated_and_timed(document: dict[str, Any]) -> None:
    found = document["towers"]["tiny"]["workloads"]
    assert list(found) == list(SMALL)
    for name, row in found.items():
        assert row["tokens"] == tokens(SMALL[name]) and row["floor_ms"] > 0
        assert set(row["ms"]) == {"hf", "hf, linear patches", "ours eager", "ours", "engine-like torch"}
        assert set(row["parity"]) == set(row["ms"]) - {"hf"}
        assert all(gate["passed"] for gate in row["parity"].values()), row["parity"]
        assert row["engine_like"] == "engine-like torch"
        assert set(row["speedup"]) == set(row["ms"]) - {"ours"}
        assert all(s["low"] <= s["median"] <= s["high"] and s["rounds"] >= 5 for s in row["speedup"].values())
        assert row["floor_percent"] == pytest.approx(100 * row["floor_ms"] / row["ms"]["ours"]["median"])


def test_a_wrong_answer_gets_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine_like.forward

    def off(*arguments: Any) -> Any:
        hidden, merged, deepstack = real(*arguments)
        return hidden, merged * 1.01, deepstack

    monkeypatch.setattr(engine_like, "forward", off)
    options = tower_bench.Options(("tiny",), {"one": SMALL["one"]}, seconds=0, dtype=torch.float32)
    row = tower_bench.measure(options, CPU)["towers"]["tiny"]["workloads"]["one"]
    assert (
        not row["parity"]["engine-like torch"]["passed"] and "max error" in row["parity"]["engine-like torch"]["reason"]
    )
    assert "engine-like torch" not in row["ms"] and "engine-like torch" not in row["speedup"]
    assert row["engine_like"] is None


def test_flat_rows_and_csv(document: dict[str, Any], tmp_path: Path) -> None:
    found = list(rows.flat(document))
    assert len(found) == 10 and all(set(row) == set(rows.FIELDS) for row in found)
    rows.write_csv(document, tmp_path / "new" / "bench.csv")
    with (tmp_path / "new" / "bench.csv").open(encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == rows.FIELDS and [r["contender"] for r in read] == [r["contender"] for r in found]


def test_the_readmes_tables_name_ours_and_the_peers(document: dict[str, Any]) -> None:
    ((head, found),) = readme_speed.speed_tables(document).values()
    assert [row[0] for row in found] == list(SMALL) and all(len(row) == len(head) for row in found)
    row = document["towers"]["tiny"]["workloads"]["one"]
    ratio = row["speedup"]["engine-like torch"]["median"]
    assert found[0][3] == f"{row['ms']['engine-like torch']['median']:.2f} ({ratio:.2f} x torch)"
    assert found[0][2] == f"{row['ms']['ours']['median']:.2f}"


def test_plots_of_what_there_is(document: dict[str, Any], tmp_path: Path) -> None:
    spec = kernel_bench.spec_of("tiny")
    (speedup,) = plots.draw(document, tmp_path / "cpu")
    assert Image.open(speedup).size[0] > 500
    row = document["towers"]["tiny"]["workloads"]["one"]
    costs = {name: vars(cost) for name, cost in roofline.tower_costs(spec, SMALL["one"]).items()}
    on_gpu = row | {"split_ms": dict.fromkeys(costs, 0.1), "costs": costs}
    made = plots.draw(document | {"towers": {"tiny": {"workloads": {"one": on_gpu}}}}, tmp_path / "gpu")
    assert [path.name for path in made] == ["speedup-tiny.png", "split-tiny.png", "roofline-tiny.png"]
    assert all(Image.open(path).size[0] > 500 for path in made)


def test_the_command(tmp_path: Path) -> None:
    outputs = ["--json", tmp_path / "b.json", "--csv", tmp_path / "b.csv", "--plots", tmp_path / "plots"]
    arguments = ["bench", "--tower", "tiny", "--workload", "image 56 px", "--no-sweep", "--seconds", "0", *outputs]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert {"passport", "towers", "ceilings"} <= set(written)
    said = "fusedvit bench --tower tiny --workload 'image 56 px' --no-sweep --json b.json"
    assert written["passport"]["command"] == said
    assert list(written["towers"]["tiny"]["workloads"]) == ["image 56 px"]
    assert (tmp_path / "b.csv").exists() and list((tmp_path / "plots").glob("*.png"))
    assert "image 56 px" in result.output and "engine-like" in result.output


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--tower", "huge"], "no 'huge'; there are 'Qwen3-VL-8B'"),
        (["--tower", "tiny", "--workload", "2 x 2 px"], "no '2 x 2 px'"),
        (["--tower", "tiny", "--compile", "nothing"], "no 'nothing'"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2 and said in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_real_towers_need_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2 and "needs an NVIDIA GPU" in result.output


def test_kernels_alone(tmp_path: Path) -> None:
    arguments = ["bench", "kernels", "--tower", "tiny", "--json", str(tmp_path / "k.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "k.json").read_text(encoding="utf-8"))["rows"]
    assert [row["op"] for row in found] == ["patch", "qkv", "proj", "fc1", "fc2", "attention"]
    assert all(row["us"] > 0 and row["peers_us"] and row["floor_us"] > 0 for row in found)


def test_ratios_are_taken_round_by_round() -> None:
    found = timing.ratios([2.0, 20.0, 2.0], [1.0, 10.0, 2.0])
    assert (found.median, found.low, found.high, found.rounds) == (2.0, 1.0, 2.0, 3)


def test_workloads_of_the_sweep() -> None:
    assert image(448) == WORKLOADS["1 x 448 px"] and video(8) == WORKLOADS["video, 8 frames 224 px"]
    assert image(56) == [(1, 4, 4)] and image(2560) == [(1, 160, 160)] and video(1) == [(1, 14, 14)]
    assert len(sweep()) == 20 and all(h % 2 == 0 == w % 2 for grid in sweep().values() for _, h, w in grid)


def test_the_floor_is_that_of_the_published_figures() -> None:
    """Figures known for the 8B's tower, to two digits."""
    spec = kernel_bench.spec_of("Qwen3-VL-8B")
    known = {"1 x 224 px": 0.29, "1 x 448 px": 1.00, "1 x 1024 px": 7.34, "1 x 2048 px": 61.1, "mixed": 10.9}
    for name, ms in known.items():
        assert roofline.tower_floor_ms(spec, WORKLOADS[name]) == pytest.approx(ms, rel=0.1), name


def test_a_replay_is_split_by_what_launched_it() -> None:
    spec = kernel_bench.spec_of("tiny")
    order = split.launch_order(spec)
    assert order.count("qkv") == 2 and order.count("merger_fc2") == 2 and order[0] == "metadata"
    found = split.by_operation([("k", 1000.0)] * len(order), spec)
    assert found["qkv"] == 2.0 and sum(found.values()) == len(order)
    assert split.by_operation([("a", 500.0), ("b", 500.0), ("a", 1.0)], spec) == {"a": 0.501, "b": 0.5}


def test_twins_share_parameters_and_nothing_else() -> None:
    tower, wide = bench_towers.build(bench_towers.GEOMETRIES["tiny"], torch.float32, CPU)
    twin = bench_towers.twin(tower)
    pairs = list(zip(tower.parameters(), twin.parameters(), strict=True))
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    pixels, grid = torch.randn(16, bench_towers.patch_width(tower)), torch.tensor([(1, 4, 4)])
    with torch.no_grad():
        assert torch.equal(tower(pixels, grid_thw=grid).pooler_output, twin(pixels, grid_thw=grid).pooler_output)


@pytest.mark.gpu
def test_gpu_the_engine_like_peer_is_as_fast_as_known() -> None:
    """At most 1.05 x what an engine-like encoder took on an H200 (bf16, FA3): a peer of straw would flatter us."""
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the figures are an H200's")
    known = dict(zip(WORKLOADS, (2.16, 3.55, 4.26, 2.98, 14.1, 16.5, 20.2, 109.3, 62.1), strict=True))
    options = tower_bench.Options(("Qwen3-VL-8B",), dict(WORKLOADS), seconds=0.5, split=False)
    found = tower_bench.measure(options, torch.device("cuda"))["towers"]["Qwen3-VL-8B"]["workloads"]
    slow = {n: (r["ms"][r["engine_like"]]["median"], known[n]) for n, r in found.items()}
    assert {n: t for n, t in slow.items() if t[0] > 1.05 * t[1]} == {}


def test_times_that_cannot_be_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose metadata was freed did once pass its gate and then raced through garbage."""
    monkeypatch.setattr(tower_bench.roofline, "tower_floor_ms", lambda spec, grid: 1e6)
    options = tower_bench.Options(("tiny",), {"one": SMALL["one"]}, seconds=0, dtype=torch.float32)
    row = tower_bench.measure(options, CPU)["towers"]["tiny"]["workloads"]["one"]
    assert not row["ms"] and "under the floor" in row["parity"]["ours"]["reason"]


def test_an_answer_that_changes_is_not_believed() -> None:
    outputs = [torch.zeros(2)]
    engine = engine_like.EngineLike(lambda: outputs[0].add_(1), outputs, ())
    contender = timing.Contender("engine-like x", engine.run)
    before = tower_bench._answer(contender, {"engine-like x": engine})
    said = tower_bench._afterwards(contender, [1.0], 0.5, before, {"engine-like x": engine})
    assert said == "another answer after the timing than before"
    still = engine_like.EngineLike(lambda: None, outputs, ())
    contender = timing.Contender("engine-like x", still.run)
    before = tower_bench._answer(contender, {"engine-like x": still})
    assert tower_bench._afterwards(contender, [1.0], 0.5, before, {"engine-like x": still}) == ""
