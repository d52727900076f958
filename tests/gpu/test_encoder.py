"""Towers of real width run eagerly on a GPU: accuracy, launches, synchronisations, memory, bits from run to run."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import torch

import fusedvit
from fusedvit.bench.timing import gpu_launches, peak_mib, synchronisations
from fusedvit.bench.towers import cast_parameters_
from fusedvit.checks import fallback
from fusedvit.model import ops
from fusedvit.tolerance import Comparison, compare, summarize
from tests.support.encoding import Encoder
from tests.support.towers import (
    KINDS,
    Call,
    Grid,
    assert_bitwise,
    assert_different,
    assert_rule,
    copy_of,
    outputs_of,
    prompt,
    ran_fused,
    ran_original,
    random_grid,
    tiny_model,
    vision_tower,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_tf32")]

STRICT = fusedvit.FuseConfig(strict=True, graphs=False)
LEAST, MOST = 1025, 1088  # patch tokens: one budget, hence one set of kernels to compile
QWEN3_VL_8B = {
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
QWEN3_VL_4B = QWEN3_VL_8B | {"hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560}
WIDTHS = {"8B": QWEN3_VL_8B, "4B": QWEN3_VL_4B}
MASSIVE = {7: 200.0, 130: -200.0, 600: 150.0, 1021: -180.0}  # channels of the residual stream


@functools.cache
def weights_of(width: str, massive: bool = False) -> Any:
    """An fp32 tower of 4 blocks on the CPU: the master that the tests copy."""
    if massive:
        tower = copy_of(weights_of(width))
        for channel, value in MASSIVE.items():
            tower.patch_embed.proj.bias[channel] = value
        return tower
    return vision_tower(depth=4, deepstack_visual_indexes=[1, 2], **WIDTHS[width])


def tower_on_gpu(width: str = "8B", dtype: torch.dtype = torch.bfloat16, massive: bool = False) -> Any:
    return copy_of(weights_of(width, massive), dtype).cuda()


def empty_tower(depth: int, deepstack: list[int]) -> Any:
    """A bf16 tower of the 8B's width made on the GPU, where its weights do not matter."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(depth=depth, deepstack_visual_indexes=deepstack, **QWEN3_VL_8B)
    with torch.device("cuda"):
        tower = Qwen3VLVisionModel(config).eval().requires_grad_(False)
    cast_parameters_(tower, torch.bfloat16)
    return tower


@pytest.mark.parametrize("massive", [False, True], ids=["plain", "massive channels"])
@pytest.mark.parametrize(
    "width, dtype",
    [("8B", torch.bfloat16), ("8B", torch.float16), ("8B", torch.float32), ("4B", torch.bfloat16)],
    ids=str,
)
def test_tolerance_rule(
    width: str, dtype: torch.dtype, massive: bool, record_property: Callable[[str, object], None]
) -> None:
    """Against the same rounded weights in a wider type, over random grids: no further off than Hugging Face."""
    tower = tower_on_gpu(width, dtype, massive)
    wide = copy_of(tower, torch.float64 if dtype == torch.float32 else torch.float32)
    original = copy_of(tower)
    handle = fusedvit.fuse(tower, STRICT)
    verdicts: list[Comparison] = []
    failures: list[str] = []
    for seed in range(8):
        grid = random_grid(seed, LEAST, MOST)
        call = Call.of(tower, grid, seed)
        ours, pt = call.run(tower), call.run(original)
        ref = Call(call.pixels.to(next(wide.parameters()).dtype), call.grid).run(wide)
        assert ours.keys() == pt.keys() == ref.keys()
        for name in ref:
            verdict = compare(ours[name], ref[name], pt[name])
            verdicts.append(verdict)
            failures += [] if verdict.passed else [f"{grid} {name}: {verdict.reason}"]
    spread = summarize(verdicts)
    record_property("ratios", asdict(spread))  # plain values travel between the processes of pytest-xdist
    assert not failures, f"{spread}\n" + "\n".join(failures)
    ran_fused(handle, calls=8)


def test_smallest_and_odd_grids() -> None:
    """One merged token, one row, one column, frames of one token, many items."""
    tower = tower_on_gpu(dtype=torch.float32)
    wide, original = copy_of(tower, torch.float64), copy_of(tower)
    fusedvit.fuse(tower, STRICT)
    grids: list[Grid] = [[(1, 2, 2)], [(1, 2, 64)], [(1, 64, 2)], [(9, 2, 2)], [(1, 2, 2)] * 40, [(1, 4, 6), (0, 2, 2)]]
    for grid in grids:
        call = Call.of(tower, grid)
        ours, pt = call.run(tower), call.run(original)
        ref = Call(call.pixels.double(), call.grid).run(wide)
        assert_rule(ours, ref, pt, str(grid))


