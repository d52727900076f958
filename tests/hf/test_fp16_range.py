"""Prepared weights of an fp16 tower are products that it never forms: what fp16 cannot hold runs the original code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.bench.towers import cast_parameters_
from fusedvit.errors import BEYOND_FP16
from fusedvit.model.fp16_range import BeyondFp16, Products
from fusedvit.model.normalization import Normalization
from tests.support.families import family_tower
from tests.support.towers import (
    GRIDS,
    Call,
    assert_bitwise,
    assert_rule,
    copy_of,
    ran_fused,
    ran_original,
    tiny_tower,
)

QWEN25 = "Qwen2_5_VisionTransformerPretrainedModel"
LARGE, SMALL = "exceeds 65504", "loses bits below 6.1e-05"
NORM = "blocks.0.{}.weight times the weights behind it"


def silent(tower: Any, channel: int = 5) -> None:
    """A channel that the first block's norms bring near zero, whatever their gain."""
    block, others = tower.blocks[0], [c for c in range(48) if c != channel]
    means = [tower.patch_embed.proj.weight, block.attn.proj.weight, block.attn.proj.bias]
    for p in (*means, getattr(tower.patch_embed.proj, "bias", None)):
        if p is not None:
            p[channel] = p[others].mean(0)
    if hasattr(tower, "pos_embed"):
        tower.pos_embed.weight[:, channel] = tower.pos_embed.weight[:, others].mean(1)


def large(norm: str, *paths: str) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        silent(tower)
        gain = tower.get_submodule(f"blocks.0.{norm}")
        gain.weight[5] = 300.0
        if getattr(gain, "bias", None) is not None:
            gain.bias[5] = 0.0
        for path in paths:
            tower.get_submodule(f"blocks.0.{path}").weight[:, 5] = 300.0

    return change


def small(norm: str, *paths: str) -> Callable[[Any], None]:
    """Its last layer makes up for it."""

    def change(tower: Any) -> None:
        for block in tower.blocks:
            for p in block.get_submodule(norm).parameters():
                p.mul_(1e-3)
            for layer in map(block.get_submodule, paths[:-1]):
                layer.weight.mul_(0.02)
                layer.bias.mul_(1e-5)
            last = block.get_submodule(paths[-1]).weight
            last.mul_(3e4 / last.abs().max())

    return change


def adapter(part: str, factor: float) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        peft = pytest.importorskip("peft")
        options = peft.LoraConfig(r=2, lora_alpha=2, target_modules=r"blocks.0.attn.qkv", lora_bias=True)
        peft.inject_adapter_in_model(options, tower)
        tower.requires_grad_(False).eval()
        layer = tower.blocks[0].attn.qkv
        layer.lora_A.default.weight.fill_(256.0 if part == "weight" else 0.0)
        layer.lora_B.default.weight.fill_(factor)
        layer.lora_B.default.bias.fill_(60000.0 if part == "bias" else 0.0)
        layer.base_layer.bias.fill_(60000.0 if part == "bias" else 0.0)

    return change


MLP = {"qwen3_vl": ("mlp.linear_fc1", "mlp.linear_fc2"), QWEN25: ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
CASES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "layer norm overflows": ("qwen3_vl", large("norm1", "attn.qkv"), f"{NORM.format('norm1')} {LARGE}"),
    "layer norm of the mlp": ("qwen3_vl", large("norm2", "mlp.linear_fc1"), f"{NORM.format('norm2')} {LARGE}"),
    "rms norm overflows": (QWEN25, large("norm2", *MLP[QWEN25][:2]), f"{NORM.format('norm2')} {LARGE}"),
    "layer norm underflows": ("qwen3_vl", small("norm2", *MLP["qwen3_vl"]), f"{NORM.format('norm2')} {SMALL}"),
    "attention underflows": ("qwen3_vl", small("norm1", "attn.qkv", "attn.proj"), f"{NORM.format('norm1')} {SMALL}"),
    "rms norm underflows": (QWEN25, small("norm2", *MLP[QWEN25]), f"{NORM.format('norm2')} {SMALL}"),
    "an adapter": ("qwen3_vl", adapter("weight", 256.0), f"blocks.0.attn.qkv.weight with its adapters {LARGE}"),
    "an adapter's bias": ("qwen3_vl", adapter("bias", 0.0), f"blocks.0.attn.qkv.bias with its adapters {LARGE}"),
}


def tower_of(kind: str, change: Callable[[Any], None] = lambda tower: None, dtype: torch.dtype = torch.float16) -> Any:
    tower = family_tower(kind) if kind == QWEN25 else tiny_tower(kind)
    with torch.no_grad():
        change(tower)
    cast_parameters_(tower, dtype)
    return tower


@pytest.mark.parametrize("case", CASES)
def test_what_fp16_cannot_hold_runs_the_original(case: str) -> None:
    """The same reason before a call, in its count, where the user is strict and wherever weights are prepared."""
    kind, change, detail = CASES[case]
    tower = tower_of(kind, change)
    original, call = copy_of(tower), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    assert handle.reason() == (BEYOND_FP16, detail)
    expected = call.run(original)
    for count in (1, 2):
        assert_bitwise(call.run(tower), expected)
        ran_original(handle, BEYOND_FP16, count)
    assert handle.reason() == (BEYOND_FP16, detail) and detail in handle.report()
    for way in (handle.warmup, handle.refresh):
        with pytest.raises(RuntimeError, match=f"cannot run fused: {BEYOND_FP16}: "):
            way()
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    with pytest.raises(RuntimeError, match=f"cannot run fused: {BEYOND_FP16}: "):
        call.run(tower)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ["layer norm overflows", "layer norm underflows", "an adapter"])
