"""What a fused tower answers: every field that Hugging Face fills, over grids, dtypes and memory layouts."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch

import fusedvit
from tests.support.towers import (
    GRIDS,
    KINDS,
    Call,
    assert_bitwise,
    assert_same,
    copy_of,
    fused_and_original,
    fused_tower,
    outputs_of,
    patches_of,
    pixels_for,
    ran_fused,
    ran_original,
    tiny_tower,
    vision_tower,
)

STRICT = fusedvit.FuseConfig(strict=True)


@pytest.mark.parametrize(
    "vision",
    [
        *({"hidden_size": 2 * size, "depth": 2, "deepstack_visual_indexes": [1]} for size in (64, 72, 80, 128)),
        {"depth": 1, "deepstack_visual_indexes": []},
        {"depth": 4, "deepstack_visual_indexes": [3, 1]},  # not in the order of the blocks
        {"spatial_merge_size": 1},
        {"spatial_merge_size": 4},
        {"temporal_patch_size": 1, "in_channels": 1, "patch_size": 5},  # rows of 25 values
        {"hidden_act": "gelu"},
        {"hidden_act": "quick_gelu"},
        *({"hidden_act": name} for name in ("gelu_new", "gelu_fast", "gelu_accurate")),  # other names of the tanh GELU
        {"num_position_embeddings": 1},
    ],
    ids=str,
)
def test_other_numbers(vision: dict[str, Any]) -> None:
    tower, _, call, original = fused_and_original(vision_tower(**vision), [(1, 4, 8), (2, 8, 4)], STRICT)
    expected = call.run(original)
    assert_same(call.run(tower), expected)


@pytest.mark.parametrize("out", [40, 41, 42])
def test_outputs_are_contiguous(out: int) -> None:
    """As Hugging Face's are, so that `.view` works on them; 41 and 42 floats are no multiple of 16 bytes."""
    tower, _, call = fused_tower(vision_tower(out_hidden_size=out), GRIDS["images"], STRICT)
    assert [name for name, t in call.run(tower).items() if not t.is_contiguous()] == []


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_return_dict(kind: str) -> None:
    tower, _, call, original = fused_and_original(tiny_tower(kind), GRIDS["images"], STRICT)
    with torch.no_grad():
        for value in (False, True, None):
            ours, ref = (m(call.pixels, call.grid, return_dict=value) for m in (tower, original))
            assert type(ours) is type(ref)
        ours, ref = (m(call.pixels, grid_thw=call.grid, return_dict=False) for m in (tower, original))
    assert len(ours) == len(ref)
    for got, expected in zip(ours, ref, strict=True):
        assert type(got) is type(expected)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_return_dict_of_the_config() -> None:
    tower = tiny_tower()
    call = Call.of(tower, GRIDS["smallest"])
    tower.config.return_dict = False
    fusedvit.fuse(tower, STRICT)
    with torch.no_grad():
        assert isinstance(tower(call.pixels, call.grid), tuple)
        assert not isinstance(tower(call.pixels, call.grid, return_dict=True), tuple)


def test_by_position_and_by_name() -> None:
    tower, _, call = fused_tower(grid=GRIDS["images"], config=STRICT)
    with torch.no_grad():
        first = outputs_of(tower(call.pixels, call.grid))
        assert_bitwise(outputs_of(tower(call.pixels, grid_thw=call.grid)), first)
        assert_bitwise(outputs_of(tower(hidden_states=call.pixels, grid_thw=call.grid)), first)
        assert_bitwise(outputs_of(tower(grid_thw=call.grid, hidden_states=call.pixels)), first)


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
GRID_VARIANTS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{str(dtype): lambda grid, dtype=dtype: grid.to(dtype) for dtype in INTEGERS},
    "list of lists": torch.Tensor.tolist,
    "list of tuples": lambda grid: [tuple(row) for row in grid.tolist()],
    "tuple of tuples": lambda grid: tuple(tuple(row) for row in grid.tolist()),
    "columns first in memory": lambda grid: grid.t().contiguous().t(),
    "every second row": lambda grid: grid.repeat_interleave(2, dim=0)[::2],
}


