"""Bad input: a typed error that says which item, what was expected and what came; nothing computed before it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedvit
from fusedvit.model import ops
from fusedvit.model.items import Item
from fusedvit.runtime.inputs import check_grid, check_items, check_pixels
from tests.support.towers import GRIDS, Call, patches_of, pixels_for, tiny_tower

SPEC = fusedvit.VisionSpec(1, 8, 2, 4, 16, 8, patch_size=4)  # rows of 96
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
NOT_INTEGERS = [*FLOATS, torch.complex64, torch.bool]


# items


def test_item_counts() -> None:
    item = Item(3, 4, 6)
    assert item.tokens == 72
    assert [item.tiles(m) for m in (1, 16, 23, 24, 128)] == [72, 6, 6, 3, 3]
    assert Item(0, 4, 6).tokens == Item(0, 4, 6).tiles(64) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)), max_size=9), st.integers(1, 3))
def test_good_grids_pass(grid: list[tuple[int, int, int]], merge: int) -> None:
    rows = [[t, h * merge, w * merge] for t, h, w in grid]
    items = check_items(check_grid(rows).tolist(), sum(t * h * w for t, h, w in rows), merge)
    assert items == [Item(*row) for row in rows]


@given(
    st.lists(st.tuples(st.integers(-2, 5), st.integers(-2, 7), st.integers(-2, 7)), min_size=1, max_size=6),
    st.integers(0, 200),
)
def test_any_grid_passes_or_names_what_is_wrong(grid: list[tuple[int, int, int]], patches: int) -> None:
    rows = [list(row) for row in grid]
    bad = next((i for i, (t, h, w) in enumerate(grid) if t < 0 or h < 1 or w < 1 or h % 2 or w % 2), None)
    need = sum(t * h * w for t, h, w in grid)
    if bad is not None:
        with pytest.raises(ValueError, match=rf"^fusedvit: grid_thw\[{bad}\] needs [thw] .* got -?\d+$"):
            check_items(rows, patches, 2)
    elif need != patches:
        with pytest.raises(ValueError, match=f"needs {need} patch rows, pixel_values has {patches}$"):
            check_items(rows, patches, 2)
    else:
        assert len(check_items(rows, patches, 2)) == len(grid)


@pytest.mark.parametrize(
    "row, message",
    [
        ((-1, 2, 2), r"grid_thw\[1\] needs t >= 0, got -1"),
        ((1, 0, 2), r"grid_thw\[1\] needs h >= 1, got 0"),
        ((1, 2, -4), r"grid_thw\[1\] needs w >= 1, got -4"),
        ((1, 3, 2), r"grid_thw\[1\] needs h to be a multiple of the merge size 2, got 3"),
        ((1, 2, 5), r"grid_thw\[1\] needs w to be a multiple of the merge size 2, got 5"),
        ((0, 3, 2), r"grid_thw\[1\] needs h to be a multiple"),  # without frames, but no grid all the same
    ],
)
def test_messages_of_items(row: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_items([[1, 2, 2], list(row)], 8, 2)


# grids


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_grids_pass(dtype: torch.dtype) -> None:
    grid = torch.tensor([[1, 2, 4]], dtype=dtype)
    assert check_grid(grid) is grid


@pytest.mark.parametrize("dtype", NOT_INTEGERS, ids=str)
def test_other_grids_do_not(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"grid_thw must be of an integer dtype, got {dtype}"):
        check_grid(torch.ones(1, 3).to(dtype))


@given(st.lists(st.integers(0, 4), max_size=3).filter(lambda shape: len(shape) != 2 or shape[1] != 3))
def test_grids_of_another_shape(shape: list[int]) -> None:
    with pytest.raises(ValueError, match=r"grid_thw must have shape \(n, 3\), got \("):
        check_grid(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    "grid, error, message",
    [
        (None, TypeError, "got NoneType"),
        ("1 2 2", TypeError, "got str"),
        (b"122", TypeError, "got bytes"),
        (5, TypeError, "got int"),
        ({1: 2}, TypeError, "got dict"),
        (
            [1, 2, 2],
            TypeError,
            r"grid_thw\[0\] must be a list or tuple of three ints, \(t, h, w\), got an int: a grid is",
        ),
        ([torch.tensor([1, 4, 4])], TypeError, r"grid_thw\[0\] must be .*, got a Tensor: stack tensors into one"),
        ([[1, 2, 2], [1, 2]], ValueError, r"grid_thw\[1\] must be .* \(t, h, w\), got 2 values"),
        ([[1, 2, 2, 2]], ValueError, r"grid_thw\[0\] must be .* \(t, h, w\), got 4 values"),
        ([[1.0, 2, 2]], TypeError, r"grid_thw\[0\] must hold ints, got \['float', 'int', 'int'\]"),
        ([["1", 2, 2]], TypeError, "must hold ints"),
        ([[True, 2, 2]], TypeError, "must hold ints"),
        (["122"], TypeError, r"grid_thw\[0\] must be .*, got a str$"),
        (torch.tensor([1, 2, 2]), ValueError, r"shape \(n, 3\), got \(3,\): a grid is .* a list of grids"),
    ],
    ids=repr,
)
def test_grids_that_are_none(grid: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^fusedvit: .*{message}"):
        check_grid(grid)


def test_lists_pass() -> None:
    for grid in ([[1, 2, 4]], [(1, 2, 4)], ((1, 2, 4),)):
        assert check_grid(grid).tolist() == [[1, 2, 4]]
    assert check_grid([]).shape == (0, 3)


# pixels


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_pixels_pass(dtype: torch.dtype) -> None:
    check_pixels(torch.zeros(4, 96, dtype=dtype), SPEC)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool, torch.complex64], ids=str)
def test_other_pixels_do_not(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"pixel_values must be normalised floats, got {dtype}"):
        check_pixels(torch.zeros(4, 96, dtype=dtype), SPEC)


@pytest.mark.parametrize("pixels", [None, [[0.0] * 96], 3.0], ids=lambda p: type(p).__name__)
def test_pixels_that_are_no_tensor(pixels: Any) -> None:
    with pytest.raises(TypeError, match=f"pixel_values must be a tensor, got {type(pixels).__name__}"):
        check_pixels(pixels, SPEC)


@pytest.mark.parametrize("shape", [(1, 4, 96), (384,), (4, 3, 2, 4, 4), (2, 2, 96), (4, 3, 32)], ids=str)
def test_pixels_of_another_rank_are_views_of_patches(shape: tuple[int, ...]) -> None:
    """As for Hugging Face, whose patch embedding views them so."""
    pixels = torch.randn(shape)
    assert torch.equal(check_pixels(pixels, SPEC), pixels.reshape(4, 96))
    with pytest.raises(ValueError, match=r"pixel_values must have shape \(patches, 96\), got \("):
        check_pixels(pixels, dataclasses.replace(SPEC, rows_only=True))


@pytest.mark.parametrize("shape", [(), (95,), (4, 3, 31), (0,), (1, 0, 96), (2, 3, 4, 5)], ids=str)
def test_pixels_of_another_rank_that_are_not(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"pixel_values must have shape \(patches, 96\), or be a view of .*, got \("):
        check_pixels(torch.zeros(shape), SPEC)


def test_strided_pixels_are_viewed_or_refused_as_by_hugging_face() -> None:
    viewable, not_viewable = torch.randn(2, 4, 4, 3, 96)[:, 0, 0], torch.randn(2, 3, 96).transpose(0, 1)
    assert torch.equal(check_pixels(viewable[:, 0][None], SPEC), viewable[:, 0])
    with pytest.raises(ValueError, match="be a view of"):
        check_pixels(not_viewable, SPEC)


@pytest.mark.parametrize("width", [0, 95, 97, 192])
def test_pixels_of_another_width(width: int) -> None:
    """Hugging Face takes them if only the total fits, and answers something."""
    with pytest.raises(ValueError, match=rf"rows must be 96 wide \(3 x 2 x 4 x 4\), got {width}$"):
        check_pixels(torch.zeros(4, width), SPEC)


# the same through a fused tower: nothing is launched


class _Launched:
    """Notes PyTorch's operations. No dispatch mode: a tower under one runs its original code."""

    def __enter__(self) -> "_Launched":
        self._profiler = torch.autograd.profiler.profile()
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(None, None, None)
        self.seen = [event.name for event in self._profiler.function_events]


