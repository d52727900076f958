"""`fuse(model, processor=processor)`: the user's own lines stay, tokens too, and `unfuse` gives everything back."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils import is_torchvision_available

import fusedvit
from fusedvit import api
from fusedvit.pixels import swap
from fusedvit.pixels.byte_pixels import BytePixels
from fusedvit.pixels.byte_processors import STATE
from fusedvit.pixels.processors import normalizations_of
from tests.support.processors import image_processor, noise, video_processor, whole_processor
from tests.support.towers import IMAGE, VIDEO, VISION_END, VISION_START, copy_of, tiny_model

pytest.importorskip("PIL.Image")
pytest.importorskip("tokenizers")

STRICT = fusedvit.FuseConfig(strict=True)
TOKENS = {
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": VISION_START,
    "<|vision_end|>": VISION_END,
}
IMAGE_TEXT = "<|vision_start|> <|image_pad|> <|vision_end|>"
VIDEO_TEXT = "<|vision_start|> <|video_pad|> <|vision_end|>"
needs_torchvision = pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")


@pytest.fixture
def processor() -> Any:
    video = video_processor(patch_size=4) if is_torchvision_available() else None
    return whole_processor(image_processor(patch_size=4), video, {"a": 5, "b": 6, "c": 7} | TOKENS, TOKENS, "<unk>")


def inputs_of(processor: Any, videos: bool = False) -> Any:
    media: dict[str, Any] = {"images": [noise(50, 40), noise(33, 61)]}
    text = [f"a {IMAGE_TEXT} b {IMAGE_TEXT}"]
    if videos:
        text, media = [f"{text[0]} {VIDEO_TEXT} c"], media | {"videos": [noise(5, 40, 50)], "do_sample_frames": False}
    return processor(text=text, return_tensors="pt", **media)


def tokens_of(model: Any, inputs: Any, **arguments: Any) -> torch.Tensor:
    inputs = copy.copy(inputs).to(model.device, model.dtype)
    return model.generate(**inputs, max_new_tokens=8, do_sample=False, **arguments)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("videos", [False, pytest.param(True, marks=needs_torchvision)], ids=["images", "videos"])
def test_the_same_tokens(processor: Any, videos: bool, beams: int) -> None:
    model = tiny_model()
    before = inputs_of(processor, videos)
    expected = tokens_of(model, before, num_beams=beams)
    handle = fusedvit.fuse(model, STRICT, processor=processor)
    inputs = inputs_of(processor, videos)
    assert {name for name, value in inputs.items() if isinstance(value, BytePixels)} == {
        name for name in inputs if name.startswith("pixel")
    }
    assert all(torch.equal(inputs[name], before[name]) for name in inputs if not name.startswith("pixel"))
    assert tokens_of(model, inputs, num_beams=beams).equal(expected)
    stats = handle.stats()
    assert stats["fused"] == stats["calls"] == 1 + videos and stats["refreshes"] == 1, "both were expected"
    assert tokens_of(model, before, num_beams=beams).equal(expected), "floats as ever"


def test_unfuse_gives_both_back(processor: Any) -> None:
    model = tiny_model()
    saved, kinds = processor.to_dict(), type(processor.image_processor)
    fusedvit.fuse(model, processor=processor)
    fusedvit.fuse(model, processor=processor)
    assert processor.to_dict() == saved
    inputs = inputs_of(processor)
    fusedvit.unfuse(model)
    assert type(processor.image_processor) is kinds and processor.to_dict() == saved
    assert inputs_of(processor)["pixel_values"].dtype == torch.float32
    with pytest.raises(TypeError, match=r"BytePixels.*fused by fusedvit"):
        tokens_of(model, inputs)
    fusedvit.fuse(model)
    assert tokens_of(model, inputs).equal(tokens_of(model, inputs_of(processor)))


def test_unfuse_of_a_copy_takes_the_processor_by_name(processor: Any) -> None:
    model = tiny_model()
    kinds = type(processor.image_processor)
    fusedvit.fuse(model, processor=processor)
    other = pickle.loads(pickle.dumps(copy_of(model)))
    fusedvit.unfuse(other)
    assert type(processor.image_processor) is not kinds
    fusedvit.unfuse(other, processor=processor)
    assert type(processor.image_processor) is kinds


def test_a_processor_of_other_patches_changes_nothing(processor: Any) -> None:
    model, other = tiny_model(), image_processor(patch_size=8)
    kinds = type(other), type(model.model.visual)
    with pytest.raises(ValueError, match=r"patches of \(channels, frames, side\) \(3, 2, 4\), got \(3, 2, 8\)"):
        fusedvit.fuse(model, processor=other)
    assert (type(other), type(model.model.visual)) == kinds
    with pytest.raises(fusedvit.UnsupportedModel, match="cannot give bytes"):
        fusedvit.fuse(model, processor=processor.tokenizer)
    assert type(model.model.visual) is kinds[1]
    handle = fusedvit.fuse(model, processor=processor)
    with pytest.raises(ValueError, match="patches of"):
        fusedvit.fuse(model, processor=other)
    assert handle.state() == "fused" and type(other) is kinds[0]


def test_fuse_keeps_the_device_that_swap_was_given(processor: Any) -> None:
    model, part = tiny_model(), processor.image_processor
    swap(processor, device="cpu")
    fusedvit.fuse(model, processor=processor)
    assert vars(part)[STATE].device == torch.device("cpu")
    swap(processor, device="meta")
    assert vars(part)[STATE].device == torch.device("meta")
    vars(part)[STATE] = replace(vars(part)[STATE], process=-1)  # as if another process had swapped it
    fusedvit.fuse(model, processor=processor)
    assert vars(part)[STATE].device is None


@pytest.mark.parametrize("by", ["another tower", "the same tower", "swap"])
def test_a_fuse_that_raises_leaves_bytes_to_others(by: str, processor: Any) -> None:
    """A processor that gave bytes before gives bytes after it, and nothing was folded into the refusing tower."""
    model, part = tiny_model(), processor.image_processor
    refusing = model if by == "the same tower" else tiny_model(patch_size=8)
    handle = fusedvit.fuse(refusing)
    if by == "swap":
        swap(processor)
    else:
        fusedvit.fuse(model, processor=processor)
    if by == "the same tower":
        part.patch_size = 8
    before = type(part), dict(vars(part)), dict(handle.normalizations.known)
    with pytest.raises(ValueError, match="patches of"):
        fusedvit.fuse(refusing, processor=processor)
    assert (type(part), vars(part), handle.normalizations.known) == before


def test_videos_that_do_not_fit_leave_nothing_folded(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    handle = fusedvit.fuse(model)
    still = normalizations_of(swap(processor))[True]
    monkeypatch.setattr(api, "normalizations_of", lambda _: {True: still, False: replace(still, patch=8)})
    with pytest.raises(ValueError, match="patches of"):
        fusedvit.fuse(model, processor=processor)
    assert handle.normalizations.known == {} and handle.processors == []


@pytest.mark.parametrize("now", [None, object()], ids=["nothing", "something else"])
def test_unfuse_restores_what_fuse_has_changed(now: Any) -> None:
    """Whatever the user has put in its place meanwhile."""
    model, part = tiny_model(), image_processor(patch_size=4)
    kinds = type(part), type(model.model.visual)
    processor = SimpleNamespace(image_processor=part)
    handle = fusedvit.fuse(model, processor=processor)
    processor.image_processor = now
    fusedvit.unfuse(model)
    assert (type(part), type(model.model.visual), handle.state()) == (*kinds, "unfused")


def test_warmup_prepares_what_is_expected(processor: Any) -> None:
    model = tiny_model()
    handle = fusedvit.fuse(model)
    handle.warmup()
    fusedvit.fuse(model, processor=processor)
    for _ in range(2):
        handle.warmup()
        tokens_of(model, inputs_of(processor))
        assert handle.stats()["refreshes"] == 2


def test_another_normalization_in_a_call(processor: Any) -> None:
    model = tiny_model()
    plain = processor(text=[IMAGE_TEXT], images=[noise(50, 40)], image_mean=[0.1] * 3, return_tensors="pt")
    expected = tokens_of(model, plain)
    handle = fusedvit.fuse(model, STRICT, processor=processor)
    inputs = processor(text=[IMAGE_TEXT], images=[noise(50, 40)], image_mean=[0.1] * 3, return_tensors="pt")
    assert type(inputs["pixel_values"]) is BytePixels
    assert tokens_of(model, inputs).equal(expected) and handle.stats()["fused"] == 1
