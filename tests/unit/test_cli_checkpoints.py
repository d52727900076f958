"""Checkpoints whose tower is more than tensors to be read: they load as transformers loads them, or not at all."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from fusedvit import checkpoint  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.cli.media import SAMPLE_IMAGE  # noqa: E402
from tests.support.checkpoint import tiny_checkpoint  # noqa: E402

RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL in several files."""
    one = tiny_checkpoint(tmp_path_factory.mktemp("one"))
    folder = tmp_path_factory.mktemp("sharded")
    transformers.AutoModelForImageTextToText.from_pretrained(one).save_pretrained(folder, max_shard_size="200KB")
    return folder


def _in_one_file(sharded: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Copies all but the weights to `folder`, and gives these."""
    shutil.copytree(sharded, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return {name: t for shard in sharded.glob("*.safetensors") for name, t in load_file(shard).items()}


def _quantised(name: str, weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1)
    if kind == "int8":
        codes = (weight / scale[:, None] * 127).round().to(torch.int8)
        return {name: codes, name.replace("weight", "SCB"): scale}
    if kind == "codes alone":
        return {name: (weight / scale[:, None] * 127).round().to(torch.int8)}
    return {name: (weight / scale.amax() * 448).to(torch.float8_e4m3fn), f"{name}_scale": scale.amax().reshape(1)}


@pytest.mark.parametrize("kind", ["int8", "codes alone", "fp8", "another block", "another bias"])
def test_weights_that_are_more_than_the_towers_are_not_taken_for_them(sharded: Path, tmp_path: Path, kind: str) -> None:
    """What only transformers can load is left to it, and what it would leave out is told."""
    folder = tmp_path / "changed"
    tensors = _in_one_file(sharded, folder)
    name = next(n for n in tensors if n.endswith("blocks.0.mlp.linear_fc1.weight"))
    if kind.startswith("another"):
        more = name.replace("blocks.0", "blocks.9") if kind == "another block" else name.replace("weight", "extra_bias")
        tensors[more] = tensors[name].clone()
    else:
        tensors |= _quantised(name, tensors.pop(name), kind)
    save_file(tensors, folder / checkpoint.SINGLE, metadata={"format": "pt"})
    if kind in ("int8", "fp8"):
        method = {"int8": "bitsandbytes", "fp8": "compressed-tensors"}[kind]
        config = json.loads((folder / "config.json").read_text())
        quantised = {"quant_method": method, "load_in_8bit": True, "format": "float-quantized", "config_groups": {}}
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    result = RUNNER.invoke(app, ["verify", str(folder), str(SAMPLE_IMAGE)])
    if kind == "codes alone":  # whatever transformers makes of them, it is transformers that does
        assert result.exit_code in (0, 2), result.output
        return
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    assert ("no place for" if kind.startswith("another") else "does not load") in " ".join(result.output.split())


def test_a_file_of_weights_comes_before_an_index(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(sharded, folder)
    tensors = {name: t for shard in folder.glob("*.safetensors") for name, t in load_file(shard).items()}
    save_file({name: t * 2 for name, t in tensors.items()}, folder / checkpoint.SINGLE, metadata={"format": "pt"})
    ours = checkpoint.load_tower(str(folder), torch.device("cpu"), torch.float32)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model.visual
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("step", ["open", "stat"])
@pytest.mark.parametrize("name", ["config.json", checkpoint.INDEX, "model-"])
def test_files_that_may_not_be_read(sharded: Path, name: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there, and whole for all that anybody knows."""
    real = getattr(Path, step)

    def refused(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.parent == sharded and path.name.startswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, step, refused)
    result = RUNNER.invoke(app, ["verify", str(sharded), str(SAMPLE_IMAGE)])
    assert result.exit_code == 2, result.output
    said = "".join(result.output.split())
    assert f"{sharded}/{name}" in said and "cannotberead(Permissiondenied)" in said, result.output


def test_an_adapter_in_the_folder_is_loaded(sharded: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = tmp_path / "adapted"
    shutil.copytree(sharded, folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=r".*visual.*(qkv|linear_fc1)", init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = checkpoint.load_tower(str(folder), torch.device("cpu"), torch.float32)
    tower = next(m for n, m in loaded.named_modules() if n.endswith("visual"))
    pixels, grid = torch.randn(16, 1536), torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        assert torch.equal(tower(pixels, grid_thw=grid)[0], model.model.visual(pixels, grid_thw=grid)[0])
