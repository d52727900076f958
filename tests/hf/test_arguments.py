"""A call's arguments: parents' keywords that nothing reads, keywords that something does, shapes of pixels."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

import fusedvit
from fusedvit.bench.towers import inputs_of
from fusedvit.checks import arguments
from fusedvit.checks.arguments import rules_of
from tests.support import families
from tests.support.families import BY_GRID, INSTALLED, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    Grid,
    assert_same,
    copy_of,
    fused_and_original,
    fused_tower,
    fused_when,
    outcome,
    outputs_of,
    ran_fused,
    ran_original,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)
MIX: Grid = [(1, 4, 6), (1, 2, 2)]


PARENTS: list[dict[str, Any]] = [
    {"num_items_in_batch": torch.tensor(3)},
    {"cache_position": torch.arange(3)},
    {"output_router_logits": False},
    {"logits_to_keep": 1},
    {"labels": torch.zeros(1, 3)},
    {"use_cache": True, "return_dict": True},
    {"colour": 1, "second_per_grid_ts": None},
    {"cu_seqlens": None, "position_ids": None},
    {"output_attentions": False, "output_hidden_states": None},
    {"past_key_values": None, "position_bias": None, "vision_feature_layer": None, "sliding_window": None},
    {"training": True, "dtype": torch.float32, "device": "cpu"},  # keywords of calls inside, and of helpers
    {"mm_token_type_ids": torch.zeros(3), "return_loss": True, "seq_idx": 4},
]


@pytest.mark.parametrize("given", PARENTS, ids=lambda given: ", ".join(given))
@each_of(INSTALLED)
def test_keywords_that_hugging_face_ignores(name: str, given: dict[str, Any]) -> None:
    tower, handle, call, original = fused_and_original(family_tower(name), MIX)
    expected, found = (outcome(call.run, t, **given) for t in (original, tower))
    if isinstance(expected, TypeError):  # given twice: such a tower hands its own on under this name
        assert name not in BY_GRID and str(found) == str(expected)
        return
    assert_same(found, expected)
    ran_fused(handle, calls=1)


@each_of(INSTALLED)
def test_keywords_that_hugging_face_reads(name: str) -> None:
    """Each name that the code on the way reads, with a value that it may act on: the same answer, or the same error."""
    for implementation in ["sdpa", *(["eager"] if name in families.SHAPES else [])]:
        check_keywords(name, implementation)


def check_keywords(name: str, implementation: str) -> None:
    tower = family_tower(name)
    tower.set_attn_implementation(implementation)
    original, call = copy_of(tower), Call.of(tower, MIX)
    fusedvit.fuse(tower)
    for argument in sorted(rules_of(tower).read - {"self", "hidden_states", "grid_thw", "kwargs", "debug_io"}):
        for value in (2.0, torch.ones(1), *([] if argument == "value" else [None])):
            expected, found = (outcome(call.run, t, **{argument: value}) for t in (original, tower))
            assert type(expected) is type(found), f"{argument}={value}: Hugging Face {expected!r}, fused {found!r}"
            if isinstance(expected, dict):
                assert_same(found, expected)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "original code"])
@each_of(INSTALLED)
def test_keywords_that_have_our_names(name: str, fused: bool) -> None:
    """A keyword of a parent may have the name of an argument of ours; Hugging Face's code ignores it there too."""
    tower = family_tower(name).requires_grad_(not fused)
    original, call = copy_of(tower), Call.of(tower, MIX)
    handle = fusedvit.fuse(tower)
    pixels, named = inputs_of(tower, call.pixels, call.grid)
    ours = ["original", "padded", "tower", "pixels", "grid", "grid_thw"]
    given = {key: 1 for key in ours if key not in inspect.signature(type(original).forward).parameters}
    answers = (outputs_of(t(pixels, **named, **given)) for t in (original, tower))
    expected, found = ({key: tensor.detach() for key, tensor in answer.items()} for answer in answers)
    assert_same(found, expected)
    assert handle.stats()["original"] == ({} if fused else {"gradients": 1})


@pytest.mark.parametrize("trained", [False, True])
@each_of(INSTALLED)
def test_a_call_without_a_grid(name: str, trained: bool) -> None:
    tower = family_tower(name).requires_grad_(trained)
    original, call = copy_of(tower), Call.of(tower, MIX)
    fusedvit.fuse(tower)
    for given in ((), (call.pixels,), (call.pixels, call.grid, 3)):
        expected, found = (outcome(t, *given) for t in (original, tower))
        assert isinstance(expected, TypeError) and repr(found) == repr(expected)


