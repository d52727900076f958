"""Engines' names of the same parameters: gate and up, or q, k and v, in one layer; a padded position table."""

from dataclasses import replace

import pytest
import torch

from fusedvit.families.base import Family
from fusedvit.families.registry import family_of
from fusedvit.model.param_names import DownsampleNames, WeightNames, parameter_shapes
from fusedvit.model.prepare_weights import prepare
from tests.support.families import family_tower

GATED = ["Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5OmniVisionEncoder", "Glm4vVisionModel"]
Parameters = dict[str, torch.Tensor]


def merged(names: WeightNames, parameters: Parameters, depth: int) -> tuple[WeightNames, Parameters]:
    """Names and parameters as an engine has them, one layer in place of several."""
    found = dict(parameters)

    def join(parts: tuple[str, ...], name: str) -> None:
        for kind in ("weight", "bias"):
            held = [found.pop(f"{part}.{kind}") for part in parts if f"{part}.{kind}" in found]
            if held:
                found[f"{name}.{kind}"] = torch.cat(held)

    for i in range(depth):
        join(tuple(name.format(i) for name in names.fc1), f"blocks.{i}.mlp.gate_up_proj")
        join(tuple(name.format(i) for name in names.qkv), f"blocks.{i}.attn.merged_qkv")
    merger = names.merger
    if isinstance(merger, DownsampleNames):
        join(merger.fc1, "merger.gate_up_proj")
        merger = replace(merger, fc1=("merger.gate_up_proj",))
    fc1, qkv = ("blocks.{}.mlp.gate_up_proj",), ("blocks.{}.attn.merged_qkv",)
    return replace(names, fc1=fc1, qkv=qkv, merger=merger), found


@pytest.mark.parametrize("name", GATED)
def test_merged_layers_are_the_same_weights(name: str) -> None:
    tower, family = family_tower(name), family_of(name)
    assert isinstance(family, Family)
    spec, parameters = family.spec_from_config(tower.config), {n: p.detach() for n, p in tower.named_parameters()}
    names, held = merged(family.names, parameters, spec.depth)
    shapes = dict(parameter_shapes(names, spec))
    assert {n: held[n].numel() for n in shapes} == {n: torch.Size(s).numel() for n, s in shapes.items()}
    assert shapes.keys() == held.keys()
    want = prepare(spec, family.names, parameters.__getitem__)
    got = prepare(spec, names, held.__getitem__)
    for block, other in zip(got.blocks, want.blocks, strict=True):
        assert torch.equal(block.qkv.weight, other.qkv.weight) and torch.equal(block.fc1.weight, other.fc1.weight)
        for mine, theirs in ((block.qkv.bias, other.qkv.bias), (block.fc1.bias, other.fc1.bias)):
            assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))
    if isinstance(names.merger, DownsampleNames):
        assert torch.equal(got.merger.fc1.weight, want.merger.fc1.weight)  # type: ignore[union-attr]


def test_padding_of_a_position_table_is_left_out() -> None:
    name = "Qwen3VLVisionModel"
    tower, family = family_tower(name), family_of(name)
    assert isinstance(family, Family)
    spec, parameters = family.spec_from_config(tower.config), {n: p.detach() for n, p in tower.named_parameters()}
    table = parameters["pos_embed.weight"]
    parameters["pos_embed.weight"] = torch.cat([table, torch.full((7, table.shape[1]), torch.nan)])
    found = prepare(spec, family.names, parameters.__getitem__).position
    assert found is not None and torch.equal(found, table)
