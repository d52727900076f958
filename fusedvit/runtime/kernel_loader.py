"""Which runs of a tower have every kernel they launch, and a thread that gets the others theirs.

A run is tried out on the meta device, without memory and without a GPU: each launch takes its kernel from Triton's
cache, or has it compiled by another process. Once all are there the run is ready, and what a call launches compiles
nothing. The thread calls no CUDA, so that it disturbs nobody's capture. While nothing is compiled, as in a process that
finds the cache filled, the first call of a run launches at once, by what the cache holds.
"""

import contextlib
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from triton.errors import TritonError
from triton.runtime import driver

from fusedvit.errors import WeightsReleased, is_of_handler
from fusedvit.kernels.launch import FromCache, KernelJob, KernelMissing, loading_from_cache
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.compile_service import CompileService, Request

META = torch.device("meta")
LIKELY = 256  # merged tokens: an image of 512 x 512 pixels
LOADING = 0.01  # seconds of a call that may go into loading kernels
SOME_LOADING = 0.002  # seconds of it behind which the capture is left to the next call
WORK, LONGEST_REST = 0.001, 0.1  # seconds that the thread works before it rests, and that it rests at most
REST = 2.0  # times as long as it has worked; twice that for runs that nobody asked for
ASKED_FOR = 1e3  # added to the order of budgets that no call needed yet: those that one needed go first


class Run(NamedTuple):
    """A run of the encoder, as far as that decides its kernels.

    Attributes:
        tokens: merged tokens of its graph's budget; patch tokens that an eager run takes its configurations by.
        graph: whether it is a graph's.
        kinds: of pixels that the weights take.
    """

    tokens: int
    graph: bool
    kinds: tuple[int, ...]


AROUND = Run(0, False, ())  # kernels that every call launches: fingerprints, rows of padded images


class KernelsNotReady(Exception):
    """Kernels of a call are still being compiled, or cannot be; the message says which, and is "" where they are
    under way."""


class _Ending(Exception):
    """The process ends."""


def _no_pause() -> None:
    pass


