"""Files and bytes of images and videos, decoded within limits and in threads; pixels are taken as they are.

Pillow finds an image's format in the file, among the formats that it decodes itself. The suffix alone selects a video's
decoder (the first bytes, where there is no suffix or no file), so that a playlist posing as a video cannot make FFmpeg
open another file. Colours and rotation are those of transformers' `load_image` followed by a processor. Nothing is
downloaded.
"""

import copy
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
from fusedvit.errors import PREFIX, InputError, first_line, is_of_handler, shown, unnamed
from fusedvit.model.normalization import check_counts
from fusedvit.pixels.ahead import submitted
from fusedvit.pixels.containers import missing_bytes
from fusedvit.pixels.formats import VIDEO_FORMATS, image_formats, suffixes, video_format

LONGEST_NAME = 400  # characters of a name in a message
ERRORS = ("raise", "skip")
_DECODERS = {"PIL": "Pillow", "av": "PyAV"}  # module -> package
# System errors that are the file's fault. All others are the machine's, also a refused permission: the file is whole,
# and another user or mount can read it.
_OF_A_FILE = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
    + (errno.EINVAL, errno.EILSEQ, errno.EOVERFLOW, errno.EFBIG)
)

logger = logging.getLogger("fusedvit")


class MediaError(InputError):
    """A file that cannot be read as an image or video. index: its number among the given sources."""

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


class MediaTooLarge(MediaError):
    """A file past one of the `Limits`; the message names the limit and the file's value."""


@dataclass(frozen=True)
class Limits:
    """Limits on what is decoded.

    Attributes:
        max_bytes: of a file.
        max_pixels: of an image, and of all kept frames of a video together.
        max_frames: in a video's file, shown or not, of which few are kept.
    """

    max_bytes: int = 256 * 2**20
    max_pixels: int = 128 * 2**20
    max_frames: int = 20_000

    def __post_init__(self) -> None:
        check_counts(**vars(self))


class VideoFacts(NamedTuple):
    """What is known of a video before any frame is decoded. Sizes are those before rotation; fps is None where the file
    does not state it."""

    frames: int
    fps: float | None
    width: int
    height: int


@dataclass(frozen=True)
class Media:
    """A decoded image (one frame) or video.

    Attributes:
        name: the file's name without its folder; "bytes 3" or "array 3" for the source at index 3.
        kind: "image" or "video".
        frames: `[F, H, W, 3]` uint8.
        source_frames: how many frames the file shows; where not all of them decode, how many do.
        index: the number of this source among those given.
        fps: the file's frame rate; None for images, and where the file does not state it.
        kept: the numbers of `frames` among the source's frames.
        path: `name` with its folder, for messages; "" for arrays.
    """

    name: str
    kind: str
    frames: np.ndarray
    source_frames: int
    index: int = 0
    fps: float | None = None
    kept: tuple[int, ...] = (0,)
    path: str = ""

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return self.path or self.name


class NamedBytes(bytes):
    """A file's contents, which results and messages call `name` instead of "bytes 3"."""

    name: str

    def __new__(cls, content: bytes, name: str = "") -> "NamedBytes":  # pickle gives no name here and sets it later
        built = super().__new__(cls, content)
        built.name = name
        return built


