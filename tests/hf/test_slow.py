"""Common set-ups of training and embedding run fused: autocast, parents' keywords, shapes of pixels, torch.compile."""

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedvit
from fusedvit.bench.towers import cast_parameters_, inputs_of
from fusedvit.checks import fallback
from fusedvit.checks.arguments import rules_of
from tests.support.families import BY_GRID, INSTALLED, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    Grid,
    assert_bitwise,
    assert_rule,
    assert_same,
    copy_of,
    outputs_of,
    prompt,
    ran_fused,
    ran_original,
    tiny_model,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)
MIX: Grid = [(1, 4, 6), (1, 2, 2)]

# autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_of(INSTALLED)
def test_autocast_in_the_towers_dtype(name: str, dtype: torch.dtype) -> None:
    tower = family_tower(name)
    exact = copy_of(tower, torch.float64)
    ref = Call.of(exact, MIX).run(exact)
    cast_parameters_(tower, dtype)
    original, call = copy_of(tower), Call.of(tower, MIX)
    handle = fusedvit.fuse(tower, STRICT)
    plain = call.run(tower)
    with torch.autocast("cpu", dtype):
        ours, pt = call.run(tower), call.run(original)
    assert_bitwise(ours, plain)
    assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in pt.items()}
    assert_rule(ours, ref, pt)
    ran_fused(handle, calls=2)


def test_weights_prepared_under_autocast_are_the_same() -> None:
    towers = [family_tower("Glm4vVisionModel") for _ in range(2)]
    for tower in towers:
        cast_parameters_(tower, torch.bfloat16)
        fusedvit.fuse(tower, STRICT)
    call = Call.of(towers[0], MIX)
    with torch.autocast("cpu", torch.bfloat16):
        ours = call.run(towers[0])
    assert_bitwise(ours, call.run(towers[1]))


@pytest.mark.parametrize("tower_dtype, dtype", [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)])
def test_autocast_to_another_dtype_is_the_original(tower_dtype: torch.dtype, dtype: torch.dtype) -> None:
    tower = tiny_tower()
    cast_parameters_(tower, tower_dtype)
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    with torch.autocast("cpu", dtype):
        assert_bitwise(call.run(tower), call.run(original))
    ran_original(handle, fallback.AUTOCAST)


def test_autocast_of_another_device_or_off_is_no_autocast() -> None:
    tower = tiny_tower()
    handle, call = fusedvit.fuse(tower, STRICT), Call.of(tower, GRIDS["video"])
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        call.run(tower)
    with torch.autocast("cuda", torch.bfloat16):
        call.run(tower)
    ran_fused(handle, calls=2)


def test_trainer_in_bf16(tmp_path: Any) -> None:
    """Hugging Face's Trainer with a frozen bf16 tower: every call is fused."""
    transformers = pytest.importorskip("transformers")
    model = tiny_model()
    cast_parameters_(model, torch.bfloat16)
    model.requires_grad_(True)
    model.model.visual.requires_grad_(False)
    handle = fusedvit.fuse(model, STRICT)
    inputs = prompt(model.model.visual, GRIDS["images"], GRIDS["video"])
    sample = inputs | {"labels": inputs["input_ids"]}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), bf16=True, use_cpu=True, max_steps=3, report_to=[], save_strategy="no",
        per_device_train_batch_size=1, disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=[sample] * 3, data_collator=lambda batch: batch[0]
    )
    trainer.train()
    ran_fused(handle, calls=6)


@pytest.mark.parametrize("name", ["Qwen2VisionTransformerPretrainedModel", "Glm4vVisionModel"])
def test_gradient_checkpointing(name: str) -> None:
    """It hooks the patch embedding to mark what it gives for gradients: nothing where nobody takes any."""
    tower = family_tower(name)
    tower.gradient_checkpointing_enable()
    tower.train()
    original, call = copy_of(tower), Call.of(tower, MIX)
    handle = fusedvit.fuse(tower)
    for _ in range(2):
        assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 2, handle.stats()["details"]
    marked = call.record(original).pooler_output.requires_grad  # not where the class names no embeddings
    assert call.record(tower).pooler_output.requires_grad == marked
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 4 - marked


# keywords

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
    {"mm_token_type_ids": torch.zeros(3), "return_loss": True, "seq_idx": 4},
]


