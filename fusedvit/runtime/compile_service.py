"""The client of the compiling process (`compile_worker`): sends it missing kernels and notes which are done.

One compiling process serves all towers of this process. It starts with the first missing kernel, or earlier if Triton's
cache is empty, and ends when nobody waits for a kernel.
"""

import _socket
import atexit
import contextlib
import fcntl
import json
import logging
import math
import os
import pickle
import queue
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import IO, Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.nvidia.compiler import CUDAOptions, get_ptxas_version
from triton.runtime import driver
from triton.runtime.cache import triton_key

from fusedvit.children import absolute, interpreter, search_path
from fusedvit.errors import InputError, attempted, is_of_handler, unnamed
from fusedvit.kernels.launch import KernelJob, cache_folder, private_cache

logger = logging.getLogger("fusedvit")

HEADER = struct.Struct("<Q")  # bytes of the request that follows; 0 for the last one
LONGEST_END = 5.0  # seconds that a thread may take to end
PROGRAM = "fusedvit.runtime.compile_program"
STARTS = 3  # of the program, until it is given up
RETRY = 30.0  # seconds after which a thread or process that the system had no room for is tried again
TRIES = 3  # of a kernel that is done and cannot be found, or has another key in the program
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Request:
    """What is sent to the worker.

    Attributes:
        arch: what to compile for, as Triton numbers it (90).
        ptxas: the version of ptxas that the kernels' keys name, as it says it.
        jobs: kernels by the digests of their keys.
        order: of these kernels among others that wait; the smallest goes first.
        urgent: somebody waits: they are compiled with the usual priority, and on every core.
    """

    arch: int
    ptxas: str
    jobs: Mapping[str, KernelJob]
    order: float
    urgent: bool


