"""`python -m fusedvit.bench.power`: what replays draw, at which clock, and how long they take: ours and engine-like.

A GPU lowers its clock when it draws more than it may, after some hundred milliseconds. In short bursts, as other work
stands between two images, a replay runs at the full clock; one after another without an end, who waits for less draws
more and is clocked lower. So both are timed. Needs an NVIDIA GPU and nvidia-smi.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fusedvit.bench import tower_bench
from fusedvit.bench.passport import passport
from fusedvit.bench.timing import gpu_ms
from fusedvit.bench.workloads import WORKLOADS

NAMES = ("1 x 224 px", "1 x 448 px", "video, 8 frames 224 px", "1 x 576 px", "1 x 1024 px")
QUERY = "power.draw.instant,clocks.sm,clocks_event_reasons.active,power.limit"
POWER_CAP = 0x4  # of the reasons: NVML's "software power cap"
EVERY_MS = 100  # between two samples
BURSTS, BURST, PAUSE_S = 12, 5, 0.02  # replays of a burst, and what lies before it
AT_ONCE = 50  # replays between two looks at the clock


@dataclass(frozen=True)
class Drawn:
    """Medians of the middle half of some samples, while clocks had settled.

    Attributes:
        watts: drawn.
        limit_watts: that may be drawn.
        mhz: of the multiprocessors.
        capped: whether the clock was held down for the power in most samples.
    """

    watts: float
    limit_watts: float
    mhz: float
    capped: bool
    samples: int


def drawn(lines: Sequence[str]) -> Drawn:
    """Of nvidia-smi's samples of `QUERY`, a line each.

    Raises:
        ValueError: there are none.
    """
    samples = [[part.strip() for part in line.split(",")] for line in lines if line.strip()]
    middle = samples[len(samples) // 4 : -(-3 * len(samples) // 4)]
    if not middle:
        raise ValueError("nvidia-smi gave no samples: more seconds are needed, or it is not there")
    watts, mhz, limit = (statistics.median(float(sample[i]) for sample in middle) for i in (0, 1, 3))
    capped = sum(bool(int(sample[2], 16) & POWER_CAP) for sample in middle)
    return Drawn(watts, limit, mhz, 2 * capped > len(middle), len(middle))


def bursts_ms(replay: Callable[[], Any], device: torch.device) -> float:
    """Of a replay, the median over bursts, each after a pause."""
    found = []
    for _ in range(BURSTS):
        time.sleep(PAUSE_S)
        found.append(statistics.median(gpu_ms(replay, device) for _ in range(BURST)))
    return statistics.median(found)


def sustained(replay: Callable[[], Any], device: torch.device, seconds: float) -> tuple[float, Drawn]:
    """(Milliseconds of a replay, what was drawn) while nothing else runs for so long."""
    uuid = torch.cuda.get_device_properties(device).uuid
    asked = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    with subprocess.Popen([*asked, f"-lms={EVERY_MS}"], stdout=subprocess.PIPE, text=True) as sampling:
        try:
            ms = _without_a_pause(replay, device, seconds)
        finally:  # it never ends by itself, and is waited for
            sampling.terminate()
        lines = sampling.communicate()[0].splitlines()
    return ms, drawn(lines)


def _without_a_pause(replay: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Milliseconds of a replay, over so many seconds of them."""
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        for _ in range(AT_ONCE):
            replay()
        torch.cuda.synchronize(device)
        count += AT_ONCE
    return 1e3 * (time.perf_counter() - begun) / count


def rows(options: tower_bench.Options, device: torch.device) -> list[dict[str, Any]]:
    """For each workload of `options`' first tower, a row for ours and one for the fastest engine-like in bursts."""
    found = []
    setting = tower_bench.set_up(options.towers[0], options, device)
    for workload, grid in options.workloads.items():
        pixels, grid_thw = tower_bench.inputs(setting, options, grid)
        calls, engines, _ = tower_bench.contenders(setting, options, workload, grid, pixels, grid_thw)
        bursts = {c: bursts_ms(c.run, device) for c in calls if c.clock == "gpu"}
        fastest = min((c for c in bursts if c.name in engines), key=bursts.__getitem__, default=None)
        for contender in (c for c in bursts if c.name == tower_bench.ALONE or c is fastest):
            ms, power = sustained(contender.run, device, options.seconds)
            row = {"workload": workload, "contender": contender.name, "burst_ms": bursts[contender], "ms": ms}
            found.append(row | asdict(power) | {"joules": power.watts * ms / 1e3})
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> int:
    """Writes the rows to `--json`, and prints each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", type=Path, required=True)
    parser.add_argument("--commit", default="", help="recorded as it is; read from git when left out")
    parser.add_argument("--tower", default="Qwen3-VL-8B")
    parser.add_argument("--fa3", type=Path, help="vLLM's FA3 library, or that with xz")
    parser.add_argument("--seconds", type=float, default=2.0, help="of replays without a pause, each")
    args = parser.parse_args()
    workloads = {name: WORKLOADS[name] for name in NAMES}
    options = tower_bench.Options((args.tower,), workloads, fa3=args.fa3, seconds=args.seconds, split=False, short=True)
    with torch.inference_mode():
        found = rows(options, torch.device("cuda"))
    document = {"passport": passport("power", sys.argv[1:], args.commit), "rows": found}
    args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
