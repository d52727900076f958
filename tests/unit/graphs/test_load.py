"""The load formula against a count of multiply-adds, block by block."""

import pytest

from fusedvit.graphs.load import load, patch_constant


def multiply_adds(patches: int, hidden: int, intermediate: int, mlp_matrices: int) -> int:
    qkv, projection = patches * hidden * 3 * hidden, patches * hidden * hidden
    mlp = mlp_matrices * patches * hidden * intermediate
    scores, values = patches * patches * hidden, patches * patches * hidden
    return qkv + projection + mlp + scores + values


@pytest.mark.parametrize(("hidden", "intermediate", "mlp_matrices"), [(1152, 4304, 2), (1280, 3420, 3)])
@pytest.mark.parametrize("patches", [4, 784, 16384])
def test_load_is_proportional_to_the_multiply_adds_of_a_block(hidden, intermediate, mlp_matrices, patches):
    constant = patch_constant(hidden, intermediate, mlp_matrices)
    assert 2 * hidden * load([(1, patches)], constant) == multiply_adds(patches, hidden, intermediate, mlp_matrices)


def test_load_adds_up_over_frames_and_items():
    assert load([], 10.0) == 0
    assert load([(3, 4), (1, 5)], 10.0) == 3 * 4 * 14 + 5 * 15
    assert load([(1, 8)], 10.0) > load([(2, 4)], 10.0), "one frame of all patches attends to more"


def test_qwen3_vl_8b():
    assert patch_constant(1152, 4304) == 6608
