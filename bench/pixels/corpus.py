"""JPEG bytes to tokens: a corpus through Hugging Face's processor and through ours, and decoding in threads."""

import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from fusedvit.bench.pixels.table import HF_CPU, HF_CPU_HF, HF_CUDA, OURS, Setting, Workload, pictures, processor_for
from fusedvit.bench.timing import wait
from fusedvit.cores import available_cores
from fusedvit.pixels import load, stream, swap

LOADER = "HF DataLoader + HF tower"
_DISTINCT = 64  # files; a corpus repeats them
File = TypeVar("File")
Run = Callable[[Sequence[bytes]], Iterator[int]]  # yields how many images are done


def jpegs(count: int, side: int) -> list[bytes]:
    from PIL import Image

    def encoded(image: np.ndarray) -> bytes:
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=90)
        return file.getvalue()

    distinct = [encoded(image) for image in pictures(min(count, _DISTINCT), side)]
    return list(itertools.islice(itertools.cycle(distinct), count))


def measure(setting: Setting, work: Workload, count: int, seconds: float) -> dict[str, Any]:
    """Images a second of every contender on a corpus of `count` JPEGs; all but ours stop after about `seconds`."""
    files = jpegs(count, work.side)
    plain = processor_for(work.target, setting.patch)
    runs = _contenders(setting, plain, work)
    found: dict[str, Any] = {"images": count, "side": work.side, "target": work.target, "threads": available_cores()}
    found["images_per_s"] = {
        name: _rate(run, files, seconds if name != OURS else None, setting.device, count % work.images)
        for name, run in runs.items()
    }
    if setting.device.type == "cuda":
        found["gpu_busy"] = _busy(lambda: list(runs[OURS](files[: min(count, 640)])))
    return found


def _rate(run: Run, files: Sequence[bytes], seconds: float | None, device: torch.device, last: int) -> float:
    """Images a second from the end of the first batch on, so that no contender's start of processes counts. `last`: the
    number of images of the last batch, if it has fewer."""
    for some in (files[:32], files[-last:] if last else ()):  # a smaller last batch would compile kernels
        for _ in run(some):
            pass
    begin, done = None, 0
    for images in run(files):
        if begin is None:
            wait(device)
            begin = time.perf_counter()
            continue
        done += images
        if seconds is not None and time.perf_counter() - begin > seconds:
            break
    wait(device)
    return done / (time.perf_counter() - begin) if begin is not None else 0.0


def _contenders(setting: Setting, plain: Any, work: Workload) -> dict[str, Run]:
    def in_line(tower: torch.nn.Module, **options: Any) -> Run:
        """Per batch: decodes on all cores, then runs Hugging Face's processor, then the tower."""

        def run(files: Sequence[bytes]) -> Iterator[int]:
            with ThreadPoolExecutor(available_cores()) as pool:
                for batch in chunks(files, work.images):
                    images = list(pool.map(_decoded, batch))
                    found = plain(images=images, return_tensors="pt", **options)
                    pixels = found["pixel_values"].to(setting.device, setting.dtype)
                    setting.tokens(tower, pixels, found["image_grid_thw"])
                    yield len(batch)

        return run

    def ours(files: Sequence[bytes]) -> Iterator[int]:
        rows = work.images * (work.target // setting.patch) ** 2
        for batch in stream(files, plain, setting.device, patches=rows):
            setting.tokens(setting.fused, batch.pixel_values, batch.grid_thw)
            yield len(batch.indices)

    runs = {HF_CPU_HF: in_line(setting.original), HF_CPU: in_line(setting.fused)}
    if setting.device.type == "cuda":
        runs[LOADER] = _through_loader(setting, plain, work)
        if plain.backend == "torchvision":
            runs[HF_CUDA] = in_line(setting.fused, device=setting.device)
    return runs | {OURS: ours}


def _through_loader(setting: Setting, plain: Any, work: Workload) -> Run:
    """Decodes and processes in about one process per core; fp32 patches go through shared and pinned memory."""

    def run(files: Sequence[bytes]) -> Iterator[int]:
        batches = list(chunks(files, work.images))
        workers = max(1, min(available_cores() - 1, len(batches)))
        loader = torch.utils.data.DataLoader(
            _Processed(batches, plain), batch_size=None, num_workers=workers, pin_memory=True, prefetch_factor=2
        )
        for pixels, grid in loader:
            setting.tokens(setting.original, pixels.to(setting.device, setting.dtype, non_blocking=True), grid)
            yield len(grid)

    return run


class _Processed(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: Sequence[Sequence[bytes]], processor: Any) -> None:
        self.batches, self.processor = batches, processor

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = [_decoded(data) for data in self.batches[index]]
        found = self.processor(images=images, return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]


def _decoded(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def chunks(files: Sequence[File], size: int) -> Iterator[Sequence[File]]:
    """`files` in batches of `size`; the last has the rest."""
    return (files[i : i + size] for i in range(0, len(files), size))


def by_threads(setting: Setting, work: Workload, count: int) -> list[dict[str, Any]]:
    """Images a second decoded, and from JPEG to patches on the device, by the number of decoding threads."""
    plain, files = processor_for(work.target, setting.patch), jpegs(count, work.side)
    found = []
    for threads in (n for n in (1, 2, 4, 8, 16, 32) if n <= available_cores()):
        begin = time.perf_counter()
        load(files, threads=threads)
        decoded = count / (time.perf_counter() - begin)
        begin = time.perf_counter()
        for batch in stream(files, plain, setting.device, threads=threads):
            batch.pixel_values.data_ptr()
        wait(setting.device)
        found.append({"threads": threads, "decoded": decoded, "patches": count / (time.perf_counter() - begin)})
    return found


def _busy(run: Callable[[], Any]) -> dict[str, float]:
    """The share of wall time that the GPU spends in kernels, by the profiler; overlapping kernels count once."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = 1e6 * (time.perf_counter() - begin)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
    busy, end = 0.0, float("-inf")
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {"share": busy / wall, "kernels": len(spans), "wall_ms": wall / 1e3}


def differences(setting: Setting, work: Workload) -> dict[str, Any]:
    """Bytes of patches, ours against the backends': the share that differs, and the largest difference."""
    images = pictures(2, work.side)
    plain = processor_for(work.target, setting.patch)
    ours = swap(processor_for(work.target, setting.patch), setting.device)
    got = ours(images=images, return_tensors="pt")["pixel_values"].pixels().cpu()
    found = {f"{plain.backend}, CPU": _difference(got, plain(images=images, return_tensors="pt")["pixel_values"])}
    if setting.device.type == "cuda" and plain.backend == "torchvision":
        theirs = plain(images=images, return_tensors="pt", device=setting.device)["pixel_values"].cpu()
        found["torchvision, CUDA"] = _difference(got, theirs)
    return found


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    levels = ((ours - theirs) * 127.5).round()  # of 8 bits: mean and std are 0.5
    return {"share": float((levels != 0).double().mean()), "largest": float(levels.abs().max())}