class CompileService:
    """Sends kernels to the worker and notes which are done.

    Attributes:
        changed: notified when a kernel is done or failed, and when nothing can be compiled any more.
        done: digests of kernels that are in the cache now.
        failed: what the compiler said of those that it cannot compile.
        broken: why nothing can be compiled in the background, for good or for now; "" where it can.
        ending: set when the process ends.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        self.broken = ""
        self._again = math.inf  # the time of the next try
        self._said = ""  # in the last warning
        self.ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._waiting: dict[str, Request] = {}  # by digest, until done or failed
        self._tries: Counter[str] = Counter()
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._scratch = ""
        self._full: set[str] = set()  # caches of which a warning said that they take no files
        self._settings: dict[str, str] = {}  # of Triton, with which the program was started
        self._starts = 0
        self._users = 0
        self._owner = os.getpid()
        self._hashing: threading.Thread | None = None
        atexit.register(self.stop)

    def hash_early(self) -> None:
        """Begins `hash_compiler` in a thread, the first time only: the first call does not wait for keys, but whoever
        finds out which kernels it lacks does."""
        with self.changed:
            if self._hashing is None and not self.broken and not self.ending.is_set():
                self._hashing = self.thread(hash_compiler, "fusedvit-key")

    def wait_for_hash(self) -> None:
        """Waits for what `hash_early` began."""
        if self._hashing is not None:
            self._hashing.join()

    def start_early(self) -> None:
        """Starts the program, and `hash_early`, if Triton's cache is empty: the program's imports take about as long as
        finding out what is missing. Call it within `used`, or just before.

        After a start that failed for lack of resources, a call `RETRY` seconds later tries again."""
        with self.changed:
            self._follow_settings()
            if time.monotonic() >= self._again:
                self.broken, self._again, self._starts = "", math.inf, 0
            if self._process is None and not self.broken and not self.ending.is_set() and _cache_is_empty():
                self.hash_early()
                self._start()

    def is_idle_with_cache(self) -> bool:
        """Whether nothing is being compiled, and Triton's cache holds something."""
        return self._process is None and not _cache_is_empty()

    def compile(self, request: Request) -> None:
        """Sends the kernels of `request` to the program, except those that have failed.

        A kernel that was compiled and is not found in the cache is sent again, `TRIES` times in all.
        """
        with self.changed:
            self._follow_settings()
            new = {digest: job for digest, job in request.jobs.items() if digest not in self.failed}
            if self.broken or not new:
                return
            for digest in new:
                self._tries[digest] += digest in self.done
                if self._tries[digest] == TRIES:
                    self.give_up(f"{new[digest].name} was compiled and is not in Triton's cache")
                    return
            self.done.difference_update(new)
            new = {digest: job for digest, job in new.items() if self._goes_before(request, self._waiting.get(digest))}
            if not new:
                return
            request = replace(request, jobs=new)
            self._waiting.update(dict.fromkeys(new, request))
            if self._process is None:
                self._start()
            else:
                self._send(request)

    def _follow_settings(self) -> None:
        """Ends a program that was started with other settings of Triton than those of now, and forgets what it said:
        PyTorch's Inductor, vLLM and SGLang set TRITON_CACHE_DIR when they first compile."""
        settings = {name: value for name, value in self._environment().items() if name.startswith("TRITON_")}
        settings |= get_cache_invalidating_env_vars()  # some have other names
        known, self._settings = self._settings, settings
        if known not in ({}, settings):
            self.done.clear()
            self.failed.clear()
            self.broken, self._again, self._starts = "", math.inf, 0
            self._tries.clear()
            self._waiting.clear()  # whoever needs them finds out which of them the cache of now lacks
            self._end_process()
            self.changed.notify_all()

    @staticmethod
    def _goes_before(request: Request, known: Request | None) -> bool:
        return known is None or request.order < known.order or request.urgent > known.urgent

    def waits_for(self, digests: Iterable[str]) -> bool:
        """Whether any of these is still to be compiled."""
        return any(digest in self._waiting for digest in digests)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """A context in which the program is kept running; it ends with the last such context."""
        with self.changed:
            self._users += 1
        try:
            yield
        finally:
            with self.changed:
                self._users -= 1
                if not self._users:
                    self._waiting.clear()  # whoever needs them after all sends them again
                    self._end_process()

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread | None:
        """Starts a thread that ends before the process does, as Python would abort inside a compiler's code. Returns
        None if the system has no room for a thread; nothing is compiled for now."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, daemon=True, name=name)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self.give_up(f"{type(error).__name__}: {error}", for_now=True)
            return None
        return thread

    def stop(self) -> None:
        """Ends the program and every thread, and removes its files; in a fork of this process it does nothing."""
        if os.getpid() != self._owner:
            return
        self.ending.set()
        with self.changed:
            self._end_process()
            self.changed.notify_all()
            scratch, self._scratch = self._scratch, ""
        for thread in self._threads:
            if thread.is_alive():  # one that could not be started cannot be joined
                thread.join(LONGEST_END)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)

    # the program

    def _start(self) -> None:
        self._starts += 1
        try:
            process = self._program()
        except InputError as error:
            self.give_up(unnamed(error))
            return
        except OSError as error:
            if is_of_handler(error):
                raise
            self.give_up(f"{type(error).__name__}: {error}", for_now=True)
            return
        outbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        works = {"fusedvit-compile": self._listen, "fusedvit-send": self._write}
        if not all(self.thread(partial(work, process, outbox), name) for name, work in works.items()):
            with process:  # closes its pipes, and waits for it
                process.kill()
            return
        self._process, self._outbox = process, outbox
        for request in {id(request): request for request in self._waiting.values()}.values():
            self._send(request)

    def _program(self) -> "subprocess.Popen[bytes]":
        """Starts the program; `stdout` of what is returned has its answers. Raises OSError, and InputError if there is
        no interpreter to run it."""
        python = interpreter()
        if not os.path.isdir(self._scratch):  # not made yet, or removed: systems clear /tmp of what is old
            self._scratch = tempfile.mkdtemp(prefix="fusedvit-")
        ours, theirs = _ends()  # not its standard output: what is imported there may print
        with theirs, contextlib.ExitStack() as undo:
            answers = undo.enter_context(ours)
            process = subprocess.Popen(
                [python, "-m", PROGRAM, str(os.getpid()), self._scratch, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd=self._scratch,  # not the user's, whose modules might have names of ours
                env=self._environment(),
                start_new_session=True,  # Ctrl-C is ours to handle
            )
            undo.pop_all()
        process.stdout = answers
        return process

    def _environment(self) -> dict[str, str]:
        """The program's environment. Of some settings, Triton has read here what the environment said when it was
        imported, or what was set without the environment: keys of kernels name that, so that the program reads it."""
        read_here = {
            "TRITON_INTERPRET": "0",  # of kernels that are interpreted here, none is compiled
            "TRITON_DEBUG": str(int(triton.knobs.runtime.debug)),
            "PTXAS_OPTIONS": CUDAOptions.ptx_options,
        }
        return {
            **{name: value for name, value in {**os.environ, **read_here}.items() if value is not None},
            **dict.fromkeys(THREADS, "1"),
            **search_path(),
            "TRITON_CACHE_DIR": _cache_folder(),
            "TMPDIR": self._scratch,
            "CUDA_VISIBLE_DEVICES": "",
        }

    def _send(self, request: Request) -> None:
        self._outbox.put(request)

    def _write(self, process: "subprocess.Popen[bytes]", outbox: "queue.SimpleQueue[Request | None]") -> None:
        """Sends what is put into the outbox, in a thread: while the program starts, a pipe that is full blocks."""
        assert process.stdin is not None, "started with a pipe"
        with contextlib.suppress(OSError), process.stdin:  # it may have ended, which `_listen` deals with
            while True:
                request = outbox.get()
                text = b"" if request is None else pickle.dumps(request)
                process.stdin.write(HEADER.pack(len(text)) + text)
                process.stdin.flush()
                if request is None:
                    return

    def _listen(self, process: "subprocess.Popen[bytes]", outbox: "queue.SimpleQueue[Request | None]") -> None:
        assert process.stdout is not None, "started with a pipe"
        with contextlib.suppress(ValueError, OSError), process.stdout as lines:
            for line in lines:
                with self.changed:
                    if self._process is process:  # else we have ended it, and its answers may be of other settings
                        self._hear(json.loads(line))
        process.wait()
        outbox.put(None)  # who sends ends too
        with self.changed:
            if self._process is not process:  # ended by us
                return
            self._process = None
            if self._waiting and self._starts < STARTS:
                self._start()
            elif self._waiting:
                self.give_up(f"the compiling process ended with status {process.returncode}")

    def _hear(self, said: dict[str, Any]) -> None:
        with self.changed:
            if "private" in said:
                self._take_private(said["private"])
            elif "done" in said:
                self._waiting.pop(said["done"], None)
                self.done.add(said["done"])
                self._starts = 0
            elif said.get("compiler"):
                self._waiting.pop(said["failed"], None)
                self.failed[said["failed"]] = said["error"]
            elif said.get("stale") and self._tries[said["failed"]] + 1 < TRIES:
                self._waiting.pop(said["failed"], None)  # looked up while settings changed: it is looked up again
                self._tries[said["failed"]] += 1
            else:
                self.give_up(said["error"], for_now=bool(said.get("busy")))
            self.changed.notify_all()

    def _take_private(self, folder: str) -> None:
        """Makes Triton in this process use the program's folder of kernels, as its own cache takes no files."""
        triton.knobs.cache.manager_class = private_cache(folder)
        cache = cache_folder() or os.environ.get("TRITON_CACHE_DIR", "")
        if cache not in self._full:
            logger.warning(
                "fusedvit: the Triton cache %s takes no files; kernels are kept in %s until this process ends",
                cache,
                folder,
            )
        self._full.add(cache)

    def give_up(self, why: str, for_now: bool = False) -> None:
        """Stops background compilation, for good or for `RETRY` seconds, and warns once."""
        with self.changed:
            if not self.broken and why != self._said:
                until = f" for now, tried again after {RETRY:.0f} s" if for_now else ""
                logger.warning("fusedvit: kernels cannot be compiled%s: %s", until, why)
            self.broken = self._said = why
            self._again = time.monotonic() + RETRY if for_now else math.inf
            self._waiting.clear()
            self._end_process()
            self.changed.notify_all()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process = None
            self._outbox.put(None)


