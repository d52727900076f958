"""What a module's source defines or imports as a function must be that function, and no object that is called like it:
an operator, a module, a method, a class, a descriptor, a cache."""

import contextlib
import copy
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.checks import checked_tower, fallback, source_code
from fusedvit.checks.forward_hooks import _capturing_code as _capturing
from fusedvit.checks.ownership import describe, held_function, is_operator, own_class
from tests.support.towers import (
    GRIDS,
    Call,
    assert_bitwise,
    assert_same,
    error_of,
    fused_tower,
    fused_when,
    in_place_of,
    modeling,
    ran_original,
    reversed_blocks,
    tiny_tower,
    twisted,
)

WHEN = pytest.mark.parametrize("when", ["before fuse", "after a call"])
MINUS = "fusedvit_tests::minus"


@torch.library.custom_op(MINUS, mutates_args=())
def _minus(x: torch.Tensor) -> torch.Tensor:
    return -x


class Holding:
    """Something that holds what it replaces."""

    def __init__(self, old: Any) -> None:
        self.old = old

    def method(self, *arguments: Any, **named: Any) -> Any:
        return twisted(self.old(*arguments, **named))


class Described(Holding):
    """A descriptor that cannot be called itself."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else lambda *a, **named: twisted(self.old(instance, *a, **named))


class Proxy(Holding):
    """Passes for the function that it replaces under `isinstance`, as proxies of the library wrapt do. As a method it
    is another object at each read."""

    def __init__(self, old: Any, of: Any = None) -> None:
        super().__init__(old)
        self.of = of or old

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return Proxy(self.old.__get__(instance, owner), self.of)

    __call__ = Holding.method


class DescribedProperty(property):
    """A property of the function that it replaces, which gives another."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else lambda x: twisted(self.fget(instance, x))  # type: ignore[misc]


class Scaled(nn.Module):
    def __init__(self, old: Any) -> None:
        super().__init__()
        self.old = old

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return twisted(self.old(*arguments, **named))


def a_class(old: Any) -> type:
    """A class that is called in the place of a function, with its names."""
    names = {"__module__": old.__module__, "__qualname__": old.__qualname__}
    return type(old.__name__, (), {"__new__": lambda cls, *a, **named: twisted(old(*a, **named)), **names})


def memoised(old: Any) -> Any:
    return functools.wraps(old)(functools.lru_cache(lambda *arguments: twisted(old(*arguments))))


def read_twice(name: str) -> property:
    """A property that gives a module's own or registered attribute, changed."""
    found: Any = nn.Module.__getattr__
    scaled = {"linear_fc1": lambda module: nn.Sequential(module, nn.ReLU())}.get(name, lambda value: value * 1.5)
    return property(lambda s: scaled(vars(s)[name] if name in vars(s) else found(s, name)), lambda s, value: None)


def imported(module: types.ModuleType) -> types.ModuleType:
    """A module that anybody could import, with the content of `module` but for one function."""
    false = types.ModuleType("of_somebody_else")
    vars(false).update({name: value for name, value in vars(module).items() if not name.startswith("__")})
    false.linear = lambda x, w, b=None: 2 * (x @ w.t())  # type: ignore[attr-defined]
    sys.modules[false.__name__] = false
    return false


def in_module(name: str, replace: Callable[[Any], Any]) -> Any:
    return in_place_of(modeling(), name, replace)


def in_mlp(name: str, replace: Callable[[Any], Any]) -> Any:
    return in_place_of(modeling().Qwen3VLVisionMLP, name, replace)


OBJECTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "custom operator": lambda: in_module("rotate_half", lambda old: _minus),
    "operator": lambda: in_module("rotate_half", lambda old: torch.ops.fusedvit_tests.minus.default),
    "function of C": lambda: in_module("rotate_half", lambda old: torch.neg),
    "module": lambda: in_module("rotate_half", Scaled),
    "bound method": lambda: in_module("rotate_half", lambda old: Holding(old).method),
    "class": lambda: in_module("rotate_half", a_class),
    "class for an imported function": lambda: in_module("get_vision_position_ids", rolling_class),
    "method for an imported function": lambda: in_module("get_vision_position_ids", rolling_method),
    "method for a function of torch": lambda: in_place_of(nn.functional, "gelu", lambda old: Holding(old).method),
    "class for a function of torch": lambda: in_place_of(nn.functional, "gelu", lambda old: a_class(relu)),
    "module for a function of torch": lambda: in_place_of(nn.functional, "layer_norm", Scaled),
    "method for a function of C in torch": lambda: in_place_of(torch, "layer_norm", lambda old: Holding(old).method),
    "descriptor of forward": lambda: in_mlp("forward", Described),
    "proxy of a function": lambda: in_module("rotate_half", Proxy),
    "proxy of a function of torch": lambda: in_place_of(nn.functional, "linear", Proxy),
    "proxy of forward": lambda: in_mlp("forward", Proxy),
    "proxy of a call": lambda: in_place_of(nn.Module, "__call__", Proxy),
    "property of forward": lambda: in_mlp("forward", DescribedProperty),
    "descriptor of a call": lambda: in_mlp("__call__", Described),
    "descriptor of an order": lambda: in_place_of(
        nn.ModuleList, "__iter__", lambda old: functools.partialmethod(reversed_blocks)
    ),
    "cache for a function": lambda: in_module("apply_rotary_pos_emb_vision", memoised),
    "cache for a method": lambda: in_mlp("forward", memoised),
    "property over a parameter": lambda: in_place_of(nn.Module, "weight", lambda old: read_twice("weight")),
    "property over a number": lambda: in_place_of(nn.Module, "scaling", lambda old: read_twice("scaling")),
    "property over a module": lambda: in_place_of(nn.Module, "linear_fc1", lambda old: read_twice("linear_fc1")),
    "module that can be imported": lambda: in_place_of(sys.modules["torch.nn.modules.linear"], "F", imported),
}


