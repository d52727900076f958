"""Decoded images to patches: bytes go through pinned memory to a side stream, where two launches handle an image.

Consecutive stills of equal size share their launches.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fusedvit.kernels import patches as kernels
from fusedvit.kernels.patches import PatchLayout, Taps
from fusedvit.kernels.reference import patches as reference
from fusedvit.pixels.resize import Resizing


class SizedFrames(NamedTuple):
    """A still or a video, and the grid and size that it gets.

    Attributes:
        frames: `[n, H, W, C]` uint8, any strides, on a CPU or a GPU; n is 1 for a still.
        grid: (t, h, w) in patches.
        size: (height, width) that frames are resized to; the rest of `grid`, at the bottom and to the right, is 0.
    """

    frames: torch.Tensor
    grid: tuple[int, int, int]
    size: tuple[int, int]


_Group = tuple[SizedFrames, ...]  # sources that share their launches


def patches_of(
    sources: Sequence[SizedFrames], layout: PatchLayout, resizing: Resizing, device: torch.device
) -> torch.Tensor:
    """Patches of all sources, one after another, as bytes.

    Args:
        layout: `temporal` is 1 for stills.
        device: a GPU; on a CPU the kernels' reference runs.

    Returns:
        `[P, C * temporal * patch^2]` uint8 on `device`, ready for the current stream.
    """
    key = _still_key if layout.temporal == 1 else lambda video: object()  # a video shares no launches
    grouped = itertools.groupby(sources, key=key) if len(sources) > 1 else [(None, sources)]
    groups = [tuple(group) for _, group in grouped]
    if device.type == "cpu":
        images = [torch.cat([source.frames for source in group]) for group in groups]
        return _computed(groups, images, layout, resizing, device)
    here = device.index == torch.cuda.current_device()
    with contextlib.nullcontext() if here else torch.cuda.device(device):
        return _on_side(groups, layout, resizing, device)


def _on_side(groups: Sequence[_Group], layout: PatchLayout, resizing: Resizing, device: torch.device) -> torch.Tensor:
    """Computes on a side stream, overlapped with the current stream's work.

    PyTorch's context manager and a new event would cost the host some 20 us more, of 3 ms for a small image.
    """
    current, side = torch.cuda.current_stream(), _side(device)
    if any(group[0].frames.is_cuda for group in groups):
        side.stream.wait_stream(current)
    torch.cuda.set_stream(side.stream)
    try:
        out = _computed(groups, (_sent(group, device) for group in groups), layout, resizing, device)
    finally:
        torch.cuda.set_stream(current)
    side.done.record(side.stream)
    current.wait_event(side.done)  # or for a later record by another thread, which covers ours
    out.record_stream(current)
    return out


class _Side(NamedTuple):
    """done: recorded after the last call. tables: the stream that copies tables of weights."""

    stream: torch.cuda.Stream
    tables: torch.cuda.Stream
    done: torch.cuda.Event


@functools.cache
def _side(device: torch.device) -> _Side:
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))  # creates it now: two threads could not at once
    return _Side(torch.cuda.Stream(device), torch.cuda.Stream(device), done)


def _still_key(source: SizedFrames) -> tuple[object, ...]:
    """The key under which stills share launches: those on the host that differ in their pixels only."""
    return source.frames.shape, source.grid, source.size, object() if source.frames.is_cuda else None


def _computed(
    groups: Sequence[_Group],
    images: Iterable[torch.Tensor],
    layout: PatchLayout,
    resizing: Resizing,
    device: torch.device,
) -> torch.Tensor:
    """The patches of all groups; `images` holds `[n, H, W, C]` of each, on the device."""
    op = kernels.patches_from_images if device.type == "cuda" else reference.patches_from_images
    channels = groups[0][0].frames.shape[3]
    counts = [len(group) * math.prod(group[0].grid) for group in groups]
    out = torch.empty((sum(counts), channels * layout.temporal * layout.patch**2), dtype=torch.uint8, device=device)
    for group, frames, rows in zip(groups, images, out.split(counts) if len(counts) > 1 else (out,), strict=True):
        size, new, (t, h, w) = (frames.shape[1], frames.shape[2]), group[0].size, group[0].grid
        down, across = (_taps_for_use(resizing, a, b, device) for a, b in zip(size, new, strict=True))
        op(frames, down, across, layout, (len(group) * t, h, w), rows, size != new and resizing.down_first(size, new))
    return out


def _taps_for_use(resizing: Resizing, size: int, new: int, device: torch.device) -> Taps | None:
    """Taps on the device; their memory is kept until the current stream has read it."""
    taps = None if size == new else taps_of(resizing, size, new, device)
    if taps is not None and device.type == "cuda":
        current = torch.cuda.current_stream()
        taps.first.record_stream(current)
        taps.weights.record_stream(current)
    return taps


@functools.lru_cache(maxsize=128)
def taps_of(resizing: Resizing, size: int, new: int, device: torch.device) -> Taps | None:
    """Taps on the device. Their copies have ended, so any stream may read them; the host waits for these copies alone,
    not for the current stream's work."""
    weights = resizing.weights(size, new)
    if weights is None:
        return None
    with torch.cuda.stream(_side(device).tables) if device.type == "cuda" else contextlib.nullcontext():
        first, rows = (torch.from_numpy(table).to(device) for table in (weights.first, weights.weights))
    return Taps(first, rows, weights.bits)


def _sent(group: _Group, device: torch.device) -> torch.Tensor:
    """The images of a group on the device, `[n, H, W, C]`, copied there if they are on the host."""
    frames = [source.frames for source in group]
    if frames[0].is_cuda:
        return torch.cat(frames)
    shape = (sum(map(len, frames)), *frames[0].shape[1:])
    host = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
    if len(frames) == 1:
        return host.copy_(frames[0]).to(device, non_blocking=True)
    there = torch.empty(shape, dtype=torch.uint8, device=device)
    for mine, theirs, given in zip(host.split(1), there.split(1), frames, strict=True):
        theirs.copy_(mine.copy_(given), non_blocking=True)  # overlaps the host's next copy
    return there
