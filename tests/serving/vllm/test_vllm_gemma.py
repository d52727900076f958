"""Gemma 4 in vLLM, whose model calls parts of Hugging Face's tower: batches of several sizes, and what falls back."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma4 import modeling_gemma4
from vllm.model_executor.models import gemma4_mm

import fusedvit
from fusedvit.checks.change_detection import HANDLE
from fusedvit.serving import vllm as plugin
from fusedvit.serving.vllm_gemma import wrong_model
from tests.serving.vllm.support import (
    BORROWING,
    GRIDS,
    Grid,
    Lora,
    Quantized,
    config_of,
    load,
    outcome,
    padded_calls_of,
    same,
    start,
    under,
)

NAME = "Gemma4ForConditionalGeneration"
GRID = GRIDS["mixed"]
# As the image processor makes images of each soft-token budget, at most so many tokens of 3 x 3 patches.
BUDGETS: dict[int, Grid] = {
    70: [(1, 21, 30), (1, 30, 21)],
    140: [(1, 42, 30)],
    280: [(1, 42, 60), (1, 60, 42)],
    560: [(1, 60, 84)],
    1120: [(1, 96, 105)],
}
PLAIN = dict(pooling_kernel_size=3, use_clipped_linears=False, standardize=False, num_key_value_heads=2)


@pytest.fixture(scope="module")
def served() -> tuple[Any, Any, Any]:
    config, model = load(NAME)
    return config, model, fusedvit.fuse(model)


def run(config: Any, model: Any, calls: dict[str, Any]) -> list[torch.Tensor]:
    with torch.inference_mode(), under(config):
        return [rows.clone() for rows in model.embed_multimodal(**calls)]


def own(config: Any, model: Any, calls: dict[str, Any]) -> list[torch.Tensor]:
    """vLLM's own answer, from the same model at that moment."""
    handle = vars(model.vision_tower).pop(HANDLE)
    try:
        return run(config, model, calls)
    finally:
        vars(model.vision_tower)[HANDLE] = handle


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert [rows.shape for rows in got] == [rows.shape for rows in want] and want
    for mine, theirs in zip(got, want, strict=True):
        assert theirs.norm() > 0 and (mine - theirs).norm() <= 1e-5 * theirs.norm()


# answers


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any, Any]:
    """A model without clipped layers, which pools 3 x 3."""
    config = config_of(NAME)
    for name, value in PLAIN.items():
        setattr(config.model_config.hf_config.vision_config, name, value)
    config.model_config.hf_config.vision_config.position_embedding_size = 256
    config, model = load(config=config)
    return config, model, fusedvit.fuse(model)


@pytest.mark.parametrize("tokens", BUDGETS)
def test_every_soft_token_budget(plain: Any, tokens: int) -> None:
    config, model, handle = plain
    calls, before = padded_calls_of(model, BUDGETS[tokens], seed=1), handle.stats()["fused"]
    assert_same(run(config, model, calls), own(config, model, calls))
    assert handle.stats()["fused"] == before + 1


def test_images_of_several_budgets(plain: Any) -> None:
    """They come as a list, each padded to its own budget; those of as many patches are one call."""
    config, model, handle = plain
    given = [padded_calls_of(model, BUDGETS[tokens], seed=tokens) for tokens in (140, 70, 280)]
    lists: dict[str, list[torch.Tensor]] = {
        name: [image for part in given for image in part[name]] for name in given[0]
    }
    order = [3, 0, 1, 4, 2]
    calls, before = {name: [images[i] for i in order] for name, images in lists.items()}, handle.stats()["fused"]
    got = run(config, model, calls)
    assert_same(got, own(config, model, calls))
    assert [len(rows) for rows in got] == [280, 140, 70, 280, 70] and handle.stats()["fused"] == before + 3


def test_videos_of_different_lengths(plain: Any) -> None:
    config, model, _ = plain
    calls = padded_calls_of(model, [(2, 9, 12), (5, 6, 6), (2, 12, 3)], seed=3)
    got = run(config, model, calls)
    assert_same(got, own(config, model, calls))
    assert [len(rows) for rows in got] == [24, 20, 8]


