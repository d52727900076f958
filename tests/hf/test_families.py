"""Every registered tower class against Hugging Face's own code, at a tiny geometry in fp32 on the CPU."""

import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.families.registry import FAMILIES, family_of
from fusedvit.model.param_names import buffer_shapes, parameter_shapes
from tests.support.families import INSTALLED, TINY, class_of, family_tower
from tests.support.towers import GRIDS, Call, Grid, assert_rule, assert_same, copy_of, fused_tower, ran_fused

STRICT = fusedvit.FuseConfig(strict=True)
CLASSES = [name for family in FAMILIES for name in family.class_names]
by_class = pytest.mark.parametrize("name", INSTALLED)

# Frames cut by windows at one border, at both, at none; narrower than a window.
WINDOWED: dict[str, Grid] = {
    "whole windows": [(1, 16, 8), (2, 8, 24)],
    "cut windows": [(1, 18, 12), (1, 10, 22), (3, 8, 14), (1, 20, 2)],
}
ALL_GRIDS = GRIDS | WINDOWED


def test_every_class_is_walked() -> None:
    assert set(TINY) == set(CLASSES) and len(set(CLASSES)) == len(CLASSES)


@by_class
def test_names_and_shapes_are_the_towers(name: str) -> None:
    """A family's names and a tower's parameters are the same set: nothing is left out, nothing invented."""
    tower = family_tower(name)
    family = family_of(name)
    assert family is not None
    spec, aliases = family.spec_from_config(tower.config), family.aliases
    shapes = dict(parameter_shapes(family.names, spec))
    found = {aliases.get(key, key): p.flatten(1) if p.ndim == 5 else p for key, p in tower.named_parameters()}
    assert shapes == {key: tuple(p.shape) for key, p in found.items()}
    held = {key: tuple(b.shape) for key, b in tower.named_buffers() if "inv_freq" not in key}
    assert dict(buffer_shapes(family.names, spec)) == held


def taken_by(name: str, grid: Grid) -> Grid:
    """`grid` with every frame a row where the tower raises else, as its parents pass it."""
    return [(1, h, w) for t, h, w in grid for _ in range(t)] if name.startswith("Glm4v") else grid


@pytest.mark.parametrize("grid", ALL_GRIDS.values(), ids=ALL_GRIDS)
@by_class
def test_every_output(name: str, grid: Grid) -> None:
    tower = family_tower(name)
    call = Call.of(tower, taken_by(name, grid))
    original = copy_of(tower)
    expected = call.run(original)
    handle = fusedvit.fuse(tower, STRICT)
    assert_same(call.run(tower), expected)
    ran_fused(handle, calls=1)
    with torch.no_grad():
        ours, theirs = (call.record(t) for t in (tower, original))
    assert type(ours) is type(theirs) and list(ours.keys()) == list(theirs.keys())
    assert [type(value) for value in ours.values()] == [type(value) for value in theirs.values()]
    assert hasattr(ours, "deepstack_features") == hasattr(theirs, "deepstack_features")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@by_class
def test_tolerance_rule(name: str, dtype: torch.dtype) -> None:
    """Against fp64: no further from it than Hugging Face in the same dtype. Images, a video, odd grids."""
    tower = copy_of(family_tower(name), dtype)
    call = Call.of(tower, taken_by(name, [(1, 10, 12), (1, 4, 18), (1, 8, 8), (3, 6, 10)]))
    pt = call.run(copy_of(tower))
    ref = Call(call.pixels.double(), call.grid).run(copy_of(tower, torch.float64))
    fusedvit.fuse(tower, STRICT)
    ours = call.run(tower)
    assert_rule(ours, ref, pt)


@by_class
def test_save_and_reload(name: str, tmp_path: Path) -> None:
    tower = family_tower(name)
    call = Call.of(tower, [(1, 10, 12), (1, 4, 6)])
    keys = list(tower.state_dict())
    handle = fusedvit.fuse(tower, STRICT)
    before = call.run(tower)
    assert list(tower.state_dict()) == keys
    tower.save_pretrained(tmp_path)
    loaded: Any = class_of(name).from_pretrained(tmp_path).eval()
    assert_same(call.run(loaded), before)
    fusedvit.fuse(loaded, STRICT)
    assert_same(call.run(loaded), before)
    ran_fused(handle, calls=1)


@by_class
def test_weights_change(name: str) -> None:
    """Every single parameter counts, and its change is noticed."""
    tower, _, call = fused_tower(family_tower(name), [(1, 10, 12), (1, 4, 6)], STRICT)
    before = call.run(tower)
    for i, parameter in enumerate(tower.parameters()):
        with torch.no_grad():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    expected = call.run(fusedvit.unfuse(copy_of(tower)))
    ours = call.run(tower)
    assert_same(ours, expected)
    assert not ours["last_hidden_state"].equal(before["last_hidden_state"])


def _followed_options() -> list[Any]:
    """Boolean options of a tower's config by which modules are built, of every class, with both values."""
    found = []
    for name in INSTALLED:
        cls = class_of(name)
        mentioned = set().union(*map(_names_in, vars(sys.modules[cls.__module__]).values()))
        options = cls.config_class().to_dict().items()
        names = [option for option, value in options if type(value) is bool and option in mentioned]
        found += [(name, option, value) for option in names for value in (True, False)]
    return found


def _names_in(value: Any) -> set[str]:
    """Names that the constructor of a class reads."""
    built = vars(value).get("__init__") if isinstance(value, type) else None
    return set(built.__code__.co_names) if isinstance(built, FunctionType) else set()


@pytest.mark.parametrize("name, option, value", _followed_options())
def test_boolean_options_of_configs_are_followed(name: str, option: str, value: bool) -> None:
    tower = family_tower(name, **{option: value})
    original, call = copy_of(tower), Call.of(tower, taken_by(name, GRIDS["mix"]))
    handle = fusedvit.fuse(tower, STRICT)
    assert_same(call.run(tower), call.run(original))
    ran_fused(handle, calls=1)
