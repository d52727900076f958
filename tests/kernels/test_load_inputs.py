"""A grid loaded unread: what the host's own check accepts is loaded, anything else becomes no items."""

import random as pseudo_random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedvit.kernels import load_inputs as kernels
from fusedvit.kernels.load_inputs import BYTES, GRID_DTYPES, KINDS, PIXEL_DTYPES, can_load, load_inputs
from fusedvit.kernels.reference import load_inputs as reference
from fusedvit.kernels.reference.load_inputs import load_inputs as load_inputs_ref
from fusedvit.runtime.inputs import check_items

OPS = {"kernel": load_inputs, "reference": load_inputs_ref}
ROOM, FRAMES = 6, 9
GOOD = [[1, 4, 6], [3, 2, 2], [1, 8, 2]]
ROWS = 52
HUGE = (2**31 - 2, 2**31, 2**32, 2**40, 2**62, 2**63 - 2, -1, -2, -(2**31), -(2**63))


def table(device: torch.device) -> torch.Tensor:
    return torch.full((ROOM, 3), 2**30, dtype=torch.int32, device=device)


def passes(rows: list[list[int]], tokens: int) -> bool:
    """By the host's check; the device refuses items without frames as well, and too many frames."""
    try:
        items = check_items(rows, tokens, 2)
    except ValueError:
        return False
    return all(item.t for item in items) and sum(item.t for item in items) <= FRAMES


def check(op: Callable[..., torch.Tensor], grid: torch.Tensor, tokens: int) -> bool:
    out = op(grid, tokens, FRAMES, 2, table(grid.device))
    rows = grid.tolist()
    expected = rows if passes(rows, tokens) else []
    assert out.tolist() == expected + [[0, 0, 0]] * (ROOM - len(expected)), (rows, tokens)
    return bool(expected)


