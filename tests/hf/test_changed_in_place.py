"""Changes that keep the identity of what they change, or that Python finds before what a tower holds: the answer is
that of the code that would run, and never a fused one."""

import contextlib
import copy
import importlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._contextlib import context_decorator

import fusedvit
from tests.support.families import family_tower
from tests.support.towers import GRIDS, Call, assert_same, error_of, modeling, twisted

GEMMA = "Gemma4VisionModel"
Edit = Callable[[Any], contextlib.AbstractContextManager[Any]]


def config_class() -> Any:
    return importlib.import_module("transformers.models.qwen3_vl.configuration_qwen3_vl").Qwen3VLVisionConfig


def base_config() -> Any:
    return importlib.import_module("transformers.configuration_utils").PreTrainedConfig


def attention_functions() -> Any:
    return importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS


def vision_utils() -> Any:
    return importlib.import_module("transformers.vision_utils")


def _doubling(module: Any, q: Any, k: Any, v: Any, *given: Any, **named: Any) -> Any:
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    return sdpa(module, q, k, v * 2, *given, **named)


class Field:
    """A descriptor that is no property, and wins over what an instance holds."""

    def __init__(self, name: str, value: Callable[[Any], Any]) -> None:
        self.name, self.value = name, value

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self.value(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value


class FirstBlockOnly:
    @property
    def blocks(self) -> Any:
        return [*vars(self)["_modules"]["blocks"]][:1] * 3


class Third(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) * 0.3


class Backwards(dict[str, Any]):
    def values(self) -> Any:
        return reversed([*super().values()])


class Louder(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        out = function(*given, **(named or {}))
        return out * 1.1 if isinstance(out, torch.Tensor) and out.is_floating_point() else out


@contextlib.contextmanager
def on(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value`, what it was before afterwards, or nothing."""
    held, kept = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if held:
            setattr(owner, name, kept)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def special(owner: Any, name: str, value: Any) -> Iterator[None]:
    """As `on`, of what no `__dict__` holds: `__defaults__`, `__bases__`, `__class__`."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextlib.contextmanager
def other_body(function: Any) -> Iterator[None]:
    """`function` keeps its identity and gives something else."""
    kept, scope = function.__code__, function.__globals__
    first = types.FunctionType(kept, scope, function.__name__, function.__defaults__, function.__closure__)
    first.__kwdefaults__ = function.__kwdefaults__

    names = kept.co_freevars
    held = f" {' = '.join(names)} = None\n def new(*a, **k):\n  if False: ({', '.join(names)},)\n" if names else ""
    body = f"def outer():\n{held or ' def new(*a, **k):' + chr(10)}  return _twisted(_first(*a, **k))\n return new\n"
    space: dict[str, Any] = {}
    exec(body, space)
    with mock.patch.dict(scope, {"_twisted": twisted, "_first": first}):
        function.__code__ = space["outer"]().__code__
        try:
            yield
        finally:
            function.__code__ = kept


@contextlib.contextmanager
def set_on_tower(tower: Any, change: Callable[[Any], None]) -> Iterator[None]:
    change(tower)
    yield


def of_tower(change: Callable[[Any], Any]) -> Edit:
    return lambda tower: set_on_tower(tower, change)


def _mask(*given: Any, q_length: int, kv_length: int, **named: Any) -> torch.Tensor:
    return torch.ones(1, 1, q_length, kv_length, dtype=torch.bool).tril()


def _masks() -> Any:
    return importlib.import_module("transformers.masking_utils").AttentionMaskInterface._global_mapping


def _activations(tower: Any) -> list[Any]:
    return [module for module in tower.modules() if type(module).__name__ == "GELUTanh"]


def _other_state(tower: Any) -> None:
    for module in _activations(tower):
        module.act.__setstate__((F.relu, (), {}, {}))


def _other_keywords(tower: Any) -> None:
    for module in _activations(tower):
        module.act.keywords["approximate"] = "none"
        module.act.__setstate__((lambda x, **named: F.gelu(x, **named) * 1.1, (), module.act.keywords, {}))


def _other_list(tower: Any) -> None:
    kind = type("Listed", (list,), {"__contains__": lambda self, at: False})
    tower.deepstack_visual_indexes = kind(tower.deepstack_visual_indexes)


def _subclass(tower: Any) -> None:
    tower.__class__ = type("Mine", (FirstBlockOnly, type(tower)), {})


def _registry(path: str, name: str, kind: type) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        module = tower.get_submodule(path)
        vars(module)[name] = kind(vars(module)[name])

    return change


def _instead(path: str, out: str, name: str) -> Callable[[Any], None]:
    """One entry of a module's `__dict__` goes, another comes: their number stays."""

    def change(tower: Any) -> None:
        held = vars(tower.get_submodule(path))
        del held[out]
        held[name] = torch.zeros_like

    return change


def _causal(tower: Any) -> None:
    for layer in tower.encoder.layers:
        layer.self_attn.is_causal = True


def _hidden_merger(tower: Any) -> None:
    other = copy.deepcopy(tower.merger)
    other.linear_fc2.weight.data.mul_(2)
    vars(tower)["merger"] = other


class Halved(torch.Tensor):
    """A tensor of a user's own class, whose products are not torch's."""

    def __rmul__(self, other: Any) -> torch.Tensor:
        return torch.Tensor.__mul__(other, self.as_subclass(torch.Tensor)) * 0.5

    __mul__ = __rmul__


def _other_buffer(tower: Any) -> None:
    tower.rotary_pos_emb.inv_freq = tower.rotary_pos_emb.inv_freq.as_subclass(Halved)


def _other_class_of_buffer(tower: Any) -> None:
    tower.rotary_pos_emb.inv_freq.__class__ = Halved


SHARED: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "defaults": lambda _: special(vision_utils().get_vision_attention_seqlens, "__defaults__", (True, None)),
    "defaults of positions": lambda _: special(vision_utils().get_vision_position_ids, "__defaults__", (True, None)),
    "a descriptor by the name of a number": lambda _: on(
        modeling().Qwen3VLVisionAttention, "scaling", Field("scaling", lambda o: 0.01)
    ),
    "a descriptor by the name of a weight": lambda _: on(
        nn.Linear, "weight", Field("weight", lambda o: o._parameters["weight"] * 0.5)
    ),
    "a value by the name of a module": lambda _: on(modeling().Qwen3VLVisionMLP, "act_fn", nn.Tanh()),
    "a list by the name of the blocks": lambda _: on(modeling().Qwen3VLVisionModel, "blocks", []),
    "a value by the name of a buffer": lambda _: on(modeling().Qwen3VLVisionRotaryEmbedding, "inv_freq", torch.ones(6)),
    "a base of the tower": lambda _: special(
        modeling().Qwen3VLVisionModel, "__bases__", (FirstBlockOnly, *modeling().Qwen3VLVisionModel.__bases__)
    ),
    "how a registry is looked up": lambda _: on(
        type(attention_functions()).__mro__[1], "__getitem__", lambda self, key: _doubling
    ),
    "a registry's own lookup": lambda _: on(attention_functions(), "get_interface", lambda name, default: _doubling),
    "a context around a method": lambda _: on(
        modeling().Qwen3VLVisionMLP, "forward", context_decorator(lambda: Louder(), modeling().Qwen3VLVisionMLP.forward)
    ),
    "a body of torch's": lambda _: other_body(torch.Tensor.split),
    "a body of torch.nn.functional's": lambda _: other_body(F.embedding),
    "a body within torch's": lambda _: other_body(torch.Tensor.__rsub__.__wrapped__),  # type: ignore[attr-defined]
    "the config's attribute": lambda _: on(base_config(), "_attn_implementation", property(lambda self: "mine")),
    "the config's class": lambda _: on(config_class(), "spatial_merge_size", property(lambda self: 1)),
}
OF_TOWERS: dict[str, Edit] = {
    "partial functions": of_tower(_other_state),
    "keywords of partial functions": of_tower(_other_keywords),
    "a subclass of list": of_tower(_other_list),
    "modules in another kind of dict": of_tower(_registry("blocks", "_modules", Backwards)),
    "parameters in another kind of dict": of_tower(_registry("blocks.0.mlp.linear_fc1", "_parameters", Third)),
    "buffers in another kind of dict": of_tower(_registry("rotary_pos_emb", "_buffers", Third)),
    "a buffer of another class": of_tower(_other_buffer),
    "another class of a buffer": of_tower(_other_class_of_buffer),
    "a buffer before a module": of_tower(lambda tower: tower.blocks[0]._buffers.update(mlp=torch.zeros_like)),
    "another registry before a module": of_tower(
        lambda tower: vars(tower.blocks[0]).update(_parameters={"mlp": torch.zeros_like})
    ),
    "an attribute before a module": of_tower(_hidden_merger),
    "an attribute for another": of_tower(_instead("blocks.0", "_is_full_backward_hook", "mlp")),
    "a call for an attribute": of_tower(_instead("blocks.0.mlp.act_fn", "_is_full_backward_hook", "_call_impl")),
}


def compared(theirs: Any, ours: Any, call: Any, edits: list[Any], when: str, differs: bool = True) -> None:
    """`ours` answers as `theirs`, which is edited alike, and by the original code; `differs` from before."""
    plain = call.run(theirs)
    handle = fusedvit.fuse(ours) if when == "after a call" else None
    if handle is not None:
        assert_same(call.run(ours), plain)
    with contextlib.ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit)
        handle = handle or fusedvit.fuse(ours)
        fused = handle.stats()["fused"]
        expected = call.run(theirs)
        assert_same(call.run(ours), expected)
        assert handle.stats()["fused"] == fused and sum(handle.stats()["original"].values()) == 1
    assert not differs or expected.keys() != plain.keys() or any(error_of(expected[n], plain[n]) > 1e-4 for n in plain)


@pytest.fixture
def two_towers() -> tuple[Any, Any, Call]:
    tower = family_tower("Qwen3VLVisionModel")
    return tower, copy.deepcopy(tower), Call.of(tower, GRIDS["mix"])


@pytest.mark.parametrize("when", ["before fuse", "after a call"])
@pytest.mark.parametrize("what", SHARED)
def test_what_every_tower_runs(what: str, when: str, two_towers: tuple[Any, Any, Call]) -> None:
    theirs, ours, call = two_towers
    with mock.patch.dict(type(attention_functions())._global_mapping, {"mine": _doubling}):
        compared(theirs, ours, call, [SHARED[what](None)], when)


@pytest.mark.parametrize("when", ["before fuse", "after a call"])
@pytest.mark.parametrize("what", OF_TOWERS)
def test_what_a_tower_holds(what: str, when: str, two_towers: tuple[Any, Any, Call]) -> None:
    theirs, ours, call = two_towers
    compared(theirs, ours, call, [OF_TOWERS[what](theirs), OF_TOWERS[what](ours)], when)


def _another_dict(path: str, **changed: Any) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        module = tower.get_submodule(path)
        object.__setattr__(module, "__dict__", {**vars(module), **changed})

    return change


def _other_modules(tower: Any) -> None:
    other = copy.deepcopy(tower.merger)
    other.linear_fc2.weight.data.mul_(2)
    object.__setattr__(tower, "__dict__", {**vars(tower), "_modules": {**tower._modules, "merger": other}})


@pytest.mark.parametrize("when", ["before fuse", "after a call"])
@pytest.mark.parametrize(
    "change",
    [_another_dict("blocks.0.norm1", eps=0.5), _another_dict("blocks.1.attn", scaling=0.01)],
    ids=["a norm", "attention"],
)
def test_another_dict_of_a_module(change: Callable[[Any], None], when: str, two_towers: tuple[Any, Any, Call]) -> None:
    theirs, ours, call = two_towers
    compared(theirs, ours, call, [set_on_tower(tower, change) for tower in (theirs, ours)], when)


def test_another_dict_of_the_tower(two_towers: tuple[Any, Any, Call]) -> None:
    """It computes with other weights, and may run fused with them."""
    theirs, ours, call = two_towers
    fusedvit.fuse(ours)
    before = call.run(ours)
    for tower in (theirs, ours):
        _other_modules(tower)
    assert_same(call.run(ours), call.run(theirs))
    assert any(error_of(call.run(theirs)[name], before[name]) > 1e-4 for name in before)


def test_the_towers_own_class(two_towers: tuple[Any, Any, Call]) -> None:
    theirs, ours, call = two_towers
    compared(theirs, ours, call, [set_on_tower(tower, _subclass) for tower in (theirs, ours)], "after a call")


MIXIN = """
from torch import nn

class Scaled(nn.Module):
    @property
    def scaling(self):
        return 0.01

    @scaling.setter
    def scaling(self, value):
        pass
"""


@pytest.mark.parametrize("when", ["before fuse", "after a call"])
def test_a_base_from_a_file_of_ones_own(
    when: str, two_towers: tuple[Any, Any, Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source defines it indeed."""
    (tmp_path / "mixin_of_somebody.py").write_text(MIXIN)
    monkeypatch.syspath_prepend(tmp_path)
    base = importlib.import_module("mixin_of_somebody").Scaled
    theirs, ours, call = two_towers
    compared(theirs, ours, call, [special(modeling().Qwen3VLVisionAttention, "__bases__", (base,))], when)


class Images(NamedTuple):
    """A call of a tower that takes positions."""

    pixels: torch.Tensor
    places: torch.Tensor

    def run(self, tower: Any) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"rows": tower(self.pixels, self.places).last_hidden_state}


@pytest.mark.parametrize("when", ["before fuse", "after a call"])
@pytest.mark.parametrize("what", ["attention", "config", "mask"])
def test_what_is_read_by_a_string(what: str, when: str) -> None:
    """`getattr(module, "is_causal", True)`, and a registry of masks: of the towers that ask for them."""
    theirs, ours = family_tower(GEMMA), family_tower(GEMMA)
    side = torch.arange(4)
    places = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).reshape(1, 16, 2).repeat(2, 1, 1)
    pixels = torch.rand(2, 16, 3 * theirs.config.patch_size**2, generator=torch.Generator().manual_seed(1))
    changes: dict[str, list[Any]] = {
        "attention": [set_on_tower(tower, _causal) for tower in (theirs, ours)],
        "config": [set_on_tower(t, lambda t: setattr(t.config, "is_causal", True)) for t in (theirs, ours)],
        "mask": [mock.patch.dict(_masks(), {"sdpa": _mask})],
    }
    compared(theirs, ours, Images(pixels, places), changes[what], when)


def test_contexts_about_gradients_stay_fused(two_towers: tuple[Any, Any, Call]) -> None:
    _, ours, call = two_towers
    mlp = modeling().Qwen3VLVisionMLP
    with on(mlp, "forward", torch.no_grad()(mlp.forward)):
        handle = fusedvit.fuse(ours)
        call.run(ours)
    assert handle.stats()["fused"] == 1


@pytest.mark.parametrize("change", [dict(num_heads=0), dict(patch_size=0), dict(depth=2.5)], ids=str)
def test_what_cannot_be_judged_runs_the_original_code(
    change: dict[str, Any], two_towers: tuple[Any, Any, Call]
) -> None:
    """A config whose numbers no longer make sense; its tower reads them no more."""
    theirs, ours, call = two_towers
    handle = fusedvit.fuse(ours)
    call.run(ours)
    vars(ours.config).update(change)
    assert_same(call.run(ours), call.run(theirs))
    assert handle.stats()["calls"] == 2


def test_whatever_a_check_raises_runs_the_original_code(two_towers: tuple[Any, Any, Call]) -> None:
    theirs, ours, call = two_towers
    with mock.patch("fusedvit.checks.checked_tower.wrong_modules", side_effect=AttributeError("no such thing")):
        handle = fusedvit.fuse(ours)
        assert_same(call.run(ours), call.run(theirs))
    assert "no such thing" in str(handle.stats()["details"])


def test_registries_of_anything_are_no_error(two_towers: tuple[Any, Any, Call]) -> None:
    theirs, ours, call = two_towers
    ours.blocks[0]._buffers["note"] = "text"
    del ours.blocks[1].mlp.training
    handle = fusedvit.fuse(ours)
    assert_same(call.run(ours), call.run(theirs))
    assert sum(handle.stats()["original"].values()) == 1


def test_lookups_of_module_dicts(two_towers: tuple[Any, Any, Call]) -> None:
    """By which PEFT's layers find their adapters."""
    peft = pytest.importorskip("peft")
    theirs, ours, call = two_towers
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["qkv", "proj"], init_lora_weights=False)
    for tower in (theirs, ours):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, tower)
        tower.eval().requires_grad_(False)
    for name, answer in {"keys": lambda self: {}.keys(), "__contains__": lambda self, key: False}.items():
        ours_now = copy.deepcopy(ours)
        compared(theirs, ours_now, call, [on(nn.ModuleDict, name, answer)], "after a call", name == "keys")


def test_decorators_that_the_source_does_not_have(two_towers: tuple[Any, Any, Call]) -> None:
    """One of transformers' own, which goes back to other frequencies after long inputs."""
    theirs, ours, call = two_towers
    wrap = importlib.import_module("transformers.modeling_rope_utils").dynamic_rope_update
    kind = modeling().Qwen3VLVisionRotaryEmbedding

    def after_long_inputs(tower: Any) -> None:
        rope = tower.rotary_pos_emb
        rope.rope_type, rope.original_inv_freq = "dynamic", rope.inv_freq * 0.5
        rope.max_seq_len_cached, rope.original_max_seq_len = 2000, 1000

    edits = [on(kind, "forward", wrap(kind.forward)), *(set_on_tower(t, after_long_inputs) for t in (theirs, ours))]
    compared(theirs, ours, call, edits, "after a call")
