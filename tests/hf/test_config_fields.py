"""Configs with fields that a tower's own code does not read: transformers keeps and saves any field, from configs of
other families for example. And values of fields that the code does read, at their limits."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

import fusedvit
from fusedvit.bench.towers import random_weights_
from fusedvit.checks.as_built import Built
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.families.registry import family_of
from tests.support.families import INSTALLED, TINY, class_of, each_of, family_tower
from tests.support.towers import Call, assert_same, expected_of, ran_fused

GRID = [(1, 4, 6), (1, 6, 4)]
LISTS = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}  # other fields are 1, or null
WINDOWED = "Qwen2_5_VisionTransformerPretrainedModel"
LIMITED = "Glm5NextVisionModel"
WITHOUT_DEEPSTACK = "Qwen3_5VisionModel"


def fields_read(config: Any, by: tuple[str, ...], act: Callable[[Any], object]) -> set[str]:
    """The attributes of `config` that modules whose names start so read while `act` runs; aliases count as fields."""
    cls, found = type(config), set()

    def read(self: Any, name: str) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith(by):
            found.add(cls.attribute_map.get(name, name))
        return cls.__getattribute__(self, name)

    config.__class__ = type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__})
    act(config)
    return found


@functools.cache
def read_by_us(name: str) -> frozenset[str]:
    family = family_of(name)
    assert family is not None
    config = class_of(name).config_class(**TINY[name][1])
    return frozenset(fields_read(config, ("fusedvit.families",), family.spec_from_config))


@functools.cache
def read_by_them(name: str) -> frozenset[str]:
    cls = class_of(name)

    def act(config: Any) -> None:
        tower = cls(config).eval()
        Call.of(tower, GRID).run(tower)

    return frozenset(fields_read(cls.config_class(**TINY[name][1]), (cls.__module__, "transformers.vision_utils"), act))


@pytest.mark.parametrize("name", INSTALLED)
def test_a_record_reads_what_the_towers_code_reads(name: str) -> None:
    assert read_by_us(name) - read_by_them(name) == set()
    assert len(read_by_us(name)) >= 10, "reads are not seen: the test shows nothing"


@pytest.mark.parametrize("null", (False, True), ids=("numbers", "null"))
@each_of(INSTALLED)
def test_fields_of_other_families_do_not_matter(name: str, null: bool) -> None:
    cls, family, plain = class_of(name), family_of(name), family_tower(name)
    aliases = cls.config_class.attribute_map
    others = {field for other in INSTALLED for field in read_by_us(other)} - aliases.keys() - read_by_them(name)
    assert family is not None and len(others) >= 3, "nothing is added: the test shows nothing"
    added = {field: another(getattr(plain.config, field, None), field, null) for field in others}
    config = cls.config_class(**TINY[name][1])
    for field, value in added.items():  # not by the constructor, which refuses what no tower reads
        setattr(config, field, value)
    tower = cls._from_config(config).eval().requires_grad_(False)
    random_weights_(tower, 0)
    assert all(getattr(tower.config, field) == value for field, value in added.items())
    assert family.spec_from_config(tower.config) == family.spec_from_config(plain.config)
    handle, call = fusedvit.fuse(tower), Call.of(plain, GRID)
    assert_same(call.run(tower), call.run(plain))
    ran_fused(handle, calls=1)


def another(own: Any, field: str, null: bool) -> Any:
    """A value for a field that is `own`, or None if the config's class does not declare it: classes check types."""
    if isinstance(own, bool):
        return not own
    return None if null and own is None else LISTS.get(field, 1)


@pytest.mark.skipif(WITHOUT_DEEPSTACK not in INSTALLED, reason="this release of transformers has no such tower")
def test_indexes_past_the_blocks_of_a_tower_without_deepstack_mergers() -> None:
    plain, tower = (family_tower(WITHOUT_DEEPSTACK, **more) for more in ({}, {"deepstack_visual_indexes": [8, 16, 24]}))
    handle, call = fusedvit.fuse(tower), Call.of(plain, GRID)
    assert_same(call.run(tower), call.run(plain))
    ran_fused(handle, calls=1)


@pytest.mark.skipif(LIMITED not in INSTALLED, reason="this release of transformers has no such tower")
def test_a_limit_of_zero_is_a_limit() -> None:
    plain, tower = (family_tower(LIMITED, swiglu_limit=0.0) for _ in range(2))
    handle, call = fusedvit.fuse(tower), Call.of(plain, GRID)
    wanted = call.run(plain)
    assert not wanted["pooler_output"].any() and wanted["last_hidden_state"].any()
    assert_same(call.run(tower), wanted)
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("name", (WINDOWED, pytest.param("Glm4vVisionModel", marks=pytest.mark.slow)))
def test_another_name_of_silu(name: str) -> None:
    plain, tower = (family_tower(name, hidden_act="swish") for _ in range(2))
    handle, call = fusedvit.fuse(tower), Call.of(plain, GRID)
    assert_same(call.run(tower), call.run(plain))
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("window", (15, 24, 31, 33))
def test_a_window_is_rounded_down_to_merged_tokens(window: int) -> None:
    """A merged token has 8 pixels a side."""
    grid = [(1, 10, 14), (2, 6, 8)]
    plain, tower = (family_tower(WINDOWED, window_size=window) for _ in range(2))
    handle, call = fusedvit.fuse(tower), Call.of(plain, grid)
    assert handle.spec.window == window // 8
    assert CheckedTower(plain, handle.family, handle.spec, Built.of(plain)).reason() is None  # as an engine's tower
    assert_same(call.run(tower), call.run(plain))
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("window", (7, 0, -8))
def test_a_window_smaller_than_a_merged_token(window: int) -> None:
    tower = family_tower(WINDOWED, window_size=window)
    if window >= 0:
        with pytest.raises(ZeroDivisionError):
            Call.of(tower, GRID).run(tower)
    with pytest.raises(fusedvit.UnsupportedModel, match=rf"window_size must be at least 8 .*, got {window}$"):
        fusedvit.fuse(tower)


def test_fewer_blocks_in_the_config_and_the_tower() -> None:
    """As depth pruning leaves them: the reason says how the tower runs fused again."""
    tower = family_tower(WITHOUT_DEEPSTACK)
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRID)
    call.run(tower)
    depth = len(tower.blocks)
    tower.blocks, tower.config.depth = tower.blocks[:-1], depth - 1
    expected = expected_of(tower, call)
    assert_same(call.run(tower), expected)
    said = f"its config's depth is {depth - 1}, expected {depth}, as fuse() read it (unfuse() and fuse() read it anew)"
    assert handle.reason().detail == said
    handle = fusedvit.fuse(fusedvit.unfuse(tower))
    assert_same(call.run(tower), expected)
    ran_fused(handle, calls=1)
