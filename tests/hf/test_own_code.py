"""A tower runs fused only where its original code is transformers' own: whatever somebody replaces, the answer is that
of the code that would run, and the reason names what was replaced."""

import builtins
import contextlib
import copy
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg

import fusedvit
from fusedvit.checks import as_built, fallback
from fusedvit.checks.adapters import Plain
from fusedvit.checks.own_code import walk
from fusedvit.checks.own_code.findings import OwnCode
from fusedvit.checks.own_code.tower_code import own_code
from fusedvit.checks.ownership import is_builtin
from fusedvit.checks.source_code import definition_of
from tests.support.families import BY_GRID, INSTALLED, SHAPES, class_of, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_alike,
    assert_bitwise,
    assert_same,
    error_of,
    fused_and_original,
    fused_tower,
    fused_when,
    in_place_of,
    modeling,
    outcome,
    reversed_blocks,
    tiny_tower,
    twisted,
)

GRID = [(1, 8, 4), (1, 2, 10)]
QWEN, LINEAR = modeling(), sys.modules["torch.nn.modules.linear"]
ROTARY, RECOMPOSITION = "apply_rotary_pos_emb_vision", "recomposition_frequencies"
STRICT = fusedvit.FuseConfig(strict=True)
WHEN = pytest.mark.parametrize("when", ["before fuse", "after fuse", "after a call"])


at, _named = mock.patch.object, types.SimpleNamespace


class Replaceable(NamedTuple):
    """A method of a class in a tower, or a function of a module, that the tower's code calls."""

    owner: Any
    name: str

    def __str__(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}"


def replaceable(tower: Any) -> list[Replaceable]:
    """Every Python function of transformers, and `forward` of torch's modules, that a tower's code leads to."""
    found = {}
    for owner, name in own_code(Plain.of(tower)).slots:
        value = getattr(owner, name, None)
        module = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
        theirs = module.startswith("transformers.") or name == "forward"
        if isinstance(value, types.FunctionType) and theirs and not name.startswith("_"):
            found[id(owner), name] = Replaceable(owner, name)
    return [item for item in found.values() if item.owner is not nn.ModuleList]


