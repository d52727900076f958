"""Patch rows that a tower of Hugging Face would get from its own processors."""

import numpy as np
import pytest
import torch
from einops import rearrange

from fusedvit.cli.media import SAMPLE_IMAGE, SAMPLE_VIDEO, InputLayout, VisionInput, prepare
from fusedvit.pixels import BytePixels, swap
from fusedvit.pixels.byte_processors import CHANNELS_LAST
from fusedvit.pixels.media import Media, MediaError, load_one

pytest.importorskip("transformers")
LAYOUT = InputLayout()


def _noise(frames: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def _video(frames: np.ndarray) -> Media:
    return Media("noise", "video", frames, len(frames))


def _by_hand(frames: np.ndarray, layout: InputLayout) -> torch.Tensor:
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


def floats(item: VisionInput) -> torch.Tensor:
    return item.floats(torch.float32).pixel_values.cpu()


def test_image_rows_and_grid() -> None:
    item = prepare(load_one(SAMPLE_IMAGE), LAYOUT)
    assert item.grid_thw.tolist() == [[1, 38, 32]] and item.grid_thw.dtype == torch.int64
    assert isinstance(item.pixel_values, BytePixels) and item.pixel_values.shape == (38 * 32, 3 * 16 * 16)
    rows = floats(item)
    assert rows.shape == (38 * 32, 3 * 2 * 16 * 16) and rows.dtype == torch.float32
    assert -1 <= rows.min() < rows.max() <= 1


def test_still_video_is_the_image() -> None:
    """Two identical frames resized, normalised and laid out as a video: bit for bit the picture."""
    frame = _noise(1, 100, 150)
    image = prepare(Media("noise", "image", frame, 1), LAYOUT)
    for frames in (np.repeat(frame, 2, axis=0), frame):  # one frame alone is padded with itself
        video = prepare(_video(frames), LAYOUT)
        assert video.grid_thw.tolist() == image.grid_thw.tolist() == [[1, 6, 10]]
        assert torch.equal(floats(video), floats(image))


@pytest.mark.parametrize("frames", [2, 6])
@pytest.mark.parametrize("layout", [LAYOUT, InputLayout(patch_size=14, mean=(0.48, 0.45, 0.4), std=(0.27, 0.26, 0.28))])
def test_video_order_is_merge_block(frames: int, layout: InputLayout) -> None:
    side = layout.patch_size * layout.merge_size
    clip = _noise(frames, 3 * side, 4 * side)
    item = prepare(_video(clip), layout)
    assert item.grid_thw.tolist() == [[frames // 2, 6, 8]]
    torch.testing.assert_close(floats(item), _by_hand(clip, layout), rtol=1e-5, atol=1e-6)


def test_image_order_is_merge_block() -> None:
    clip = _noise(1, 64, 96)
    item = prepare(Media("noise", "image", clip, 1), LAYOUT)
    torch.testing.assert_close(floats(item), _by_hand(np.repeat(clip, 2, 0), LAYOUT), rtol=1e-5, atol=1e-6)


def test_odd_frame_count_repeats_the_last() -> None:
    clip = _noise(3, 64, 64)
    item = prepare(_video(clip), LAYOUT)
    assert item.grid_thw.tolist() == [[2, 4, 4]]
    last = rearrange(floats(item), "(t n) (c tp p) -> t tp n c p", t=2, tp=2, c=3)[1]
    assert torch.equal(last[0], last[1])


def test_agrees_with_the_video_processor() -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("av")
    from transformers import Qwen3VLVideoProcessor

    media = load_one(SAMPLE_VIDEO, frames=6)
    ours, most = prepare(media, LAYOUT), {"shortest_edge": 6 * LAYOUT.min_pixels, "longest_edge": 6 * LAYOUT.max_pixels}
    processor = swap(Qwen3VLVideoProcessor(size=most, do_sample_frames=False, cap_pixels_per_frame=False))
    theirs = processor(videos=[media.frames], input_data_format=CHANNELS_LAST, return_tensors="pt")
    assert ours.grid_thw.tolist() == theirs["video_grid_thw"].tolist()
    assert torch.equal(floats(ours), floats(VisionInput(theirs["pixel_values_videos"], theirs["video_grid_thw"])))


@pytest.mark.parametrize("size", ((1, 40), (3, 40), (4, 4)), ids=str)
def test_few_rows_are_no_channels(size: tuple[int, int]) -> None:
    frames = _noise(2, *size)
    image = prepare(Media("noise", "image", frames[:1], 1), LAYOUT)
    _, height, width = image.grid_thw[0].tolist()
    assert height <= width
    assert prepare(_video(frames), LAYOUT).grid_thw.tolist() == [[1, height, width]]


def test_pixels_stay_within_the_layout() -> None:
    item = prepare(load_one(SAMPLE_IMAGE), InputLayout(max_pixels=128 * 128))
    t, h, w = item.grid_thw[0].tolist()
    assert t == 1 and h % 2 == w % 2 == 0 and h * w <= 64


def test_a_picture_that_the_processor_refuses() -> None:
    with pytest.raises(MediaError, match=r"noise: Hugging Face's processor refuses it: .*aspect ratio.*200"):
        prepare(Media("noise", "image", _noise(1, 10, 2500), 1), LAYOUT)
