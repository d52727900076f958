"""Whatever a family's forward reads is watched: every attribute changed, one at a time, in every family."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.checks import fallback
from fusedvit.checks.adapters import Plain
from fusedvit.checks.as_built import Built, wrong_attributes
from fusedvit.checks.change_detection import HANDLE, Snapshot
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.checks.own_code.tower_code import own_code
from fusedvit.families.registry import family_of
from fusedvit.model.param_names import buffer_shapes
from tests.support.changes import undone
from tests.support.families import INSTALLED, SHAPES, each_of, family_tower
from tests.support.towers import Call, assert_bitwise, error_of, fused_and_original, fused_tower, outcome

GRID = [(1, 8, 4), (1, 2, 10)]  # single frames: GLM's towers take no more when called directly
LIMIT = 1e-5
MODULE = set(vars(nn.Module()))
HANDLES = {HANDLE}
QWEN3 = "Qwen3VLVisionModel"
# One tower of each structure; the others come with `make test-all`.
QUICK = [QWEN3, "Qwen2VisionTransformerPretrainedModel", "Qwen2_5_VisionTransformerPretrainedModel", "Glm4vVisionModel"]
# Options of a call, see test_fallback.py.
# The last: no call as the config says it should be; test_gemma4.py.
COUNTED_ELSEWHERE = ("config._output_", "config.output_", "config.return_dict", "config.pooling_kernel_size")


class Change(NamedTuple):
    """One change of one attribute: what is changed, and how."""

    name: str
    apply: Callable[[Any], Any]


def other_values(value: object) -> list[object]:
    """Values near `value`, of its type and of another."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(1, value - 1) if value > 1 else value + 2]
    if isinstance(value, float):
        return [value * 1.5 + 0.125]
    if isinstance(value, str):
        return [
            {"bilinear": "bicubic", "bicubic": "bilinear", "none": "tanh", "zeros": "circular"}.get(value, value + "x")
        ]
    if value is None:
        return [0.5]
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
        return [type(value)([v + 1 for v in value]), type(value)(reversed(value)), type(value)(value[:-1])]
    return []


def changes_of(tower: Any) -> Iterator[Change]:
    """A change for each plain attribute of each class of modules, for each field of the config, for each buffer."""
    seen: set[tuple[type, str]] = set()
    for path, module in tower.named_modules():
        for name, value in vars(module).items():
            if name in MODULE or (type(module), name) in seen:
                continue
            seen.add((type(module), name))
            yield from (setting(path, name, other) for other in other_values(value))
            if isinstance(value, list) and value:
                yield Change(f"{path}.{name}[0] changed in place", in_place(path, name))
        for name in module._buffers:
            yield Change(f"{path}.{name} scaled in place", scaled(path, name))
            yield Change(f"{path}.{name} replaced", replaced(path, name))
            yield Change(f"{path}.{name} written through .data", written(path, name))
            yield Change(f"{path}.{name} given other .data", given_data(path, name))
    for name, value in vars(tower.config).items():
        yield from (Change(f"config.{name} = {other!r}", of_config(name, other)) for other in other_values(value))


def setting(path: str, name: str, value: object) -> Change:
    return Change(f"{path}.{name} = {value!r}", lambda tower: setattr(tower.get_submodule(path), name, value))


def in_place(path: str, name: str) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        kept = getattr(tower.get_submodule(path), name)
        kept[0] = kept[0] + 1

    return change


def of_config(name: str, value: object) -> Callable[[Any], None]:
    return lambda tower: object.__setattr__(tower.config, name, value)


def scaled(path: str, name: str) -> Callable[[Any], None]:
    return lambda tower: getattr(tower.get_submodule(path), name).mul_(1.25)


def replaced(path: str, name: str) -> Callable[[Any], None]:
    return lambda tower: setattr(tower.get_submodule(path), name, getattr(tower.get_submodule(path), name) * 1.25)


def written(path: str, name: str) -> Callable[[Any], None]:
    return lambda tower: getattr(tower.get_submodule(path), name).data.mul_(1.25)


def given_data(path: str, name: str) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        buffer = getattr(tower.get_submodule(path), name)
        buffer.data = buffer.data * 1.25

    return change


def wrong(ours: Any, theirs: Any) -> str:
    if isinstance(theirs, Exception) or isinstance(ours, Exception):
        return "" if type(ours) is type(theirs) else f"{ours!r}, not {theirs!r}"
    if ours.keys() != theirs.keys() or any(ours[n].shape != theirs[n].shape for n in theirs):
        return "another layout"
    error = max(error_of(ours[name], theirs[name]) for name in theirs)
    return "" if error <= LIMIT or math.isnan(error) else f"error {error:.2g}"


