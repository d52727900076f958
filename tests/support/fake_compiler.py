"""Compiling without a compiler: which kernels a run launches is told, and so is which of them are compiled."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fusedvit.kernels import launch
from fusedvit.runtime.compile_service import CompileService, Request
from fusedvit.runtime.kernel_loader import Run

KERNEL = SimpleNamespace(run="loads it")


@dataclass(frozen=True)
class FakeJob:
    """Implements as much of `KernelJob` as `FromCache` asks for."""

    name: str

    def kernel(self) -> object:
        return SimpleNamespace(hash="known")

    def build(self) -> object:
        mode = launch.from_cache()
        assert mode is not None
        return mode.submit(self.name, lambda: KERNEL, lambda kernel: None)


class FakeCompiler(CompileService):
    """A service without a process: what is sent waits until `finish` or `fail`.

    Attributes:
        launches: names of the kernels that each run launches.
        sent: requests, in order.
        at_once: whatever is sent is compiled.
        cached: names of the kernels that are compiled.
    """

    def __init__(self, launches: Callable[[Run], list[str]]) -> None:
        super().__init__()
        self.launches = launches
        self.sent: list[Request] = []
        self.at_once = False
        self.cached: set[str] = set()

    def launch(self, run: Run, weights: Any) -> None:
        """What `MetaRuns.launch` stands for, and real launches within a guard as well."""
        for name in self.launches(run):
            mode = launch.from_cache()
            assert mode is not None
            job: Any = FakeJob(name)
            mode.begin(name, lambda job=job: job)
            if not mode.collect:
                job.build()

    def is_cached(self, digest: str, name: str) -> bool:
        """Stands for `kernels.launch.is_cached`."""
        return name in self.cached

    def is_idle_with_cache(self) -> bool:
        return self._process is None and bool(self.cached)

    def _start(self) -> None:
        self._process: Any = self
        for request in {id(request): request for request in self._waiting.values()}.values():
            self._send(request)

    def _send(self, request: Request) -> None:
        self.sent.append(request)
        if self.at_once:
            self.finish([job.name for job in request.jobs.values()])

    def _end_process(self) -> None:
        self._process = None

    def finish(self, names: Iterable[str]) -> None:
        """These are compiled."""
        with self.changed:
            self.cached.update(names)
            waiting = {d: job for request in self._waiting.values() for d, job in request.jobs.items()}
            for digest in [digest for digest, job in waiting.items() if job.name in self.cached]:
                self._hear({"done": digest})

    def finish_all(self) -> None:
        """Everything that was sent is compiled."""
        self.finish(self.names())

    def fail(self, name: str, why: str) -> None:
        """The compiler refuses a kernel."""
        digest = next(d for request in self.sent for d, job in request.jobs.items() if job.name == name)
        self._hear({"failed": digest, "error": why, "compiler": True})

    def names(self) -> list[str]:
        """Names of the kernels that were sent, in order."""
        return [job.name for request in self.sent for job in request.jobs.values()]

    @property
    def users(self) -> int:
        """How many keep the service."""
        return self._users
