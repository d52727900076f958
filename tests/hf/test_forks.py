"""Forks beside threads that call the tower: the child's calls are answered."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit import api
from tests.hf.test_weights import like
from tests.support.towers import GRIDS, Call, copy_of, error_of, fused_tower, tiny_tower
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore")  # newer Pythons warn of forks beside threads
Act = Callable[[], bool]


def answer_of_child(act: Act) -> str:
    """What `act` gives in a forked child: "right", "wrong", or "hung"."""
    pid = os.fork()
    if not pid:
        code = 2
        try:
            code = 0 if act() else 1
        finally:
            os._exit(code)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "right" if status == 0 else "wrong"
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
    """Another thread holds `lock`."""
    has, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            may_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait()
    try:
        yield
    finally:
        may_go.set()
        thread.join()


def same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(error_of(ours[name], t) < 1e-5 for name, t in expected.items())


def test_a_child_fuses_while_its_parent_does() -> None:
    tower = tiny_tower()
    with held(api._turn.lock):
        assert answer_of_child(lambda: fusedvit.fuse(tower).state() == "fused") == "right"


LOCKS: dict[str, Callable[[Any], Any]] = {
    "counters": lambda handle: handle._stats._lock,
    "preparing": lambda handle: handle.prepared._lock,
    "turn": lambda handle: handle.prepared._turn,
}


@pytest.mark.parametrize("copied", [False, True], ids=["fused", "copy"])
@pytest.mark.parametrize("name", LOCKS)
def test_a_child_waits_for_no_thread_of_its_parent(name: str, copied: bool) -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["smallest"])
    fusedvit.fuse(tower)
    tower = copy_of(tower) if copied else tower
    handle = fusedvit.fuse(tower)
    call.run(tower)
    with torch.no_grad():
        tower.merger.linear_fc2.bias.add_(1)  # the child prepares weights
    expected = call.run(fusedvit.unfuse(copy_of(tower)))

    def act() -> bool:
        return same(call.run(tower), expected) and handle.stats()["fused"] == 2

    with held(LOCKS[name](handle)):
        assert answer_of_child(act) == "right"
    assert same(call.run(tower), expected)


def test_weights_half_prepared_are_prepared_again() -> None:
    """A thread of the parent has written prepared copies when the process forks, and nothing else says so."""
    tower, handle, call = fused_tower(tiny_tower(hidden_size=64, intermediate_size=128), GRIDS["smallest"])
    expected = call.run(tower)
    real = handle.weights.read_back

    def unaware(*given: Any) -> Any:  # fingerprints do not see every write
        return real(*given)._replace(unchanged=handle.weights.host_unchanged(), lost=False)

    handle.weights.read_back = unaware  # type: ignore[method-assign]
    copy = handle.weights.get().blocks[0].qkv.weight
    kept = copy.clone()
    with held(handle.prepared._lock):
        copy.copy_(like(copy, 1))
        assert answer_of_child(lambda: same(call.run(tower), expected)) == "right"
        copy.copy_(kept)
    assert same(call.run(tower), expected)


def test_forks_while_threads_call_and_write() -> None:
    tower, _, call = fused_tower(tiny_tower(depth=1, deepstack_visual_indexes=[0]), GRIDS["smallest"])
    expected, stop = call.run(tower), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with torch.no_grad():
                tower.merger.linear_fc2.bias.add_(0.0)
            call.run(tower)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        found = [answer_of_child(lambda: same(call.run(tower), expected)) for _ in range(10)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found == ["right"] * 10
