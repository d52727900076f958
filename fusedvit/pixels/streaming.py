"""A corpus of images and videos as batches of patches: threads decode ahead, the GPU resizes while the tower runs.

    for batch in stream(paths, processor):
        tokens = tower(batch.pixel_values, grid_thw=batch.grid_thw).pooler_output

The processor determines sizes, normalisation and the choice of a video's frames.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch

from fusedvit.cores import available_cores
from fusedvit.errors import InputError, UnsupportedModel, first_line
from fusedvit.model.normalization import check_counts
from fusedvit.pixels.ahead import pool_of, raise_met, started_ahead, until_error
from fusedvit.pixels.arguments import usable_device
from fusedvit.pixels.byte_processors import CHANNELS_LAST
from fusedvit.pixels.media import (
    Limits,
    Media,
    MediaError,
    OnError,
    Source,
    VideoFacts,
    check_options,
    each_of,
    load_one,
    skip_or_raise,
)
from fusedvit.pixels.processors import gives_grids, name_of, swap

_PACKED_AHEAD = 1  # batches that wait while the next one is gathered
# Limit on a batch's decoded pixels, in bytes. The number of patches does not bound these: a processor may cut an image
# of 36 MB into 64 patches. Two batches are held at a time, and a processor on the CPU copies one. 65536 patches of
# 16 x 16 are 48 MiB, so only originals far larger than their patches shrink batches, and decoding dominates for these.
_DECODED_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Batch:
    """Sources that were packed together: several images, or one video.

    Attributes:
        pixel_values: `[P, width]` bytes of all patches, as the processor's `pixel_values` or `pixel_values_videos`;
            floats where the processor's options do not allow bytes.
        grid_thw: `[n, 3]` int64 on the CPU.
        indices: the sources' numbers in the order given, ascending.
        names: the sources' names.
        kind: "image" or "video".
    """

    pixel_values: torch.Tensor
    grid_thw: torch.Tensor
    indices: tuple[int, ...]
    names: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class _Parts:
    """The processors, swapped to return bytes; None for a processor that is missing or cannot return bytes."""

    image: Any
    video: Any
    device: torch.device
    no_video: str | None = None  # why there is no video processor, where the machine is at fault

    def check_video(self, name: str = "", index: int = 0) -> None:
        """Raises if there is no video processor: InputError if the machine is at fault, else the video's MediaError."""
        if self.video is None and self.no_video:
            raise InputError(self.no_video)
        if self.video is None:
            raise MediaError(f"{name}a video, and no video processor gives bytes", index)

    def sample(self, facts: VideoFacts) -> Sequence[int]:
        """The numbers of the frames that the video processor takes."""
        from transformers.video_utils import VideoMetadata

        self.check_video()
        if not self.video.do_sample_frames:
            return range(facts.frames)
        duration = None if facts.fps is None else facts.frames / facts.fps
        known = VideoMetadata(facts.frames, facts.fps, facts.width, facts.height, duration)
        try:
            return [int(i) for i in self.video.sample_frames(metadata=known)]
        except ValueError as error:
            raise MediaError(f"a video that Hugging Face's processor refuses: {first_line(error)}") from None
        except ImportError as error:
            raise InputError(f"a video's frames cannot be chosen: a package is missing: {first_line(error)}") from None


def stream(
    sources: Source | Iterable[Source],
    processor: Any,
    device: torch.device | str | None = None,
    patches: int = 16384,
    threads: int | None = None,
    ahead: int = 64,
    limits: Limits | None = None,
    errors: OnError = "raise",
) -> Iterator[Batch]:
    """Batches of patches of all sources, in the order given; endless sources are fine. Batches before an error come
    first, whether decoding or iterating `sources` fails.

    Args:
        sources: one source or several, as `load` takes them: paths of images and videos, contents of files,
            pixels.
        processor: a Hugging Face processor, or an image processor; it is not changed.
        device: where patches are computed and stay; by default the current GPU if there is one.
        patches: the most patches in a batch of images, which also has at most 128 MiB of decoded pixels. A larger image
            is a batch of its own, and so is every video.
        threads: how many threads decode; by default one per core.
        ahead: how many sources are decoded before a batch needs them. A decoded source takes 3 bytes a pixel. Up to two
            batches come on top, one being processed and one being gathered or waiting.
        limits: limits on the bytes, pixels and frames of each source.
        errors: "raise" the first error; "skip" failing sources, each with a warning that names it; or a function that
            is called with the error (its `index` says which source) before the stream continues.

    Raises:
        MediaError: a source does not decode, or the processor refuses it.
        InputError: the machine fails (open files, memory, permissions, disks, network drives) or lacks a package,
            whatever `errors` says.
        UnsupportedModel: the processor cannot return bytes.
        ValueError, TypeError: an argument is out of range, or of another type.
    """
    check_options(errors, limits, threads, called=True)
    check_counts(patches=patches, ahead=ahead)
    parts = _parts_of(processor, usable_device(device))
    return _batches(each_of(sources), parts, patches, threads or available_cores(), ahead, limits, errors)


