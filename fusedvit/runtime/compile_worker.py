"""`python -m fusedvit.runtime.compile_worker`: a program that compiles kernels into Triton's cache for another process.

It reads requests from its standard input and reports each kernel as a line of JSON on a pipe of its own. It imports
Triton once (and not PyTorch, if `compile_program` has started it) and forks a child for each kernel, so that a compiler
that crashes costs one kernel. It touches no GPU: a request names the architecture. It ends with its input or with the
process that started it, and its children end with it.
"""

import argparse
import contextlib
import errno
import fcntl
import glob
import json
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import triton
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime.cache import get_cache_manager

from fusedvit.cores import CONTROL_GROUP, available_cores
from fusedvit.errors import attempted
from fusedvit.kernels.codegen_checks import AbsentGPU
from fusedvit.kernels.launch import (
    FromCache,
    KernelJob,
    cache_folder,
    forget_damaged,
    is_cached,
    loading_from_cache,
    private_cache,
)
from fusedvit.runtime.compile_service import HEADER, Request
from fusedvit.runtime.compiled_kernels import build_launcher, end_with_parent

MOST_CHILDREN = 16
MEMORY_OF_A_CHILD = 600 << 20  # bytes
NICENESS = 19  # of a child whose kernel nobody waits for
LONGEST = 300.0  # seconds that one kernel may take
TICK = 0.25  # seconds between two looks at the process that started this one
TRIES = 2  # of a kernel whose child was killed, or wrote files where it could not: the cache may be cleared just then
BUSY = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # the system has no room for a process for now
PTXAS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


@dataclass
class Waiting:
    """A kernel to compile; the smallest `order` goes first, not before the time `since`."""

    job: KernelJob
    arch: int
    order: tuple[float, int]
    urgent: bool
    since: float = 0.0
    tries: int = 0


@dataclass
class Child:
    """A process that compiles one kernel, and what it has reported. `private`: `Worker.private` when it was forked."""

    pid: int
    digest: str
    waiting: Waiting
    since: float
    private: bool
    text: bytes = b""


