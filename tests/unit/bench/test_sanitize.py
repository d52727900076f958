"""What compute-sanitizer is given to run: on a CPU, that all of it runs."""

import pytest
import torch

pytest.importorskip("transformers")

from fusedvit.bench import sanitize  # noqa: E402
from fusedvit.bench.towers import GEOMETRIES, spec_of  # noqa: E402
from fusedvit.model.plan import tasks  # noqa: E402

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16


def test_every_operation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []
    real = sanitize.linear_case

    def counting(*arguments, **named):
        case, room = real(*arguments, **named), arguments[4]
        fill = case.fill
        return sanitize.Case(**vars(case) | {"fill": lambda rows: counts.append((rows, room)) or fill(rows)})

    monkeypatch.setattr(sanitize, "linear_case", counting)
    spec = spec_of(GEOMETRIES["tiny"])
    lines = list(sanitize.operations([spec], FP32, CPU))
    named = {task.name for rows in sanitize.BUDGETS for task in tasks(spec, rows, FP32)}
    assert {line.split()[0] for line in lines} == named
    assert {room - rows for rows, room in counts if rows > 1} == {0, 5} and {0, 1} <= {rows for rows, _ in counts}


def test_a_tower_runs() -> None:
    assert list(sanitize.towers({"tiny": GEOMETRIES["tiny"]}, FP32, CPU)) == ["tiny's tower"]


def test_grids_are_loaded() -> None:
    assert len(list(sanitize.grids(CPU))) == 4
