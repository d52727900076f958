"""Copies of a tower on other devices beside threads, forks and whatever a handle's user does: never of other weights
than the tower has, always counted, never left behind."""

import copy
import functools
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.checks import fallback
from fusedvit.data_parallel import DataParallelEncoder, _Threads
from fusedvit.errors import Reason
from fusedvit.fused_encoder import rows_of_record
from tests.hf.test_forks import answer_of_child, held
from tests.support.towers import copy_of, error_of, pixels_for, tiny_model, vision_tower
from tests.support.waiting import PATIENCE, until

GRID = [(1, 8, 8)] * 6
PATCHES = 6 * 64
Trio = tuple[Any, DataParallelEncoder, torch.Tensor]


@pytest.fixture
def trio() -> Trio:
    """A tower, an encoder that has two copies of it and has run once, and pixels."""
    tower = vision_tower()
    encoder, pixels = DataParallelEncoder(tower, ["cpu"] * 3), pixels_for(tower, GRID)
    encoder(pixels, GRID)
    return tower, encoder, pixels


def expected_of(tower: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    plain = fusedvit.unfuse(copy_of(tower))
    return rows_of_record(plain(pixels, torch.tensor(GRID), return_dict=True))


def change(tower: nn.Module, factor: float = 1.1) -> None:
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(factor)


def is_right(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return error_of(found, expected) < 1e-5


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    return thread, found


def no_share(encoder: DataParallelEncoder, why: Reason) -> None:
    """One of the copies cannot run fused."""
    encoder._copies[0]._handle.answer_or_reason = lambda *given: why  # type: ignore[method-assign]


# threads


def test_threads_after_a_change_get_rows_of_the_new_weights(trio: Trio) -> None:
    tower, encoder, pixels = trio
    for i in range(8):
        change(tower, 1.1 if i % 2 else 1 / 1.1)
        expected = expected_of(tower, pixels)
        calls = [in_thread(lambda: encoder(pixels, GRID)) for _ in range(4)]
        for thread, _ in calls:
            thread.join()
        assert all(is_right(found[0], expected) for _, found in calls)


def test_no_copy_is_written_while_a_share_runs_on_it(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, encoder, pixels = trio
    held_copy, handle = encoder._copies[0], fusedvit.fuse(tower)
    parameter, began, may_go = next(held_copy._tower.parameters()), threading.Event(), threading.Event()
    real, kept = held_copy.run, []

    def slow(*given: Any) -> Any:
        first = not began.is_set()
        before = parameter.clone()
        began.set()
        if first:
            assert may_go.wait(PATIENCE)
            kept.append(parameter.equal(before))
        return real(*given)

    monkeypatch.setattr(held_copy, "run", slow)
    one, rows_of_one = in_thread(lambda: encoder(pixels, GRID))
    assert began.wait(PATIENCE)
    version = handle.weights.version
    change(tower)
    other, rows_of_other = in_thread(lambda: encoder(pixels, GRID))
    until(lambda: handle.weights.version > version)  # the other has found the change, and wants to write copies
    other.join(0.2)
    assert other.is_alive(), "it waits for the share"
    may_go.set()
    for thread in (one, other):
        thread.join()
    assert kept == [True]
    expected = expected_of(tower, pixels)
    assert is_right(rows_of_one[0], expected) and is_right(rows_of_other[0], expected)


def test_a_call_compares_the_version_that_its_own_shares_ran_on(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call brings the copies up to date between a call's shares and its question what they ran on."""
    tower, encoder, pixels = trio
    handle = fusedvit.fuse(tower)
    real = handle.answer_or_reason

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(handle, "answer_or_reason", real)
        found = real(*given)
        until(lambda: not encoder._under_way)
        change(tower)
        in_thread(lambda: encoder(pixels, GRID))[0].join()
        return found

    monkeypatch.setattr(handle, "answer_or_reason", overtaken)
    assert is_right(encoder(pixels, GRID), expected_of(tower, pixels))


def test_calls_of_an_unchanged_tower_run_side_by_side(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, encoder, pixels = trio
    handle, both = fusedvit.fuse(tower), threading.Barrier(2)
    real = handle.answer_or_reason
    monkeypatch.setattr(handle, "answer_or_reason", lambda *given: (both.wait(PATIENCE), real(*given))[1])
    calls = [in_thread(lambda: encoder(pixels, GRID)) for _ in range(2)]
    for thread, _ in calls:
        thread.join()
    assert all(is_right(found[0], expected_of(tower, pixels)) for _, found in calls)


def test_shares_end_before_an_error_is_raised(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two copies one fails at once, while the other runs: its pixels and copy stay in use until it has ended."""
    _, encoder, pixels = trio
    first, second = encoder._copies
    real = second.run
    ended = threading.Event()

    def fail(*given: Any) -> Any:
        raise RuntimeError("lost")

    def slow(*given: Any) -> Any:
        threading.Event().wait(0.2)
        ended.set()
        return real(*given)

    monkeypatch.setattr(first, "run", fail)
    monkeypatch.setattr(second, "run", slow)
    with pytest.raises(RuntimeError, match="lost"):
        encoder(pixels, GRID)
    assert ended.is_set()


def test_close_while_threads_call(trio: Trio) -> None:
    tower, encoder, pixels = trio
    expected = expected_of(tower, pixels)
    calls = [in_thread(lambda: [encoder(pixels, GRID) for _ in range(5)]) for _ in range(3)]
    encoder.close()
    for thread, _ in calls:
        thread.join()
    assert all(is_right(rows, expected) for _, found in calls for rows in found[0])
    assert is_right(encoder(pixels, GRID), expected) and fusedvit.fuse(tower).stats()["copies"] == []
    encoder.close()


def test_nothing_keeps_the_rows_of_a_call(trio: Trio) -> None:
    _, encoder, pixels = trio
    encoder(pixels, GRID)
    until(lambda: not encoder._under_way)


def test_unfused_during_a_call(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends in the original code, as one of the tower itself does; the next one raises."""
    tower, encoder, pixels = trio
    expected, handle = expected_of(tower, pixels), fusedvit.fuse(tower)
    real = handle.answer_or_reason
    monkeypatch.setattr(handle, "answer_or_reason", lambda *given: (fusedvit.unfuse(tower), real(*given))[1])
    assert is_right(encoder(pixels, GRID), expected)
    assert handle.stats()["original"] == {fallback.RELEASED: 1}
    with pytest.raises(RuntimeError, match="was unfused: fuse it again"):
        encoder(pixels, GRID)


# what is counted


def test_syncs_are_no_reason_for_a_pause(trio: Trio) -> None:
    """Copies that follow a tower whose user refreshes it after each change run fused, as it does."""
    tower, encoder, pixels = trio
    handle = fusedvit.fuse(tower)
    for i in range(40):
        change(tower, 1.01 if i % 2 else 1 / 1.01)
        handle.refresh()
        encoder(pixels, GRID)
    stats = handle.stats()
    assert (stats["calls"], stats["fused"], stats["original"]) == (41, 41, {})
    assert (stats["items"], stats["patch_tokens"]) == (41 * len(GRID), 41 * PATCHES)
    assert [(s["calls"], s["fused"], s["state"]) for s in stats["copies"]] == [(41, 41, "fused")] * 2


def test_a_call_that_finds_a_change_counts_once(trio: Trio) -> None:
    tower, encoder, pixels = trio
    change(tower)
    encoder(pixels, GRID)
    stats = fusedvit.fuse(tower).stats()
    assert (stats["calls"], stats["fused"], stats["items"]) == (2, 2, 2 * len(GRID))


@pytest.mark.parametrize("grid", ["none", [(1, 8, 8)] * 5, [(1, 3, 8)] * 16], ids=["no grid", "rows", "merge"])
def test_a_call_that_raises_counts_once(trio: Trio, grid: Any) -> None:
    tower, encoder, pixels = trio
    with pytest.raises((TypeError, ValueError), match="fusedvit: "):
        encoder(pixels, grid)
    stats = fusedvit.fuse(tower).stats()
    assert (stats["calls"], stats["fused"], stats["original"]) == (2, 1, {})


def test_a_share_in_the_original_code_is_seen(trio: Trio, caplog: pytest.LogCaptureFixture) -> None:
    tower, encoder, pixels = trio
    handle, expected = fusedvit.fuse(tower), expected_of(tower, pixels)
    no_share(encoder, Reason(fallback.NOT_READY, "3 kernels"))
    caplog.set_level(logging.WARNING, logger="fusedvit")
    assert is_right(encoder(pixels, GRID), expected)
    stats = handle.stats()
    assert (stats["calls"], stats["fused"], stats["items"]) == (2, 1, len(GRID))
    assert stats["original"] == {fallback.NOT_READY: 1}
    assert stats["details"] == {fallback.NOT_READY: "on cpu: 3 kernels"}
    assert [s["original"] for s in stats["copies"]] == [{fallback.NOT_READY: 1}, {}]
    assert [s["fused"] for s in stats["copies"]] == [1, 2]
    lines = [line for line in handle.report().splitlines() if "copy on" in line]
    assert lines[0].startswith("  copy on cpu: 2 shares: 1 fused, 1 original code; prepared weights 0.")
    assert len([r for r in caplog.records if "on cpu: 3 kernels" in r.message]) == 1
    handle.reconfigure(fusedvit.FuseConfig(strict=True))
    with pytest.raises(RuntimeError, match="kernels not ready.*on cpu: 3 kernels"):
        encoder(pixels, GRID)


def test_a_report_of_many_copies_is_short() -> None:
    tower = vision_tower()
    encoder = DataParallelEncoder(tower, ["cpu"] * 12)
    handle = fusedvit.fuse(tower)
    for kind in fallback.ADVICE:
        handle._stats.count_original(Reason(kind))
    lines = handle.report().splitlines()
    assert len(lines) == 25 and sum("  copy on cpu: " in line for line in lines) == 6
    assert "  and 5 more copies" in lines and len(handle.stats()["copies"]) == len(encoder._copies) == 11


# what is done to the handle


def of_copies(encoder: DataParallelEncoder) -> list[Any]:
    return [copied._handle for copied in encoder._copies]


def test_memory_is_given_back(trio: Trio) -> None:
    tower, encoder, pixels = trio
    handle = fusedvit.fuse(tower)
    assert all(s["weights_mib"] > 0 for s in handle.stats()["copies"])
    handle.release()
    assert [s["weights_mib"] for s in handle.stats()["copies"]] == [0, 0]
    expected = expected_of(tower, pixels)
    assert all(is_right(encoder(pixels, GRID), expected) for _ in range(2))
    assert all(s["weights_mib"] > 0 for s in handle.stats()["copies"])
    fusedvit.unfuse(tower)
    assert [h.stats()["weights_mib"] for h in of_copies(encoder)] == [0, 0]
    assert [h.state() for h in of_copies(encoder)] == ["unfused"] * 2


@pytest.mark.parametrize("again", [False, True], ids=["in place", "built again"])
def test_new_options_reach_copies(trio: Trio, again: bool) -> None:
    tower, encoder, pixels = trio
    config = fusedvit.FuseConfig(strict=True, graphs=False)
    fusedvit.fuse(tower, config)
    if again:
        tower.blocks[0].norm1 = copy.deepcopy(tower.blocks[0].norm1).double()
        encoder._copies[0].update_from(tower)
    assert [h.config for h in of_copies(encoder)] == [config] * 2


def test_options_replaced_while_a_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, config = vision_tower(), fusedvit.FuseConfig(strict=True)
    handle, real = fusedvit.fuse(tower), copy.deepcopy

    def meanwhile(*given: Any) -> Any:
        found = real(*given)
        handle.reconfigure(config)
        return found

    monkeypatch.setattr("fusedvit.tower_copies.copy.deepcopy", meanwhile)
    assert [h.config for h in of_copies(DataParallelEncoder(tower, ["cpu"] * 2))] == [config]


def test_graphs_of_copies_are_dropped(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, encoder, _ = trio
    dropped: list[object] = []
    for handle in of_copies(encoder):
        monkeypatch.setattr(handle.prepared, "drop_graphs", lambda: dropped.append(None))
    fusedvit.fuse(tower).drop_graphs()
    assert len(dropped) == 2


def test_warmup_reaches_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = vision_tower()
    encoder, handle = DataParallelEncoder(tower, ["cpu"] * 3), fusedvit.fuse(tower)
    encoder.warmup()
    assert all(s["weights_mib"] > 0 for s in [handle.stats(), *handle.stats()["copies"]])
    asked: list[Any] = []
    for each in (handle, *of_copies(encoder)):
        monkeypatch.setattr(each.prepared, "warm_up", lambda progress, calls: asked.append(calls))
    encoder.warmup(calls=[GRID, [(1, 4, 4)], [(0, 4, 4)]])
    assert sorted(sum(len(items) for items in calls) for calls in asked) == [2, 2, 4]
    with pytest.raises(TypeError, match="calls must be an iterable"):
        encoder.warmup(calls=5)  # type: ignore[arg-type]
    fusedvit.unfuse(tower)
    with pytest.raises(RuntimeError, match="was unfused"):
        encoder.warmup()


def test_copies_go_with_an_encoder_that_nobody_closed() -> None:
    tower = vision_tower()
    encoder, handle = DataParallelEncoder(tower, ["cpu"] * 2), fusedvit.fuse(tower)
    encoder(pixels_for(tower, GRID), GRID)
    assert fusedvit.fuse(copy.deepcopy(tower)).stats()["copies"] == [], "they are of the encoder's tower alone"
    assert len(handle.stats()["copies"]) == 1
    del encoder
    until(lambda: not handle.stats()["copies"])


def test_a_copy_that_is_built_in_inference_mode_is_followed(trio: Trio) -> None:
    tower, encoder, pixels = trio
    with torch.inference_mode():
        tower.register_buffer("another", torch.zeros(1), persistent=False)
        encoder(pixels, GRID)
        fusedvit.fuse(tower).refresh()
        encoder(pixels, GRID)
    change(tower)
    assert is_right(encoder(pixels, GRID), expected_of(tower, pixels))


# where threads cannot be started


def test_calls_without_a_thread_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = vision_tower()
    encoder, pixels, handle = DataParallelEncoder(tower, ["cpu"] * 3), pixels_for(tower, GRID), fusedvit.fuse(tower)
    expected = expected_of(tower, pixels)
    with monkeypatch.context() as here:
        full = RuntimeError("can't start new thread")
        here.setattr(threading.Thread, "start", mock.Mock(side_effect=full))
        assert is_right(encoder(pixels, GRID), expected)
    assert is_right(encoder(pixels, GRID), expected)
    stats = handle.stats()
    assert (stats["calls"], stats["fused"]) == (2, 2)
    assert [(s["calls"], s["fused"]) for s in stats["copies"]] == [(2, 2)] * 2


def test_too_few_threads_do_all_the_work(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, encoder, pixels = trio
    encoder._threads = _Threads(2)
    real, left = threading.Thread.start, [1]

    def start(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert is_right(encoder(pixels, GRID), expected_of(tower, pixels)) and not left


AFTER_MAIN = """
import threading
import fusedvit
from fusedvit.data_parallel import DataParallelEncoder
from tests.support.towers import pixels_for, vision_tower

tower, grid = vision_tower(), [(1, 8, 8)] * 6
encoder, pixels = DataParallelEncoder(tower, ["cpu"] * 2), pixels_for(tower, grid)
encoder(pixels, grid)

def work():
    threading.main_thread().join()
    threading.Event().wait(0.2)  # while Python ends its executors
    encoder(pixels, grid)
    print([s["calls"] for s in fusedvit.fuse(tower).stats()["copies"]])

threading.Thread(target=work).start()
"""


def test_calls_after_the_main_thread_has_ended() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER_MAIN], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "[2]\n", done.stderr


def test_threads_end_with_their_encoder(trio: Trio) -> None:
    tower, _, pixels = trio
    before = threading.enumerate()
    encoder = DataParallelEncoder(tower, ["cpu"] * 3)
    encoder(pixels, GRID)
    started = [t for t in threading.enumerate() if t.name == "fusedvit-device" and t not in before]
    assert len(started) == 2
    encoder.close()
    until(lambda: not any(thread.is_alive() for thread in started))


# what copies share


class Monitor:
    """An application's object, which cannot be copied."""

    def __init__(self, **held: Any) -> None:
        self.lock = threading.Lock()
        vars(self).update(held)

    def on_output(self, *_: Any) -> None:
        pass


CHANGES: dict[str, Callable[[Any], object]] = {
    "hook": lambda tower: tower.register_forward_hook(Monitor().on_output),
    "lock": lambda tower: setattr(tower, "log_lock", threading.Lock()),
    "of a block": lambda tower: setattr(tower.blocks[0], "log_lock", [Monitor()]),
    "partial": lambda tower: setattr(tower, "log", functools.partial(print, Monitor())),
    "file": lambda tower: setattr(tower, "log", sys.__stderr__),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_copied_is_shared(trio: Trio, name: str) -> None:
    tower, encoder, pixels = trio
    CHANGES[name](tower)
    change(tower)
    assert is_right(encoder(pixels, GRID), rows_of_record(tower(pixels, torch.tensor(GRID), return_dict=True)))
    assert [s["original"] for s in fusedvit.fuse(tower).stats()["copies"]] == [{}] * 2
    other = DataParallelEncoder(tower, ["cpu"] * 2)  # copies are made of it, too
    assert is_right(other(pixels, GRID), encoder(pixels, GRID))


def test_no_model_is_copied_with_its_tower() -> None:
    """Not for what a hook or an attribute holds."""
    model = tiny_model().requires_grad_(False)
    of_other_tests = [o for o in gc.get_objects() if type(o) is type(model) and o is not model]
    tower = model.model.visual
    tower.register_forward_hook(Monitor(model=model).on_output)
    tower.of = [model]
    encoder = DataParallelEncoder(model, ["cpu"] * 2)
    pixels = pixels_for(tower, GRID)
    change(tower)
    encoder(pixels, GRID)
    copied = encoder._copies[0]._tower
    assert copied.of == [model] and copied.config is not tower.config
    assert not copied._forward_hooks
    models = sum(type(o) is type(model) for o in gc.get_objects())
    assert models <= 1 + len(of_other_tests)


def test_a_copy_that_is_freed_while_copies_are_listed(trio: Trio) -> None:
    tower, _, _ = trio
    handle = fusedvit.fuse(tower)

    class Losing(dict[Any, Any]):
        def items(self) -> Any:
            for item in super().items():
                yield item
                self.clear()

    handle._copies = Losing(handle._copies)
    assert len(handle._living_copies()) == 2


# forks


@pytest.mark.filterwarnings("ignore")  # newer Pythons warn of forks beside threads
def test_a_child_has_threads_of_its_own(trio: Trio) -> None:
    tower, encoder, pixels = trio
    expected = expected_of(tower, pixels)
    assert answer_of_child(lambda: is_right(encoder(pixels, GRID), expected)) == "right"
    assert is_right(encoder(pixels, GRID), expected)


def test_threads_that_are_closed_do_work_here() -> None:
    """A signal's handler may close an encoder between two shares."""
    assert _Threads(0).start(threading.get_ident).result(timeout=PATIENCE) == threading.get_ident()


def test_a_thread_whose_start_is_interrupted_ends_with_the_others() -> None:
    threads, start, started = _Threads(1), threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with mock.patch.object(threading.Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
        threads.start(int)
    (left,) = started
    del threads
    gc.collect()
    left.join(PATIENCE)
    assert not left.is_alive()


def test_work_that_fails_keeps_nothing() -> None:
    class Pixels:
        def fail(self) -> None:
            raise MemoryError

    pixels = Pixels()
    kept, threads = weakref.ref(pixels), _Threads(1)
    gc.disable()
    try:
        found = threads.start(Pixels.fail, pixels)
        with pytest.raises(MemoryError):
            found.result(timeout=PATIENCE)
        del pixels, found
        until(lambda: kept() is None)
    finally:
        gc.enable()


def test_copies_without_a_gpu_ask_for_no_cuda(trio: Trio) -> None:
    """A forked child whose parent has used CUDA may not."""
    tower, encoder, pixels = trio
    expected = expected_of(tower, pixels)
    with mock.patch("torch.cuda.stream", side_effect=RuntimeError("Cannot re-initialize CUDA in forked subprocess")):
        assert is_right(encoder(pixels, GRID), expected)


@pytest.mark.filterwarnings("ignore")
def test_a_child_writes_copies_that_its_parent_was_writing(trio: Trio) -> None:
    tower, encoder, pixels = trio
    expected, parameter = expected_of(tower, pixels), next(encoder._copies[0]._tower.parameters())
    with held(encoder._lock):
        change(encoder._copies[0]._tower)
        assert answer_of_child(lambda: is_right(encoder(pixels, GRID), expected)) == "right"
    assert parameter is next(encoder._copies[0]._tower.parameters())