@pytest.mark.parametrize("given", PARENTS, ids=lambda given: ", ".join(given))
@each_of(INSTALLED)
def test_keywords_that_hugging_face_ignores(name: str, given: dict[str, Any]) -> None:
    tower = family_tower(name)
    original, call = copy_of(tower), Call.of(tower, MIX)
    handle = fusedvit.fuse(tower)
    expected, found = (attempt(call.run, t, **given) for t in (original, tower))
    if isinstance(expected, TypeError):  # given twice: such a tower hands its own on under this name
        assert name not in BY_GRID and str(found) == str(expected)
        return
    assert_same(found, expected)
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@each_of(INSTALLED)
def test_keywords_that_hugging_face_reads(name: str, implementation: str) -> None:
    """Each name that the code on the way reads, with a value that it may act on: the same answer, or the same error."""
    tower = family_tower(name)
    tower.set_attn_implementation(implementation)
    original, call = copy_of(tower), Call.of(tower, MIX)
    fusedvit.fuse(tower)
    for argument in sorted(rules_of(tower).read - {"self", "hidden_states", "grid_thw", "kwargs", "debug_io"}):
        for value in (2.0, torch.ones(1), *([] if argument == "value" else [None])):
            expected, found = (
                attempt(call.run, original, **{argument: value}),
                attempt(call.run, tower, **{argument: value}),
            )
            assert type(expected) is type(found), f"{argument}={value}: Hugging Face {expected!r}, fused {found!r}"
            if isinstance(expected, dict):
                assert_same(found, expected)


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:  # whatever Hugging Face raises
        return error


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


# shapes of pixels

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
    tower = family_tower(name)
    original, call = copy_of(tower), Call.of(tower, MIX)
    fusedvit.fuse(tower, STRICT)
    pixels, named = inputs_of(tower, call.pixels, call.grid)
    pixels = SHAPES[shape](pixels, tower.config.patch_size)
    expected, found = (attempt(lambda t: outputs_of(t(pixels, **named)), t) for t in (original, tower))
    if isinstance(expected, dict):
        assert_same(found, expected)
    else:
        assert isinstance(found, ValueError) and "pixel" in str(found), found


# torch.compile


def test_a_compiled_tower_runs_fused_between_two_graphs() -> None:
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower, STRICT)
    torch._dynamo.reset()

    def model(pixels: torch.Tensor, tower: Any) -> torch.Tensor:
        return 2 * tower(pixels + 1, grid_thw=call.grid).pooler_output

    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        with torch.no_grad():
            assert_same({"p": compiled(call.pixels, tower)}, {"p": model(call.pixels, original)})
    ran_fused(handle, calls=3)
    torch._dynamo.reset()


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile"])
@pytest.mark.parametrize("name", ["Qwen3VLVisionModel", "Gemma4VisionModel"])
def test_a_compiled_tower_under_every_stance(name: str, stance: str) -> None:
    """Some let a function that is kept from the compiler run what was compiled of it."""
    tower = family_tower(name)
    original, call = copy_of(tower), Call.of(tower, GRIDS["images"])
    handle = fusedvit.fuse(tower, STRICT)
    torch._dynamo.reset()
    compiled = torch.compile(tower, backend="eager")
    call.run(compiled)
    with torch.compiler.set_stance(stance):
        assert_same(call.run(compiled), call.run(original))
    ran_fused(handle, calls=2)
    torch._dynamo.reset()


@pytest.mark.parametrize("given", [{}, {"output_hidden_states": True}], ids=["plain", "hidden states"])
def test_a_compiled_model(given: dict[str, Any]) -> None:
    model = tiny_model().requires_grad_(False)
    original, inputs = copy_of(model), prompt(model.model.visual, GRIDS["images"])
    handle = fusedvit.fuse(model, STRICT)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            ours, ref = compiled(**inputs, **given), original(**inputs, **given)
            assert torch.allclose(ours.logits, ref.logits, atol=1e-4)
    ran_fused(handle, calls=2)
    torch._dynamo.reset()
    gc.collect()


# accelerate


def dispatched(model: Any, **options: Any) -> Any:
    """As `device_map="auto"` leaves a model that it spreads, its tower whole on one device."""
    accelerate = pytest.importorskip("accelerate")
    devices = {"model.visual": "cpu", "model.language_model": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, devices, force_hooks=True, main_device="cpu", **options)


@pytest.mark.parametrize("when", ["before fuse", "after fuse", "after a call"])
def test_a_tower_hooked_for_one_device_runs_fused(when: str) -> None:
    model = tiny_model().requires_grad_(False)
    original, inputs = copy_of(model), prompt(model.model.visual, GRIDS["images"])
    if when == "before fuse":
        dispatched(model)
    handle = fusedvit.fuse(model, STRICT)
    with torch.no_grad():
        if when == "after a call":
            model(**inputs)
        if when != "before fuse":
            dispatched(model)
        assert "forward" in vars(model.model.visual.blocks[0].attn.qkv)
        for _ in range(2):
            assert torch.allclose(model(**inputs).logits, original(**inputs).logits, atol=1e-4)
        before = handle.stats()["refreshes"]
        model(**inputs)
    ran_fused(handle, calls=3 + (when == "after a call"))
    assert handle.stats()["refreshes"] == before


