"""Gemma 4's processors that give bytes: padded images with positions, the same bits once normalised, and tokens."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import is_torchvision_available

import fusedvit
from fusedvit.errors import UnsupportedModel
from fusedvit.pixels import BytePixels, stream, swap
from tests.hf.test_gemma4 import NAME, TOKENS, whole_model
from tests.hf.test_processors import kinds_of_images, named, outcome, random_size
from tests.support.families import INSTALLED
from tests.support.processors import noise

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.skipif(NAME not in INSTALLED, reason="this transformers has no Gemma 4")
STRICT = fusedvit.FuseConfig(strict=True)
IMAGES = ["Gemma4ImageProcessorPil", *(["Gemma4ImageProcessor"] if is_torchvision_available() else [])]
VIDEOS = ["Gemma4VideoProcessor", "EmbeddingGemma2VideoProcessor"]
BUDGETS = (70, 140, 280, 560, 1120)


def processor_of(name: str, **settings: Any) -> Any:
    return named(name, **({"size": None, "max_soft_tokens": 70, "patch_size": 4} | settings))


def both(name: str, **settings: Any) -> tuple[Any, Any]:
    """Hugging Face's and ours, on the CPU."""
    plain = processor_of(name, **settings)
    return plain, swap(copy.deepcopy(plain), "cpu")


def assert_equal(got: Any, wanted: Any) -> None:
    """Bytes that stand for the same pixels, and everything else as it was."""
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        if name.startswith("pixel"):
            assert isinstance(got[name], BytePixels) and torch.equal(got[name].pixels(), value)
            assert got[name].nbytes * 4 == value.nbytes
        else:
            assert torch.equal(got[name], value)


@pytest.mark.parametrize("kind", kinds_of_images())
@pytest.mark.parametrize("name", IMAGES)
def test_every_kind_of_image(name: str, kind: str) -> None:
    plain, ours = both(name)
    given = {"images": [kinds_of_images()[kind], noise(33, 50)], "return_tensors": "pt"}
    wanted, got = outcome(plain, **given), outcome(ours, **given)
    if isinstance(wanted, tuple):
        assert got == wanted
    elif "floats" in kind:
        assert type(got["pixel_values"]) is torch.Tensor and torch.equal(got["pixel_values"], wanted["pixel_values"])
    else:
        assert_equal(got, wanted)


@pytest.mark.parametrize("tokens", BUDGETS)
@pytest.mark.parametrize("name", IMAGES)
def test_random_sizes_of_every_soft_token_budget(name: str, tokens: int) -> None:
    """400 a budget, 2,000 a processor: the same bits and positions, or the same refusal."""
    chance = random.Random(name)
    plain, ours = both(name, max_soft_tokens=tokens, patch_size=1 if tokens > 280 else 2)
    for _ in range(400):
        height, width = random_size(chance)
        given = {"images": [noise(height, width)], "return_tensors": "pt", "input_data_format": "channels_last"}
        wanted, got = outcome(plain, **given), outcome(ours, **given)
        if isinstance(wanted, tuple):
            assert got == wanted, (height, width)
        else:
            assert_equal(got, wanted)


ARGUMENTS: dict[str, tuple[dict[str, Any], bool]] = {  # and whether bytes come
    "normalised as videos": ({"do_normalize": True}, True),
    "channels alike": ({"do_normalize": True, "image_std": [0.25] * 3}, True),
    "channels apart": ({"do_normalize": True, "image_std": [0.1, 0.2, 0.3]}, False),
    "padding is not the mean": ({"do_normalize": True, "image_mean": [0.5] * 3}, False),
    "another factor": ({"rescale_factor": 1 / 100}, True),
    "a factor of 0": ({"rescale_factor": 0.0}, False),
    "no factor": ({"do_rescale": False}, False),
    "no resizing": ({"do_resize": False}, True),
    "another filter": ({"resample": 2}, True),
    "another budget": ({"max_soft_tokens": 140}, True),
    "no such budget": ({"max_soft_tokens": 71}, False),
    "numpy": ({"return_tensors": "np"}, False),
}


