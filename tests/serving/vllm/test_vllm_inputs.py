"""Calls as vLLM takes them and the fused encoder does not: vLLM's own code answers, or refuses them in its own way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import einops
import numpy as np
import pytest
import torch

import fusedvit
from tests.serving.vllm.support import close, load, outcome, pixels_of, same, tower_of, under

GRID = [(1, 8, 8), (2, 4, 12)]
ARCHITECTURES = ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def served(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    config, model = load(request.param)
    return config, tower_of(model), fusedvit.fuse(model)


def both(served: Any, grid: Any, rows: int | None = None) -> tuple[Any, Any]:
    """The fused tower's and vLLM's own, of all pixels or the first `rows`."""
    config, tower, _ = served
    pixels = pixels_of(SimpleNamespace(visual=tower), GRID, torch.float32)[:rows]
    with torch.inference_mode(), under(config):
        return outcome(tower, pixels, grid), outcome(type(tower).__mro__[1].forward, tower, pixels, grid)


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
    "no patches, no images": lambda: torch.zeros(0, 3, dtype=torch.int64),
    "no patches, an image": lambda: torch.tensor([(0, 4, 4)]),
    "no patches, its grid": lambda: torch.tensor(GRID),
}


@pytest.mark.parametrize("name", LEFT)
def test_grids_that_are_vllms_to_judge(served: Any, name: str) -> None:
    handle = served[2]
    before = handle.stats()
    got, want = both(served, LEFT[name](), 0 if name.startswith("no patches") else None)
    assert same(got, want)
    after = handle.stats()
    assert after["original"]["engine"] == before["original"].get("engine", 0) + 1 and after["details"]["engine"]
    assert after["calls"] == before["calls"] + 1 and after["fused"] == before["fused"]


def test_a_function_of_another_package_that_is_replaced_is_called(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, theirs = served[2], einops.rearrange
    before = both(served, torch.tensor(GRID))[0]
    monkeypatch.setattr(einops, "rearrange", lambda x, *given, **sizes: 1.5 * theirs(x, *given, **sizes))
    fused = handle.stats()["fused"]
    got, want = both(served, torch.tensor(GRID))
    assert torch.equal(got, want) and not close(got, before)
    assert handle.stats()["fused"] == fused and "einops.rearrange" in str(handle.reason())
