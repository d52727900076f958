"""A corpus as batches: what one call of the processor gives, in order, whatever does not decode."""

import io
import itertools
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fusedvit.cli.media import SAMPLE_IMAGE, SAMPLE_VIDEO
from fusedvit.errors import InputError, UnsupportedModel
from fusedvit.pixels import BytePixels, Limits, MediaError, media, stream, streaming
from fusedvit.pixels.media import load_one
from tests.support.processors import image_processor, noise, video_processor
from tests.support.waiting import until

Image = pytest.importorskip("PIL.Image")


def png(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(height, width)).save(file, format="PNG")
    return file.getvalue()


def both_of(image: Any, video: Any) -> Any:
    return SimpleNamespace(image_processor=image, video_processor=video)


SIZES = [(40, 60), (64, 64), (30, 200), (90, 31), (64, 64), (33, 47), (128, 100)]


def test_batches_are_what_the_processor_gives() -> None:
    processor = image_processor()
    sources = [png(*size) for size in SIZES]
    batches = list(stream(sources, processor, patches=64, threads=3, ahead=2))
    wanted = processor(images=[noise(*size) for size in SIZES], return_tensors="pt")
    assert type(wanted["pixel_values"]) is torch.Tensor  # the processor itself stays as it is
    assert torch.equal(torch.cat([b.pixel_values.pixels() for b in batches]).cpu(), wanted["pixel_values"])
    assert torch.equal(torch.cat([b.grid_thw for b in batches]), wanted["image_grid_thw"])
    assert [i for b in batches for i in b.indices] == list(range(len(SIZES)))
    assert batches[0].names[0] == "bytes 0" and {b.kind for b in batches} == {"image"}
    for batch in batches:
        assert isinstance(batch.pixel_values, BytePixels)
        assert len(batch.pixel_values) <= 64 or len(batch.indices) == 1
        assert len(batch.pixel_values) == int(batch.grid_thw.prod(-1).sum())
    full = [
        len(a.pixel_values) + len(b.pixel_values[: int(b.grid_thw[0].prod())]) for a, b in itertools.pairwise(batches)
    ]
    assert all(rows > 64 for rows in full)  # no image would have fitted into the batch before


FEW_ROWS = ((1, 40), (3, 40), (4, 40), (4, 4), (40, 3))  # which a processor may take for channels


@pytest.mark.parametrize("size", FEW_ROWS, ids=str)
def test_images_of_few_rows(size: tuple[int, int]) -> None:
    processor = image_processor()
    wanted = processor(images=[Image.fromarray(noise(*size))], return_tensors="pt")
    for source in (png(*size), noise(*size)):
        (batch,) = stream([source], processor)
        assert torch.equal(batch.grid_thw, wanted["image_grid_thw"])
        assert torch.equal(batch.pixel_values.pixels().cpu(), wanted["pixel_values"])


@pytest.mark.parametrize("size", FEW_ROWS, ids=str)
def test_videos_of_few_rows(size: tuple[int, int]) -> None:
    pytest.importorskip("torchvision")
    processor = video_processor("Qwen2VLVideoProcessor")
    video = noise(4, *size)
    first = np.ascontiguousarray(video.transpose(0, 3, 1, 2))
    given = {"do_sample_frames": False, "input_data_format": "channels_first", "return_tensors": "pt"}
    wanted = processor(videos=[first], **given)
    (batch,) = stream([video], both_of(None, processor), device="cpu")
    assert torch.equal(batch.grid_thw, wanted["video_grid_thw"])
    assert torch.equal(batch.pixel_values.pixels(), wanted["pixel_values_videos"])


def test_what_does_not_decode_is_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    sources = [png(40, 60), b"nothing", png(1, 300), png(64, 64), b""]
    with pytest.raises(MediaError, match="bytes 1: does not decode"):
        list(stream(sources, image_processor()))
    with caplog.at_level("WARNING", "fusedvit"):
        (batch,) = stream(sources, image_processor(), errors="skip")
    assert batch.indices == (0, 3) and len(caplog.messages) == 3
    assert any("bytes 2: Hugging Face's processor refuses it" in line for line in caplog.messages)
    failed: list[MediaError] = []
    (batch,) = stream(sources, image_processor(), errors=failed.append, limits=Limits(max_pixels=64 * 63))
    assert batch.indices == (0,) and [error.index for error in failed] == [1, 2, 3, 4]
    assert list(stream([b"nothing"], image_processor(), errors=failed.append)) == []