def changed(tower: Any, change: Change, call: Call, used: bool) -> tuple[Any, dict[str, int], bool]:
    """What a fused copy of `tower` gives after `change`, the calls that took the original code, and whether it runs
    fused when all is back as it was."""
    ours = copy.deepcopy(tower)
    handle = fusedvit.fuse(ours)
    if used:
        call.run(ours)
    with undone(ours):
        change.apply(ours)
        found, fell_back = outcome(call.run, ours), handle.stats()["original"]
    call.run(ours)
    return found, fell_back, handle.stats()["original"] == fell_back


@pytest.mark.parametrize("name", QUICK)
def test_every_attribute_that_a_forward_reads(name: str) -> None:
    check_every_attribute(name)


@pytest.mark.parametrize("name", sorted(set(INSTALLED) - set(QUICK)))
def test_attributes_that_matter_in_the_other_families(name: str) -> None:
    check_every_attribute(name, thorough=False, every=1 if name in SHAPES else 4)


def check_every_attribute(name: str, thorough: bool = True, every: int = 1) -> None:
    """Changed after a call, and before any where it matters: equal answers, or a fallback with the right one; the same
    errors.

    Args:
        thorough: attributes that matter are changed before any call, too, and those that change no answer of the
            original after one.
        every: one change in so many is made, where the class's code is mostly a copy of another's.
    """
    tower = family_tower(name)
    call = Call.of(tower, GRID)
    plain = call.run(tower)
    found, mattered = [], 0
    family = family_of(name)
    assert family is not None
    weights = dict(buffer_shapes(family.names, family.spec_from_config(tower.config)))

    def is_weight(change: Change) -> bool:
        return change.name.split()[0].removeprefix(".") in weights  # buffers that are followed as parameters are

    for change in itertools.islice(changes_of(tower), INSTALLED.index(name) % every, None, every):
        original = copy.deepcopy(tower)
        change.apply(original)
        theirs = outcome(call.run, original)
        matters = bool(wrong(plain, theirs)) and not change.name.startswith(COUNTED_ELSEWHERE)
        mattered += matters
        if not (matters or thorough):
            continue
        for used in (True, False) if matters and thorough else (True,):
            ours, fell_back, back = changed(tower, change, call, used)
            why = wrong(ours, theirs) or ("no reason" if matters and not (fell_back or is_weight(change)) else "")
            why = why or ("" if back else "not noticed as it goes")
            found += [f"{change.name}, {'used' if used else 'fresh'}: {why}"] if why else []
    assert found == []
    assert mattered >= 10 / every, "the changes change too little: the test shows nothing"


def another(value: Any) -> Any:
    """An equal value, another object where Python has one."""
    if isinstance(value, str):
        return "".join([*value])
    if type(value) in (int, float):
        return type(value)(repr(value))
    return type(value)([*value]) if type(value) in (list, tuple, set) else dict(value) if type(value) is dict else value


