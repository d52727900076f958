"""A tiny Qwen3-VL on the disk: the whole model with random weights, and its image processor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from fusedvit.bench.towers import random_weights_
from fusedvit.cli.towers import TINY

_TEXT = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
_HEADS = {"num_key_value_heads": 1, "head_dim": 48, "vocab_size": 200}


def tiny_checkpoint(folder: Path, longest: int = 128) -> Path:
    """Writes it into `folder`; images come down to `longest` x `longest` pixels."""
    config = transformers.Qwen3VLConfig(text_config=_TEXT | _HEADS, vision_config=dict(TINY))
    model = transformers.Qwen3VLForConditionalGeneration(config)
    random_weights_(model)
    model.save_pretrained(folder)
    tiny_processor(longest).save_pretrained(folder)
    return folder


def whole_model(checkpoint: Path) -> Any:
    return transformers.Qwen3VLForConditionalGeneration.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the module's own."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """`noisy_pictures` by the module's `PICTURES`."""
    return noisy_pictures(tmp_path_factory.mktemp("pictures"), *request.module.PICTURES)


def tiny_processor(longest: int = 128) -> Any:
    """The one of the checkpoint, on Pillow."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": longest * longest})


def noisy_pictures(folder: Path, count: int, sides: tuple[int, int], bad: str) -> Path:
    """`count` PNGs of noise in `folder`, numbered as `bad` is, which holds no picture; `sides` are in pixels."""
    rng, digits = np.random.default_rng(0), len(Path(bad).stem)
    for i in range(count):
        size = (*rng.integers(*sides, 2), 3)
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{i:0{digits}d}.png")
    (folder / bad).write_bytes(b"no picture")
    return folder
