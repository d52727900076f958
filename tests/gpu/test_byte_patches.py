"""Bytes in towers of real widths on a GPU: the tolerance rule, one graph for every kind, pixels from anywhere."""

from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.bench.towers import GEOMETRIES, build
from fusedvit.pixels.byte_pixels import BytePixels
from tests.support.byte_patches import CLIP, HALF, KINDS, bytes_for
from tests.support.towers import Call, assert_bitwise, assert_rule, poison, random_grid

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_tf32")]

LEAST, MOST = 1025, 1088  # patch tokens: one budget, hence one set of kernels to compile
SHALLOW = {
    "Qwen3-VL-8B": {"depth": 2, "deepstack_visual_indexes": [0]},
    "Qwen2.5-VL-7B": {"depth": 2, "fullatt_block_indexes": [1]},
    "GLM-4.1V-9B": {"depth": 2},
}
CAPTURED = fusedvit.FuseConfig(strict=True, token_budgets=(MOST // 4,), max_items=64, max_frames=64)


@pytest.mark.parametrize("numbers", [CLIP, HALF], ids=["clip", "half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHALLOW)
def test_every_kind_keeps_the_rule_in_one_graph(name: str, dtype: torch.dtype, numbers: dict[str, Any]) -> None:
    """And has the bits of an eager run, whatever the buffers held."""
    geometry = GEOMETRIES[name].but(**SHALLOW[name])
    tower, wide = build(geometry, dtype, torch.device("cuda"))
    grids = [geometry.rows(list(random_grid(seed, LEAST, MOST))) for seed in range(3)]
    pixels = [bytes_for(tower, grid, still, **numbers).cuda() for grid in grids for still in KINDS.values()]
    rows = [torch.tensor(grid, device="cuda") for grid in grids for _ in KINDS]
    floats = [p.pixels() for p in pixels]
    pt = [Call(f.to(dtype), grid).run(tower) for f, grid in zip(floats, rows, strict=True)]
    widest = next(wide.parameters()).dtype
    refs = [Call(f.to(widest), grid).run(wide) for f, grid in zip(floats, rows, strict=True)]
    handle = fusedvit.fuse(tower, CAPTURED)
    for still in KINDS.values():
        Call(bytes_for(tower, grids[0], still, **numbers).cuda(), rows[0]).run(tower)
    calls = [Call(p, grid) for p, grid in zip([*pixels, *floats], rows + rows, strict=True)]
    answers = []
    for call in calls:
        poison(handle.graphs().encoder)
        answers.append(call.run(tower))
    assert handle.stats()["eager_runs"] == {} and handle.stats()["refreshes"] == 2
    for answer, ref, theirs in zip(answers, refs + refs, pt + pt, strict=True):
        assert_rule(answer, ref, theirs, name)
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True, graphs=False))  # the same handle
    for call, answer in zip(calls, answers, strict=True):
        assert_bitwise(call.run(tower), answer)


def test_bytes_from_anywhere() -> None:
    """On the CPU, pinned, strided, misaligned, on another stream, as a batch of one: the same bits."""
    tower, _ = build(GEOMETRIES["Qwen2.5-VL-7B"].but(**SHALLOW["Qwen2.5-VL-7B"]), torch.bfloat16, torch.device("cuda"))
    grid = list(random_grid(1, LEAST, MOST))
    handle = fusedvit.fuse(tower, CAPTURED)
    for still in KINDS.values():
        x = bytes_for(tower, grid, still)
        rows = torch.tensor(grid, device="cuda")
        expected = Call(x.cuda(), rows).run(tower)
        odd = torch.zeros(x.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(x.shape).copy_(x.unmarked())
        strided = x.cuda().unmarked().repeat_interleave(2, dim=0)[::2]
        others = [BytePixels.mark(t, x.normalization, still) for t in (odd, strided)]
        for other in (x, x.pin_memory(), x.cuda().to(torch.bfloat16), x.cuda()[None], *others):
            assert_bitwise(Call(other, rows).run(tower), expected)
            assert_bitwise(Call(other, torch.tensor(grid)).run(tower), expected)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert_bitwise(Call(x.cuda(), rows).run(tower), expected)
        torch.cuda.synchronize()
    assert handle.stats()["eager_runs"] == {}