def spoiled(old: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of `old` whose results are others, where they are tensors."""

    @functools.wraps(old)
    def replacement(*arguments: Any, **named: Any) -> Any:
        return twisted(old(*arguments, **named))

    return replacement


def answer_when(tower: Any, when: str, replace: contextlib.AbstractContextManager[Any], call: Call) -> tuple[Any, Any]:
    """The outputs of `tower` with `replace` in force from then on, and its handle."""
    with contextlib.ExitStack() as stack:
        handle = fused_when(tower, when, lambda: stack.enter_context(replace), call)
        return call.run(tower), handle


@each_of(INSTALLED)
def test_every_function_that_a_tower_runs(name: str) -> None:
    """Each replaced, one at a time, before `fuse` and after a call: the answer is the original code's, with a reason.

    All of them in one class of each shape. In the others, whose code mostly is a copy of it, every third, after a call.
    """
    tower = family_tower(name)
    call = Call.of(tower, GRID)
    plain = call.run(tower)
    changed, found = 0, replaceable(tower)
    items, times = found, ("before fuse", "after a call")
    if name not in SHAPES:
        items, times = found[INSTALLED.index(name) % 3 :: 3], ("after a call",)
    for item in items:
        replace = functools.partial(mock.patch.object, item.owner, item.name, spoiled(getattr(item.owner, item.name)))
        with replace():
            expected = call.run(tower)
        changed += any(error_of(expected[n], plain[n]) > 1e-5 for n in plain)
        for when in times:
            copied = copy.deepcopy(tower)
            ours, handle = answer_when(copied, when, replace(), call)
            assert_bitwise(ours, expected)
            assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}, f"{item}, {when}"
            assert item.name in handle.stats()["details"][fallback.FOREIGN_CODE], f"{item}, {when}"
            call.run(copied)
            assert handle.stats()["fused"] == 1 + (when == "after a call"), f"{item}, {when}: not noticed as it goes"
    assert changed >= 10 * len(items) / len(found), "the replacements change too little: the test shows nothing"


@contextlib.contextmanager
def other_code(function: types.FunctionType, code: types.CodeType) -> Iterator[None]:
    kept, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = kept


@contextlib.contextmanager
def other_cell(decorated: Any) -> Iterator[None]:
    """Another function in the closure of a decorator's wrapper, which still says that it wraps the first."""
    cell = next(cell for cell in decorated.__closure__ if cell.cell_contents is decorated.__wrapped__)
    kept = cell.cell_contents
    cell.cell_contents = lambda *arguments, **named: twisted(kept(*arguments, **named))
    try:
        yield
    finally:
        cell.cell_contents = kept


def _skewed(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return q * 2, k


def rotary() -> Any:
    return getattr(QWEN, ROTARY)


def _same_names() -> Any:
    """A function with the module, names and file of the one that it stands for."""
    real = rotary()
    false = types.FunctionType(_skewed.__code__, real.__globals__, real.__name__, real.__defaults__)
    false.__module__, false.__qualname__ = real.__module__, real.__qualname__
    return false


def _another_modules() -> Any:
    """transformers' own function of that name, from the module of another model, with other globals."""
    module = importlib.import_module("transformers.models.glm_ocr.modeling_glm_ocr")
    return module.apply_rotary_pos_emb_vision


REPLACEMENTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "a function with the same names": lambda: at(QWEN, ROTARY, _same_names()),
    "another model's function": lambda: at(QWEN, ROTARY, _another_modules()),
    "the code of a function": lambda: other_code(rotary(), _skewed.__code__),
    "the defaults of a function": lambda: at(rotary(), "__defaults__", (None,)),
    "the keyword defaults of a function": lambda: at(rotary(), "__kwdefaults__", {"sin": None}),
    "names in the code of a function": lambda: other_code(rotary(), _absolute()),
    "the globals of a function": lambda: at(QWEN, ROTARY, _other_globals()),
    "a decorated function that says it is another": lambda: in_place_of(QWEN.Qwen3VLVisionModel, "forward", _decorated),
    "a function that fused code does not name": lambda: in_place_of(torch, "repeat_interleave", spoiled),
    "a partial function": lambda: at(QWEN, ROTARY, functools.partial(_skewed)),
    "an object to call": lambda: at(QWEN, "rotate_half", mock.Mock(side_effect=lambda x: -x)),
    "a wrapper that hides what it wraps": lambda: in_place_of(QWEN.Qwen3VLVisionMLP, "forward", _hiding),
    "another method of the class": lambda: at(QWEN.Qwen3VLVisionRotaryEmbedding, RECOMPOSITION, _four_times),
    "an eager attention": lambda: at(QWEN, "eager_attention_forward", _capped),
    "a method of tensors": lambda: in_place_of(torch.Tensor, "permute", _doubled),
    "how modules find what is registered": lambda: in_place_of(nn.Module, "__getattr__", _doubled),
    "what a decorator wraps": lambda: other_cell(QWEN.Qwen3VLVisionModel.forward),
    "how modules find anything": lambda: at(nn.Linear, "__getattribute__", _doubling_weights),
    "the order in which blocks run": lambda: at(nn.ModuleList, "__iter__", reversed_blocks),
    "a property over a module": lambda: in_place_of(
        QWEN.Qwen3VLVisionBlock, "norm1", lambda _: property(lambda self: nn.Identity())
    ),
    "a property over a parameter": lambda: in_place_of(nn.LayerNorm, "weight", lambda _: property(_doubled_weight)),
    "the registry of attention functions": lambda: at(
        QWEN, "ALL_ATTENTION_FUNCTIONS", _named(get_interface=lambda *_: _capped)
    ),
    "torch's attention": lambda: at(nn.functional, "scaled_dot_product_attention", _flat_attention),
    "torch's linear": lambda: at(nn.functional, "linear", lambda x, w, b=None: (x @ w.t()) * 2),
    "the call of every module": lambda: at(nn.Module, "__call__", _calling),
    "an operator of tensors": lambda: at(torch.Tensor, "__add__", _doubled(torch.add)),
    "a module in the place of torch's": lambda: at(LINEAR, "F", _named(linear=lambda x, w, b=None: 2 * (x @ w.t()))),
    "a module that bears torch's name": lambda: at(
        LINEAR, "F", _false_module(nn.functional, linear=lambda x, w, b=None: x @ w.t())
    ),
    "a module around torch": lambda: at(QWEN, "torch", _Around(torch)),
    "a name over a builtin": lambda: in_place_of(
        QWEN, "enumerate", lambda _: lambda items: ((0, item) for item in items)
    ),
    "what our own operations use": lambda: at(torch.Tensor, "__matmul__", _doubled(torch.matmul)),
    "a function of torch that we use alone": lambda: in_place_of(torch, "rsqrt", _doubled),
    "a function behind torch's": lambda: in_place_of(torch.functional, "_meshgrid", _mirrored),
    "an object behind torch's": lambda: at(torch.functional, "_meshgrid", mock.Mock(side_effect=_mirrored(_grids()))),
    "a method of Python's": lambda: at(Mapping, "__contains__", lambda self, key: True),
    "the output record": lambda: at(QWEN, "BaseModelOutputWithDeepstackFeatures", _record()),
}


class _Around:
    """torch, but for one function."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        return _doubled(found) if name == "cat" else found


def _false_module(module: types.ModuleType, **others: Any) -> types.ModuleType:
    false = types.ModuleType(module.__name__)
    vars(false).update(vars(module) | others)
    return false


def _doubled(old: Any) -> Any:
    def replacement(*arguments: Any, **named: Any) -> Any:
        value = old(*arguments, **named)
        return value * 2 if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return replacement


def _grids() -> Any:
    return vars(torch.functional)["_meshgrid"]


def _mirrored(old: Any) -> Any:
    return lambda *tensors, **named: [t.flip(0) for t in old(*tensors, **named)]


def _absolute() -> types.CodeType:
    """The code of the rotary embedding with |x| for the rotated half: the same name, lines and constants."""
    code = rotary().__code__
    return code.replace(co_names=tuple("abs" if name == "rotate_half" else name for name in code.co_names))


def _other_globals() -> Any:
    """The very code of the rotary embedding, with another function by the name of one that it calls."""
    real = rotary()
    return types.FunctionType(real.__code__, {**real.__globals__, "rotate_half": torch.abs}, real.__name__)


def _decorated(old: Any) -> Any:
    from transformers.utils.generic import merge_with_config_defaults

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return twisted(old(self, *arguments, **named))

    decorated = merge_with_config_defaults(forward)
    decorated.__wrapped__ = old.__wrapped__
    return decorated


def _record() -> type:
    base = QWEN.BaseModelOutputWithDeepstackFeatures
    return type("BaseModelOutputWithDeepstackFeatures", (base,), {})


def _doubling_weights(self: nn.Module, name: str) -> Any:
    return _doubled_weight(self) if name == "weight" else object.__getattribute__(self, name)


def _doubled_weight(self: nn.Module) -> Any:
    return self._parameters["weight"] * 2


def _four_times(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, 0]] * 4, -1)


def _calling(self: nn.Module, *arguments: Any, **named: Any) -> Any:
    return self._call_impl(*arguments, **named)


def _hiding(old: Any) -> Any:
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return old(self, *arguments, **named) * 0.5

    forward.__wrapped__ = old  # type: ignore[attr-defined]
    forward.__module__, forward.__qualname__ = old.__module__, old.__qualname__
    return forward


def _capped(module: Any, q: Any, k: Any, v: Any, scaling: float = 1.0, **named: Any) -> Any:
    scores = torch.tanh(q @ k.transpose(-1, -2) * scaling / 2) * 2
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


def _flat_attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
    return v.mean(-2, keepdim=True).expand_as(q)


@WHEN
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_ways_to_replace_code(name: str, when: str) -> None:
    if name == "another method of the class" and not hasattr(QWEN.Qwen3VLVisionRotaryEmbedding, RECOMPOSITION):
        pytest.skip("this release of transformers has no such method")
    tower = tiny_tower()
    if "eager" in name:
        tower.set_attn_implementation("eager")
    call = Call.of(tower, GRIDS["mix"])
    original = copy.deepcopy(tower)
    with REPLACEMENTS[name]():
        expected = call.run(original)
    ours, handle = answer_when(tower, when, REPLACEMENTS[name](), call)
    assert_bitwise(ours, expected)
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 1 + (when == "after a call"), handle.stats()["details"]


def test_on_a_gpu_calls_notice_when_what_prepares_weights_is_back() -> None:
    """The meta device stands in for the GPU: no slot of the operations of a CPU is compared there otherwise."""
    tower, slot = tiny_tower().to("meta"), (nn.Parameter, "copy_")
    assert slot not in own_code(Plain.of(tower)).slots
    with mock.patch.object(torch.Tensor, "copy_", _doubled(torch.Tensor.copy_)):
        found = own_code(Plain.of(tower))
    assert found.foreign.startswith("torch.Tensor.copy_ is ") and slot in found.slots


WINDOWED = "Qwen2_5_VisionTransformerPretrainedModel"


@WHEN
def test_a_method_of_parameters_alone(when: str) -> None:
    """The norms of this tower multiply their weights."""
    tower = family_tower(WINDOWED)
    call, original = Call.of(tower, GRID), copy.deepcopy(tower)

    def replace() -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(nn.Parameter, "__mul__", _doubled(torch.mul), create=True)

    with replace():
        expected = call.run(original)
    ours, handle = answer_when(tower, when, replace(), call)
    assert_bitwise(ours, expected)
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}
    assert handle.stats()["details"][fallback.FOREIGN_CODE].startswith("torch.nn.Parameter.__mul__ is ")
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 1 + (when == "after a call"), handle.stats()["details"]


@WHEN
@pytest.mark.parametrize("of", ["the class that fuse gave", "the instance"])
def test_a_method_of_the_tower_itself(of: str, when: str) -> None:
    """Whoever patches `type(model.visual)` after `fuse` patches a class of ours."""
    tower = family_tower(WINDOWED)
    if not hasattr(tower, "permute_input_for_window_attn"):
        pytest.skip("before transformers 5.20 this forward calls no method of its tower")
    call = Call.of(tower, GRID)
    original = copy.deepcopy(tower)

    def replace(t: Any) -> contextlib.AbstractContextManager[Any]:
        owner = type(t) if of == "the class that fuse gave" else t
        given = (lambda x, *a, **k: x) if owner is t else (lambda self, x, *a, **k: x)
        return mock.patch.object(owner, "permute_input_for_window_attn", given, create=True)

    with replace(original):
        expected = call.run(original)
    handle = fusedvit.fuse(tower) if when != "before fuse" else None
    if when == "after a call":
        call.run(tower)
    with replace(tower):
        handle = handle or fusedvit.fuse(tower)
        assert_bitwise(call.run(tower), expected)
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 1 + (when == "after a call")


GPTQMODEL = """
def _patch_transformers_remote_code_compat(PreTrainedModel):
    original_getattr = PreTrainedModel.__getattr__

    def __getattr__(self, name):
        if name == "all_tied_weights_keys":
            return {}
        return original_getattr(self, name)

    PreTrainedModel.__getattr__ = __getattr__
"""


@pytest.mark.parametrize("kind", ["as released", "around another method", "another name held back"])
@pytest.mark.parametrize("when", ["before fuse", "after a call"])
def test_how_gptqmodel_finds_attributes(kind: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports it for AWQ and GPTQ checkpoints, whose towers are as released."""
    (file := tmp_path / "hf.py").write_text(GPTQMODEL)
    spec: Any = importlib.util.spec_from_file_location("gptqmodel.utils.hf", file)
    monkeypatch.setitem(sys.modules, spec.name, module := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    tower, original, call = tiny_tower(), tiny_tower(), Call.of(tiny_tower(), GRIDS["mix"])
    handle = fusedvit.fuse(tower) if when == "after a call" else None
    if handle is not None:
        call.run(tower)
    monkeypatch.setattr(PreTrainedModel, "__getattr__", lambda self, name: nn.Module.__getattr__(self, name))
    if kind != "around another method":
        monkeypatch.delattr(PreTrainedModel, "__getattr__")
    if kind == "another name held back":
        monkeypatch.setattr(walk, "_KEPT_BACK", "blocks")
    module._patch_transformers_remote_code_compat(PreTrainedModel)
    handle = handle or fusedvit.fuse(tower)
    assert_same(call.run(tower), call.run(original))
    assert (handle.reason() is None) == (kind == "as released"), handle.report()
    assert kind == "as released" or "gptqmodel.utils.hf" in str(handle.reason())


@contextlib.contextmanager
def registered(name: str, function: Any, *, local: bool = False) -> Iterator[None]:
    """An attention function in transformers' registry, as `AttentionInterface.register` puts it there."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    mapping = ALL_ATTENTION_FUNCTIONS._local_mapping if local else AttentionInterface._global_mapping
    with mock.patch.dict(mapping, {name: function}):
        yield


@WHEN
@pytest.mark.parametrize("local", [False, True], ids=["register", "item"])
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_entries_of_the_attention_registry(name: str, local: bool, when: str) -> None:
    tower = tiny_tower()
    tower.set_attn_implementation(name)
    call = Call.of(tower, GRIDS["mix"])
    with registered(name, _capped, local=local):
        expected = call.run(tower)
    ours, handle = answer_when(copy.deepcopy(tower), when, registered(name, _capped, local=local), call)
    assert_bitwise(ours, expected)
    assert f"attention function '{name}' is {__name__}._capped" in handle.stats()["details"][fallback.FOREIGN_CODE]


@WHEN
def test_an_attention_function_of_ones_own(when: str) -> None:
    tower = tiny_tower()
    original = copy.deepcopy(tower)
    call = Call.of(tower, GRIDS["mix"])
    with registered("capped", _capped):
        original.set_attn_implementation("capped")
        expected = call.run(original)
        chosen = mock.patch.object(tower.config, "_attn_implementation_internal", "capped")
        ours, handle = answer_when(tower, when, chosen, call)
    assert_bitwise(ours, expected)
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}


def _halving(base: type[nn.Module]) -> Any:
    """A subclass of `base` in this module."""

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return base.forward(self, *arguments, **named) * 0.5

    return type(base.__name__, (base,), {"forward": forward, "__module__": __name__, "__qualname__": base.__qualname__})


BUILT_WITH = ["Qwen3VLVisionMLP", "Qwen3VLVisionAttention", "Qwen3VLVisionPatchMerger", "Qwen3VLVisionPatchEmbed"]


@pytest.mark.parametrize("name", [*BUILT_WITH, "activation"])
def test_a_tower_that_was_built_of_other_classes(name: str) -> None:
    """Replaced in transformers' modules before there was a tower: any that is built since has it."""
    from transformers.activations import ACT2FN, GELUTanh

    if name == "activation":  # what it holds is a class, what looking it up gives an object of it
        replaced: Any = mock.patch.object(type(ACT2FN), "__getitem__", lambda self, key: _halving(GELUTanh)())
    else:
        replaced = mock.patch.object(QWEN, name, _halving(getattr(QWEN, name)))
    call = Call.of(plain := tiny_tower(), GRIDS["mix"])
    with replaced:
        tower = tiny_tower()
        expected = call.run(tower)
        handle = fusedvit.fuse(tower)
        assert_bitwise(call.run(tower), expected)
    assert_bitwise(call.run(tower), expected)
    assert any(error_of(expected[n], value) > 1e-5 for n, value in call.run(plain).items())
    assert sum(handle.stats()["original"].values()) == 2


def test_the_attention_of_one_block() -> None:
    """A config of its own in one block."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    call = Call.of(tower, GRIDS["mix"])
    call.run(tower)
    with registered("capped", _capped):
        for module in (tower, original := copy.deepcopy(tower)):
            module.blocks[1].attn.config = copy.deepcopy(module.config)
            module.blocks[1].attn.config._attn_implementation_internal = "capped"
        fusedvit.unfuse(original)
        assert_bitwise(call.run(tower), call.run(original))
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}


PAGED = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name not in ALL_ATTENTION_FUNCTIONS or hasattr(ALL_ATTENTION_FUNCTIONS[name], "__wrapped__"),
            reason="some releases have none, or wrap it in torch.compiler.disable, and the original code runs",
        ),
    )
    for name in ("paged|eager", "paged|sdpa")
]


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", *PAGED])
def test_transformers_own_attention_functions_are_fused(name: str) -> None:
    """All of them compute what the fused encoder does; those that are not installed are only named here."""
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    tower.config._attn_implementation_internal = name
    handle = fusedvit.fuse(tower, STRICT)
    assert_same(call.run(tower), expected)
    assert handle.stats()["fused"] == 1


@pytest.mark.parametrize(
    "repository, function, fused",
    [
        ("kernels-community/flash-attn2", flash_attention_forward, True),
        ("kernels-community/vllm-flash-attn3@main", flash_attention_forward, True),
        ("kernels-community/flash-attn2", _capped, False),
        ("kernels-community/flash-attn2:of_ours", flash_attention_forward, False),
        ("somebody/flash-attn2", flash_attention_forward, False),
    ],
)
def test_flash_attention_of_repositories(repository: str, function: Any, fused: bool) -> None:
    """transformers takes these repositories where flash-attn is not installed, with a function of its own; other
    repositories may compute anything."""
    tower = tiny_tower()
    with registered(repository, function):
        tower.config._attn_implementation_internal = repository
        handle = fusedvit.fuse(tower)
        reason = handle.reason()
        assert (reason is None) == fused
        assert reason is None or repr(repository) in reason.detail


def _remote(base: Any) -> Any:
    """A tower class as remote code has it: the known name, another module, another forward."""

    def forward(self: Any, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **named: Any) -> Any:
        outputs = base.forward(self, hidden_states, grid_thw, **named)
        outputs.pooler_output = outputs.pooler_output * 0.5
        return outputs

    return type(base.__name__, (base,), {"forward": forward, "__module__": "transformers_modules.mine.modeling"})


@pytest.mark.parametrize("name", ["Qwen3VLVisionModel", "Qwen2VisionTransformerPretrainedModel"])
def test_remote_code_under_a_known_name(name: str) -> None:
    tower = family_tower(name)
    tower.__class__ = _remote(class_of(name))
    call = Call.of(tower, GRID)
    expected = call.run(tower)
    handle = fusedvit.fuse(tower)
    assert_bitwise(call.run(tower), expected)
    assert handle.stats()["details"] == {
        fallback.FOREIGN_CODE: f"the tower's class is transformers_modules.mine.modeling.{name}"
    }


def test_remote_code_without_a_base_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the modeling file under another module name."""
    real = QWEN
    copied = types.ModuleType("transformers_modules.copied.modeling_qwen3_vl")
    copied.__package__, copied.__file__ = real.__package__, real.__file__
    monkeypatch.setitem(sys.modules, copied.__name__, copied)
    with open(real.__file__, encoding="utf-8") as file:
        exec(compile(file.read(), real.__file__, "exec"), vars(copied))
        tower = copied.Qwen3VLVisionModel(tiny_tower().config).eval().requires_grad_(False)
        call = Call.of(tower, GRIDS["mix"])
        expected = call.run(tower)
        handle = fusedvit.fuse(tower)
        assert_bitwise(call.run(tower), expected)
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}


@each_of(INSTALLED)
def test_nothing_of_transformers_is_foreign(name: str) -> None:
    found: OwnCode = own_code(Plain.of(family_tower(name)))
    assert found.foreign == ""
    names = {slot for _, slot in found.slots}
    assert {"forward", "eager_attention_forward", "ALL_ATTENTION_FUNCTIONS"} <= names
    assert {"apply_rotary_pos_emb_vision", "apply_rotary_pos_emb"} & names
    assert {"scaled_dot_product_attention", "linear"} <= names
    assert name not in BY_GRID or "get_vision_position_ids" in names


def test_a_definition_is_where_the_source_says() -> None:
    assert definition_of(rotary()) == (QWEN.__name__, ROTARY)
    assert definition_of(_same_names()) is None
    assert definition_of(_another_modules()) != definition_of(rotary())
    assert definition_of(torch.cat) is None and definition_of(None) is None
    code = rotary().__code__.replace(co_name="no_grad")  # as torch 2.15 names its contexts' wrappers
    assert definition_of(types.FunctionType(code, vars(QWEN), None, rotary().__defaults__)) == (QWEN.__name__, ROTARY)


def test_functions_added_to_a_class_that_nothing_calls() -> None:
    """Only what runs matters: a patched method of the language model or of saving leaves the tower fused."""
    tower, handle, call = fused_tower(config=STRICT)
    call.run(tower)
    with (
        mock.patch.object(type(tower).__mro__[2], "save_pretrained", lambda self: None),
        mock.patch.object(QWEN.Qwen3VLTextAttention, "forward", lambda self: None),
        mock.patch.object(QWEN, "apply_rotary_pos_emb", lambda *a: None),
    ):
        call.run(tower)
    assert (handle.stats()["fused"], handle.stats()["refreshes"]) == (2, 1)


def test_every_builtin_is_pythons_and_what_replaces_one_is_not() -> None:
    own = {"__loader__", "__spec__"}  # of every module
    assert [name for name, value in vars(builtins).items() if not is_builtin(value) and name not in own] == []
    assert not any(map(is_builtin, (lambda: 0, functools.partial(zip), torch.add, mock.Mock(), nn.Linear)))


def _backend(graph: Any, inputs: Any) -> Callable[..., Any]:
    return lambda *arguments: tuple(map(twisted, graph(*arguments)))


def _attribute(name: str) -> Callable[[Any], Any]:
    def change(module: Any) -> None:
        call = module._call_impl
        setattr(module, name, lambda *arguments: twisted(call(*arguments)))

    return change


CALLS: dict[str, Callable[[Any], Any]] = {
    **{name: _attribute(name) for name in ("_call_impl", "_compiled_call_impl", "_wrapped_call_impl", "_slow_forward")},
    "a backend": lambda module: module.compile(backend=_backend),
    "a compiled call of another": lambda module: setattr(
        module, "_compiled_call_impl", torch.compile(nn.GELU()._call_impl)
    ),
}


@pytest.mark.parametrize("path", ["blocks.0.mlp", "blocks.1.mlp.linear_fc1", "merger", "rotary_pos_emb"])
@pytest.mark.parametrize("used", [False, True], ids=["not called", "called"])
@pytest.mark.parametrize("name", CALLS)
def test_what_calling_an_instance_runs(name: str, used: bool, path: str) -> None:
    tower, handle, call, original = fused_and_original()
    if used:
        call.run(tower)
    for t in (tower, original):
        CALLS[name](t.get_submodule(path))
    report = handle.report()
    assert path in report and fallback.FOREIGN_CODE in report, report
    assert_alike(outcome(call.run, tower), outcome(call.run, original))
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}


