"""Training runs fused where the tower is frozen: autocast in its dtype, a Trainer, gradient checkpointing."""

from typing import Any
from unittest import mock

import pytest
import torch

import fusedvit
from fusedvit.bench.towers import cast_parameters_
from fusedvit.checks import fallback
from fusedvit.checks.checked_tower import CheckedTower
from tests.support.families import INSTALLED, each_of, family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    Grid,
    assert_bitwise,
    assert_rule,
    assert_same,
    copy_of,
    fused_tower,
    prompt,
    ran_fused,
    ran_original,
    tiny_model,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)
MIX: Grid = [(1, 4, 6), (1, 2, 2)]


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
    tower, handle, call = fused_tower(grid=GRIDS["video"], config=STRICT)
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
    """It marks what the patch embedding gives for gradients; tests/hf/test_gradient_checkpointing.py has the rest."""
    tower = family_tower(name)
    tower.gradient_checkpointing_enable()
    tower.train()
    original, call = copy_of(tower), Call.of(tower, MIX)
    handle = fusedvit.fuse(tower, STRICT)
    for _ in range(2):
        assert_same(call.run(tower), call.run(original))
    marked = call.record(original).pooler_output.requires_grad  # not where the class names no embeddings
    assert call.record(tower).pooler_output.requires_grad == marked
    assert_same(call.run(tower), call.run(original))
    ran_fused(handle, calls=4)


def test_gradient_checkpointing_is_no_change() -> None:
    """Trainers switch it around each generation."""
    tower, handle, call = fused_tower(family_tower("Qwen2VisionTransformerPretrainedModel"), MIX, STRICT)
    tower.gradient_checkpointing_enable()  # hooks are a change, the first time
    call.run(tower)
    with mock.patch.object(CheckedTower, "_reason", autospec=True, side_effect=CheckedTower._reason) as judged:
        for switch in (tower.gradient_checkpointing_disable, tower.gradient_checkpointing_enable):
            switch()
            call.run(tower)
    ran_fused(handle, calls=3)
    assert not judged.called
