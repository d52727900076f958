"""What a snapshot compares quickly is compared as exactly as what it compares slowly."""

import contextlib
import gc
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from fusedvit.checks import recorded
from fusedvit.checks.recorded import Attributes, Bodies, Instances, Layouts, Written


class Weight(nn.Parameter):
    pass


def _set(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Parameter], None]:
    def change(p: nn.Parameter) -> None:
        p.data = value(p.data)

    return change


CHANGES: dict[str, Callable[[nn.Parameter], None]] = {
    "class": lambda p: setattr(p, "__class__", Weight),
    "dtype": _set(torch.Tensor.double),
    "shape": _set(lambda d: d.view(2, 8)),
    "one more dimension": _set(lambda d: d[None]),
    "strides": _set(torch.Tensor.t),
    "negated": _set(torch._neg_view),
}
MODES: dict[str, Callable[[], Any]] = {
    "with gradients": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.fixture(params=[True, False], ids=["guards", "no guards"])
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(recorded, "_guards_work", lambda: False)
    return bool(request.param)


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_of_a_layout_is_compared(guards: bool, change: str, mode: str) -> None:
    parameters = _parameters()
    layouts = Layouts(parameters)
    with MODES[mode]():
        assert layouts.unchanged() and layouts.unchanged()
    CHANGES[change](parameters[1])
    with MODES[mode]():
        assert not layouts.unchanged()
        assert not layouts.unchanged()


def test_what_is_no_fact_of_a_layout_changes_nothing(guards: bool) -> None:
    parameters = _parameters()
    layouts = Layouts(parameters)
    for mode in MODES.values():
        with mode():
            assert layouts.unchanged()
    parameters[0].requires_grad_(False)
    parameters[1].data = torch.zeros(4, 4)
    parameters[2].grad = torch.zeros(4, 4)
    for mode in MODES.values():
        with mode():
            assert layouts.unchanged() and layouts.unchanged()


@pytest.mark.parametrize("mode", MODES)
def test_facts_are_read_once_in_each_state(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    layouts = Layouts(_parameters())
    with MODES[mode]():
        assert layouts.unchanged()
        monkeypatch.setattr(recorded, "_facts", lambda tensors: pytest.fail("the guard compares them"))
        assert layouts.unchanged()


def test_guards_that_miss_a_change_or_are_not_there_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded._guards_work()

    class Blind:
        def check(self, *tensors: torch.Tensor) -> bool:
            return True

    work = recorded._guards_work.__wrapped__
    monkeypatch.setattr(recorded, "_guard_of", lambda tensors: Blind())
    assert not work()
    monkeypatch.setattr(recorded, "_guard_of", lambda tensors: torch._C._no_such_module)
    assert not work()


def _double(x: int, y: int = 2, *, z: int = 3) -> int:
    return x * y * z


def _halve(x: int, y: int = 2) -> float:
    return x / y


BODIES: dict[str, Callable[[Any], object]] = {
    "code": lambda f: setattr(f, "__code__", (lambda x, y=2, *, z=3: x).__code__),
    "defaults": lambda f: setattr(f, "__defaults__", (5,)),
    "keyword defaults": lambda f: setattr(f, "__kwdefaults__", {"z": 5}),
    "a default of another type": lambda f: setattr(f, "__defaults__", (2.0,)),
    "a keyword default of another type": lambda f: setattr(f, "__kwdefaults__", {"z": 3.0}),
    "a keyword default is written": lambda f: f.__kwdefaults__.update(z=5),
    "a keyword default is dropped": lambda f: f.__kwdefaults__.clear(),
}


@pytest.mark.parametrize("change", BODIES)
@pytest.mark.parametrize("listed", [True, False])
def test_functions_that_change_in_place(monkeypatch: pytest.MonkeyPatch, change: str, listed: bool) -> None:
    function = FunctionType(_double.__code__, globals(), "f", _double.__defaults__)
    function.__kwdefaults__ = dict(_double.__kwdefaults__)
    if not listed:  # an interpreter whose collector does not list them
        monkeypatch.setattr(gc, "get_referents", lambda *functions: [])
    bodies = Bodies((function, _halve))  # type: ignore[arg-type]
    assert bodies.unchanged()
    BODIES[change](function)
    assert not bodies.unchanged()
    assert not bodies.unchanged()


def test_defaults_replaced_by_equal_ones_of_the_same_type_are_compared_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = FunctionType(_double.__code__, globals(), "f", (float("2.5"),))
    bodies = Bodies((function,))
    function.__defaults__ = (float("2.5"),)
    assert bodies.unchanged()
    monkeypatch.setattr(recorded, "_body_of", lambda function: pytest.fail("the collector's list tells"))
    assert bodies.unchanged()


def test_functions_whose_annotations_are_read_are_compared_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies((_halve, _double))  # type: ignore[arg-type]
    _halve.__annotations__ = dict(_halve.__annotations__) | {"w": int}
    assert bodies.unchanged()
    monkeypatch.setattr(recorded, "_body_of", lambda function: pytest.fail("the collector's list tells"))
    assert bodies.unchanged()


WRITES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another": lambda d: d.__setitem__("a", 2),
    "a new one": lambda d: d.setdefault("z", 1),
    "an update": lambda d: d.update(a=3),
    "or": lambda d: d.__ior__({"a": 3}),
    "gone": lambda d: d.pop("a"),
    "the last": lambda d: d.popitem(),
    "all": lambda d: d.clear(),
    "there and back": lambda d: (d.update(a=5), d.update(a=1)),
}


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="misses attributes that are set (python/cpython#125608)")
@pytest.mark.parametrize("write", WRITES)
def test_versions_count_every_write(write: str) -> None:
    assert recorded._versions_work()
    dictionaries: list[dict[str, Any]] = [{"a": 1, "b": 2}, {"a": 1}]
    written = Written(dictionaries)
    assert written.now() == written.versions
    WRITES[write](dictionaries[1])
    assert written.now() != written.versions