Source = str | os.PathLike[str] | bytes | bytearray | memoryview | np.ndarray | Media | MediaError
SOURCES = (str, os.PathLike, bytes, bytearray, memoryview, np.ndarray, Media, MediaError)
OnError = str | Callable[[MediaError], object]  # the option `errors` of `load` and `stream`
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
        sources: one source or several: paths, contents of files, pixels, or results of `load`. URLs are refused. Pixels
            are taken as they are: uint8 `[H, W, 3]` for an image, `[F, H, W, 3]` for the wanted frames of a video.
        frames: how many frames of a video to keep, spread evenly from the first to the last; or a function that returns
            their numbers, ascending. If fewer frames decode than expected, it is called again with the real number.
        limits: limits on the bytes, pixels and frames of each source.
        errors: "raise" the first error, or "skip" sources that do not decode, each with a warning that names it.
        threads: number of threads; by default one per core.

    Raises:
        MediaError: no such file, an unknown suffix, or a file that does not decode to its end.
        MediaTooLarge: more bytes, pixels or frames than `limits` allow; found before decoding where possible.
        InputError: the machine fails (open files, memory, permissions, disks, shares), whatever `errors` says.
        TypeError, ValueError: an argument of the wrong type or out of range.
    """
    check_options(errors, limits, threads, called=False)
    if not callable(frames):
        if not isinstance(frames, int):
            raise TypeError(f"fusedvit: frames must be an int or callable, got {type(frames).__name__}")
        check_counts(frames=frames)
    return _loaded(each_of(sources), frames, limits, errors, threads or available_cores())


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
                skip_or_raise(error, errors)
    return found


def skip_or_raise(error: MediaError, errors: OnError) -> None:
    """Treats an error as the option `errors` of `load` and `stream` says."""
    if errors == "raise":
        raise error
    if callable(errors):
        errors(error)
    else:
        logger.warning("fusedvit: skipped: %s", unnamed(error))


def check_options(errors: Any, limits: Any, threads: Any, called: bool) -> None:
    """Raises TypeError or ValueError if an option of `load` or `stream` is invalid.

    Args:
        called: whether `errors` may be a function.
    """
    if not (called and callable(errors)) and errors not in ERRORS:
        wrong = ValueError if isinstance(errors, str) else TypeError
        raise wrong(f"fusedvit: errors must be one of {ERRORS}{' or callable' if called else ''}, got {shown(errors)}")
    if not isinstance(limits, Limits | None):
        raise TypeError(f"fusedvit: limits must be Limits or None, got {type(limits).__name__}")
    if threads is not None:
        check_counts(threads=threads)


def is_url(path: str) -> bool:
    """Whether `path` is a URL; `Path` turns its two slashes into one."""
    return "://" in path[:20] or path.startswith(("http:/", "https:/"))


def is_one_source(sources: Any) -> bool:
    """Whether `sources` is a single source. An array is one (pixels), unless it holds names."""
    names = isinstance(sources, np.ndarray) and sources.dtype.kind in "OUS"
    return isinstance(sources, SOURCES) and not names


def each_of(sources: Any) -> Iterable[Source]:
    """The sources, a single one as a list, several as an iterator. Raises TypeError for anything else.

    `iter` is called once: a `DataLoader`, for example, starts its processes at each call.
    """
    if is_one_source(sources):
        return [sources]
    try:
        return iter(sources)
    except TypeError:
        expected = "sources must be paths, bytes or pixels, or several of them"
        raise TypeError(f"{PREFIX}{expected}, got {type(sources).__name__}") from None


@contextmanager
def decoders() -> Iterator[None]:
    """A context and decorator that turns the error of an absent decoder into an InputError, which says what to
    install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = _DECODERS.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise InputError(f'decoding needs {package}: pip install "fusedvit[cli]"') from None


@decoders()
def load_one(source: Source, frames: Sampling = 8, limits: Limits | None = None, index: int = 0) -> Media:
    """`load` for one source; `index` is the index that results and errors carry."""
    try:
        return _load_one(source, frames, limits or Limits(), index)
    except MediaError as error:
        error.index = index
        raise


def _load_one(source: Source, frames: Sampling, limits: Limits, index: int) -> Media:
    if isinstance(source, MediaError):
        raise copy.copy(source)  # the same one may be given several times, and each gets its own index
    if isinstance(source, Media):
        return replace(source, index=index)
    if isinstance(source, np.ndarray):
        return _of_pixels(source, index)
    given = _opened(source, index)
    if not given.size:
        raise MediaError(f"{given.shown}: an empty file")
    _check_limit(given.shown, "bytes", given.size, limits.max_bytes)
    if given.video is None:
        return Media(given.name, "image", _decode_image(given, limits)[None], 1, index, path=given.shown)
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
        name: the name of its `Media`.
        shown: its name in messages, with the folder, as many files may have the same name.
        video: FFmpeg's name of the format; None for an image.
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
        content = source if isinstance(source, bytes) else bytes(source)
        shown = _printable(getattr(source, "name", "")) or f"bytes {index}"
        return _Given(os.path.basename(shown), shown, content, len(content), video_format(content[:16]))
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"fusedvit: sources must be paths or bytes, got {type(source).__name__}")
    if is_url(str(source)):
        raise MediaError(f"{_printable(str(source))}: a URL; download it and give the file")
    if not os.fspath(source):
        raise MediaError("a path expected, got ''")
    path = Path(source)
    name, shown, suffix = _printable(path.name or str(path)), _printable(str(path)), path.suffix.lower()
    with _reading(shown):
        found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise MediaError(f"{shown}: a folder; give images and videos")
    if not stat.S_ISREG(found.st_mode):
        raise MediaError(f"{shown}: not a regular file")
    if suffix and suffix not in suffixes():
        raise MediaError(f"{shown}: not an image or video format that is read: {_printable(suffix)}")
    if suffix:
        return _Given(name, shown, path, found.st_size, VIDEO_FORMATS.get(suffix))
    with _reading(shown), path.open("rb") as file:
        return _Given(name, shown, path, found.st_size, video_format(file.read(16)))


