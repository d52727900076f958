"""Files and bytes of images and videos, decoded within limits and in threads; pixels are taken as they are.

Pillow finds an image's format in the file, among those that it decodes itself. A video's decoder goes by the suffix
alone (without one, and of bytes, by how they begin), so that a playlist posing as a video cannot make FFmpeg open
anything else. Colours and rotation are those of transformers' `load_image` and of the processor that is given its
picture. Nothing is downloaded.
"""

import errno
import functools
import inspect
import io
import logging
import operator
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fusedvit.cores import available_cores
from fusedvit.errors import PREFIX, InputError, first_line, is_of_handler, named
from fusedvit.pixels.ahead import submitted
from fusedvit.pixels.arguments import check_counts
from fusedvit.pixels.containers import missing_bytes
from fusedvit.pixels.formats import VIDEO_FORMATS, image_formats, suffixes, video_format

LONGEST_NAME = 400  # characters of a name in a message
ERRORS = ("raise", "skip")
# What the system says of a file; all else that it says is about the machine, also that a file may not be read: it is
# whole, and another user or mount reads it.
_OF_A_FILE = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
    + (errno.EINVAL, errno.EILSEQ, errno.EOVERFLOW, errno.EFBIG)
)

logger = logging.getLogger("fusedvit")


class MediaError(InputError):
    """A file that cannot be read as an image or video. index: which of the given sources."""

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


class MediaTooLarge(MediaError):
    """A file past one of the Limits; the message names the limit and what came."""


@dataclass(frozen=True)
class Limits:
    """What we are willing to decode. `max_pixels` holds for an image, and for all frames kept of a video together."""

    max_bytes: int = 256 * 2**20
    max_pixels: int = 128 * 2**20
    max_frames: int = 20_000  # frames in the file, shown or not, of which few are kept

    def __post_init__(self) -> None:
        check_counts(**vars(self))


class VideoFacts(NamedTuple):
    """What is known of a video before any frame is decoded: sizes are those before it is turned. fps is None where the
    file does not say."""

    frames: int
    fps: float | None
    width: int
    height: int


@dataclass(frozen=True)
class Media:
    """A decoded image (one frame) or video.

    Attributes:
        name: the file's, without its folder; of bytes, which ones they were.
        kind: "image" or "video".
        frames: `[F, H, W, 3]` uint8.
        source_frames: how many the file shows; where not all of them decode, how many do.
        index: which of the given sources.
        fps: of the file; None of images, and where it does not say.
        kept: numbers of the frames among these.
    """

    name: str
    kind: str
    frames: np.ndarray
    source_frames: int
    index: int = 0
    fps: float | None = None
    kept: tuple[int, ...] = (0,)


Source = str | os.PathLike[str] | bytes | bytearray | memoryview | np.ndarray | Media | MediaError
SOURCES = (str, os.PathLike, bytes, bytearray, memoryview, np.ndarray, Media, MediaError)
Sampling = int | Callable[[VideoFacts], Sequence[int]]


def load(
    sources: Source | Iterable[Source],
    frames: Sampling = 8,
    limits: Limits | None = None,
    errors: str = "raise",
    threads: int | None = None,
) -> list[Media]:
    """Decodes images and videos in threads, in the order given.

    Args:
        sources: paths, or the contents of files; or one of them. URLs are refused. Pixels are taken as they are: uint8
            `[H, W, 3]` of an image, `[F, H, W, 3]` of the frames of a video that are wanted; and what was loaded.
        frames: how many frames of a video to keep, spread evenly from the first to the last; or what returns their
            numbers, ascending. It is called again with how many frames decode where those are found to be fewer.
        limits: on the bytes, pixels and frames of each.
        errors: "raise" the first error, or "skip" what does not decode, with a warning that names it.
        threads: as many as there are cores if left out.

    Raises:
        MediaError: no such file, an unknown suffix, or a file that does not decode, or not to its end.
        MediaTooLarge: more bytes, pixels or frames than `limits` allow; found before the decoding where possible.
        InputError: the machine fails, of open files, memory, permissions, disks or shares, whatever `errors` says.
        TypeError, ValueError: an argument that is none of these.
    """
    check_options(errors, limits, threads, called=False)
    if not callable(frames):
        if not isinstance(frames, int):
            raise TypeError(f"fusedvit: frames must be an int or callable, got {type(frames).__name__}")
        check_counts(frames=frames)
    try:
        return _loaded(each_of(sources), frames, limits, errors, threads or available_cores())
    except InputError as error:
        raise named(error) from None