@cache
def collect_garbage() -> None:
    """Once, before kernels are waited for. What was imported until then makes a full collection due, which takes 0.2 to
    0.4 s with torch and transformers: it would fall into one of the calls that follow."""
    if gc.isenabled():
        gc.collect()


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class KernelLoader:
    """Knows the runs that are ready.

    Attributes:
        ready: runs all of whose kernels this process has, or gets when it first launches them.
    """

    def __init__(
        self,
        launch: Callable[[Run, EncoderWeights], None],
        weights: Callable[[], EncoderWeights],
        ladder: Sequence[int],
        service: CompileService,
        device: torch.device = META,
    ) -> None:
        """Nothing is compiled yet.

        Args:
            launch: makes the launches of a run, `AROUND` or another (see `MetaRuns`).
            weights: a bound method; its object is not kept.
            ladder: merged tokens of the budgets that calls may need.
            device: the GPU that will run this; Triton keeps what it loads by GPU.
        """
        self.ready: set[Run] = set()
        self._launch = launch
        self._weights = weakref.WeakMethod(weights)
        self._ladder = ladder
        self._service = service
        self._device = device
        self._process = os.getpid()
        self._refused: set[Run] = set()  # calls of these have taken the original code
        self._pending: dict[Run, float] = {}  # and their order
        self._missing: dict[Run, frozenset[str]] = {}
        self._jobs: dict[Run, Mapping[object, KernelJob]] = {}  # what each run launches, by what decides the code
        self._digests: dict[object, str] = {}  # of kernels that were not in the cache, by the same
        self._found: dict[object, Any] = {}  # kernels
        self._unloaded: dict[Run, list[Any]] = {}  # kernels of ready runs
        self._no_room = ""  # why launches here cannot compile
        self._worked = 0.0  # CPU time at which the thread's last rest ended
        self._asked = self._waiters = 0
        self._trying = threading.Lock()
        self._thread: threading.Thread | None = None

    # for calls

    def need(self, runs: Collection[Run], wait: bool) -> None:
        """Returns where `runs` are ready, or may be: what launches them goes on within `guard`. Else has their kernels
        compiled, and waits for them or raises.

        Where it waits and nothing can be compiled elsewhere it returns, too: their launches compile.

        Raises:
            KernelsNotReady: they are not, or not all are on the device yet, and `wait` is false; or launches cannot
                compile either.
        """
        if wait:
            self._wait_for(runs)
            if self._no_room and not self.ready.issuperset(runs):
                raise KernelsNotReady(self._no_room)
            return
        if self.ready.issuperset(runs):
            self._load(runs)
        elif not self._may_be_cached(runs):
            self._refuse(runs)

    def _may_be_cached(self, runs: Collection[Run]) -> bool:
        """Whether a call that finds the kernels of `runs` in Triton's cache needs no other: what it launches around
        them is there. Not asked for runs that were refused, as the thread knows what they lack."""
        weights = self._weights()
        if weights is None or not (self._refused.isdisjoint(runs) and self._service.is_idle_with_cache()):
            return False
        if AROUND not in self.ready:
            with _current(self._device), loading_from_cache(FromCache(collect=True)) as mode:
                self._launch(AROUND, weights())
                if any(mode.find(job) is None for job in mode.jobs.values()):
                    return False
            self.ready.add(AROUND)
        return True

    def _refuse(self, runs: Collection[Run]) -> NoReturn:
        """Has the kernels of `runs` compiled, and those of the ladder behind them.

        Raises:
            KernelsNotReady: always.
        """
        self._service.start_early()
        collect_garbage()
        self._refused.update(runs)
        with self._service.changed:
            for run in runs:
                self._ask_for(run)
            kinds = next(iter(runs)).kinds
            for rank, budget in enumerate(self._by_likelihood(kinds)):
                self._pending.setdefault(Run(budget, True, kinds), ASKED_FOR + rank)
            self._start()
        raise KernelsNotReady(self._service.broken)

    def cancel(self) -> None:
        """Nothing more is compiled until a call needs something again; in a fork, where locks may be held by threads
        that it does not have, nothing was."""
        if os.getpid() != self._process:
            return
        with self._service.changed:
            self._pending.clear()
            self._service.changed.notify_all()

    @contextlib.contextmanager
    def guard(self, runs: Collection[Run]) -> Iterator[None]:
        """Within it, launches of `runs` compile nothing. At its end they are ready.

        Raises:
            KernelsNotReady: one would have; it is sent for.
        """
        mode, tried_out = FromCache(collect=False, failed=self._service.failed), self.ready.issuperset(runs)
        try:
            with loading_from_cache(mode):
                yield
            self.ready.update(runs)
        except KernelMissing:
            if not tried_out:
                self._refuse(runs)
            with self._service.changed:  # they launch something else than on the meta device
                self.ready.difference_update(runs)
                for run in runs:
                    self._jobs.pop(run, None)
                self._pending.update(dict.fromkeys(runs, 0.0))
                self._missing.update(dict.fromkeys(runs, frozenset(mode.missing)))
                self._send(mode.missing, 0.0, urgent=False)
                self._start()
            raise KernelsNotReady(self._service.broken) from None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Within it launches compile what is missing where nothing could be compiled elsewhere.

        Raises:
            KernelsNotReady: a compiler has no room for its files; nobody tries again.
        """
        try:
            yield
        except OSError as error:
            if is_of_handler(error):
                raise
            self._no_room = f"{type(error).__name__}: {error}"
            raise KernelsNotReady(self._no_room) from error

    @contextlib.contextmanager
    def cached(self, runs: Collection[Run]) -> Iterator[None]:
        """Within it, launches of `runs` take their kernels from Triton's cache. At its end they are ready.

        Raises:
            KernelMissing: one is not there.
        """
        with loading_from_cache(FromCache(collect=False, failed=self._service.failed)):
            yield
        self.ready.update(runs)

    def _load(self, runs: Collection[Run]) -> None:
        """Loads kernels of ready runs onto the current device, for as long as a call has time for it; a call that
        loaded a graph's for a while captures nothing besides. Where no call of them was refused the original code has
        yet to load its own for them, and takes longer."""
        if self._refused.isdisjoint(runs):
            return  # to their launches, which load what they need
        begun, loads = time.perf_counter(), False
        for run in runs:
            kernels = self._unloaded.get(run, [])
            loads |= bool(kernels) and run.graph
            while kernels:
                if time.perf_counter() - begun > LOADING:
                    raise KernelsNotReady("")
                with contextlib.suppress(TritonError, RuntimeError, IndexError):  # its launch says so, and to whom
                    _ = kernels.pop().run
        if loads and time.perf_counter() - begun > SOME_LOADING:
            raise KernelsNotReady("")

    def _ask_for(self, run: Run) -> None:
        """Puts a run before those that nobody asked for, and behind those that somebody did."""
        if run in self.ready or self._pending.get(run, ASKED_FOR) < ASKED_FOR:
            return
        self._asked += 1
        self._pending[run] = float(self._asked)
        self._missing.pop(run, None)  # tried again, its kernels are sent for in the new order

    def _by_likelihood(self, kinds: tuple[int, ...]) -> list[int]:
        """Budgets that are not ready, those near what calls asked for first."""
        ready = [run.tokens for run in self.ready if run.graph and run.kinds == kinds]
        asked = [run.tokens for run, order in self._pending.items() if run.graph and order < ASKED_FOR]
        likely = [*ready, *asked] or [LIKELY]
        rest = set(self._ladder).difference(ready)
        return sorted(rest, key=lambda budget: min(abs(math.log(budget / near)) for near in likely))

    # the thread

    def _start(self) -> None:
        if self._thread is None and not self._service.broken:
            self._thread = self._service.thread(self._work, "fusedvit-kernels")

    def _work(self) -> None:
        """Gets every pending run its kernels, then ends."""
        service = self._service
        self._worked = time.thread_time()
        try:
            with service.used():
                while self._work_on():
                    pass
        except Exception as error:  # else calls would wait for a thread that is gone
            service.give_up(f"{type(error).__name__}: {error}")
            raise

    def _work_on(self) -> bool:
        """Tries the next run, or waits for kernels; False, and the thread is no more, where there is nothing to do."""
        service = self._service
        with service.changed:
            if not self._pending or service.broken or service.ending.is_set() or self._weights() is None:
                self._pending.clear()
                self._thread = None
                return False
            run = min(self._free(self._pending), key=self._pending.__getitem__, default=None)
            if run is None:
                service.changed.wait(1.0)
                return True
            order = self._pending[run]
        self._try(run, order, patient=True)
        return True

    def _free(self, runs: Iterable[Run]) -> list[Run]:
        """Those of `runs` that wait for no kernel."""
        return [run for run in runs if not self._service.waits_for(self._missing.get(run, frozenset()))]

    def _try(self, run: Run, order: float, patient: bool) -> None:
        """Finds the kernels of `run` and sends for those that are missing; it is ready if none is."""
        weights, service, missing = self._weights(), self._service, set[str]()
        pause: Callable[[], None] = partial(self._pause, REST if order < ASKED_FOR else 2 * REST)
        try:
            with (
                self._trying,
                _current(self._device),
                loading_from_cache(FromCache(True, pause if patient else _no_pause)) as mode,
            ):
                if weights is None:
                    raise WeightsReleased
                jobs = self._jobs.get(run)
                if jobs is None:
                    self._launch(run, weights())
                    jobs = self._jobs[run] = mode.jobs
                for key, job in jobs.items():
                    digest = "" if key in self._found else self._find(mode, key, job)
                    if digest:
                        missing.add(digest)
                        self._send({digest: job}, order, urgent=not patient)
        except (WeightsReleased, _Ending):  # the next call needs it again
            with service.changed:
                self._pending.pop(run, None)
            return
        with service.changed:
            self._missing[run] = frozenset(missing)
            self._unloaded[run] = [self._found[key] for key in jobs if key in self._found]
            if missing <= service.failed.keys():  # a launch that fails to compile knows what to do
                self.ready.add(run)
                self._pending.pop(run, None)

    def _find(self, mode: FromCache, key: object, job: KernelJob) -> str:
        """Takes a kernel from the cache; its digest if it is not there."""
        known = self._digests.get(key, "")
        if self._service.waits_for((known,)):
            return known
        mode.pause()
        kernel = mode.find(job)
        if kernel is None:
            self._digests[key] = mode.digest
            return mode.digest
        self._found[key] = kernel
        return ""

    @contextlib.contextmanager
    def _hurry(self) -> Iterator[None]:
        """Within it nobody rests: somebody waits."""
        with self._service.changed:
            self._waiters += 1
        try:
            yield
        finally:
            with self._service.changed:
                self._waiters -= 1

    def _pause(self, rest: float) -> None:
        """Lets other threads have the interpreter, `rest` times as long as this one had it: calls go on meanwhile.

        A thread that only computes takes the interpreter whenever another one lets go of it, which PyTorch does at each
        operation, and keeps it for 5 ms each time.
        """
        worked = time.thread_time() - self._worked
        if worked < WORK or self._waiters:
            return
        if self._service.ending.wait(min(worked * rest, LONGEST_REST)):
            raise _Ending
        self._worked = time.thread_time()

    def _send(self, jobs: Mapping[str, KernelJob], order: float, urgent: bool) -> None:
        arch = driver.active.get_current_target().arch
        self._service.compile(Request(arch, jobs, order, urgent))

    def _wait_for(self, runs: Collection[Run]) -> None:
        """Has what `runs` launch compiled on all cores."""
        service = self._service
        left = [run for run in runs if run not in self.ready]
        if not left:
            return
        with service.used(), self._hurry():
            service.start_early()
            while left and not service.broken:
                for run in self._free(left):
                    self._try(run, 0.0, patient=False)
                with service.changed:
                    left = [run for run in left if run not in self.ready]
                    if left and not self._free(left):
                        service.changed.wait(1.0)
