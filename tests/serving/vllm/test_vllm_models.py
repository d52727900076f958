"""Whole models of vLLM, found by the plugin's entry point, against the same models without it."""

from importlib.metadata import entry_points

import pytest
import torch

import fusedvit
from tests.serving.vllm.support import GRIDS, MODELS, close, embed, load


def test_the_plugin_is_found() -> None:
    (found,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "fusedvit")
    assert found.value == "fusedvit.serving.vllm:register"


@pytest.mark.parametrize("architecture", MODELS)
def test_answers_are_vllms(architecture: str) -> None:
    config, model = load(architecture)
    handle = fusedvit.fuse(model)  # raises if the plugin left it alone
    got = {
        (name, dtype): embed(config, model, grid, dtype)
        for name, grid in GRIDS.items()
        for dtype in (torch.uint8, torch.float32)
    }
    stats = handle.stats()
    assert stats["fused"] == stats["calls"] == 2 * (len(GRIDS) + 1) and not stats["original"]  # mixed: two calls
    fusedvit.unfuse(model)
    for (name, dtype), answer in got.items():
        want = embed(config, model, GRIDS[name], dtype)
        assert want.norm() > 0 and close(answer, want), (name, dtype)
    assert handle.stats()["calls"] == stats["calls"]