def _loaded(
    sources: Iterable[Source], frames: Sampling, limits: Limits | None, errors: str, threads: int
) -> list[Media]:
    found = []
    with ThreadPoolExecutor(threads) as pool:
        calls = (functools.partial(load_one, source, frames, limits, i) for i, source in enumerate(sources))
        tasks = [submitted(pool, call) for call in calls]
        for task in tasks:
            try:
                found.append(task.result())
            except MediaError as error:
                if errors == "raise":
                    pool.shutdown(cancel_futures=True)
                    raise
                logger.warning("fusedvit: skipped: %s", error)
    return found


def check_options(errors: Any, limits: Any, threads: Any, called: bool) -> None:
    """Raises TypeError or ValueError where an option of `load` or `stream` is none.

    Args:
        called: whether `errors` may be a function.
    """
    if not (called and callable(errors)) and errors not in ERRORS:
        wrong = ValueError if isinstance(errors, str) else TypeError
        raise wrong(f"fusedvit: errors must be one of {ERRORS}{' or callable' if called else ''}, got {errors!r}")
    if not isinstance(limits, Limits | None):
        raise TypeError(f"fusedvit: limits must be Limits or None, got {type(limits).__name__}")
    if threads is not None:
        check_counts(threads=threads)


def is_url(path: str) -> bool:
    """Whether it names something elsewhere; `Path` makes one slash of two."""
    return "://" in path[:20] or path.startswith(("http:/", "https:/"))


def is_one_source(sources: Any) -> bool:
    """Whether it is a source itself: arrays of anything but names are pixels."""
    names = isinstance(sources, np.ndarray) and sources.dtype.kind in "OUS"
    return isinstance(sources, SOURCES) and not names


def each_of(sources: Any) -> Iterable[Source]:
    """Several sources, or one. Raises TypeError where it is neither."""
    if is_one_source(sources):
        return [sources]
    try:
        return iter(sources)
    except TypeError:
        expected = "sources must be paths, bytes or pixels, or several of them"
        raise TypeError(f"{PREFIX}{expected}, got {type(sources).__name__}") from None


def load_one(source: Source, frames: Sampling = 8, limits: Limits | None = None, index: int = 0) -> Media:
    """`load` of one; `index` is what results and errors say."""
    try:
        return _load_one(source, frames, limits or Limits(), index)
    except MediaError as error:
        error.index = index
        raise


def _load_one(source: Source, frames: Sampling, limits: Limits, index: int) -> Media:
    if isinstance(source, MediaError):
        raise source
    if isinstance(source, Media):
        return replace(source, index=index)
    if isinstance(source, np.ndarray):
        return _of_pixels(source, index)
    given = _opened(source, index)
    _check_limit(given.shown, "bytes", given.size, limits.max_bytes)
    if given.video is None:
        return Media(given.name, "image", _decode_image(given, limits)[None], 1, index)
    if isinstance(frames, int) and frames < 1:
        raise MediaError(f"{given.shown}: at least 1 frame must be sampled, got {frames}")
    return _decode_video(given, frames, limits, index)


def _of_pixels(pixels: np.ndarray, index: int) -> Media:
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.shape[-1] != 3 or not pixels.size:
        expected = "uint8 pixels [H, W, 3] or [F, H, W, 3] expected"
        raise MediaError(f"array {index}: {expected}, got {pixels.dtype} {list(pixels.shape)}")
    if pixels.ndim == 3:
        return Media(f"array {index}", "image", pixels[None], 1, index)
    return Media(f"array {index}", "video", pixels, len(pixels), index, kept=tuple(range(len(pixels))))


class _Given(NamedTuple):
    """A source that may be an image or a video.

    Attributes:
        name: of its `Media`.
        shown: in messages: with the folder, as many files may have the same name.
        video: FFmpeg's name of the format; None of an image.
    """

    name: str
    shown: str
    source: Path | bytes
    size: int
    video: str | None

    def open(self) -> Any:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")


