"""Whole towers as an H200 runs them, without a GPU: see `tests/emulator`."""

import pytest

from tests.kernels.test_aot import run
from tests.support.families import is_installed

CLASSES = {"qk_norm": "Glm5NextVisionModel", "clipped": "Gemma4VisionModel"}  # not in all transformers of our range


@pytest.mark.parametrize("tower", ["hd72", "windows", "hd128", "qk_norm", "clipped"])
def test_tower(tower: str) -> None:
    if tower in CLASSES and not is_installed(CLASSES[tower]):
        pytest.skip(f"this transformers has no {CLASSES[tower]}")
    done = run("-m", "tests.support.emulated_tower", "--tower", tower)
    assert done.returncode == 0 and f"right: {tower}" in done.stdout, done.stderr[-3000:]