@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune"}, {"disable": True}], ids=str)
def test_modules_that_torch_compiles_are_fused(options: Any) -> None:
    tower, handle, call = fused_tower(config=STRICT)
    for block in tower.blocks:
        block.compile(**options)
    call.run(tower)
    assert handle.stats()["fused"] == 1


def test_a_pass_over_the_graph_is_no_option_of_torchs() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    tower.blocks[0].compile(options={"post_grad_custom_post_pass": lambda graph: None})
    assert "blocks.0 is compiled by another backend" in handle.report()


@WHEN
@pytest.mark.parametrize("of", ["Qwen3VLVisionMLP", "Module"])
def test_a_compiled_call_of_a_class(of: str, when: str) -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    mlp, owner = QWEN.Qwen3VLVisionMLP, getattr(QWEN, of, nn.Module)
    found = property(lambda self: _called(self) if isinstance(self, mlp) else None)
    replaced = functools.partial(mock.patch.object, owner, "_compiled_call_impl", found, create=True)
    with replaced():
        expected = call.run(copy.deepcopy(tower))
    ours, handle = answer_when(tower, when, replaced(), call)
    assert_bitwise(ours, expected)
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}


def _called(module: Any) -> Callable[..., Any]:
    return lambda x: twisted(module._call_impl(x))


