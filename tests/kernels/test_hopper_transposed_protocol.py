"""Barriers and places of the transposed GEMM under random interleaving: no deadlock, no stage read before it is there
or overwritten before it is read, every chunk out once and at a place of its own; and each fault is noticed."""

import random

import pytest

from tests.kernels.barriers import run
from tests.kernels.hopper_transposed_protocol import Cta, Faults, Shape

SHAPES = [
    Shape(consumers, stages, steps, chunks, brings, norm)
    for consumers in (1, 2, 4)
    for stages, steps in ((2, 2), (3, 7), (4, 4), (4, 9))
    for chunks in (1, 2, 3)
    for brings, norm in ((False, False), (True, False), (False, True), (True, True))
    if chunks <= stages
]


def go(shape: Shape, seed: int, faults: Faults = Faults()) -> Cta:  # noqa: B008  # frozen
    cta = Cta(shape, faults)
    run(cta.processes(), cta.engine, random.Random(seed))
    return cta


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_chunk_comes_out_once(shape: Shape) -> None:
    expected = [(c, h) for c in range(shape.consumers) for h in range(shape.chunks)]
    for seed in range(12):
        assert sorted(go(shape, seed).done) == expected


@pytest.mark.parametrize(
    "shape, faults",
    [
        (Shape(2, 2, 7, 1, False), Faults(early_release=True)),
        (Shape(2, 3, 5, 2, True), Faults(no_wait_for_empty=True)),
        (Shape(1, 3, 5, 2, True), Faults(no_wait_for_brought=True)),
        (Shape(1, 3, 5, 3, False), Faults(one_place=True)),
        (Shape(2, 3, 3, 1, False, norm=True), Faults(no_wait_for_merged=True)),
        (Shape(3, 3, 3, 1, False, norm=True), Faults(merged_first=True)),
    ],
    ids=str,
)
def test_a_fault_is_noticed(shape: Shape, faults: Faults) -> None:
    with pytest.raises(AssertionError):
        for seed in range(200):
            go(shape, seed, faults)