@contextmanager
def _reading(shown: str) -> Iterator[None]:
    """Names a file whose facts or bytes cannot be read, as the file's fault or the machine's."""
    try:
        yield
    except FileNotFoundError:
        raise MediaError(f"{shown}: no such file") from None
    except (OSError, ValueError, MemoryError) as error:  # a name too long or with a NUL, a forbidden folder
        raise_of_machine(error, shown)
        raise MediaError(f"{shown}: {getattr(error, 'strerror', None) or error}") from None


def _decode_image(given: _Given, limits: Limits) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with given.open() as file, Image.open(file, formats=image_formats()) as image:
            _check_limit(given.shown, "pixels", image.width * image.height, limits.max_pixels)
            ImageOps.exif_transpose(image, in_place=True)
            # as `load_image` passes it to a processor: without alpha, but one colour may still be transparent
            return rgb_of(image if image.mode == "RGB" else image.convert("RGB"))
    except Image.DecompressionBombError:
        # Pillow's own limit came first, before the size could be compared with ours
        limit = f"at most {limits.max_pixels} are read"
        raise MediaTooLarge(f"{given.shown}: more pixels than Pillow accepts, {limit}") from None
    except MediaError:
        raise
    except Exception as error:  # Pillow raises struct.error, TypeError and others where a file is damaged
        raise_of_machine(error, given.shown)
        raise MediaError(f"{given.shown}: does not decode as an image ({_said_of_image(error)})") from None


def _said_of_image(error: Exception) -> str:
    """Pillow's message, such as that a file is truncated; the error's class name where the message is not for users."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "no format that Pillow knows"
    if isinstance(error, OSError | SyntaxError):
        return getattr(error, "strerror", None) or first_line(error)
    return type(error).__name__


def raise_of_machine(error: Exception, name: str) -> None:
    """Raises a plain InputError, no MediaError, if `error` is the fault of the machine and not of the file `name`."""
    if is_of_handler(error):
        raise error
    if isinstance(error, MemoryError):
        raise InputError(f"{name}: cannot be read (out of memory)") from None
    if isinstance(error, ImportError):
        raise InputError(f"{name}: cannot be read (a package is missing: {error})") from None
    if isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_A_FILE:
        raise InputError(f"{name}: cannot be read ({error.strerror or os.strerror(error.errno)})") from None


def rgb_of(picture: Any) -> np.ndarray:
    """`[H, W, 3]` of a Pillow image, converted as Hugging Face's processors do. Images with alpha or a transparent
    colour go through the installed transformers' function, as versions differ."""
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        return np.array(_transformers_rgb()(picture))
    return np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))


@functools.cache
def _transformers_rgb() -> Callable[[Any], Any]:
    from transformers.image_transforms import convert_to_rgb

    if "return_numpy" in inspect.signature(convert_to_rgb).parameters:  # it warns without this argument
        return functools.partial(convert_to_rgb, return_numpy=True)
    return convert_to_rgb


def _decode_video(given: _Given, sampling: Sampling, limits: Limits, index: int) -> Media:
    facts, start = _facts_of(given, limits)
    wanted = _wanted(given, sampling, facts, limits)
    decoded, count = _decoded(given, facts, wanted, start)
    if len(decoded) < len(set(wanted)):  # fewer frames decode than there are packets: choose again among them
        facts = facts._replace(frames=count)
        wanted = _wanted(given, sampling, facts, limits)
        decoded.clear()  # `limits` allow this memory once, not twice
        decoded, _ = _decoded(given, facts, wanted, None)
        if len(decoded) < len(set(wanted)):
            expected = f"{len(set(wanted))} frames of {facts.frames} that decode expected"
            raise MediaError(f"{given.shown}: damaged: {expected}, got {len(decoded)}")
    frames = np.ascontiguousarray(np.stack([decoded[i] for i in wanted]))
    return Media(given.name, "video", frames, facts.frames, index, facts.fps, tuple(wanted), given.shown)


