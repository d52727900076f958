"""Under somebody's default device: what fusedvit creates lies where it says, not where `torch.device` says.

The meta device stands for any that is not the tower's: whoever forgets a device computes nothing there.
"""

import torch

import fusedvit
from tests.support.families import BY_GRID, each_of, family_tower
from tests.support.towers import Call, assert_same, copy_of

GRID = [(1, 4, 4), (1, 8, 4)]


@each_of(BY_GRID)
def test_every_family(name: str) -> None:
    tower = family_tower(name)
    call = Call.of(tower, GRID)
    expected = call.run(copy_of(tower))
    with torch.device("meta"):
        handle = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
        found = call.run(tower)
        handle.refresh()
    assert_same(found, expected)
    assert handle.stats()["fused"] == 1
