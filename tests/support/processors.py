"""Hugging Face's image and video processors, with sizes small enough for tests."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import transformers
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available

PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
VIDEO_PIXELS = {"shortest_edge": 4 * 32 * 32, "longest_edge": 16 * 96 * 96}


def noise(*shape: int) -> np.ndarray:
    """`[…, 3]` bytes, the same for the same shape."""
    return np.random.default_rng(shape).integers(0, 256, (*shape, 3), dtype=np.uint8)


def image_processor(name: str = "Qwen2VLImageProcessor", **settings: Any) -> Any:
    """Of the torchvision backend where there is one, else of Pillow's."""
    name += "" if is_torchvision_available() or name.endswith("Pil") else "Pil"
    return getattr(transformers, name)(**({"size": PIXELS} | settings))


def video_processor(name: str = "Qwen3VLVideoProcessor", **settings: Any) -> Any:
    return getattr(transformers, name)(**({"size": VIDEO_PIXELS} | settings))


def whole_processor(
    image: Any, video: Any, tokens: dict[str, int], special: Iterable[str], pad: str, **named: Any
) -> Any:
    """A processor of Qwen3-VL whose tokenizer knows the words `tokens`; `video` may be None."""
    import tokenizers

    words = tokenizers.models.WordLevel({"<unk>": 0} | tokens, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token=pad, additional_special_tokens=list(special)
    )
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None):  # None for video
        return transformers.Qwen3VLProcessor(image, fast, video, **named)
