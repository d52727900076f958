"""Calls as vLLM takes them and the fused encoder does not: vLLM's own code answers, or refuses them in its own way."""

from collections.abc import Callable
from typing import Any

import einops
import numpy as np
import pytest
import torch

import fusedvit
from tests.serving.vllm.support import close, load, pixels_of, tower_of, under

GRID = [(1, 8, 8), (2, 4, 12)]
ARCHITECTURES = ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def served(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    config, model = load(request.param)
    return config, tower_of(model), fusedvit.fuse(model)


def outcome(config: Any, call: Callable[[], torch.Tensor]) -> Any:
    with torch.inference_mode(), under(config):
        try:
            return call()
        except Exception as error:  # whatever it is: both must raise it
            return type(error), str(error)


def both(served: Any, grid: Any, rows: int | None = None) -> tuple[Any, Any]:
    """The fused tower's and vLLM's own, of all pixels or the first `rows`."""
    config, tower, _ = served
    pixels = pixels_of_tower(tower)[:rows]
    own = type(tower).__mro__[1].forward
    return outcome(config, lambda: tower(pixels, grid)), outcome(config, lambda: own(tower, pixels, grid))


def pixels_of_tower(tower: Any) -> torch.Tensor:
    model = type("Model", (), {"visual": tower})()
    return pixels_of(model, GRID, torch.float32)


CONVERTED: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array(GRID),
    "array of int32": lambda: np.array(GRID, dtype=np.int32),
    "array with a negative stride": lambda: np.array(GRID[::-1])[::-1],
    "list of tensors": lambda: [torch.tensor(row) for row in GRID],
    "list of arrays": lambda: [np.array(row) for row in GRID],
    "list of lists": lambda: [list(row) for row in GRID],
}


@pytest.mark.parametrize("name", CONVERTED)
def test_grids_that_run_fused(served: Any, name: str) -> None:
    handle = served[2]
    before = handle.stats()
    got, _ = both(served, CONVERTED[name]())
    assert close(got, both(served, torch.tensor(GRID))[1])
    after = handle.stats()
    assert after["fused"] == before["fused"] + 2 and after["original"] == before["original"]


LEFT: dict[str, Callable[[], Any]] = {
    "an image without rows": lambda: torch.tensor([*GRID, (1, 0, 4)]),
    "floats": lambda: torch.tensor(GRID, dtype=torch.float32),
    "negative": lambda: torch.tensor([*GRID, (-1, 4, 4)]),
    "too many": lambda: torch.tensor([*GRID, (1, 4, 4)]),
    "too few": lambda: GRID[:1],
    "odd": lambda: [(1, 7, 8), (2, 4, 13)],
    "one row": lambda: torch.tensor(GRID[0]),
    "two columns": lambda: torch.tensor([[8, 8]]),
    "three dimensions": lambda: torch.tensor(GRID)[None],
    "strings": lambda: [["1", "8", "8"]],
    "nothing of the kind": lambda: 3,
}


@pytest.mark.parametrize("name", LEFT)
def test_grids_that_are_vllms_to_judge(served: Any, name: str) -> None:
    handle = served[2]
    before = handle.stats()
    got, want = both(served, LEFT[name]())
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    after = handle.stats()
    assert after["original"]["engine"] == before["original"].get("engine", 0) + 1 and after["details"]["engine"]
    assert after["calls"] == before["calls"] + 1 and after["fused"] == before["fused"]


@pytest.mark.parametrize("grid", ([], [(0, 4, 4)], GRID), ids=str)
def test_calls_without_patches_are_vllms_to_judge(served: Any, grid: Any) -> None:
    handle = served[2]
    before = handle.stats()["original"].get("engine", 0)
    got, want = both(served, torch.tensor(grid, dtype=torch.int64).reshape(-1, 3), 0)
    assert got == want and handle.stats()["original"]["engine"] == before + 1


def test_a_function_of_another_package_that_is_replaced_is_called(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, theirs = served[2], einops.rearrange
    before = both(served, torch.tensor(GRID))[0]
    monkeypatch.setattr(einops, "rearrange", lambda x, *given, **sizes: 1.5 * theirs(x, *given, **sizes))
    fused = handle.stats()["fused"]
    got, want = both(served, torch.tensor(GRID))
    assert torch.equal(got, want) and not close(got, before)
    assert handle.stats()["fused"] == fused and "einops.rearrange" in str(handle.reason())
