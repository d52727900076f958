"""What is read from nvidia-smi, and which contenders are asked."""

from typing import Any

import pytest
import torch

from fusedvit.bench import power, tower_bench
from fusedvit.bench.power import Drawn, drawn
from fusedvit.bench.timing import Contender
from fusedvit.bench.workloads import WORKLOADS

CPU = torch.device("cpu")
CAPPED = "717.54, 1860, 0x0000000000000004, 700.00"
FREE = "620.00, 1980, 0x0000000000000000, 700.00"
BOTH = "700.00, 1700, 0x0000000000000024, 700.00"  # a reason more


def test_the_middle_half_is_what_counts() -> None:
    idle = "90.0, 345, 0x0000000000000001, 700.00"
    assert drawn([idle, CAPPED, CAPPED, CAPPED, idle, ""]) == Drawn(717.54, 700.0, 1860.0, True, 3)
    assert drawn([idle, idle, FREE, FREE, FREE, FREE, idle, idle]) == Drawn(620.0, 700.0, 1980.0, False, 4)
    assert drawn([FREE, CAPPED, BOTH, FREE]) == Drawn(708.77, 700.0, 1780.0, True, 2)
    assert not drawn([FREE, CAPPED, FREE, FREE]).capped, "half of them"


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="nvidia-smi gave no samples"):
        drawn(["", " "])


def test_ours_and_the_fastest_peer_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"ours, graph alone": 2.0, "engine-like slow": 4.0, "engine-like fast": 3.0}
    calls = [Contender("hf", lambda: None), *(Contender(name, lambda: None, "gpu") for name in taken)]
    engines = {name: None for name in taken if name.startswith("engine")}
    monkeypatch.setattr(tower_bench, "set_up", lambda *a: None)
    monkeypatch.setattr(tower_bench, "inputs", lambda *a: (None, None))
    monkeypatch.setattr(tower_bench, "contenders", lambda *a: (calls, engines, {}))
    by_run: dict[Any, str] = {c.run: c.name for c in calls}
    monkeypatch.setattr(power, "bursts_ms", lambda run, device: taken[by_run[run]])
    monkeypatch.setattr(power, "sustained", lambda run, device, s: (4.0, Drawn(500.0, 700.0, 1980.0, False, 9)))
    found = power.rows(tower_bench.Options(workloads={"1 x 448 px": WORKLOADS["1 x 448 px"]}), CPU)
    assert [(r["contender"], r["burst_ms"]) for r in found] == [("ours, graph alone", 2.0), ("engine-like fast", 3.0)]
    assert all(r["joules"] == 2.0 and r["workload"] == "1 x 448 px" for r in found)


def test_a_burst_s_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "PAUSE_S", 0.0)
    left = iter([9.0, 1.0, 2.0, 3.0, 8.0] * power.BURSTS)
    monkeypatch.setattr(power, "gpu_ms", lambda replay, device: next(left))
    assert power.bursts_ms(lambda: None, CPU) == 3.0
