"""Ready embeddings: SGLang's own processor takes them, and puts them in place of what its tower would compute."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.mm_utils import embed_mm_inputs
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.multimodal.processors.base_processor import MultimodalSpecialTokens
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from fusedvit.serving.embeddings import VisionEmbeddings
from tests.serving.sglang.support import GRIDS, QWEN3, QWEN25, build, embed, loaded, tower_of

IDS = {"image": 500, "video": 501}


def processor_of(model: Any) -> Any:
    """SGLang's processor of Qwen-VL models as far as inputs need it that are processed already: no tokenizer."""
    found = QwenVLImageProcessor.__new__(QwenVLImageProcessor)
    tokens = MultimodalSpecialTokens(image_token_id=IDS["image"], video_token_id=IDS["video"])
    vars(found).update(_processor=None, _tokenizer=None, mm_tokens=tokens, use_cuda_ipc=False, FEATURE_NAMES=[])
    found.ATTR_NAME_TO_MODALITY = {"image_grid_thw": Modality.IMAGE, "video_grid_thw": Modality.VIDEO}
    return found


def rows_of(model: Any, processor: Any, ids: list[int], given: dict[str, Any]) -> torch.Tensor:
    """What SGLang puts in place of placeholders, merger rows and deepstack rows side by side."""
    loading = processor.load_mm_data(prompt=ids, multimodal_tokens=processor.mm_tokens, **given)
    items, input_ids, _ = processor.process_and_combine_mm_data(asyncio.run(loading), processor.mm_tokens)
    padded = input_ids.clone()
    for item in items:
        for first, last in item.offsets:
            padded[first : last + 1] = item.pad_value
    deep = getattr(model.visual, "deepstack_visual_indexes", ())
    owner = SimpleNamespace(
        visual=model.visual, deepstack_visual_indexes=deep, get_image_feature=model.get_image_feature
    )
    owner.get_video_feature = model.get_video_feature
    owner.separate_deepstack_embeds = lambda e: (e[:, :64], e[:, 64:])
    embeds, more = embed_mm_inputs(
        mm_inputs_list=[SimpleNamespace(mm_items=items)],
        extend_prefix_lens=[0],
        extend_seq_lens=[len(ids)],
        input_ids=padded,
        input_embedding=torch.nn.Embedding(512, 64),
        multimodal_model=owner,
        use_deepstack={m: bool(deep) for m in (Modality.IMAGE, Modality.VIDEO)},
    )
    found = torch.cat([embeds, *([more["input_deepstack_embeds"]] if deep else [])], 1)
    return found[torch.isin(input_ids, torch.tensor([*IDS.values()]))]


@pytest.mark.parametrize("modality", ["image", "video"])
@pytest.mark.parametrize("architecture", [QWEN3, "Qwen3_5ForConditionalGeneration", QWEN25])
def test_sglang_takes_them(architecture: str, modality: str) -> None:
    model = loaded(build(architecture))
    tower, grid = tower_of(model), GRIDS["images" if modality == "image" else "video"]
    rows = embed(tower, grid)
    levels = rows.shape[1] // 64 - 1
    ready = VisionEmbeddings(rows, torch.tensor(grid), 2, levels)
    ids = [1]
    for item in ready.items():
        ids += [2, *[IDS[modality]] * len(item.rows), 3]
    processor = processor_of(model)
    with torch.inference_mode():
        found = rows_of(model, processor, ids, {f"{modality}_data": ready.for_sglang(modality)})
    assert torch.equal(found, rows)
