"""What a call costs: launches, time, memory. Each function takes calls without arguments and runs them itself."""

import gc
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedvit.bench.timing import Contender, interleaved

Call = Callable[[], Any]
NO_WORK = {  # operators that are dispatched and yet move no data
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::lift_fresh",
}


@dataclass(frozen=True)
class Launches:
    """kernels: what ran on the GPU. host: how often the CPU had to launch something (a graph counts once)."""

    kernels: int
    host: int


@dataclass(frozen=True)
class Latency:
    """Milliseconds of wall time over `rounds` calls, the GPU waited for."""

    median: float
    best: float
    rounds: int


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


def latency(calls: Mapping[str, Call], device: torch.device, seconds: float = 3.0) -> dict[str, Latency]:
    """Times `calls` interleaved, as `bench.timing.interleaved`."""
    times = interleaved([Contender(name, call) for name, call in calls.items()], device, seconds)
    return {name: Latency(statistics.median(t), min(t), len(t)) for name, t in times.items()}


def peak_mib(call: Call, device: torch.device) -> float:
    """The most that one call had allocated on the GPU beyond what was there before it, outputs included."""
    call()
    gc.collect()  # what dies during the call would count against it
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