def _ends() -> tuple[IO[bytes], IO[bytes]]:
    """What answers are read from, and what they are written to: a pair of sockets.

    Threads of gevent and eventlet share one thread of the operating system. One that waits for a pipe would stop the
    others, among them the one that has yet to send requests; waits for a socket are replaced by these libraries. They
    leave `_socket` alone, as do tests that refuse every other socket (pytest-socket).
    """
    pair = _socket.socketpair()
    try:  # numbered from 3 on: a lower number is a standard stream's, which may be closed here
        ours, theirs = (fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3) for end in pair)
    finally:
        for end in pair:
            end.close()
    for number in (ours, theirs):
        os.set_blocking(number, True)  # else `socket.setdefaulttimeout` decides
    try:
        with socket.socket(socket.AF_UNIX, fileno=ours) as found:
            found.settimeout(None)  # an answer may take minutes
            return found.makefile("rb"), open(theirs, "wb")
    except RuntimeError:  # refused
        return open(ours, "rb"), open(theirs, "wb")


def _cache_folder() -> str:
    found = cache_folder()
    return absolute(found) if found else ""


def _cache_is_empty() -> bool:
    """Whether Triton's cache holds nothing, or is not there."""
    try:
        with os.scandir(_cache_folder()) as entries:
            return next(entries, None) is None
    except OSError as error:
        if is_of_handler(error):
            raise
        return True


def hash_compiler() -> None:
    """Computes what the key of every kernel begins with, and Triton keeps: a hash of Triton's files, and the version of
    ptxas. The first time it takes 0.5 s, 1 s from a cold disk. Whatever fails fails again where a key is needed."""
    attempted(triton_key)
    attempted(lambda: get_ptxas_version(driver.active.get_current_target().arch))


@cache
def service_of(process: int) -> CompileService:
    """The service of this process, whose id is `process`: a forked child gets a service of its own."""
    return CompileService()
