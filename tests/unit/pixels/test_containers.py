"""Videos that were cut off: what each container tells, and no alarm for whole ones."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusedvit.pixels import media
from fusedvit.pixels.containers import missing_bytes
from fusedvit.pixels.media import MediaError, load_one

av = pytest.importorskip("av")

FRAMES = 12
# suffix, FFmpeg's format and options of its muxer, codec
KINDS: dict[str, tuple[str, dict[str, str], str]] = {
    "mp4": ("mp4", {}, "mpeg4"),
    "mp4, index first": ("mp4", {"movflags": "faststart"}, "mpeg4"),
    "mp4, fragments": ("mp4", {"movflags": "frag_keyframe+empty_moov"}, "mpeg4"),
    "mp4, fragments of a stream": ("mp4", {"movflags": "frag_keyframe+empty_moov+default_base_moof+dash"}, "mpeg4"),
    "mov": ("mov", {}, "mjpeg"),
    "mkv": ("matroska", {}, "mpeg4"),
    "webm": ("webm", {}, "libvpx"),
    "avi": ("avi", {}, "mjpeg"),
}
LIVE = ("matroska", {"live": "1"}, "mpeg4")
CUTS = (0.3, 0.5, 0.7, 0.88, 0.95, 0.99)


def encoded(muxer: str, options: dict[str, str], codec: str, dropped: tuple[int, ...] = ()) -> bytes:
    """A video of noise; without the frames `dropped`, whose times stay empty."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video"  # which the muxer may read again
        write(path, muxer, options, codec, dropped, rng)
        return path.read_bytes()


def write(
    path: Path, muxer: str, options: dict[str, str], codec: str, dropped: tuple[int, ...], rng: np.random.Generator
) -> None:
    with av.open(str(path), "w", format=muxer, options=options) as container:
        stream: Any = container.add_stream(codec, rate=8)
        stream.width, stream.height, stream.gop_size = 64, 48, 4
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for i in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, 8)
            if i not in dropped:
                container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def test_whole_files_are_read() -> None:
    for kind, how in (KINDS | {"live": LIVE}).items():
        whole = encoded(*how)
        for data in (whole, whole + bytes(5), whole + bytes(100), whole + b"appended by somebody"):
            media = load_one(data, frames=FRAMES)
            assert len(media.frames) == FRAMES, kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", CUTS)
def test_what_is_cut_off_is_an_error(kind: str, part: float) -> None:
    data = encoded(*KINDS[kind])
    with pytest.raises(MediaError, match="bytes 0: (cut off|does not decode|one video stream expected, got none)"):
        load_one(data[: int(len(data) * part)], frames=FRAMES)


def test_dropped_frames_are_not_missing() -> None:
    """An AVI holds nothing in their place."""
    media = load_one(encoded("avi", {}, "mjpeg", dropped=(3, 4, 8)), frames=FRAMES)
    assert len(media.frames) == FRAMES - 3


def test_an_avi_without_an_index() -> None:
    assert load_one(encoded("avi", {}, "mjpeg").replace(b"idx1", b"JUNK"), frames=1).source_frames == FRAMES


def _avi_with_a_hole() -> bytes:
    data = bytearray(encoded("avi", {}, "mjpeg"))
    middle = len(data) // 2
    data[middle : middle + len(data) // 4] = bytes(len(data) // 4)
    return bytes(data)


def test_a_hole_in_an_avi() -> None:
    if not hasattr(av.stream.Stream, "index_entries"):
        pytest.skip("PyAV shows no index before 17")
    with pytest.raises(MediaError, match=f"{FRAMES} frames by its index, got 8"):
        load_one(_avi_with_a_hole(), frames=FRAMES)


def test_an_avi_whose_index_pyav_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = media._video_stream

    @contextmanager
    def without_an_index(given: Any) -> Iterator[tuple[Any, Any]]:
        with opened(given) as (container, stream):
            known = {name: getattr(stream, name) for name in ("average_rate", "width", "height")}
            reads = {name: lambda _, read=name: getattr(container, read)(stream) for name in ("demux", "decode")}
            yield SimpleNamespace(**reads), SimpleNamespace(**known)

    monkeypatch.setattr(media, "_video_stream", without_an_index)
    assert load_one(encoded("avi", {}, "mjpeg"), frames=FRAMES).source_frames == FRAMES
    assert load_one(_avi_with_a_hole(), frames=FRAMES).source_frames < FRAMES


def ebml(length: bytes, content: int) -> bytes:
    return b"\x1aE\xdf\xa3\x80" + b"\x18S\x80g" + length + bytes(content)


@pytest.mark.parametrize(
    "data, container, missing",
    [
        (b"", "mp4", 0),
        (b"\0\0\0\x10mdat", "mp4", 8),
        (b"\0\0\0\0mdat", "mp4", 0),  # to the end
        (b"\0\0\0\1mdat" + (40).to_bytes(8, "big"), "mov", 24),
        (b"\0\0\0\x10mdat" + bytes(8) + b"\0\0\0\x40free", "mp4", 0),  # padding, which nobody misses
        (b"\0\0\0\x08free\0\0\0\x10junk", "mp4", 0),  # nobody's box
        (b"\0\0\0\x08free" * 100_001 + b"\0\0\0\x10mdat", "mp4", 0),  # more boxes than are looked at
        (b"", "matroska", 0),
        (ebml(b"\x84", 3), "matroska", 1),
        (ebml(b"\x84", 4), "matroska", 0),
        (ebml(b"\x40\x90", 100), "matroska", 44),
        (ebml(b"\xff", 3), "matroska", 0),  # left open
        (ebml(b"\x01" + b"\xff" * 7, 3), "matroska", 0),
        (b"\x1aE\xdf\xa3", "matroska", 0),
        (b"something else", "matroska", 0),
        (b"", "avi", 0),
        (b"RIFF\x40\0\0\0AVI " + bytes(40), "avi", 20),
        (b"RIFF\x40\0\0\0AVI " + bytes(54), "avi", 0),  # whose writer counted the list's header
        (b"RIFF\xff\xff\xff\xffAVI ", "avi", 0),
        (b"RIFF\x04\0\0\0AVI " + b"RIFF\x40\0\0\0AVIX", "avi", 60),
    ],
)
def test_lengths_that_containers_state(data: bytes, container: str, missing: int) -> None:
    assert missing_bytes(io.BytesIO(data), container) == missing
