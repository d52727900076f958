"""The manager's states, on a stand-in for capture: what fails where, and what is left then."""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from fusedvit.graphs.limits import Limits, check_limits
from fusedvit.graphs.manager import GraphManager
from fusedvit.graphs.packing import Batch, Piece

LIMITS = check_limits((4, 16, 64), 4, 8)


class Log:
    """What happened, in order, and where to fail."""

    def __init__(self, fail_at: int | str | None = None, error: type[BaseException] = RuntimeError) -> None:
        """`fail_at`: the number of the event, counted from 1, or the event."""
        self.events: list[str] = []
        self.fail_at = fail_at
        self.error = error

    def add(self, event: str) -> None:
        self.events.append(event)
        if self.fail_at in (event, len(self.events)):
            raise self.error(f"injected at {event}")


class FakeProgram:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.allocated = False

    def allocate(self, limits: Limits) -> None:
        self.log.add("allocate")
        self.allocated = True

    def run(self, budget: int) -> None:
        assert self.allocated, "run before allocate"
        self.log.add(f"run {budget}")

    def rehearse(self, budget: int) -> None:
        self.log.add(f"rehearse {budget}")

    def held_bytes(self) -> int:
        return 100 if self.allocated else 0

    def free(self) -> None:
        self.allocated = False


class FakeGraph:
    def __init__(self, log: Log, run: Callable[[], None]) -> None:
        self.log, self.run, self.alive = log, run, True

    def replay(self) -> None:
        assert self.alive, "replay after reset"
        self.log.add("replay")

    def reset(self) -> None:
        self.alive = False


class FakeCapture:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.graphs: list[FakeGraph] = []
        self.in_use = 0

    def capture(self, run: Callable[[], None]) -> FakeGraph:
        self.log.add("capture")
        run()
        self.graphs.append(FakeGraph(self.log, run))
        return self.graphs[-1]

    def before_use(self) -> None:
        self.in_use += 1

    def after_use(self) -> None:
        self.in_use -= 1

    def wait(self) -> None:
        pass

    def held_bytes(self) -> int:
        return 10 * sum(graph.alive for graph in self.graphs)

    def forget(self) -> None:
        assert not any(graph.alive for graph in self.graphs), "forget before reset"
        self.graphs.clear()

    def give_back(self) -> None:
        assert not self.graphs, "give_back before forget"


def make(log: Log) -> tuple[GraphManager, FakeProgram, FakeCapture]:
    program, capture = FakeProgram(log), FakeCapture(log)
    return GraphManager(LIMITS, program, capture), program, capture


def batch(budget: int) -> Batch:
    return Batch(budget, (Piece(item=0, first_frame=0, frames=1, tokens=3),))


def capture_all(manager: GraphManager) -> None:
    for budget in reversed(LIMITS.token_budgets):
        manager.ready(budget)


def replay(manager: GraphManager, log: Log, budget: int = 16) -> bool:
    return manager.replay(batch(budget), lambda _: log.add("load"), lambda _: log.add("unload"))


def budget_of_a_replay(manager: GraphManager, budget: int) -> int | None:
    """Whose graph takes a batch of `budget`."""
    loaded: list[int] = []
    unloaded: list[int] = []
    assert manager.replay(batch(budget), loaded.append, unloaded.append) == bool(loaded) and loaded == unloaded
    return loaded[0] if loaded else None


def test_a_replay_launches_in_order() -> None:
    log = Log()
    manager, _, _ = make(log)
    capture_all(manager)
    log.events.clear()
    assert replay(manager, log)
    assert log.events == ["load", "replay", "unload"]
    assert manager.stats.as_dict()["replays_by_budget"] == {16: 1}
    assert manager.stats.as_dict()["padding"] == pytest.approx(1 - 3 / 16)


def test_a_budget_is_captured_once_and_lazily() -> None:
    log = Log()
    manager, _, _ = make(log)
    for _ in range(3):
        assert replay(manager, log)
    assert log.events.count("capture") == 1
    assert not any(e == "run 64" for e in log.events)


