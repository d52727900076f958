"""The command line, run for real: what it prints, writes and exits with."""

import contextlib
import json
import warnings
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit.bench.timing import Launches, Spread, gpu_launches, latency, operators, peak_mib, synchronisations  # noqa: E402
from fusedvit.bench.towers import cast_parameters_, random_weights_  # noqa: E402
from fusedvit.cli import console, demo, demo_report, kernel_checks, towers  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.pixels.media import load_one as load  # noqa: E402

RUNNER = CliRunner()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No subprocesses, and no more than the fewest rounds of timing."""
    monkeypatch.setattr(kernel_checks, "started", contextlib.nullcontext)
    monkeypatch.setattr(demo, "latency", lambda calls, device: latency(calls, device, seconds=0))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(path)
    return path


def _demo(folder: Path, *arguments: str | Path) -> tuple[Any, dict[str, Any]]:
    outputs = ["--json", str(folder / "out" / "demo.json"), "--plot", str(folder / "out" / "demo.png")]
    result = RUNNER.invoke(app, ["demo", *map(str, arguments), *outputs])
    written = folder / "out" / "demo.json"
    return result, json.loads(written.read_text()) if written.exists() else {}


@pytest.mark.usefixtures("quick")
def test_demo_on_the_shipped_media(tmp_path: Path) -> None:
    pytest.importorskip("av")
    result, document = _demo(tmp_path)
    assert result.exit_code == 0, result.output
    assert document["passed"] is True
    calls = {call["name"]: call for call in document["calls"]}
    assert list(calls) == ["grace_hopper.jpg", "big_buck_bunny.mp4", "all at once"]
    assert calls["all at once"]["grid_thw"] == [[1, 38, 32], [4, 12, 20]]
    for call in calls.values():
        outputs = [parity["output"] for parity in call["parity"]]
        assert outputs[0] == "pooler_output" and "deepstack_features[1]" in outputs
        assert all(parity["comparison"]["max_pt"] > 0 for parity in call["parity"])
        assert call["latency_ms"]["fused"]["rounds"] >= 5 if torch.cuda.is_available() else call["latency_ms"] is None
        assert call["operators"] or call["launches"]["fused"]
    packing = {call["name"]: call for call in document["packing"]}
    assert [batch["tokens"] for batch in packing["all at once"]["batches"]] == [(38 * 32 + 4 * 12 * 20) // 4]
    many = packing["100 times all at once"]
    assert many["items"] == sum(batch["pieces"] for batch in many["batches"]) == 200 and many["eager"] == []
    assert sum(batch["tokens"] for batch in many["batches"]) == 100 * (38 * 32 + 4 * 12 * 20) // 4
    assert document["stats"]["original"] == {}, "both sides are what they are called"
    assert [bad["error"] for bad in document["bad_inputs"]] == ["ValueError", "ValueError", "TypeError"]
    assert "passed" in result.output and "Traceback" not in result.output
    assert Image.open(tmp_path / "out" / "demo.png").size[0] > 1000


def _on_a_gpu(found: demo_report.Demo) -> demo_report.Demo:
    """The same findings as a GPU would give them: times, launches and memory, and no kernel checks."""
    costs: dict[str, Any] = {
        "latency_ms": {"original": Spread(3.0, 2.9, 3.2, 5), "fused": Spread(1.5, 1.4, 1.6, 5)},
        "launches": {"original": Launches(700, 700), "fused": Launches(140, 1)},
        "operators": None,
        "peak_mib": {"original": 90.0, "fused": 40.0},
    }
    calls = [replace(call, **costs) for call in found.calls]
    environment = found.environment | {"gpus": [{"name": "NVIDIA H200"}]}
    return replace(found, environment=environment, calls=calls, fused_kernels=None, kernels=[])


@pytest.mark.usefixtures("quick")
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is shown without a GPU")
def test_times_are_shown_on_a_gpu_alone(photo: Path) -> None:
    media = [load(photo)]
    found = demo.collect(media, None, lambda text: None)
    for where, findings in (("cpu", found), ("gpu", _on_a_gpu(found))):
        picture = demo_report.draw(findings, media, ".png")
        out = StringIO()
        demo_report.show(findings, Console(file=out, width=120))
        shown = " ".join(out.getvalue().split())
        assert ("3.00 → 1.50" in shown and "2.00x" in shown and "700 → 140" in shown) == (where == "gpu")
        assert ("times are not compared" in shown) == (where == "cpu")
        assert "Below 1 the fused tower is closer to the float64 reference" in shown
        assert Image.open(BytesIO(picture)).size[0] > 1000


@pytest.mark.usefixtures("quick")
def test_demo_fails_when_the_answers_differ(tmp_path: Path, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fusedvit.unfuse

    def unfuse_another(model: nn.Module) -> Any:
        with torch.no_grad():
            model.get_parameter("blocks.0.mlp.linear_fc2.bias").mul_(3)
        return real(model)

    monkeypatch.setattr(fusedvit, "unfuse", unfuse_another)
    result, document = _demo(tmp_path, photo)
    assert result.exit_code == 1, result.output
    assert document["passed"] is False and document["spread"]["failures"] > 0
    assert "failed" in result.output and "max error" in result.output


@pytest.mark.usefixtures("quick")
def test_demo_on_a_checkpoint(tmp_path: Path, photo: Path) -> None:
    """A whole model from disk, as AutoModelForImageTextToText loads it; its tower is found and fused in place."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {"num_hidden_layers": 1, "hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 2, "head_dim": 48, "vocab_size": 64}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [8, 8, 8], "rope_theta": 1e4}
    config = Qwen3VLConfig(text_config=text, vision_config=dict(towers.TINY))
    model = Qwen3VLForConditionalGeneration(config)
    random_weights_(model)
    model.save_pretrained(tmp_path / "model")
    result, document = _demo(tmp_path, photo, photo, "--model", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert document["tower"] == str(tmp_path / "model")
    assert [call["name"] for call in document["calls"]] == ["photo.png", "another photo.png", "all at once"]


@pytest.mark.usefixtures("quick")
def test_demo_of_original_code_alone_fails(tmp_path: Path, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hooked(device: torch.device) -> towers.Tower:
        tower = towers.random_tower(device)
        tower.model.get_submodule("blocks.0").register_forward_hook(lambda module, args, output: None)
        return tower

    monkeypatch.setattr(demo, "random_tower", hooked)
    result, document = _demo(tmp_path, photo)
    assert result.exit_code == 1 and document["passed"] is False
    assert "nothing was compared" in " ".join(result.output.split())


@pytest.mark.usefixtures("quick")
def test_long_names_are_told_apart(tmp_path: Path, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    names = [f"{'a' * 30}{middle}{'b' * 30}.png" for middle in "xy"]
    for name in names:
        photo.with_name(name).write_bytes(photo.read_bytes())
    result, _ = _demo(tmp_path, *map(photo.with_name, names))
    shown = "".join(result.stdout.split())  # without the progress, which names some of them
    assert result.exit_code == 0 and all(shown.count(f"a{middle}b") == 3 for middle in "xy"), result.output


def test_demo_refuses_files_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    result, document = _demo(tmp_path, broken)
    assert result.exit_code == 2 and not document
    assert "broken.png: does not decode as an image" in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_env_names_versions(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["env", "--json", str(tmp_path / "env.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "env.json").read_text())
    assert found["packages"]["torch"] in result.output
    assert found["fusedvit"] == fusedvit.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()


def test_random_weights_leave_nothing_idle() -> None:
    first, second = (towers.random_tower(torch.device("cpu")).model for _ in range(2))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.std() > 0 and a.abs().max() < 8, name
    assert abs(first.get_parameter("blocks.0.norm1.weight").mean() - 1) < 0.1
    assert abs(first.get_parameter("merger.norm.weight").mean() - 1) < 0.1


def test_cast_leaves_rotary_frequencies() -> None:
    tower = towers.random_tower(torch.device("cpu")).model
    before = [buffer.clone() for buffer in tower.buffers()]
    cast_parameters_(tower, torch.bfloat16)
    assert {p.dtype for p in tower.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, tower.buffers(), strict=True))


def test_operator_count_leaves_out_views_and_allocations() -> None:
    x = torch.randn(4, 6)
    assert operators(lambda: x.t().reshape(2, 12).flatten()[None]) == 1  # the reshape copies
    assert operators(lambda: x.view(24)[3:].detach()) == 0
    assert operators(lambda: torch.empty(3).add_(1)) == 1
    assert operators(lambda: torch.nn.functional.layer_norm(x, (6,)) + x) == 2


def test_waits_are_told_by_torchs_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        wait = "called a synchronizing CUDA operation"
        for text in (wait, "something else", wait):
            warnings.warn(text, stacklevel=1)

    found = synchronisations(call)
    assert len(found) == 2 and all(Path(where.split(":")[0]) == Path(__file__) for where in found)
    assert modes == ["warn", "default"]


@pytest.mark.gpu
def test_gpu_costs_of_known_calls() -> None:
    x = torch.randn(1024, 256, device="cuda")
    assert gpu_launches(lambda: x + x) == Launches(kernels=1, host=1)
    assert gpu_launches(lambda: x.t()) == Launches(kernels=0, host=0)
    assert peak_mib(lambda: x + x, x.device) == 1.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ = x + x - x
    assert gpu_launches(graph.replay) == Launches(kernels=2, host=1)


def test_documents_are_valid_json(tmp_path: Path) -> None:
    found = console.plain({"a": (1.5, float("inf")), "b": Path("x"), 3: torch.float32, "c": None})
    assert found == {"a": [1.5, "inf"], "b": "x", "3": "torch.float32", "c": None}
    console.write(found, tmp_path / "new" / "x.json")
    assert json.loads((tmp_path / "new" / "x.json").read_text()) == found


def test_a_model_without_a_tower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, photo: Path) -> None:
    none = towers.Tower("none", nn.Sequential(nn.Linear(2, 2)), torch.float32)
    monkeypatch.setattr(demo, "random_tower", lambda device: none)
    result, document = _demo(tmp_path, photo)
    assert result.exit_code == 2 and not document
    assert "Sequential holds no supported vision tower" in result.output.replace("\n", " ")


@pytest.mark.parametrize("room", [4, 5, 18])
def test_long_names_are_cut_in_the_middle(room: int) -> None:
    assert console.shorten("a" * room, room) == "a" * room
    cut = console.shorten("begin" + "a" * 40 + "end", room)
    assert len(cut) == room and cut[0] == "b" and cut[-1] == "d"
    assert console.stem("photo.of.me.png", 20) == "photo.of.me" and console.stem("all in one", 20) == "all in one"
