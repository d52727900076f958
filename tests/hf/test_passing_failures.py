"""What the system cannot read now and can read later: at most one call answers without it, and nothing is kept."""

import errno
import importlib.machinery
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

import fusedvit
from fusedvit.checks import fallback, forward_hooks, source_code
from fusedvit.checks.own_code import tower_code
from fusedvit.errors import UnsupportedModel, attempted
from fusedvit.pixels import pipeline
from fusedvit.pixels.byte_processors import classes_of
from tests.support.processors import image_processor
from tests.support.towers import GRIDS, Call, assert_same, copy_of, fused_tower, tiny_tower

KEPT = (
    *(source_code._functions, source_code._paths, source_code._header, source_code._text_of),
    *(forward_hooks._capturing_code, tower_code._names_of_ours),
)


def full(number: int = errno.EMFILE) -> OSError:
    return OSError(number, "no")


@contextmanager
def unreadable(number: int = errno.EMFILE) -> Iterator[None]:
    """No source can be read, and none has been."""
    for function in KEPT:
        function.cache_clear()
    with mock.patch.object(importlib.machinery.SourceFileLoader, "get_data", side_effect=full(number)):
        yield


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EIO])
def test_sources_are_read_again(number: int) -> None:
    base = tiny_tower()
    call = Call.of(base, GRIDS["smallest"])
    expected, tower, other = call.run(base), copy_of(base), copy_of(base)
    handle = fusedvit.fuse(tower)
    with unreadable(number):
        assert_same(call.run(tower), expected)
        assert str(handle.reason()).startswith(f"{fallback.UNREAD}: OSError: [Errno {number}] no")
    assert_same(call.run(tower), expected)
    stats = handle.stats()
    assert (stats["fused"], stats["original"]) == (1, {fallback.UNREAD: 1})
    assert handle.reason() is None and fusedvit.fuse(other).reason() is None


def test_a_source_that_is_gone_stays_gone() -> None:
    """It is no lack of the moment, so the tower is not judged again at each call."""
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    try:
        with unreadable(errno.ENOENT):
            call.run(tower)
        call.run(tower)
        assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 2}
    finally:
        for function in KEPT:
            function.cache_clear()


def test_a_hook_whose_source_cannot_be_read_now() -> None:
    """A call finds it as it compares the tower with what it was."""
    tower, handle, call = fused_tower(grid=GRIDS["smallest"])
    expected = call.run(tower)
    with mock.patch.object(forward_hooks, "_is_idle", side_effect=source_code.UnreadSource("no")):
        hook = tower.blocks[0].register_forward_hook(lambda *given: None)
        assert_same(call.run(tower), expected)
    assert handle.stats()["original"] == {fallback.UNREAD: 1}
    hook.remove()
    call.run(tower)
    assert handle.stats()["fused"] == 2


def test_a_processor_whose_source_cannot_be_read_now() -> None:
    part = image_processor()
    original = type(part)
    pipeline._walked.clear()
    with unreadable():
        with pytest.raises(UnsupportedModel, match="cannot be read for now: OSError"):
            fusedvit.pixels.swap(part)
        assert not pipeline.is_plain(part, original)
    fusedvit.pixels.swap(part)
    assert type(part) is classes_of(original).swapped and pipeline.is_plain(part, original)


def test_a_forward_that_nobody_can_judge_now() -> None:
    tower = tiny_tower()
    fusedvit.fuse(tower)
    with mock.patch("fusedvit.checks.own_forward._held_by", side_effect=source_code.UnreadSource("no")):
        tower.forward = lambda *given, **named: None
        assert str(fusedvit.fuse(tower).reason()) == f"{fallback.UNREAD}: no"


@pytest.mark.parametrize("hidden", [False, True])
def test_what_succeeds_the_second_time_is_the_result(hidden: bool) -> None:
    failures = [full()]

    def act() -> str:
        if failures and hidden:
            raise ImportError("as Python's loaders have it") from failures.pop()
        if failures:
            raise failures.pop()
        return "an answer"

    assert attempted(act) == "an answer" and not failures
