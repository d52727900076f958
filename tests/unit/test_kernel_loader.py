"""Which runs have their kernels: asked for by calls, compiled elsewhere, ready from then on."""

import itertools
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton

from fusedvit import fuse, prepared_tower
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.errors import WeightsReleased
from fusedvit.kernels.launch import KernelFailed, from_cache
from fusedvit.prepared_tower import PreparedTower
from fusedvit.runtime import compile_service, kernel_loader
from fusedvit.runtime.kernel_loader import AROUND, ASKED_FOR, KernelLoader, KernelsNotReady, Run, Stage
from tests.support.fake_compiler import FakeCompiler
from tests.support.towers import pixels_for, vision_tower
from tests.support.waiting import until

KINDS = (0,)
LADDER = (64, 128, 256, 512, 1024)


class Weights:
    released = False

    def get(self) -> Any:
        if self.released:
            raise WeightsReleased
        return "weights"


def graph(budget: int) -> Run:
    return Run(KINDS, graph_budget=budget)


def kernels_of(run: Run) -> list[str]:
    """One that every run shares, one that two neighbours share, one of its own."""
    if run == AROUND:
        return ["around"]
    tokens = run.graph_budget or run.eager_patch_tokens
    return ["around", f"pair {tokens.bit_length() // 2}", f"own {tokens} {run.graph_budget > 0}"]


@pytest.fixture
def compiler() -> Iterator[FakeCompiler]:
    fake = FakeCompiler(kernels_of)
    target = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=90)))
    with (
        mock.patch("fusedvit.kernels.launch.is_cached", fake.is_cached),
        mock.patch("fusedvit.runtime.kernel_loader.driver", target),
    ):
        yield fake
        fake.stop()  # and its threads


def loader_on(compiler: Any, weights: Weights | None = None) -> tuple[KernelLoader, Weights]:
    """And its weights, which it does not keep."""
    weights = weights or Weights()
    return KernelLoader(compiler.launch, weights.get, LADDER, compiler), weights


def refused(loader: KernelLoader, *runs: Run) -> str:
    with pytest.raises(KernelsNotReady) as raised:
        loader.need(runs, wait=False)
    return str(raised.value)


def call(loader: KernelLoader, compiler: FakeCompiler, run: Run) -> None:
    """What a call does."""
    loader.need([run], wait=False)
    with loader.guard([run]):
        compiler.launch(run, None)


