"""Decoded images on their way to patches: bytes through pinned memory, on a side stream, into two launches each.

Stills of equal size that follow one another share their launches.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fusedvit.kernels import patches as kernels
from fusedvit.kernels.patches import PatchLayout, Taps
from fusedvit.kernels.reference import patches as reference
from fusedvit.pixels.resize import Resizing, Weights

_ALIGNMENT = 16  # bytes


class Source(NamedTuple):
    """A still or a video and what becomes of it.

    Attributes:
        frames: `[n, H, W, C]` uint8, any strides, on a CPU or a GPU; of a still n is 1.
        grid: (t, h, w) in patches.
        size: (height, width) that frames are resized to; what `grid` has more is 0, at the bottom and to the right.
    """

    frames: torch.Tensor
    grid: tuple[int, int, int]
    size: tuple[int, int]


class _Run(NamedTuple):
    """Sources that share their launches."""

    sources: tuple[Source, ...]
    down: Weights
    across: Weights
    down_first: bool

    @property
    def grid(self) -> tuple[int, int, int]:
        t, h, w = self.sources[0].grid
        return t * len(self.sources), h, w


def patches_of(
    sources: Sequence[Source], layout: PatchLayout, resizing: Resizing, device: torch.device
) -> torch.Tensor:
    """Patches of all sources, one after another, as bytes.

    Args:
        layout: `temporal` is 1 for stills.
        device: a GPU; on a CPU the kernels' reference runs.

    Returns:
        `[P, C * temporal * patch^2]` uint8 on `device`, ready for the current stream.
    """
    key = _still_key if layout.temporal == 1 else lambda video: object()  # a video shares with none
    runs = [_run_of(tuple(run), resizing) for _, run in itertools.groupby(sources, key=key)]
    if device.type == "cpu":
        return _computed(runs, layout, device, {})
    with torch.cuda.device(device):
        current, side = torch.cuda.current_stream(), _side_stream(device)
        if any(source.frames.is_cuda for source in sources):
            side.wait_stream(current)
        with torch.cuda.stream(side):
            out = _computed(runs, layout, device, dict(_sent(runs, device)))
        current.wait_stream(side)
        out.record_stream(current)
    return out


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _still_key(source: Source) -> tuple[object, ...]:
    """Stills on the host that are alike in everything but their pixels share launches."""
    return source.frames.shape, source.grid, source.size, object() if source.frames.is_cuda else None


def _run_of(sources: tuple[Source, ...], resizing: Resizing) -> _Run:
    height, width = sources[0].frames.shape[1:3]
    new_height, new_width = sources[0].size
    down, across = resizing.weights(height, new_height), resizing.weights(width, new_width)
    return _Run(sources, down, across, resizing.down_first(height, width, new_height, new_width))


def _computed(
    runs: Sequence[_Run], layout: PatchLayout, device: torch.device, sent: dict[int, torch.Tensor]
) -> torch.Tensor:
    """`sent`: tensors on the device, by the `id` of what they were on the host."""
    op = kernels.patches_from_images if device.type == "cuda" else reference.patches_from_images
    channels = runs[0].sources[0].frames.shape[3]
    counts = [t * h * w for t, h, w in (run.grid for run in runs)]
    out = torch.empty((sum(counts), channels * layout.temporal * layout.patch**2), dtype=torch.uint8, device=device)
    for run, rows in zip(runs, out.split(counts), strict=True):
        images = sent.get(id(run))
        if images is None:
            images = torch.cat([source.frames for source in run.sources])
        op(images, _taps(run.down, sent), _taps(run.across, sent), layout, run.grid, rows, run.down_first)
    return out


def _taps(axis: Weights, sent: dict[int, torch.Tensor]) -> Taps:
    first, weights = (sent.get(id(table), torch.from_numpy(table)) for table in (axis.first, axis.weights))
    return Taps(first, weights, axis.bits)


def _sent(runs: Sequence[_Run], device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Everything on the host that the launches read, copied to the device: (`id` on the host, tensor there)."""
    tables = {id(t): t for run in runs for axis in (run.down, run.across) for t in (axis.first, axis.weights)}
    sizes = [sum(s.frames.numel() for s in run.sources if not s.frames.is_cuda) for run in runs]
    ends = list(itertools.accumulate((-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes), initial=0))
    room = ends[-1] + sum(table.nbytes for table in tables.values())
    host = torch.empty(room, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(room, dtype=torch.uint8, device=device)
    at = ends[-1]
    for key, table in tables.items():
        part = there[at : at + table.nbytes].view(torch.int32).view(table.shape)
        host[at : at + table.nbytes].view(torch.int32).view(table.shape).copy_(torch.from_numpy(table))
        at += table.nbytes
        yield key, part
    there[ends[-1] :].copy_(host[ends[-1] :], non_blocking=True)
    for run, start, size in zip(runs, ends, sizes, strict=False):
        at = start
        for source in run.sources if size else ():
            n = source.frames.numel()
            host[at : at + n].view(source.frames.shape).copy_(source.frames)
            there[at : at + n].copy_(host[at : at + n], non_blocking=True)  # while the next one is copied on the host
            at += n
        if size:
            yield id(run), there[start : start + size].view(-1, *run.sources[0].frames.shape[1:])