def test_an_attention_function_of_one_s_own_reads_its_own_keywords() -> None:
    """What is read hangs on the attention function: one that reads `colour` must be given it."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def coloured(*args: Any, colour: float = 1.0, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return colour * out, weights

    AttentionInterface.register("coloured", coloured)
    tower = tiny_tower()
    tower.set_attn_implementation("coloured")
    original, call = copy_of(tower), Call.of(tower, GRIDS["video"])
    fusedvit.fuse(tower)
    assert "colour" in rules_of(tower).read
    assert_same(call.run(tower, colour=2.0), call.run(original, colour=2.0))


SHAPES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "batch of one": lambda x, p: x[None],
    "flat": lambda x, p: x.flatten(),
    "patches": lambda x, p: x.reshape(len(x), 3, -1, p, p),
    "batch of two": lambda x, p: x.reshape(2, -1, x.shape[1]),
    "one pixel a row": lambda x, p: x.reshape(*x.shape, 1),
    "frames first": lambda x, p: x.reshape(len(x), 3, -1, p, p).transpose(1, 2),
    "short": lambda x, p: x.flatten()[:-1],
    "scalar": lambda x, p: x.sum(),
    "an image": lambda x, p: torch.randn(1, 3, 4 * p, 4 * p),
}


@pytest.mark.parametrize("shape", SHAPES)
@each_of(INSTALLED)
def test_shapes_of_pixels(name: str, shape: str) -> None:
    tower, _, call, original = fused_and_original(family_tower(name), MIX, STRICT)
    pixels, named = inputs_of(tower, call.pixels, call.grid)
    pixels = SHAPES[shape](pixels, tower.config.patch_size)
    expected, found = (outcome(lambda t: outputs_of(t(pixels, **named)), t) for t in (original, tower))
    if isinstance(expected, dict):
        assert_same(found, expected)
    else:
        assert isinstance(found, ValueError) and "pixel" in str(found), found


@pytest.mark.parametrize("by", ["argument", "config"])
@pytest.mark.parametrize("place", ["class", "in place"])
def test_an_output_that_a_class_records_later(by: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a tower of the class was called, the class gains an entry, which its next instance registers."""
    tower, handle, call, original = fused_and_original(grid=GRIDS["video"])
    call.record(tower)
    cls = type(original)
    later = cls._can_record_outputs | {"mlps": type(tower.blocks[0].mlp)}
    if place == "class":
        monkeypatch.setattr(cls, "_can_record_outputs", later)
    else:
        monkeypatch.setitem(cls._can_record_outputs, "mlps", later["mlps"])
    cls(copy.deepcopy(tower.config))
    try:
        given = {"output_mlps": True} if by == "argument" else {}
        for each in (tower, original):
            each.config.output_mlps = by == "config"
        ours, theirs = call.record(tower, **given), call.record(original, **given)
    finally:
        monkeypatch.undo()
        cls(copy.deepcopy(tower.config))  # registers what the class had
    assert [*ours] == [*theirs] and "mlps" in ours
    assert handle.stats()["fused"] == 1 and handle.stats()["original"] == {"unknown arguments": 1}


@pytest.mark.parametrize("value", [property(lambda self: True), True], ids=["property", "value"])
@pytest.mark.parametrize("when", ["before fuse", "after a call"])
def test_another_option_of_every_config(value: Any, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PreTrainedConfig.output_attentions` gives what a config keeps, unless somebody has replaced it."""
    tower, call = tiny_tower(), Call.of(tiny_tower(), GRIDS["video"])
    tower.set_attn_implementation("eager")
    original = copy_of(tower)

    def change() -> None:
        monkeypatch.setattr(PreTrainedConfig, "output_attentions", value)

    handle = fused_when(tower, when, change, call)
    ours, theirs = call.run(tower), call.run(original)
    assert ours.keys() == theirs.keys() and "attentions[0]" in ours
    assert_same(ours, theirs)
    ran_original(handle, "output_attentions")
    monkeypatch.undo()
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 1 + (when == "after a call")


def test_keywords_that_replaced_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first tower's replaced `forward` ignores is read again once the original code is back."""
    tower = tiny_tower()
    call, cls = Call.of(tower, GRIDS["video"]), type(tower)
    fusedvit.fuse(tower)
    arguments._known.pop(cls, None)
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", lambda self, pixels, grid, **kwargs: None)
        tower(call.pixels, call.grid, cu_seqlens=None, colour=1)
    assert "cu_seqlens" in rules_of(tower).read


def test_rules_are_found_once() -> None:
    tower, _, call = fused_tower(grid=GRIDS["video"])
    call.record(tower)
    assert rules_of(tower) is rules_of(tower)