def test_a_run_is_ready_once_its_kernels_are_compiled(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    assert refused(loader, graph(256)) == ""
    until(lambda: len(compiler.names()) >= 3)
    assert compiler.names()[:3] == kernels_of(graph(256)), "what a call asks for goes first"
    assert refused(loader, graph(256)) == ""
    compiler.finish(kernels_of(graph(256)))
    until(lambda: graph(256) in loader.ready)
    loader.need([graph(256)], wait=False)
    assert all(not request.urgent and request.arch == 90 for request in compiler.sent)


def test_look_ups_wait_for_what_keys_begin_with(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the refused call does not."""
    waits, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        assert go_on.wait(10)

    monkeypatch.setattr(compiler, "wait_for_hash", wait)
    loader, _weights = loader_on(compiler)
    refused(loader, graph(256))
    assert waits.wait(10) and not compiler.names()
    go_on.set()
    until(lambda: len(compiler.names()) >= 3)


def test_a_run_whose_kernels_are_in_the_cache_is_refused_to_nobody(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    compiler.cached.update(kernels_of(graph(256)))
    call(loader, compiler, graph(256))
    loader.need([graph(256)], wait=False)
    assert loader.ready == {AROUND, graph(256)} and not compiler.sent and loader._thread is None


@pytest.mark.parametrize("missing", ["around", "pair 4", "own 256 True"])
def test_a_call_that_misses_a_kernel_in_the_cache_is_refused(compiler: FakeCompiler, missing: str) -> None:
    """Whichever it is, all that the run lacks is sent at once, and the ladder behind it."""
    loader, _weights = loader_on(compiler)
    compiler.cached.update({"of another tower", *kernels_of(graph(256))} - {missing, "own 256 True"})
    with pytest.raises(KernelsNotReady):
        call(loader, compiler, graph(256))
    until(lambda: "own 1024 True" in compiler.names())
    assert set(compiler.names()[:2]) >= {missing, "own 256 True"} and not compiler.sent[0].urgent
    refused(loader, graph(256))  # which is not tried again before the thread says so
    compiler.finish_all()
    until(lambda: graph(256) in loader.ready)


def test_while_anything_is_compiled_calls_do_not_try(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    refused(loader, graph(256))
    until(lambda: len(compiler.sent) == 1 + 3 + len(LADDER))
    compiler.finish(kernels_of(graph(64)))
    other, _ = loader_on(compiler)
    refused(other, graph(64))


@pytest.mark.parametrize(("held", "early"), [((), True), (("a kernel",), False)])
def test_the_program_starts_before_anything_is_known_of_an_empty_cache(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[str, ...], early: bool
) -> None:
    for name in held:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    known, weights = threading.Event(), Weights()
    loader = KernelLoader(lambda run, _: (known.wait(5.0), compiler.launch(run, _)), weights.get, LADDER, compiler)
    refused(loader, graph(256))
    assert (compiler._process is not None) is early and not compiler.sent
    known.set()
    until(lambda: compiler._process is not None and "own 256 True" in compiler.names())
    compiler.finish_all()
    compiler.at_once = True
    until(lambda: compiler.users == 0)
    assert compiler._process is None, "nobody waits for it"


def test_the_ladder_follows_by_likelihood_and_the_thread_ends_with_it(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    refused(loader, graph(512))
    until(lambda: len(compiler.sent) == 1 + 3 + len(LADDER))  # shared, pairs, own ones; each once
    orders = {job.name: request.order for request in compiler.sent for job in request.jobs.values()}
    own = sorted((name for name in orders if name.startswith("own")), key=orders.__getitem__)
    assert own == [f"own {budget} True" for budget in (512, 256, 1024, 128, 64)]
    compiler.finish_all()
    until(lambda: loader.ready == {graph(budget) for budget in LADDER})
    until(lambda: compiler.users == 0)
    assert len(compiler.names()) == len(set(compiler.names()))


def test_a_later_call_goes_before_the_ladder(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    refused(loader, graph(64))
    until(lambda: len(compiler.sent) == 1 + 3 + len(LADDER))
    refused(loader, graph(1024))
    until(lambda: "own 1024 True" in [job.name for request in compiler.sent[9:] for job in request.jobs.values()])
    orders = [r.order for r in compiler.sent for job in r.jobs.values() if job.name == "own 1024 True"]
    others = [r.order for r in compiler.sent for job in r.jobs.values() if job.name == "own 512 True"]
    assert orders[-1] < min(others) < orders[0]


def test_eager_runs_and_other_kinds_of_pixels_are_runs_of_their_own(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    compiler.at_once = True
    loader.need([graph(256)], wait=True)
    others = {Run(KINDS, eager_patch_tokens=256), Run((0, 1), graph_budget=512)}
    for run in others:
        with pytest.raises(KernelsNotReady):
            call(loader, compiler, run)
    until(lambda: others <= loader.ready)


def test_who_waits_gets_every_kernel_at_once(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    waiter = threading.Thread(target=loader.need, args=([graph(64), graph(1024)], True))
    waiter.start()
    until(lambda: {*kernels_of(graph(64)), *kernels_of(graph(1024))} <= set(compiler.names()))
    assert waiter.is_alive() and all(request.urgent for request in compiler.sent)
    compiler.finish_all()
    waiter.join(5)
    assert not waiter.is_alive() and loader.ready == {graph(64), graph(1024)}


def test_a_kernel_that_the_compiler_refuses_fails_where_it_is_launched(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    refused(loader, graph(64))
    until(lambda: "own 64 True" in compiler.names())
    compiler.fail("own 64 True", "CompilationError: no")
    compiler.finish(["around", "pair 3"])
    until(lambda: graph(64) in loader.ready)
    loader.need([graph(64)], wait=False)
    with pytest.raises(KernelFailed, match="CompilationError: no"), loader.guard([graph(64)]):
        compiler.launch(graph(64), None)


def test_a_launch_that_nobody_foresaw_compiles_nothing_and_is_sent_for(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    compiler.at_once = True
    loader.need([graph(64)], wait=True)
    compiler.at_once = False
    unforeseen = Run((7,), graph_budget=64)
    with pytest.raises(KernelsNotReady), loader.guard([graph(64)]):
        compiler.launches = lambda run: ["of an odd address"]
        compiler.launch(unforeseen, None)
    compiler.launches = kernels_of
    assert compiler.names()[-1] == "of an odd address"
    refused(loader, graph(64))
    compiler.finish_all()
    until(lambda: graph(64) in loader.ready)


class SlowKernel:
    """Notes the seconds that each load takes."""

    def __init__(self, loaded: list[float]) -> None:
        self.loaded = loaded

    @property
    def run(self) -> None:
        self.loaded.append(0.75 * kernel_loader.LOADING)


def test_calls_load_kernels_for_a_short_time_each(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    compiler.at_once, loaded = True, list[float]()

    with mock.patch("tests.support.fake_compiler.KERNEL", SlowKernel(loaded)):
        refused(loader, graph(64))
        until(lambda: graph(64) in loader.ready)
    with mock.patch("fusedvit.runtime.kernel_loader.time.perf_counter", lambda: sum(loaded)):
        assert refused(loader, graph(64)) == "" and len(loaded) == 2
        assert refused(loader, graph(64)) == "" and len(loaded) == 3  # and what follows is left to the next call
        loader.need([graph(64)], wait=False)
    assert len(loaded) == 3
    with mock.patch("fusedvit.runtime.kernel_loader.time.perf_counter", itertools.count().__next__):  # a slow thread
        loader.need([graph(64)], wait=False)  # has nothing left to load


def test_calls_of_other_sizes_load_kernels_that_a_ready_run_waits_for(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    loaded = list[float]()

    with mock.patch("tests.support.fake_compiler.KERNEL", SlowKernel(loaded)):
        refused(loader, graph(64))
        compiler.finish(kernels_of(graph(64)))
        until(lambda: graph(64) in loader.ready)
    with mock.patch("fusedvit.runtime.kernel_loader.time.perf_counter", lambda: sum(loaded)):
        refused(loader, graph(1024))
        assert len(loaded) == 2
        refused(loader, graph(1024))
        assert len(loaded) == 3
        loader.need([graph(64)], wait=False)
    assert len(loaded) == 3


def test_a_run_that_nobody_was_refused_loads_all_at_once(compiler: FakeCompiler) -> None:
    """The original code has yet to load its own kernels for this size, too."""
    loader, _weights = loader_on(compiler)
    compiler.at_once = True
    refused(loader, graph(64))
    until(lambda: loader.ready == {graph(budget) for budget in LADDER})
    with mock.patch("fusedvit.runtime.kernel_loader.time.perf_counter", itertools.count().__next__):
        refused(loader, graph(64))
        loader.need([graph(128)], wait=False)


def test_what_a_run_launches_is_listed_once(compiler: FakeCompiler) -> None:
    """Not again once its kernels are compiled: it is Python's work, beside calls."""
    listed: list[Run] = []
    launch = compiler.launch

    def lists(run: Run, weights: Any) -> None:
        listed.append(run)
        launch(run, weights)

    compiler.launch = lists  # type: ignore[method-assign]
    loader, _weights = loader_on(compiler)
    refused(loader, graph(256))
    until(lambda: len(compiler.sent) == 1 + 3 + len(LADDER))
    compiler.finish_all()
    until(lambda: loader.ready == {graph(budget) for budget in LADDER})
    assert sorted(listed) == [graph(budget) for budget in LADDER]


def test_the_thread_rests_longer_than_it_works(compiler: FakeCompiler) -> None:
    """Twice as long for what calls have asked for, four times for the ladder; 0.1 s at most. Not while somebody waits,
    who may wait for the thread."""
    now, rests = [0.0], list[float]()

    def works(run: Run, weights: Any) -> None:
        mode = from_cache()
        assert mode is not None
        for seconds in (0.0005, 0.0005, 0.004, 0.2):
            now[0] += seconds
            mode.pause()

    compiler.launch = works  # type: ignore[method-assign]
    loader, _weights = loader_on(compiler)
    ending = SimpleNamespace(wait=rests.append)
    with (
        mock.patch.object(compiler, "ending", ending),
        mock.patch("fusedvit.runtime.kernel_loader.time.thread_time", lambda: now[0]),
    ):
        loader._find_kernels_of(graph(32), 1.0, patient=True)
        loader._find_kernels_of(graph(64), 2.0, patient=True)
        loader._find_kernels_of(graph(128), ASKED_FOR, patient=True)
        loader._find_kernels_of(graph(256), 1.0, patient=False)
        with loader._hurry():
            loader._find_kernels_of(graph(512), 1.0, patient=True)
    assert rests == pytest.approx([0.002, 0.008, 0.1, 0.002, 0.008, 0.1, 0.004, 0.016, 0.1])


def test_garbage_is_collected_once_in_the_first_call_that_waits(compiler: FakeCompiler) -> None:
    kernel_loader.collect_garbage.cache_clear()
    loader, _weights = loader_on(compiler)
    with mock.patch("gc.collect") as collect:
        refused(loader, graph(64))
        assert collect.call_count == 1
        refused(loader, graph(64))
        assert collect.call_count == 1


def test_where_nothing_can_be_compiled_calls_are_told_and_waiting_ends(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    refused(loader, graph(64))
    compiler.give_up("OSError: no room")
    until(lambda: compiler.users == 0)
    assert refused(loader, graph(64)) == "OSError: no room"
    loader.need([graph(64)], wait=True)  # its launches compile
    assert graph(64) not in loader.ready


def test_no_room_for_a_thread(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls are told so, and it is tried again by one that comes later."""
    loader, _weights = loader_on(compiler)
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        for _ in range(2):
            assert refused(loader, graph(64)) == "RuntimeError: can't start new thread"
        monkeypatch.setattr(compile_service, "RETRY", 0.0)
        for _ in range(2):
            assert refused(loader, graph(64)) == "RuntimeError: can't start new thread"
    assert len(caplog.records) == 1 and "for now" in caplog.text
    compiler._again = 0.0
    assert refused(loader, graph(64)) == ""
    until(lambda: "own 64 True" in compiler.names())
    compiler.finish_all()
    until(lambda: graph(64) in loader.ready)


def test_it_keeps_no_weights_and_waits_for_released_ones(compiler: FakeCompiler) -> None:
    weights = Weights()
    loader, _ = loader_on(compiler, weights)
    weights.released = True
    refused(loader, graph(64))
    until(lambda: compiler.users == 0)
    assert not compiler.sent
    weights.released = False
    refused(loader, graph(64))
    until(lambda: "own 64 True" in compiler.names())
    del weights, _
    until(lambda: compiler.users == 0)


def test_who_waits_goes_on_where_the_weights_are_given_back(compiler: FakeCompiler) -> None:
    """Its launches say that there are none; nobody else might prepare any."""
    loader, weights = loader_on(compiler)
    weights.released = True
    waiter = threading.Thread(target=loader.need, args=([graph(64)], True), daemon=True)
    waiter.start()
    waiter.join(5)
    ended = not waiter.is_alive()
    weights.released, compiler.at_once = False, True
    waiter.join(5)
    assert ended and compiler.users == 0


def test_what_is_cancelled_is_sent_again_when_it_is_needed(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    refused(loader, graph(64))
    until(lambda: "own 64 True" in compiler.names())
    loader.cancel()
    until(lambda: compiler.users == 0)
    sent = len(compiler.sent)
    other, _weights = loader_on(compiler)
    refused(other, graph(64))
    until(lambda: "own 64 True" in [job.name for r in compiler.sent[sent:] for job in r.jobs.values()])
    compiler.finish_all()
    until(lambda: graph(64) in other.ready)


def test_a_run_is_in_one_stage_at_a_time(compiler: FakeCompiler) -> None:
    """And passes from one to the next as the module says."""
    loader, _weights = loader_on(compiler)

    def stages() -> list[Stage]:
        return [loader._state(graph(budget)).stage for budget in (256, 64)]

    assert stages() == [Stage.NEW, Stage.NEW]
    refused(loader, graph(256))
    assert stages() == [Stage.WANTED, Stage.WANTED]
    loader.cancel()
    assert stages() == [Stage.NEW, Stage.NEW]
    until(lambda: compiler.users == 0)
    compiler.sent.clear()
    refused(loader, graph(256))
    until(lambda: "own 256 True" in compiler.names())
    compiler.finish(kernels_of(graph(256)))
    until(lambda: stages() == [Stage.READY, Stage.WANTED])
    compiler.cached.update(kernels_of(graph(64)))
    with loader.cached([graph(64)]):  # which the thread need not try any more
        compiler.launch(graph(64), None)
    assert stages() == [Stage.READY, Stage.READY]
    compiler.launches = lambda run: ["of an odd address"]
    with pytest.raises(KernelsNotReady), loader.guard([graph(256)]):
        compiler.launch(graph(256), None)
    assert stages() == [Stage.WANTED, Stage.READY]
    orders = [state.order for state in loader._states.values() if state.stage is not Stage.WANTED]
    assert set(orders) == {math.inf}


def test_a_call_whose_runs_are_ready_takes_no_lock(compiler: FakeCompiler) -> None:
    """Which the thread may hold while it starts the program."""
    loader, _weights = loader_on(compiler)
    compiler.at_once = True
    refused(loader, graph(64))
    until(lambda: graph(64) in loader.ready and compiler.users == 0)
    loader.need([graph(64)], wait=False)
    caller = threading.Thread(target=call, args=(loader, compiler, graph(64)), daemon=True)
    with compiler.changed:
        caller.start()
        caller.join(5)
        assert not caller.is_alive() and loader.ready


def test_a_fork_does_not_wait_for_threads_of_its_parent(compiler: FakeCompiler) -> None:
    """One of which may hold the lock, as here: the child would never end, nor would whoever waits for it."""
    loader, _weights = loader_on(compiler)
    with compiler.changed, mock.patch("os.getpid", return_value=os.getpid() + 1):
        child = threading.Thread(target=loader.cancel, daemon=True)
        child.start()
        child.join(5)
        assert not child.is_alive()


def test_the_end_of_the_process_ends_the_thread(compiler: FakeCompiler) -> None:
    loader, _weights = loader_on(compiler)
    refused(loader, graph(64))
    until(lambda: compiler.users == 1)
    compiler.ending.set()
    with compiler.changed:
        compiler.changed.notify_all()
    until(lambda: compiler.users == 0)


def test_compilers_start_before_the_first_weights_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where the tower cannot run fused, where a runtime knows what is missing, or on a CPU."""
    done: list[str] = []
    service = SimpleNamespace(start_early=lambda: done.append("start"))
    monkeypatch.setattr(prepared_tower, "service_of", lambda process: service)
    monkeypatch.setattr(prepared_tower.compiled_kernels, "enter_kernels", lambda device: done.append("enter"))
    expect, prepare = PreparedTower.expect_kernels, CheckedTower.prepare
    monkeypatch.setattr(PreparedTower, "expect_kernels", lambda self, device: expect(self, torch.device("cuda")))
    monkeypatch.setattr(CheckedTower, "prepare", lambda *given: done.append("prepare") or prepare(*given))
    tower = vision_tower()
    handle = fuse(tower)
    hook = tower.blocks[0].register_forward_hook(lambda module, given, out: None)
    with pytest.raises(RuntimeError, match="hook"):
        handle.refresh()
    assert done == []
    hook.remove()
    handle.refresh()
    assert done == ["enter", "start", "prepare"]
    tower(pixels_for(tower, [(1, 4, 4)]), torch.tensor([(1, 4, 4)]))
    handle.refresh()
    expect(fuse(vision_tower()).prepared, torch.device("cpu"))
    assert done.count("start") == 1 and done[-1] == "prepare"