# cost


def test_launches() -> None:
    """5 a block, and some for metadata, patch embedding and mergers; Hugging Face has some 800 at this depth."""
    grid = random_grid(3, LEAST, MOST)
    counts = {}
    for depth, deepstack in ((4, [1, 2, 3]), (27, [8, 16, 24])):
        tower = empty_tower(depth, deepstack)
        call = Call.of(tower, grid)
        handle = fusedvit.fuse(tower, STRICT)
        counts[depth] = gpu_launches(lambda call=call, tower=tower: call.run(tower)).kernels
        assert handle.stats()["original"] == {}
    assert counts[27] <= 170, counts
    assert counts[27] - counts[4] <= 6 * 23, counts


def test_no_synchronisation_inside_the_encoder() -> None:
    tower = tower_on_gpu()
    encoder = Encoder(tower, ops.TRITON)
    grid = random_grid(4, LEAST, MOST)
    call = Call.of(tower, grid)
    expected = encoder.answer(grid, call.pixels)  # compiles
    buffers = encoder.buffers(grid)
    encoder.load(buffers, grid, call.pixels)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = encoder.encode(buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.pooled.equal(expected["pooler_output"])


@pytest.mark.parametrize("watch_data", [True, False])
@pytest.mark.parametrize("where", ["grid on the GPU", "grid on the CPU", "grid as a list"])
def test_at_most_one_synchronisation_a_call(where: str, watch_data: bool) -> None:
    tower = tower_on_gpu()
    call = Call.of(tower, random_grid(4, LEAST, MOST))
    grids = {"grid on the GPU": call.grid, "grid on the CPU": call.grid.cpu(), "grid as a list": call.grid.tolist()}
    grid = grids[where]
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True, graphs=False, watch_data=watch_data))
    with torch.no_grad():
        for _ in range(2):
            tower(call.pixels, grid_thw=grid)
        waits = synchronisations(lambda: tower(call.pixels, grid_thw=grid))
    assert len(waits) <= (1 if watch_data or where == "grid on the GPU" else 0), waits


def test_the_original_synchronises_often() -> None:
    """The guard of the tests above: the debug mode sees what it should."""
    tower = tower_on_gpu()
    call = Call.of(tower, random_grid(4, LEAST, MOST))
    call.run(tower)
    assert len(synchronisations(lambda: call.run(tower))) >= tower.config.depth


def test_peak_memory() -> None:
    tower = tower_on_gpu()
    call = Call.of(tower, [(1, 32, 32)])
    device = torch.device("cuda")
    original = peak_mib(lambda: call.run(tower), device)
    fusedvit.fuse(tower, STRICT)
    fused = peak_mib(lambda: call.run(tower), device)
    assert fused <= 1.1 * original, f"{fused:.1f} MiB, the original {original:.1f} MiB"


# bits


def test_run_to_run_the_same_bits() -> None:
    tower = tower_on_gpu()
    fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, random_grid(5, LEAST, MOST))
    first = call.run(tower)
    for _ in range(20):
        assert_bitwise(call.run(tower), first)


def test_garbage_in_free_memory() -> None:
    """Memory that the allocator hands out holds NaN: nothing unwritten is read."""
    tower = tower_on_gpu()
    fusedvit.fuse(tower, STRICT)
    calls = [Call.of(tower, random_grid(seed, LEAST, MOST), seed) for seed in range(6)]
    expected = [call.run(tower) for call in calls]
    for call, answer in zip(calls, expected, strict=True):
        for size in (2**12, 2**18, 2**22, 2**25):
            garbage = [torch.full((size,), float("nan"), device="cuda") for _ in range(4)]
            del garbage
        assert_bitwise(call.run(tower), answer)


