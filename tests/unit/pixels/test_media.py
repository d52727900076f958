"""Decoding within limits: colours and rotation as transformers' `load_image`, errors that name the file."""

import errno
import io
import os
import re
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusedvit import pixels
from fusedvit.cli.media import ASSETS, SAMPLE_IMAGE, SAMPLE_VIDEO
from fusedvit.errors import InputError
from fusedvit.pixels import Limits, MediaError, MediaTooLarge, load, media
from fusedvit.pixels.media import VideoFacts, load_one

Image = pytest.importorskip("PIL.Image")


def _noise(frames: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def test_shipped_media_are_small_and_decode() -> None:
    assert sum(p.stat().st_size for p in ASSETS.iterdir()) < 400_000
    picture = load_one(SAMPLE_IMAGE)
    assert (picture.kind, picture.frames.shape) == ("image", (1, 600, 512, 3))
    pytest.importorskip("av")
    video = load_one(SAMPLE_VIDEO, frames=6)
    assert (video.kind, video.frames.shape, video.source_frames) == ("video", (6, 180, 320, 3), 50)
    assert all((a != b).any() for a, b in zip(video.frames, video.frames[1:], strict=False))


@pytest.mark.parametrize("numbers", [5, None, ["a"], [1.5]])
def test_frames_that_a_function_returns_are_ints(numbers: Any) -> None:
    pytest.importorskip("av")
    got = re.escape(repr(numbers))
    with pytest.raises(TypeError, match=f"^fusedvit: .*: frames must return a list of ints, got {got}"):
        load(SAMPLE_VIDEO, frames=lambda facts: numbers)


@pytest.mark.parametrize("limits", [Limits(max_bytes=1000), Limits(max_pixels=1000)])
@pytest.mark.parametrize("path", [SAMPLE_IMAGE, SAMPLE_VIDEO])
def test_limits(path: Path, limits: Limits) -> None:
    if path is SAMPLE_VIDEO:
        pytest.importorskip("av")
    with pytest.raises(MediaTooLarge, match=r"at most 1000 (bytes|pixels) are read, got \d+"):
        load_one(path, limits=limits)


def test_frame_limits() -> None:
    pytest.importorskip("av")
    with pytest.raises(MediaTooLarge, match="at most 49 frames are read, got 50"):
        load_one(SAMPLE_VIDEO, limits=Limits(max_frames=49))
    # the frames that are kept count together
    one_frame = Limits(max_pixels=320 * 180)
    assert load_one(SAMPLE_VIDEO, frames=1, limits=one_frame).frames.shape[0] == 1
    with pytest.raises(MediaTooLarge, match="at most 57600 pixels"):
        load_one(SAMPLE_VIDEO, frames=2, limits=one_frame)


def _png_claiming(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 8) + b"IDAT"  # the pixels never come


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [12_000, 60_000])  # past our limit; past Pillow's own as well
def test_pixel_bomb_is_refused_by_its_header(tmp_path: Path, side: int) -> None:
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(_png_claiming(side, side))
    with pytest.raises(MediaTooLarge, match="pixels"):
        load_one(bomb)