def of_c(tower: Any) -> list[tuple[Any, str]]:
    """Functions of C that torch's own functions call."""
    found = own_code(Plain.of(tower)).slots
    return [
        (o, n) for o, n in found if o in (torch, torch._C._nn) and isinstance(getattr(o, n), types.BuiltinFunctionType)
    ]


@pytest.mark.parametrize("name", ["Qwen3VLVisionModel", "Glm4vVisionModel", WINDOWED])
def test_functions_of_c_behind_torchs_own(name: str) -> None:
    tower = family_tower(name)
    call = Call.of(tower, GRID)
    plain, changed = call.run(tower), set()
    ours = copy.deepcopy(tower)
    handle = fusedvit.fuse(ours)
    call.run(ours)
    for owner, function in of_c(tower):
        with mock.patch.object(owner, function, _doubled(getattr(owner, function))):
            try:
                expected = call.run(tower)
            except Exception:  # as where a number of elements is doubled
                continue
            if any(error_of(expected[n], plain[n]) > 1e-5 for n in plain):
                changed.add(function)
                before = handle.stats()["fused"]
                assert_bitwise(call.run(ours), expected)
                assert handle.stats()["fused"] == before, function
    behind = {"Qwen3VLVisionModel": {"embedding", "layer_norm"}, "Glm4vVisionModel": {"grid_sampler"}, WINDOWED: set()}
    assert behind[name] <= changed