@pytest.mark.parametrize("dtype", GRID_DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_grids_of_any_layout(op: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
    grid = torch.tensor(GOOD, dtype=dtype, device=device)
    strided = torch.full((2 * len(GOOD), 9), 7, dtype=dtype, device=device)[::2, 1::3].copy_(grid)
    odd = torch.full((10,), 7, dtype=dtype, device=device)[1:].view(3, 3).copy_(grid)
    for layout in (grid, strided, grid.T.contiguous().T, odd):
        assert check(op, layout, ROWS)
    assert check(op, torch.tensor([[1, 4, 2]], dtype=dtype, device=device).expand(ROOM, 3), 8 * ROOM)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_product_that_wraps_in_64_bits(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    """Of sides that are each within the call's rows: t h w = 2^64 + rows."""
    rows, grid = 2**30, [[685, 2**15 * 953, 2**15 * 26317]]
    out = op(torch.tensor(grid, device=device), rows, 1000, 2, table(device))
    assert not out.any(), out


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_what_is_no_grid_of_the_call_becomes_no_items(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    grid = torch.tensor(GOOD, device=device)
    for tokens in (0, 1, ROWS - 1, ROWS + 1, 2**31 - 1):
        assert not check(op, grid, tokens)
    for at in range(9):
        for value in (0, 3, *HUGE):
            bad = grid.clone()
            bad.view(-1)[at] = value
            assert check(op, bad, ROWS) == (value == 3 and at == 3)  # three frames, as they were
    assert not check(op, torch.tensor([[FRAMES + 1, 2, 2]], device=device), 4 * FRAMES + 4)
    assert not check(op, torch.tensor([[2**32, 2**32, 2]], device=device), 4), "a product of 0 in 64 bits"
    assert not check(op, torch.tensor([[1, 2**32 + 2, 2]], device=device), 4), "4 patches in 32 bits"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_padding_behind_the_items(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    grid, bad = torch.tensor(GOOD, device=device), torch.tensor([*GOOD, (0, 0, 0)], device=device)
    for tokens in (ROWS, ROWS + 9, 2**31 - 1):
        counts = torch.full((3, 4), 7, dtype=torch.int32, device=device)
        out = op(grid, tokens, FRAMES, 2, table(device), counts=counts, padded=True)
        assert torch.equal(out[: len(GOOD)], grid.int()) and not out[len(GOOD) :].any()
        assert counts[:, 0].tolist() == [ROWS, 0, 0]
        assert not op(bad, tokens, FRAMES, 2, table(device), padded=True).any(), "an image without patches"
    assert not op(grid, ROWS - 1, FRAMES, 2, table(device), padded=True).any()
    assert not op(grid, ROWS, sum(t for t, _, _ in GOOD) - 1, 2, table(device), padded=True).any()


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_grid(op: Callable[..., torch.Tensor], data: st.DataObject, device: torch.device) -> None:
    sides = st.one_of(st.integers(0, 8), st.sampled_from((2, 4)), st.sampled_from(HUGE))
    rows = data.draw(st.lists(st.tuples(sides, sides, sides), min_size=1, max_size=ROOM))
    total = sum(t * h * w for t, h, w in rows)
    tokens = data.draw(st.sampled_from((total % 2**31, 4, 16, 64)))
    check(op, torch.tensor(rows, device=device), tokens)


def test_good_grids_pass(device: torch.device) -> None:
    """The guard of the tests above: random good ones are not refused."""
    rng = pseudo_random.Random(0)
    for _ in range(20):
        rows = [[1, 2 * rng.randint(1, 30), 2 * rng.randint(1, 30)] for _ in range(rng.randint(1, ROOM))]
        assert check(load_inputs, torch.tensor(rows, device=device), sum(h * w for _, h, w in rows))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_room_for_thousands(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    """More items than one block of the kernel's."""
    grid = torch.tensor([[1, 2, 2]], device=device).repeat(2100, 1)
    out = op(grid, 8400, 2100, 2, torch.full((3000, 3), 7, dtype=torch.int32, device=device))
    assert torch.equal(out[:2100], grid.int()) and not out[2100:].any()
    for at in (0, 1023, 1024, 2099):
        bad = grid.clone()
        bad[at] = torch.tensor([1, 2, 3])
        assert not op(bad, 8402, 2100, 2, out).any() and not op(grid, 8400, 2099, 2, out).any()


@pytest.mark.parametrize("op", [load_inputs], ids=["kernel"])
def test_other_tables_are_refused(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    for grid in (torch.tensor(GOOD, dtype=torch.int16, device=device), torch.ones(ROOM + 1, 3, device=device).long()):
        with pytest.raises(AssertionError):
            op(grid, ROWS, FRAMES, 2, table(device))


@pytest.mark.parametrize("length", [1, 52, 700])
@pytest.mark.parametrize("width", [24, 1176])
@pytest.mark.parametrize("dtype", PIXEL_DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_pixels_are_copied_as_torch_copies_them(
    op: Callable[..., torch.Tensor], dtype: torch.dtype, width: int, length: int, device: torch.device
) -> None:
    """Bit by bit, in every pair of dtypes, infinities and what overflows among them; the rows after them stay."""
    grid = torch.tensor(GOOD, device=device)
    values = torch.randn(length, width, device=device) * 10.0 ** torch.randint(-9, 9, (length, width), device=device)
    values[0, :4] = torch.tensor([float("inf"), -0.0, 65520.0, 1e-8], device=device)
    pixels = values.to(dtype)
    assert can_load(pixels, device) and not can_load(pixels.double(), device) and not can_load(pixels[:, 1:], device)
    exact = PIXEL_DTYPES if device.type == "cuda" or op is load_inputs_ref else (torch.float32, torch.float16)
    for into in (torch.full((length + 3, width), 7, dtype=d, device=device) for d in exact if dtype in exact):
        want = into.clone()
        want[:length].copy_(pixels)
        out = op(grid, ROWS, FRAMES, 2, table(device), pixels, into)
        assert torch.equal(into.view(torch.uint8), want.view(torch.uint8)) and out[:3].tolist() == GOOD
        assert not op(grid, ROWS + 1, FRAMES, 2, table(device), pixels, into).any(), "no items, whatever the pixels"


@pytest.mark.parametrize("width, pitch", [(24, 24), (12, 24), (588, 1216), (1176, 1216), (768, 1536)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_bytes_are_centred_and_rows_have_a_pitch(
    op: Callable[..., torch.Tensor], dtype: torch.dtype, width: int, pitch: int, device: torch.device
) -> None:
    """Every byte exactly, in every dtype; what lies between and after the rows stays."""
    grid, length = torch.tensor(GOOD, device=device), 52
    pixels = (torch.arange(length * width, device=device) % 256).to(dtype).view(length, width)
    exact = PIXEL_DTYPES if device.type == "cuda" or op is load_inputs_ref else (torch.float32, torch.float16)
    for into in (torch.full((length + 3, pitch), 7, dtype=d, device=device) for d in exact):
        want, counts = into.clone(), torch.full((3, 4), 7, dtype=torch.int32, device=device)
        want[:length, :width] = ((pixels.double() - 128) / 128 if dtype == torch.uint8 else pixels).to(into.dtype)
        for kind in (*KINDS, *KINDS):
            op(grid, ROWS, FRAMES, 2, table(device), pixels, into[:, :width], counts, kind)
            assert torch.equal(into, want)
            assert counts[:, 0].tolist() == [ROWS * (i == kind) for i in KINDS] and (counts[:, 1:] == 7).all()
        op(grid, ROWS + 1, FRAMES, 2, table(device), pixels, into, counts, BYTES)
        assert not counts[:, 0].any(), "no rows where there are no items"


def test_pixels_that_are_left_to_torch(device: torch.device) -> None:
    pixels = torch.zeros(8, 48, device=device)
    assert can_load(pixels, device) and can_load(pixels[2:5], device)
    others = [pixels.T, pixels[::2], pixels.view(-1)[1:].narrow(0, 0, 96).view(2, 48), pixels.double(), pixels.int()]
    assert not any(can_load(other, device) for other in (*others, torch._neg_view(pixels)))
    assert not can_load(pixels, torch.device("meta"))


def positions_of(grids: list[tuple[int, int]], patches: int) -> torch.Tensor:
    """Of padded images of h x w patches: `[B, patches, 2]` int64."""
    out = torch.full((len(grids), patches, 2), -1, device="cpu")
    for image, (h, w) in zip(out, grids, strict=True):
        raster = torch.arange(h * w, device="cpu")
        image[: h * w] = torch.stack([raster % w, raster // w], 1)
    return out


def strided(positions: torch.Tensor) -> torch.Tensor:
    images, patches, _ = positions.shape
    room = torch.full((2 * images, 3 * patches, 5), 7, dtype=positions.dtype, device=positions.device)
    return room[::2, 1::3, 1::3].copy_(positions)


def assert_grids(positions: torch.Tensor, expected: list[list[int]], side: int = 64) -> None:
    for patch_grid in (kernels.patch_grid, reference.patch_grid):
        out = torch.full((len(positions), 3), 7, dtype=torch.int32, device=positions.device)
        assert patch_grid(positions, side, 2, out).tolist() == expected


@pytest.mark.parametrize("dtype", GRID_DTYPES, ids=str)
def test_padded_images_that_are_grids(dtype: torch.dtype, device: torch.device) -> None:
    """In less than a block and in several, without padding, up to the last position that there may be."""
    for grids, patches in (([(2, 2), (4, 6), (6, 4)], 24), ([(2, 64), (32, 34), (64, 32)], 2100)):
        positions = positions_of(grids, patches).to(device, dtype)
        for layout in (positions, strided(positions), positions.transpose(0, 2).contiguous().transpose(0, 2)):
            assert_grids(layout, [[1, h, w] for h, w in grids])
    assert_grids(positions_of([(2, 64), (64, 2)], 128).to(device, dtype), [[0, 0, 0]] * 2, side=63)
    assert_grids(positions[:, :0], [[0, 0, 0]] * 3)


@pytest.mark.parametrize("patches", (24, 1100))
@pytest.mark.parametrize("dtype", GRID_DTYPES, ids=str)
def test_padded_images_that_are_none(dtype: torch.dtype, patches: int, device: torch.device) -> None:
    """One position changed, anywhere, to anything: the image has no patches, and others keep theirs."""
    values = [value for value in (0, 1, 3, 4, 63, 64, *HUGE) if dtype == torch.int64 or -(2**31) <= value < 2**31]
    changes = [(at, axis, value) for at in (0, 5, 15, 16, patches - 1) for axis in (0, 1) for value in values]
    good = positions_of([(4, 4)] * len(changes), patches).to(device, dtype)
    bad = good.clone()
    for image, (at, axis, value) in zip(bad, changes, strict=True):
        image[at, axis] = value
    assert_grids(bad, [[1, 4, 4] if same else [0, 0, 0] for same in (bad == good).flatten(1).all(1).tolist()])
    for other in (good[:3].flip(1), good[:3, 1:], good[:3, :15], torch.full_like(good[:3], -1)):
        assert_grids(other, [[0, 0, 0]] * 3)
    assert_grids(positions_of([(24, 44)], 1056)[:, :1024].to(device, dtype), [[0, 0, 0]])  # cut off where a block ends


@pytest.mark.parametrize("dtype", PIXEL_DTYPES, ids=str)
def test_rows_of_padded_images(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter rounds to bfloat16 in another way")
    grids = [[1, 4, 6], [0, 0, 0], [1, 2, 2]]
    pixels = torch.rand(3, 26, 12, device=device).to(dtype)
    rows = [torch.full((78, 12), 7, dtype=torch.float32, device=device) for _ in range(2)]
    for load, out in zip((kernels.load_patches, reference.load_patches), rows, strict=True):
        load(pixels, torch.tensor(grids, dtype=torch.int32, device=device), 2, out)
    assert torch.equal(*rows) and (rows[0][28:] == 7).all() and not (rows[0][:28] == 7).any()
