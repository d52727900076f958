"""A user's pictures and videos: files decoded within limits, and turned into the patches that a tower takes.

Pillow finds a picture's format in the file, among a few that it is allowed. A video's decoder goes by the suffix alone,
so that a playlist posing as a video cannot make FFmpeg open anything else. Patches come from Hugging Face's processors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange

from fusedvit.errors import InputError, first_line

ASSETS = Path(__file__).resolve().parents[1] / "assets"
SAMPLE_IMAGE = ASSETS / "grace_hopper.jpg"
SAMPLE_VIDEO = ASSETS / "big_buck_bunny.mp4"

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # as Pillow calls them
# suffix -> what FFmpeg calls the format
VIDEO_FORMATS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}


class MediaError(InputError):
    """A file that cannot be read as a picture or video."""


class MediaTooLarge(MediaError):
    """A file past one of the Limits; the message names the limit and what came."""


@dataclass(frozen=True)
class Limits:
    """What we are willing to decode. `max_pixels` holds for a picture, and for all frames kept of a video together."""

    max_bytes: int = 256 * 2**20
    max_pixels: int = 128 * 2**20
    max_frames: int = 20_000  # frames in the file, of which few are kept


@dataclass(frozen=True)
class Media:
    """A decoded picture (one frame) or video. frames: uint8 [F, H, W, 3]; source_frames: how many the file holds."""

    name: str
    kind: str  # "image" or "video"
    frames: np.ndarray
    source_frames: int


def load(path: str | Path, frames: int = 8, limits: Limits | None = None) -> Media:
    """Decode a picture, or `frames` frames of a video spread evenly from its first to its last.

    Raises:
        MediaError: no such file, an unknown suffix, or a file that does not decode.
        MediaTooLarge: more bytes, pixels or frames than `limits` allow; found before the decoding where possible.
    """
    limits = limits or Limits()
    path, name, suffix = _check_path(path)
    _check_limit(name, "bytes", path.stat().st_size, limits.max_bytes)
    if suffix in IMAGE_SUFFIXES:
        return Media(name, "image", _decode_image(path, name, limits)[None], 1)
    if frames < 1:
        raise MediaError(f"{name}: at least 1 frame must be sampled, got {frames}")
    kept, total = _decode_video(path, name, frames, limits)
    return Media(name, "video", kept, total)


def load_all(paths: Sequence[str | Path]) -> list[Media]:
    """The given files, or those that we ship. Raises MediaError."""
    media: dict[str, Media] = {}
    for path in paths or (SAMPLE_IMAGE, SAMPLE_VIDEO):
        item = load(path)
        while item.name in media:  # results go by name
            item = replace(item, name=f"another {item.name}")
        media[item.name] = item
    return list(media.values())


def _check_path(given: str | Path) -> tuple[Path, str, str]:
    """(path, name to be printed, suffix) of a file that may be a picture or a video."""
    if str(given).startswith(("http:/", "https:/")):
        raise MediaError(f"{_printable(str(given))}: a URL; download it and give the file")
    path = Path(given)
    name, suffix = _printable(path.name or str(given)), path.suffix.lower()
    if path.is_dir():
        raise MediaError(f"{name}: a folder; give pictures and videos")
    if not path.is_file():
        raise MediaError(f"{name}: no such file")
    if suffix not in IMAGE_SUFFIXES and suffix not in VIDEO_FORMATS:
        known = ", ".join([*IMAGE_SUFFIXES, *VIDEO_FORMATS])
        raise MediaError(f"{name}: the suffix must be one of {known}")
    return path, name, suffix


def _decode_image(path: Path, name: str, limits: Limits) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=IMAGE_FORMATS) as picture:
            _check_limit(name, "pixels", picture.width * picture.height, limits.max_pixels)
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except Image.DecompressionBombError:
        # Pillow's own limit came first; its message may be trusted, the file may not
        raise MediaTooLarge(f"{name}: more pixels than Pillow accepts, at most {limits.max_pixels} are read") from None
    except MediaError:
        raise
    except (OSError, SyntaxError, EOFError, ValueError) as error:  # ValueError: a mode that has no RGB
        raise MediaError(f"{name}: does not decode as a picture ({type(error).__name__})") from None


def _decode_video(path: Path, name: str, frames: int, limits: Limits) -> tuple[np.ndarray, int]:
    total = _count_frames(path, name, limits)
    wanted = set(np.linspace(0, total - 1, min(frames, total)).round().astype(int).tolist())
    kept: list[np.ndarray] = []
    with _video_stream(path, name) as (container, stream):
        _check_limit(name, "pixels", stream.width * stream.height * len(wanted), limits.max_pixels)
        for index, frame in enumerate(container.decode(stream)):
            if index not in wanted:
                continue
            if (frame.width, frame.height) != (stream.width, stream.height):
                raise MediaError(
                    f"{name}: frames of {stream.width}x{stream.height} expected, got {frame.width}x{frame.height}"
                )
            kept.append(frame.to_ndarray(format="rgb24"))
            if len(kept) == len(wanted):
                break
    if not kept:
        raise MediaError(f"{name}: at least 1 frame expected, got 0")
    return np.stack(kept), total


def _count_frames(path: Path, name: str, limits: Limits) -> int:
    """Packets, not the header's count: that may be absent or untrue, and packets cost no decoding."""
    count = 0
    with _video_stream(path, name) as (container, stream):
        for packet in container.demux(stream):
            count += packet.size > 0
            _check_limit(name, "frames", count, limits.max_frames)
    if not count:
        raise MediaError(f"{name}: at least 1 frame expected, got 0")
    return count