def test_one_source_and_errors_that_begin_with_our_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(32, 32))
    (batch,) = stream(str(tmp_path / "a.png"), image_processor())
    assert batch.names == ("a.png",)
    with pytest.raises(MediaError, match=f"^fusedvit: {tmp_path}/b.png: no such file"):
        list(stream(tmp_path / "b.png", image_processor()))


def failing(sources: list[Any], at: int, error: Exception) -> Any:
    """The sources, of which `at` raises instead."""
    for i, source in enumerate(sources):
        if i == at:
            raise error
        yield source


@pytest.mark.parametrize("errors", ["raise", "skip"])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("ahead", [1, 64])
def test_what_came_before_an_error_of_the_sources(errors: str, at: int, ahead: int) -> None:
    given = failing([png(32, 32)] * 10, at, RuntimeError("the table ends"))
    batches = stream(given, image_processor(), patches=16, ahead=ahead, errors=errors)
    found: list[int] = []
    with pytest.raises(RuntimeError, match="the table ends"):
        for batch in batches:
            found += batch.indices
    assert found == list(range(at))


@pytest.mark.parametrize("at", [0, 1, 4, 9])
@pytest.mark.parametrize("bad", [b"nothing", noise(1, 300), MediaError("gone"), noise(4, 40, 40)])
def test_what_came_before_an_input_that_raises(at: int, bad: Any) -> None:
    sources: list[Any] = [png(32, 32)] * 10
    sources[at] = bad
    found: list[int] = []
    with pytest.raises(MediaError) as caught:
        for batch in stream(sources, image_processor(), patches=16):
            found += batch.indices
    assert found == list(range(at)) and caught.value.index == at


def test_what_came_before_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a share that fails; whatever `errors` says."""
    load = media.load_one

    def failing_at(source: Any, frames: Any, limits: Any, index: int) -> Any:
        if index == 5:
            raise InputError("a.png: cannot be read (Input/output error)")
        return load(source, frames, limits, index)

    monkeypatch.setattr(streaming, "load_one", failing_at)
    found: list[int] = []
    with pytest.raises(InputError, match="Input/output error"):
        for batch in stream([png(32, 32)] * 10, image_processor(), patches=16, errors="skip"):
            found += batch.indices
    assert found == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["fusedvit-decode", "fusedvit-pack"])
def test_no_room_for_a_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(InputError, match="^fusedvit: the system has no room for another thread"):
        list(stream([png(64, 64)] * 2, image_processor(), patches=64, errors="skip"))


def test_decoded_pixels_are_held_of_two_batches_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends where its decoded pixels reach the bound, however few patches come of them."""
    bound, ahead, count, held, most = 4, 2, 60, 0, 0
    size = (100, 120)
    load, lock = media.load_one, threading.Lock()

    def counted(*given: Any) -> Any:
        nonlocal held, most
        found = load(*given)
        with lock:
            held, most = held + 1, max(most, held + 1)
        weakref.finalize(found, gone)
        return found

    def gone() -> None:
        nonlocal held
        held -= 1  # the collector may run it within `counted`, which has the lock

    monkeypatch.setattr(streaming, "load_one", counted)
    monkeypatch.setattr(streaming, "_DECODED_BYTES", bound * 3 * size[0] * size[1])
    sources = [png(*size)] * count
    found = list(stream(sources, image_processor(), "cpu", threads=1, ahead=ahead))
    assert [batch.indices for batch in found] == [tuple(range(i, i + bound)) for i in range(0, count, bound)]
    assert most <= 2 * bound + ahead + 3  # one that is decoding, two between the steps
    wanted = image_processor()(images=[noise(*size)], return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.cat([b.pixel_values.pixels() for b in found]), wanted.repeat(count, 1))