def _wanted(given: _Given, sampling: Sampling, facts: VideoFacts, limits: Limits) -> list[int]:
    """The numbers of the frames to keep, which `limits` allow."""
    if not facts.frames:
        raise MediaError(f"{given.shown}: at least 1 frame expected, got 0")
    if callable(sampling):
        wanted = _chosen(given, sampling(facts))
    else:
        wanted = np.linspace(0, facts.frames - 1, min(sampling, facts.frames)).round().astype(int).tolist()
    if not wanted or min(wanted) < 0 or max(wanted) >= facts.frames:
        raise MediaError(f"{given.shown}: frames 0 to {facts.frames - 1} can be sampled, asked for {wanted[:8]}")
    _check_limit(given.shown, "pixels", facts.width * facts.height * len(wanted), limits.max_pixels)
    return wanted


def _chosen(given: _Given, numbers: Any) -> list[int]:
    """The frame numbers that a function `frames=` returned, as a list. Raises TypeError if they are none."""
    try:
        return [operator.index(i) for i in numbers]
    except TypeError as error:
        expected = f"{given.shown}: frames must return a list of ints"
        raise TypeError(f"{PREFIX}{expected}, got {numbers!r:.80} ({first_line(error)})") from None


def _decoded(
    given: _Given, facts: VideoFacts, wanted: list[int], start: int | None
) -> tuple[dict[int, np.ndarray], int]:
    """The `wanted` frames by their numbers among those that decode, turned upright as transformers' torchcodec does;
    and how many frames were decoded.

    There are fewer frames where fewer decode. There are none where the first that decodes is shown after `start`: the
    video then begins within a group of pictures, and its first packets refer to a missing key frame.
    """
    decoded: dict[int, np.ndarray] = {}
    chosen, turns, count = set(wanted), 0, 0
    with _video_stream(given) as (container, stream):
        for i, frame in enumerate(container.decode(stream)):
            count = i + 1
            if i == 0 and start is not None and frame.pts is not None and frame.pts > start:
                chosen.clear()  # the remaining frames are only counted
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

    Frames are counted as packets: the header's count may be absent or wrong, and packets need no decoding. Packets that
    an edit list leaves out (in a video trimmed without re-encoding) are decoded but not shown. Only an AVI's index
    is compared: other containers' indices grow while packets are read, or leave frames out. PyAV shows it from 17 on.
    """
    count, packets, times = 0, 0, []
    with _video_stream(given) as (container, stream):
        index = getattr(stream, "index_entries", ()) if given.video == "avi" else ()
        indexed = sum(entry.size > 0 for entry in index)
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise MediaError(f"{given.shown}: cut off: frame {count} is not whole")
            packets += packet.size > 0
            _check_limit(given.shown, "frames", packets, limits.max_frames)
            if packet.size > 0 and not packet.is_discard:
                count += 1
                times += [] if packet.pts is None else [packet.pts]
        if packets < indexed:  # FFmpeg skips packets that it does not find
            raise MediaError(f"{given.shown}: damaged: {indexed} frames by its index, got {packets}")
        fps = None if not stream.average_rate else float(stream.average_rate)
        facts = VideoFacts(count, fps, stream.width, stream.height)
    _check_whole(given)
    return facts, min(times, default=None)


def _check_whole(given: _Given) -> None:
    assert given.video is not None
    with _reading(given.shown), given.open() as file:
        missing = missing_bytes(file, given.video)
    if missing:
        raise MediaError(f"{given.shown}: cut off: {given.size + missing} bytes expected, got {given.size}")


@contextmanager
def _video_stream(given: _Given) -> Iterator[tuple[Any, Any]]:
    import av

    try:
        # Metadata may be in any encoding; PyAV 19 takes that without being told.
        options: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
        with given.open() as file, av.open(file, format=given.video, **options) as container:
            stream = container.streams.best("video")  # as torchcodec does: the first may be a cover picture
            if stream is None:
                raise MediaError(f"{given.shown}: one video stream expected, got none")
            stream.thread_type = "AUTO"
            yield container, stream
    except MediaError:
        raise
    except Exception as error:  # FFmpeg's errors, and PyAV's AttributeError and UnicodeDecodeError for broken files
        if not isinstance(error, av.FFmpegError):  # FFmpeg uses the system's error numbers for a file's faults
            raise_of_machine(error, given.shown)
        raise MediaError(f"{given.shown}: does not decode as {given.video} ({type(error).__name__})") from None


def _check_limit(name: str, what: str, got: int, limit: int) -> None:
    if got > limit:
        raise MediaTooLarge(f"{name}: at most {limit} {what} are read, got {got}")


def _printable(name: str) -> str:
    """A name for a message: on one line, and only its two ends where it is very long."""
    text = "".join(c if c.isprintable() else "?" for c in name)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME // 2]}…{text[-LONGEST_NAME // 2 :]}"