@contextmanager
def _video_stream(path: Path, name: str) -> Iterator[tuple[Any, Any]]:
    try:
        import av
    except ModuleNotFoundError:
        raise MediaError(f'{name}: decoding a video needs PyAV: pip install "fusedvit[cli]"') from None
    try:
        with path.open("rb") as file, av.open(file, format=VIDEO_FORMATS[path.suffix.lower()]) as container:
            if not container.streams.video:
                raise MediaError(f"{name}: one video stream expected, got none")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except (av.error.FFmpegError, OSError) as error:  # OSError: a seek that a broken file asks for
        raise MediaError(f"{name}: does not decode as {path.suffix.lower()[1:]} ({type(error).__name__})") from None


def _check_limit(name: str, what: str, got: int, limit: int) -> None:
    if got > limit:
        raise MediaTooLarge(f"{name}: at most {limit} {what} are read, got {got}")


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)[:80]


# ── patches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PatchLayout:
    """How a tower wants its pixels: patch geometry, normalisation, and the size (per frame) that it is resized into."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    min_pixels: int = 64 * 64
    max_pixels: int = 1024 * 1024


@dataclass(frozen=True)
class VisionInput:
    """One item for a tower: pixel_values float32 [P, C*tp*p*p] in merge-block order, grid_thw int64 [1, 3]."""

    pixel_values: torch.Tensor
    grid_thw: torch.Tensor


def prepare(media: Media, layout: PatchLayout) -> VisionInput:
    """Resize, normalise and patchify through Hugging Face's processors (without torchvision: the image processor's).

    Raises:
        MediaError: the processor refuses it, such as a picture over 200 times as wide as high.
    """
    try:
        return _prepared(media, layout)
    except ValueError as error:
        raise MediaError(f"{media.name}: Hugging Face's processor refuses it: {first_line(error)}") from None


def _prepared(media: Media, layout: PatchLayout) -> VisionInput:
    if media.kind == "image":
        batch = _image_processor(layout)(images=_as_pictures(media.frames), return_tensors="pt")
        return VisionInput(batch["pixel_values"].float(), batch["image_grid_thw"].long())
    frames = _pad_frames(media.frames, layout.temporal_patch_size)
    from transformers.utils import is_torchvision_available

    return _video_processor_rows(frames, layout) if is_torchvision_available() else rows_from_frames(frames, layout)


def rows_from_frames(frames: np.ndarray, layout: PatchLayout) -> VisionInput:
    """A video's patches by way of the image processor, which repeats a still `tp` times along time.

    frames: uint8 [F, H, W, 3] with F a multiple of the layout's temporal_patch_size (tp). Each run of tp stills gives
    one grid row in time: what was repeated is dropped, and the stills take its place.
    """
    batch = _image_processor(layout)(images=_as_pictures(frames), return_tensors="pt")
    _, height, width = batch["image_grid_thw"][0].tolist()
    repeat = layout.temporal_patch_size
    stills = rearrange(
        batch["pixel_values"].float(),
        "(t tp n) (c repeat p) -> t tp n c repeat p",
        tp=repeat,
        n=height * width,
        repeat=repeat,
        p=layout.patch_size**2,
    )
    rows = rearrange(stills[..., 0, :], "t tp n c p -> (t n) (c tp p)")
    return VisionInput(rows.contiguous(), torch.tensor([[len(frames) // repeat, height, width]]))


def _video_processor_rows(frames: np.ndarray, layout: PatchLayout) -> VisionInput:
    from transformers import Qwen3VLVideoProcessor

    # this processor's limits are for the whole clip, ours for a frame
    size = {"shortest_edge": layout.min_pixels * len(frames), "longest_edge": layout.max_pixels * len(frames)}
    processor = Qwen3VLVideoProcessor(
        size=size, do_sample_frames=False, cap_pixels_per_frame=False, **_processor_arguments(layout)
    )
    clip = rearrange(torch.from_numpy(frames), "f h w c -> f c h w")
    batch = processor(videos=[clip], return_tensors="pt")
    return VisionInput(batch["pixel_values_videos"].float(), batch["video_grid_thw"].long())


def _image_processor(layout: PatchLayout) -> Any:
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        from transformers import Qwen2VLImageProcessor as Processor
    else:
        from transformers import Qwen2VLImageProcessorPil as Processor
    size = {"shortest_edge": layout.min_pixels, "longest_edge": layout.max_pixels}
    return Processor(size=size, **_processor_arguments(layout))


def _processor_arguments(layout: PatchLayout) -> dict[str, Any]:
    return {
        "patch_size": layout.patch_size,
        "temporal_patch_size": layout.temporal_patch_size,
        "merge_size": layout.merge_size,
        "image_mean": list(layout.mean),
        "image_std": list(layout.std),
    }


def _as_pictures(frames: np.ndarray) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(frame) for frame in frames]  # a picture's channel axis is not inferred


def _pad_frames(frames: np.ndarray, multiple: int) -> np.ndarray:
    missing = -len(frames) % multiple
    return np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)]) if missing else frames