@pytest.mark.parametrize("arguments, bytes_come", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("name", IMAGES)
def test_arguments_of_a_call(name: str, arguments: dict[str, Any], bytes_come: bool) -> None:
    plain, ours = both(name)
    given = {"images": [noise(24, 36)], "return_tensors": "pt"} | arguments
    wanted, got = outcome(plain, **given), outcome(ours, **given)
    if isinstance(wanted, tuple):
        assert got == wanted and not bytes_come
    elif bytes_come:
        assert_equal(got, wanted)
    else:
        assert type(got["pixel_values"]) is type(wanted["pixel_values"])
        assert np.array_equal(got["pixel_values"], wanted["pixel_values"])


@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
@pytest.mark.parametrize("name", VIDEOS)
def test_videos(name: str) -> None:
    plain, ours = both(name)
    given = {"videos": [noise(5, 40, 60), noise(5, 70, 30)], "return_tensors": "pt", "do_sample_frames": False}
    assert_equal(ours(**given), plain(**given))


@pytest.mark.parametrize("vision", [{}, {"use_clipped_linears": True, "standardize": True}], ids=str)
def test_generated_tokens(vision: dict[str, Any]) -> None:
    """Fused with the processor: the user's own lines, bytes, the same tokens; and `unfuse` gives both back."""
    model, processor = whole_model(**vision), processor_of(IMAGES[-1])
    cls, saved = type(processor), processor.to_dict()
    images = [noise(50, 70), noise(90, 41)]

    def generated(**arguments: Any) -> torch.Tensor:
        inputs = processor(images=images, return_tensors="pt")
        counts = inputs.pop("num_soft_tokens_per_image")
        tokens = [1, *(id for n in counts for id in (TOKENS["image_token_id"],) * int(n)), 7]
        ids = torch.tensor([tokens])
        inputs = inputs.to(model.device, model.dtype)
        text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 290).int()}
        return model.generate(**text, **inputs, max_new_tokens=5, do_sample=False, **arguments)

    expected = [generated(num_beams=beams) for beams in (1, 2)]
    handle = fusedvit.fuse(model, STRICT, processor=processor)
    assert isinstance(processor(images=images, return_tensors="pt")["pixel_values"], BytePixels)
    for beams, wanted in zip((1, 2), expected, strict=True):
        assert generated(num_beams=beams).equal(wanted)
    stats = handle.stats()
    assert stats["fused"] == stats["calls"] == 2 and stats["original"] == {}
    marked = processor(images=images, return_tensors="pt")
    fusedvit.unfuse(model)
    assert type(processor) is cls and processor.to_dict() == saved
    with pytest.raises(TypeError, match=r"BytePixels.*fused by fusedvit"), torch.no_grad():
        model.model.vision_tower(marked["pixel_values"], marked["image_position_ids"])
    assert generated().equal(expected[0])


def test_the_original_code_sees_hugging_faces_pixels() -> None:
    model, (plain, ours) = whole_model(), both(IMAGES[-1])
    tower = model.model.vision_tower
    wanted, got = (each(images=[noise(50, 70)], return_tensors="pt") for each in (plain, ours))
    seen: list[torch.Tensor] = []
    handle = fusedvit.fuse(model)
    hook = tower.patch_embedder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        tower(got["pixel_values"].to(torch.bfloat16), got["image_position_ids"])
    hook.remove()
    assert handle.stats()["original"] == {"hooks": 1}
    assert torch.equal(seen[0], wanted["pixel_values"].to(torch.bfloat16))


def test_batches_of_a_stream_have_grids() -> None:
    with pytest.raises(UnsupportedModel, match="gives no grid_thw, by which batches are made"):
        stream([], processor_of(IMAGES[-1]))


def test_a_processor_of_grids_does_not_fit() -> None:
    model, other = whole_model(), named("Qwen2VLImageProcessor", patch_size=4)
    kinds = type(model.model.vision_tower), type(other)
    with pytest.raises(ValueError, match="takes no bytes"):
        fusedvit.fuse(model, processor=other)
    assert (type(model.model.vision_tower), type(other)) == kinds
