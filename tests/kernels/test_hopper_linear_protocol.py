"""Barriers, staging buffers and counters of the Hopper GEMM under random interleaving: no deadlock, no stage read
before it is there or overwritten before it is read, every chunk out once; and each fault is noticed."""

import random

import pytest

from tests.kernels.barriers import CopyEngine, run
from tests.kernels.hopper_linear_protocol import Chain, Cta, Faults, Meeting, Shape

SHAPES = [
    Shape(consumers, stages, steps, tiles, brings=brings)
    for consumers in (1, 2, 3)
    for stages, steps in ((2, 2), (3, 7), (4, 4), (8, 3))  # a tile longer than the ring, as long, shorter
    for tiles in (0, 1, 5)
    for brings in (False, True)
] + [Shape(1, 4, 6, 5, dwell=40, brings=True), Shape(3, 3, 5, 4, dwell=40, brings=True)]


def go(shape: Shape, seed: int, faults: Faults = Faults()) -> Cta:  # noqa: B008  # frozen
    cta = Cta(shape, faults)
    run(cta.processes(), cta.engine, random.Random(seed))
    return cta


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_chunk_comes_out_once(shape: Shape) -> None:
    places = range(shape.consumers)
    expected = [(i, place, j) for i in range(shape.tiles) for place in places for j in range(shape.chunks)]
    for seed in range(12):
        assert sorted(go(shape, seed).done) == expected


@pytest.mark.parametrize(
    "shape, faults",
    [
        (Shape(1, 2, 4, 6), Faults(no_turns=True)),
        (Shape(2, 2, 7, 3), Faults(early_release=True)),
        (Shape(2, 3, 4, 4, brings=True, dwell=40), Faults(no_store_wait=True)),
        (Shape(1, 3, 2, 8, dwell=40), Faults(no_store_wait=True)),
    ],
    ids=str,
)
def test_a_fault_is_noticed(shape: Shape, faults: Faults) -> None:
    with pytest.raises(AssertionError):
        for seed in range(200):
            go(shape, seed, faults)


@pytest.mark.parametrize("splits", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("first", [0, 2**31 - 8, -8])  # before the count wraps around, and before it passes zero
def test_parts_take_their_own_launch_s_sums(splits: int, first: int) -> None:
    for seed in range(20):
        run(Meeting(splits, launches=6, counter=first).processes(), CopyEngine(), random.Random(seed))


def test_parts_that_do_not_wait_are_noticed() -> None:
    with pytest.raises(AssertionError, match="takes a sum of launch"):
        for seed in range(50):
            run(Meeting(4, launches=4, waits=False).processes(), CopyEngine(), random.Random(seed))


@pytest.mark.parametrize("sms, tiles, splits", [(6, 3, 2), (7, 2, 3), (4, 5, 4), (3, 7, 1)])
def test_launches_that_begin_early_end(sms: int, tiles: int, splits: int) -> None:
    """Whatever fits beside each other, and more CTAs than SMs, too."""
    for seed in range(50):
        run(Chain(sms, tiles, splits, launches=4).processes(), CopyEngine(), random.Random(seed))


def test_launches_that_begin_too_early_are_noticed() -> None:
    with pytest.raises(AssertionError, match="deadlock"):
        for seed in range(100):
            run(Chain(4, 3, 2, launches=3, hasty=True).processes(), CopyEngine(), random.Random(seed))