@each_of(INSTALLED)
def test_equal_values_written_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PEFT's and transformers' setters do: nothing is judged, and the new objects are compared from then on."""
    tower, handle, call = fused_tower(family_tower(name), GRID)
    expected, version = call.run(tower), handle.weights.version
    assert handle.weights.host_unchanged()
    lists: list[list[Any]] = []
    for owner in (*map(vars, tower.modules()), vars(tower.config)):
        for attribute in owner.keys() - MODULE - HANDLES:
            owner[attribute] = another(owner[attribute])
            lists += [owner[attribute]] if type(owner[attribute]) is list and owner[attribute] else []
    with monkeypatch.context() as patched:
        patched.setattr(handle.weights, "prepare", None)
        patched.setattr(handle.weights, "follow", None)
        assert_bitwise(call.run(tower), expected)
        assert_bitwise(call.run(tower), expected)
    assert (handle.weights.version, handle.stats()["refreshes"], handle.stats()["fused"]) == (version, 1, 3)
    noticed = 0
    for changed in lists:
        changed.append(changed[-1])
        noticed += not handle.weights.host_unchanged()
        changed.pop()
        assert handle.weights.host_unchanged()
    assert noticed or not {"deepstack_visual_indexes", "fullatt_block_indexes"} & vars(tower).keys()


@pytest.mark.parametrize("name", INSTALLED)
def test_frequencies_that_were_cast(name: str) -> None:
    """Casting a tower to 16 bits and back rounds its rotary frequencies for good: they are what it computes with."""
    tower = family_tower(name)
    original = copy.deepcopy(tower.bfloat16().float())
    handle, call = fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True)), Call.of(tower, [(1, 16, 8)])
    assert wrong(call.run(tower), call.run(original)) == ""
    fresh = family_tower(name)
    for mine, rounded in zip(fresh.parameters(), tower.parameters(), strict=True):
        mine.data.copy_(rounded)
    assert wrong(call.run(fresh), call.run(original)), "rounding changes nothing: the test shows nothing"
    assert handle.stats()["fused"] == 1


@each_of(INSTALLED)
def test_a_buffer_that_wants_a_gradient(name: str) -> None:
    """As somebody who learns the rotary frequencies: the original code gives it, where it does not take them for
    constants, as older transformers does."""
    tower, handle, call, original = fused_and_original(family_tower(name), [(1, 4, 6), (1, 6, 4)])
    call.run(tower)
    gradients = []
    for asked in (tower, original):
        buffer = next(b for b in asked.buffers() if b.is_floating_point()).requires_grad_()
        total = call.record(asked).last_hidden_state.square().sum()
        gradients.append(torch.autograd.grad(total, buffer)[0] if total.requires_grad else None)
    torch.testing.assert_close(*gradients)
    assert handle.stats()["original"] == {fallback.MODIFIED: 1}
    for buffer in tower.buffers():
        buffer.requires_grad_(False)
    call.run(tower)
    assert handle.stats()["fused"] == 2


def bias(path: str) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        module = tower.get_submodule(path)
        width = module.weight.shape[0]
        module.bias = nn.Parameter(torch.linspace(-1, 1, width), requires_grad=False)

    return change


def empty_slots(tower: Any) -> list[str]:
    """Paths of modules whose bias is registered and empty; one of each class and of each last name."""
    found = {
        path.rpartition(".")[2]: path
        for path, module in tower.named_modules()
        if module._parameters.get("bias", 0) is None and module._parameters.get("weight") is not None
    }
    return list(found.values())


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@each_of(INSTALLED)
def test_a_parameter_where_there_was_none(name: str, used: bool) -> None:
    tower = family_tower(name)
    call = Call.of(tower, GRID)
    for path in empty_slots(tower):
        theirs, ours = copy.deepcopy(tower), copy.deepcopy(tower)
        handle = fusedvit.fuse(ours)
        if used:
            call.run(ours)
        bias(path)(theirs)
        bias(path)(ours)
        expected = call.run(theirs)
        assert wrong(call.run(tower), expected) != "", path
        assert wrong(call.run(ours), expected) == "", path
        assert handle.stats()["original"] == {fallback.MODIFIED: 1}, path


@pytest.mark.parametrize("path", ["", "blocks.1", "merger"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_module_that_no_tower_has(path: str, used: bool) -> None:
    """Nothing that runs reads it; what it is there for is not known, so the original code runs."""
    tower, handle, call, original = fused_and_original(family_tower(QWEN3), GRID)
    expected = call.run(original)
    if used:
        call.run(tower)
    tower.get_submodule(path).add_module("extra", nn.Identity())
    assert wrong(call.run(tower), expected) == ""
    assert handle.stats()["original"] == {fallback.MODIFIED: 1}
    assert "extra is not expected" in handle.report()


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_dropout_matters_in_training_mode_only(used: bool) -> None:
    tower = family_tower("Glm4vVisionModel", attention_dropout=0.5)
    call = Call.of(tower, GRID)
    expected = call.run(tower)
    handle = fusedvit.fuse(tower)
    if used:
        call.run(tower)
    tower.train()
    torch.manual_seed(0)
    ours = call.run(tower)
    original = fusedvit.unfuse(copy.deepcopy(tower))
    torch.manual_seed(0)
    assert wrong(ours, call.run(original)) == ""
    assert handle.stats()["original"] == {fallback.MODIFIED: 1}
    assert "blocks.0.attn.attention_dropout is 0.5, expected 0 in training mode" in handle.report()
    tower.eval()
    assert wrong(call.run(tower), expected) == ""
    assert handle.stats()["fused"] == 1 + used


def test_training_mode_without_dropout_is_fused() -> None:
    tower, handle, call = fused_tower(family_tower(QWEN3), GRID, fusedvit.FuseConfig(strict=True))
    call.run(tower)
    call.run(tower.train())
    assert handle.stats()["refreshes"] == 1


LIMITED = "Glm5NextVisionModel"
WINDOWED = "Qwen2_5_VisionTransformerPretrainedModel"


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in INSTALLED, reason="this release of transformers has no such tower")


@pytest.mark.parametrize(
    ("name", "path", "attribute", "value"),
    [
        (QWEN3, "merger.act_fn", "approximate", "tanh"),
        (QWEN3, "blocks.1.norm2", "eps", 0.5),
        (QWEN3, "", "num_grid_per_side", 5),
        (QWEN3, "", "spatial_merge_size", 4),
        (QWEN3, "", "deepstack_visual_indexes", [0]),
        (WINDOWED, "", "window_size", 64),
        (WINDOWED, "", "fullatt_block_indexes", [0]),
        pytest.param(LIMITED, "blocks.1.mlp", "swiglu_limit", 7.0, marks=needs(LIMITED)),
    ],
)
def test_an_engine_that_builds_another_tower(name: str, path: str, attribute: str, value: object) -> None:
    """Its tower is compared with itself as it was built, so what was built is judged by the record as well."""
    tower = family_tower(name)
    handle = fusedvit.fuse(copy.deepcopy(tower))
    assert CheckedTower(tower, handle.family, handle.spec, Built.of(tower)).reason() is None
    setattr(tower.get_submodule(path), attribute, value)
    reason = CheckedTower(tower, handle.family, handle.spec, Built.of(tower)).reason()
    assert reason is not None and f"{path}.{attribute} is ".removeprefix(".") in reason.detail


def test_an_engine_that_hides_a_method() -> None:
    """An attribute of an inner module by the name of a method of its class that the tower's code calls."""
    tower = family_tower(QWEN3)
    handle = fusedvit.fuse(copy.deepcopy(tower))
    built, plain = Built.of(tower), Plain.of(tower)
    code = own_code(plain, handle.family.engine)
    code = dataclasses.replace(code, names=code.names | {"extra_repr"})
    assert not wrong_attributes(plain, built, handle.family, handle.spec, code)
    tower.blocks[1].norm1.extra_repr = str
    assert "blocks.1.norm1.extra_repr" in wrong_attributes(plain, built, handle.family, handle.spec, code)