def _opened(source: Source, index: int) -> _Given:
    if isinstance(source, bytes | bytearray | memoryview):
        return _Given(f"bytes {index}", f"bytes {index}", bytes(source), len(source), video_format(bytes(source[:16])))
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"fusedvit: sources must be paths or bytes, got {type(source).__name__}")
    if is_url(str(source)):
        raise MediaError(f"{_printable(str(source))}: a URL; download it and give the file")
    if not os.fspath(source):
        raise MediaError("a path expected, got ''")
    path = Path(source)
    name, shown, suffix = _printable(path.name or str(path)), _printable(str(path)), path.suffix.lower()
    try:
        found = path.stat()
    except FileNotFoundError:
        raise MediaError(f"{shown}: no such file") from None
    except (OSError, ValueError, MemoryError) as error:  # too long a name, a folder not to be entered; a 0 in the name
        raise_of_machine(error, shown)
        raise MediaError(f"{shown}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(found.st_mode):
        raise MediaError(f"{shown}: a folder; give images and videos")
    if not stat.S_ISREG(found.st_mode):
        raise MediaError(f"{shown}: not a regular file")
    if suffix and suffix not in suffixes():
        raise MediaError(f"{shown}: not an image or video format that is read: {_printable(suffix)}")
    video = VIDEO_FORMATS.get(suffix) if suffix else video_format(_head_of(path, shown))
    return _Given(name, shown, path, found.st_size, video)


def _head_of(path: Path, shown: str) -> bytes:
    """How a file without a suffix begins."""
    try:
        with path.open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise_of_machine(error, shown)
        raise MediaError(f"{shown}: {error.strerror}") from None


def _decode_image(given: _Given, limits: Limits) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with given.open() as file, Image.open(file, formats=image_formats()) as image:
            _check_limit(given.shown, "pixels", image.width * image.height, limits.max_pixels)
            ImageOps.exif_transpose(image, in_place=True)
            # as `load_image` gives it to a processor: without alpha, but a colour of it may still be transparent
            return rgb_of(image if image.mode == "RGB" else image.convert("RGB"))
    except Image.DecompressionBombError:
        # Pillow's own limit came first; its message may be trusted, the file may not
        limit = f"at most {limits.max_pixels} are read"
        raise MediaTooLarge(f"{given.shown}: more pixels than Pillow accepts, {limit}") from None
    except MediaError:
        raise
    except Exception as error:  # Pillow raises struct.error, TypeError and others where a file is damaged
        raise_of_machine(error, given.shown)
        raise MediaError(f"{given.shown}: does not decode as an image ({_said_of_image(error)})") from None


def _said_of_image(error: Exception) -> str:
    """Pillow's own words, such as that a file is truncated; where it has none for users, the error's name."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "no format that Pillow knows"
    if isinstance(error, OSError | SyntaxError):
        return getattr(error, "strerror", None) or first_line(error)
    return type(error).__name__


def raise_of_machine(error: Exception, name: str) -> None:
    """Raises InputError, which is no MediaError, where `error` is the machine's and not that of the file `name`."""
    if is_of_handler(error):
        raise error
    if isinstance(error, MemoryError):
        raise InputError(f"{name}: cannot be read (out of memory)") from None
    if isinstance(error, ImportError):
        raise InputError(f"{name}: cannot be read (a package is missing: {error})") from None
    if isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_A_FILE:
        raise InputError(f"{name}: cannot be read ({error.strerror or os.strerror(error.errno)})") from None


def rgb_of(picture: Any) -> np.ndarray:
    """`[H, W, 3]` of a Pillow image, as Hugging Face's processors convert it: where it has alpha, or a colour that is
    transparent, by the function of the transformers that is installed, as versions differ."""
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        return np.array(_transformers_rgb()(picture))
    return np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))


@functools.cache
def _transformers_rgb() -> Callable[[Any], Any]:
    from transformers.image_transforms import convert_to_rgb

    if "return_numpy" in inspect.signature(convert_to_rgb).parameters:  # without it, it warns
        return functools.partial(convert_to_rgb, return_numpy=True)
    return convert_to_rgb


def _decode_video(given: _Given, sampling: Sampling, limits: Limits, index: int) -> Media:
    facts, start = _facts_of(given, limits)
    wanted = _wanted(given, sampling, facts, limits)
    decoded, count = _decoded(given, facts, wanted, start)
    if len(decoded) < len(set(wanted)):  # fewer frames decode than there are packets: they have other numbers
        facts = facts._replace(frames=count)
        wanted = _wanted(given, sampling, facts, limits)
        decoded.clear()  # as much memory as the limits allow once
        decoded, _ = _decoded(given, facts, wanted, None)
        if len(decoded) < len(set(wanted)):
            expected = f"{len(set(wanted))} frames of {facts.frames} that decode expected"
            raise MediaError(f"{given.shown}: damaged: {expected}, got {len(decoded)}")
    frames = np.ascontiguousarray(np.stack([decoded[i] for i in wanted]))
    return Media(given.name, "video", frames, facts.frames, index, facts.fps, tuple(wanted))


def _wanted(given: _Given, sampling: Sampling, facts: VideoFacts, limits: Limits) -> list[int]:
    """The numbers of the frames to keep, which `limits` allow."""
    if not facts.frames:
        raise MediaError(f"{given.shown}: at least 1 frame expected, got 0")
    if callable(sampling):
        wanted = [operator.index(i) for i in sampling(facts)]
    else:
        wanted = np.linspace(0, facts.frames - 1, min(sampling, facts.frames)).round().astype(int).tolist()
    if not wanted or min(wanted) < 0 or max(wanted) >= facts.frames:
        raise MediaError(f"{given.shown}: frames 0 to {facts.frames - 1} can be sampled, asked for {wanted[:8]}")
    _check_limit(given.shown, "pixels", facts.width * facts.height * len(wanted), limits.max_pixels)
    return wanted