# allocate, rehearse, capture, run: every step of the first capture
@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [RuntimeError, torch.cuda.OutOfMemoryError])
def test_a_failed_first_capture_leaves_nothing_behind(
    step: int, error: type[RuntimeError], caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(fail_at=step, error=error)
    manager, program, _ = make(log)
    with caplog.at_level(logging.WARNING, "fusedvit"):
        assert not replay(manager, log)
        assert not replay(manager, log)  # not tried again
    assert manager.held_bytes() == 0 and not program.allocated
    assert log.events.count("load") == 0
    assert manager.stats.failures == 1
    assert [r for r in caplog.records if "token_budgets" in r.getMessage() and "MiB" in r.getMessage()]
    assert len(caplog.records) == 1
    log.fail_at = None
    assert replay(manager, log, 64), "another budget still works"
    manager.release()
    assert replay(manager, log), "and this one after release"


def test_budgets_that_failed_before_any_was_captured_are_not_tried_again() -> None:
    log = Log()
    manager, _, _ = make(log)
    for budget in (64, 16):
        log.fail_at = f"run {budget}"
        assert not replay(manager, log, budget)
    log.fail_at = None
    log.events.clear()
    assert not replay(manager, log, 64) and not replay(manager, log, 16)
    assert log.events == [] and manager.stats.failures == 2


def test_a_failure_without_a_message_is_a_failure_like_others(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(RuntimeError):
        def __str__(self) -> str:
            return ""

    manager, _, _ = make(log := Log("run 16", Silent))
    with caplog.at_level(logging.WARNING, "fusedvit"):
        assert not replay(manager, log)
    assert "which runs eagerly: Silent." in caplog.text


def test_a_failed_second_capture_keeps_the_first() -> None:
    log = Log()
    manager, program, _ = make(log)
    assert replay(manager, log, 16)
    log.fail_at = len(log.events) + 1
    assert not replay(manager, log, 64)
    log.fail_at = None
    assert program.allocated
    assert replay(manager, log, 16)


def test_a_failed_budget_gives_its_work_to_the_next_larger_graph(caplog: pytest.LogCaptureFixture) -> None:
    log = Log("run 4")
    manager, _, _ = make(log)
    with caplog.at_level(logging.WARNING, "fusedvit"):
        capture_all(manager)
    assert "token budget 4, whose batches replay that of 16" in caplog.text
    assert not manager.ready(4)
    assert budget_of_a_replay(manager, 4) == 16 and budget_of_a_replay(manager, 64) == 64
    stats = manager.stats.as_dict()
    assert stats["replays_by_budget"] == {16: 1, 64: 1} and stats["budget_tokens"] == 80, "what ran, not what failed"
    assert not manager.replay_if_captured(4, lambda _: log.add("load"), lambda _: log.add("unload"))


def test_what_takes_a_failed_budgets_work_stays_the_same() -> None:
    """Graphs of two budgets may differ in the last bit of an output."""
    log = Log("run 4")
    manager, _, _ = make(log)
    assert budget_of_a_replay(manager, 64) == 64 and budget_of_a_replay(manager, 4) == 64
    assert budget_of_a_replay(manager, 16) == 16 and budget_of_a_replay(manager, 4) == 64
    manager, _, _ = make(log)
    assert budget_of_a_replay(manager, 4) is None
    assert budget_of_a_replay(manager, 64) == 64 and budget_of_a_replay(manager, 4) is None


def test_failures_are_forgotten_with_the_graphs() -> None:
    log = Log("run 4")
    manager, _, _ = make(log)
    for forget in (manager.drop_graphs, manager.release):
        log.fail_at = "run 4"
        assert budget_of_a_replay(manager, 64) == 64 and budget_of_a_replay(manager, 4) == 64
        log.fail_at = None
        forget()
        assert budget_of_a_replay(manager, 4) == 4
        manager.drop_graphs()


@pytest.mark.parametrize("step", ["rehearse 16", "run 16"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, AssertionError])
def test_buffers_are_free_again_whatever_a_rehearsal_raises(step: str, error: type[BaseException]) -> None:
    log = Log(step, error)
    manager, _, capture = make(log)
    with contextlib.suppress(KeyboardInterrupt, AssertionError):
        replay(manager, log)
    assert capture.in_use == 0


def test_a_failure_is_dealt_with_after_what_it_held_is_gone() -> None:
    """The traceback of an exception keeps its frames, and their tensors, until it is handled."""
    alive: list[bool] = []

    class Held:
        pass

    class Program(FakeProgram):
        def run(self, budget: int) -> None:
            held = Held()
            self.held = weakref.ref(held)
            raise RuntimeError("no memory")

        def free(self) -> None:
            alive.append(self.held() is not None)
            super().free()

    manager = GraphManager(LIMITS, Program(log := Log()), FakeCapture(log))
    assert not replay(manager, log) and alive == [False]


@pytest.mark.parametrize("where", ["load", "replay", "unload"])
def test_an_error_in_a_replay_frees_the_buffers_for_the_next(where: str) -> None:
    log = Log()
    manager, _, capture = make(log)
    capture_all(manager)
    log.fail_at = len(log.events) + 1 + ["load", "replay", "unload"].index(where)
    with pytest.raises(RuntimeError, match=f"injected at {where}"):
        replay(manager, log)
    assert capture.in_use == 0
    log.fail_at = None
    assert replay(manager, log)


def test_replays_of_other_threads_wait() -> None:
    """Static buffers have one user at a time, also where the content is unread."""
    manager, *_ = make(Log())
    manager.ready(16)
    at_once: list[int] = []
    inside: list[int] = []

    def load(budget: int) -> None:
        inside.append(budget)
        time.sleep(0.02)
        at_once.append(len(inside))
        inside.pop()

    threads = [
        threading.Thread(target=manager.replay_if_captured, args=(16, load, lambda budget: None)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [1] * 4


def test_release_gives_everything_back_and_the_next_use_captures_again() -> None:
    log = Log()
    manager, _, capture = make(log)
    capture_all(manager)
    graphs = list(capture.graphs)
    assert manager.held_bytes() == 130
    manager.release()
    assert manager.held_bytes() == 0 and not any(graph.alive for graph in graphs)
    assert replay(manager, log)


def test_dropping_graphs_keeps_the_buffers() -> None:
    log = Log()
    manager, program, capture = make(log)
    capture_all(manager)
    manager.drop_graphs()
    assert program.allocated and not any(graph.alive for graph in capture.graphs)
    assert replay(manager, log)
    assert log.events.count("allocate") == 1
