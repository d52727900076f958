"""Gemma 4 in vLLM: vLLM's model holds Hugging Face's tower and calls its parts one by one, never its `forward`.

The two methods that do so, for images and for frames of videos, are replaced: the fused tower encodes the same batches,
and its rows are projected as in vLLM. Only methods whose source is that of a known release are replaced.
"""

import hashlib
import inspect
from collections.abc import Callable
from itertools import islice
from operator import index
from typing import Any

import torch
from torch import nn

from fusedvit.checks.change_detection import HANDLE
from fusedvit.checks.ownership import own_class
from fusedvit.errors import unnamed
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.outputs.hugging_face import to_hugging_face
from fusedvit.serving.engine_calls import answer_of, waiting_allowed
from fusedvit.serving.plugin import unwrapped, wrap

TOWER = "vision_tower"  # the attribute of a model
_IMAGES, _VIDEOS = "_process_image_input", "_process_video_input"
# SHA-256 of each method's sources in vLLM 0.26 to 0.33, the oldest first; the first 16 digits
_SOURCES = {
    _IMAGES: ("84965853cd7a6d36", "660847f59ce6e4a2", "985dd0c4555d4062"),
    _VIDEOS: ("4d128b07f9b6b85f", "e566f5e027b4bea3", "bf9e6c7f2d424bdb"),
}

Rows = list[torch.Tensor]
Batch = torch.Tensor | Rows  # stacked, or images of several sizes


def wrong_model(cls: type) -> str:
    """How a model's class differs from the known releases; "" if it does not."""
    for name, known in _SOURCES.items():
        function = unwrapped(vars(cls).get(name))
        try:
            source = inspect.getsource(function.__code__).strip()
        except (AttributeError, OSError):
            return f"its {name} has no source to compare"
        if hashlib.sha256(source.encode()).hexdigest()[:16] not in known:
            return f"its {name} is none of those that this release of fusedvit knows"
    return ""


def replace_methods(cls: type) -> None:
    """Makes a model's class call its tower where the tower is fused."""
    wrap(cls, _IMAGES, _images)
    wrap(cls, _VIDEOS, _videos)


def run(handle: FusedEncoder, tower: nn.Module, pixel_values: Any, pixel_position_ids: Any, **more: Any) -> Any:
    """A fused tower's `forward`, which vLLM never calls: Hugging Face's record, or None to run the original code."""
    found = answer_of(handle, tower, pixel_values, pixel_position_ids, more)
    if found is None:
        return None
    call = pixel_values, pixel_position_ids, more
    return to_hugging_face(own_class(type(tower)), tower, handle, found.outputs, call)


def _images(original: Callable[..., Rows], model: Any, image_input: Any) -> Rows:
    """`[tokens, text width]` of each image."""
    rows = _encoded(model.vision_tower, image_input["pixel_values"], image_input["pixel_position_ids"])
    return original(model, image_input) if rows is None else _projected(model, rows, [1] * len(rows))


def _videos(original: Callable[..., Rows], model: Any, video_input: Any) -> Rows:
    """`[tokens of all its frames, text width]` of each video."""
    pixels, positions = (video_input[f"{name}_videos"] for name in ("pixel_values", "pixel_position_ids"))
    counts = _counts(model.vision_tower, video_input["video_frame_counts"], pixels)
    rows = None if counts is None else _encoded(model.vision_tower, pixels, positions)
    return original(model, video_input) if rows is None or counts is None else _projected(model, rows, counts)


def _counts(tower: nn.Module, given: Any, frames: Any) -> list[int] | None:
    """Frames of each video; None, counted, where they do not add up to `frames`: vLLM's own code takes any."""
    handle: FusedEncoder | None = vars(tower).get(HANDLE)
    if handle is None:
        return None
    try:
        counts = [index(n) for n in torch.as_tensor(given).tolist()]
        if min(counts, default=0) >= 0 and sum(counts) == len(frames):
            return counts
        handle.leave(f"video_frame_counts {counts} are not those of {len(frames)} frames")
    except (TypeError, ValueError) as error:
        handle.leave(f"video_frame_counts: {unnamed(error)}")
    return None


def _encoded(tower: nn.Module, pixels: Batch, positions: Batch) -> Rows | None:
    """`[tokens, width]` of each padded image, one call per number of patches; None where vLLM's own code must run."""
    handle: FusedEncoder | None = vars(tower).get(HANDLE)
    if handle is None:
        return None
    batches = _batches(handle, pixels, positions)
    if batches is None:
        return None
    rows: dict[int, torch.Tensor] = {}
    for chosen, images, at in batches:
        with waiting_allowed():
            found = answer_of(handle, tower, images, at)
        if found is None:
            return None
        tokens = [item.tokens // handle.spec.merge_unit for item in found.items]
        rows.update(zip(chosen, found.outputs.pooled.split(tokens), strict=True))
    return [rows[i] for i in range(len(rows))]


def _batches(
    handle: FusedEncoder, pixels: Batch, positions: Batch
) -> list[tuple[list[int], torch.Tensor, torch.Tensor]] | None:
    """Images grouped by their number of patches: indices, pixels and positions of each group. None, counted, where
    there are no images or they do not stack."""
    alike: dict[int, list[int]] = {}
    try:
        for i, image in enumerate(pixels):
            alike.setdefault(len(image), []).append(i)
        found = [(chosen, _stacked(pixels, chosen), _stacked(positions, chosen)) for chosen in alike.values()]
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        handle.leave(unnamed(error))
        return None
    if not found:
        handle.leave("no images")
    return found or None


def _stacked(given: Batch, chosen: list[int]) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else torch.stack([given[i] for i in chosen])


def _projected(model: Any, rows: Rows, counts: list[int]) -> Rows:
    """Projects all rows to the language model's width in one product, then splits them by `counts[i]` images each."""
    flat = torch.cat(rows).to(model.model_dtype)
    found: torch.Tensor = model.embed_vision(inputs_embeds=flat.unsqueeze(0)).squeeze(0)
    tokens = iter(map(len, rows))
    return list(found.split([sum(islice(tokens, count)) for count in counts]))
