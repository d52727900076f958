"""Work that runs ahead in threads: results come in order, and an error comes after the results before it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from fusedvit.errors import InputError

Result = TypeVar("Result")


@contextmanager
def pool_of(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads; at the end of the context calls that have not begun are dropped, and others not waited for."""
    pool = ThreadPoolExecutor(threads, name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def started_ahead(
    pool: ThreadPoolExecutor, calls: Iterable[Callable[[], Result]], ahead: int
) -> Iterator["Future[Result]"]:
    """Futures of `calls` in order; up to `ahead` calls run in the pool before their future is asked for. If iterating
    `calls` fails, the futures before the error come first."""
    tasks: deque[Future[Result]] = deque()
    met: list[Exception] = []
    for call in until_error(calls, met):
        tasks.append(submitted(pool, call))
        if len(tasks) > ahead:
            yield tasks.popleft()
    while tasks:
        yield tasks.popleft()
    raise_met(met)


def submitted(pool: ThreadPoolExecutor, call: Callable[[], Result]) -> "Future[Result]":
    """Submits a call to the pool. Once the main thread has ended, Python's pools take no more calls: this thread, which
    goes on, then does the call itself. Raises InputError if the system has no room for another thread."""
    try:
        return pool.submit(call)
    except RuntimeError as error:
        if "interpreter shutdown" in str(error):
            return _done_here(call)
        pool.shutdown(wait=False, cancel_futures=True)
        raise InputError(f"the system has no room for another thread: {error}") from error


def _done_here(call: Callable[[], Result]) -> "Future[Result]":
    task: Future[Result] = Future()
    try:
        task.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised to whoever takes the result
        task.set_exception(error)
    return task


def until_error(values: Iterable[Result], met: list[Exception]) -> Iterator[Result]:
    """The values before the first error. The error goes into `met`, to be raised once these values are used."""
    try:
        yield from values
    except Exception as error:
        met.append(error)


def raise_met(met: Sequence[Exception]) -> None:
    """Raises the error that `until_error` has put into `met`, if any."""
    for error in met:
        raise error
