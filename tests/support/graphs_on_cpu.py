"""A fused tower on graphs that need no GPU, for tests of speculative replays."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fusedvit.api import fuse
from fusedvit.config import FuseConfig
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.graphs.limits import check_limits
from fusedvit.runtime import speculative_replay
from fusedvit.runtime.captured_encoder import TowerGraphs
from fusedvit.runtime.inputs import check_items
from fusedvit.runtime.runner import run_eager
from tests.support.towers import Call, tiny_tower
from tests.unit.graphs.stand_in import graphs_on_cpu

LIMITS = check_limits((4, 16, 64), 4, 8)
GRID = [(1, 4, 6), (2, 4, 4)]  # 56 patch tokens, 14 merged
BAD = {
    "another total": [(1, 4, 6), (2, 4, 2)],
    "negative": [(-1, 4, 6), (2, 4, 10)],
    "no h": [(1, 0, 6), (2, 4, 7)],
    "odd": [(1, 3, 8), (2, 4, 4)],
    "huge": [(1, 2**40, 6), (2, 4, 4)],
    "overflowing": [(2**32, 2**32, 2), (2, 4, 4)],
    "of the right total in 32 bits": [(1, 4, 2**32 + 6), (2, 4, 4)],
}
Case = tuple[Any, FusedEncoder, TowerGraphs]


@pytest.fixture
def case() -> Iterator[Case]:
    tower = tiny_tower()
    handle = fuse(tower, FuseConfig(strict=True))
    handle.refresh()
    with torch.inference_mode(), graphs_on_cpu(handle, LIMITS) as graphs:
        yield tower, handle, graphs


def answer(tower: Any, pixels: torch.Tensor, grid: Any) -> list[torch.Tensor]:
    out = tower(pixels, grid_thw=torch.tensor(grid))
    return [out.last_hidden_state, out.pooler_output, *out.deepstack_features]


def eager(handle: FusedEncoder, pixels: torch.Tensor, grid: Any) -> list[torch.Tensor]:
    runtime = handle.prepared.runtime
    assert runtime is not None
    out = run_eager(runtime, pixels, check_items([list(row) for row in grid], len(pixels), 2))
    return [out.hidden, *out.merged]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two runs of other row counts agree: a processor's products may add up in another order for them."""
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(a, b, strict=True))


def right(case: Case, grid: Any) -> bool:
    """Whether a call of `grid` answers as an eager run of the same items does."""
    tower, handle, _ = case
    pixels = Call.of(tower, grid).pixels
    return close(answer(tower, pixels, grid), eager(handle, pixels, grid))


def speculated(case: Case) -> list[bool]:
    """Notes for each call from now on whether a replay was begun before the grid was read."""
    notes: list[bool] = []
    real = speculative_replay.begin

    def begin(*arguments: Any) -> Any:
        replay = real(*arguments)
        notes.append(replay is not None)
        return replay

    mock.patch.object(speculative_replay, "begin", begin).start()
    return notes


def noted(*functions: tuple[Any, str]) -> list[str]:
    """Names of these functions, (where each hangs, name), as they are called from now on."""
    order: list[str] = []
    for owner, name in functions:
        real = getattr(owner, name)

        def note(*given: Any, real: Any = real, name: str = name) -> Any:
            order.append(name)
            return real(*given)

        mock.patch.object(owner, name, note).start()
    return order


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    mock.patch.stopall()