def test_nan_stays_in_its_item() -> None:
    tower = tower_on_gpu()
    fusedvit.fuse(tower, STRICT)
    grid: Grid = [(1, 14, 10), (2, 6, 30), (1, 10, 18)]  # frames end inside tiles
    call = Call.of(tower, grid)
    clean = call.run(tower)
    ends = [0, *torch.tensor([t * h * w for t, h, w in grid]).cumsum(0).tolist()]
    for bad in range(3):
        pixels = call.pixels.clone()
        pixels[ends[bad] + 5] = float("nan")
        dirty = Call(pixels, call.grid).run(tower)
        for name, tensor in dirty.items():
            unit = 1 if name == "last_hidden_state" else 4
            for i in range(3):
                rows = slice(ends[i] // unit, ends[i + 1] // unit)
                assert tensor[rows].equal(clean[name][rows]) == (i != bad), f"{name} of item {i}, NaN in {bad}"


def test_threads_and_streams() -> None:
    tower = tower_on_gpu()
    handle = fusedvit.fuse(tower, STRICT)
    calls = [Call.of(tower, random_grid(seed, LEAST, MOST), seed) for seed in range(6)]
    expected = [call.run(tower) for call in calls]
    torch.cuda.synchronize()

    def work(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(18):
                k = (i + thread) % len(calls)
                assert_bitwise(calls[k].run(tower), expected[k])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    ran_fused(handle, calls=6 + 4 * 18)


# inputs and weights


def test_inputs_from_elsewhere() -> None:
    """Pixels and grids on the CPU, lists, small integers, other dtypes, misaligned memory: the same bits."""
    tower = tower_on_gpu()
    fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, random_grid(6, LEAST, MOST))
    expected = call.run(tower)
    pixels, grid = call.pixels, call.grid
    shifted = torch.cat([pixels.new_zeros(3), pixels.flatten()])[3:].view(pixels.shape)
    wider = torch.cat([pixels, pixels[:, :1]], dim=1)[:, :-1]
    every_second = pixels.repeat_interleave(2, dim=1)[:, ::2]
    variants: list[tuple[Any, Any]] = [
        (pixels.cpu(), grid),
        (pixels, grid.cpu()),
        (pixels.cpu(), grid.tolist()),
        (pixels, grid.int()),
        (pixels, grid.to(torch.uint8)),
        (pixels.float(), grid),
        (pixels.double(), grid),
        (shifted, grid),
        (wider, grid),
        (every_second, grid),
        (pixels.repeat_interleave(2, dim=0)[::2], grid),
    ]
    with torch.no_grad():
        for p, g in variants:
            assert_bitwise(outputs_of(tower(p, grid_thw=g)), expected)


def test_bad_input_on_the_gpu() -> None:
    tower = tower_on_gpu()
    fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, [(1, 24, 24)])
    expected = call.run(tower)
    with torch.no_grad():
        for grid, message in (([[1, 24, 22]], "needs 528 patch rows"), ([[1, 23, 24]], r"grid_thw\[0\] needs h")):
            with pytest.raises(ValueError, match=message):
                tower(call.pixels, grid_thw=torch.tensor(grid, device="cuda"))
    assert_bitwise(call.run(tower), expected)


@pytest.mark.parametrize("grid_device", ["cuda", "cpu"])
def test_writes_through_data_are_noticed(grid_device: str) -> None:
    tower = tower_on_gpu()
    handle = fusedvit.fuse(tower, STRICT)
    call = Call.of(tower, random_grid(7, LEAST, MOST))
    call = Call(call.pixels, call.grid.to(grid_device))
    before = call.run(tower)
    for name in ("norm1", "norm2"):
        getattr(tower.blocks[2], name).weight.data.mul_(1.5)
    ours = call.run(tower)
    assert_different(ours, before)
    assert handle.stats()["refreshes"] == 2
    fresh = fusedvit.unfuse(copy_of(tower))
    fusedvit.fuse(fresh, STRICT)
    assert_bitwise(call.run(fresh), ours)


def test_moved_to_the_cpu_and_back() -> None:
    tower = tower_on_gpu(dtype=torch.float32)
    handle = fusedvit.fuse(tower, STRICT)
    grid = [(1, 6, 8)]
    expected = Call.of(tower, grid).run(tower)
    tower.cpu()
    on_cpu = Call.of(tower, grid).run(tower)
    tower.cuda()
    assert_bitwise(Call.of(tower, grid).run(tower), expected)
    for name, t in on_cpu.items():
        torch.testing.assert_close(t, expected[name].cpu(), rtol=1e-3, atol=1e-3)
    ran_fused(handle, calls=3)


def test_what_kernels_do_not_take() -> None:
    call = Call.of(tower_on_gpu(), [(1, 6, 8)])
    doubles = tower_on_gpu(dtype=torch.float64)
    handle = fusedvit.fuse(doubles, fusedvit.FuseConfig(graphs=False, compile="now"))
    Call(call.pixels.double(), call.grid).run(doubles)
    ran_original(handle, fallback.UNSUPPORTED_DTYPE)
    tower = tower_on_gpu(dtype=torch.float32)
    handle = fusedvit.fuse(tower, fusedvit.FuseConfig(graphs=False, compile="now"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        call.run(tower)
    ran_original(handle, fallback.AUTOCAST)


@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind: str) -> None:
    """fp32: greedy tokens of a tiny model are the same, fused and not."""
    model = tiny_model(kind).cuda()
    inputs = {name: t.cuda() for name, t in prompt(model.model.visual, [(1, 4, 6)], [(3, 4, 6)]).items()}
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    handle = fusedvit.fuse(model, STRICT)
    assert model.generate(**inputs, max_new_tokens=6, do_sample=False).equal(expected)
    ran_fused(handle, calls=2)
