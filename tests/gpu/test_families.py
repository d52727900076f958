"""Families at real widths on a GPU, two blocks deep: what a graph holds of windows and of other tails."""

import pytest
import torch

import fusedvit
from fusedvit.bench.towers import GEOMETRIES, build
from tests.support.towers import Call, assert_bitwise, assert_rule, random_grid

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_tf32")]

LEAST, MOST = 2049, 2304  # patch tokens: one budget, hence one set of kernels to compile
SHALLOW = {
    "Qwen2.5-VL-7B": {"depth": 2, "fullatt_block_indexes": [1]},
    "EXAONE-4.5-33B": {"depth": 2, "fullatt_block_indexes": [1]},
    "GLM-4.1V-9B": {"depth": 2},
    "GLM-5.3-Flash": {"depth": 2},
    "Gemma-4-31B": {"num_hidden_layers": 2},
    "Gemma-4-E4B": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", SHALLOW)
def test_a_graph_gives_the_same_bits_and_keeps_the_rule(name: str) -> None:
    """Captured once, replayed on other images, videos and windows."""
    geometry = GEOMETRIES[name].but(**SHALLOW[name])
    tower, wide = build(geometry, torch.bfloat16, torch.device("cuda"))
    grids = [geometry.rows(list(random_grid(seed, LEAST, MOST))) for seed in range(5)]
    calls = [Call.of(tower, grid, seed) for seed, grid in enumerate(grids)]
    pt = calls[0].run(tower)
    ref = Call(calls[0].pixels.float(), calls[0].grid).run(wide)
    most = 512 if geometry.merge == 3 else MOST // 4  # sides of 3s may have more patches
    captured = fusedvit.FuseConfig(strict=True, token_budgets=(most,), max_items=64, max_frames=64)
    handle = fusedvit.fuse(tower, captured)
    handle.warmup(calls=grids)  # compiles side by side, for the eager runs as well
    replayed = [call.run(tower) for call in calls]
    assert handle.stats()["graphs"]["replays"] == len(calls)
    assert handle.stats()["eager_runs"] == {}
    assert_rule(replayed[0], ref, pt)
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True, graphs=False))  # the same handle
    for call, answer in zip(calls, replayed, strict=True):
        assert_bitwise(call.run(tower), answer)
    assert handle.stats()["eager_runs"] == {"graphs off": len(calls)}