def frames_of(processor: Any) -> Callable[[VideoFacts], Sequence[int]]:
    """A function for the `frames=` of `media.load`: the numbers of the frames that `processor` takes of a video."""
    return _parts_of(processor, torch.device("cpu")).sample


def _parts_of(processor: Any, device: torch.device) -> _Parts:
    """Copies of the image and video processors, swapped."""
    if processor is None:
        raise TypeError("fusedvit: processor must be one of Hugging Face's, got None")
    found = {name: getattr(processor, f"{name}_processor", None) for name in ("image", "video")}
    if found == {"image": None, "video": None}:
        found["image"] = processor
    copies = {name: None if part is None else copy.copy(part) for name, part in found.items()}
    swap(SimpleNamespace(**{f"{name}_processor": part for name, part in copies.items()}), device)
    usable = {name: part if gives_grids(part) else None for name, part in copies.items()}
    if usable == {"image": None, "video": None}:
        raise UnsupportedModel(f"{name_of(processor)} gives no grid_thw, by which batches are made")
    return _Parts(**usable, device=device, no_video=getattr(processor, "no_video", None))


def _batches(
    sources: Iterable[Source],
    parts: _Parts,
    patches: int,
    threads: int,
    ahead: int,
    limits: Limits | None,
    errors: OnError,
) -> Iterator[Batch]:
    received = functools.partial(_received, errors=errors)
    with pool_of(threads, "fusedvit-decode") as decoders, pool_of(1, "fusedvit-pack") as packer:
        loads = (functools.partial(load_one, source, parts.sample, limits, i) for i, source in enumerate(sources))
        groups = _groups(_good(started_ahead(decoders, loads, ahead), parts, errors), patches)
        packs = (functools.partial(_pack, group, parts) for group in groups)
        # a loop's variable would keep a batch alive while the next one is awaited
        yield from chain.from_iterable(map(received, started_ahead(packer, packs, _PACKED_AHEAD)))


def _good(decoded: Iterable["Future[Media]"], parts: _Parts, errors: OnError) -> Iterator[tuple[Media, int]]:
    """Media that decode and are not refused, each with its number of patches."""
    for task in decoded:
        try:
            media = task.result()
            _check_sides(media, parts)
            count = _patches_of(media, parts)
        except MediaError as error:
            skip_or_raise(error, errors)
            continue
        yield media, count


def _check_sides(media: Media, parts: _Parts) -> None:
    """Raises MediaError if a processor that does not resize cannot cut the frames into merged patches."""
    part = parts.video if media.kind == "video" else parts.image
    if part is None or part.do_resize:
        return
    height, width = media.frames.shape[1:3]
    side = int(part.patch_size) * int(part.merge_size)
    if height % side or width % side:
        expected = f"multiples of {side} pixels expected, as the processor does not resize"
        raise MediaError(f"{media.shown}: {expected}, got {height} x {width}", media.index)