@dataclass
class Worker:
    """The program's state.

    Attributes:
        parent: process that started this one.
        scratch: folder of that process for temporary files.
        out: the pipe for reports.
        children: by the descriptor that each writes to.
        private: whether kernels go to a folder within `scratch`, as Triton's cache takes none.
    """

    parent: int
    scratch: Path
    out: TextIO
    private: bool = False
    waiting: dict[str, Waiting] = field(default_factory=dict)
    children: dict[int, Child] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    received: bytes = b""
    told_to_end: bool = False

    def serve(self) -> None:
        """Works until the input or the process at its other end is gone."""
        self.selector.register(0, selectors.EVENT_READ)
        with contextlib.suppress(AssertionError, OSError, subprocess.SubprocessError):
            nvidia.library_dirs()  # which children would look for one by one
        if not _takes_files(cache_folder()):
            self._go_private()
        while os.getppid() == self.parent:
            self._start_children()
            for key, _ in self.selector.select(TICK):
                if key.fd == 0:
                    if not self._receive():
                        return
                else:
                    self._hear(key.fd)
            self._kill_slow()

    def end(self) -> None:
        """Kills the children; if the other process is gone, removes its folder."""
        for fd in list(self.children):
            self._kill(self.children[fd])
        for _ in range(0 if self.told_to_end else 20):  # the input may end a moment before that process does
            if os.getppid() != self.parent:
                shutil.rmtree(self.scratch, ignore_errors=True)
                return
            time.sleep(0.05)

    # requests and answers

    def _receive(self) -> bool:
        """Reads from the input; returns False at its end."""
        read = os.read(0, 1 << 20)
        self.received += read
        while len(self.received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self.received)
            if not size:
                self.told_to_end = True
                return False
            if len(self.received) < HEADER.size + size:
                break
            text, self.received = self.received[HEADER.size :][:size], self.received[HEADER.size + size :]
            self._accept(pickle.loads(text))
        return bool(read)

    def _accept(self, request: Request) -> None:
        _match_ptxas(request)
        running = {child.digest for child in self.children.values()}
        for digest, job in request.jobs.items():
            known = self.waiting.get(digest)
            order = request.order, -len(job.kernel().src)  # those with most source take longest, roughly
            if known is not None:
                known.order, known.urgent = min(known.order, order), known.urgent or request.urgent
            elif digest not in running:
                self.waiting[digest] = Waiting(job, request.arch, order, request.urgent)

    def _say(self, **what: Any) -> None:
        print(json.dumps(what), file=self.out, flush=True)

    # children

    def _start_children(self) -> None:
        while self.waiting and len(self.children) < most_children(any(w.urgent for w in self.waiting.values())):
            now = time.monotonic()
            ready = [digest for digest, w in self.waiting.items() if w.since <= now]
            if not ready:
                return
            digest = min(ready, key=lambda d: self.waiting[d].order)
            self._start(digest, self.waiting.pop(digest))

    def _start(self, digest: str, waiting: Waiting) -> None:
        """Forks a child, unless another process has compiled this kernel, or does so now."""
        if is_cached(digest, waiting.job.name):
            self._say(done=digest)
            return
        lock = _lock(digest)
        if lock is None:
            waiting.since = time.monotonic() + 2 * TICK
            self.waiting[digest] = waiting
            return
        triton.runtime.driver.set_active(AbsentGPU(waiting.arch))
        with loading_from_cache(FromCache(collect=True)) as mode:
            mode.find(waiting.job)  # what keys are made of is computed once, before the forks
        if mode.digest not in ("", digest):
            if lock >= 0:
                os.close(lock)
            error = f"the key of {waiting.job.name} is another one in the compiling process"
            self._say(failed=digest, error=error, stale=True, busy=True)
            return
        forget_damaged(digest, waiting.job.name)
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            self._do_without(digest, waiting, (reader, writer, lock), error)
            return
        if pid == 0:
            _compile(waiting.job, writer, nice=not waiting.urgent)
        os.close(writer)
        with contextlib.suppress(OSError):  # here and in the child: whoever is first
            os.setpgid(pid, pid)
        if lock >= 0:
            os.close(lock)  # the child has it
        self.children[reader] = Child(pid, digest, waiting, time.monotonic(), self.private)
        self.selector.register(reader, selectors.EVENT_READ)

    def _do_without(self, digest: str, waiting: Waiting, opened: Sequence[int], error: OSError) -> None:
        """Handles a failed fork: the kernel waits for the children that run, or fails if none does."""
        for fd in opened:
            if fd >= 0:
                os.close(fd)
        if self.children:
            waiting.since = time.monotonic() + 2 * TICK
            self.waiting[digest] = waiting
        else:
            self._say_failed(digest, _said_of(error))

    def _say_failed(self, digest: str, said: dict[str, Any]) -> None:
        """Reports a kernel that failed. `said` has the error, with an errno if the system caused it, not the kernel."""
        self._say(failed=digest, error=said["error"], compiler="errno" not in said, busy=said.get("errno") in BUSY)

    def _hear(self, fd: int) -> None:
        child = self.children[fd]
        read = os.read(fd, 1 << 16)
        child.text += read
        if read:
            return
        self._forget(fd)
        said = json.loads(child.text) if child.text else {"error": "its compiler was killed", "lost": True}
        of_files = said.get("errno") not in (None, *BUSY)
        if "error" not in said:
            self._say(done=child.digest)
        elif ("lost" in said or of_files) and child.waiting.tries + 1 < TRIES:
            child.waiting.tries += 1
            self.waiting[child.digest] = child.waiting
        elif of_files and not child.private and (self.private or self._go_private()):
            self.waiting[child.digest] = child.waiting
        else:
            self._say_failed(child.digest, said)

    def _forget(self, fd: int) -> None:
        child = self.children.pop(fd)
        self.selector.unregister(fd)
        os.close(fd)
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(child.pid, 0)

    def _kill_slow(self) -> None:
        for child in list(self.children.values()):
            if time.monotonic() - child.since > LONGEST:
                self._kill(child)  # its pipe ends, and it is heard

    def _kill(self, child: Child) -> None:
        """Kills a child and its compiler, and removes what Triton was writing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        for left in glob.glob(f"{_folder(child.digest)}/tmp.pid_{child.pid}_*"):
            shutil.rmtree(left, ignore_errors=True)

    def _go_private(self) -> bool:
        """Keeps kernels in a folder within `scratch` from now on; returns whether that takes files."""
        folder = self.scratch / "kernels"
        self.private = _takes_files(str(folder))
        if self.private:
            triton.knobs.cache.manager_class = private_cache(str(folder))
            self._say(private=str(folder))
        return self.private


def _match_ptxas(request: Request) -> None:
    """Makes keys here name the version of ptxas that the other process's keys name: that process reads it once, and
    PyTorch's Inductor may set TRITON_PTXAS_PATH later, somebody to what is no program."""
    if attempted(lambda: get_ptxas_version(request.arch)) != request.ptxas:
        for name in PTXAS:
            os.environ.pop(name, None)
        get_ptxas_version.cache_clear()


