"""Compiled towers, blocks and models run fused, or say why not."""

import gc
from typing import Any

import pytest
import torch

import fusedvit
from tests.support.families import family_tower
from tests.support.towers import (
    GRIDS,
    assert_same,
    copy_of,
    fused_and_original,
    prompt,
    ran_fused,
    tiny_model,
    tiny_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)


def test_a_compiled_tower_runs_fused_between_two_graphs() -> None:
    tower, handle, call, original = fused_and_original(config=STRICT)
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
    tower, handle, call, original = fused_and_original(family_tower(name), GRIDS["images"], STRICT)
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


def test_a_block_that_torch_compiles_as_a_module() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    tower.blocks[1] = torch.compile(tower.blocks[1], backend="eager")
    assert "blocks.1 is torch._dynamo.eval_frame.OptimizedModule; blocks.1.compile()" in handle.report()