def test_what_stands_before_torchs_functions_of_c() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    with mock.patch.object(torch._VF, "dropout", _doubled(torch.dropout), create=True):
        assert "torch._VF.dropout" in handle.report()


def _ends(input: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    """All windows in one, in the place of `torch.unique_consecutive`."""
    return input[[0, -1]]


@WHEN
def test_what_torchs_functions_hold(when: str) -> None:
    """`torch.unique_consecutive` chooses between functions that it holds, each of which does so again."""
    tower = family_tower(WINDOWED)
    call, original = Call.of(tower, [(1, 16, 12)]), copy.deepcopy(tower)
    plain, function = call.run(original), vars(torch.functional)["_consecutive_return_output"]
    with other_code(function, _ends.__code__), at(function, "__defaults__", None):
        expected = call.run(original)
    assert error_of(expected["pooler_output"], plain["pooler_output"]) > 1e-3
    with contextlib.ExitStack() as stack:

        def change() -> None:
            stack.enter_context(other_code(function, _ends.__code__))
            stack.enter_context(at(function, "__defaults__", None))

        handle = fused_when(tower, when, change, call)
        assert_bitwise(call.run(tower), expected)
    assert handle.stats()["original"] == {fallback.FOREIGN_CODE: 1}
    assert "unique_consecutive" in handle.stats()["details"][fallback.FOREIGN_CODE]
    assert_same(call.run(tower), plain)
    assert handle.stats()["fused"] == 1 + (when == "after a call")


class _Importing(str):
    """The name of a module during whose reading another thread imports a module."""

    def startswith(self, *given: Any) -> bool:
        sys.modules["zz_imported_meanwhile"] = types.ModuleType("zz_imported_meanwhile")
        return super().startswith(*given)


def test_a_module_that_another_thread_imports_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _Importing("zz_importing"), types.ModuleType("zz_importing"))
    monkeypatch.setitem(sys.modules, "zz_last", types.ModuleType("zz_last"))
    try:
        assert fusedvit.fuse(tiny_tower()).reason() is None
    finally:
        sys.modules.pop("zz_imported_meanwhile", None)


