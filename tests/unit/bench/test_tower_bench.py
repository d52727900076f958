"""The bench with the tiny tower: gates, schema, ratios, files. What it measures is another matter.

Commands measure the GPU if there is one, all else a CPU.
"""

import dataclasses
import json
import math
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from fusedvit.bench import baselines, ops, tables, timing, tower_bench, workloads  # noqa: E402
from fusedvit.bench import towers as bench_towers  # noqa: E402
from fusedvit.bench.workloads import WORKLOADS, image, sweep, tokens, video  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.kernels import backends, tile_configs  # noqa: E402

CPU = torch.device("cpu")
LINEARS = ["patch", "qkv", "proj", "fc1", "fc2", "deepstack_fc1", "merger_fc1", "merger_fc2"]
SMALL = {"one": [(1, 4, 4)], "two and a video": [(1, 4, 6), (1, 2, 4), (2, 4, 4)]}


def measured(workloads: dict[str, Any], **options: Any) -> dict[str, Any]:
    """On a CPU, where Triton's interpreter runs the kernel of the engine-like tower, also beside a GPU."""
    kernel = InterpretedFunction(baselines._rotate_kernel.fn)
    keep = options.pop("keep", lambda document: None)
    asked = tower_bench.Options(("tiny",), workloads, seconds=0, dtype=torch.float32, **options)
    with mock.patch.object(baselines, "_rotate_kernel", kernel):
        return tower_bench.measure(asked, CPU, keep=keep)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    with mock.patch.object(timing, "CALLS", ((3, math.inf),)):  # however slow this machine is
        return measured(SMALL)


def test_every_contender_is_gated_and_timed(document: dict[str, Any]) -> None:
    found = document["towers"]["tiny"]["workloads"]
    assert list(found) == list(SMALL)
    for name, row in found.items():
        assert row["tokens"] == tokens(SMALL[name]) and row["floor_ms"] > 0
        assert set(row["ms"]) == {"hf", "ours eager", "ours", "engine-like torch"}
        assert set(row["parity"]) == set(row["ms"]) - {"hf"}
        assert all(gate["passed"] for gate in row["parity"].values()), row["parity"]
        assert row["engine_like"] == "engine-like torch"
        assert set(row["speedup"]) == set(row["ms"]) - {"ours"}
        assert all(s["low"] <= s["median"] <= s["high"] and s["rounds"] >= 5 for s in row["speedup"].values())
        assert set(row["first_ms"]) == {"hf", "ours eager", "ours"}, "those on a wall clock"
        assert row["calls_in_a_burst"] == 3
        assert row["floor_percent"] == pytest.approx(100 * row["floor_ms"] / row["ms"]["ours"]["median"])


def test_a_wrong_output_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = baselines.forward

    def off(*arguments: Any) -> Any:
        hidden, merged, deepstack = real(*arguments)
        return hidden, merged * 1.01, deepstack

    monkeypatch.setattr(baselines, "forward", off)
    row = measured({"one": SMALL["one"]})["towers"]["tiny"]["workloads"]["one"]
    assert (
        not row["parity"]["engine-like torch"]["passed"] and "max error" in row["parity"]["engine-like torch"]["reason"]
    )
    assert "engine-like torch" not in row["ms"] and "engine-like torch" not in row["speedup"]
    assert row["engine_like"] is None


def test_what_fails_leaves_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("no kernel for this layout")

    real, kept = tower_bench.row, []
    monkeypatch.setattr(baselines, "prepare", refuse)
    monkeypatch.setattr(tower_bench, "row", lambda *a: refuse() if a[2] == "one" else real(*a))
    document = measured(SMALL, short=True, keep=lambda d: kept.append(len(d["towers"]["tiny"]["workloads"])))
    found = document["towers"]["tiny"]
    assert found["failed"] == {"one": "RuntimeError: no kernel for this layout"} and kept == [0, 0, 1]
    (row,) = found["workloads"].values()
    assert row["failed"] == {"engine-like torch": "RuntimeError: no kernel for this layout"}
    assert set(row["ms"]) == {"hf", "ours"} and row["engine_like"] is None
    out = StringIO()
    tables.show_towers(document, Console(file=out, width=200))
    assert out.getvalue().count("no kernel for this layout") == 2


