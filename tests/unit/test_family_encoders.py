"""The encoder of every kind of family, with torch and with Triton operations, in buffers larger than their content."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedvit.kernels.metadata import Layout
from fusedvit.model import ops, plan
from fusedvit.model.buffers import Capacity
from fusedvit.model.items import Item
from tests.kernels.metadata_cases import frames_of, tiles_of, windows_of
from tests.support.encoding import Encoder, hugging_face
from tests.support.families import SHAPES, family_tower
from tests.support.towers import Grid, assert_bitwise, assert_rule, assert_same, copy_of, patches_of, pixels_for

pytestmark = pytest.mark.usefixtures("without_tf32")
GRID: Grid = [(1, 4, 6), (1, 10, 2), (1, 2, 2)]
TABLES = {"torch": ops.TORCH, "triton": ops.TRITON}
HEADS_OF_64: dict[str, dict[str, int]] = {
    "Glm5NextVisionModel": {"hidden_size": 128},
    "Gemma4VisionModel": {"hidden_size": 128, "head_dim": 64},
}
by_shape = pytest.mark.parametrize("name", SHAPES)
by_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@by_shape
def test_triton_table_in_fp32(name: str, device: torch.device) -> None:
    tower = family_tower(name, depth=2).to(device)
    pixels = pixels_for(tower, GRID)
    assert_same(Encoder(tower, ops.TRITON).answer(GRID, pixels), hugging_face(tower, GRID, pixels))


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith(("Qwen2_5", "Glm5", "Gemma4"))])
def test_triton_table_in_fp16(name: str, device: torch.device) -> None:
    tower = copy_of(family_tower(name, depth=2), torch.float16).to(device)
    pixels = pixels_for(tower, GRID).half()
    ours, pt = Encoder(tower, ops.TRITON).answer(GRID, pixels), hugging_face(tower, GRID, pixels)
    ref = hugging_face(copy_of(tower, torch.float32), GRID, pixels)
    assert_rule(ours, ref, pt)


@by_table
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in HEADS_OF_64 if name in SHAPES])
def test_heads_that_the_product_normalises(name: str, dtype: torch.dtype, table: ops.Ops, device: torch.device) -> None:
    tower = family_tower(name, depth=2, **HEADS_OF_64[name]).to(device if table is ops.TRITON else "cpu")
    pixels, rounded = pixels_for(tower, GRID).to(dtype), copy_of(tower, dtype)
    encoder = Encoder(rounded, table)
    assert encoder.spec.norms_heads
    ref = hugging_face(copy_of(rounded, torch.float64), GRID, pixels.double())
    assert_rule(encoder.answer(GRID, pixels), ref, hugging_face(rounded, GRID, pixels))


@pytest.mark.skipif("Gemma4VisionModel" not in SHAPES, reason="not in this transformers")
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("numbers", [{}, HEADS_OF_64["Gemma4VisionModel"]], ids=["heads of 24", "heads of 64"])
def test_launches_of_a_block_with_norms_behind_attention_and_mlp(numbers: dict[str, int], clipped: bool) -> None:
    """Seven, whether its linear layers are clipped or not; eight where the product does not normalise heads."""
    counts = []
    for depth in (1, 2):
        seen: list[str] = []
        tower = family_tower("Gemma4VisionModel", depth=depth, use_clipped_linears=clipped, **numbers)
        Encoder(tower, _counting(seen)).answer(GRID, pixels_for(tower, GRID))
        counts.append(Counter(seen))
    block = {"linear": 4, "residual_norm": 2, "head_norm_rope": 0 if numbers else 1, "attention": 1}
    assert counts[1] - counts[0] == +Counter(block)


def _counting(seen: list[str]) -> ops.Ops:
    """Torch operations that write their names into `seen`."""

    def counted(name: str, op: Any) -> Any:
        return lambda *args, **kwargs: (seen.append(name), op(*args, **kwargs))[1]

    return replace(ops.TORCH, **{name: counted(name, op) for name, op in vars(ops.TORCH).items() if callable(op)})


@by_table
@by_shape
def test_buffers_of_a_budget_and_nan_in_their_rest(name: str, table: ops.Ops, device: torch.device) -> None:
    """Several calls in the same larger buffers, every spare row NaN or garbage."""
    encoder = Encoder(family_tower(name, depth=2).to(device if table is ops.TRITON else "cpu"), table)
    shared = encoder.buffers([(1, 2, 2)] * 12, spare=(64 - 48, 3, 5, 7), poisoned=True)
    for seed, grid in enumerate((GRID, [(1, 6, 8)], [(1, 8, 6)], [(1, 2, 2)])):
        pixels = torch.randn(patches_of(grid), encoder.spec.patch_width, generator=torch.Generator().manual_seed(seed))
        assert_bitwise(encoder.run(shared, grid, pixels), encoder.answer(grid, pixels))


@by_table
@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("Qwen2")])
def test_short_frames_in_a_launch_of_their_own(
    name: str, table: ops.Ops, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attention launches, as in a large budget's plan. Short and long frames, either alone, NaN in spare rows."""
    monkeypatch.setattr(plan, "SHORT_FRAME", 8)
    tower = family_tower(name, depth=2).to(device if table is ops.TRITON else "cpu")
    encoder = Encoder(tower, table)
    whole = encoder.plan(64)
    halves = replace(whole, short_attention=replace(whole.attention, block_m=32))
    grids: list[Grid] = [[(1, 2, 2), (1, 4, 6), (3, 2, 4), (1, 2, 6)], [(1, 6, 8)], [(6, 2, 4)]]
    calls = [(grid, pixels_for(tower, grid)) for grid in grids]
    one_list = [encoder.answer(*call) for call in calls]
    monkeypatch.setattr(encoder, "plan", lambda tokens: halves)
    shared = encoder.buffers([(1, 4, 4)] * 3 + [(1, 2, 4)] * 2, spare=(0, 3, 9, 7), poisoned=True)
    for call, want in zip(calls, one_list, strict=True):
        got = encoder.answer(*call)
        assert_same(got, want, limit=1e-5)  # other tiles, another order of sums
        assert_bitwise(encoder.run(shared, *call), got)


@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_capacities(block_m: int) -> None:
    """Exact capacities count what a batch holds; capacities for limits hold every batch within them."""
    layout = Layout(2, 80, block_m, window=8, window_block_m=block_m)
    for h in range(2, 40, 2):
        for w in range(2, 40, 2):
            for t in (1, 3):
                grid: Grid = [(t, h, w), (1, w, h)]
                items = [Item(*row) for row in grid]
                exact = Capacity.of(items, layout)
                windows = windows_of(grid, 8)
                tiles = sum(-(-n // block_m) for n in windows)
                assert (exact.windows, exact.window_tiles, exact.frames) == (len(windows), tiles, t + 1)
                most = Capacity.at_most(sum(frames_of(grid)), 2, t + 1, layout)
                assert exact.windows <= most.windows and exact.window_tiles <= most.window_tiles
                assert exact.tiles <= most.tiles and exact.short_tiles == most.short_tiles == 0
                for short in (h * w - 1, h * w, 10**6):
                    two = replace(layout, short=short, short_block_m=48)
                    frames = [h * w] * (t + 1)
                    exact, most = Capacity.of(items, two), Capacity.at_most(sum(frames), 2, t + 1, two)
                    assert (exact.tiles, exact.short_tiles) == (
                        tiles_of(frames, block_m, above=short),
                        tiles_of(frames, 48, up_to=short),
                    )
                    assert exact.tiles <= most.tiles and exact.short_tiles <= most.short_tiles