@pytest.mark.parametrize("architecture", BORROWING)
def test_models_that_borrow_its_methods(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # or vLLM refuses diffusion; nothing here runs it
    config, model = load(architecture)
    handle = fusedvit.fuse(model)
    calls = padded_calls_of(model, GRID, seed=2)
    got = run(config, model, calls)
    assert handle.stats()["fused"] == 2 and not handle.stats()["original"]  # images, frames
    assert_same(got, own(config, model, calls))


def test_the_towers_own_forward(served: Any) -> None:
    """Nothing in vLLM calls it."""
    config, model, handle = served
    given = list(padded_calls_of(model, GRIDS["images"], seed=4).values())
    with torch.inference_mode():
        got, before = model.vision_tower(*given).last_hidden_state, handle.stats()["fused"]
        want = modeling_gemma4.Gemma4VisionModel.forward(model.vision_tower, *given).last_hidden_state
        rows = handle.concatenated(*given)
    assert_same([got, rows], [want, want])
    assert handle.stats()["fused"] == before + 1 == handle.stats()["calls"]


# what falls back


def test_odd_positions_run_vllms_own_code(served: Any) -> None:
    config, model, handle = served
    calls = padded_calls_of(model, GRIDS["images"], seed=5)
    calls = {name: value.flip(1) for name, value in calls.items()}  # padding first
    before = handle.stats()["fused"]
    got = run(config, model, calls)
    assert handle.stats()["fused"] == before and handle.stats()["original"]["odd positions"]
    assert all(torch.equal(a, b) for a, b in zip(got, own(config, model, calls), strict=True))


JUDGED: dict[str, Any] = {
    "bytes": lambda c: c | {"pixel_values_videos": (c["pixel_values_videos"] * 255).to(torch.uint8)},
    "fewer videos than frames": lambda c: c | {"video_frame_counts": c["video_frame_counts"][:1]},
    "fewer frames": lambda c: c | {"video_frame_counts": c["video_frame_counts"] - 1},
    "more frames": lambda c: c | {"video_frame_counts": c["video_frame_counts"] + 1},
    "a negative count": lambda c: c | {"video_frame_counts": torch.tensor([7, -1])},
    "no videos": lambda c: c | {"video_frame_counts": torch.tensor([], dtype=torch.long)},
    "counts as floats": lambda c: c | {"video_frame_counts": c["video_frame_counts"].float()},
    "positions as floats": lambda c: c | {"pixel_position_ids_videos": c["pixel_position_ids_videos"].float()},
    "nothing": lambda c: {name: value[:0] for name, value in c.items()},
}


@pytest.mark.parametrize("name", JUDGED)
def test_calls_that_are_vllms_to_judge(served: Any, name: str) -> None:
    """What the fused encoder refuses vLLM answers, or refuses in its own way."""
    config, model, handle = served
    calls = JUDGED[name](padded_calls_of(model, [(2, 8, 8), (4, 4, 12)], seed=6))
    before = handle.stats()
    got, want = outcome(run, config, model, calls), outcome(own, config, model, calls)
    assert same(got, want)
    after = handle.stats()
    assert after["original"]["engine"] == before["original"].get("engine", 0) + 1
    assert after["calls"] == before["calls"] + 1 and after["fused"] == before["fused"]


def test_the_towers_own_forward_of_bytes(served: Any) -> None:
    _, model, handle = served
    pixels, positions = list(padded_calls_of(model, GRIDS["images"], seed=4).values())
    given, before = ((pixels * 255).to(torch.uint8), positions), handle.stats()["calls"]
    with torch.inference_mode():
        got = outcome(lambda: model.vision_tower(*given).last_hidden_state)
        want = outcome(lambda: modeling_gemma4.Gemma4VisionModel.forward(model.vision_tower, *given).last_hidden_state)
    assert same(got, want)
    assert handle.stats()["calls"] == before + 1


CHANGES: dict[str, Any] = {
    "LoRA around a layer": lambda b: (b.self_attn.o_proj, "linear", Lora(b.self_attn.o_proj.linear)),
    "quantised": lambda b: (b.mlp.down_proj.linear, "quant_method", Quantized()),
    "another scale": lambda b: (b.self_attn, "scaling", 0.5),
    "another epsilon": lambda b: (b.input_layernorm, "eps", 1e-2),
    "another activation": lambda b: (b.mlp, "act_fn", nn.ReLU()),
    "another rotary embedding": lambda b: (modeling_gemma4, "rotate_half", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changes_is_noticed(served: Any, change: str) -> None:
    config, model, handle = served
    calls = padded_calls_of(model, GRIDS["image"], seed=6)
    plain = run(config, model, calls)
    before, counted = handle.stats()["fused"], sum(handle.stats()["original"].values())
    owner, name, value = CHANGES[change](model.vision_tower.encoder.layers[1])
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        got = run(config, model, calls)
        assert handle.stats()["fused"] == before and sum(handle.stats()["original"].values()) == counted + 1
        assert torch.equal(got[0], own(config, model, calls)[0])
        assert change.startswith("LoRA") or not torch.equal(got[0], plain[0])
    finally:
        setattr(owner, name, kept)
    assert handle.reason() is None and torch.equal(run(config, model, calls)[0], plain[0])


def test_a_subclass_is_left_alone() -> None:
    class Other(gemma4_mm.Gemma4ForConditionalGeneration):
        pass

    config = config_of(NAME)
    config.compilation_config.static_forward_context.clear()
    with under(config):
        start()
        model = Other(vllm_config=config)
    assert HANDLE not in vars(model.vision_tower)


@pytest.mark.parametrize("method", ["_process_image_input", "_process_video_input"])
def test_another_source(method: str, heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, given: Any) -> list[torch.Tensor]:
        return [given["pixel_values"] * 2]

    cls: Any = gemma4_mm.Gemma4ForConditionalGeneration
    kept = {name: vars(cls)[name].__wrapped__ for name in ("_process_image_input", "_process_video_input", "__init__")}
    theirs = type(NAME, (), kept | {method: other})
    monkeypatch.setitem(sys.modules, gemma4_mm.__name__, SimpleNamespace(__name__=gemma4_mm.__name__, **{NAME: theirs}))
    plugin.register()
    assert vars(theirs)["__init__"].__wrapped__ is kept["__init__"] and vars(theirs)[method] is other
    line = heard("runs vLLM's own code")
    assert method in line and NAME in line
    assert not wrong_model(cls)
