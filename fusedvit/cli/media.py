"""A user's images and videos turned into the patches that a tower takes, by Hugging Face's image processor."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange

from fusedvit.pixels.byte_pixels import BytePixels, as_floats
from fusedvit.pixels.byte_processors import CHANNELS_LAST
from fusedvit.pixels.media import Media, load_one
from fusedvit.pixels.processors import swap
from fusedvit.pixels.streaming import refused

ASSETS = Path(__file__).resolve().parents[1] / "assets"
# processors would take 1, 3 or 4 rows of an array for channels without the layout
_AS_DECODED = {"input_data_format": CHANNELS_LAST, "return_tensors": "pt"}
SAMPLE_IMAGE = ASSETS / "grace_hopper.jpg"
SAMPLE_VIDEO = ASSETS / "big_buck_bunny.mp4"


def load_all(paths: Sequence[str | Path]) -> list[Media]:
    """The given files, or the shipped ones. Raises MediaError, also for sizes that processors refuse."""
    media: dict[str, Media] = {}
    for path in paths or (SAMPLE_IMAGE, SAMPLE_VIDEO):
        item = load_one(path)
        _check_size(item)  # before a tower is built or read
        while item.name in media:  # results are keyed by name
            item = replace(item, name=f"another {item.name}")
        media[item.name] = item
    return list(media.values())


# ── patches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class InputLayout:
    """The input layout of a tower: patch geometry, normalisation, and the bounds of a resized frame's size."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    min_pixels: int = 64 * 64
    max_pixels: int = 1024 * 1024


@dataclass(frozen=True)
class VisionInput:
    """One item for a tower.

    Attributes:
        pixel_values: `[P, width]` patches in merge-block order: bytes as swapped processors return them, or floats.
        grid_thw: `[1, 3]` int64.
    """

    pixel_values: torch.Tensor
    grid_thw: torch.Tensor

    def floats(self, dtype: torch.dtype) -> "VisionInput":
        """The input as Hugging Face's processor would have returned it, `[P, C*tp*p*p]` in `dtype`."""
        return VisionInput(as_floats(self.pixel_values).to(dtype), self.grid_thw)


def prepare(media: Media, layout: InputLayout) -> VisionInput:
    """Resizes and cuts into patches by Hugging Face's image processor, swapped to return bytes.

    Raises:
        MediaError: the processor refuses the size, such as a picture over 200 times as wide as high.
    """
    with _named(media):
        return _prepared(media, layout)


def _check_size(media: Media) -> None:
    """Raises MediaError if the processor refuses the size: it judges the sides' ratio, which no layout changes."""
    with _named(media):
        _image_processor(InputLayout()).get_number_of_image_patches(*media.frames.shape[1:3])


@contextmanager
def _named(media: Media) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise refused(media, error) from None


def _prepared(media: Media, layout: InputLayout) -> VisionInput:
    if media.kind == "image":
        batch = _image_processor(layout)(images=list(media.frames), **_AS_DECODED)
        return VisionInput(batch["pixel_values"], batch["image_grid_thw"])
    return _rows_of_video(media.frames, layout)


def _rows_of_video(frames: np.ndarray, layout: InputLayout) -> VisionInput:
    """A video's patches by the image processor, which gets the frames as stills: bit for bit the video processor's, but
    of frames lower or narrower than a merged patch, which the two resize to other sizes.

    frames: uint8 [F, H, W, 3]; temporal_patch_size (tp) of them are one step of the grid in time, the last one as often
    as it takes.
    """
    missing = -len(frames) % layout.temporal_patch_size
    frames = np.pad(frames, ((0, missing), (0, 0), (0, 0), (0, 0)), mode="edge")
    batch = _image_processor(layout)(images=list(frames), **_AS_DECODED)
    _, height, width = batch["image_grid_thw"][0].tolist()
    stills: BytePixels = batch["pixel_values"]
    sides = {"tp": layout.temporal_patch_size, "n": height * width, "p": layout.patch_size**2}
    rows = rearrange(stills.unmarked(), "(t tp n) (c p) -> (t n) (c tp p)", **sides)
    grid = torch.tensor([[len(frames) // layout.temporal_patch_size, height, width]])
    return VisionInput(BytePixels.mark(rows, stills.normalization), grid)


def _image_processor(layout: InputLayout) -> Any:
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        from transformers import Qwen2VLImageProcessor as Processor
    else:
        from transformers import Qwen2VLImageProcessorPil as Processor
    processor = Processor(
        patch_size=layout.patch_size,
        temporal_patch_size=layout.temporal_patch_size,
        merge_size=layout.merge_size,
        size={"shortest_edge": layout.min_pixels, "longest_edge": layout.max_pixels},
        image_mean=list(layout.mean),
        image_std=list(layout.std),
    )
    return swap(processor)
