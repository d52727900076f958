"""Children of a fork get locks that nobody holds: threads that held the parent's do not exist there.

`multiprocessing` forks by default on Linux before Python 3.14, and so do workers of a `DataLoader`. What uses a GPU
cannot be used in a child at all.
"""

import os
import weakref
from typing import Protocol


class Lock(Protocol):
    """`threading.Lock` and `threading.RLock`."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


class HoldsLocks(Protocol):
    """Whoever keeps locks."""

    def renew_locks(self) -> None:
        """Replaces locks that are held: called in a child, before anything else runs there."""


_living: "weakref.WeakSet[HoldsLocks]" = weakref.WeakSet()


def renew_in_children(holder: HoldsLocks) -> None:
    """Lets every child that is forked from now on renew the locks of `holder`, which is kept weakly."""
    _living.add(holder)


def is_held(lock: Lock) -> bool:
    """Whether another thread holds the lock; in a forked child that is a thread which exists in the parent only."""
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


def _renew() -> None:
    for holder in list(_living):
        holder.renew_locks()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_renew)