WAYS: dict[str, Callable[[Any, Call], object]] = {
    "warmup": lambda handle, call: handle.warmup(),
    "refresh": lambda handle, call: handle.refresh(),
    "strict call": lambda handle, call: call.run(handle.tower),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_every_way_to_prepared_weights_asks_first(way: str, used: bool) -> None:
    """All of them lead through `WeightCache.prepare`, which raises or falls back by one question."""
    tower, handle, call = fused_tower(family_tower(QWEN3), GRID, fusedvit.FuseConfig(strict=True))
    if used:
        call.run(tower)
    tower.blocks[1].norm2.eps = 0.5
    with pytest.raises(RuntimeError, match="fusedvit: Qwen3VLVisionModel .*blocks.1.norm2.eps is 0.5, expected 1e-06"):
        WAYS[way](handle, call)
    tower.blocks[1].norm2.eps = 1e-6
    call.run(tower)
    assert handle.stats()["original"] == {}


def test_a_refused_tower_is_not_judged_at_each_call() -> None:
    """Judging it takes as long as a small call: a verdict stands while nothing has changed that it goes by, and where
    something does at each call, keeping it is given up."""
    tower, handle, call = fused_tower(family_tower(QWEN3), GRID)
    tower.blocks[1].attn.scaling = 0.5
    judged, kept = mock.patch.object(CheckedTower, "_reason", autospec=True, side_effect=CheckedTower._reason), 0
    with judged as asked:
        for _ in range(20):
            call.run(tower)
            tower.merger.linear_fc2.weight.data.mul_(1.5)  # no part of the verdict
        assert asked.call_count == 2  # and once more, that nobody changed it meanwhile
    with judged as asked, mock.patch.object(Snapshot, "of", side_effect=Snapshot.of) as taken:
        for i in range(32):
            tower.blocks[0].attn.scaling = 2.0 + i
            call.run(tower)
        kept = taken.call_count
    assert kept <= 6 and asked.call_count == 32 + kept
    assert handle.stats()["original"] == {fallback.MODIFIED: 52}


def test_content_that_changed_is_not_prepared_from_a_changed_tower() -> None:
    """A write that only the fingerprint shows, with a number changed beside it that no snapshot holds."""
    tower, handle, call, original = fused_and_original(family_tower(QWEN3), GRID)
    call.run(tower)
    for module in (tower, original):
        module.merger.linear_fc2.weight.data.mul_(1.5)
        module.blocks[0].attn.scaling = 0.25
    assert wrong(call.run(tower), call.run(original)) == ""
    assert handle.stats()["original"] == {fallback.MODIFIED: 1}
