"""Streams and events of a GPU that is not there: which are looked up, waited for and used again."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.graphs.capture import CudaCapture, CurrentStream
from fusedvit.runtime.readback import StreamMarks

GPU = torch.device("cuda", 0)


class Stream:
    """One that notes what it waits for; as torch's do, objects of one stream are many."""

    def __init__(self, number: int, handle: int) -> None:
        self.stream_id, self.cuda_stream = number, handle
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append((event, list(event.recorded)))


class Event:
    def __init__(self) -> None:
        self.recorded: list[Stream] = []

    def record(self, stream: Stream) -> None:
        self.recorded.append(stream)


DEFAULT, POOLED, OTHER, EXTERNAL = (0, 0), (3, 0x7000), (35, 0x8000), (0x9000, 0x9000)


@pytest.fixture
def on() -> Iterator[Callable[[tuple[int, int]], None]]:
    """Makes a stream, given as (number, handle), the current one."""
    now = SimpleNamespace(stream=DEFAULT)
    with (
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream[1], create=True),
        mock.patch("torch.cuda.current_stream", lambda device: Stream(*now.stream)),
        mock.patch("torch.cuda.Stream", lambda device, priority=0: Stream(67, 0xA000)),
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.cuda.graph_pool_handle", lambda: (0, 0)),
    ):
        yield lambda stream: setattr(now, "stream", stream)


def test_a_stream_stays_one_object_unless_its_handle_may_be_anothers(on: Callable[..., None]) -> None:
    current = CurrentStream(GPU)
    for stream in (DEFAULT, POOLED, OTHER, POOLED):
        on(stream)
        assert current.get() is current.get() and current.get().cuda_stream == stream[1]
    on(EXTERNAL)
    assert current.get() is not current.get()
    on(POOLED)
    assert current.get().cuda_stream == POOLED[1]


def test_only_users_on_another_stream_wait(on: Callable[..., None]) -> None:
    capture = CudaCapture(GPU)
    waits = []
    for stream in (DEFAULT, DEFAULT, POOLED, POOLED, POOLED, DEFAULT, EXTERNAL, EXTERNAL, POOLED):
        on(stream)
        capture.before_use()
        user = capture._next
        waits.append(len(user.waited))
        capture.after_use()
        assert capture._used.recorded[-1] is user and user.cuda_stream == stream[1]
        user.waited.clear()
    assert waits == [1, 0, 1, 0, 0, 1, 1, 1, 1]


def test_a_use_that_was_broken_off_is_no_use(on: Callable[..., None]) -> None:
    """Whoever follows waits for the last use that was noted, on whatever stream the broken one was."""
    capture = CudaCapture(GPU)
    on(DEFAULT)
    capture.before_use()
    capture.after_use()
    on(POOLED)
    for _ in range(3):
        capture.before_use()
        ((_, recorded),) = capture._next.waited
        assert [stream.cuda_stream for stream in recorded] == [DEFAULT[1]]
        capture._next.waited.clear()


def test_an_event_is_used_again_only_when_its_mark_has_been_waited_for(on: Callable[..., None]) -> None:
    marks, side = StreamMarks(GPU), Stream(99, 0xB000)
    on(POOLED)
    first, second = marks.here(), marks.here()
    assert first.event is not second.event
    second.wait_on(side)
    on(OTHER)
    third = marks.here()
    assert third.event is second.event and marks.here().event not in (first.event, second.event)
    assert [(e, [s.cuda_stream for s in streams]) for e, streams in side.waited] == [(second.event, [POOLED[1]])]