def align(module: Any, **options: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(**options))


def custom(module: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubling(hooks.ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return 2 * output

    hooks.add_hook_to_module(module, hooks.SequentialHook(hooks.AlignDevicesHook("cpu"), Doubling()))


HOOKED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "one device": (lambda t: align(t.blocks[0], execution_device="cpu"), True),
    "none named": (lambda t: align(t.blocks[0].mlp, io_same_device=True), True),
    "the tower itself": (lambda t: align(t, execution_device="cpu", io_same_device=True), True),
    "twice": (lambda t: [align(t.merger, execution_device="cpu") for _ in range(2)], True),
    "offloaded": (lambda t: align(t.blocks[0].mlp.linear_fc1, execution_device="cpu", offload=True), False),
    "a hook that computes": (lambda t: custom(t.blocks[1].attn.proj), False),
}


@pytest.mark.parametrize("name", HOOKED)
def test_accelerates_hooks(name: str) -> None:
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    change, fused = HOOKED[name]
    call.run(tower)
    for t in (tower, original):
        change(t)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 1 + fused, handle.stats()["original"]
    if not fused:
        assert "blocks." in handle.report()


def test_a_hook_that_changes_afterwards() -> None:
    tower = tiny_tower()
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["mix"])
    align(tower.blocks[0], execution_device="cpu")
    call.run(tower)
    tower.blocks[0]._hf_hook.execution_device = "meta"
    attempt(call.run, tower)  # accelerate sends its input there
    assert handle.stats()["original"] == {fallback.MODIFIED: 1} and "blocks.0" in handle.report()


def test_unhooked_again() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower, STRICT)
    align(tower.blocks[0].mlp, execution_device="cpu")
    call.run(tower)
    hooks.remove_hook_from_module(tower, recurse=True)
    assert_same(call.run(tower), call.run(original))
    ran_fused(handle, calls=2)


def _halved(hook: Any, module: Any, output: Any) -> Any:
    return output / 2


def _scaled(hook: Any, module: Any, *arguments: Any, **named: Any) -> Any:
    return tuple(a / 2 for a in arguments), named


RUN = {"pre_forward": _scaled, "post_forward": _halved}


def _put(where: str, name: str, hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another function in the place of what accelerate's hook runs."""
    cls = type(hook)
    if where == "the class":
        monkeypatch.setattr(cls, name, RUN[name])
    elif where == "the instance":
        setattr(hook, name, RUN[name].__get__(hook))
    else:
        hook.__class__ = type(cls.__name__, (cls,), {name: RUN[name], "__module__": cls.__module__})


@pytest.mark.parametrize("used", [False, True], ids=["not called", "called"])
@pytest.mark.parametrize("where", ["the class", "the instance", "a class of that name"])
@pytest.mark.parametrize("name", RUN)
def test_what_accelerates_hook_runs(name: str, where: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    for t in (tower, original):
        align(t.blocks[0].mlp, execution_device="cpu")
    handle = fusedvit.fuse(tower)
    if used:
        call.run(tower)
    for t in (tower, original):
        _put(where, name, t.blocks[0].mlp._hf_hook, monkeypatch)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == used
    assert "blocks.0.mlp" in handle.report()


def test_what_accelerates_hooks_call(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    tower = tiny_tower()
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["mix"])
    align(tower.blocks[0].mlp, execution_device="cpu")
    call.run(tower)
    monkeypatch.setattr(hooks, "send_to_device", lambda tensors, *arguments, **named: tensors)
    assert "blocks.0.mlp" in handle.report()
    call.run(tower)
    assert handle.stats()["original"] == {fallback.MODIFIED: 1}


def _kept_elsewhere(self: Any, module: Any, *arguments: Any, **named: Any) -> Any:
    return tuple(a * 1.5 for a in arguments), named


def _other_compiled(wrapper: Any) -> None:
    wrapper._compiled_fn = _kept_elsewhere


def _other_disabled(wrapper: Any) -> None:
    wrapper._compiled_fn = torch.compiler.disable(_kept_elsewhere)


def _other_inside_compiled(wrapper: Any) -> None:
    wrapper._compiled_fn = torch.compiler.disable(wrapper.__wrapped__)
    cells = dict(zip(wrapper._compiled_fn.__code__.co_freevars, wrapper._compiled_fn.__closure__, strict=True))
    cells["fn"].cell_contents = _kept_elsewhere


COMPILED = {f.__name__: f for f in (_other_compiled, _other_disabled, _other_inside_compiled)}


@pytest.mark.parametrize("used", [False, True], ids=["before fuse", "after a call"])
@pytest.mark.parametrize("name", COMPILED)
def test_what_a_wrapper_of_accelerates_keeps_to_run(name: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper runs what it finds in an attribute of itself."""
    hooks = pytest.importorskip("accelerate.hooks")
    wrapper = hooks.AlignDevicesHook.pre_forward
    if "_compiled_fn" not in wrapper.__code__.co_names:
        pytest.skip("this release of accelerate has no such wrapper")
    monkeypatch.setattr(wrapper, "_compiled_fn", torch.compiler.disable(wrapper.__wrapped__), raising=False)
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    for t in (tower, original):
        align(t.blocks[0].mlp, execution_device="cpu")
    handle = None
    if used:
        handle = fusedvit.fuse(tower)
        call.run(tower)
    COMPILED[name](wrapper)
    handle = handle or fusedvit.fuse(tower)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == used and "blocks.0.mlp" in handle.report()


def test_a_wrapper_of_accelerates_that_runs_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what it makes then; that is no change, of the tower or of what a record waits for."""
    hooks = pytest.importorskip("accelerate.hooks")
    wrapper = hooks.AlignDevicesHook.pre_forward
    monkeypatch.setattr(wrapper, "_compiled_fn", None, raising=False)  # put back afterwards, if there was one
    monkeypatch.delattr(wrapper, "_compiled_fn")
    tower = tiny_tower()
    align(tower.blocks[0].mlp, execution_device="cpu")
    handle, call = fusedvit.fuse(tower, STRICT), Call.of(tower, GRIDS["mix"])
    records = [call.record(tower, output_hidden_states=True) for _ in range(2)]
    assert all(len(record.hidden_states) > 1 for record in records)
    call.run(tower)
    ran_fused(handle, calls=3)
    assert handle.stats()["refreshes"] == 1


def test_a_wrapper_of_accelerates_that_would_keep_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    wrapper = hooks.AlignDevicesHook.pre_forward
    monkeypatch.setattr(wrapper, "_compiled_fn", None, raising=False)
    monkeypatch.delattr(wrapper, "_compiled_fn")
    monkeypatch.setattr(torch.compiler, "disable", lambda function: _kept_elsewhere)
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    for t in (tower, original):
        align(t.blocks[0].mlp, execution_device="cpu")
    handle = fusedvit.fuse(tower)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["fused"] == 0


def _lying(module: Any, arguments: Any, output: Any) -> Any:
    return 2 * output


class _Lying:
    """What shows a function of transformers as the one that it calls."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, module: Any, arguments: Any, output: Any) -> Any:
        return 2 * output


@pytest.mark.parametrize("kind", ["its module", "what it wraps", "its func", "its func's module"])
def test_hooks_that_say_they_are_transformers(kind: str) -> None:
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    hook: Any = types.FunctionType(_lying.__code__, globals())
    if kind == "its module":
        hook.__module__ = capturing.__name__
    elif kind == "what it wraps":
        hook = functools.wraps(capturing.maybe_install_capturing_hooks)(hook)
    elif kind == "its func":
        hook = _Lying(capturing.maybe_install_capturing_hooks)
    else:
        hook.__module__ = capturing.__name__
        hook = functools.partial(hook)
    tower = tiny_tower()
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    call.run(tower)
    for t in (tower, original):
        t.blocks[0].mlp.register_forward_hook(hook)
    assert_same(call.run(tower), call.run(original))
    assert handle.stats()["original"] == {fallback.HOOKS: 1}


def test_parameters_that_have_no_shape_yet() -> None:
    tower = tiny_tower()
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["mix"])
    tower.blocks[0].mlp.linear_fc1.weight = nn.parameter.UninitializedParameter(requires_grad=False)
    assert "blocks.0.mlp.linear_fc1.weight" in handle.report() and "UninitializedParameter" in handle.report()
    with pytest.raises(ValueError, match="uninitialized"):  # torch's own
        call.run(tower)
    assert handle.stats()["original"] == {fallback.MODIFIED: 1}


def test_a_tower_without_its_config() -> None:
    tower = tiny_tower()
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["mix"])
    del tower.config
    assert "config" in handle.report()
    with pytest.raises(AttributeError, match="config"):  # transformers' own
        tower(call.pixels, grid_thw=call.grid)


def test_a_block_that_torch_compiles_as_a_module() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    tower.blocks[1] = torch.compile(tower.blocks[1], backend="eager")
    assert "blocks.1 is torch._dynamo.eval_frame.OptimizedModule; blocks.1.compile()" in handle.report()
