"""Replaces locks in a forked child: a thread of the parent that held one does not exist there.

`multiprocessing` forks by default on Linux before Python 3.14, and so do the workers of a `DataLoader`. Objects that
use a GPU cannot be used in a forked child at all.
"""

import os
import threading
import weakref
from typing import Protocol


class HoldsLocks(Protocol):
    """An object that owns locks."""

    def _renew_locks(self) -> None:
        """Replaces the locks that are held. Called in a forked child before anything else runs there."""


_living: "weakref.WeakSet[HoldsLocks]" = weakref.WeakSet()


def renew_in_children(holder: HoldsLocks) -> None:
    """Makes every child forked from now on call `holder._renew_locks()`; `holder` is referenced weakly."""
    _living.add(holder)


def is_held(lock: "threading.RLock") -> bool:
    """Whether another thread holds the lock; in a forked child, that thread exists in the parent only."""
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


def _renew() -> None:
    for holder in list(_living):
        holder._renew_locks()


os.register_at_fork(after_in_child=_renew)
