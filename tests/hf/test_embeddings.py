"""Ready embeddings: transformers' models take them in place of pixels, images and videos."""

import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import fusedvit  # noqa: E402
from fusedvit.bench.towers import random_weights_  # noqa: E402
from fusedvit.cli.towers import TINY  # noqa: E402
from fusedvit.serving.embeddings import VisionEmbeddings  # noqa: E402

IDS = {"image": 190, "video": 191}
_TEXT = {
    **{"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 48, "vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 8, 8]},
}
_WINDOWS = {"fullatt_block_indexes": [1], "window_size": 112}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", dict(TINY)),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {"depth": 2, "hidden_size": 160, "num_heads": 2, "intermediate_size": 300, "out_hidden_size": 96} | _WINDOWS,
    ),
}


@pytest.mark.parametrize("modality", IDS)
@pytest.mark.parametrize("architecture", MODELS)
def test_transformers_takes_them(architecture: str, modality: str) -> None:
    config, vision = MODELS[architecture]
    tokens = {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}
    given = getattr(transformers, config)(text_config=_TEXT, vision_config=vision, **tokens)
    model = getattr(transformers, architecture)(given).eval()
    if "mm_encoder_outputs" not in inspect.signature(model.model.forward).parameters:
        pytest.skip("transformers before 5.23")
    random_weights_(model)
    encoder = fusedvit.fuse(model)
    grid = torch.tensor([[1, 4, 6], [1, 8, 8]])
    ids = [1]
    for t, h, w in grid.tolist():
        ids += [192, *[IDS[modality]] * (t * h * w // 4), 193]
    pixels = torch.randn(int(grid.prod(1).sum()), model.model.visual.patch_embed.proj.weight[0].numel())
    kinds = torch.tensor([[{190: 1, 191: 2}.get(i, 0) for i in ids]])  # text, image, video
    prompt = {"input_ids": torch.tensor([ids]), f"{modality}_grid_thw": grid, "mm_token_type_ids": kinds}
    with torch.no_grad():
        want = model(**prompt, **{"pixel_values" if modality == "image" else "pixel_values_videos": pixels}).logits
        rows = encoder.concatenated(pixels, grid)
        ready = VisionEmbeddings(rows, grid, 2, levels=len(encoder.spec.deepstack))
        found = model(**prompt, mm_encoder_outputs=ready.for_transformers(modality)).logits
        other = VisionEmbeddings(rows * 2, grid, 2, ready.levels).for_transformers(modality)
        assert not torch.allclose(model(**prompt, mm_encoder_outputs=other).logits, want, rtol=1e-3), "they are read"
    torch.testing.assert_close(found, want)
