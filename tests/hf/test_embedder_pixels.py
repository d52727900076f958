"""What `Embedder` makes of decoded images, and of processors that do not fit its tower: against Hugging Face's own."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from PIL import Image  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit.cli.app import app  # noqa: E402
from fusedvit.errors import InputError  # noqa: E402
from tests.support.checkpoint import checkpoint, pictures, tiny_processor, whole_model  # noqa: E402

__all__ = ["checkpoint", "pictures"]  # fixtures
PICTURES = 3, (40, 150), "2.png"
RUNNER = CliRunner(env={"COLUMNS": "200"})


NOISE = np.random.default_rng(3).integers(0, 256, (50, 70, 4), dtype=np.uint8)


def one_colour_transparent() -> Image.Image:
    picture = Image.fromarray(NOISE).convert("RGB")
    picture.info["transparency"] = picture.getpixel((3, 4))
    return picture


DECODED = {
    "RGB": Image.fromarray(NOISE).convert("RGB"),
    "RGBA": Image.fromarray(NOISE),
    "LA": Image.fromarray(NOISE).convert("LA"),
    "one colour transparent": one_colour_transparent(),
    "palette": Image.fromarray(NOISE).convert("P"),
    "grey": Image.fromarray(NOISE).convert("L"),
    "three rows": Image.fromarray(NOISE[:3, :, :3].copy()),
    "one row": Image.fromarray(NOISE[:1, :, :3].copy()),
}


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"patch_size": 14}, "patch_size 16 expected, got 14"),
        ({"merge_size": 1}, "merge_size 2 expected, got 1"),
        ({"temporal_patch_size": 1}, "temporal_patch_size 2 expected, got 1"),
        ({"patch_size": 14, "merge_size": 1}, "patch_size 16, merge_size 2 expected, got 14, 1"),
    ],
)
def test_a_processor_of_other_patches(
    checkpoint: Path, pictures: Path, tmp_path: Path, setting: dict[str, int], message: str
) -> None:
    """Is found before anything is embedded: the folder is free for another job, a model as it was."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(settings | setting))
    out = tmp_path / "out"
    result = RUNNER.invoke(app, ["embed", str(model), str(pictures), str(out)])
    assert result.exit_code == 2 and message in result.output
    assert list(out.iterdir()) == []
    whole = transformers.Qwen3VLForConditionalGeneration.from_pretrained(checkpoint)
    cls, processor = type(whole.model.visual), transformers.AutoImageProcessor.from_pretrained(model)
    with pytest.raises(InputError, match=f"fusedvit: Qwen2VLImageProcessor.* does not fit the tower: {message}"):
        fusedvit.Embedder(whole, processor)
    assert type(whole.model.visual) is cls
    options = fusedvit.FuseConfig(strict=True, watch_data=False)
    handle = fusedvit.fuse(whole, options)
    with pytest.raises(InputError, match=message):
        fusedvit.Embedder(whole, processor)
    assert fusedvit.fuse(whole) is handle and handle.config is options


def test_a_rescale_factor_that_no_weights_hold(checkpoint: Path) -> None:
    """Of the processor itself: Hugging Face's answer is finite, and so is ours."""
    processor = tiny_processor()
    processor.rescale_factor = 0.0
    given = processor(images=[DECODED["RGB"]], return_tensors="pt")
    model = whole_model(checkpoint)
    with torch.no_grad():
        wanted = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output
        fusedvit.fuse(model, processor=processor)
        again = processor(images=[DECODED["RGB"]], return_tensors="pt")
        fused = model.model.visual(again["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output
    assert wanted.isfinite().all()
    torch.testing.assert_close(fused, wanted, atol=1e-4, rtol=1e-4)
    found = fusedvit.Embedder(model, processor)({"image": [DECODED["RGB"]]})
    torch.testing.assert_close(torch.as_tensor(found["embedding"][0]), wanted.mean(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", DECODED)
def test_pillow_images_are_what_the_processor_makes_of_them(checkpoint: Path, kind: str) -> None:
    given = tiny_processor()(images=[DECODED[kind]], return_tensors="pt")
    tower = whole_model(checkpoint).model.visual
    with torch.no_grad():
        wanted = tower(given["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output.mean(0)
    found = fusedvit.Embedder(checkpoint, tiny_processor(), dtype=torch.float32)({"image": [DECODED[kind]]})
    assert found["error"] == [""] and found["grid_thw"] == given["image_grid_thw"].tolist()
    torch.testing.assert_close(torch.as_tensor(found["embedding"][0]), wanted, atol=1e-4, rtol=1e-4)
