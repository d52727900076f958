"""Every tower inside its whole model: `fuse` finds it there, and the model calls it.

Language models stay on the meta device; only the modules around the tower have memory.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import fusedvit
from fusedvit.bench.towers import padded_images, random_weights_
from fusedvit.families.registry import FAMILIES
from tests.support.byte_patches import bytes_for
from tests.support.families import INSTALLED, TINY, family_tower
from tests.support.towers import Grid, assert_same, outputs_of, pixels_for, ran_fused

STRICT = fusedvit.FuseConfig(strict=True)
IMAGES: Grid = [(1, 4, 6), (1, 10, 4)]
VIDEOS: Grid = [(2, 4, 10), (4, 4, 4)]
# AutoModel does not know these, or the tower is further inside; test_family_models.py and test_gemma4.py build them.
OTHERS = {"qwen2_5_omni", "qwen3_omni_moe", "colqwen2", "diffusion_gemma"}
NEWER = {"hyperclovax_vision_v2", "embedding_gemma2"}  # than the oldest transformers of our range
# Text configs whose defaults build no model.
TEXT: dict[str, dict[str, Any]] = {
    "cohere_compass": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "qwen4_exp": {
        "num_hidden_layers": 4,
        "ple_layer_ids": [],
        "ple_embed_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
}


def _model_types() -> list[tuple[str, str]]:
    """(model type of transformers, class of its tower)."""
    found = [(TINY[name][0], name) for name in INSTALLED]
    found += [(kind, family.class_names[0]) for family in FAMILIES for kind in family.also_in]
    return [(kind, tower) for kind, tower in found if kind in CONFIG_MAPPING_NAMES and kind not in OTHERS]


def outer_model(kind: str, tower: str) -> Any:
    """A model of this type around a tiny tower; its language model has shapes and no values."""
    inner = family_tower(tower)
    text = {"text_config": TEXT[kind]} if kind in TEXT else {}
    config = AutoConfig.for_model(kind, vision_config=inner.config.to_dict(), **text)
    with torch.device("meta"):
        model = AutoModel.from_config(config).eval().requires_grad_(False)
    for name, child in model.named_children():
        if type(child) is type(inner):
            setattr(model, name, inner)
        elif name != "language_model":
            random_weights_(child.to_empty(device="cpu"))
    return model


def features(model: Any, tower: nn.Module, *pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The model's image and video features, of these `pixels` if there are any."""
    if takes_padded_images(tower):
        return padded_features(model, tower)
    of_images, of_videos = pixels or (pixels_for(tower, IMAGES), pixels_for(tower, VIDEOS, seed=2))
    with torch.no_grad():
        images = model.get_image_features(of_images, torch.tensor(IMAGES))
        videos = model.get_video_features(of_videos, torch.tensor(VIDEOS))
    outputs = {"images": images, "videos": videos}
    return {f"{kind} {name}": t for kind, output in outputs.items() for name, t in flat(outputs_of(output)).items()}


def takes_padded_images(tower: Any) -> bool:
    return hasattr(tower.config, "pooling_kernel_size")


def padded_features(model: Any, tower: nn.Module) -> dict[str, torch.Tensor]:
    """The same of a model whose tower takes padded images: frames of videos are images."""
    found: dict[str, Any] = {}
    for seed, grid in enumerate((IMAGES, VIDEOS)):
        images, positions = padded_images(pixels_for(tower, grid, seed), grid, tower.config.pooling_kernel_size)
        features, frames = model.get_image_features, {}
        of_video = getattr(model, "get_video_features", None) if grid is VIDEOS else None
        if (
            of_video and "num_frames_per_video" in inspect.signature(of_video).parameters
        ):  # older ones want equal videos
            features, frames = of_video, {"num_frames_per_video": torch.tensor([t for t, _, _ in grid])}
        with torch.no_grad():
            answer = outputs_of(features(images, positions, **frames))
        found |= {f"{seed} {name}": t for name, t in flat(answer).items()}
    return found


def flat(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{name}[{i}]": t
        for name, value in found.items()
        for i, t in enumerate([value] if isinstance(value, torch.Tensor) else value)
    }


@pytest.mark.parametrize("kind, tower", _model_types(), ids=lambda value: value)
def test_features_of_images_and_videos(kind: str, tower: str) -> None:
    model = outer_model(kind, tower)
    (inner,) = (m for m in model.modules() if type(m).__name__ == tower)
    expected = features(model, inner)
    handle = fusedvit.fuse(model, STRICT)
    assert handle.tower is inner
    assert_same(features(model, inner), expected)
    ran_fused(handle, calls=2)
    if not takes_padded_images(inner):
        marked = bytes_for(inner, IMAGES, still=True), bytes_for(inner, VIDEOS, still=False)
        found, as_floats = features(model, inner, *marked), features(model, inner, *(p.pixels() for p in marked))
        assert_same(found, as_floats)
        fusedvit.unfuse(model)
        with pytest.raises(TypeError, match="BytePixels"):
            features(model, inner, *marked)


def test_every_model_type_is_walked() -> None:
    walked = {kind for kind, _ in _model_types()}
    types = {TINY[name][0] for name in INSTALLED} | {kind for family in FAMILIES for kind in family.also_in}
    assert types - walked <= OTHERS | NEWER
