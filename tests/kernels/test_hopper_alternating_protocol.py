"""Barriers and places of the alternating GEMM under random interleaving: no deadlock, no stage read before it is there
or overwritten before it is read, every chunk out once; and each fault is noticed."""

import random

import pytest

from tests.kernels.barriers import run
from tests.kernels.hopper_alternating_protocol import Cta, Faults, Shape

SHAPES = [
    Shape(stages, steps, tiles, chunks, brings)
    for stages, steps in ((2, 2), (3, 7), (4, 4), (4, 9))
    for tiles in (0, 1, 2, 5)
    for chunks in (1, 2)
    for brings in (False, True)
] + [Shape(4, 6, 5, 2, True, dwell=40), Shape(3, 5, 6, 2, dwell=40)]


def go(shape: Shape, seed: int, faults: Faults = Faults()) -> Cta:  # noqa: B008  # frozen
    cta = Cta(shape, faults)
    run(cta.processes(), cta.engine, random.Random(seed))
    return cta


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_chunk_comes_out_once(shape: Shape) -> None:
    expected = [(i, h) for i in range(shape.tiles) for h in range(shape.chunks)]
    for seed in range(12):
        assert sorted(go(shape, seed).done) == expected


@pytest.mark.parametrize(
    "shape, faults",
    [
        (Shape(2, 4, 6, 1), Faults(no_turns=True)),
        (Shape(3, 5, 6, 1), Faults(early_release=True)),
        (Shape(3, 4, 6, 2, dwell=40), Faults(no_wait_for_room=True)),
        (Shape(3, 4, 6, 2, True, dwell=40), Faults(no_wait_for_room=True)),
        (Shape(3, 4, 4, 2, True), Faults(no_wait_for_brought=True)),
    ],
    ids=str,
)
def test_a_fault_is_noticed(shape: Shape, faults: Faults) -> None:
    with pytest.raises(AssertionError):
        for seed in range(300):
            go(shape, seed, faults)