@pytest.fixture(scope="module")
def fused() -> Iterator[Any]:
    tower = tiny_tower()
    fusedvit.fuse(tower, fusedvit.FuseConfig(strict=True))
    Call.of(tower, GRIDS["smallest"]).run(tower)
    yield tower


GOOD = Call(torch.zeros(36, 96), torch.tensor([[1, 4, 6], [1, 2, 6]]))
BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "too few rows": (GOOD.pixels[:-1], GOOD.grid, ValueError, "needs 36 patch rows, pixel_values has 35"),
    "too many rows": (torch.zeros(37, 96), GOOD.grid, ValueError, "needs 36 patch rows, pixel_values has 37"),
    "odd h": (GOOD.pixels, torch.tensor([[1, 3, 12]]), ValueError, r"grid_thw\[0\] needs h .* got 3"),
    "odd w": (GOOD.pixels, [[1, 4, 6], [1, 4, 3]], ValueError, r"grid_thw\[1\] needs w .* got 3"),
    "h of 0": (GOOD.pixels, [[1, 0, 6]], ValueError, "needs h >= 1, got 0"),
    "negative t": (GOOD.pixels, [[-1, 2, 6]], ValueError, "needs t >= 0, got -1"),
    "a float grid": (GOOD.pixels, GOOD.grid.float(), ValueError, "integer dtype, got torch.float32"),
    "a flat grid": (GOOD.pixels, GOOD.grid.flatten(), ValueError, r"shape \(n, 3\), got \(6,\)"),
    "no grid": (GOOD.pixels, None, TypeError, "got NoneType"),
    "integer pixels": (GOOD.pixels.to(torch.uint8), GOOD.grid, TypeError, "got torch.uint8"),
    "another width": (torch.zeros(72, 48), GOOD.grid, ValueError, "96 wide .* got 48"),
    "an image": (torch.zeros(1, 3, 24, 16), GOOD.grid, ValueError, "needs 36 patch rows, pixel_values has 12"),
    "no pixels": (None, GOOD.grid, TypeError, "got NoneType"),
    "nothing but a grid": (GOOD.pixels[:0], GOOD.grid, ValueError, "needs 36 patch rows, pixel_values has 0"),
    "nothing but pixels": (GOOD.pixels, [], ValueError, "needs 0 patch rows, pixel_values has 36"),
}