def _patches_of(media: Media, parts: _Parts) -> int:
    """How many patches an image gives; 0 for a video. Raises MediaError where the processor refuses it."""
    if media.kind == "video":
        parts.check_video(f"{media.shown}: ", media.index)
        return 0
    if parts.image is None:
        raise MediaError(f"{media.shown}: an image, and no image processor gives bytes", media.index)
    height, width = media.frames.shape[1:3]
    if not parts.image.do_resize:
        return (height // int(parts.image.patch_size)) * (width // int(parts.image.patch_size))
    try:
        return int(parts.image.get_number_of_image_patches(height, width))
    except ValueError as error:
        raise refused(media, error) from None


def refused(media: Media, error: ValueError) -> MediaError:
    """The error of a medium for which a Hugging Face processor has raised `error`."""
    return MediaError(f"{media.shown}: Hugging Face's processor refuses it: {first_line(error)}", media.index)


def _groups(media: Iterable[tuple[Media, int]], patches: int) -> Iterator[list[Media]]:
    """Groups of media, one per batch; an error comes after the groups before it."""
    group: list[Media] = []
    used = size = 0
    met: list[Exception] = []
    for item, count in until_error(media, met):
        full = used + count > patches or size + item.frames.nbytes > _DECODED_BYTES
        if group and (full or "video" in (item.kind, group[-1].kind)):
            yield group
            group, used, size = [], 0, 0
        group.append(item)
        used, size = used + count, size + item.frames.nbytes
    if group:
        yield group
    raise_met(met)


@dataclass(frozen=True)
class _Packed:
    """A batch and the event on its GPU after which it may be read; None on a CPU.

    batch: None where the processor refuses all of its sources.
    refused: one error for each source that the processor refuses.
    """

    batch: Batch | None
    refused: tuple[MediaError, ...]
    ready: torch.cuda.Event | None = None

    def received(self) -> Batch | None:
        """The batch, readable on the calling thread's current stream."""
        if self.batch is not None and self.ready is not None:
            current = torch.cuda.current_stream(self.batch.pixel_values.device)
            current.wait_event(self.ready)
            self.batch.pixel_values.record_stream(current)
        return self.batch


def _received(packed: "Future[_Packed]", errors: OnError) -> Iterator[Batch]:
    """The batch; none where the processor refuses all of its sources. An error is raised after the batch."""
    found = packed.result()
    if errors != "raise":
        for error in found.refused:
            skip_or_raise(error, errors)
    batch = found.received()
    if batch is not None:
        yield batch
    if errors == "raise":
        raise_met(found.refused)


def _pack(group: list[Media], parts: _Parts) -> _Packed:
    """Packs `group` and empties it: the caller still holds the list while it gathers the next group, but then no
    decoded pixels."""
    try:
        if parts.device.type != "cuda":
            return _packed(group, parts)
        with torch.cuda.stream(_packing_stream(parts.device)):
            found = _packed(group, parts)
            return replace(found, ready=torch.cuda.current_stream().record_event())
    finally:
        group.clear()


def _packed(group: list[Media], parts: _Parts) -> _Packed:
    """The batch without media that the processor refuses. If it refuses the group, each of its media is tried alone."""
    try:
        return _Packed(_batch(group, parts), ())
    except ValueError as error:
        if len(group) == 1:
            return _Packed(None, (refused(group[0], error),))
    wrong = [error for media in group for error in _packed([media], parts).refused]
    if not wrong:
        return _Packed(_batch(group, parts), ())  # raises the error that only the whole group causes
    indices = {error.index for error in wrong}
    good = [media for media in group if media.index not in indices]
    return _Packed(_batch(good, parts) if good else None, tuple(wrong))


@functools.cache
def _packing_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _batch(group: list[Media], parts: _Parts) -> Batch:
    kind = group[0].kind
    told: dict[str, Any] = {"return_tensors": "pt", "input_data_format": CHANNELS_LAST}  # else 3 rows pass for channels
    if kind == "image":
        found = parts.image(images=[media.frames[0] for media in group], **told)
        pixels, grid = found["pixel_values"], found["image_grid_thw"]
    else:
        (video,) = group
        told["video_metadata"] = [_metadata_of(video)]  # ERNIE's processor writes the time into frames
        found = parts.video(videos=[video.frames], do_sample_frames=False, **told)
        pixels, grid = found["pixel_values_videos"], found["video_grid_thw"]
    pixels = pixels.to(parts.device)  # the original code leaves floats on the CPU
    return Batch(pixels, grid, tuple(m.index for m in group), tuple(m.name for m in group), kind)


def _metadata_of(media: Media) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(media.source_frames, media.fps, frames_indices=list(media.kept))