@pytest.mark.parametrize("variant", GRID_VARIANTS.values(), ids=GRID_VARIANTS)
def test_grid_variants(variant: Callable[[torch.Tensor], Any]) -> None:
    tower, _, call = fused_tower(config=STRICT)
    expected = call.run(tower)
    with torch.no_grad():
        assert_bitwise(outputs_of(tower(call.pixels, grid_thw=variant(call.grid))), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_pixels_of_another_dtype_are_cast(dtype: torch.dtype) -> None:
    tower = tiny_tower()
    original = copy_of(tower)
    fusedvit.fuse(tower, STRICT)
    call = Call(pixels_for(tower, GRIDS["mix"], dtype=dtype), torch.tensor(GRIDS["mix"]))
    assert_same(call.run(tower), call.run(original))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "columns first": lambda x: x.t().contiguous().t(),
    "offset by one": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),  # 4 bytes into its storage
    "an odd pitch": lambda x: torch.cat([x, x[:, :1]], dim=1)[:, : x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pixels_of_another_layout(layout: str) -> None:
    tower, _, _, original = fused_and_original(config=STRICT)
    pixels, grid = pixels_for(tower, GRIDS["mix"]), torch.tensor(GRIDS["mix"])
    laid = LAYOUTS[layout](pixels)
    before = laid.clone()
    ours = Call(laid, grid).run(tower)
    assert_bitwise(ours, Call(laid.contiguous(), grid).run(tower))
    assert_same(ours, Call(laid.contiguous(), grid).run(original))
    assert laid.equal(before)


def test_inputs_are_not_changed() -> None:
    tower, _, call = fused_tower(config=STRICT)
    pixels, grid = call.pixels.clone(), call.grid.clone()
    call.run(tower)
    assert call.pixels.equal(pixels) and call.grid.equal(grid)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch(kind: str) -> None:
    """Hugging Face raises here; serving engines call with nothing on idle ranks."""
    tower = tiny_tower(kind)
    some = Call.of(tower, GRIDS["smallest"]).run(tower)
    handle = fusedvit.fuse(tower, STRICT)
    for grid in (torch.empty(0, 3, dtype=torch.int64), []):
        with torch.no_grad():
            empty = outputs_of(tower(pixels_for(tower, []), grid_thw=grid))
        assert {name: (t.shape, t.dtype) for name, t in empty.items()} == {
            name: (torch.Size([0, t.shape[1]]), t.dtype) for name, t in some.items()
        }
    ran_fused(handle, calls=2)


def test_item_without_frames() -> None:
    tower, _, _, original = fused_and_original(config=STRICT)
    with_none = Call.of(tower, [(1, 4, 6), (0, 4, 4), (2, 2, 4)])
    assert_same(with_none.run(tower), with_none.run(original))
    assert_bitwise(with_none.run(tower), Call(with_none.pixels, with_none.grid[[0, 2]]).run(tower))
    alone = Call.of(tower, [(0, 4, 4)]).run(tower)
    assert {t.shape[0] for t in alone.values()} == {0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_bad_pixels_stay_in_their_item(bad: int, value: float) -> None:
    tower = tiny_tower()
    fusedvit.fuse(tower, STRICT)
    grid = [(1, 4, 6), (2, 6, 4), (1, 2, 14)]
    call = Call.of(tower, grid)
    clean = call.run(tower)
    ends = [0, *torch.tensor([t * h * w for t, h, w in grid]).cumsum(0).tolist()]
    pixels = call.pixels.clone()
    pixels[ends[bad] + 1, 3] = value
    dirty = Call(pixels, call.grid).run(tower)
    assert not dirty["pooler_output"].equal(clean["pooler_output"])
    for name, tensor in dirty.items():
        unit = 1 if name == "last_hidden_state" else 4
        for other in {0, 1, 2} - {bad}:
            rows = slice(ends[other] // unit, ends[other + 1] // unit)
            assert tensor[rows].equal(clean[name][rows]), f"{name} of item {other}"


def test_frames_are_independent() -> None:
    """A frame of a video and an image of its size are one and the same; attention never crosses frames."""
    tower = tiny_tower()
    fusedvit.fuse(tower, STRICT)
    video = Call.of(tower, [(3, 4, 6)])
    frames = Call(video.pixels, torch.tensor([[1, 4, 6]] * 3))
    assert_bitwise(frames.run(tower), video.run(tower))


def test_held_outputs_never_change() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower, STRICT)
    grids = list(GRIDS.values())
    calls = [Call.of(tower, grids[i % len(grids)], seed=i) for i in range(60)]
    held = [call.run(tower) for call in calls]
    then = [{name: t.clone() for name, t in answer.items()} for answer in held]
    for call, answer, copied in zip(calls, held, then, strict=True):
        assert_bitwise(call.run(tower), copied)  # run to run the same bits
        assert_bitwise(answer, copied)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for answer in held for t in answer.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "two outputs share memory"
    ran_fused(handle, calls=2 * len(calls))


def test_stats_count_items_and_tokens() -> None:
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    for grid in (GRIDS["mix"], GRIDS["video"], [(0, 2, 2), (1, 2, 2)]):
        Call.of(tower, grid).run(tower)
    stats = handle.stats()
    assert (stats["calls"], stats["fused"], stats["items"]) == (3, 3, 7)
    assert stats["patch_tokens"] == patches_of(GRIDS["mix"]) + patches_of(GRIDS["video"]) + 4
    assert stats["refreshes"] == 1
    stats["original"]["mine"] = 1
    ran_fused(handle, calls=3)


def test_threads() -> None:
    """Calls from several threads at once, the weights not yet prepared."""
    tower = tiny_tower()
    calls = [Call.of(tower, grid, seed=i) for i, grid in enumerate(GRIDS.values())]
    other = copy_of(tower)
    fusedvit.fuse(other, STRICT)
    expected = [call.run(other) for call in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(10):
                fresh = fusedvit.unfuse(copy_of(tower))
                handle = fusedvit.fuse(fresh, STRICT)
                got = list(pool.map(lambda call, fresh=fresh: call.run(fresh), calls * 2))
                for i, answer in enumerate(got):
                    assert_bitwise(answer, expected[i % len(calls)])
                ran_fused(handle, calls=len(got))
    finally:
        sys.setswitchinterval(interval)


def test_unknown_reason_helper_is_strict() -> None:
    """The guard of `ran_original` and `ran_fused`: they fail where they should."""
    tower = tiny_tower()
    handle = fusedvit.fuse(tower)
    Call.of(tower, GRIDS["smallest"]).run(tower)
    ran_fused(handle, calls=1)
    for check in (lambda: ran_original(handle, "hooks"), lambda: ran_fused(handle, calls=2)):
        with pytest.raises(AssertionError):
            check()
