"""A signal's handler that uses a tower or its handle, wherever a call of its thread is."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

import fusedvit
from fusedvit.checks import fallback
from tests.support.graphs_on_cpu import GRID, LIMITS
from tests.support.places import Places
from tests.support.towers import Call, assert_same, copy_of, fused_tower, vision_tower
from tests.support.waiting import PATIENCE, until
from tests.unit.graphs.stand_in import graphs_on_cpu

FILES = (
    *("fused_encoder.py", "calls/attempts.py", "prepared_tower.py", "weight_cache.py", "fusedvit/stats.py"),
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
    places, where = Places(*FILES), ""

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal where
        if where := places.comes_to(at, frame, event):
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
    tower, handle, call = fused_tower(vision_tower(), GRID)
    call.run(tower)
    assert handle.stats()["weights_mib"] > 0
    answers(handle.release)
    assert signalled(lambda: call.run(tower), 5)[1]
    assert handle.stats()["weights_mib"] == 0


def test_calls_of_other_threads_give_back_nothing_meanwhile() -> None:
    """What a handler asks for is done at the end of its own thread's call."""
    tower, handle, call = fused_tower(vision_tower(), GRID)
    call.run(tower)

    ensure, asked = handle.prepared.ensure_weights, list[int]()

    def with_a_handler(*given: Any) -> Any:
        asked.append(threading.get_ident())
        if len(asked) == 1:  # in the main thread's call
            handle.release()
            other = threading.Thread(target=call.run, args=(tower,))
            other.start()
            other.join()
            assert handle.stats()["weights_mib"] > 0
        return ensure(*given)

    with mock.patch.object(handle.prepared, "ensure_weights", with_a_handler):
        call.run(tower)
    assert len(asked) > 1
    assert handle.stats()["weights_mib"] == 0


def test_a_thread_that_launches_may_ask_for_it_again() -> None:
    """A handler may, while another thread waits."""
    handle = fusedvit.fuse(vision_tower())
    prepared, waits = handle.prepared, threading.Event()

    def wait() -> None:
        waits.set()
        with prepared.nothing_launched():
            pass

    other = threading.Thread(target=wait, daemon=True)
    with prepared.nothing_launched():
        other.start()
        waits.wait(PATIENCE)
        until(lambda: held_by_another(prepared._turn))
        with prepared.nothing_launched():
            pass
        assert prepared._lock._is_owned()  # type: ignore[attr-defined]
    other.join(PATIENCE)
    assert not other.is_alive()


def held_by_another(lock: Any) -> bool:
    free = lock.acquire(blocking=False)
    if free:
        lock.release()
    return not free


def test_a_child_knows_of_no_call_of_its_parent() -> None:
    handle = fusedvit.fuse(vision_tower())
    handle._calling.add(12345)
    handle._renew_locks()
    assert not handle._calling
