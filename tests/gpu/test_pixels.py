"""Patches computed on the GPU: every byte as the backend's own code gives it on the CPU."""

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import is_torchvision_available

from fusedvit.kernels.patches import PatchLayout
from fusedvit.pixels import BytePixels, stream, swap
from fusedvit.pixels.patches import SizedFrames, patches_of
from fusedvit.pixels.resize import TORCH
from tests.support.processors import image_processor, noise, video_processor

pytestmark = pytest.mark.gpu
Image = pytest.importorskip("PIL.Image")

BACKENDS = ["Qwen2VLImageProcessorPil"] + ["Qwen2VLImageProcessor"] * is_torchvision_available()
VIDEOS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor", "Glm4vVideoProcessor"), {}),
    "Ernie4_5_VLMoeVideoProcessor": {"draw_on_frames": False},
}
LARGE = {"shortest_edge": 56 * 56, "longest_edge": 1500 * 1500}


def both(name: str, device: torch.device, **settings: Any) -> tuple[Any, Any]:
    """A processor, and one that gives bytes on the GPU."""
    plain = image_processor(name, **settings)
    return plain, swap(copy.deepcopy(plain), device)


def assert_equal(got: Any, wanted: Any) -> None:
    (pixels,) = (name for name in wanted if name.startswith("pixel"))
    (grid,) = (name for name in wanted if name.endswith("grid_thw"))
    assert isinstance(got[pixels], BytePixels) and got[pixels].is_cuda
    assert torch.equal(got[grid], wanted[grid])
    # normalised on the CPU, whose last bits are those of the yardstick
    assert torch.equal(got[pixels].cpu().pixels(), wanted[pixels])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("size", [(600, 600), (1280, 960), (2300, 1700), (448, 448), (1, 150), (2900, 31), (37, 6000)])
