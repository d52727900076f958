"""Whole models of the Qwen families that tests/support/towers.py does not build: fuse finds the tower."""

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import fusedvit
from fusedvit.bench.towers import random_weights_
from fusedvit.pixels.byte_pixels import as_floats
from tests.support import towers
from tests.support.byte_patches import bytes_for
from tests.support.families import TINY
from tests.support.towers import IMAGE, VIDEO, VISION_END, VISION_START, Grid, error_of, prompt, ran_fused

STRICT = fusedvit.FuseConfig(strict=True)
HIDDEN = 64
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
TEXT = towers.TEXT | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "rope_parameters": ROPE}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
INTERLEAVED = {"rope_parameters": ROPE | {"mrope_interleaved": True}}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": HIDDEN}
QWEN4: dict[str, Any] = INTERLEAVED | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
# Model: its classes' prefix and suffix, its tower's class, what its text config adds.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen2VL": ("", "Qwen2VisionTransformerPretrainedModel", {}),
    "Qwen2_5_VL": ("", "Qwen2_5_VisionTransformerPretrainedModel", {}),
    "Qwen2_5Omni": ("Thinker", "Qwen2_5OmniVisionEncoder", {}),
    "Qwen3OmniMoe": ("Thinker", "Qwen3OmniMoeVisionEncoder", EXPERTS | INTERLEAVED),
    "Qwen4Exp": ("", "Qwen4ExpVisionModel", QWEN4),
}
IMAGES: Grid = [(1, 4, 6), (1, 10, 4)]
VIDEOS: Grid = [(3, 4, 10)]
by_model = pytest.mark.parametrize("name", MODELS)


def tiny_model(name: str) -> Any:
    suffix, tower, more = MODELS[name]
    vision = dict(TINY[tower][1])
    vision["hidden_size" if name == "Qwen2VL" else "out_hidden_size"] = HIDDEN
    settings: dict[str, Any] = {"text_config": TEXT | more, "vision_config": vision} | TOKENS
    if suffix:
        settings |= {"audio_config": AUDIO, "audio_token_id": 295}
    model = f"{name}{suffix}"
    config = getattr(transformers, f"{model}Config", None) or _config_of(name, model)
    built = getattr(transformers, f"{model}ForConditionalGeneration")(config(**settings)).eval()
    random_weights_(built)
    return built


def _config_of(name: str, model: str) -> Any:
    folder = {"Qwen2_5Omni": "qwen2_5_omni", "Qwen3OmniMoe": "qwen3_omni_moe"}[name]
    module = getattr(transformers.models, folder)
    return getattr(getattr(module, f"configuration_{folder}"), f"{model}Config")


def tower_of(model: Any) -> Any:
    return model.visual if hasattr(model, "visual") else model.model.visual


def arguments_for(model: Any) -> dict[str, torch.Tensor]:
    if "Qwen4" in type(model).__name__:
        return prompt(tower_of(model), IMAGES, VIDEOS)
    inputs = prompt(tower_of(model), IMAGES, VIDEOS, by_frame=False)
    if "Omni" in type(model).__name__:
        del inputs["mm_token_type_ids"]
        inputs["video_second_per_grid"] = torch.ones(len(VIDEOS))
    return inputs


