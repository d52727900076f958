"""Messages begin with our name and say what it is about: a module's path, what was found and what was expected."""

import ast
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.api import fuse_sharded
from fusedvit.checks import fallback
from fusedvit.checks.as_built import Built
from fusedvit.errors import Reason
from fusedvit.runtime.inputs import check_grid
from fusedvit.stats import describe
from tests.support.processors import image_processor
from tests.support.towers import GRIDS, Call, assert_same, copy_of, modeling, ran_fused, tiny_model, tiny_tower

ROOT = Path(__file__).resolve().parents[2]


def logged(path: Path) -> Iterator[tuple[int, ast.expr]]:
    """Lines and first arguments of the warnings that a source file logs."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            logger = isinstance(node.func.value, ast.Name) and node.func.value.id in ("logger", "warnings")
            if logger and node.func.attr in ("warning", "error", "warn"):
                yield node.lineno, node.args[0]
            if logger and node.func.attr == "log":
                yield node.lineno, node.args[1]


def test_every_warning_begins_with_our_name() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), line): ast.unparse(text)
        for folder in ("fusedvit", "graphs", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in logged(path)
    }
    assert len(found) >= 4
    ours = "'fusedvit: ", "'%s'"  # `fallback.message` begins so
    assert {place: text for place, text in found.items() if not text.replace('"', "'").startswith(ours)} == {}


@pytest.mark.parametrize("model", ["Qwen/Qwen3-VL-8B-Instruct", None, nn.Linear, {}, 1], ids=repr)
@pytest.mark.parametrize("function", [fusedvit.fuse, fusedvit.unfuse])
def test_what_is_no_module_is_refused(function: Callable[[Any], object], model: object) -> None:
    with pytest.raises(TypeError, match=f"^fusedvit: model must be a torch.nn.Module, got {type(model).__name__}"):
        function(model)


@pytest.mark.parametrize("config", [{}, {"token_budgets": (256,)}, True, "strict", fusedvit.FuseConfig], ids=repr)
def test_what_is_no_config_is_refused(config: Any) -> None:
    tower = tiny_tower()
    with pytest.raises(TypeError, match=f"^fusedvit: config must be a FuseConfig, got {type(config).__name__}"):
        fusedvit.fuse(tower, config)
    assert "_fusedvit" not in vars(tower)


def test_a_tower_that_cannot_run_fused_is_reported_without_asking_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ZeroGPU's main process the GPU is an emulated one, whose properties are few."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    parameter: Any = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    reason = Reason(fallback.TRANSFORM, "a mode")
    text = describe(tower, parameter, "Qwen3-VL", handle.spec, handle.stats(), reason, strict=False)
    assert "torch.bfloat16 on cuda:0 (NVIDIA H200): original code: transform: a mode (" in text


TAKE_CONFIG: dict[str, Callable[..., object]] = {
    "fuse": lambda tower, **options: fusedvit.fuse(tower, **options),
    "reconfigure": lambda tower, **options: fusedvit.fuse(tower).reconfigure(**options),
    "several GPUs": lambda tower, **options: fusedvit.DataParallelEncoder(tower, ["cpu"], **options),
    "Embedder": lambda tower, **options: fusedvit.Embedder(tower, **options),
    "fuse_tower": lambda tower, **options: fusedvit.fuse_tower(tower, **options),
}


@pytest.mark.parametrize("function", TAKE_CONFIG.values(), ids=TAKE_CONFIG)
def test_options_outside_a_config_are_told_where_they_go(function: Callable[..., object]) -> None:
    said = "^fusedvit: options are given as config=FuseConfig(strict=True, memory='small'), got strict=True, memory="
    with pytest.raises(TypeError, match=said.replace("(", r"\(").replace(")", r"\)")):
        function(tiny_tower(), strict=True, memory="small")
    with pytest.raises(TypeError, match="unexpected keyword argument|got an unexpected|multiple values"):
        function(tiny_tower(), fast=True)


def test_a_processor_in_the_configs_place_is_told_where_it_goes() -> None:
    said = r"^fusedvit: config must be a FuseConfig, got Qwen2VLImage.+: give a processor by its name, processor="
    with pytest.raises(TypeError, match=said):
        fusedvit.fuse(tiny_tower(), image_processor())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["graphs", "strict", "watch_data"])
@pytest.mark.parametrize("value", ["yes", 1, 0, None, torch.tensor(True)], ids=repr)
def test_flags_must_be_booleans(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^fusedvit: {name} must be True or False, got {re.escape(repr(value))}"):
        fusedvit.FuseConfig(**{name: value})


@pytest.mark.parametrize("name", ["token_budgets", "max_items", "max_frames"])
@pytest.mark.parametrize("value", ["64", 2.5, {64}, b"64", True, torch.tensor(4)], ids=repr)
def test_limits_are_integers(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        fusedvit.FuseConfig(**{name: value})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_items": 20000}, "max_items must be at most the largest of token_budgets, 16384"),
        ({"token_budgets": (64, 2**61)}, r"token_budgets\[1\] must be at most 2147483647"),
        ({"token_budgets": (2**30,)}, "token_budgets must be at most 536870911 for this tower, got 1073741824"),
        ({"max_frames": 2**40}, "max_frames must be at most 2147483647"),
        ({"max_items": 2**33}, "max_items must be at most 2147483647"),
    ],
)
def test_options_that_no_tower_can_meet(options: dict[str, Any], message: str) -> None:
    """At `fuse`, and not at a call; a tower that is fused keeps its options."""
    tower = tiny_tower()
    with pytest.raises(ValueError, match=message):
        fusedvit.fuse(tower, fusedvit.FuseConfig(**options))
    assert "_fusedvit" not in vars(tower)
    handle = fusedvit.fuse(tower)
    with pytest.raises(ValueError, match=message):
        fusedvit.fuse(tower, fusedvit.FuseConfig(**options))
    assert handle.config == fusedvit.FuseConfig()


RAISED = ("ValueError", "TypeError", "RuntimeError")  # `UnsupportedModel` begins so by itself
USERS_MEET = (
    *(f"fusedvit/{name}.py" for name in ("api", "config", "data_parallel", "fused_encoder", "model/spec")),
    "fusedvit/outputs/lazy.py",
    "fusedvit/outputs/hugging_face.py",
    "fusedvit/calls/original_inputs.py",
    "fusedvit/checks/find_tower.py",
    "fusedvit/runtime/inputs.py",
    "fusedvit/pixels/byte_pixels.py",
    "fusedvit/model/normalization.py",
    "graphs/limits.py",
)


def test_every_error_begins_with_our_name() -> None:
    """`_CHANGED` and `fallback.message` begin so, too."""
    found = {
        (name, node.lineno): ast.unparse(node.exc.args[0]).lstrip("f").replace('"', "'")
        for name in USERS_MEET
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) in RAISED
    }
    assert len(found) >= 40
    ours = "'fusedvit: ", "allback.message("
    assert {place: text for place, text in found.items() if not text.startswith(ours)} == {}


class Empty(nn.Module):
    """Holds nothing."""


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda _: fusedvit.fuse(nn.Linear(1, 1)), fusedvit.UnsupportedModel),
        (lambda _: fusedvit.unfuse(Empty()), fusedvit.UnsupportedModel),
        (lambda _: fusedvit.fuse(nn.ModuleList([tiny_tower(), tiny_tower()])), fusedvit.UnsupportedModel),
        (lambda _: fusedvit.fuse(tiny_tower(hidden_act="tanh")), fusedvit.UnsupportedModel),
        (lambda _: fusedvit.fuse(subclass_of_fused()), fusedvit.UnsupportedModel),
        (lambda handle: handle.graphs(), RuntimeError),
        (lambda handle: fusedvit.fuse(handle.tower, processor=5), TypeError),
        (lambda handle: fusedvit.fuse(handle.tower, processor=dict), TypeError),
        (lambda handle: fusedvit.unfuse(handle.tower, processor="a path"), TypeError),
        (lambda handle: handle.reconfigure({}), TypeError),
        (lambda handle: handle.reconfigure(None), TypeError),
        (lambda _: fusedvit.fuse(tiny_tower(num_heads=16)), fusedvit.UnsupportedModel),
        (lambda handle: handle.warmup(5), TypeError),
        (lambda handle: handle.warmup(calls=5), TypeError),
        (lambda handle: handle.warmup(calls=torch.tensor(64)), TypeError),
        (lambda handle: handle.warmup(calls=[5]), TypeError),
        (lambda handle: handle.warmup(calls=[[(1, 3, 3)]]), ValueError),
        (lambda handle: check_grid([[2**70, 4, 4]]), ValueError),
        (lambda _: fusedvit.FuseConfig(memory=0), ValueError),
        (lambda _: fusedvit.FuseConfig(memory=1.5), TypeError),
        (lambda _: fusedvit.FuseConfig(compile="later"), ValueError),
        (lambda _: fusedvit.FuseConfig(token_budgets=()), ValueError),
        (lambda _: fusedvit.FuseConfig(token_budgets=bytearray(b"a")), TypeError),
        (lambda _: fusedvit.FuseConfig(token_budgets=(4, 2)), ValueError),
        (lambda _: fusedvit.FuseConfig(memory=1, token_budgets=(4,)), ValueError),
        (lambda _: fusedvit.FuseConfig(max_items=0), ValueError),
        (lambda _: fusedvit.FuseConfig(max_items=4, max_frames=2), ValueError),
    ],
)
def test_what_a_user_meets_begins_with_our_name_once(call: Callable[[Any], object], error: type[Exception]) -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    with pytest.raises(error, match=r"^fusedvit: ") as raised:
        call(handle)
    assert str(raised.value).count("fusedvit:") == 1


@pytest.mark.parametrize("name", ["tower", "family", "spec", "config", "built", "call"])
def test_the_seam_names_an_argument_of_another_type(name: str) -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(copy_of(tower))
    built = Built.of(tower)
    given = {"tower": tower, "family": handle.family, "spec": handle.spec, "config": None, "built": built, "call": max}
    with pytest.raises(TypeError, match=f"^fusedvit: {name} must be a .*, got int$"):
        fusedvit.fuse_tower(**(given | {name: 5}))  # type: ignore[arg-type]
    assert type(tower).__name__ == "Qwen3VLVisionModel" and "_fusedvit" not in vars(tower)
    with pytest.raises(TypeError, match="^fusedvit: handle must be a FusedEncoder, got int$"):
        fuse_sharded(tower, 5, max)  # type: ignore[arg-type]


class Unwritable:
    def __repr__(self) -> str:
        raise KeyError(self)


@pytest.mark.parametrize("value", [tiny_tower(), [0] * 100_000, "x" * 100_000, Unwritable()], ids=type)
def test_large_and_odd_values_are_shown_by_their_type(value: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: fusedvit.FuseConfig(strict=value),
        lambda: fusedvit.FuseConfig(compile=value),
        lambda: fusedvit.FuseConfig(memory=value),
        lambda: fusedvit.fuse(tiny_tower(), compile=value),
        lambda: fusedvit.DataParallelEncoder(tiny_tower(), [value]),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=f"^fusedvit: .*{type(value).__name__}") as raised:
            call()
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize("refused", ["forward", "processor", "option"])
def test_fusing_again_takes_all_or_nothing(refused: str) -> None:
    """New options are not in force where `fuse` raises, whatever it was about."""
    tower, processor, options = tiny_tower(), None, {"strict": True}
    if refused == "forward":
        tower.forward = torch.compile(tower.forward)  # type: ignore[method-assign]
    handle = fusedvit.fuse(tower)
    if refused == "processor":
        processor = SimpleNamespace(image_processor=SimpleNamespace(save_pretrained=None))  # whose patches nobody knows
    if refused == "option":
        options["token_budgets"] = (2**30,)  # type: ignore[assignment]
    with pytest.raises((RuntimeError, ValueError), match="^fusedvit: "):
        fusedvit.fuse(tower, fusedvit.FuseConfig(**options), processor=processor)  # type: ignore[arg-type]
    assert handle.config == fusedvit.FuseConfig() and handle.state() == "fused"


def test_unfuse_refuses_before_it_unfuses() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    with pytest.raises(TypeError, match="^fusedvit: processor must be a processor of transformers, .*got int$"):
        fusedvit.unfuse(tower, processor=5)
    assert handle.state() == "fused"


def subclass_of_fused() -> Any:
    tower = tiny_tower()
    fusedvit.fuse(tower)
    tower.__class__ = type("Own", (type(tower),), {})
    del tower.__dict__["_fusedvit"]
    return tower


def test_a_subclass_of_a_fused_class_is_named_and_goes_with_its_towers() -> None:
    """Fused, called, unfused: no cache keeps a class of somebody's."""
    kept = []
    for again in (False, True):
        tower = tiny_tower()
        fusedvit.fuse(tower)
        tower.__class__ = type("Own", (type(tower),), {"__module__": "theirs"})
        Call.of(tower, GRIDS["smallest"]).run(tower)
        if again:
            fusedvit.unfuse(tower)
            with pytest.raises(fusedvit.UnsupportedModel, match=r"^fusedvit: theirs.Own cannot be fused"):
                fusedvit.fuse(tower)
            Call.of(tower, GRIDS["smallest"]).run(tower)
        kept.append(weakref.ref(type(tower)))
        del tower
    gc.collect()
    assert [cls() for cls in kept] == [None, None]


