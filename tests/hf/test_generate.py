"""generate() with a fused tower: the same tokens, and the tower really ran fused."""

import itertools
from typing import Any

import pytest
import torch

import fusedvit
from tests.support.towers import (
    KINDS,
    Grid,
    assert_bitwise,
    batch_of,
    copy_of,
    error_of,
    outputs_of,
    prompt,
    ran_fused,
    tiny_model,
)

IMAGES: Grid = [(1, 4, 6), (1, 6, 4)]
VIDEOS: Grid = [(3, 4, 6)]
MEDIA = {"images": (IMAGES, []), "video": ([], VIDEOS), "both": (IMAGES, VIDEOS)}
# Of each kind of model, and of one of them in each way; `make test-all` has every kind in every way.
WAYS = [
    pytest.param(*way, marks=() if way[0] == KINDS[0] or way[1:] == ("both", 1) else pytest.mark.slow)
    for way in itertools.product(KINDS, MEDIA, (1, 3))
]


def generate(model: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 6, "do_sample": False} | arguments
    return model.generate(**{name: tensor.clone() for name, tensor in inputs.items()}, **settings)


@pytest.mark.parametrize("kind, media, beams", WAYS)
def test_tokens_are_the_same(kind: str, media: str, beams: int) -> None:
    model = tiny_model(kind)
    images, videos = MEDIA[media]
    inputs = prompt(model.model.visual, images, videos)
    expected = generate(model, inputs, num_beams=beams)
    handle = fusedvit.fuse(model, fusedvit.FuseConfig(strict=True))
    assert generate(model, inputs, num_beams=beams).equal(expected)
    ran_fused(handle, calls=bool(images) + bool(videos))


def test_tokens_hang_on_the_pixels() -> None:
    """The guard of the tests here: were the tower ignored, they would pass with any tower."""
    model = tiny_model()
    fusedvit.fuse(model)
    one, other = (prompt(model.model.visual, IMAGES, VIDEOS, seed=seed) for seed in (1, 7))
    assert not generate(model, one).equal(generate(model, other))


def test_batch_of_unlike_prompts() -> None:
    model = tiny_model()
    tower = model.model.visual
    inputs = batch_of([prompt(tower, IMAGES), prompt(tower, [(1, 2, 2)], VIDEOS, seed=5), prompt(tower, videos=VIDEOS)])
    expected = generate(model, inputs)
    handle = fusedvit.fuse(model, fusedvit.FuseConfig(strict=True))
    assert generate(model, inputs).equal(expected)
    ran_fused(handle, calls=2)


@pytest.mark.parametrize("arguments", [{"num_return_sequences": 2, "num_beams": 2}, {"use_cache": False}])
def test_other_ways_to_generate(arguments: dict[str, Any]) -> None:
    model = tiny_model()
    inputs = prompt(model.model.visual, IMAGES, VIDEOS)
    expected = generate(model, inputs, **arguments)
    handle = fusedvit.fuse(model, fusedvit.FuseConfig(strict=True))
    assert generate(model, inputs, **arguments).equal(expected)
    stats = handle.stats()
    assert stats["calls"] == stats["fused"] >= 2 and stats["original"] == {}


def test_logits_of_a_forward() -> None:
    model = tiny_model()
    inputs = prompt(model.model.visual, IMAGES, VIDEOS)
    with torch.no_grad():
        expected = model(**inputs).logits
        fusedvit.fuse(model)
        assert error_of(model(**inputs).logits, expected) < 1e-4


def test_both_calls_of_a_forward_own_their_answers() -> None:
    """Image and video encoders run before either answer is used."""
    model = tiny_model()
    tower = model.model.visual
    fusedvit.fuse(model)
    kept: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def keep(module: Any, arguments: Any, answer: Any) -> None:
        held = outputs_of(answer)
        kept.append((held, {name: tensor.clone() for name, tensor in held.items()}))

    tower.register_forward_hook(keep)
    generate(model, prompt(tower, IMAGES, VIDEOS))
    generate(model, prompt(tower, IMAGES, VIDEOS, seed=9))
    assert len(kept) == 4
    for held, then in kept:
        assert_bitwise(held, then)


def test_image_features_are_split_by_item() -> None:
    model = tiny_model()
    other = copy_of(model)
    fusedvit.fuse(model)
    inputs = prompt(model.model.visual, IMAGES)
    with torch.no_grad():
        ours, ref = (
            m.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output for m in (model, other)
        )
    assert [tuple(part.shape) for part in ours] == [tuple(part.shape) for part in ref]
    for part, expected in zip(ours, ref, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)