@pytest.mark.parametrize("pixels, grid, error, message", BAD.values(), ids=BAD)
def test_fused_tower_refuses(
    pixels: Any, grid: Any, error: type[Exception], message: str, fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("the encoder was reached")

    table = {f.name: launched for f in dataclasses.fields(ops.Ops) if f.name not in ("name", "fingerprint")}
    monkeypatch.setattr(ops, "TORCH", dataclasses.replace(ops.TORCH, **table))
    before = fusedvit.fuse(fused).stats()
    with pytest.raises(error, match=message), torch.no_grad(), _Launched() as mode:
        fused(pixels, grid_thw=grid)
    assert [name for name in mode.seen if "mm" in name or "conv" in name] == []
    after = fusedvit.fuse(fused).stats()
    assert after == before | {name: before[name] + 1 for name in ("calls", "raised")}


def test_the_spy_sees_a_good_call(fused: Any) -> None:
    with torch.no_grad(), _Launched() as mode:
        fused(GOOD.pixels, grid_thw=GOOD.grid)
    assert any("mm" in name for name in mode.seen)


def test_a_refused_call_leaves_the_tower_usable(fused: Any) -> None:
    call = Call.of(fused, GRIDS["mix"])
    expected = call.run(fused)["pooler_output"]
    with pytest.raises(ValueError, match="patch rows"):
        fused(call.pixels[1:], grid_thw=call.grid)
    assert call.run(fused)["pooler_output"].equal(expected)


def test_messages_never_echo_content(fused: Any) -> None:
    """An error says shapes, dtypes and counts, not what is in a tensor or list."""
    secret = 123456789
    for pixels, grid in ((torch.full((3, 96), float(secret)), GOOD.grid), (GOOD.pixels, [["x" * 10_000, 2, 2]])):
        with pytest.raises((TypeError, ValueError), match="grid_thw") as info:
            fused(pixels, grid_thw=grid)
        assert str(secret) not in str(info.value) and len(str(info.value)) < 300


@settings(max_examples=40, deadline=None)
@given(
    grid=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 3)), max_size=4),
    kind=st.sampled_from([*INTEGERS, list]),
    dtype=st.sampled_from(FLOATS),
    column_stride=st.integers(1, 2),
)
def test_every_good_input_is_answered(fused: Any, grid: Any, kind: Any, dtype: Any, column_stride: int) -> None:
    rows = [(t, 2 * h, 2 * w) for t, h, w in grid]
    pixels = pixels_for(fused, rows, dtype=dtype)
    pixels = pixels.repeat_interleave(column_stride, dim=1)[:, ::column_stride]
    table = rows if kind is list else torch.tensor(rows, dtype=kind).reshape(-1, 3)
    with torch.no_grad():
        answer = fused(pixels, grid_thw=table)
    assert answer.pooler_output.shape == (patches_of(rows) // 4, 40)
    assert bool(answer.pooler_output.isfinite().all())
