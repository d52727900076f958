"""Hugging Face's image and video processors, with sizes small enough for tests."""

from typing import Any

import numpy as np
import transformers
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
