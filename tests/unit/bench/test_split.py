"""Where a run's time goes: kernels put to operations, operations named, tables of them."""

from collections import Counter
from io import StringIO
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

from fusedvit.api import fuse  # noqa: E402
from fusedvit.bench import roofline, show, split  # noqa: E402
from fusedvit.config import FuseConfig  # noqa: E402
from fusedvit.kernels.tile_configs import Target  # noqa: E402
from fusedvit.model.buffers import Capacity, allocate  # noqa: E402
from fusedvit.model.encoder import encode  # noqa: E402
from fusedvit.model.items import Item  # noqa: E402
from fusedvit.model.ops import TORCH  # noqa: E402
from fusedvit.model.plan import plan_for, tasks  # noqa: E402
from tests.support.families import family_tower  # noqa: E402

CPU, FP32 = torch.device("cpu"), torch.float32
TOWERS = ["Qwen3VLVisionModel", "Qwen2_5_VisionTransformerPretrainedModel", "Glm4vVisionModel"]


def test_kernels_are_put_to_the_operations_that_launched_them() -> None:
    times = [("mark", 1.0), ("a", 100.0), ("mark", 1.0), ("b", 20.0), ("b", 30.0), ("mark", 1.0), ("a", 5.0)]
    found = split.by_operation(times, ["qkv", "fc2", "qkv"])
    assert found.ms == pytest.approx({"qkv": 0.105, "fc2": 0.05}) and found.runs == {"qkv": 2, "fc2": 1}
    assert split.by_operation([], ["qkv"]) == split.Split({}, {})
    lost = split.by_operation(times, ["qkv", "fc2"])  # a marker too many: kernels by their own names
    assert lost.ms == pytest.approx({"mark": 0.003, "a": 0.105, "b": 0.05}) and lost.runs == {"mark": 3, "a": 2, "b": 2}


@pytest.mark.parametrize("name", TOWERS)
def test_a_run_says_which_operations_it_has(name: str) -> None:
    """Every linear layer under its name in the plan, as often as the tower has it."""
    handle: Any = fuse(family_tower(name), FuseConfig(graphs=False))
    handle.refresh()
    spec, weights = handle.spec, handle.weights.get()
    plan = plan_for(spec, 64, FP32, Target())
    buffers = allocate(spec, Capacity.of([Item(1, 8, 8)], plan.layout(spec)), FP32, CPU)
    buffers.pixels.normal_()
    buffers.grid.copy_(torch.tensor([(1, 8, 8)]))
    begun: list[str] = []
    encode(spec, weights, buffers, split.watched(TORCH, weights, begun.append), plan)
    counts = Counter(begun)
    layers = dict.fromkeys(("qkv", "proj", "fc1", "fc2", "attention"), spec.depth) | {"patch": 1, "vision_metadata": 1}
    assert {name: counts[name] for name in layers} == layers and begun[0] == "vision_metadata"
    assert {task.name for task in tasks(spec, 64, FP32) if task.key.op == "linear"} <= set(begun)
    assert counts["merger_fc1"] == 1 + len(spec.deepstack)


def test_the_table_of_a_run() -> None:
    cost = roofline.Cost(flops=790e9, bytes=1.0)  # 1 ms at the peak rate
    row = {"split_ms": {"qkv": 4.0, "gap": 1.0}, "runs": {"qkv": 8, "gap": 1}, "costs": {"qkv": vars(cost)}}
    row["forms"] = {"qkv": "hopper"}
    out = StringIO()
    show.show_split({"towers": {"T": {"workloads": {"w": row, "none": {}}}}}, Console(file=out, width=100))
    cells = [line.split() for line in out.getvalue().replace("│", " ").splitlines()]
    assert ["qkv", "hopper", "8", "500.0", "125.0", "25", "%", "80", "%"] in cells
    assert ["gap", "–", "1", "1000.0", "–", "–", "20", "%"] in cells
    assert ["together", "9", "5000"] in cells