def test_an_image_of_more_than_the_bound_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_DECODED_BYTES", 3 * 64 * 64 * 2)
    given = [(64, 64), (200, 200), (64, 64), (64, 64), (64, 65), (200, 200)]
    found = stream([png(*size) for size in given], image_processor(), "cpu")
    assert [batch.indices for batch in found] == [(0,), (1,), (2, 3), (4,), (5,)]


def test_endless_sources_are_read_as_far_as_needed() -> None:
    taken = 0

    def endless() -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield png(32, 32)

    before = threading.enumerate()
    batches = stream(endless(), image_processor(), patches=32, threads=2, ahead=5)
    assert [batch.indices for batch in itertools.islice(batches, 3)] == [(0, 1), (2, 3), (4, 5)]
    assert taken <= 20
    batches.close()  # type: ignore[attr-defined]
    until(lambda: all(t in before or not t.name.startswith("fusedvit-") for t in threading.enumerate()))


def test_arguments_are_checked_before_anything_is_read() -> None:
    processor = image_processor()
    for wrong in ({"errors": "ignore"}, {"patches": 0}, {"ahead": 0}, {"threads": 0}, {"device": "tpu"}):
        with pytest.raises(ValueError, match=f"^fusedvit: {next(iter(wrong))} must be"):
            stream([], processor, **wrong)
    for device in ("cuda:99", "meta"):
        with pytest.raises(ValueError, match=r"^fusedvit: device must be the CPU or one of \d+ GPUs"):
            stream([], processor, device=device)
    other: list[dict[str, Any]] = [{"errors": 5}, {"patches": "a"}, {"ahead": 2.5}, {"limits": 5}, {"device": []}]
    for wrong in (*other, {"sources": 5}, {"processor": None}):
        with pytest.raises(TypeError, match=f"^fusedvit: {next(iter(wrong))} must be"):
            stream(**{"sources": [], "processor": processor} | wrong)
    with pytest.raises(UnsupportedModel, match="cannot give bytes"):
        stream([], object())
    parts = SimpleNamespace(image_processor=object(), video_processor=None)
    with pytest.raises(UnsupportedModel, match=r"fusedvit: object cannot give bytes: image_processor \(object\) is of"):
        stream([], parts)


def test_videos_are_sampled_by_their_processor() -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("av")
    processor = video_processor()
    image, video = stream([SAMPLE_IMAGE, SAMPLE_VIDEO], both_of(image_processor(), processor))
    assert (image.kind, video.kind) == ("image", "video") and video.names == (SAMPLE_VIDEO.name,)
    every = load_one(SAMPLE_VIDEO, frames=50)
    frames, fps = every.frames, every.fps or 0.0
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=50, fps=fps, duration=50 / fps)
    wanted = processor(videos=[frames], video_metadata=[metadata], return_tensors="pt")
    assert torch.equal(video.grid_thw, wanted["video_grid_thw"])
    if not torch.cuda.is_available():
        assert torch.equal(video.pixel_values.pixels(), wanted["pixel_values_videos"])