def test_versions_that_miss_a_write_or_are_not_there_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    work = recorded._versions_work.__wrapped__
    monkeypatch.setattr(recorded, "_version_of_dictionary", len)  # of what is there by then, not of each write
    assert not work()
    monkeypatch.setattr(recorded, "_version_of_dictionary", None)
    assert not work()
    monkeypatch.setattr(recorded, "_versions_work", work)
    assert Written([{"a": 1}]).now() is None


class Numbered:
    """Versions as PyTorch numbers them from Python 3.12 on: writes to dictionaries whose version was read before."""

    def __init__(self) -> None:
        self.number = self.asked = 0
        self.known: dict[int, tuple[dict[str, Any], dict[str, Any], int]] = {}

    def version(self, dictionary: dict[str, Any]) -> int:
        self.asked += 1
        for key, (known, before, _) in [*self.known.items()]:
            if known is not dictionary and known != before:
                self._note(key, known)
        if id(dictionary) not in self.known or dictionary != self.known[id(dictionary)][1]:
            self._note(id(dictionary), dictionary)
        return self.known[id(dictionary)][2]

    def _note(self, key: int, dictionary: dict[str, Any]) -> None:
        self.number += 1
        self.known[key] = dictionary, dictionary.copy(), self.number


def test_dictionaries_are_not_asked_while_none_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = Numbered()
    monkeypatch.setattr(recorded, "_version_of_dictionary", numbered.version)
    monkeypatch.setattr(recorded, "_versions_work", lambda: True)
    monkeypatch.setattr(recorded, "_epochs", recorded._Epochs())
    ours: list[dict[str, Any]] = [{"a": 1}, {"a": 1}]
    first, second, unrelated = Written(ours), Written([{"a": 1}]), {"a": 1}

    def asked(of: Written) -> int:
        """How many versions are read to find that nothing was written."""
        before = numbered.asked
        assert of.now() == of.versions
        return numbered.asked - before

    assert [asked(first), asked(second)] == [3, 2]
    assert [asked(first), asked(second), asked(first)] == [1, 1, 1]
    unrelated["a"] = 2  # nobody has read its version
    assert asked(first) == 1
    numbered.version(unrelated)
    assert [asked(first), asked(first)] == [3, 1], "what others read and write ends an epoch"
    ours[1]["a"] = 2
    assert asked(second) == 2
    versions = first.now()
    assert versions != first.versions, "another's call has begun the epoch"
    assert first.now() == versions != first.versions, "until the content is found unchanged"
    first.versions = versions
    assert [asked(first), asked(first)] == [3, 1]
    first.versions = None  # of changed content
    assert first.now() == versions


