"""What tests on a GPU draw at random falls into one budget, so that they compile one set of kernels."""

import pytest

pytest.importorskip("transformers")

from fusedvit.kernels.tile_configs import budget
from tests.gpu import test_encoder, test_families
from tests.support.towers import patches_of, random_grid


@pytest.mark.parametrize("where", [test_encoder, test_families])
def test_random_grids_fall_into_one_budget(where: object) -> None:
    least, most = where.LEAST, where.MOST  # type: ignore[attr-defined]
    assert budget(least) == budget(most) == most
    sizes = [patches_of(random_grid(seed, least, most)) for seed in range(50)]
    assert all(least <= size <= most for size in sizes) and len(set(sizes)) > 10
