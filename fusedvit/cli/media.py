"""Pictures and videos, decoded within limits, for the command line and the benchmarks; the encoder decodes nothing.

A decoder is chosen by the file's suffix alone, never by guess, so that a playlist posing as a video cannot make FFmpeg
open anything else.
"""

# ruff: noqa: PLC0415  Pillow and PyAV are imported where they are used: none is needed to say --help

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ASSETS = Path(__file__).parent / "assets"
SAMPLE_IMAGE = ASSETS / "grace_hopper.jpg"
SAMPLE_VIDEO = ASSETS / "big_buck_bunny.mp4"

# suffix -> what Pillow / FFmpeg call the format
IMAGE_FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP", ".gif": "GIF"}
VIDEO_FORMATS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}


class MediaError(ValueError):
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
    path = Path(path)
    name = _printable(path.name)
    suffix = path.suffix.lower()
    if suffix not in IMAGE_FORMATS and suffix not in VIDEO_FORMATS:
        known = ", ".join([*IMAGE_FORMATS, *VIDEO_FORMATS])
        raise MediaError(f"{name}: the suffix must be one of {known}")
    if not path.is_file():
        raise MediaError(f"{name}: no such file")
    _check_limit(name, "bytes", path.stat().st_size, limits.max_bytes)
    if suffix in IMAGE_FORMATS:
        return Media(name, "image", _decode_image(path, name, limits)[None], 1)
    if frames < 1:
        raise MediaError(f"{name}: at least 1 frame must be sampled, got {frames}")
    kept, total = _decode_video(path, name, frames, limits)
    return Media(name, "video", kept, total)


def _decode_image(path: Path, name: str, limits: Limits) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=[IMAGE_FORMATS[path.suffix.lower()]]) as picture:
            _check_limit(name, "pixels", picture.width * picture.height, limits.max_pixels)
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except Image.DecompressionBombError:
        # Pillow's own limit came first; its message may be trusted, the file may not
        raise MediaTooLarge(f"{name}: more pixels than Pillow accepts, at most {limits.max_pixels} are read") from None
    except (OSError, SyntaxError, EOFError) as error:
        raise MediaError(f"{name}: does not decode as {path.suffix.lower()[1:]} ({type(error).__name__})") from None


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
        raise MediaError(f"{name}: decoding a video needs PyAV (pip install av)") from None
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
