"""A large common mean in the residual stream: within the tolerance rule in fp32, as without one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedvit
from tests.support.families import BY_GRID, each_of, family_tower
from tests.support.towers import Call, Grid, assert_rule, copy_of, outputs_of, ran_fused, vision_tower

STRICT = fusedvit.FuseConfig(strict=True)
MIX: Grid = [(1, 4, 6), (1, 8, 2)]

SOURCES: dict[str, Callable[[Any, float], Any]] = {
    "patch embedding": lambda t, mean: last_bias(t.blocks[0].attn.proj).add_(mean),
    "attention of the second block": lambda t, mean: last_bias(t.blocks[1].attn.proj).add_(mean),
    "MLP of the first block": lambda t, mean: last_bias(list(t.blocks[0].mlp.children())[-1], t.blocks[0].mlp).add_(
        mean
    ),
}


def last_bias(module: Any, around: Any = None) -> torch.Tensor:
    found = [p for m in (module, around) if m is not None for n, p in m.named_parameters() if n.endswith("bias")]
    return found[-1].data


def by_the_rule(tower: Any) -> None:
    exact, original, call = copy_of(tower, torch.float64), copy_of(tower), Call.of(tower, MIX)
    handle = fusedvit.fuse(tower, STRICT)
    ref = outputs_of(exact(call.pixels.double(), grid_thw=call.grid))
    assert_rule(call.run(tower), ref, call.run(original))
    ran_fused(handle, calls=1)


def with_biases(name: str) -> Any:
    tower = family_tower(name)
    return tower if hasattr(tower.blocks[0].attn.proj, "bias") and tower.blocks[0].attn.proj.bias is not None else None


@pytest.mark.parametrize("mean", [10.0, 300.0, 1e4])
@pytest.mark.parametrize("source", SOURCES)
@each_of(BY_GRID)
def test_every_family(name: str, source: str, mean: float) -> None:
    tower = with_biases(name)
    if tower is None:
        pytest.skip("its blocks have no biases")
    SOURCES[source](tower, mean)
    by_the_rule(tower)


@pytest.mark.parametrize("mean", [10.0, 1000.0])
@pytest.mark.parametrize("at", ["patch_embed.proj.bias", "pos_embed.weight"])
def test_a_wider_tower(at: str, mean: float) -> None:
    tower = vision_tower(hidden_size=192, intermediate_size=768, num_heads=4, depth=4)
    tower.get_parameter(at).data.add_(mean)
    by_the_rule(tower)