def relu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return torch.relu(x)


def rolling_class(old: Any) -> type:
    return type(old.__name__, (), {"__new__": lambda cls, *a, **named: old(*a, **named).roll(1, 0)})


def rolling_method(old: Any) -> Any:
    return types.MethodType(lambda self, *a, **named: old(*a, **named).roll(1, 0), object())


@WHEN
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_in_the_place_of_functions(name: str, when: str) -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    plain, original = call.run(tower), copy.deepcopy(tower)
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.pop, "of_somebody_else", None)
        handle = fused_when(tower, when, lambda: stack.enter_context(OBJECTS[name]()), call)
        expected = call.run(original)
        assert_bitwise(call.run(tower), expected)
    assert any(error_of(expected[n], plain[n]) > 1e-5 for n in plain)
    assert sum(handle.stats()["original"].values()) == 1
    assert handle.stats()["original"].keys() <= {fallback.FOREIGN_CODE, fallback.MODIFIED}
    assert_bitwise(call.run(original), plain)


@pytest.mark.parametrize("name", ["proxy of forward", "descriptor of an order"])
def test_what_is_another_object_at_each_read_counts_as_one(name: str) -> None:
    """The first call judges the tower for the next ones, and calls run fused once it is gone."""
    tower, handle, call = fused_tower()
    with OBJECTS[name](), mock.patch.object(checked_tower, "own_code", wraps=checked_tower.own_code) as judged:
        call.run(tower)
        judged.reset_mock()
        call.run(tower)
        call.run(tower)
        ran_original(handle, fallback.FOREIGN_CODE, calls=3)
        judged.assert_not_called()
    call.run(tower)
    assert handle.stats()["fused"] == 1


def test_a_reason_tells_the_code_from_the_one_that_it_replaces() -> None:
    tower, mlp = tiny_tower(), modeling().Qwen3VLVisionMLP
    handle, own = fusedvit.fuse(tower), mlp.forward

    @functools.wraps(own)
    def wrapper(*arguments: Any) -> Any:
        return own(*arguments)

    with mock.patch.object(mlp, "forward", wrapper):
        assert f"Qwen3VLVisionMLP.forward is a wrapper, by {__name__}, around " in str(handle.reason())
    code = own.__code__
    own.__code__ = code.replace(co_stacksize=code.co_stacksize + 1, co_consts=(*code.co_consts, 1))
    try:
        assert "Qwen3VLVisionMLP.forward with other code than its source's" in str(handle.reason())
    finally:
        own.__code__ = code
    with mock.patch.object(mlp, "forward", Proxy(own)):
        assert f"Qwen3VLVisionMLP.forward is an object of {__name__}.Proxy" in str(handle.reason())
    assert handle.reason() is None


def _under_the_name_of(own: Any) -> Any:
    """What `functools.wraps` makes where `__wrapped__` is deleted, as `inspect.unwrap` follows it."""

    @functools.wraps(own)
    def other(*arguments: Any, **named: Any) -> Any:
        return own(*arguments, **named)

    del other.__wrapped__
    return other


