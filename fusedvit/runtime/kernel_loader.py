"""Knows which runs of a tower have every kernel that they launch, and has the kernels of the others compiled.

A thread tries a run on the meta device, without memory and without a GPU. Each launch looks its kernel up in Triton's
cache; another process compiles the missing ones. The run is ready when the cache has all of them, and a call that
launches it then compiles nothing. The thread does not call CUDA, so that it disturbs nobody's capture. If nothing is
being compiled and the cache is not empty, the first call of a run launches at once, with kernels from the cache.

The loader keeps one `RunState` for each run. Its `stage` changes as follows:

    NEW ──► WANTED          A call needed the run and took the original code. Budgets of the ladder follow (`_refuse`).
    WANTED ──► READY        The thread has tried the run (`_find_kernels_of`) and found all of its kernels, except
                            those that do not compile, whose launches raise the compiler's error. A try that misses
                            kernels requests them, and the run stays wanted; the next try follows when they are
                            compiled.
    NEW, WANTED ──► READY   A call that waits has tried the run (`_wait_for`), or its launches found every kernel in
                            Triton's cache (`guard`, `cached`).
    READY ──► WANTED        A launch needs a kernel that the try has not listed (`guard`).
    WANTED ──► NEW          Nothing can be tried or nobody needs it: the loader was cancelled, the weights were given
                            back, the compiling process was given up, this process ends.

`_note` alone writes states: it holds the lock of `CompileService.changed`, at which the thread waits for kernels, and
replaces whole records and the set of runs that are ready. A call whose runs are ready reads both and takes no lock, so
that nothing delays it. A kernel that several runs launch is one `Kernel`, which only the holder of `_trying` uses.
"""

import contextlib
import enum
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.errors import TritonError
from triton.runtime import driver

from fusedvit.errors import WeightsReleased, is_of_handler
from fusedvit.kernels.launch import FromCache, KernelJob, KernelMissing, loading_from_cache
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.compile_service import CompileService, Request
from fusedvit.runtime.compiled_kernels import enter_kernels

META = torch.device("meta")
LIKELY = 256  # merged tokens: an image of 512 x 512 pixels
LOADING = 0.01  # seconds of a call that may go into loading kernels
SOME_LOADING = 0.002  # seconds: if loading took longer than this, the capture is left to the next call
WORK, LONGEST_REST = 0.001, 0.1  # seconds that the thread works before it rests, and that it rests at most
REST = 2.0  # it rests this many times as long as it has worked; twice that for runs that nobody asked for
ASKED_FOR = 1e3  # added to the order of budgets that no call needed yet: those that one needed go first


class Run(NamedTuple):
    """A run of the encoder, as far as that decides its kernels: a graph's, or an eager one.

    Attributes:
        kinds: of pixels that the weights take.
        graph_budget: merged tokens of a graph's budget; 0 for an eager run.
        eager_patch_tokens: patch tokens by which an eager run takes its configurations; 0 for a graph's.
    """

    kinds: tuple[int, ...]
    graph_budget: int = 0
    eager_patch_tokens: int = 0


AROUND = Run(())  # kernels that every call launches: fingerprints, rows of padded images


class Stage(enum.Enum):
    """The stage of a run; see the module's docstring."""

    NEW = enum.auto()
    WANTED = enum.auto()
    READY = enum.auto()


@dataclass(eq=False)
class Kernel:
    """A kernel that runs launch.

    Attributes:
        digest: digest of its cache key; "" until a look-up has missed.
        found: Triton's compiled kernel, not on a device yet; None until a look-up has found it.
    """

    job: KernelJob
    digest: str = ""
    found: Any = None


@dataclass(frozen=True)
class RunState:
    """What the loader knows of a run.

    Attributes:
        order: priority of a WANTED run, smallest first; infinite in other stages.
        refused: a call of it has taken the original code.
        launches: its kernels; None until a try has listed them.
        missing: digests of those that the last try or launch has not found.
        unloaded: kernels that calls have yet to load onto the device, each of which is popped by one call.
    """

    stage: Stage = Stage.NEW
    order: float = math.inf
    refused: bool = False
    launches: tuple[Kernel, ...] | None = None
    missing: frozenset[str] = frozenset()
    unloaded: list[Any] = field(default_factory=list)


