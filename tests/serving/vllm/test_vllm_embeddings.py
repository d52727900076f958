"""Ready embeddings: vLLM's own parser takes them, and its models give them to the language model as they are."""

from typing import Any

import pytest
import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.model_executor.models.qwen2_vl import Qwen2VLMultiModalDataParser
from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalDataParser
from vllm.multimodal.inputs import MultiModalKwargsItems

from fusedvit.serving.embeddings import VisionEmbeddings
from tests.serving.vllm.support import GRIDS, load, pixels_of, under

PARSERS = {
    "Qwen3VLForConditionalGeneration": Qwen3VLMultiModalDataParser,
    "Qwen3_5ForConditionalGeneration": Qwen3VLMultiModalDataParser,
    "Qwen2_5_VLForConditionalGeneration": Qwen2VLMultiModalDataParser,
}


@pytest.mark.parametrize("modality", ["image", "video"])
@pytest.mark.parametrize("architecture", PARSERS)
def test_vllm_takes_them(architecture: str, modality: str) -> None:
    config, model = load(architecture)
    grid = GRIDS["images"] if modality == "image" else [(3, 8, 8), (2, 4, 12)]
    with torch.inference_mode(), under(config):
        rows = model.visual(pixels_of(model, grid, torch.float32), torch.tensor(grid))
    levels = rows.shape[1] // 64 - 1
    seconds = [[0.5 * i for i in range(t)] for t, _, _ in grid] if modality == "video" else None
    given: Any = VisionEmbeddings(rows, torch.tensor(grid), 2, levels).for_vllm(modality, seconds)
    items: Any = PARSERS[architecture](2, video_needs_metadata=True).parse_mm_data(given)[modality]
    assert items.get_count() == len(grid)
    data = MultiModalKwargsItems.from_hf_inputs(BatchFeature(items.get_passthrough_data()), items.fields_config)
    with torch.inference_mode(), under(config):
        found = model.embed_multimodal(**data.get_data())
    assert [len(item) for item in found] == [t * h * w // 4 for t, h, w in grid]
    assert torch.equal(torch.cat(found), rows)
