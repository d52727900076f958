"""Weights of bicubic, antialiased resizing, exactly as Pillow and as torch's CPU code compute them.

Both evaluate the same cubic (a = -1/2) in fp64 and round the weights to fixed point: Pillow to 22 fraction bits
(`Resample.c`), torch to as many as fit 16-bit integers (`UpSampleKernel.cpp`), so that their bytes differ a little.
"""

import functools
import math
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

_PILLOW_BITS = 32 - 8 - 2
_VERTICAL_FIRST_SINCE = 13  # Pillow's major version; older ones always resize the width first


Size = tuple[int, int]


class Weights(NamedTuple):
    """Weights of one axis, as in `kernels.patches.Taps`: `[n]` int32, `[taps, n]` int32, bits of the fraction."""

    first: np.ndarray
    weights: np.ndarray
    bits: int


class Resizing(NamedTuple):
    """How a backend resizes.

    Attributes:
        weights: (input size, output size) -> Weights; None where the axis is copied.
        down_first: ((height, width), new (height, width)) -> whether the height is resized first.
    """

    weights: Callable[[int, int], Weights | None]
    down_first: Callable[[Size, Size], bool]


def _cubic(x: np.ndarray) -> np.ndarray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _normalized(size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """(first `[out]`, weights `[taps, out]` fp64 that sum to 1)."""
    scale = size / out
    widen = max(scale, 1.0)
    support = 2.0 * widen
    center = (np.arange(out) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    used = np.minimum((center + support + 0.5).astype(np.int64), size) - first
    t = np.arange(math.ceil(support) * 2 + 1)[:, None]
    weights = np.where(t < used, _cubic((t + first - center + 0.5) * (1.0 / widen)), 0.0)
    total = np.zeros(out)
    for row in weights:  # in the order of Pillow and torch: the last bit depends on it
        total = total + row
    return first, weights / np.where(total == 0, 1.0, total)


def _fixed(first: np.ndarray, weights: np.ndarray, bits: int) -> Weights:
    rounded = np.trunc(weights * (1 << bits) + np.where(weights < 0, -0.5, 0.5))
    return Weights(first.astype(np.int32), rounded.astype(np.int32), bits)


@functools.lru_cache(maxsize=1024)
def pillow_weights(size: int, out: int) -> Weights | None:
    """Weights of `Image.resize` with `BICUBIC`, for bytes; None where the size stays and the axis is copied."""
    return None if size == out else _fixed(*_normalized(size, out), _PILLOW_BITS)


@functools.lru_cache(maxsize=1024)
def torch_weights(size: int, out: int) -> Weights | None:
    """Weights of `interpolate(mode="bicubic", antialias=True)`, which torchvision's `resize` calls, for CPU bytes."""
    if size == out:
        return None
    first, weights = _normalized(size, out)
    bits, largest = 0, weights.max()
    while bits < _PILLOW_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return _fixed(first, weights, bits)


@functools.lru_cache(maxsize=1024)
def _pillow_down_first(size: Size, new: Size) -> bool:
    if int(version("pillow").split(".")[0]) < _VERTICAL_FIRST_SINCE:
        return False
    return new[0] < size[0] and size[0] - new[0] > 2 * (size[1] - new[1])


PILLOW = Resizing(pillow_weights, _pillow_down_first)
TORCH = Resizing(torch_weights, lambda size, new: False)
