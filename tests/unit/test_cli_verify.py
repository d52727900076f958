"""`fusedvit verify` on a small checkpoint that is saved and loaded as a user's would be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from fusedvit.cli import towers, verify  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.cli.media import SAMPLE_IMAGE  # noqa: E402

RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Stands in for one that is loaded."""
    tower = towers.random_tower(torch.device("cpu"))
    monkeypatch.setattr(verify, "load_tower", lambda model, device, dtype, step: tower)
    return tower.model


def test_a_good_checkpoint_passes(checkpoint: nn.Module, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["verify", "mine", str(SAMPLE_IMAGE), "--json", str(tmp_path / "v.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert found["passed"] and found["model"] == "mine" and found["spread"]["failures"] == 0
    assert [p["output"] for p in found["calls"][SAMPLE_IMAGE.name]][:2] == ["pooler_output", "last_hidden_state"]
    assert "4 of 4 outputs pass" in result.output and "fused on the torch table" in result.output


def test_a_difference_is_told(checkpoint: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify.side_by_side

    def spoiled(*arguments: Any) -> Any:
        made = real(*arguments)
        with torch.no_grad():
            made.original.get_parameter("merger.linear_fc2.bias").add_(0.01)
        return made

    monkeypatch.setattr(verify, "side_by_side", spoiled)
    result = RUNNER.invoke(app, ["verify", "mine", str(SAMPLE_IMAGE)])
    assert result.exit_code == 0, "the original's error is the yardstick: a worse original forgives"

    def worse(*arguments: Any) -> Any:
        made = real(*arguments)
        with torch.no_grad():
            for side in (made.original, made.reference):
                side.get_parameter("merger.linear_fc2.bias").add_(0.01)
        return made

    monkeypatch.setattr(verify, "side_by_side", worse)
    result = RUNNER.invoke(app, ["verify", "mine", str(SAMPLE_IMAGE)])
    assert result.exit_code == 1 and "3 of 4 outputs pass" in result.output and "error" in result.output


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["verify", str(tmp_path / "none")])
    assert result.exit_code == 2 and "Traceback" not in result.output
    result = RUNNER.invoke(app, ["verify", "mine", str(tmp_path / "none.png")])
    assert result.exit_code == 2 and "none.png" in result.output.replace("\n", "")
