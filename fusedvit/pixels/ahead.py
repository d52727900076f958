"""Work that runs ahead in threads: each result in its order, and errors behind what came before them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from fusedvit.errors import InputError

Result = TypeVar("Result")


def started_ahead(
    pool: ThreadPoolExecutor, calls: Iterable[Callable[[], Result]], ahead: int
) -> Iterator["Future[Result]"]:
    """Each call in its order, begun in the pool when the one `ahead` places before it is asked for; an error of `calls`
    comes behind the calls before it."""
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
    """A call, begun in the pool. Raises InputError where the system has no room for another thread."""
    try:
        return pool.submit(call)
    except RuntimeError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        raise InputError(f"the system has no room for another thread: {error}") from error


def until_error(values: Iterable[Result], met: list[Exception]) -> Iterator[Result]:
    """The values before the first error, which goes into `met`: what waits of them comes out before it is raised."""
    try:
        yield from values
    except Exception as error:
        met.append(error)


def raise_met(met: Sequence[Exception]) -> None:
    """Raises what `until_error` has put into `met`, if anything."""
    for error in met:
        raise error
