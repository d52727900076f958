"""A signal's handler that uses a tower or its handle, wherever a call of its thread is."""

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.checks import fallback
from tests.support.graphs_on_cpu import GRID, LIMITS
from tests.support.towers import Call, assert_same, copy_of, vision_tower
from tests.unit.graphs.stand_in import graphs_on_cpu

FILES = (
    *("fused_encoder.py", "prepared_tower.py", "weight_cache.py", "fusedvit/stats.py"),
    *("graphs/manager.py", "captured_encoder.py"),
)


@pytest.fixture
def answers() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Sets what SIGUSR1 does."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda act: (signal.signal(signal.SIGUSR1, lambda *_: act()), None)[1]
    signal.signal(signal.SIGUSR1, before)


def signalled(act: Callable[[], Any], at: int) -> tuple[Any, str]:
    """What `act` returns, and where the signal came, at place number `at` of `FILES`; "" if there are fewer."""
    left, where = at, ""

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal left, where
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(FILES):
            left -= 1
            if left == 0:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

    sys.setprofile(note)
    try:
        return act(), where
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("what", ["release", "call", "stats"])
@pytest.mark.parametrize("first", [True, False], ids=["first call", "replay"])
def test_the_call_answers(what: str, first: bool, answers: Callable[[Callable[[], object]], None]) -> None:
    base = vision_tower(depth=1, deepstack_visual_indexes=[0])
    call = Call.of(base, GRID)
    expected, at, where = call.run(base), 0, "somewhere"
    while where:
        at += 1
        tower, found = copy_of(base), []
        handle = fusedvit.fuse(tower)
        acts = {"release": handle.release, "call": lambda tower=tower: call.run(tower), "stats": handle.stats}
        answers(lambda act=acts[what], found=found: found.append(act()))
        with torch.inference_mode(), graphs_on_cpu(handle, LIMITS):
            if not first:
                call.run(tower)
            before = handle.stats()
            rows, where = signalled(lambda tower=tower: call.run(tower), at)
            assert_same(rows, expected)
            after = handle.stats()
            assert after["calls"] - before["calls"] == 1 + (what == "call" and bool(where)), where
            assert after["original"].keys() <= {fallback.INTERRUPTING}, where
            for _ in range(2):
                assert_same(call.run(tower), expected)
            assert handle.stats()["fused"] == after["fused"] + 2, where
        if what == "call" and found:
            assert_same(found[0], expected)


def test_memory_is_given_back_at_the_end_of_the_call(answers: Callable[[Callable[[], object]], None]) -> None:
    tower = vision_tower()
    call = Call.of(tower, GRID)
    handle = fusedvit.fuse(tower)
    call.run(tower)
    assert handle.stats()["weights_mib"] > 0
    answers(handle.release)
    assert signalled(lambda: call.run(tower), 5)[1]
    assert handle.stats()["weights_mib"] == 0


def test_a_child_knows_of_no_call_of_its_parent() -> None:
    handle = fusedvit.fuse(vision_tower())
    handle._calling.add(12345)
    handle._renew_locks()
    assert not handle._calling
