"""How many processor cores this process may use."""

import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")  # the container's own control group, in cgroup v2


def available_cores() -> int:
    """Cores allowed by this process's affinity and by the CPU quota of its control group, rounded, at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open(CONTROL_GROUP / "cpu.max") as file:
            quota, period = file.read().split()
        return min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError) as error:  # "max", or no file: all
        if isinstance(error, TimeoutError) and error.errno is None:  # a signal's handler raised it
            raise
        return cores
