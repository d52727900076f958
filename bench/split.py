"""Where a replay's time goes: the GPU's own record of every kernel, put to the operations that launched them."""

from collections.abc import Callable
from typing import Any

import torch

from fusedvit.spec import VisionSpec


def kernel_times(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """(kernel, microseconds) of one call in the order they started, copies left out. Needs a GPU."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    events = [e for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    return [(e.name, e.time_range.elapsed_us()) for e in sorted(events, key=lambda e: e.time_range.start)]


def launch_order(spec: VisionSpec, words: bool = False) -> list[str]:
    """The operations that one run of the encoder launches, where each is one kernel; `words`: rotary words as well."""
    block = ["qkv", "attention", "proj", "fc1", "fc2"]
    order = ["metadata", *["rope_words"] * words, "patch"]
    for i in range(spec.depth):
        order += block + (["merger_fc1", "merger_fc2"] if i in spec.deepstack else [])
    return [*order, "merger_norm", "merger_fc1", "merger_fc2"]


def by_operation(times: list[tuple[str, float]], spec: VisionSpec) -> dict[str, float]:
    """Milliseconds by operation; by kernel name where a run launched other than one kernel an operation."""
    orders = [launch_order(spec), launch_order(spec, words=True)]
    names = next((order for order in orders if len(order) == len(times)), [name for name, _ in times])
    found: dict[str, float] = {}
    for name, (_, us) in zip(names, times, strict=True):
        found[name] = found.get(name, 0.0) + us / 1e3
    return found