def most_children(urgent: bool) -> int:
    """How many kernels are compiled at a time: by cores and free memory; unless urgent, one core stays free."""
    cores = available_cores()
    wanted = cores if urgent else cores - 1
    return max(1, min(MOST_CHILDREN, wanted, available_memory() // MEMORY_OF_A_CHILD))


def available_memory() -> int:
    """Bytes of memory that are free, in the machine and in the control group."""
    found = 1 << 40
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    with contextlib.suppress(OSError, ValueError, IndexError):
        most, used = (int((CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        files = int(
            (CONTROL_GROUP / "memory.stat").read_text().split("\nfile ")[1].split()[0]
        )  # given back when it is needed
        found = min(found, most - used + files)
    return max(0, found)


def _folder(digest: str) -> str:
    return str(getattr(get_cache_manager(digest), "cache_dir", ""))


def _lock(digest: str) -> int | None:
    """Locks a kernel's folder in the cache. Returns its descriptor, -1 if it cannot be locked, None if it is locked."""
    try:
        fd = os.open(_folder(digest), os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        return -1
    return fd


def _takes_files(folder: str) -> bool:
    """Whether files can be written in `folder`, which is made if need be."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
    except OSError:
        return False
    return True


def _said_of(error: OSError) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}", "errno": error.errno}


def _compile(job: KernelJob, writer: int, nice: bool) -> None:
    """The child: compiles one kernel, reports the result, and ends."""
    said: dict[str, Any] = {}
    try:
        os.setpgid(0, 0)
        end_with_parent()
        if nice:
            os.nice(NICENESS)
        kernel = job.build()
        build_launcher(kernel)
    except OSError as error:
        said = _said_of(error)
    except BaseException as error:  # whatever a compiler dies of is said to the one who waits for the kernel
        said = {"error": f"{type(error).__name__}: {error}"[:2000]}
    os.write(writer, json.dumps(said).encode())
    os._exit(0)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parent", type=int, help="process that started this one")
    parser.add_argument("scratch", type=Path, help="its folder for temporary files")
    parser.add_argument("answers", type=int, help="descriptor of a pipe to that process")
    args = parser.parse_args()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide exit codes
    os.set_inheritable(args.answers, False)  # compilers have no use for it
    worker = Worker(args.parent, args.scratch, os.fdopen(args.answers, "w"))
    try:
        worker.serve()
    finally:
        worker.end()
    os._exit(0)  # Python's own end, with all that is imported, takes a second on a busy machine


if __name__ == "__main__":
    main()