def test_wider_ranges_run_fused(case: str, dtype: torch.dtype) -> None:
    kind, change, _ = CASES[case]
    tower = tower_of(kind, change, dtype)
    handle = fusedvit.fuse(tower)
    assert handle.reason() is None
    Call.of(tower, GRIDS["smallest"]).run(tower)
    ran_fused(handle, calls=1)


def written(tower: Any) -> None:
    tower.blocks[0].norm1.weight[5] = 1.0


def behind_data(tower: Any) -> None:
    tower.blocks[0].norm1.weight.data[5] = 1.0


@pytest.mark.parametrize("change", [written, behind_data])
def test_it_is_decided_again_when_weights_change(change: Callable[[Any], None]) -> None:
    """And not before: a call that is refused as the last one was prepares nothing."""
    tower = tower_of("qwen3_vl", CASES["layer norm overflows"][1])
    gain, call = tower.blocks[0].norm1.weight.clone(), Call.of(tower, GRIDS["smallest"])
    handle = fusedvit.fuse(tower)
    call.run(tower)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedvit.checks.checked_tower.prepare", None)
        call.run(tower)
    ran_original(handle, BEYOND_FP16, 2)
    with torch.no_grad():
        change(tower)
    call.run(tower)
    assert handle.stats()["fused"] == 1 and handle.reason() is None
    tower.blocks[0].norm1.weight.data.copy_(gain)
    call.run(tower)
    ran_original(handle, BEYOND_FP16, 3)
    with torch.no_grad():
        change(tower)
    call.run(tower)
    fusedvit.unfuse(tower)
    assert handle.stats()["fused"] == 2


def test_the_scale_of_bytes() -> None:
    """Bytes that no processor scales: 128 times the weights of the patch embedding."""
    tower = tower_of("qwen3_vl")
    tower.patch_embed.proj.weight.data[0] = 600.0
    side = tower.config.patch_size
    handle = fusedvit.fuse(tower)
    assert handle.reason() is None
    handle.normalizations.expect(Normalization(None, None, None, side, tower.config.temporal_patch_size), still=False)
    assert handle.reason() == (BEYOND_FP16, f"patch_embed.proj.weight times the scale of bytes {LARGE}")


def test_an_adapter_that_is_switched_off() -> None:
    tower = tower_of("qwen3_vl", CASES["an adapter"][1])
    handle, call = fusedvit.fuse(tower), Call.of(tower, GRIDS["smallest"])
    call.run(tower)
    tower.blocks[0].attn.qkv.enable_adapters(False)
    call.run(tower)
    assert handle.stats()["fused"] == 1
    ran_original(handle, BEYOND_FP16, 1)


@pytest.mark.parametrize("gain", [1.0, 0.1, 0.03, 0.01, 0.003])
def test_what_runs_fused_keeps_the_rule(gain: float) -> None:
    """Whatever share of a product lies below normal numbers."""

    def change(tower: Any) -> None:
        for block in tower.blocks:
            for p in block.norm2.parameters():
                p.mul_(gain)
            block.mlp.linear_fc1.weight.mul_(0.02)
            block.mlp.linear_fc1.bias.mul_(1e-5)
            block.mlp.linear_fc2.weight.mul_(50 / gain)

    tower = tower_of("qwen3_vl", change)
    original, exact, call = copy_of(tower), copy_of(tower, torch.float64), Call.of(tower, GRIDS["mix"])
    handle = fusedvit.fuse(tower)
    ref = Call(call.pixels.double(), call.grid).run(exact)
    assert_rule(call.run(tower), ref, call.run(original))
    assert handle.stats()["fused"] == (gain > 0.01)


def costs_too_much(exact: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float16) -> bool:
    products = Products()
    products.add("it", exact, exact.to(dtype), bias)
    try:
        products.check()
    except BeyondFp16:
        return True
    return False


def test_the_criterion() -> None:
    """Normal numbers are never refused, and neither is what a row's bias or others of its weights outweigh."""
    drawn = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    worst = torch.full((1, 8), 1 + 2.0**-11)  # half way between two numbers
    for scale in (1e-2, 1.0, 1e4):
        assert not costs_too_much(scale * drawn)
    assert not costs_too_much(worst) and not costs_too_much(worst * 2.0**-14)
    assert costs_too_much(torch.full((1, 8), 2.0**-16 + 2.0**-25))
    dead = drawn.clone()
    dead[3] *= 1e-6
    assert costs_too_much(dead) and not costs_too_much(dead, torch.ones(64))
    assert not costs_too_much(dead, None, torch.bfloat16) and not costs_too_much(dead.to("meta"))
    outweighed = drawn.clone()
    outweighed[:, :4] *= 1e-6
    assert not costs_too_much(outweighed) and not costs_too_much(0 * drawn)
    assert costs_too_much(drawn * 1e5)
    for value in (torch.nan, torch.inf):  # of the parameters: both codes say so
        assert not costs_too_much(torch.full((2, 4), value))