def test_bytes_of_large_images(name: str, size: tuple[int, int], device: torch.device) -> None:
    plain, ours = both(name, device, patch_size=16, size=LARGE)
    # pictures: of an array of one row nobody knows where the channels are
    images = [Image.fromarray(noise(*size)), Image.fromarray((noise(*size) // 128 * 255).astype(np.uint8))]
    assert_equal(ours(images=images, return_tensors="pt"), plain(images=images, return_tensors="pt"))


@pytest.mark.parametrize("name", BACKENDS)
def test_many_sizes_in_one_call(name: str, device: torch.device) -> None:
    chance = random.Random(0)
    plain, ours = both(name, device)
    sizes = [(chance.randint(1, 400), chance.randint(2, 400)) for _ in range(60)]
    sizes = [size for size in sizes if max(size) < 200 * min(size)]
    images: list[Any] = [noise(*size) for size in sizes + sizes[:3] * 3]
    images = [Image.fromarray(x) if i % 5 == 0 or x.shape[0] < 5 else x for i, x in enumerate(images)]
    images[10] = Image.fromarray(noise(50, 60)).convert("L")
    images[11] = torch.from_numpy(noise(50, 60)).movedim(-1, 0)
    assert_equal(ours(images=images, return_tensors="pt"), plain(images=images, return_tensors="pt"))


@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
@pytest.mark.parametrize("name", VIDEOS)
def test_videos(name: str, device: torch.device) -> None:
    plain = video_processor(name, **VIDEOS[name])
    ours = swap(copy.deepcopy(plain), device)
    for videos in ([noise(5, 180, 320), noise(8, 100, 50)], [torch.from_numpy(noise(4, 64, 90)).movedim(-1, 1)]):
        given = {"videos": videos, "do_sample_frames": False, "return_tensors": "pt"}
        assert_equal(ours(**given), plain(**given))


def test_padded_images(device: torch.device) -> None:
    """Of Gemma 4: resized on the CPU, normalised where the tower is."""
    plain = image_processor("Gemma4ImageProcessorPil", size=None, max_soft_tokens=70)
    ours = swap(copy.deepcopy(plain), device)
    given = {"images": [noise(90, 130), noise(300, 80)], "return_tensors": "pt"}
    got, wanted = ours(**given), plain(**given)
    assert got["pixel_values"].is_cuda and torch.equal(got["pixel_values"].cpu().pixels(), wanted["pixel_values"])
    torch.testing.assert_close(got["pixel_values"].pixels().cpu(), wanted["pixel_values"], rtol=0, atol=1e-6)
    assert torch.equal(got["image_position_ids"].cpu(), wanted["image_position_ids"])


@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
def test_tensors_that_are_on_the_gpu_already(device: torch.device) -> None:
    plain, ours = both("Qwen2VLImageProcessor", device)
    images = [torch.from_numpy(noise(90, 130 + i // 2)).movedim(-1, 0) for i in range(4)]
    got = ours(images=[image.to(device) for image in images], return_tensors="pt")
    assert_equal(got, plain(images=images, return_tensors="pt"))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_device_that_a_call_asks_for(name: str, device: torch.device) -> None:
    plain, ours = both(name, device)
    image = [noise(70, 90)]
    wanted = plain(images=image, return_tensors="pt")
    on_cpu = ours(images=image, return_tensors="pt", device="cpu")["pixel_values"]
    assert not on_cpu.is_cuda and torch.equal(on_cpu.pixels(), wanted["pixel_values"])
    swap(ours, "cpu")
    assert_equal(ours(images=image, return_tensors="pt", device=device), wanted)
    floats = swap(ours, device)(images=image, return_tensors="pt", device=device, do_normalize=False)["pixel_values"]
    assert type(floats) is torch.Tensor and floats.is_cuda == (name == "Qwen2VLImageProcessor")


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_from_threads_and_streams(name: str, device: torch.device) -> None:
    """Memory that is used again belongs to nobody else any more."""
    plain, ours = both(name, device)
    sizes = [(60 + 7 * i, 200 - 5 * i) for i in range(16)]
    wanted = [plain(images=[noise(*size)], return_tensors="pt")["pixel_values"] for size in sizes]

    def call(i: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            got = [ours(images=[noise(*sizes[i])], return_tensors="pt")["pixel_values"].cpu() for _ in range(8)]
        return all(torch.equal(pixels.pixels(), wanted[i]) for pixels in got)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, [i % 16 for i in range(48)]))


def test_a_stream_gives_batches_to_the_current_stream(device: torch.device) -> None:
    import io

    def png(image: np.ndarray) -> bytes:
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="PNG")
        return file.getvalue()

    plain = image_processor("Qwen2VLImageProcessorPil")
    sizes = [(60 + i % 9, 100 - i % 7) for i in range(200)]
    files = [png(noise(*size)) for size in sizes]
    wanted = plain(images=[noise(*size) for size in sizes], return_tensors="pt")
    for current in (torch.cuda.current_stream(device), torch.cuda.Stream(device)):
        with torch.cuda.stream(current):
            batches = [(b.pixel_values.cpu(), b.grid_thw) for b in stream(files, plain, device, patches=500)]
        assert torch.equal(torch.cat([pixels.pixels() for pixels, _ in batches]), wanted["pixel_values"])
        assert torch.equal(torch.cat([grid for _, grid in batches]), wanted["image_grid_thw"])


def test_a_new_size_waits_for_nothing(device: torch.device) -> None:
    """The tables of a new size are copied while the current stream works, and the host goes on."""
    frames = [torch.zeros(1, height, 300, 3, dtype=torch.uint8, device=device) for height in (301, 302, 303)]
    for i, each in enumerate(frames):  # the first two compile and take memory
        torch.cuda.synchronize(device)
        if i:
            torch.cuda._sleep(2 * 10**9)
        working = torch.cuda.Event()
        working.record()
        patches_of([SizedFrames(each, (1, 20, 20), (280, 280))], PatchLayout(14, 2, 1), TORCH, device)
    assert not working.query()
    torch.cuda.synchronize(device)
