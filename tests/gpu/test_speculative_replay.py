"""Speculative replays, begun before the grid on the GPU is read, on two blocks of Qwen3-VL-8B's width."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from fusedvit import FuseConfig, fuse, unfuse
from fusedvit.bench import graph_stress
from fusedvit.bench.graph_stress import DEVICE, FOUR_BLOCKS
from fusedvit.bench.timing import synchronisations
from fusedvit.bench.towers import build, pixels_for
from fusedvit.fused_encoder import FusedEncoder
from tests.support.graphs_on_cpu import same

pytestmark = pytest.mark.gpu
LADDER = (64, 256)  # merged tokens


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return build(FOUR_BLOCKS.but(depth=2), torch.bfloat16, DEVICE)[0]


@pytest.fixture
def fused(plain: nn.Module) -> Iterator[tuple[nn.Module, FusedEncoder]]:
    handle = fuse(plain, FuseConfig(token_budgets=LADDER, max_items=16, max_frames=64, compile="now"))
    with torch.inference_mode():
        for rows in (128, 520):  # their first calls capture, and speculate nothing
            grid = [(1, 2, rows // 2)]
            graph_stress.call(plain, pixels_for(plain, grid), grid)
        yield plain, handle
    unfuse(plain)


BAD_GRIDS = {
    "another total": [(1, 8, 12), (2, 4, 2)],
    "negative": [(-1, 8, 12), (2, 8, 14)],
    "huge": [(1, 2**40, 12), (2, 4, 4)],
    "the most there is": [(2**63 - 1, 2**63 - 2, 2**63 - 2), (2, 4, 4)],
    "a product of 0 in 64 bits": [(2**32, 2**32, 2), (1, 8, 16)],
    "the right total in 32 bits": [(1, 8, 2**32 + 12), (2, 4, 4)],
    "odd": [(1, 3, 32), (2, 4, 4)],
    "no rows": [(1, 0, 12), (2, 8, 8)],
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("bad", BAD_GRIDS.values(), ids=BAD_GRIDS)
def test_garbage_grids_on_the_gpu_right_after_a_good_call(
    fused: tuple[nn.Module, FusedEncoder], bad: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    """Such a replay is under way when its grid is read: it runs on no items."""
    if dtype == torch.int32 and max(max(row) for row in bad) > 2**31 - 1:
        pytest.skip("no such grid in 32 bits")
    tower, handle = fused
    grid = torch.tensor([(1, 8, 12), (2, 4, 4)], dtype=dtype, device="cuda")
    pixels = pixels_for(tower, [(1, 8, 12), (2, 4, 4)])
    want = graph_stress.call(tower, pixels, grid)
    assert same(want, graph_stress.eager(handle, pixels, [(1, 8, 12), (2, 4, 4)]))
    for _ in range(3):
        with pytest.raises(ValueError, match="grid_thw"):
            graph_stress.call(tower, pixels, torch.tensor(bad, dtype=dtype, device="cuda"))
        graph_stress.poison(handle)
        assert same(graph_stress.call(tower, pixels, grid), want)
    stats = handle.stats()["graphs"]
    assert stats["mispredictions"] == 3 and stats["replays"] == 2 + 4, "two of the fixture's"


def test_grids_on_the_gpu_are_predicted_and_read_once(fused: tuple[nn.Module, FusedEncoder]) -> None:
    """Layouts of one total after each other, a video over the frame limit among them, in several memory layouts."""
    tower, handle = fused
    pixels = pixels_for(tower, [(1, 20, 26)])
    grids = [[(1, 20, 26)], [(1, 26, 20)], [(130, 2, 2)], [(10, 2, 26)], [(1, 26, 20)]]
    for i, grid in enumerate(2 * grids):
        on_gpu = torch.tensor(grid, device="cuda")
        given = on_gpu if i % 2 else on_gpu.int().repeat(1, 2)[:, :3]
        assert same(graph_stress.call(tower, pixels, given), graph_stress.call(tower, pixels, grid)), grid
    stats = handle.stats()
    assert stats["graphs"]["mispredictions"] == 2 and stats["fused"] == 2 + 20 and stats["eager_runs"] == {}


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_one_wait_a_call(fused: tuple[nn.Module, FusedEncoder], where: str) -> None:
    tower, _ = fused
    grids = [torch.tensor(grid, device=where) for grid in ([(1, 20, 26)], [(130, 2, 2)])]  # one batch, three batches
    pixels = pixels_for(tower, [(1, 20, 26)])
    for grid in 2 * grids:
        graph_stress.call(tower, pixels, grid)
        waits = synchronisations(functools.partial(tower, pixels, grid_thw=grid))
        assert len(waits) <= 1, waits


def test_weights_that_change_under_a_speculative_replay(fused: tuple[nn.Module, FusedEncoder]) -> None:
    tower, handle = fused
    grid = [(1, 10, 10)]
    pixels, on_gpu = pixels_for(tower, grid), torch.tensor(grid, device="cuda")
    before = graph_stress.call(tower, pixels, on_gpu)
    weight = tower.blocks[1].attn.proj.weight
    saved = weight.data.clone()
    for scale in (1.5, 0.5):
        with torch.inference_mode(False):
            weight.data.copy_(saved * scale)
        got = graph_stress.call(tower, pixels, on_gpu)
        assert not same(got, before) and same(got, graph_stress.eager(handle, pixels, grid))
    with torch.inference_mode(False):
        weight.data.copy_(saved)
    assert same(graph_stress.call(tower, pixels, on_gpu), before)


PIXELS = {
    "bf16": lambda p: p,
    "fp32": lambda p: p.float() * 1.001,
    "fp16": lambda p: p.half() * 0.999,
    "fp64": lambda p: p.double() * 1.001,
    "every other row": lambda p: p.repeat_interleave(2, 0)[::2],
    "not aligned": lambda p: torch.cat([p.new_zeros(1), p.flatten()])[1:].view(p.shape),
    "on the host": lambda p: p.cpu().float() * 1.001,
}


@pytest.mark.parametrize("variant", PIXELS.values(), ids=PIXELS)
def test_pixels_of_any_dtype_layout_and_device(
    fused: tuple[nn.Module, FusedEncoder], variant: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """From each kind of grid, on one stream, and on two alternately."""
    tower, handle = fused
    grid = [(1, 8, 12), (2, 4, 4)]
    side = torch.cuda.Stream()
    for i, where in enumerate(["cpu", "cuda", "cuda", "cpu"]):
        pixels = variant(pixels_for(tower, grid, i))
        want = graph_stress.eager(handle, pixels, grid)
        given = torch.tensor(grid, device=where)
        graph_stress.poison(handle)
        torch.cuda.synchronize()
        assert same(graph_stress.call(tower, pixels, given), want)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            other = graph_stress.call(tower, pixels, given)
        assert same(graph_stress.call(tower, pixels, given), want)
        torch.cuda.synchronize()
        assert same(other, want)