UNSEEN = RunState()


class KernelsNotReady(Exception):
    """A call's kernels are still being compiled (the message is ""), or cannot be compiled (it says why)."""


class _Ending(Exception):
    """The process ends."""


@cache
def collect_garbage() -> None:
    """Runs one full garbage collection, the first time only. The imports so far make one due; it takes 0.2 to 0.4 s
    with torch and transformers, and would otherwise fall into one of the next calls."""
    if gc.isenabled():
        gc.collect()


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class KernelLoader:
    """Knows the runs that are ready, and has the kernels of the others compiled.

    Attributes:
        ready: the runs in stage READY: this process has their kernels, or loads them from Triton's cache at their first
            launch.
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
        self.ready: frozenset[Run] = frozenset()
        self._launch = launch
        self._weights = weakref.WeakMethod(weights)
        self._ladder = ladder
        self._service = service
        self._device = device
        self._process = os.getpid()
        self._states: dict[Run, RunState] = {}
        self._kernels: dict[object, Kernel] = {}  # by what decides their code
        self._no_room = ""  # why launches here cannot compile
        self._worked = 0.0  # CPU time at which the thread's last rest ended
        self._orders = self._waiters = 0
        self._trying = threading.Lock()
        self._thread: threading.Thread | None = None

    def _state(self, run: Run) -> RunState:
        return self._states.get(run, UNSEEN)

    def _note(self, runs: Iterable[Run], **changes: Any) -> None:
        with self._service.changed:
            for run in runs:
                self._states[run] = replace(self._state(run), **changes)
            self.ready = frozenset(run for run, state in self._states.items() if state.stage is Stage.READY)

    def _note_ready(self, runs: Iterable[Run]) -> None:
        self._note(runs, stage=Stage.READY, order=math.inf)

    def _note_unwanted(self, runs: Iterable[Run]) -> None:
        """Makes the wanted ones of `runs` NEW again."""
        with self._service.changed:
            wanted = [run for run in runs if self._state(run).stage is Stage.WANTED]
            self._note(wanted, stage=Stage.NEW, order=math.inf)

    # for calls

    def need(self, runs: Collection[Run], wait: bool) -> None:
        """Returns if `runs` are ready, or if Triton's cache may hold their kernels (the caller then launches within
        `guard`). Otherwise requests the missing kernels and raises, or, with `wait`, blocks until they are compiled.

        With `wait` it also returns if no other process can compile, in which case the launches compile here, or if the
        weights were released.

        Raises:
            KernelsNotReady: without `wait`: kernels are missing, or not all are on the device yet. With `wait`: no
                process can compile, this one included.
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
        """Whether launching `runs` straight away is worth a try: nothing is being compiled, Triton's cache is not
        empty, and it holds the kernels of `AROUND`. False for runs that a call was refused for: the thread knows what
        they lack."""
        weights, refused = self._weights(), any(self._state(run).refused for run in runs)
        if weights is None or refused or not self._service.is_idle_with_cache():
            return False
        if AROUND not in self.ready:
            with _current(self._device), loading_from_cache(FromCache(collect=True)) as mode:
                self._launch(AROUND, weights())
                if any(mode.find(job) is None for job in mode.jobs.values()):
                    return False
            self._note_ready([AROUND])
        return True

    def _refuse(self, runs: Collection[Run]) -> NoReturn:
        """Requests the kernels of `runs`, then those of every other budget. It also loads kernels of runs that have
        become ready since they were refused: their own next calls may be many calls of other sizes away.

        Raises:
            KernelsNotReady: always.
        """
        self._load_kernels([run for run in self.ready if self._state(run).refused], time.perf_counter())
        self._service.start_early()
        collect_garbage()
        with self._service.changed:
            self._note(runs, refused=True)
            for run in runs:
                self._ask_for(run)
            kinds = next(iter(runs)).kinds
            for rank, budget in enumerate(self._by_likelihood(kinds)):
                run = Run(kinds, graph_budget=budget)
                if self._state(run).stage is Stage.NEW:
                    self._note([run], stage=Stage.WANTED, order=ASKED_FOR + rank)
            self._start()
        raise KernelsNotReady(self._service.broken)

    def cancel(self) -> None:
        """Stops compiling until a call needs a kernel again. It does nothing in a forked child, where the thread does
        not run and the lock may be held for ever."""
        if os.getpid() != self._process:
            return
        with self._service.changed:
            self._note_unwanted(self._states)
            self._service.changed.notify_all()

    @contextlib.contextmanager
    def guard(self, runs: Collection[Run]) -> Iterator[None]:
        """A context in which launches take kernels from Triton's cache only. On a normal exit `runs` are READY.

        Raises:
            KernelsNotReady: a launch needs a kernel that is not in the cache; the kernel has been requested.
        """
        mode, tried_out = FromCache(collect=False, failed=self._service.failed), self.ready.issuperset(runs)
        try:
            with loading_from_cache(mode):
                yield
            if not tried_out:
                self._note_ready(runs)
        except KernelMissing:
            if not tried_out:
                self._refuse(runs)
            with self._service.changed:  # the launch needs a kernel that the run on the meta device did not list
                self._note(runs, stage=Stage.WANTED, order=0.0, launches=None, missing=frozenset(mode.missing))
                self._send(mode.missing, 0.0, urgent=False)
                self._start()
            raise KernelsNotReady(self._service.broken) from None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context in which launches compile the kernels that are still missing, because no other process could.

        Raises:
            KernelsNotReady: the compiler has no room for its files. From then on `need` raises with `wait` too.
        """
        try:
            yield
        except (OSError, UnicodeError) as error:
            if is_of_handler(error):
                raise
            self._no_room = f"{type(error).__name__}: {error}"
            raise KernelsNotReady(self._no_room) from error

    @contextlib.contextmanager
    def cached(self, runs: Collection[Run]) -> Iterator[None]:
        """As `guard`, but a kernel that is not in the cache is not requested.

        Raises:
            KernelMissing: a launch needs a kernel that is not in the cache.
        """
        with loading_from_cache(FromCache(collect=False, failed=self._service.failed)):
            yield
        self._note_ready(runs)

    def _load(self, runs: Collection[Run]) -> None:
        """Loads kernels of ready runs onto the current device, for at most `LOADING` seconds.

        If no call of these runs was refused, their launches load the kernels instead: the original code would have to
        load its own first, which takes longer.

        Raises:
            KernelsNotReady: time ran out; or kernels of a graph took so long to load that its capture is left to the
                next call.
        """
        if not any(self._state(run).refused for run in runs):
            return  # to their launches, which load what they need
        begun, loads = time.perf_counter(), any(run.graph_budget and self._state(run).unloaded for run in runs)
        if not self._load_kernels(runs, begun) or loads and time.perf_counter() - begun > SOME_LOADING:
            raise KernelsNotReady("")

    def _load_kernels(self, runs: Iterable[Run], begun: float) -> bool:
        """Loads kernels of `runs` until `LOADING` seconds after `begun`; returns whether all are loaded."""
        for run in runs:
            kernels = self._state(run).unloaded
            while kernels:
                if time.perf_counter() - begun > LOADING:
                    return False
                with contextlib.suppress(TritonError, RuntimeError, IndexError):  # the launch will raise it
                    _ = kernels.pop().run
        return True

    def _ask_for(self, run: Run) -> None:
        """Puts a run before those that nobody asked for, and behind those that somebody did."""
        state = self._state(run)
        if state.stage is Stage.READY or state.order < ASKED_FOR:
            return
        self._orders += 1
        # `missing` is emptied so that the thread tries the run again and requests its kernels in the new order.
        self._note([run], stage=Stage.WANTED, order=float(self._orders), missing=frozenset())

    def _by_likelihood(self, kinds: tuple[int, ...]) -> list[int]:
        """Budgets that are not ready, those near what calls asked for first."""
        ready = [run.graph_budget for run in self.ready if run.graph_budget and run.kinds == kinds]
        asked = [
            run.graph_budget for run, state in self._states.items() if run.graph_budget and state.order < ASKED_FOR
        ]
        likely = [*ready, *asked] or [LIKELY]
        rest = set(self._ladder).difference(ready)
        return sorted(rest, key=lambda budget: min(abs(math.log(budget / near)) for near in likely))

    # the thread

    def _start(self) -> None:
        if self._thread is None and not self._service.broken:
            self._thread = self._service.thread(self._work, "fusedvit-kernels")

    def _work(self) -> None:
        """Tries wanted runs until none is left, then ends."""
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
        """Tries the next run, or waits for kernels. Returns False, and the thread ends, if there is nothing to do."""
        service = self._service
        with service.changed:
            wanted = {run: state.order for run, state in self._states.items() if state.stage is Stage.WANTED}
            if not wanted or service.broken or service.ending.is_set() or self._weights() is None:
                self._note_unwanted(wanted)
                self._thread = None
                return False
            run = min(self._not_blocked(wanted), key=wanted.__getitem__, default=None)
            if run is None:
                service.changed.wait(1.0)
                return True
        self._find_kernels_of(run, wanted[run], patient=True)
        return True

    def _not_blocked(self, runs: Iterable[Run]) -> list[Run]:
        """Those of `runs` that the thread may try: no kernel that they miss is being compiled."""
        return [run for run in runs if not self._service.waits_for(self._state(run).missing)]

    def _find_kernels_of(self, run: Run, order: float, patient: bool) -> bool:
        """Finds the kernels of `run` and requests the missing ones; the run is ready if none is. Returns False, with
        nothing known, if the weights were given back or the process ends."""
        weights, service, missing = self._weights(), self._service, set[str]()
        enter_kernels(self._device)  # again, where Triton's cache is another folder by now
        service.wait_for_hash()
        pause: Callable[[], None] = partial(self._pause, REST if order < ASKED_FOR else 2 * REST)
        try:
            with (
                self._trying,
                _current(self._device),
                loading_from_cache(FromCache(True, pause if patient else lambda: None)) as mode,
            ):
                if weights is None:
                    raise WeightsReleased
                launches = self._state(run).launches
                if launches is None:
                    launches = self._list(run, weights(), mode)
                for kernel in launches:
                    if not self._find(kernel, mode):
                        missing.add(kernel.digest)
                        self._send({kernel.digest: kernel.job}, order, urgent=not patient)
        except (WeightsReleased, _Ending):  # the next call needs it again
            self._note_unwanted([run])
            return False
        found = [kernel.found for kernel in launches if kernel.found is not None]
        with service.changed:
            self._note([run], missing=frozenset(missing), unloaded=found)
            if missing <= service.failed.keys():  # a failing launch switches to another backend (`BackendFailed`)
                self._note_ready([run])
        return True

    def _list(self, run: Run, weights: EncoderWeights, mode: FromCache) -> tuple[Kernel, ...]:
        """Lists the kernels that `run` launches, and keeps the list."""
        self._launch(run, weights)
        launches = tuple(self._kernels.setdefault(key, Kernel(job)) for key, job in mode.jobs.items())
        self._note([run], launches=launches)
        return launches

    def _find(self, kernel: Kernel, mode: FromCache) -> bool:
        """Takes a kernel from Triton's cache, unless that was done; returns whether it is there."""
        if kernel.found is None and not self._service.waits_for((kernel.digest,)):
            mode.pause()
            kernel.found = mode.find(kernel.job)
            if kernel.found is None:
                kernel.digest = mode.digest
        return kernel.found is not None

    @contextlib.contextmanager
    def _hurry(self) -> Iterator[None]:
        """A context in which `_pause` does not sleep, as a caller is waiting."""
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
        self._service.compile(Request(arch, get_ptxas_version(arch), jobs, order, urgent))

    def _wait_for(self, runs: Collection[Run]) -> None:
        """Has the kernels of `runs` compiled on all cores, and waits for them; see `need`."""
        service = self._service
        left = [run for run in runs if run not in self.ready]
        if not left:
            return
        with service.used(), self._hurry():
            service.start_early()
            while left and not service.broken:
                if not all([self._find_kernels_of(run, 0.0, patient=False) for run in self._not_blocked(left)]):
                    return  # nobody else may ever prepare weights
                with service.changed:
                    left = [run for run in left if run not in self.ready]
                    if left and not self._not_blocked(left):
                        service.changed.wait(1.0)
