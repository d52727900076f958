"""An interrupt may land anywhere: what was half done is done again, or is as it was."""

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fusedvit
import fusedvit.pixels
from fusedvit.checks import as_built, recorded, source_code
from fusedvit.errors import attempted
from fusedvit.forks import is_held
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.pixels.byte_processors import STATE
from tests.support.graphs_on_cpu import GRID, LIMITS
from tests.support.places import Places
from tests.support.processors import image_processor
from tests.support.towers import GRIDS, Call, assert_same, copy_of, tiny_tower
from tests.unit.graphs.stand_in import graphs_on_cpu

CACHE, PREPARED, MANAGER = "fusedvit/runtime/weight_cache.py", "fusedvit/prepared_tower.py", "graphs/manager.py"
API, HOOKS, HANDLE = "fusedvit/api.py", "checks/accelerate_hooks.py", "fusedvit/fused_encoder.py"
CHECKED, RECORDED = "fusedvit/checks/checked_tower.py", "fusedvit/checks/recorded.py"
CHANGES = "fusedvit/checks/change_detection.py"
PROCESSORS = "fusedvit/pixels/processors.py"


def small_tower() -> Any:
    return tiny_tower(depth=1, deepstack_visual_indexes=[0])


def interrupted(
    act: Callable[[], object], at: int, *files: str, kind: type[BaseException] = KeyboardInterrupt, visits: int = 2
) -> str:
    """Where in `files` an interrupt landed, as `act` came to place number `at` there; "" if it has fewer.

    It is raised by `act` in the end, whatever `kind` of exception it is, unless it landed where Python can raise
    nothing: as a generator is closed that nobody holds any more.
    """
    places, where = Places(*files, visits=visits), ""

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal where
        if not where and (where := places.comes_to(at, frame, event)):
            raise kind

    sys.setprofile(note)
    try:
        with mock.patch("sys.unraisablehook") as dropped:
            act()
    except kind:
        assert where, "the only interrupt is ours"
    else:
        assert not where or dropped.called, f"{kind.__name__} was lost: {where}"
    finally:
        sys.setprofile(None)
    return where


def is_free(handle: FusedEncoder) -> bool:
    """Whether another thread can prepare weights."""
    found: list[bool] = []
    asking = threading.Thread(target=lambda: found.append(not is_held(handle.prepared._lock)))
    asking.start()
    asking.join()
    return found[0]


def test_a_first_call() -> None:
    base = small_tower()
    call = Call.of(base, GRIDS["smallest"])
    expected, at, where = call.run(base), 0, "somewhere"
    while where:
        at += 1
        tower = copy_of(base)
        handle = fusedvit.fuse(tower)
        where = interrupted(lambda tower=tower: call.run(tower), at, CACHE, PREPARED)
        for _ in range(2):
            assert_same(call.run(tower), expected), where
        assert handle.stats()["fused"] == 2 + (not where) and is_free(handle), where


class TookTooLong(Exception):
    """Of an application's own."""


def test_a_timeout_while_a_tower_is_judged() -> None:
    """What signals' handlers raise to end a request is no fault of the tower's, and nothing is kept of it."""
    base, kept = small_tower(), (recorded._versions_work, recorded._guards_work)
    call = Call.of(base, GRIDS["smallest"])
    usual = [function() for function in kept]
    at, where = 0, "somewhere"
    while where:
        at += 1
        as_built._kept.clear()
        for function in kept:
            function.cache_clear()
        tower = copy_of(base)
        handle = fusedvit.fuse(tower)
        where = interrupted(lambda tower=tower: call.run(tower), at, CHECKED, RECORDED, kind=TimeoutError, visits=1)
        call.run(tower)
        assert handle.stats()["original"] == {}, where
        assert [function() for function in kept] == usual


def test_a_timeout_while_a_source_is_read() -> None:
    """By default it would be one that there is none of."""
    loader = mock.Mock(get_code=mock.Mock(side_effect=[TimeoutError("late"), None]))
    with pytest.raises(TimeoutError):
        source_code.code_of(SimpleNamespace(__name__="module", __loader__=loader))  # type: ignore[arg-type]


def test_a_timeout_while_a_refusal_is_kept() -> None:
    base, at, where = small_tower(), 0, "somewhere"
    base.merger.linear_fc2.bias.data = base.merger.linear_fc2.bias.data.double()
    while where:
        at += 1
        tower = copy_of(base)
        handle = fusedvit.fuse(tower)
        where = interrupted(handle.weights.prepare, at, CACHE, CHANGES, kind=TimeoutError, visits=1)
        assert str(handle.reason()).startswith("several dtypes"), where


def test_a_timeout_while_a_processor_is_tried() -> None:
    at, where = 0, "somewhere"
    while where:
        at += 1
        part = image_processor()
        where = interrupted(lambda part=part: fusedvit.pixels.swap(part), at, PROCESSORS, kind=TimeoutError)
        fusedvit.pixels.swap(part)
        assert vars(part)[STATE].ours, where


def test_a_timeout_in_a_run_on_a_tower_that_has_changed() -> None:
    tower = small_tower()
    call = Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    call.run(tower)

    def late(*_: object) -> None:
        bias = tower.merger.linear_fc2.bias
        tower.merger.linear_fc2.bias = torch.nn.Parameter(bias.detach().clone())
        raise TookTooLong

    with mock.patch("fusedvit.calls.attempts.attempt", late), pytest.raises(TookTooLong):
        call.run(tower)
    call.run(tower)
    assert handle.stats()["fused"] == 2


