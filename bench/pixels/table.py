"""The first part of `fusedvit bench pixels`: from decoded images in host memory to tokens that the caller owns.

Every contender begins with the same uint8 arrays, and its tokens must pass the tolerance rule before it is timed.
Contenders run interleaved in bursts of 1 to 5 calls, on a synchronised wall clock. The first call of a burst, with the
CPU's caches cold, is a figure of its own ("first_ms"). Stages are also timed alone; overlapping ones do not add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import fusedvit
from fusedvit.bench import towers
from fusedvit.bench.timing import Contender, first_ms, gpu_ms, interleaved_bursts, spread
from fusedvit.bench.towers import outputs_of, verdict_of
from fusedvit.kernels.patches import PatchLayout, patches_from_images
from fusedvit.pixels import BytePixels, swap
from fusedvit.pixels.patches import taps_of
from fusedvit.pixels.resize import PILLOW

HF_CPU_HF, HF_CPU, HF_CUDA, OURS = "HF CPU + HF tower", "HF CPU + ours", "HF CUDA + ours", "ours"
Step = Callable[[str], None]
Front = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Workload:
    """Square images, resized to other squares. bar: milliseconds allowed for "ours" on an H100 with an 8B tower."""

    images: int
    side: int
    target: int
    bar: float | None = None


WORKLOADS = {
    "16 x 600 to 448 px": Workload(16, 600, 448, 32.0),
    "4 x 1280 to 1024 px": Workload(4, 1280, 1024, 50.0),
    "1 x 2300 to 2048 px": Workload(1, 2300, 2048, 92.0),
    "1 x 448 px": Workload(1, 448, 448, 2.8),
}
TINY = {"2 x 100 to 64 px": Workload(2, 100, 64), "1 x 64 px": Workload(1, 64, 64)}  # without a GPU


@dataclass(frozen=True)
class Setting:
    """One tower three times with the same parameters: Hugging Face's, fused, and in the dtype of references."""

    original: nn.Module
    fused: nn.Module
    wide: nn.Module
    dtype: torch.dtype
    device: torch.device

    @property
    def patch(self) -> int:
        return _patch_of(self.original)

    def tokens(self, tower: nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> Any:
        """Calls `tower`. Hugging Face's towers need the grid on the GPU; a fused tower also takes it on the CPU."""
        with torch.inference_mode():
            return tower(pixels, grid_thw=grid if tower is self.fused else grid.to(self.device))


def setting_of(name: str, device: torch.device) -> Setting:
    """The tower `name` with random weights, bf16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    original, wide = towers.build(towers.GEOMETRIES[name], dtype, device)
    fused = towers.shared_copy(original)
    fusedvit.fuse(fused, fusedvit.FuseConfig(compile="now"), processor=processor_for(448, _patch_of(original)))
    return Setting(original, fused, wide, dtype, device)


def _patch_of(tower: nn.Module) -> int:
    config: Any = tower.config
    return int(config.patch_size)


def processor_for(target: int, patch: int) -> Any:
    """A Qwen image processor of the available backend that resizes larger squares to `target` pixels."""
    import transformers
    from transformers.utils import is_torchvision_available

    factor = 2 * patch
    size = {"shortest_edge": factor**2, "longest_edge": (target + factor // 4) ** 2}
    name = "Qwen2VLImageProcessor" + ("" if is_torchvision_available() else "Pil")
    return getattr(transformers, name)(patch_size=patch, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def pictures(count: int, side: int) -> list[np.ndarray]:
    """Smooth images with some noise, `[side, side, 3]` uint8."""
    chance = np.random.default_rng(side)
    y, x = np.mgrid[0:side, 0:side] / side
    waves = [np.sin(2 * np.pi * (a * x + b * y)) for a, b in chance.uniform(1, 9, (3, 2))]
    smooth = np.stack(waves, -1) * 90 + 128
    return [(smooth + chance.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8) for _ in range(count)]


def measure(setting: Setting, name: str, work: Workload, seconds: float) -> dict[str, Any]:
    """One row of the table: milliseconds and stages by contender, the verdict on tokens, bytes copied."""
    images = pictures(work.images, work.side)
    plain, ours = processor_for(work.target, setting.patch), processor_for(work.target, setting.patch)
    swap(ours, setting.device)
    pixels = _fronts(plain, ours, images, setting)
    towers_of = {contender: setting.fused for contender in pixels} | {HF_CPU_HF: setting.original}

    def run(contender: str) -> Any:
        return setting.tokens(towers_of[contender], *pixels[contender]())

    rows, grid = plain(images=images, return_tensors="pt").values()
    there = rows.to(setting.device)
    reference = outputs_of(setting.tokens(setting.wide, there.to(towers.wider(setting.dtype)), grid))
    theirs = outputs_of(run(HF_CPU_HF))
    verdicts = {c: verdict_of(outputs_of(run(c)), reference, theirs) for c in pixels if c != HF_CPU_HF}
    timed = [c for c in pixels if c == HF_CPU_HF or verdicts[c]["passed"]]
    calls = [Contender(c, partial(run, c)) for c in timed]
    times = interleaved_bursts(calls, setting.device, seconds)
    prepared = {c: front() for c, front in pixels.items()}
    stages = interleaved_bursts(
        [Contender(f"{c}: pixels", front) for c, front in pixels.items()]
        + [Contender(f"{c}: tower", partial(setting.tokens, towers_of[c], *prepared[c])) for c in pixels],
        setting.device,
        seconds / 2,
    )
    return {
        "workload": name,
        "bar_ms": work.bar,
        "ms": {c: asdict(spread(bursts.ms)) for c, bursts in times.items()},
        "first_ms": first_ms(calls, times),
        "calls_in_a_burst": next(iter(times.values())).calls,
        "stages_ms": {stage: spread(bursts.ms).median for stage, bursts in stages.items()},
        "tokens": verdicts,
        "bytes": _bytes(images, rows, prepared[OURS][0]),
        "gpu": _on_gpu(setting, images, prepared, grid) if setting.device.type == "cuda" else None,
    }


def _fronts(plain: Any, ours: Any, images: Sequence[np.ndarray], setting: Setting) -> dict[str, Front]:
    """The preprocessing of each contender: returns (pixel_values, grid), with the pixels on the tower's device."""

    def hugging_face(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = plain(images=list(images), return_tensors="pt", **options)
        return found["pixel_values"].to(setting.device, setting.dtype), found["image_grid_thw"]

    def bytes_of() -> tuple[torch.Tensor, torch.Tensor]:
        found = ours(images=list(images), return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]

    fronts: dict[str, Front] = {HF_CPU_HF: hugging_face, HF_CPU: hugging_face}
    if setting.device.type == "cuda" and plain.backend == "torchvision":
        fronts[HF_CUDA] = partial(hugging_face, device=setting.device)
    return fronts | {OURS: bytes_of}


def _bytes(images: Sequence[np.ndarray], rows: torch.Tensor, ours: torch.Tensor) -> dict[str, Any]:
    """The bytes that are copied to the GPU: of fp32 patches, or of images as they are."""
    assert isinstance(ours, BytePixels)
    decoded = sum(image.nbytes for image in images)
    return {"fp32_patches": rows.nbytes, "images": decoded, "ratio": decoded / rows.nbytes, "byte_patches": ours.nbytes}


def _on_gpu(
    setting: Setting, images: Sequence[np.ndarray], prepared: Mapping[str, tuple[torch.Tensor, torch.Tensor]], grid: Any
) -> dict[str, float]:
    """Median milliseconds on the GPU's clock: our resizing alone, and the tower with either kind of input."""
    there = torch.from_numpy(np.stack(images)).to(setting.device)
    _, h, w = grid[0].tolist()
    down, across = (
        taps_of(PILLOW, n, new * setting.patch, setting.device) for n, new in zip(there.shape[1:3], (h, w), strict=True)
    )
    layout, out = (
        PatchLayout(setting.patch, 2, 1),
        torch.empty(prepared[OURS][0].shape, dtype=torch.uint8, device=setting.device),
    )
    calls = {
        "resize_and_patches": lambda: patches_from_images(there, down, across, layout, (len(images), h, w), out),
        "tower_bf16": lambda: setting.tokens(setting.fused, *prepared[HF_CPU]),
        "tower_bytes": lambda: setting.tokens(setting.fused, *prepared[OURS]),
    }
    for call in calls.values():
        call()
    orders = (list(calls), list(reversed(calls))) * 8  # a long call leaves the GPU warmer and slower
    rounds = [{name: gpu_ms(calls[name], setting.device) for name in order} for order in orders]
    return {name: spread([times[name] for times in rounds]).median for name in calls}
