"""How many processor cores this process may use."""

import contextlib
import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")  # the container's own control group, in cgroup v2


def available_cores() -> int:
    """Cores allowed by this process's affinity and by the CPU quota of its control group, rounded, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open(CONTROL_GROUP / "cpu.max") as file:  # "max", or no file: all
        quota, period = file.read().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores
