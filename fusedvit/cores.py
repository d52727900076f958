"""How many processor cores this process may use."""

import contextlib
import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, in cgroup v2


def available_cores() -> int:
    """Cores by this process's affinity and the CPU quota of its control group, at least 1; a part of a core rounds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open(CONTROL_GROUP / "cpu.max") as file:  # "max", or no file: all
        quota, period = file.read().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores
