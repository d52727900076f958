"""A fused model is still the Hugging Face model it was: saved, copied, moved, wrapped, trained and given back."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

import fusedvit
from fusedvit.checks import fallback
from fusedvit.errors import Reason
from fusedvit.families.registry import FAMILIES
from fusedvit.families.unsupported import UNSUPPORTED
from tests.support.towers import (
    GRIDS,
    KINDS,
    Call,
    assert_bitwise,
    assert_different,
    assert_same,
    copy_of,
    error_of,
    fused_and_original,
    fused_tower,
    prompt,
    ran_fused,
    ran_original,
    tiny_model,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)


def scramble(tower: nn.Module, seed: int = 5) -> None:
    """Other weights, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in tower.parameters():
            p.mul_(1 + 0.3 * torch.randn(p.shape, generator=generator))


# fuse and unfuse


@pytest.mark.parametrize(
    "wrap",
    [lambda m: m, lambda m: m.model, lambda m: m.model.visual, lambda m: nn.ModuleList([m])],
    ids=["generation", "model", "tower", "wrapped"],
)
def test_fuse_takes_any_owner(wrap: Callable[[Any], nn.Module]) -> None:
    model = tiny_model()
    assert fusedvit.fuse(wrap(model)).tower is model.model.visual


def test_unsupported_models_are_named() -> None:
    for model in (nn.Linear(2, 2), tiny_model().model.language_model):
        for act in (fusedvit.fuse, fusedvit.unfuse):
            with pytest.raises(fusedvit.UnsupportedModel, match=r"Linear|Qwen3VLTextModel") as info:
                act(model)
            assert "Qwen3-VL" in str(info.value) and "Qwen3_5VisionModel" in str(info.value)
    assert issubclass(fusedvit.UnsupportedModel, ValueError)


def test_towers_that_are_known_and_not_fused_say_why() -> None:
    class Kimi_K25VisionModel(nn.Module):
        pass

    with pytest.raises(fusedvit.UnsupportedModel, match="Kimi_K25VisionModel is not: attends across frames"):
        fusedvit.fuse(nn.Sequential(Kimi_K25VisionModel()))
    assert not set(UNSUPPORTED) & {name for family in FAMILIES for name in family.class_names}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"hidden_act": "silu"}, "'silu'"),
        ({"num_heads": 0}, "zero"),
        ({"rope_parameters": [1]}, "'list' object"),
        ({}, "num_position_embeddings"),
        (None, "'NoneType' object"),
    ],
)
def test_config_that_no_tower_can_have_is_unsupported(config: dict[str, Any] | None, message: str) -> None:
    tower = tiny_tower()
    if config:
        vars(tower.config).update(config)  # as the config's own checks would refuse some
    else:
        tower.config = None if config is None else Qwen2VLVisionConfig()
    with pytest.raises(fusedvit.UnsupportedModel, match=f"^fusedvit: Qwen3VLVisionModel cannot be fused: .*{message}"):
        fusedvit.fuse(tower)
    assert "_fusedvit" not in tower.__dict__


def test_fuse_twice_is_fuse_once() -> None:
    model = tiny_model()
    handle = fusedvit.fuse(model)
    cls = type(model.model.visual)
    assert fusedvit.fuse(model) is handle is fusedvit.fuse(model.model.visual)
    assert type(model.model.visual) is cls
    call = Call.of(model.model.visual, GRIDS["mix"])
    call.run(model.model.visual)
    ran_fused(handle, calls=1)
    fusedvit.unfuse(model)
    assert cls is not type(model.model.visual)


def test_unfuse_gives_back_the_very_same_module() -> None:
    model = tiny_model()
    tower, cls = model.model.visual, type(model.model.visual)
    before, modules = dict(tower.__dict__), list(model.named_modules())
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    fusedvit.fuse(model)
    call.run(tower)
    assert fusedvit.unfuse(model) is model
    assert type(model.model.visual) is cls and model.model.visual is tower
    assert dict(tower.__dict__) == before
    assert list(model.named_modules()) == modules
    assert_bitwise(call.run(tower), expected)
    fusedvit.unfuse(model)  # not fused: nothing to do
    assert type(tower) is cls


def test_fuse_unfuse_fuse() -> None:
    model = tiny_model()
    tower = model.model.visual
    call = Call.of(tower, GRIDS["mix"])
    first = fusedvit.fuse(model, STRICT)
    expected = call.run(tower)
    fusedvit.unfuse(model)
    original = call.run(tower)
    second = fusedvit.fuse(model, STRICT)
    assert second is not first
    assert_bitwise(call.run(tower), expected)
    assert_same(call.run(tower), original)
    ran_fused(first, calls=1)
    ran_fused(second, calls=2)


def test_class_is_what_others_ask_for() -> None:
    model = tiny_model()
    tower, cls = model.model.visual, type(model.model.visual)
    text, before = str(model), tower._no_split_modules
    names = cls.__name__, cls.__qualname__, cls.__module__, str(cls)
    fusedvit.fuse(model)
    fused = type(tower)
    assert isinstance(tower, cls)
    assert (fused.__name__, fused.__qualname__, fused.__module__, str(fused)) == names
    assert str(model) == text
    assert tower.dtype == torch.float32 and tower.device == torch.device("cpu")
    assert tower.config is model.config.vision_config
    assert tower._no_split_modules == before
    assert tower.forward.__doc__ == cls.forward.__doc__


def test_several_towers_are_fused_each_by_itself() -> None:
    pair = nn.ModuleList([tiny_tower(seed=0), tiny_tower("qwen3_5", seed=1)])
    with pytest.raises(fusedvit.UnsupportedModel, match="2 vision towers"):
        fusedvit.fuse(pair)
    calls = [Call.of(tower, GRIDS["mix"]) for tower in pair]
    expected = [call.run(tower) for call, tower in zip(calls, pair, strict=True)]
    handles = [fusedvit.fuse(tower, STRICT) for tower in pair]
    for call, tower, handle, answer in zip(calls, pair, handles, expected, strict=True):
        assert_same(call.run(tower), answer)
        ran_fused(handle, calls=1)


def test_report_and_refresh() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    assert "0.0 MiB" in handle.report() and "fused" in handle.report()
    assert handle.report().endswith("kernels loaded")  # not all that `compiles` counts were compiled here
    handle.refresh()
    assert handle.stats()["refreshes"] == 1 and handle.stats()["weights_mib"] > 0
    Call.of(tower, GRIDS["mix"]).run(tower)
    assert handle.stats()["refreshes"] == 1
    with torch.no_grad():
        Call.of(tower, GRIDS["mix"]).run(tower, output_attentions=True)
    assert "output_attentions" in handle.report()


def test_a_report_of_every_reason_is_short() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    Call.of(tower, GRIDS["smallest"]).run(tower)
    lines = handle.report().splitlines()
    assert lines[2].startswith("  1 call: 1 fused, 0 original code; 1 item, ")
    assert lines[2].endswith(" patches, 1 weight preparation")
    assert "  run without a graph: 1 (no GPU)" in lines
    for count, kind in enumerate(fallback.ADVICE, 1):
        for _ in range(count):
            handle._stats.count_original(Reason(kind, "in several\nlines"), "a tower")
    lines = handle.report().splitlines()
    assert len(lines) == 25 and lines[-2].startswith("  and for other reasons: ")
    assert all(kind in "\n".join(lines) for kind in (*fallback.ADVICE, "no GPU"))
    assert f"{len(fallback.ADVICE)} calls: {kind}" in lines[3], "the most frequent first"
    fusedvit.unfuse(tower)
    assert len(handle.report().splitlines()) == 25


# saved and loaded


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_is_the_same(kind: str) -> None:
    model = tiny_model(kind)
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    fusedvit.fuse(model)
    Call.of(model.model.visual, GRIDS["mix"]).run(model.model.visual)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].equal(t) and after[name].data_ptr() == p for name, (p, t) in before.items())
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in copy_of(model).named_parameters()]


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_save_and_reload(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    inputs = prompt(model.model.visual, GRIDS["images"])
    with torch.no_grad():
        expected = model(**inputs).logits
    fusedvit.fuse(model, STRICT)
    with torch.no_grad():
        model(**inputs)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert {n: t.equal(model.state_dict()[n]) for n, t in loaded.state_dict().items()} == dict.fromkeys(
        model.state_dict(), True
    )
    with torch.no_grad():
        assert error_of(loaded(**inputs).logits, expected) < 1e-4
        handle = fusedvit.fuse(loaded, STRICT)
        assert error_of(loaded(**inputs).logits, expected) < 1e-4
    ran_fused(handle, calls=1)


def test_linear_patch_embedding() -> None:
    """What loading with `fusion_config={"patch_embeddings": True}` leaves; loading so patches classes for good."""
    from transformers.fusion_mapping import PatchEmbeddingsFusionSpec

    tower = tiny_tower()
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    convolution = tower.patch_embed.proj
    tower.patch_embed = PatchEmbeddingsFusionSpec().make_fused_class(type(tower.patch_embed))(tower.config)
    tower.patch_embed.linear_proj.weight.data = convolution.weight.detach().flatten(1)
    tower.patch_embed.linear_proj.bias.data = convolution.bias.detach()
    tower.requires_grad_(False)
    assert_same(call.run(tower), expected)
    handle = fusedvit.fuse(tower, STRICT)
    assert_same(call.run(tower), expected)
    ran_fused(handle, calls=1)


def test_bfloat16_checkpoint(tmp_path: Path) -> None:
    model = tiny_model()
    copy_of(model, torch.bfloat16).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    call = Call.of(loaded.model.visual, GRIDS["mix"])
    expected = call.run(loaded.model.visual)
    fusedvit.fuse(loaded, STRICT)
    assert_same(call.run(loaded.model.visual), expected, limit=0.02)


# copied


def _through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, _through_pickle, _through_torch_save]


@pytest.mark.parametrize("copied", COPIES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("used_before", [False, True], ids=["fresh", "used"])
def test_copies_are_fused_and_independent(copied: Callable[[Any], Any], used_before: bool) -> None:
    model = tiny_model()
    tower = model.model.visual
    call = Call.of(tower, GRIDS["mix"])
    expected = call.run(tower)
    handle = fusedvit.fuse(model, STRICT)
    if used_before:
        call.run(tower)
    other = copied(model)
    copied_handle = fusedvit.fuse(other, STRICT)
    assert copied_handle is not handle and copied_handle.tower is other.model.visual is not tower
    assert type(other.model.visual) is type(tower)
    assert_same(call.run(other.model.visual), expected)
    ran_fused(copied_handle, calls=1)
    ran_fused(handle, calls=int(used_before))

    scramble(other.model.visual)
    assert_different(call.run(other.model.visual), expected)
    assert_same(call.run(tower), expected)
    scramble(tower, seed=6)
    now = call.run(other.model.visual)
    fusedvit.unfuse(other)
    assert_same(now, call.run(other.model.visual))
    assert handle is fusedvit.fuse(model)


def test_copies_keep_their_options() -> None:
    tower = tiny_tower()
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True, watch_data=False))
    for copied in COPIES:
        with pytest.raises(RuntimeError, match="output_attentions"), torch.no_grad():
            call = Call.of(tower, GRIDS["smallest"])
            copied(tower)(call.pixels, grid_thw=call.grid, output_attentions=True)


# moved


CASTS: dict[str, Callable[[Any], Any]] = {  # besides those of tests/hf/test_weights.py
    "bfloat16": lambda m: m.bfloat16(),
    "there and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "channels last": lambda m: m.to(memory_format=torch.channels_last_3d),
    "to cpu": lambda m: m.to("cpu"),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("used_before", [False, True], ids=["fresh", "used"])
def test_cast(cast: Callable[[Any], Any], used_before: bool) -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower, STRICT)
    if used_before:
        Call.of(tower, GRIDS["mix"]).run(tower)
    tower = cast(tower)
    call = Call.of(tower, GRIDS["mix"])
    ours = call.run(tower)
    assert handle.stats()["original"] == {}
    fusedvit.unfuse(tower)
    assert_same(ours, call.run(tower), limit=0.04 if tower.dtype == torch.bfloat16 else 0.01)


def test_attention_implementation_can_be_set() -> None:
    model = tiny_model()
    call = Call.of(model.model.visual, GRIDS["mix"])
    expected = call.run(model.model.visual)
    handle = fusedvit.fuse(model, STRICT)
    for choice in ("eager", {"vision_config": "eager"}, {"vision_config": "sdpa"}):
        model.set_attn_implementation(choice)
        assert_same(call.run(model.model.visual), expected)
    fusedvit.unfuse(model)
    assert_same(call.run(model.model.visual), expected)
    assert handle.stats()["original"] == {}


def test_resized_embeddings() -> None:
    model = tiny_model()
    inputs = prompt(model.model.visual, GRIDS["images"])
    fusedvit.fuse(model, STRICT)
    model.resize_token_embeddings(320)
    with torch.no_grad():
        assert model(**inputs).logits.shape[-1] == 320


# adapted and trained


def _lora(model: Any, targets: str) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules=targets, lora_dropout=0.0))
    generator = torch.Generator().manual_seed(3)
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.data.copy_(0.2 * torch.randn(p.shape, generator=generator))
    return adapted


def test_lora_on_the_language_model_keeps_the_tower_fused() -> None:
    model = tiny_model()
    other = copy_of(model)
    handle = fusedvit.fuse(model, STRICT)
    inputs = prompt(model.model.visual, GRIDS["images"])
    losses, gradients = [], []
    for m in (model, other):
        adapted = _lora(m, r".*language_model.*(q_proj|v_proj)")
        loss = adapted(**inputs, labels=inputs["input_ids"]).loss  # gradients on: a training step
        loss.backward()
        losses.append(loss)
        gradients.append({n: p.grad for n, p in adapted.named_parameters() if p.requires_grad})
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    assert gradients[0] and gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-3, atol=1e-5)
    ran_fused(handle, calls=1)


def _step(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_training_is_hugging_faces(checkpointing: bool) -> None:
    model = tiny_model()
    other = copy_of(model)
    handle = fusedvit.fuse(model)
    inputs = prompt(model.model.visual, GRIDS["images"])
    for m in (model, other):
        m.train()
        if checkpointing:
            m.gradient_checkpointing_enable()
    ours, ref = _step(model, inputs), _step(other, inputs)
    assert any("visual" in name for name in ref) and ours.keys() == ref.keys()
    for name, gradient in ref.items():
        assert ours[name].equal(gradient), name
    ran_original(handle, fallback.GRADIENTS)


def test_pixels_that_want_gradients() -> None:
    tower, handle, call, other = fused_and_original(grid=GRIDS["images"])
    gradients = []
    for module in (tower, other):
        pixels = call.pixels.clone().requires_grad_()
        module(pixels, grid_thw=call.grid).pooler_output.square().sum().backward()
        gradients.append(pixels.grad)
    assert gradients[0] is not None and gradients[0].equal(gradients[1])
    ran_original(handle, fallback.GRADIENTS)
    with torch.no_grad():
        assert not tower(call.pixels.clone().requires_grad_(), grid_thw=call.grid).pooler_output.requires_grad
    assert handle.stats()["fused"] == 1


MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_one_mode_after_another(first: str, second: str, frozen: bool) -> None:
    """What one mode prepared serves the next; a call that needs gradients takes the original code and has them."""
    tower, handle, call, other = fused_and_original(tiny_tower().requires_grad_(not frozen), GRIDS["images"])
    for mode in (first, second):
        with MODES[mode]():
            ours = tower(call.pixels, grid_thw=call.grid)
            ref = other(call.pixels, grid_thw=call.grid)
        assert ours.pooler_output.requires_grad == ref.pooler_output.requires_grad == (mode == "grad" and not frozen)
        assert ours.pooler_output.is_inference() == ref.pooler_output.is_inference()
        torch.testing.assert_close(ours.pooler_output, ref.pooler_output, rtol=1e-4, atol=1e-5)
        if not frozen and mode == "grad":
            for answer in (ours, ref):
                answer.pooler_output.square().sum().backward()
            for p, q in zip(tower.parameters(), other.parameters(), strict=True):
                assert p.grad is q.grad is None or p.grad.equal(q.grad)
            tower.zero_grad(), other.zero_grad()
    original = 0 if frozen else [first, second].count("grad")
    assert handle.stats()["fused"] == 2 - original
    assert handle.stats()["original"] == ({fallback.GRADIENTS: original} if original else {})


def test_weights_change_between_modes() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, GRIDS["images"])
    with torch.inference_mode():
        tower(call.pixels, grid_thw=call.grid)
    scramble(tower)
    for mode in MODES.values():
        with mode():
            ours = tower(call.pixels, grid_thw=call.grid).pooler_output.clone()
            original = fusedvit.unfuse(copy_of(tower))
            ref = original(call.pixels, grid_thw=call.grid).pooler_output
            torch.testing.assert_close(ours, ref, rtol=1e-4, atol=1e-5)
    assert handle.stats()["refreshes"] == 2


def test_tower_made_in_inference_mode() -> None:
    """Its parameters are inference tensors, which have no version."""
    with torch.inference_mode():
        tower = tiny_tower()
        call = Call.of(tower, GRIDS["images"])
        expected = {name: t.clone() for name, t in call.run(tower).items()}
    handle = fusedvit.fuse(tower, STRICT)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(call.run(tower), expected)
    ran_fused(handle, calls=3)


def test_parameters_that_become_inference_tensors() -> None:
    """In place, which no pointer and no version says: what they hold is what it was, until something is written."""
    tower, handle, call = fused_tower(grid=GRIDS["images"], config=STRICT)
    expected, weight = call.run(tower), tower.blocks[0].mlp.linear_fc1.weight
    with torch.inference_mode():
        weight.data = torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape, weight.stride())
        assert weight.is_inference()
        assert_same(call.run(tower), expected)
        weight.mul_(1.5)
        changed = call.run(tower)
    assert handle.stats()["refreshes"] == 2 and not torch.equal(changed["pooler_output"], expected["pooler_output"])
    ran_fused(handle, calls=3)
