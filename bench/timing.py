"""The cost of calls: times, interleaved round by round, so that a slow spell of the machine hits all contenders; and
launches, synchronisations and memory of one call."""

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[[], Any]
T = TypeVar("T")
NO_WORK = {  # operators that are dispatched and yet move no data
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::lift_fresh",
}
WARM_UPS, LEAST_ROUNDS, MOST_ROUNDS = 2, 5, 60
CALLS = (5, 50.0), (3, 300.0)  # calls per burst, up to how many ms for one call of every contender together


@dataclass(frozen=True)
class Contender:
    """One call. `clock`: "wall" is the time that a caller waits, "gpu" the time between two events around the call."""

    name: str
    run: Call
    clock: str = "wall"


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile over all rounds, and their number."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Bursts:
    """Milliseconds of one contender; a burst is some calls in a row.

    Attributes:
        calls: calls per burst.
        ms: the median call of every burst.
        first: the first call of every burst, when the CPU's caches hold the other contenders' code and data.
    """

    calls: int
    ms: list[float]
    first: list[float]


@dataclass(frozen=True)
class Launches:
    """kernels: kernels that ran on the GPU. host: launches by the CPU (a graph counts once)."""

    kernels: int
    host: int


def interleaved(contenders: Sequence[Contender], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every round by contender, one call each, synchronised: 5 to 60 rounds in about `seconds`."""
    _warm_up(contenders, device)
    rounds = _rounds(contenders, device, seconds, 1)
    return {name: [burst[0] for burst in bursts] for name, bursts in rounds.items()}


def latency(calls: Mapping[str, Call], device: torch.device, seconds: float = 3.0) -> dict[str, Spread]:
    """Milliseconds of wall time of `calls`, as `interleaved`."""
    contenders = [Contender(name, call) for name, call in calls.items()]
    return {name: spread(ms) for name, ms in interleaved(contenders, device, seconds).items()}


def interleaved_bursts(contenders: Sequence[Contender], device: torch.device, seconds: float) -> dict[str, Bursts]:
    """As `interleaved`, in bursts of several calls: the same number for each contender, fewer for slow calls."""
    together = _warm_up(contenders, device)
    calls = next((count for count, most in CALLS if together <= most), 1)
    rounds = _rounds(contenders, device, seconds, calls)
    return {
        name: Bursts(calls, [statistics.median(burst) for burst in bursts], [burst[0] for burst in bursts])
        for name, bursts in rounds.items()
    }


def first_ms(contenders: Sequence[Contender], bursts: Mapping[str, Bursts]) -> dict[str, Any]:
    """Times of the first call of a burst, for contenders on a wall clock; none if a burst is one call."""
    timed = [c.name for c in contenders if c.clock == "wall" and bursts[c.name].calls > 1]
    return {name: asdict(spread(bursts[name].first)) for name in timed}


def _warm_up(contenders: Sequence[Contender], device: torch.device) -> float:
    """Milliseconds of one call of every contender together, once they are warm."""
    return sum([_wall_ms(contender.run, device) for _ in range(WARM_UPS)][-1] for contender in contenders)


def _rounds(
    contenders: Sequence[Contender], device: torch.device, seconds: float, calls: int
) -> dict[str, list[list[float]]]:
    """Milliseconds of every call of every burst."""
    times: dict[str, list[list[float]]] = {contender.name: [] for contender in contenders}
    end = time.perf_counter() + seconds
    for done in range(MOST_ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for contender in contenders:
            clock = gpu_ms if contender.clock == "gpu" and device.type == "cuda" else _wall_ms
            times[contender.name].append([clock(contender.run, device) for _ in range(calls)])
    return times


def spread(values: Sequence[float]) -> Spread:
    """Median and percentiles of `values`; percentiles are values that occurred (the nearest rank)."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


def ratios(peer: Sequence[float], ours: Sequence[float]) -> Spread:
    """peer / ours, round by round."""
    return spread([a / b for a, b in zip(peer, ours, strict=True)])


def _wall_ms(run: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def wait(device: torch.device) -> None:
    """Waits until all launches have run, so that an error shows at the launch that caused it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu_ms(run: Call, device: torch.device) -> float:
    """Milliseconds of one call between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end)


def captured(run: Callable[[int], Any], sets: int, device: torch.device) -> Callable[[], Any]:
    """`run(0)`, `run(1)`, … `run(sets - 1)` as one CUDA graph's replay, which keeps `run`; on a CPU, as they are."""

    def every_set() -> None:
        for i in range(sets):
            run(i)

    if device.type != "cuda":
        return every_set
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every_set()

    def replay(reads: object = run) -> None:  # keeps memory of `run` alive: a graph does not
        graph.replay()

    return replay


def replayed(run: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`run` as one CUDA graph's replay, which returns the tensors that it writes each time; on a CPU, as it is."""
    found: list[T] = []

    def keep(_: int) -> None:
        found[:] = [run()]

    replay = captured(keep, 1, device)

    def call() -> T:
        replay()
        return found[0]

    return call


# ── one call ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def gpu_launches(call: Call) -> Launches:
    """Kernels and host launches of one call, by the profiler. Needs a GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    kernels = host = 0
    for event in profile.events() or ():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        kernels += on_device and not event.name.startswith(("Memcpy", "Memset"))
        host += not on_device and event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"))
    return Launches(kernels, host)


def synchronisations(call: Call) -> list[str]:
    """Where one call waits for the GPU, as "file:line", by the warnings of torch's own debug mode. Needs a GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


def operators(call: Call) -> int:
    """Operators of one call that touch data (no views, no allocations): a CPU's stand-in for kernels."""
    call()
    with _OperatorCount() as mode:
        call()
    return mode.count


def peak_mib(call: Call, device: torch.device) -> float:
    """The peak of GPU memory that one call allocates on top of what was allocated before, outputs included."""
    call()
    gc.collect()  # garbage that is freed during the call would distort its peak
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


class _OperatorCount(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        self.count += not is_view and schema.name not in NO_WORK
        return func(*args, **(kwargs or {}))
