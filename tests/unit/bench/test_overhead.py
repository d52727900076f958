"""Where a call's time on the host goes, on graphs that need no GPU."""

import functools
from unittest import mock

import pytest
import torch

from fusedvit.api import fuse
from fusedvit.bench import overhead
from fusedvit.config import FuseConfig
from fusedvit.graphs.limits import check_limits
from tests.support.towers import Call, tiny_tower
from tests.unit.graphs.stand_in import graphs_on_cpu


def test_steps_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ROUNDS", 3)
    tower = tiny_tower()
    handle = fuse(tower, FuseConfig())
    handle.refresh()
    with torch.inference_mode(), graphs_on_cpu(handle, check_limits((16,), 4, 8)) as graphs:
        pixels = Call.of(tower, [(1, 4, 6)]).pixels
        call = functools.partial(tower, pixels, grid_thw=torch.tensor([(1, 4, 6)]))
        call()
        with mock.patch("fusedvit.runtime.inputs.is_on_gpu", lambda grid: False):  # undone before what it covers is
            read = list(overhead.timeline(handle, functools.partial(tower, pixels, grid_thw=[(1, 4, 6)])))
        steps = overhead.timeline(handle, call)
        assert overhead.replay_of(handle, [(1, 4, 6)], call) == graphs.manager.graph(16).replay
    names = list(steps)
    first = ["call", "begin", "mark", "before_use", "load_inputs", "replay"]
    wanted = [*first, "reason_of_call", "check_pixels", "look", "done", "true", "settle"]
    assert [name for name in names if name in wanted] == wanted
    first.insert(first.index("load_inputs"), "table")
    wanted = [*first, "reason_of_call", "check_pixels", "check_items", "settle", "look", "done", "true"]
    assert [name for name in read if name in wanted] == wanted, "a grid on the host, too, is checked afterwards"
    assert {"new_outputs", "after_use", "waiting for the GPU"} <= set(names)
    begins = [step["at_us"] for step in steps.values()]
    assert begins == sorted(begins) and all(step["us"] >= 0 for step in steps.values())
    assert steps["begin"]["us"] > steps["load_inputs"]["us"] + steps["replay"]["us"]
    assert "replay" not in vars(graphs.encoder) and not hasattr(graphs.encoder.load_inputs, "__wrapped__")