def other_gelu(patch: pytest.MonkeyPatch, tower: Any) -> None:
    old = nn.functional.gelu
    patch.setattr(nn.functional, "gelu", lambda x, approximate="none": old(x, approximate=approximate))


def other_activation(patch: pytest.MonkeyPatch, tower: Any) -> None:
    registry = importlib.import_module("transformers.activations").ACT2FN
    patch.setitem(registry, "gelu_pytorch_tanh", registry["silu"].__class__)


def other_class(patch: pytest.MonkeyPatch, tower: Any) -> None:
    """Another class of transformers' own in place of the one that a tower is built of."""
    home = QWEN
    patch.setattr(home, "Qwen3VLVisionMLP", home.Qwen3VLTextMLP)


def test_a_constructor_that_torchs_compiler_has_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_built, "_kept", {})
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    importlib.import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()
    tower = tiny_tower()
    fusedvit.fuse(tower, STRICT)
    Call.of(tower, GRIDS["video"]).run(tower)


def test_a_constructor_that_transformers_has_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As releases do that are about to drop a parameter."""
    monkeypatch.setattr(as_built, "_kept", {})
    for cls in (type(tiny_tower().blocks[0].attn), nn.Module):
        dropped = deprecate_kwarg("dropped", version="99.0")
        monkeypatch.setattr(cls, "__init__", dropped(cls.__init__))
    tower = tiny_tower()
    fusedvit.fuse(tower, STRICT)
    Call.of(tower, GRIDS["video"]).run(tower)


@pytest.mark.parametrize("name", ["__call__", "_call_impl", "__getattr__", "__init__"])
def test_an_inherited_method_that_somebody_has_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By assignment, as training libraries do: the class then holds what it inherits."""
    monkeypatch.setattr(as_built, "_kept", {})
    tower, handle, call, original = fused_and_original()
    cls = next(c for c in type(tower.blocks[0]).__mro__ if name not in vars(c))
    old = getattr(cls, name)
    with mock.patch.object(cls, name, old, create=True):
        setattr(cls, name, lambda *args, **kwargs: old(*args, **kwargs))
        call.run(tower)
        assert "replaced" in str(handle.reason()) or "builds no such tower" in str(handle.reason())
        setattr(cls, name, old)
        assert handle.reason() is None
        assert_same(call.run(tower), call.run(original))
    call.run(tower)
    stats = handle.stats()
    assert (stats["fused"], sum(stats["original"].values())) == (2, 1)


