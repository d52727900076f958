"""The encoder as a function, on both tables of operations, against Hugging Face in a wider dtype."""

from typing import Any

import pytest
import torch

from fusedvit.model import ops
from tests.support.encoding import Encoder, hugging_face
from tests.support.towers import (
    GRIDS,
    KINDS,
    Grid,
    assert_bitwise,
    assert_rule,
    assert_same,
    copy_of,
    patches_of,
    pixels_for,
    tiny_tower,
    vision_tower,
)

pytestmark = pytest.mark.usefixtures("without_tf32")


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_table_in_fp64(kind: str, grid: Grid) -> None:
    """Errors of fp64 would be 1e-15; Hugging Face turns q and k in fp32 whatever the dtype, hence 1e-6."""
    tower = copy_of(tiny_tower(kind), torch.float64)
    pixels = pixels_for(tower, grid, dtype=torch.float64)
    assert_same(Encoder(tower, ops.TORCH).answer(grid, pixels), hugging_face(tower, grid, pixels), limit=1e-6)


# On Triton: the interpreter where there is no GPU. It is slow, so that towers are shallow, and has no bf16.

INTERPRETED: Grid = [(1, 4, 6), (2, 2, 4), (1, 2, 2)]
SIZES: dict[str, dict[str, Any]] = {
    "head of 72": {"hidden_size": 144, "intermediate_size": 280, "depth": 2, "deepstack_visual_indexes": [0]},
    "head of 64": {"hidden_size": 128, "intermediate_size": 130, "depth": 2, "deepstack_visual_indexes": [1]},
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_triton_table_in_fp32(size: dict[str, Any], device: torch.device) -> None:
    tower = vision_tower(**size).to(device)
    pixels = pixels_for(tower, INTERPRETED)
    ours = Encoder(tower, ops.TRITON).answer(INTERPRETED, pixels)
    assert_same(ours, hugging_face(tower, INTERPRETED, pixels), limit=1e-5)


@pytest.mark.parametrize("size", [SIZES["head of 72"]], ids=["head of 72"])
def test_triton_table_in_fp16(size: dict[str, Any], device: torch.device) -> None:
    tower = copy_of(vision_tower(**size), torch.float16).to(device)
    pixels = pixels_for(tower, INTERPRETED).half()
    encoder = Encoder(tower, ops.TRITON)
    ours, pt = encoder.answer(INTERPRETED, pixels), hugging_face(tower, INTERPRETED, pixels)
    ref = hugging_face(copy_of(tower, torch.float32), INTERPRETED, pixels)
    assert_rule(ours, ref, pt)
    assert_bitwise(encoder.answer(INTERPRETED, pixels), ours)  # run to run the same bits


@pytest.fixture(params=["torch", "triton"])
def encoder(request: pytest.FixtureRequest, device: torch.device) -> Encoder:
    if request.param == "torch":
        return Encoder(tiny_tower(), ops.TORCH)
    return Encoder(vision_tower(depth=1, deepstack_visual_indexes=[0]).to(device), ops.TRITON)


def test_run_to_run_the_same_bits(encoder: Encoder) -> None:
    pixels = pixels_for_spec(encoder, INTERPRETED)
    assert_bitwise(encoder.answer(INTERPRETED, pixels), encoder.answer(INTERPRETED, pixels))


def test_buffers_serve_one_call_after_another(encoder: Encoder) -> None:
    """Nothing of one call is left in the next: equal totals with other boundaries, images for videos, h for w."""
    grids: list[Grid] = [[(1, 4, 6), (1, 2, 4)], [(2, 4, 4)], [(1, 6, 4), (1, 4, 2)], [(1, 2, 2)], [(4, 2, 4)]]
    shared = encoder.buffers([(1, 2, 2)] * 8, spare=(0, 0, 0, 8), poisoned=True)
    for i, grid in enumerate(grids):
        pixels = pixels_for_spec(encoder, grid, seed=i)
        exact = encoder.answer(grid, pixels)
        assert_bitwise(encoder.run(shared, grid, pixels), exact)


def pixels_for_spec(encoder: Encoder, grid: Grid, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(patches_of(grid), encoder.spec.patch_width, generator=g)


def test_a_channel_hundreds_of_times_the_rest(device: torch.device) -> None:
    """Trained towers have such channels; statistics by sums of squares would lose the others."""
    shallow = vision_tower(depth=1, deepstack_visual_indexes=[0])
    for table, tower in ((ops.TORCH, tiny_tower()), (ops.TRITON, shallow.to(device))):
        with torch.no_grad():
            tower.patch_embed.proj.bias[5] += 500.0
            tower.patch_embed.proj.bias[40] -= 300.0
        pixels = pixels_for(tower, INTERPRETED)
        ref = hugging_face(copy_of(tower, torch.float64), INTERPRETED, pixels)
        pt = hugging_face(tower, INTERPRETED, pixels)
        ours = Encoder(tower, table).answer(INTERPRETED, pixels)
        assert_rule(ours, ref, pt, table.name)


def test_nothing_past_the_capacity_is_needed() -> None:
    """Exact buffers are exact: as many frames, tiles and items as the grid has."""
    encoder = Encoder(tiny_tower(), ops.TORCH)
    buffers = encoder.buffers(INTERPRETED)
    assert buffers.grid.shape == (3, 3)
    assert buffers.meta.cu_seqlens.shape == (5,)
    assert buffers.hidden.shape == (44, 48) and [plane.shape for plane in buffers.merged] == [(11, 40)] * 3