def test_times_are_drawn_on_the_frames_that_were_sampled() -> None:
    """ERNIE's processor does that, by the numbers of the frames in the file."""
    pytest.importorskip("torchvision")
    pytest.importorskip("av")
    font = Path(pytest.importorskip("matplotlib").get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    processor = video_processor("Ernie4_5_VLMoeVideoProcessor", font=str(font))
    (video,) = stream([SAMPLE_VIDEO], both_of(None, processor), device="cpu")
    every = load_one(SAMPLE_VIDEO, frames=50)
    metadata = [{"total_num_frames": 50, "fps": every.fps or 0.0}]
    wanted = processor(videos=[every.frames], video_metadata=metadata, return_tensors="pt")
    assert torch.equal(video.grid_thw, wanted["video_grid_thw"])
    assert torch.equal(video.pixel_values.pixels(), wanted["pixel_values_videos"])


def test_a_video_that_its_processor_refuses() -> None:
    """Or that there is no processor for: it is named, and the others go on."""
    refused: list[MediaError] = []
    (batch,) = stream([noise(4, 60, 70), png(40, 60)], image_processor(), errors=refused.append)
    assert batch.indices == (1,) and [error.index for error in refused] == [0]
    assert "array 0: a video, and no video processor" in str(refused[0])
    pytest.importorskip("torchvision")
    both = both_of(image_processor(), video_processor())
    sources = [noise(4, 60, 70), noise(1, 60, 70), png(40, 60), noise(4, 2, 900)]
    found = list(stream(sources, both, errors=refused.append))
    assert [batch.indices for batch in found] == [(0,), (2,)] and [error.index for error in refused] == [0, 1, 3]
    assert all("Hugging Face's processor refuses it" in str(error) for error in refused[1:])
    with pytest.raises(MediaError, match="array 1"):
        list(stream(sources, both))


def test_a_processor_that_does_not_resize() -> None:
    """What cannot be cut into merged patches as it is, is named; batches are as large as the others are."""
    processor = image_processor(do_resize=False)
    side = processor.patch_size * processor.merge_size
    sources = [png(side, 2 * side), png(side, side + 1), png(2 * side, side), png(side - 1, side), png(side, side)]
    refused: list[MediaError] = []
    found = list(stream(sources, processor, patches=17, errors=refused.append))
    assert [batch.indices for batch in found] == [(0, 2), (4,)] and [error.index for error in refused] == [1, 3]
    expected = f"fusedvit: bytes 1: multiples of {side} pixels expected, as the processor does not resize"
    assert str(refused[0]) == f"{expected}, got {side} x {side + 1}"
    wanted = processor(images=[noise(side, 2 * side), noise(2 * side, side)], return_tensors="pt")
    assert torch.equal(found[0].pixel_values.pixels().cpu(), wanted["pixel_values"])
    with pytest.raises(MediaError, match="bytes 1: multiples"):
        list(stream(sources, processor))


@pytest.mark.parametrize("setting", ({"rescale_factor": 0.0}, {"do_normalize": False}), ids=str)
def test_what_bytes_cannot_stand_for_stays_floats(setting: dict[str, Any]) -> None:
    processor = image_processor("Qwen2VLImageProcessorPil", **setting)
    (batch,) = stream([png(40, 60)], processor)
    wanted = processor(images=[noise(40, 60)], return_tensors="pt")["pixel_values"]
    assert not isinstance(batch.pixel_values, BytePixels) and torch.equal(batch.pixel_values.cpu(), wanted)


def test_a_video_that_is_not_resized() -> None:
    pytest.importorskip("torchvision")
    processor = video_processor("Qwen2VLVideoProcessor", do_resize=False)
    refused: list[MediaError] = []
    (batch,) = stream(
        [noise(4, 56, 57), noise(4, 56, 84)], both_of(None, processor), device="cpu", errors=refused.append
    )
    assert batch.indices == (1,) and "multiples of 28 pixels expected" in str(refused[0])


def test_what_a_processor_refuses_among_others() -> None:
    """By whatever of its code: the others of that batch go on."""

    class Choosy(type(image_processor())):  # type: ignore[misc]
        def get_number_of_image_patches(self, height: int, width: int, images_kwargs: Any = None) -> int:
            return 4  # also for the sizes that it refuses later

    settings = image_processor().to_dict()
    sources = [png(40, 60), png(1, 300), png(64, 64), png(300, 1)]
    refused: list[MediaError] = []
    (batch,) = stream(sources, Choosy(**settings), errors=refused.append)
    assert batch.indices == (0, 2) and [error.index for error in refused] == [1, 3]
    assert all("Hugging Face's processor refuses it" in str(error) for error in refused)
    wanted = image_processor()(images=[noise(40, 60), noise(64, 64)], return_tensors="pt")
    assert torch.equal(batch.pixel_values.pixels().cpu(), wanted["pixel_values"])
    assert list(stream([sources[1], sources[3]], Choosy(**settings), errors=refused.append)) == []
    with pytest.raises(MediaError, match="bytes 1: Hugging Face's processor refuses it"):
        list(stream(sources, Choosy(**settings)))
    found: list[int] = []
    with pytest.raises(MediaError, match="bytes 1: Hugging Face's processor refuses it"):
        for batch in stream(sources, Choosy(**settings)):
            found += batch.indices
    assert found == [0, 2]  # a batch is whole