def generate(model: Any, arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, logits of every step)."""
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    generated = model.generate(**{k: v.clone() for k, v in arguments.items()}, **settings)
    return generated.sequences, torch.stack(generated.logits)


@by_model
def test_generate(name: str) -> None:
    model = tiny_model(name)
    arguments = arguments_for(model)
    expected, logits = generate(model, arguments)
    handle = fusedvit.fuse(model, STRICT)
    assert handle.tower is tower_of(model)
    tokens, ours = generate(model, arguments)
    assert tokens.equal(expected) and error_of(ours, logits) < 1e-4
    ran_fused(handle, calls=2)
    other = {k: v.flip(0) if k.startswith("pixel_values") else v for k, v in arguments.items()}
    assert error_of(generate(model, other)[1], logits) > 1e-2, "the logits do not hang on the pixels"


@by_model
def test_generate_of_bytes(name: str) -> None:
    model = tiny_model(name)
    tower, arguments = tower_of(model), arguments_for(model)
    images, videos = (arguments[f"{kind}_grid_thw"].tolist() for kind in ("image", "video"))
    marked = {"pixel_values": bytes_for(tower, images, True), "pixel_values_videos": bytes_for(tower, videos, False)}
    expected, logits = generate(model, arguments | {name: pixels.pixels() for name, pixels in marked.items()})
    handle = fusedvit.fuse(model, STRICT)
    tokens, ours = generate(model, arguments | marked)
    assert tokens.equal(expected) and error_of(ours, logits) < 1e-4
    ran_fused(handle, calls=2)


@pytest.mark.parametrize("name", ["Qwen2_5Omni", "Qwen3OmniMoe"])
def test_whole_omni_models_are_fused_at_their_thinker(name: str) -> None:
    """Speech and all, without values: which tower is found is a matter of names."""
    config = getattr(transformers, f"{name}Config")(enable_audio_output=False)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    assert fusedvit.fuse(model).tower is tower_of(model.thinker)


@pytest.mark.parametrize("marked", [False, True], ids=["floats", "bytes"])
def test_colqwen2(marked: bool) -> None:
    """It calls `vlm.visual` itself, with its pages padded to one length."""
    vision = TINY["Qwen2VisionTransformerPretrainedModel"][1] | {"hidden_size": HIDDEN}
    inner = {"model_type": "qwen2_vl", "text_config": TEXT, "vision_config": vision} | TOKENS
    model = transformers.ColQwen2ForRetrieval(transformers.ColQwen2Config(vlm_config=inner)).eval()
    random_weights_(model)
    inputs = prompt(model.vlm.visual, [(1, 4, 6)], [])
    arguments = {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
        "image_grid_thw": inputs["image_grid_thw"],
    }
    pixels = bytes_for(model.vlm.visual, [(1, 4, 6)], still=True) if marked else inputs["pixel_values"]
    arguments["pixel_values"] = padded = nn.functional.pad(pixels, (0, 0, 0, 8))[None]
    with torch.no_grad():
        expected = model(**arguments | {"pixel_values": as_floats(padded)}).embeddings
        handle = fusedvit.fuse(model, STRICT)
        torch.testing.assert_close(model(**arguments).embeddings, expected, rtol=1e-4, atol=1e-5)
    assert handle.tower is model.vlm.visual
    ran_fused(handle, calls=1)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_training_a_language_model_under_gradient_checkpointing(
    name: str, lora: bool, reentrant: bool, tmp_path: Any
) -> None:
    """With Hugging Face's Trainer and a frozen tower: every call runs fused, and the same weights are trained.

    By SGD: Adam would amplify the rounding of gradients that are zero, as those of a bias of keys are.
    """
    model = tiny_model(name).requires_grad_(True)
    tower_of(model).requires_grad_(False)
    handle = fusedvit.fuse(model, STRICT)
    plain = fusedvit.unfuse(copy.deepcopy(model))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for each in (model, plain):
        _train(_with_lora(each) if lora else each, arguments_for(model), str(tmp_path), reentrant)
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys() and any("lora_" in n for n in ours) == lora
    for parameter, expected in theirs.items():
        assert error_of(ours[parameter].detach(), expected.detach()) < 1e-5, parameter
    changed = [n for n, p in ours.items() if n in before and not p.equal(before[n])]
    assert (not changed) if lora else any("language_model" in n for n in changed)
    assert not lora or any(p.any() for n, p in ours.items() if "lora_B" in n)  # which begin as zeros
    ran_fused(handle, calls=6)  # images and videos of three steps


def _with_lora(model: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=r".*language_model.*(q|v)_proj"))


def _train(model: Any, inputs: dict[str, torch.Tensor], folder: str, reentrant: bool) -> None:
    sample = inputs | {"labels": inputs["input_ids"]}
    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=3, report_to=[], save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=1, dataloader_pin_memory=False, logging_strategy="no",
        optim="sgd", learning_rate=0.5, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )  # fmt: skip
    transformers.Trainer(
        model=model, args=arguments, train_dataset=[sample] * 3, data_collator=lambda batch: batch[0]
    ).train()