@pytest.mark.parametrize("kind", [TimeoutError, TookTooLong])
@pytest.mark.parametrize("named", [True, False])
def test_an_error_of_its_own_comes_again(kind: type[Exception], named: bool) -> None:
    """And is told from one that came from elsewhere, whatever that is, and what became of it."""
    elsewhere = [kind("from elsewhere")]

    def act() -> str:
        if elsewhere:
            try:
                raise elsewhere.pop()
            except kind as error:
                if named:
                    raise ValueError("as libraries have it") from error
                raise
        return "an answer"

    with pytest.raises(kind):
        attempted(act)
    assert attempted(act) == "an answer"
    own = attempted(lambda: [][0], LookupError)
    assert isinstance(own, IndexError) and own.__traceback__ is None
    with pytest.raises(ZeroDivisionError):
        attempted(lambda: 1 / 0, LookupError)


def moved(tower: Any) -> None:
    for parameter in tower.parameters():
        parameter.data = parameter.data.clone()


def moved_and_written(tower: Any) -> None:
    moved(tower)
    with torch.no_grad():
        tower.merger.linear_fc2.bias.add_(0.5)


@pytest.mark.parametrize("change", [moved, moved_and_written], ids=lambda change: change.__name__)
def test_a_call_that_takes_other_weights(change: Callable[[Any], None]) -> None:
    """With graphs, which read weights by their addresses."""
    base, at, where = small_tower(), 0, "somewhere"
    call = Call.of(base, GRID)
    changed = copy_of(base)
    change(changed)
    expected = call.run(changed)
    while where:
        at += 1
        tower = copy_of(base)
        handle = fusedvit.fuse(tower)
        handle.refresh()
        with torch.inference_mode(), graphs_on_cpu(handle, LIMITS):
            call.run(tower)
            before = [p.data for p in tower.parameters()]
            change(tower)
            where = interrupted(lambda tower=tower: call.run(tower), at, CACHE, PREPARED, MANAGER)
            for old in before:
                old.fill_(torch.nan)  # whoever reads there is found out
            for _ in range(2):
                assert_same(call.run(tower), expected)
        assert is_free(handle), where


@pytest.mark.parametrize("act", ["release", "reconfigure"])
def test_what_gives_back(act: str) -> None:
    tower, at, where = small_tower(), 0, "somewhere"
    call = Call.of(tower, GRID)
    expected = call.run(tower)
    handle = fusedvit.fuse(tower)
    other = replace(handle.config, watch_data=not handle.config.watch_data)
    with torch.inference_mode():
        while where:
            at += 1
            handle.refresh()
            with graphs_on_cpu(handle, LIMITS):
                call.run(tower)
                ways = {"release": handle.release, "reconfigure": lambda: handle.reconfigure(other)}
                where = interrupted(ways[act], at, CACHE, PREPARED, MANAGER)
                for _ in range(2):
                    assert_same(call.run(tower), expected)
                assert is_free(handle), where


def test_fusing() -> None:
    base, at, where = small_tower(), 0, "somewhere"
    call = Call.of(base, GRIDS["smallest"])
    while where:
        at += 1
        tower = copy_of(base)
        where = interrupted(lambda tower=tower: fusedvit.fuse(tower), at, API, HOOKS)
        handle = fusedvit.fuse(tower)
        call.run(tower)
        assert handle.stats()["fused"] == 1, where


@pytest.mark.parametrize("again", [fusedvit.fuse, fusedvit.unfuse], ids=["fuse", "unfuse"])
def test_unfusing(again: Callable[[Any], Any]) -> None:
    base, at, where = small_tower(), 0, "somewhere"
    call = Call.of(base, GRIDS["smallest"])
    while where:
        at += 1
        tower = copy_of(base)
        handle = fusedvit.fuse(tower)
        where = interrupted(lambda tower=tower: fusedvit.unfuse(tower), at, API, HOOKS, HANDLE)
        found = again(tower)
        call.run(tower)
        if again is fusedvit.fuse:
            assert found.state() == "fused" and found.stats()["fused"] == 1, where
        else:
            assert type(tower) is type(base) and vars(tower).keys() == vars(base).keys(), where
            assert handle.state() == "unfused", where


def test_what_raises_leaves_a_tower_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object) -> None:
        raise KeyboardInterrupt

    tower = small_tower()
    cls, names = type(tower), set(vars(tower))
    monkeypatch.setattr(FusedEncoder, "check_early", raising)
    with pytest.raises(KeyboardInterrupt):
        fusedvit.fuse(tower)
    assert type(tower) is cls and set(vars(tower)) == names


def read(record: Any) -> Any:
    return record.hidden_states


def replaced(record: Any) -> Any:
    record.hidden_states = (torch.zeros(1),)


@pytest.mark.parametrize("use", [read, replaced], ids=["read", "replaced"])
def test_a_record(use: Callable[[Any], Any]) -> None:
    tower, at, where = small_tower(), 0, "somewhere"
    call = Call.of(tower, GRIDS["smallest"])
    expected = tower(call.pixels, grid_thw=call.grid, output_hidden_states=True).hidden_states
    fusedvit.fuse(tower)
    right = expected if use is read else (torch.zeros(1),)
    while where:
        at += 1
        record = tower(call.pixels, grid_thw=call.grid, output_hidden_states=True)
        where = interrupted(lambda record=record: use(record), at, "outputs/lazy.py")
        use(record)
        for found in record.hidden_states, record["hidden_states"], record.to_tuple()[-1]:
            assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found, right, strict=True)), where
        assert len(record.copy()) == len(record), where
