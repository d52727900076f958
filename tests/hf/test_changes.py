"""Towers that were changed: a fused answer that is right, or the very one of the original code, for a reason that names
what was found, in the same words everywhere."""

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.checks import fallback
from fusedvit.errors import Reason
from tests.support import changes
from tests.support.changes import CHANGES, Change
from tests.support.families import family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_alike,
    assert_bitwise,
    assert_same,
    copy_of,
    differs,
    fused_when,
    outcome,
    ran_fused,
    ran_original,
    vision_tower,
)

STRUCTURES = [
    changes.another_block,
    changes.buffer_dropped,
    changes.buffer_as_an_attribute,
    changes.hidden_buffer,
    changes.hidden_parameter,
    changes.hidden_module,
    changes.hidden_blocks,
    changes.child_replaced,
    changes.appended,
    changes.extended,
    changes.inserted,
    changes.deleted,
    changes.reordered,
    changes.registries_replaced,
    changes.parameters_replaced,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.apply.__name__)
@pytest.mark.parametrize("when", ["before fuse", "after fuse", "after a call"])
def test_a_changed_tower(change: Change, when: str, caplog: pytest.LogCaptureFixture) -> None:
    """Original code gives the very bits of Hugging Face's answer, or its error; it is warned of once in three calls."""
    caplog.set_level(logging.WARNING, logger="fusedvit")  # the command line, run before in this process, lowers it
    tower = vision_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    plain = call.run(original)
    change.apply(original)
    expected = outcome(call.run, original)
    assert differs(plain, expected) == change.matters

    handle = fused_when(tower, when, lambda: change.apply(tower), call)
    found = [outcome(call.run, tower) for _ in range(3)]
    for each in found:
        assert_alike(each, expected)
        if change.kind and isinstance(expected, dict):
            assert_bitwise(each, expected)
    if change.kind:
        ran_original(handle, change.kind, calls=3)
        reason = Reason(change.kind, change.before_fuse if when == "before fuse" else change.detail)
        check_messages(handle, reason, call, [r.getMessage() for r in caplog.records])
    else:
        ran_fused(handle, calls=4 if when == "after a call" else 3)


@pytest.mark.parametrize("change", [c for c in CHANGES if c.kind], ids=lambda change: change.apply.__name__)
@pytest.mark.parametrize("when", ["after fuse", "after a call"])
def test_a_change_that_is_undone(change: Change, when: str) -> None:
    """The next call runs fused, however often the tower was refused before."""
    tower = vision_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(copy_of(tower))
    with changes.undone(tower):
        handle = fused_when(tower, when, lambda: change.apply(tower), call)
        for _ in range(3):
            outcome(call.run, tower)
    ran_original(handle, change.kind, calls=3)
    assert_same(call.run(tower), expected)
    assert handle.stats()["fused"] == 1 + (when == "after a call"), handle.stats()["details"]


def check_messages(handle: Any, reason: Reason, call: Call, warned: list[str]) -> None:
    """The same text in the warning, the strict error, `refresh()`, `warmup()` and `report()`."""
    kind, detail = reason
    assert handle.reason() == reason and handle.stats()["details"] == {kind: detail}
    text = f"{kind}: {detail} ({fallback.ADVICE[kind]})"
    assert warned == [f"fusedvit: Qwen3VLVisionModel runs its original code: {text}"]
    assert text in handle.report()
    for way in (handle.refresh, handle.warmup):
        with pytest.raises(RuntimeError, match=f"^fusedvit: Qwen3VLVisionModel cannot run fused: {re.escape(text)}$"):
            way()
    fusedvit.fuse(handle.tower, fusedvit.FuseConfig(strict=True))
    with pytest.raises(RuntimeError, match=f"^fusedvit: Qwen3VLVisionModel cannot run fused: {re.escape(text)}$"):
        call.run(handle.tower)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("change", STRUCTURES, ids=lambda change: change.__name__)
def test_another_structure(change: Callable[[Any], None], used: bool) -> None:
    """Of a tower with windows, whose module classes are others."""
    tower = family_tower("Qwen2_5_VisionTransformerPretrainedModel")
    call = Call.of(tower, [(1, 8, 4), (1, 2, 10)])
    theirs, ours = copy_of(tower), copy_of(tower)
    fusedvit.fuse(ours)
    if used:
        call.run(ours)
    change(theirs)
    change(ours)
    expected = outcome(call.run, theirs)
    assert differs(call.run(tower), expected), "nothing changed: the test shows nothing"
    assert_alike(outcome(call.run, ours), expected)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_module_that_contains_its_tower(used: bool) -> None:
    """A module set as an attribute of another is registered in it; Hugging Face's code never walks that circle."""
    tower = vision_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(copy_of(tower))
    handle = fused_when(tower, "after a call" if used else "after fuse", lambda: _back_reference(tower), call)
    assert_bitwise(call.run(tower), expected)
    ran_original(handle, fallback.MODIFIED)
    assert "RecursionError" in str(handle.reason())


def _back_reference(tower: Any) -> None:
    tower.blocks[1].mlp.parent = tower


def test_a_lazy_module_in_a_tower_in_use() -> None:
    """Its parameters have no memory until its hook has seen an input, which is what its first call does."""
    tower = vision_tower()
    call, lazy = Call.of(tower, GRIDS["mix"]), nn.LazyLinear(48)
    theirs = copy_of(tower)
    handle = fusedvit.fuse(tower)
    call.run(tower)
    answers = []
    for each in theirs, tower:
        each.blocks[0].attn.proj = copy.deepcopy(lazy)
        with torch.random.fork_rng():  # values are drawn at the first call
            torch.manual_seed(0)
            answers.append(call.run(each))
    assert_bitwise(*answers)
    ran_original(handle, fallback.HOOKS)