def _jpeg_with(tag: bytes) -> bytes:
    """A turned photo in whose EXIF data `tag`, a name and a type, stands before a text."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112], exif[0x010E] = 6, "x" * 20  # orientation, description
    Image.new("RGB", (64, 48)).save(file, "JPEG", exif=exif)
    return file.getvalue().replace(b"\x01\x0e\x00\x02", tag)


BAD_FILES = {
    "cut.jpg": (lambda: SAMPLE_IMAGE.read_bytes()[:2000], "does not decode as an image .* truncated"),
    "text.png": (lambda: b"hello", r"does not decode as an image \(no format that Pillow knows\)"),
    "photo.mp4": (SAMPLE_IMAGE.read_bytes, "does not decode as mp4"),  # the suffix names a video's decoder
    "text.mp4": (lambda: b"hello" * 100, "does not decode as mp4"),
    "list.mp4": (lambda: b"#EXTM3U\n#EXTINF:1,\nhttp://localhost/x.ts\n", "does not decode as mp4"),
    "cut.mp4": (lambda: SAMPLE_VIDEO.read_bytes()[:300], "one video stream expected, got none"),
    "half.mp4": (lambda: SAMPLE_VIDEO.read_bytes()[:33_664], "cut off: frame 22 is not whole"),
    "track.mp4": (lambda: SAMPLE_VIDEO.read_bytes().replace(b"stsd", b"zzzz"), "does not decode as mp4"),
    "exif.jpg": (lambda: _jpeg_with(b"\x01\x00\x00\x02"), "does not decode as an image"),  # text where a width stands
    "empty.mp4": (lambda: b"", "an empty file"),
    "empty.png": (lambda: b"", "an empty file"),
    "notes.txt": (lambda: b"hello", "not an image or video format that is read: .txt"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    if name.endswith("mp4"):
        pytest.importorskip("av")
    content, message = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(content())
    with pytest.raises(MediaError, match=message) as caught:
        load_one(path)
    text = str(caught.value)
    assert text.startswith(f"fusedvit: {path}: ") and "\n" not in text and "0x" not in text and len(text) < 300


def test_missing_file_and_odd_names(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="no such file"):
        load_one(tmp_path / "none.png")
    urls = dict.fromkeys(("http://host/a.png", "https://host/a.mp4", "file:///a.png", "s3://bucket/a.png"), "a URL")
    for given, said in ((tmp_path, "a folder"), ("a" * 300 + ".png", "too long"), *urls.items()):
        with pytest.raises(MediaError, match=said):
            load_one(given)
    with pytest.raises(MediaError) as caught:
        load_one(tmp_path / "a\x1b[31m\n.png")
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(MediaError, match="at least 1 frame must be sampled, got 0"):
        load_one(SAMPLE_VIDEO, frames=0)


OF_THE_MACHINE = [
    *(OSError(number, os.strerror(number)) for number in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM)),
    *(OSError(number, os.strerror(number)) for number in (errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)),
    *(OSError(number, os.strerror(number)) for number in (errno.EACCES, errno.EPERM)),
    MemoryError(),
]


def fail(patch: pytest.MonkeyPatch, where: object, step: str, error: Exception) -> None:
    """Has a step raise `error`."""
    patch.setattr(where, step, lambda *args, **kwargs: (_ for _ in ()).throw(error))


@pytest.mark.parametrize("error", OF_THE_MACHINE, ids=str)
@pytest.mark.parametrize("step", ["stat", "open", "read", "decode"])
@pytest.mark.parametrize("source", [SAMPLE_IMAGE, SAMPLE_VIDEO], ids=["image", "video"])
def test_errors_of_the_machine_are_not_the_files(
    monkeypatch: pytest.MonkeyPatch, error: Exception, step: str, source: Path
) -> None:
    pytest.importorskip("av")
    where, name = {
        "stat": (Path, "stat"),
        "open": (Path, "open"),
        "read": (io.BytesIO, "read"),
        "decode": (media, "rgb_of" if source == SAMPLE_IMAGE else "missing_bytes"),
    }[step]
    if step == "read":
        reading = type("Reading", (io.BytesIO,), {"read": lambda *args: (_ for _ in ()).throw(error)})
        monkeypatch.setattr(Path, "open", lambda *args: reading(b"x"))
    else:
        fail(monkeypatch, where, name, error)
    for errors in ("raise", "skip"):
        said = re.escape(f"fusedvit: {source}: cannot be read ({getattr(error, 'strerror', None) or 'out of memory'})")
        with pytest.raises(InputError, match=f"^{said}$") as caught:
            load([source], errors=errors)
        assert not isinstance(caught.value, MediaError) and "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG, None])
@pytest.mark.parametrize("step", ["stat", "open"])
def test_errors_of_a_file_are_its_own(monkeypatch: pytest.MonkeyPatch, number: int | None, step: str) -> None:
    error = OSError("odd") if number is None else OSError(number, os.strerror(number))
    fail(monkeypatch, Path, step, error)
    with pytest.raises(MediaError):
        load_one(SAMPLE_IMAGE)


def test_no_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    for errors in ("raise", "skip"):
        with pytest.raises(InputError, match="^fusedvit: the system has no room for another thread") as raised:
            load([np.zeros((32, 32, 3), np.uint8)] * 2, errors=errors)
        assert not isinstance(raised.value, MediaError)


@pytest.mark.parametrize(
    "name, kind", [("photo.jpg", "PNG"), ("photo.png", "JPEG"), ("a.tif", "TIFF"), ("b.TIFF", "TIFF")]
)
def test_a_pictures_format_is_found_in_the_file(tmp_path: Path, name: str, kind: str) -> None:
    Image.fromarray(_noise(1, 40, 60)[0]).save(tmp_path / name, format=kind)
    assert load_one(tmp_path / name).frames.shape == (1, 40, 60, 3)


@pytest.mark.parametrize(
    "name, kind",
    [("a.jfif", "JPEG"), ("a.jpe", "JPEG"), ("a.avif", "AVIF"), ("a.jp2", "JPEG2000"), ("a.ppm", "PPM"), ("a", "PNG")]
    + [
        ("a.mpo", "MPO"),
        ("a.tga", "TGA"),
        ("a.ICO", "ICO"),
        ("a.pcx", "PCX"),
        ("a.dds", "DDS"),
        ("a.sgi", "SGI"),
        ("a.qoi", "QOI"),
    ],
)
def test_whatever_pillow_decodes(tmp_path: Path, name: str, kind: str) -> None:
    """With its suffix, or without any; as bytes too."""
    Image.init()
    if kind not in {*Image.OPEN, "MPO"} or kind not in Image.SAVE:
        pytest.skip(f"no {kind} in this Pillow")
    picture = Image.fromarray(_noise(1, 48, 48)[0])
    picture.save(tmp_path / name, format=kind)
    wanted = np.asarray(Image.open(tmp_path / name).convert("RGB"))
    for source in (tmp_path / name, (tmp_path / name).read_bytes()):
        assert np.array_equal(load_one(source).frames[0], wanted)


@pytest.mark.parametrize("name", ["a.eps", "a.wmf", "a.h5", "a.heic", "a.tar"])
def test_what_pillow_does_not_decode(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(MediaError, match=f"not an image or video format that is read: {Path(name).suffix}"):
        load_one(tmp_path / name)
    (tmp_path / name).rename(tmp_path / "a.png")
    with pytest.raises(MediaError, match="does not decode"):
        load_one(tmp_path / "a.png")


CONTAINERS = {".mpg": "mpeg", ".m2ts": "mpegts", ".asf": "asf", ".flv": "flv", ".3gp": "mp4", ".qt": "mov", "": "mp4"}


@pytest.mark.parametrize("suffix", CONTAINERS)
def test_containers_of_videos(tmp_path: Path, suffix: str) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / f"a{suffix}"
    codec = {"mpeg": "mpeg2video", "mpegts": "mpeg2video", "flv": "flv1"}.get(CONTAINERS[suffix], "mpeg4")
    try:
        with av.open(path, "w", format=CONTAINERS[suffix]) as file:
            stream = file.add_stream(codec, rate=25)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for pixels in _noise(10, 48, 64):
                file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
            file.mux(stream.encode())
    except (ValueError, av.FFmpegError) as error:
        pytest.skip(f"this FFmpeg does not write it: {error}")
    assert load_one(path, frames=4).frames.shape == (4, 48, 64, 3)


# Of an MP4's track: to where its header moves a point (x, y) of 96 x 64, and what was above then.
UPRIGHT = {
    "as it is": ((1, 0, 0, 1, 0, 0), np.s_[:, :32]),
    "a quarter clockwise": ((0, 1, -1, 0, 64, 0), np.s_[:, :, 32:]),
    "half": ((-1, 0, 0, -1, 96, 64), np.s_[:, 32:]),
    "a quarter back": ((0, -1, 1, 0, 0, 96), np.s_[:, :, :32]),
}


@pytest.mark.parametrize("turn", UPRIGHT)
def test_videos_are_turned_as_their_header_says(tmp_path: Path, turn: str) -> None:
    av = pytest.importorskip("av")
    with av.open(tmp_path / "a.mp4", "w") as file:
        stream = file.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        picture = np.zeros((64, 96, 3), np.uint8)
        picture[:32] = 200
        for _ in range(6):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        file.mux(stream.encode())
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    (a, b, c, d, x, y), above = UPRIGHT[turn]
    at = content.find(b"tkhd") + 4 + 40
    content[at : at + 36] = struct.pack(">9i", *(n << 16 for n in (a, b, 0, c, d, 0, x, y)), 1 << 30)
    for frames in (3, lambda facts: [5, 0, 0]):
        found = load_one(bytes(content), frames=frames).frames
        assert found.shape == (3, *((96, 64) if "quarter" in turn else (64, 96)), 3)
        assert found.flags["C_CONTIGUOUS"] and found[above].mean() > 180 and found.mean() < 110


def _box(kind: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I", 8 + len(content)) + kind + content


def _with_cover(video: bytes, first: bool) -> bytes:
    """An MP4 whose header, at its end, gets a cover picture before or after its track."""
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (255, 0, 0)).save(file, "JPEG")
    covers = _box(b"ilst", _box(b"covr", _box(b"data", struct.pack(">II", 13, 0), file.getvalue())))
    handler = _box(b"hdlr", bytes(8), b"mdirappl", bytes(10))
    cover = _box(b"udta", _box(b"meta", bytes(4), handler, covers))
    at = video.index(b"moov") - 4
    header = video[at + 8 :]
    size = struct.unpack(">I", header[:4])[0] if first else len(header)
    return video[:at] + _box(b"moov", header[:size], cover, header[size:])


@pytest.mark.parametrize("first", [True, False])
def test_a_cover_picture_is_not_the_video(tmp_path: Path, first: bool) -> None:
    """FFmpeg lists it among the video streams, in the order of the header."""
    _greys(tmp_path / "a.mp4", codec="mpeg4")
    whole = (tmp_path / "a.mp4").read_bytes()
    found, wanted = load_one(_with_cover(whole, first), frames=4), load_one(whole, frames=4)
    assert found.source_frames == 60 and np.array_equal(found.frames, wanted.frames)


# ── videos of which fewer frames are shown, or decode, than there are packets ─────────────────────────────────────────


def _greys(path: Path, group: int = 30, reordered: int = 0, codec: str = "libx264", title: str = "") -> None:
    """A video whose frame i is of the grey 4 i, a key frame every `group`, `reordered` between references."""
    av = pytest.importorskip("av")
    options = {"g": str(group), "keyint_min": str(group)}
    if codec == "libx264":
        options |= {"sc_threshold": "0", "bf": str(reordered), "b_strategy": "0"}
    try:
        with av.open(path, "w") as file:
            file.metadata["title"] = title
            stream = file.add_stream(codec, rate=25, options=options)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for i in range(60):
                file.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), 4 * i, np.uint8))))
            file.mux(stream.encode())
    except (ValueError, av.FFmpegError) as error:
        pytest.skip(f"this FFmpeg does not write it: {error}")


def _copied(whole: Path, cut: Path, without: int = 0, shift: int = 0) -> None:
    """Its packets without the first ones, so many frames earlier; nothing is encoded anew."""
    av = pytest.importorskip("av")
    with av.open(whole) as given, av.open(cut, "w") as file:
        stream = file.add_stream_from_template(given.streams.video[0])
        packets = [packet for packet in given.demux(video=0) if packet.size]
        for packet in packets[without:]:
            ticks = int(shift / 25 / packet.time_base)
            packet.pts, packet.dts, packet.stream = packet.pts - ticks, packet.dts - ticks, stream
            file.mux(packet)


def _shown(found: media.Media) -> list[int]:
    return [round(float(frame.mean()) / 4) for frame in found.frames]


def test_a_video_trimmed_by_an_edit_list(tmp_path: Path) -> None:
    """As `ffmpeg -ss … -c copy` and phones do it: packets before the cut are decoded and not shown."""
    _greys(tmp_path / "whole.mp4", group=60)
    _copied(tmp_path / "whole.mp4", tmp_path / "cut.mp4", shift=20)
    found = load_one(tmp_path / "cut.mp4", frames=5)
    assert (_shown(found), found.kept, found.source_frames) == ([20, 30, 40, 49, 59], (0, 10, 20, 29, 39), 40)
    last = load_one(tmp_path / "cut.mp4", frames=lambda facts: [facts.frames - 1])
    assert _shown(last) == [59]
    with pytest.raises(MediaTooLarge, match="at most 59 frames are read, got 60"):  # all are decoded
        load_one(tmp_path / "cut.mp4", limits=Limits(max_frames=59))


@pytest.mark.parametrize("suffix", [".mkv", ".m2ts", ".mp4"])
@pytest.mark.parametrize(
    "frames, kept", [(1, (0,)), (4, (0, 10, 19, 29)), (lambda facts: [0, facts.frames // 2], (0, 15))]
)
def test_a_video_that_begins_within_a_group_of_pictures(
    tmp_path: Path, suffix: str, frames: Any, kept: tuple[int, ...]
) -> None:
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    _greys(whole)
    _copied(whole, cut, without=2)
    found = load_one(cut, frames=frames)
    assert (found.kept, found.source_frames) == (kept, 30)
    assert _shown(found) == [30 + i for i in kept]
    with pytest.raises(MediaTooLarge, match="pixels"):
        load_one(cut, frames=30, limits=Limits(max_pixels=29 * 48 * 64))


def test_packets_whose_frames_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As VP8 has them, for reference alone: where asked-for frames do not come, those that decode are counted."""
    av = pytest.importorskip("av")
    path = tmp_path / "a.webm"
    _greys(path, codec="libvpx")
    content = bytearray(path.read_bytes())
    with av.open(path) as file:
        packets = [bytes(packet) for packet in file.demux(video=0) if packet.size]
    for packet in packets[40:50]:
        content[content.index(packet)] &= ~0x10  # VP8's show_frame
    path.write_bytes(content)
    seen: list[int] = []

    def ends(facts: VideoFacts) -> list[int]:
        seen.append(facts.frames)
        return [0, facts.frames - 1]

    found = load_one(path, frames=ends)
    assert (seen, found.kept, found.source_frames, _shown(found)) == ([60, 50], (0, 49), 50, [0, 59])
    decoded = media._decoded
    for count, said in ((60, "damaged: 8 frames of 60 that decode expected, got 6"), (0, "at least 1 frame expected")):
        monkeypatch.setattr(media, "_decoded", lambda *given, count=count: (decoded(*given)[0], count))
        with pytest.raises(MediaError, match=f"a.webm: {said}"):
            load_one(path)


