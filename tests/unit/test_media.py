"""Decoding within limits, and patch rows that a tower of Hugging Face would get from its own processors."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange

from fusedvit.cli.media import (
    ASSETS,
    SAMPLE_IMAGE,
    SAMPLE_VIDEO,
    Limits,
    Media,
    MediaError,
    MediaTooLarge,
    PatchLayout,
    load,
    prepare,
    rows_from_frames,
)

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
LAYOUT = PatchLayout()


def _noise(frames: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def _video(frames: np.ndarray) -> Media:
    return Media("noise", "video", frames, len(frames))


def _by_hand(frames: np.ndarray, layout: PatchLayout) -> torch.Tensor:
    """Merge-block order written out, for frames that need no resizing."""
    pixels = (torch.from_numpy(frames).float() / 255 - torch.tensor(layout.mean)) / torch.tensor(layout.std)
    return rearrange(
        pixels,
        "(t tp) (h mh ph) (w mw pw) c -> (t h w mh mw) (c tp ph pw)",
        tp=layout.temporal_patch_size,
        mh=layout.merge_size,
        mw=layout.merge_size,
        ph=layout.patch_size,
        pw=layout.patch_size,
    )


def test_shipped_media_are_small_and_decode() -> None:
    assert sum(p.stat().st_size for p in ASSETS.iterdir()) < 400_000
    picture = load(SAMPLE_IMAGE)
    assert (picture.kind, picture.frames.shape) == ("image", (1, 600, 512, 3))
    pytest.importorskip("av")
    video = load(SAMPLE_VIDEO, frames=6)
    assert (video.kind, video.frames.shape, video.source_frames) == ("video", (6, 180, 320, 3), 50)
    assert all((a != b).any() for a, b in zip(video.frames, video.frames[1:], strict=False))


def test_image_rows_and_grid() -> None:
    item = prepare(load(SAMPLE_IMAGE), LAYOUT)
    assert item.grid_thw.tolist() == [[1, 38, 32]]
    assert item.pixel_values.shape == (38 * 32, 3 * 2 * 16 * 16)
    assert item.pixel_values.dtype == torch.float32 and item.grid_thw.dtype == torch.int64
    assert -1 <= item.pixel_values.min() < item.pixel_values.max() <= 1


def test_still_video_is_the_image() -> None:
    """Two identical frames resized, normalised and laid out as a video: bit for bit the picture."""
    frame = _noise(1, 100, 150)
    image = prepare(Media("noise", "image", frame, 1), LAYOUT)
    for frames in (np.repeat(frame, 2, axis=0), frame):  # one frame alone is padded with itself
        video = rows_from_frames(np.repeat(frame, 2, axis=0), LAYOUT) if len(frames) == 2 else None
        video = video or prepare(_video(frames), LAYOUT)
        assert video.grid_thw.tolist() == image.grid_thw.tolist() == [[1, 6, 10]]
        assert torch.equal(video.pixel_values, image.pixel_values)


@pytest.mark.parametrize("frames", [2, 6])
@pytest.mark.parametrize("layout", [LAYOUT, PatchLayout(patch_size=14, mean=(0.48, 0.45, 0.4), std=(0.27, 0.26, 0.28))])
def test_video_order_is_merge_block(frames: int, layout: PatchLayout) -> None:
    side = layout.patch_size * layout.merge_size
    clip = _noise(frames, 3 * side, 4 * side)
    item = rows_from_frames(clip, layout)
    assert item.grid_thw.tolist() == [[frames // 2, 6, 8]]
    torch.testing.assert_close(item.pixel_values, _by_hand(clip, layout), rtol=1e-5, atol=1e-6)


def test_image_order_is_merge_block() -> None:
    clip = _noise(1, 64, 96)
    item = prepare(Media("noise", "image", clip, 1), LAYOUT)
    torch.testing.assert_close(item.pixel_values, _by_hand(np.repeat(clip, 2, 0), LAYOUT), rtol=1e-5, atol=1e-6)


def test_odd_frame_count_repeats_the_last() -> None:
    clip = _noise(3, 64, 64)
    item = prepare(_video(clip), LAYOUT)
    assert item.grid_thw.tolist() == [[2, 4, 4]]
    last = rearrange(item.pixel_values, "(t n) (c tp p) -> t tp n c p", t=2, tp=2, c=3)[1]
    assert torch.equal(last[0], last[1])


@pytest.mark.gpu
def test_agrees_with_the_video_processor() -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("av")
    media = load(SAMPLE_VIDEO, frames=6)
    ours, theirs = rows_from_frames(media.frames, LAYOUT), prepare(media, LAYOUT)
    assert ours.grid_thw.tolist() == theirs.grid_thw.tolist()
    # uint8 resizing may round to a neighbouring level: one level is 1 / 127.5
    assert (ours.pixel_values - theirs.pixel_values).abs().max() <= 2.01 / 127.5


def test_pixels_stay_within_the_layout() -> None:
    item = prepare(load(SAMPLE_IMAGE), PatchLayout(max_pixels=128 * 128))
    t, h, w = item.grid_thw[0].tolist()
    assert t == 1 and h % 2 == w % 2 == 0 and h * w <= 64


@pytest.mark.parametrize("limits", [Limits(max_bytes=1000), Limits(max_pixels=1000)])
@pytest.mark.parametrize("path", [SAMPLE_IMAGE, SAMPLE_VIDEO])
def test_limits(path: Path, limits: Limits) -> None:
    if path is SAMPLE_VIDEO:
        pytest.importorskip("av")
    with pytest.raises(MediaTooLarge, match=r"at most 1000 (bytes|pixels) are read, got \d+"):
        load(path, limits=limits)


def test_frame_limits() -> None:
    pytest.importorskip("av")
    with pytest.raises(MediaTooLarge, match="at most 49 frames are read, got 50"):
        load(SAMPLE_VIDEO, limits=Limits(max_frames=49))
    # the frames that are kept count together
    one_frame = Limits(max_pixels=320 * 180)
    assert load(SAMPLE_VIDEO, frames=1, limits=one_frame).frames.shape[0] == 1
    with pytest.raises(MediaTooLarge, match="at most 57600 pixels"):
        load(SAMPLE_VIDEO, frames=2, limits=one_frame)


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
        load(bomb)


BAD_FILES = {
    "cut.jpg": (lambda: SAMPLE_IMAGE.read_bytes()[:2000], "does not decode as a picture"),
    "text.png": (lambda: b"hello", "does not decode as a picture"),
    "photo.mp4": (SAMPLE_IMAGE.read_bytes, "does not decode as mp4"),  # the suffix names a video's decoder
    "text.mp4": (lambda: b"hello" * 100, "does not decode as mp4"),
    "list.mp4": (lambda: b"#EXTM3U\n#EXTINF:1,\nhttp://localhost/x.ts\n", "does not decode as mp4"),
    "cut.mp4": (lambda: SAMPLE_VIDEO.read_bytes()[:300], "one video stream expected, got none"),
    "empty.mp4": (lambda: b"", "does not decode as mp4"),
    "notes.txt": (lambda: b"hello", "suffix must be one of"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    if name.endswith("mp4"):
        pytest.importorskip("av")
    content, message = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(content())
    with pytest.raises(MediaError, match=message) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{name}: ") and "\n" not in text and "0x" not in text and len(text) < 200


def test_missing_file_and_odd_names(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="no such file"):
        load(tmp_path / "none.png")
    for given, said in ((tmp_path, "a folder"), ("https://host/a.png", "a URL")):
        with pytest.raises(MediaError, match=said):
            load(given)
    with pytest.raises(MediaError) as caught:
        load(tmp_path / "a\x1b[31m\n.png")
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(MediaError, match="at least 1 frame must be sampled, got 0"):
        load(SAMPLE_VIDEO, frames=0)


def test_rotated_and_transparent_pictures(tmp_path: Path) -> None:
    picture = Image.fromarray(_noise(1, 40, 60)[0])
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    picture.save(tmp_path / "turned.jpg", exif=exif)
    assert load(tmp_path / "turned.jpg").frames.shape == (1, 60, 40, 3)
    picture.convert("RGBA").save(tmp_path / "alpha.png")
    assert load(tmp_path / "alpha.png").frames.shape == (1, 40, 60, 3)


@pytest.mark.parametrize(
    "name, kind", [("photo.jpg", "PNG"), ("photo.png", "JPEG"), ("a.tif", "TIFF"), ("b.TIFF", "TIFF")]
)
def test_a_pictures_format_is_found_in_the_file(tmp_path: Path, name: str, kind: str) -> None:
    Image.fromarray(_noise(1, 40, 60)[0]).save(tmp_path / name, format=kind)
    assert load(tmp_path / name).frames.shape == (1, 40, 60, 3)


def test_a_picture_that_the_processor_refuses() -> None:
    with pytest.raises(MediaError, match=r"noise: Hugging Face's processor refuses it: .*aspect ratio.*200"):
        prepare(Media("noise", "image", _noise(1, 10, 2500), 1), LAYOUT)


def test_short_video_gives_what_it_has() -> None:
    pytest.importorskip("av")
    assert load(SAMPLE_VIDEO, frames=500).frames.shape[0] == 50