def other_constructor(patch: pytest.MonkeyPatch, tower: Any) -> None:
    cls = type(tower.blocks[0].attn)
    old = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        old(self, *args, **kwargs)
        self.scaling *= 2

    patch.setattr(cls, "__init__", init)


def constructor_of_another(patch: pytest.MonkeyPatch, tower: Any) -> None:
    cls = type(tower.merger)
    patch.setattr(cls, "__init__", functools.partialmethod(cls.__init__, use_postshuffle_norm=False))


@pytest.mark.parametrize(
    "spoil", [other_gelu, other_activation, other_class, other_constructor, constructor_of_another]
)
def test_what_was_replaced_at_the_first_check_only(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is kept: the same tower and new ones run fused once it is gone."""
    tower = tiny_tower()
    monkeypatch.setattr(as_built, "_kept", {})
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["video"])
    with monkeypatch.context() as patch:
        spoil(patch, tower)
        call.run(tower)
        assert handle.stats()["fused"] == 0 and not as_built._kept
    call.run(tower)
    other = tiny_tower()
    fusedvit.fuse(other, STRICT)
    call.run(other)
    assert handle.stats()["fused"] == 1 and len(as_built._kept) == 1


def test_a_tower_that_a_replaced_constructor_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """One built to compare with comes from the same constructor, and would agree."""
    monkeypatch.setattr(as_built, "_kept", {})
    with monkeypatch.context() as patch:
        other_constructor(patch, tiny_tower())
        tower = tiny_tower()
        original, call = copy.deepcopy(tower), Call.of(tower, GRIDS["video"])
        handle = fusedvit.fuse(tower)
        assert_bitwise(call.run(tower), call.run(original))
        assert "Qwen3VLVisionAttention.__init__ is" in str(handle.reason())
    call.run(tower)
    assert handle.stats()["fused"] == 0 and "scaling" in str(handle.reason())