def test_the_table_of_a_tower_names_ours_and_the_peers(document: dict[str, Any]) -> None:
    rows = document["towers"]["tiny"]["workloads"]
    head, found = tables.tower_table(rows)
    assert [row[0] for row in found] == list(SMALL) and all(len(row) == len(head) for row in found)
    row = dict(zip(head, found[0], strict=True))
    ms, ratio, first = (rows["one"][part] for part in ("ms", "speedup", "first_ms"))
    assert row["ours, ms"] == f"{ms['ours']['median']:.2f}"
    assert row["ours, CPU caches cold, ms"] == f"{first['ours']['median']:.2f}"
    engine = "engine-like torch"
    assert row["engine-like, ms (ratio)"] == f"{ms[engine]['median']:.2f} ({ratio[engine]['median']:.2f}) torch"


def test_the_command(tmp_path: Path) -> None:
    arguments = ["bench", "--tower", "tiny", "--workload", "image 56 px", "--no-sweep", "--seconds", "0"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--json", str(tmp_path / "b.json")])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert {"passport", "towers", "ceilings"} <= set(written)
    said = "fusedvit bench --tower tiny --workload 'image 56 px' --no-sweep --seconds 0.0 --json b.json"
    assert written["passport"]["command"] == said
    assert list(written["towers"]["tiny"]["workloads"]) == ["image 56 px"]
    assert "image 56 px" in result.output and "engine-like" in result.output


def test_the_short_run(tmp_path: Path) -> None:
    arguments = ["bench", "--short", "--tower", "tiny", "--workload", "image 56 px", "--rows", "64", "--seconds", "0"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--json", str(tmp_path / "s.json")])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    row = written["towers"]["tiny"]["workloads"]["image 56 px"]
    engines = {"engine-like torch"} | ({"engine-like cudnn"} if torch.cuda.is_available() else set())
    assert set(row["ms"]) == {"hf", "ours"} | engines and row["parity"]["ours"]["passed"]
    assert [found["op"] for found in written["operations"]] == LINEARS
    assert "--short --seconds 0.0 --rows 64 --json s.json" in written["passport"]["command"]
    assert list(tmp_path.iterdir()) == [tmp_path / "s.json"]


def test_backends_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tile_configs, "_failed", {})
    arguments = ["bench", "kernels", "--tower", "tiny", "--without", "attention/hopper", "--json", str(tmp_path / "k")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert tile_configs._failed == {"attention/hopper": "left out by --without"}
    said = json.loads((tmp_path / "k").read_text(encoding="utf-8"))["passport"]["command"]
    assert said == "fusedvit bench kernels --tower tiny --without attention/hopper --json k"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--tower", "huge"], "no 'huge'; there are 'Qwen2-VL-7B'"),
        (["--tower", "tiny", "--workload", "2 x 2 px"], "no '2 x 2 px'"),
        (["--tower", "tiny", "--compile", "nothing"], "no 'nothing'"),
        (["--tower", "tiny", "--without", "linear/triton"], "no 'linear/triton'; there are"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2 and said in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_real_towers_need_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2 and "needs an NVIDIA GPU" in result.output


def test_kernels_of_fewer_patches_than_a_token_has(tmp_path: Path) -> None:
    arguments = ["bench", "kernels", "--tower", "tiny", "--rows", "3", "--json", str(tmp_path / "k.json")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    found = json.loads((tmp_path / "k.json").read_text(encoding="utf-8"))["rows"]
    assert {row["shape"].split()[0] for row in found} == {"1", "3"}


def test_kernels_alone(tmp_path: Path) -> None:
    arguments = ["bench", "kernels", "--tower", "tiny", "--commit", "abc", "--json", str(tmp_path / "k.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "k.json").read_text(encoding="utf-8"))
    found, on_gpu = document["rows"], torch.cuda.is_available()
    sizes, layouts = (ops.ROWS, ops.SEQUENCES) if on_gpu else (ops.ROWS_ON_CPU, ops.SEQUENCES_ON_CPU)
    assert document["passport"]["commit"] == "abc"
    # On a GPU some layouts are of short frames in a large budget, which have tiles of their own.
    names = [row["op"].removeprefix("short_") for row in found]
    assert names == LINEARS * len(sizes) + ["attention"] * len(layouts)
    merged = {row["shape"].split()[0] for row in found if row["op"].startswith("merger")}
    assert merged == {str(rows // 4) for rows in sizes}
    assert all(row["us"] > 0 and row["peers_us"] for row in found)
    if not on_gpu:  # no kernel ran, no cuBLAS, and an H200's roofline says nothing
        assert {row["backend"] for row in found} == {ops.NO_KERNEL} and not any(row["floor_us"] for row in found)
        assert {name for row in found for name in row["peers_us"]} == {ops.TORCH_PRODUCT, "torch"}
        assert "roofline" not in result.output


def test_a_backend_that_fails_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([backends.BackendFailed("linear in its x backend: no")])
    real = ops.linear_case

    def once(*arguments: Any) -> Any:
        case = real(*arguments)

        def check(config: Any) -> Any:
            for failure in failures:
                raise failure
            return case.check(config)

        return dataclasses.replace(case, check=check)

    monkeypatch.setattr(ops, "linear_case", once)
    found = ops.measure(("tiny",), CPU, None, lambda text: None, (64,))
    assert [row["op"] for row in found] == LINEARS and all(row["us"] for row in found)


def test_an_operation_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.attention_case

    def wrong(*arguments: Any) -> Any:
        case = real(*arguments)
        return dataclasses.replace(case, check=lambda config: dataclasses.replace(case.check(config), reason="wrong"))

    monkeypatch.setattr(ops, "attention_case", wrong)
    *_, row = ops.measure(("tiny",), CPU, None, lambda text: None, (80,))
    assert (row["op"], row["us"], row["reason"], [*row["peers_us"]]) == ("attention", None, "wrong", ["torch"])


def test_ratios_are_taken_round_by_round() -> None:
    found = timing.ratios([2.0, 20.0, 2.0], [1.0, 10.0, 2.0])
    assert (found.median, found.low, found.high, found.rounds) == (2.0, 1.0, 2.0, 3)


def test_workloads_of_the_sweep() -> None:
    assert image(448) == WORKLOADS["1 x 448 px"] and video(8) == WORKLOADS["video, 8 frames 224 px"]
    assert image(56) == [(1, 4, 4)] and image(2560) == [(1, 160, 160)] and video(1) == [(1, 14, 14)]
    assert len(sweep()) == 20 and all(h % 2 == 0 == w % 2 for grid in sweep().values() for _, h, w in grid)


def test_the_floor_is_that_of_the_published_figures() -> None:
    """Figures known for the 8B's tower, to two digits."""
    spec = bench_towers.spec_of(bench_towers.GEOMETRIES["Qwen3-VL-8B"])
    known = {"1 x 224 px": 0.29, "1 x 448 px": 1.00, "1 x 1024 px": 7.34, "1 x 2048 px": 61.1, "mixed": 10.9}
    for name, ms in known.items():
        assert workloads.tower_floor_ms(spec, WORKLOADS[name]) == pytest.approx(ms, rel=0.1), name


def test_the_floor_counts_what_a_tower_computes() -> None:
    """Windows that a border cuts, two factors of an MLP, keys and values that heads share."""
    spec = bench_towers.spec_of(bench_towers.GEOMETRIES["EXAONE-4.5-33B"])
    costs = workloads.tower_costs(spec, [(1, 12, 8)])
    rows, c, kv = 96, spec.hidden_size, spec.kv_heads * spec.head_dim
    assert costs["qkv"].flops == 2 * rows * c * (c + 2 * kv) * spec.depth
    assert costs["fc1"].flops == 2 * rows * c * 2 * spec.intermediate_size * spec.depth
    pairs = 4 * rows**2 + 24 * (64**2 + 32**2)  # four blocks see whole frames
    assert costs["attention"].flops == 4 * pairs * c
    glm = workloads.tower_costs(bench_towers.spec_of(bench_towers.GEOMETRIES["GLM-OCR"]), [(1, 12, 8)])
    assert {"downsample", "merger_proj", "merger_fc1", "merger_fc2"} <= set(glm)


def test_times_that_cannot_be_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose metadata was freed did once pass its gate and then raced through garbage."""
    monkeypatch.setattr(tower_bench.workloads, "tower_floor_ms", lambda spec, grid: 1e6)
    row = measured({"one": SMALL["one"]})["towers"]["tiny"]["workloads"]["one"]
    assert not row["ms"] and "under the floor" in row["parity"]["ours"]["reason"]


def test_an_output_that_changes_is_not_believed() -> None:
    outputs = [torch.zeros(2)]
    contender = timing.Contender("engine-like x", lambda: [outputs[0].add_(1)], "gpu")
    said = tower_bench._afterwards(contender, [1.0], 0.5, tower_bench._outputs(contender))
    assert said == "another output after the timing than before"
    still = timing.Contender("engine-like x", lambda: outputs, "gpu")
    assert tower_bench._afterwards(still, [1.0], 0.5, tower_bench._outputs(still)) == ""