@pytest.mark.parametrize("of", ["the original class", "the fused class"])
def test_advice_about_a_subclass_works(of: str) -> None:
    model = tiny_model()
    tower = model.model.visual
    if of == "the fused class":
        fusedvit.fuse(model)
    tower.__class__ = type("Own", (type(tower),), {"__module__": "theirs"})
    if of == "the fused class":
        fusedvit.unfuse(model)
    what = "theirs.Own (is not|cannot be fused): it derives from Qwen3VLVisionModel, .* set the tower's __class__ to "
    with pytest.raises(fusedvit.UnsupportedModel, match=rf"{what}Qwen3VLVisionModel\b"):
        fusedvit.fuse(model)
    tower.__class__ = modeling().Qwen3VLVisionModel
    handle = fusedvit.fuse(model, fusedvit.FuseConfig(strict=True))
    Call.of(tower, GRIDS["smallest"]).run(tower)
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("when", ["before fuse", "after fuse"])
def test_a_tower_whose_parameters_were_all_joined(when: str, used: bool) -> None:
    """FSDP around the whole tower leaves it plain tensors alone: it answers as Hugging Face's does."""
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    if when == "before fuse":
        join_all(tower)
    handle = fusedvit.fuse(tower)
    if used:
        assert_same(call.run(tower), expected)
    if when == "after fuse":
        join_all(tower)
    original = copy_of(tower)
    fusedvit.unfuse(original)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(call.run(tower), call.run(original))
    assert_same(call.run(tower), call.run(original))
    reason = handle.reason()
    assert reason is not None and "patch_embed.proj.weight is a plain tensor" in reason.detail
    assert str(reason) in handle.report() and str(reason) in repr(handle)


def join_all(tower: Any) -> None:
    for module in tower.modules():
        for name in list(module._parameters):
            setattr(module, name, module._parameters.pop(name).detach())


def test_questions_in_a_mode_that_sees_operations() -> None:
    """They need numbers of real tensors: the reason is the mode's."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    for mode in (FakeTensorMode, TorchDispatchMode):
        with mode():
            reason = handle.reason()
            assert reason is not None and reason.kind == fallback.TRANSFORM and mode.__name__ in reason.detail
            assert mode.__name__ in handle.report() and mode.__name__ in repr(handle)
    assert handle.reason() is None