@pytest.mark.parametrize("major", [None, 18, 19])
def test_titles_in_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: int | None) -> None:
    """PyAV 19 takes them without the option that releases before need, and has no such option."""
    av = pytest.importorskip("av")
    _greys(tmp_path / "a.mp4", title="plain")
    content = (tmp_path / "a.mp4").read_bytes().replace(b"plain", b"caf\xe9s")
    assert b"caf\xe9s" in content
    real, given = av.open, []

    def opened(file: Any, **options: Any) -> Any:
        given.append(options)
        return real(file, **options) if major is None else real(io.BytesIO(content.replace(b"\xe9", b"e")))

    monkeypatch.setattr(av, "open", opened)
    if major is not None:
        monkeypatch.setattr(av, "__version__", f"{major}.1.0")
    assert load_one(content, frames=3).frames.shape[0] == 3
    told = major == 18 if major is not None else int(av.__version__.split(".")[0]) < 19
    assert given and all(("metadata_errors" in options) is told for options in given)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".m2ts", ".flv", ".avi"])
def test_whole_videos_are_decoded_once(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where frames are shown in another order than they are decoded."""
    _greys(tmp_path / f"a{suffix}", reordered=3)
    decoded, calls = media._decoded, []
    monkeypatch.setattr(media, "_decoded", lambda *given: calls.append(1) or decoded(*given))
    found = load_one(tmp_path / f"a{suffix}", frames=60)
    assert _shown(found) == list(range(60)) and found.source_frames == 60 and len(calls) == 1


def test_short_video_gives_what_it_has() -> None:
    pytest.importorskip("av")
    assert load_one(SAMPLE_VIDEO, frames=500).frames.shape[0] == 50


# ── many at once ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _encoded(image: "Image.Image", kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def _turned(orientation: int) -> "Image.Exif":
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _palette_with_alpha() -> "Image.Image":
    picture = _PICTURE.convert("P")
    picture.info["transparency"] = bytes(range(256))
    return picture


_PICTURE = Image.fromarray(_noise(1, 30, 41)[0])
_ALPHA = Image.fromarray(np.random.default_rng(1).integers(0, 256, (30, 41, 4), dtype=np.uint8))
KINDS = {
    "rgb": lambda: _encoded(_PICTURE, "PNG"),
    "jpeg": lambda: _encoded(_PICTURE, "JPEG"),
    "grey": lambda: _encoded(_PICTURE.convert("L"), "PNG"),
    "grey jpeg": lambda: _encoded(_PICTURE.convert("L"), "JPEG"),
    "grey with alpha": lambda: _encoded(_ALPHA.convert("LA"), "PNG"),
    "alpha": lambda: _encoded(_ALPHA, "PNG"),
    "palette": lambda: _encoded(_PICTURE.convert("P"), "PNG"),
    "palette, one colour transparent": lambda: _encoded(_PICTURE.convert("P"), "PNG", transparency=7),
    "palette, colours half transparent": lambda: _encoded(_palette_with_alpha(), "PNG"),
    "one colour transparent": lambda: _encoded(_PICTURE, "PNG", transparency=_PICTURE.getpixel((3, 4))),
    "grey, one colour transparent": lambda: _encoded(_PICTURE.convert("L"), "PNG", transparency=100),
    "one bit": lambda: _encoded(_PICTURE.convert("1"), "PNG"),
    "16 bits": lambda: _encoded(Image.fromarray(_noise(1, 30, 41)[0, :, :, 0].astype(np.uint16) * 257), "PNG"),
    "cmyk": lambda: _encoded(_PICTURE.convert("CMYK"), "JPEG"),
    "tiff": lambda: _encoded(_PICTURE.convert("CMYK"), "TIFF"),
    "webp": lambda: _encoded(_ALPHA, "WEBP", lossless=True),
    "animated": lambda: _encoded(_PICTURE, "GIF", save_all=True, append_images=[_PICTURE.rotate(90)]),
    "1 x 1": lambda: _encoded(_PICTURE.resize((1, 1)), "PNG"),
    **{f"turned {i}": lambda i=i: _encoded(_PICTURE, "JPEG", exif=_turned(i)) for i in range(1, 9)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """What a processor of Hugging Face's makes of the picture that `load_image` gives it."""
    transformers = pytest.importorskip("transformers")
    data = KINDS[kind]()
    picture = transformers.image_utils.load_image(Image.open(io.BytesIO(data)))
    seen = transformers.Qwen2VLImageProcessorPil().process_image(picture, do_convert_rgb=True)
    wanted = seen.transpose(1, 2, 0)
    path = tmp_path / "picture.png"  # the format is found in the file
    path.write_bytes(data)
    for each in load([data, str(path), path]):
        assert each.frames.flags.writeable and np.array_equal(each.frames[0], wanted)


@pytest.mark.parametrize("path, package, name", [(SAMPLE_IMAGE, "PIL", "Pillow"), (SAMPLE_VIDEO, "av", "PyAV")])
def test_a_decoder_that_is_missing(path: Path, package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error of the file: nothing is skipped."""
    monkeypatch.setitem(sys.modules, package, None)
    said = rf'^fusedvit: decoding needs {name}: pip install "fusedvit\[cli\]"$'
    for errors in ("raise", "skip"):
        with pytest.raises(InputError, match=said):
            load(path, errors=errors)


def test_order_names_and_indices(tmp_path: Path) -> None:
    data = [_encoded(Image.fromarray(_noise(1, 8, 9 + i)[0]), "PNG") for i in range(20)]
    (tmp_path / "a.png").write_bytes(data[5])
    found = load([*data[:5], tmp_path / "a.png", *data[6:]], threads=4)
    assert [media.frames.shape[2] for media in found] == [9 + i for i in range(20)]
    assert [media.index for media in found] == list(range(20))
    assert found[5].name == "a.png" and found[6].name == "bytes 6"


def test_sources_are_iterated_once() -> None:
    """A `DataLoader` starts its processes at each `iter`."""
    begun = []

    class Loader:
        def __iter__(self) -> Iterator[bytes]:
            begun.append(self)
            return iter([_encoded(_PICTURE, "PNG")] * 2)

    assert len(load(Loader())) == 2 and len(begun) == 1


def test_a_broken_file_is_named_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good = _encoded(_PICTURE, "PNG")
    given = [good, b"nothing", good, good[:100]]
    with pytest.raises(MediaError, match="bytes 1: does not decode as an image") as caught:
        load(given)
    assert caught.value.index == 1
    with caplog.at_level("WARNING", "fusedvit"):
        assert [media.index for media in load(given, errors="skip")] == [0, 2]
    assert [line[: len("fusedvit: skipped: bytes 1")] for line in caplog.messages] == [
        "fusedvit: skipped: bytes 1",
        "fusedvit: skipped: bytes 3",
    ]
    assert [media.name for media in load(good)] == ["bytes 0"]
    with pytest.raises(MediaError, match="some/none.png: no such file"):
        load("some/none.png")
    with pytest.raises(MediaError, match="a path expected, got ''"):
        load("")
    with pytest.raises(MediaError, match="/dev/null: not a regular file"):
        load("/dev/null")


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"sources": None}, TypeError, "sources must be paths, bytes or pixels, or several of them, got NoneType"),
        ({"sources": [3]}, TypeError, "sources must be paths or bytes, got int"),
        ({"frames": 2.5}, TypeError, "frames must be an int or callable, got float"),
        ({"frames": 0}, ValueError, "frames must be at least 1, got 0"),
        ({"limits": 5}, TypeError, "limits must be Limits or None, got int"),
        ({"errors": "ignore"}, ValueError, r"errors must be one of \('raise', 'skip'\), got 'ignore'"),
        ({"errors": print}, TypeError, "errors must be one of"),
        ({"threads": 0}, ValueError, "threads must be at least 1, got 0"),
        ({"threads": "2"}, TypeError, "threads must be an int, got str"),
        ({"threads": True}, TypeError, "threads must be an int, got bool"),
        ({"sources": "none.png"}, MediaError, "none.png: no such file"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^fusedvit: {said}"):
        load(**{"sources": [SAMPLE_IMAGE]} | arguments)


def test_wrong_limits() -> None:
    with pytest.raises(TypeError, match="^fusedvit: max_bytes must be an int, got str"):
        Limits(max_bytes="many")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^fusedvit: max_frames must be at least 1, got 0"):
        Limits(max_frames=0)


def test_an_array_of_names_is_several_sources() -> None:
    assert [media.kind for media in load(np.array([str(SAMPLE_IMAGE)] * 2))] == ["image", "image"]


def test_errors_are_public() -> None:
    assert pixels.InputError is InputError and issubclass(MediaError, InputError)


def test_a_video_from_bytes_and_frames_that_are_chosen() -> None:
    pytest.importorskip("av")
    seen: list[VideoFacts] = []

    def choose(facts: VideoFacts) -> list[int]:
        seen.append(facts)
        return [0, 3, 3, 49]

    (media,) = load([SAMPLE_VIDEO.read_bytes()], frames=choose)
    assert seen == [(50, seen[0].fps, 320, 180)] and seen[0].fps and media.fps == seen[0].fps
    assert media.kept == (0, 3, 3, 49) and media.frames.shape == (4, 180, 320, 3)
    assert np.array_equal(media.frames[1], media.frames[2])
    every = load_one(SAMPLE_VIDEO, frames=50).frames
    assert all(np.array_equal(frame, every[i]) for frame, i in zip(media.frames, media.kept, strict=True))
    with pytest.raises(MediaError, match="frames 0 to 49 can be sampled"):
        load([SAMPLE_VIDEO], frames=lambda facts: [50])


def test_pixels_and_what_was_loaded_are_taken_as_they_are() -> None:
    pixels = _noise(5, 40, 50)
    video, image = load([pixels, pixels[0]])
    assert (video.kind, video.kept, video.frames is pixels) == ("video", (0, 1, 2, 3, 4), True)
    assert (image.kind, image.index, image.frames.shape) == ("image", 1, (1, 40, 50, 3))
    assert load([image, video])[1].index == 1
    with pytest.raises(MediaError, match=r"uint8 pixels \[H, W, 3\] or \[F, H, W, 3\] expected, got float64 \[2\]"):
        load(np.zeros(2))
    with pytest.raises(MediaError, match="absent.png: no such file") as raised:
        load([image, MediaError("absent.png: no such file")])
    assert raised.value.index == 1
