"""`fusedvit verify` on a small checkpoint that is saved and loaded as a user's would be."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit.cli import towers, verify  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.cli.media import SAMPLE_IMAGE  # noqa: E402
from fusedvit.pixels.media import Media  # noqa: E402
from tests.support.families import INSTALLED, each_of, family_tower  # noqa: E402

RUNNER = CliRunner(env={"COLUMNS": "200"})


def _verify(*arguments: str | Path, columns: int = 200) -> Any:
    """Of `checkpoint`, where that is."""
    command = ["verify", "mine", *map(str, arguments), "--device", "cpu"]
    return RUNNER.invoke(app, command, env={"COLUMNS": str(columns)})


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Stands in for one that is loaded, onto the CPU."""
    tower = towers.random_tower(torch.device("cpu"))
    monkeypatch.setattr(verify, "load_tower", lambda model, device, dtype, step: tower.model)
    return tower.model


def test_a_good_checkpoint_passes(checkpoint: nn.Module, tmp_path: Path) -> None:
    result = _verify(SAMPLE_IMAGE, "--json", tmp_path / "v.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert found["passed"] and found["model"] == "mine" and found["spread"]["failures"] == 0
    assert [p["output"] for p in found["calls"][SAMPLE_IMAGE.name]][:2] == ["pooler_output", "last_hidden_state"]
    assert "4 of 4 outputs pass" in result.output and "fused" in result.output


@each_of(INSTALLED)
def test_every_family(name: str) -> None:
    """A picture and a video as each family's tower takes them, from the spec alone."""
    frames = np.random.default_rng(0).integers(0, 256, (4, 100, 140, 3), dtype=np.uint8)
    media = [Media("picture", "image", frames[:1], 1), Media("video", "video", frames, 4)]
    tower = family_tower(name)  # which the handle does not keep
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    found = verify.side_by_side(handle, torch.float32, torch.device("cpu"))
    inputs = verify.prepared_for_towers(media, found)
    assert list(inputs) == ["picture", "video", "all at once"]
    for item in inputs.values():
        assert all(parity.comparison.passed for parity in verify.parity_of(found, item))


def test_original_code_is_told(checkpoint: nn.Module, tmp_path: Path) -> None:
    """It agrees with itself, which is no pass."""
    checkpoint.get_submodule("blocks.0").register_forward_hook(lambda module, args, output: None)
    result = _verify(SAMPLE_IMAGE, "--json", tmp_path / "v.json")
    assert result.exit_code == 1, result.output
    found = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert found["ran_original_code"] == 1 and not found["passed"]
    assert "1 of 1 calls ran the original code" in result.output and "nothing was compared" in result.output


def test_layers_that_run_in_one_dtype(checkpoint: nn.Module) -> None:
    """Quantised ones: they have no reference, and copies of some raise."""

    class Quantised(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == torch.float32
            return super().forward(x)

    checkpoint.get_submodule("blocks.0.attn.proj").__class__ = Quantised
    result = _verify(SAMPLE_IMAGE)
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    assert "cannot run fused: modified modules: blocks.0.attn.proj is" in " ".join(result.output.split()), result.output


def test_some_original_code_is_told(checkpoint: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify.parity_of

    def one_hooked(towers: Any, item: Any) -> Any:
        hook = checkpoint.get_submodule("blocks.0").register_forward_hook(lambda module, args, output: None)
        monkeypatch.setattr(verify, "parity_of", real)
        with contextlib.closing(SimpleNamespace(close=hook.remove)):
            return real(towers, item)

    monkeypatch.setattr(verify, "parity_of", one_hooked)
    result = _verify(SAMPLE_IMAGE, SAMPLE_IMAGE)
    assert result.exit_code == 0 and "1 of 3 calls ran the original code" in result.output, result.output


def test_outputs_are_told_apart_in_few_columns(checkpoint: nn.Module) -> None:
    result = _verify(SAMPLE_IMAGE, columns=60)
    assert result.exit_code == 0 and "\u2026" not in result.output, result.output


def test_a_difference_is_told(checkpoint: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify.side_by_side

    def spoiled(*arguments: Any) -> Any:
        made = real(*arguments)
        with torch.no_grad():
            made.original.get_parameter("merger.linear_fc2.bias").add_(0.01)
        return made

    monkeypatch.setattr(verify, "side_by_side", spoiled)
    result = _verify(SAMPLE_IMAGE)
    assert result.exit_code == 0, "the original's error is the yardstick: a worse original forgives"

    def worse(*arguments: Any) -> Any:
        made = real(*arguments)
        with torch.no_grad():
            for side in (made.original, made.reference):
                side.get_parameter("merger.linear_fc2.bias").add_(0.01)
        return made

    monkeypatch.setattr(verify, "side_by_side", worse)
    result = _verify(SAMPLE_IMAGE)
    assert result.exit_code == 1 and "3 of 4 outputs pass" in result.output and "error" in result.output


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["verify", str(tmp_path / "none")])
    assert result.exit_code == 2 and "Traceback" not in result.output
    result = _verify(tmp_path / "none.png")
    assert result.exit_code == 2 and "none.png" in result.output.replace("\n", "")