@pytest.mark.parametrize(
    ("where", "name"), [("Qwen3VLVisionMLP", "forward"), ("", "apply_rotary_pos_emb_vision"), ("torch", "forward")]
)
def test_a_reason_never_says_that_a_name_is_itself(where: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsloth's compiler puts the `forward` of a module that it names "Linear" in the place of `Linear.forward`."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    owner: Any = torch.nn.Linear if where == "torch" else getattr(modeling(), where) if where else modeling()
    other = _under_the_name_of(getattr(owner, name))
    if where == "torch":
        home = types.ModuleType("Linear")
        monkeypatch.setitem(sys.modules, "Linear", home)
        exec("def forward(self, input):\n    return input @ self.weight.T + self.bias\n", vars(home))
        other = home.forward
    monkeypatch.setattr(owner, name, other)
    before, _, after = str(handle.reason()).removeprefix("replaced code: ").partition(" is ")
    assert name in before and name in after and before != after


def test_a_reason_tells_what_differs_inside_and_around_a_decorator_of_transformers() -> None:
    """Type checkers compile wrappers in the module of what they wrap; line profilers change the code of functions."""
    tower = tiny_tower()
    cls, handle = own_class(type(tower)), fusedvit.fuse(tower)
    own = cls.forward
    named = f"{cls.__module__}.{cls.__qualname__}.forward"
    code = (lambda *a, **k: own(*a, **k)).__code__
    made = types.FunctionType(code, vars(modeling()), closure=(types.CellType(own),))
    with mock.patch.object(cls, "forward", functools.wraps(own)(made)):
        assert f"is a wrapper, defined in no source, around {named}" in str(handle.reason())
    inner = inspect.unwrap(own)
    code = inner.__code__
    inner.__code__ = code.replace(co_consts=(*code.co_consts, 1))
    try:
        assert inner is not own and f"is {named} with other code than its source's" in str(handle.reason())
    finally:
        inner.__code__ = code
    with mock.patch.dict(sys.modules, {cls.__module__: types.ModuleType(cls.__module__)}):
        assert describe(inner) == f"{named} with other globals than those of {cls.__module__}"
    assert handle.reason() is None


def test_new_towers_run_fused_after_their_module_was_reloaded() -> None:
    """As notebooks do. Classes that were imported before build modules of the new classes."""
    module = modeling()
    config, before = tiny_tower().config, dict(vars(module))
    fusedvit.fuse(old := tiny_tower())
    call = Call.of(old, GRIDS["mix"])
    call.run(old)
    try:
        importlib.reload(module)
        for cls in (own_class(type(old)), module.Qwen3VLVisionModel):
            new = cls(config).requires_grad_(False)
            ref, handle = call.run(new), fusedvit.fuse(new)
            assert_same(call.run(new), ref)
            assert handle.stats()["fused"] == 1, handle.report()
        call.run(old)
        assert fusedvit.fuse(old).stats()["fused"] == 2
    finally:
        vars(module).update(before)


def test_a_fused_tower_answers_once_its_module_has_left_sys_modules() -> None:
    tower = tiny_tower()
    call, module = Call.of(tower, GRIDS["mix"]), own_class(type(tower)).__module__
    ref, handle = call.run(tower), fusedvit.fuse(tower)
    call.run(tower)
    with mock.patch.dict(sys.modules):
        del sys.modules[module]
        assert_same(call.run(tower), ref)
    assert handle.stats()["raised"] == 0


@pytest.mark.parametrize("when", ["before fuse", "after a call"])
@pytest.mark.parametrize("of", ["the tower", "hooks"])
def test_another_module_that_stands_in_for_a_while(of: str, when: str) -> None:
    """What is found out about a stand-in in `sys.modules` is not kept for the module whose name it had."""
    tower = tiny_tower()
    name = own_class(type(tower)).__module__ if of == "the tower" else "transformers.utils.output_capturing"
    call, module = Call.of(tower, GRIDS["mix"]), sys.modules[name]
    call.run(tower, output_hidden_states=True)  # installs hooks
    ref = call.run(tower)
    for cached in (
        *(source_code._functions, source_code._paths, source_code._header, source_code._text_of),
        _capturing,
    ):
        cached.cache_clear()
    with mock.patch.dict(sys.modules, {name: types.ModuleType(name)}):
        handle = fused_when(tower, when, lambda: None, call)
        assert_same(call.run(tower), ref)
        assert of == "hooks" or f"{own_class(type(tower)).__qualname__}, which that module does not" in handle.report()
    assert sys.modules[name] is module and handle.reason() is None, handle.report()
    fused = handle.stats()["fused"]
    assert_same(call.run(tower), ref)
    assert handle.stats()["fused"] == fused + 1, handle.report()


def test_another_class_of_the_same_name_is_told_so() -> None:
    tower, handle, call = fused_tower()
    kind = type(tower.blocks[0])
    tower.blocks[0].__class__ = type(kind.__name__, (kind,), _names_of(kind))
    assert "blocks.0 is" in str(handle.reason()) and "expected another class of that name" in str(handle.reason())


def _names_of(cls: type) -> dict[str, str]:
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__}


def test_a_cache_holds_what_it_calls() -> None:
    def inner() -> None: ...

    cached = functools.lru_cache(inner)
    assert held_function(cached) is inner
    cached.__wrapped__ = relu
    assert held_function(cached) is cached


def test_an_operator_is_found_under_its_own_name() -> None:
    operator = torch.ops.fusedvit_tests.minus
    assert is_operator(operator, "fusedvit_tests", "minus")
    assert not is_operator(operator, "fusedvit_tests", "plus")
    assert not is_operator(operator, "torch.nn.functional", "minus")