def _decoded(
    given: _Given, facts: VideoFacts, wanted: list[int], start: int | None
) -> tuple[dict[int, np.ndarray], int]:
    """The frames `wanted` by their numbers among those that decode, turned upright as transformers' torchcodec does.

    Fewer where fewer decode; none where the first that decodes is shown after `start`, as of a video that begins within
    a group of pictures: its first packets refer to a key frame that is not there. The number is then how many decode.
    """
    decoded: dict[int, np.ndarray] = {}
    chosen, turns, count = set(wanted), 0, 0
    with _video_stream(given) as (container, stream):
        for i, frame in enumerate(container.decode(stream)):
            count = i + 1
            if i == 0 and start is not None and frame.pts is not None and frame.pts > start:
                chosen.clear()  # the others are counted
            if i not in chosen:
                continue
            if (frame.width, frame.height) != (facts.width, facts.height):
                expected, got = f"{facts.width}x{facts.height}", f"{frame.width}x{frame.height}"
                raise MediaError(f"{given.shown}: frames of {expected} expected, got {got}")
            turns = turns if decoded else round(frame.rotation / 90)
            decoded[i] = np.rot90(frame.to_ndarray(format="rgb24"), turns)
            if len(decoded) == len(chosen):
                break
    return decoded, count


def _facts_of(given: _Given, limits: Limits) -> tuple[VideoFacts, int | None]:
    """The facts, and when the first frame is shown, in ticks of the stream; None where no packet says when.

    Frames are packets, not the header's count: that may be absent or untrue, and packets cost no decoding. Those that
    an edit list leaves out, as a video has that was trimmed without encoding it anew, are decoded but not shown. An
    AVI's index is taken as it was read: other containers' grow while packets are read, or leave frames out.
    """
    count, packets, times = 0, 0, []
    with _video_stream(given) as (container, stream):
        indexed = sum(entry.size > 0 for entry in stream.index_entries) if given.video == "avi" else 0
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise MediaError(f"{given.shown}: cut off: frame {count} is not whole")
            packets += packet.size > 0
            _check_limit(given.shown, "frames", packets, limits.max_frames)
            if packet.size > 0 and not packet.is_discard:
                count += 1
                times += [] if packet.pts is None else [packet.pts]
        if packets < indexed:  # FFmpeg skips what it does not find
            raise MediaError(f"{given.shown}: damaged: {indexed} frames by its index, got {packets}")
        fps = None if not stream.average_rate else float(stream.average_rate)
        facts = VideoFacts(count, fps, stream.width, stream.height)
    _check_whole(given)
    return facts, min(times, default=None)


def _check_whole(given: _Given) -> None:
    assert given.video is not None
    try:
        with given.open() as file:
            missing = missing_bytes(file, given.video)
    except (OSError, MemoryError) as error:
        raise_of_machine(error, given.shown)
        raise MediaError(f"{given.shown}: {getattr(error, 'strerror', None) or error}") from None
    if missing:
        raise MediaError(f"{given.shown}: cut off: {given.size + missing} bytes expected, got {given.size}")


@contextmanager
def _video_stream(given: _Given) -> Iterator[tuple[Any, Any]]:
    try:
        import av
    except ModuleNotFoundError:
        raise InputError(f'{given.shown}: decoding a video needs PyAV: pip install "fusedvit[cli]"') from None
    try:
        with given.open() as file, av.open(file, format=given.video, metadata_errors="replace") as container:
            if not container.streams.video:
                raise MediaError(f"{given.shown}: one video stream expected, got none")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except MediaError:
        raise
    except Exception as error:  # FFmpeg's own, and PyAV's AttributeError, UnicodeDecodeError of broken files
        if not isinstance(error, av.FFmpegError):  # which has a system's names for what is wrong with a file
            raise_of_machine(error, given.shown)
        raise MediaError(f"{given.shown}: does not decode as {given.video} ({type(error).__name__})") from None


def _check_limit(name: str, what: str, got: int, limit: int) -> None:
    if got > limit:
        raise MediaTooLarge(f"{name}: at most {limit} {what} are read, got {got}")


def _printable(name: str) -> str:
    """A name for a message: on one line, and its two ends where it is very long."""
    text = "".join(c if c.isprintable() else "?" for c in name)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME // 2]}…{text[-LONGEST_NAME // 2 :]}"
