"""What the fingerprint reads of every parameter of every released tower: any regular pattern of 1 % meets a sample.

No parameter is allocated: a pattern goes unseen where it holds none of the elements that are read.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fusedvit.bench.towers import FAMILIES, GEOMETRIES, class_of, known
from fusedvit.families.registry import family_of
from fusedvit.kernels.fingerprint import GROUP
from fusedvit.kernels.reference.fingerprint import sampled_groups
from fusedvit.model.param_names import parameter_shapes
from fusedvit.model.spec import VisionSpec

INSTALLED = [name for name in FAMILIES if name in known()]
Shape = tuple[int, ...]
MOST = 100  # one of so many is 1 %


@functools.cache
def spec_of(name: str) -> tuple[VisionSpec, frozenset[Shape]]:
    geometry = GEOMETRIES[name]
    family = family_of(geometry.class_name)
    assert family is not None
    spec = family.spec_from_config(class_of(geometry).config_class(**geometry.numbers))
    return spec, frozenset(shape for _, shape in parameter_shapes(family.names, spec))


@functools.cache
def elements_read(numel: int, size: int) -> np.ndarray:
    """Indexes of the elements of which the fingerprint reads a part, `size` bytes each."""
    words = numel * size // 2
    read = (sampled_groups(words // GROUP)[:, None] * GROUP + torch.arange(GROUP)).flatten()
    rest = torch.arange(words // GROUP * GROUP, words)
    return np.unique(torch.cat([read, rest]).numpy() * 2 // size)


def rows_and_columns(shape: Shape, size: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    columns = math.prod(shape[1:]) if len(shape) > 1 else shape[0]
    read = elements_read(math.prod(shape), size)
    return read // columns, read % columns, math.prod(shape) // columns, columns


def bands_unseen(read: np.ndarray, length: int) -> bool:
    """Whether 1 % of `length` neighbours, at least one, may lie between two that are read."""
    edges = np.concatenate([[-1], np.unique(read), [length]])
    return int(np.diff(edges).max()) - 1 >= max(1, math.ceil(length / 100)) and length > len(np.unique(read))


def steps_unseen(read: np.ndarray, length: int) -> list[tuple[int, int]]:
    """(step, phase) of every k-th of `length`, k up to 100, that holds nothing that is read."""
    found = []
    for step in range(2, MOST + 1):
        seen = np.bincount(read % step, minlength=step)
        found += [(step, int(phase)) for phase in np.flatnonzero(seen == 0) if phase < length]
    return found


CASES = sorted({(shape, size) for name in INSTALLED for shape in spec_of(name)[1] for size in (2, 4)})


@pytest.mark.parametrize("shape, size", CASES, ids=str)
def test_regular_patterns(shape: Shape, size: int) -> None:
    rows, columns, height, width = rows_and_columns(shape, size)
    flat = rows * width + columns
    assert not bands_unseen(flat, height * width), "neighbours in memory"
    assert steps_unseen(flat, height * width) == [], "strides"
    assert not bands_unseen(columns, width) and steps_unseen(columns, width) == [], "columns"
    if height > 1:
        assert not bands_unseen(rows, height) and steps_unseen(rows, height) == [], "rows"
        for name, line in {
            "diagonals": rows - columns,
            "antidiagonals": rows + columns,
            "slanted": 3 * rows + columns,
        }.items():
            assert steps_unseen(line % (1 << 40) if line.min() >= 0 else line + width * MOST, height + width) == [], (
                name
            )


def blocks(height: int, width: int, count: int = 400) -> Iterator[tuple[slice, slice]]:
    """Rectangles of 1 % at random, from thin to square."""
    draw = np.random.default_rng(height * 7 + width)
    for _ in range(count):
        tall = min(height, max(1, round(height * 10 ** draw.uniform(-2, 0))))
        wide = min(width, math.ceil(0.01 * height * width / tall))
        top, left = draw.integers(height - tall + 1), draw.integers(width - wide + 1)
        if tall * wide >= 0.01 * height * width:
            yield slice(top, top + tall), slice(left, left + wide)


@pytest.mark.parametrize("shape, size", [case for case in CASES if len(case[0]) > 1], ids=str)
def test_blocks_and_random_elements(shape: Shape, size: int) -> None:
    rows, columns, height, width = rows_and_columns(shape, size)
    for tall, wide in blocks(height, width):
        inside = (rows >= tall.start) & (rows < tall.stop) & (columns >= wide.start) & (columns < wide.stop)
        assert inside.any(), (tall, wide)
    draw = np.random.default_rng(len(rows))
    assert all((draw.random(len(rows)) < 0.01).any() for _ in range(200))


@pytest.mark.parametrize("name", INSTALLED)
def test_each_head(name: str) -> None:
    spec = spec_of(name)[0]
    d, kv = spec.head_dim, spec.kv_heads or spec.num_heads
    heads = spec.num_heads + 2 * kv
    for size in (2, 4):
        rows, _, height, _ = rows_and_columns((heads * d, spec.hidden_size), size)
        assert set(rows // d) == set(range(heads)) and height == heads * d
        _, columns, _, _ = rows_and_columns((spec.hidden_size, spec.num_heads * d), size)
        assert set(columns // d) == set(range(spec.num_heads))