def test_versions_that_end_no_epoch_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    version, own = recorded._version_of_dictionary, recorded._epochs._own
    monkeypatch.setattr(recorded, "_version_of_dictionary", lambda d: d["writes"] if d is own else version(d))
    assert not recorded._versions_work.__wrapped__()


def test_attributes_that_come_or_hide() -> None:
    """Of any name: a class may have one by it, which the code reads."""
    for name in ("anything", "weight", "forward", "_call_impl"):
        linear = nn.Linear(2, 2)
        instances = Instances.of([linear], [linear])
        assert instances.unchanged()
        vars(linear)[name] = None
        assert not instances.unchanged()
    linear = nn.Linear(2, 2)
    instances = Instances.of([linear], [linear])
    linear._forward_hooks = type(linear._forward_hooks)()
    assert not instances.unchanged()


class EqualToAll:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


_NAN, _KEPT = float("nan"), EqualToAll()
EQUALS: list[tuple[Any, Any]] = [
    (1000, int("1000")),
    (0.5, float("0.5")),
    (_NAN, float("nan")),
    ("name", "".join(["na", "me"])),
    (torch.device("cpu"), torch.device("cpu")),
    (torch.Size([1, 2]), torch.Size([1, 2])),
    (["a", 1, None, torch.float32], ["a", 1, None, torch.float32]),
    ((1, 2.5), tuple([1, 2.5])),
    ({"a": 1.5}, {"a": 1.5}),
    ({1, "a"}, {"a", 1}),
    ([_KEPT], [_KEPT]),
]
OTHERS: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ("1", 1),
    ("1", b"1"),
    ([1], (1,)),
    ([1], [True]),
    ([1], [1, 1]),
    ({1}, {1.0}),
    ({"a": 1}, {"a": True}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (_KEPT, EqualToAll()),
    ([_KEPT], [EqualToAll()]),
    (torch.ones(1), torch.ones(1)),
    (None, False),
]


@pytest.mark.parametrize(("before", "after"), EQUALS)
def test_attributes_that_are_equal(before: Any, after: Any) -> None:
    owner = {"a": before, "b": before}
    recorded = Attributes([(owner, "a"), (owner, "b")])
    owner["a"] = after
    assert recorded.unchanged() and recorded.hold_the_same()
    assert recorded.entries.unchanged(), "compared with what was replaced"
    if isinstance(after, list | set | dict):
        after.clear()
        assert not recorded.hold_the_same()


@pytest.mark.parametrize(("before", "after"), OTHERS)
def test_attributes_that_are_not_the_same(before: Any, after: Any) -> None:
    owner = {"a": before}
    recorded = Attributes([(owner, "a")])
    owner["a"] = after
    assert not recorded.unchanged()
    owner["a"] = before
    assert recorded.unchanged()


def test_attributes_replaced_by_what_they_were_changed_to() -> None:
    owner = {"a": [1]}
    recorded = Attributes([(owner, "a")])
    owner["a"].append(2)
    owner["a"] = [1, 2]
    assert not recorded.unchanged()
    owner["a"] = [1]
    assert recorded.unchanged() and recorded.hold_the_same()
