"""Checks the caller's input before anything is launched."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from fusedvit.errors import EMPTY_ITEMS, ODD_POSITIONS, SPARSE, Reason
from fusedvit.kernels.load_inputs import PIXEL_DTYPES, POSITION_DTYPES
from fusedvit.model.items import Item
from fusedvit.model.ops import ops_for
from fusedvit.model.spec import VisionSpec

_TRIPLE, _TRIPLE_IN_WORDS = [int, int, int], "a list or tuple of three ints, (t, h, w)"
_LISTS = "a grid is a list of triples, [(1, 4, 4)], and calls= of warmup() a list of grids, [[(1, 4, 4)]]"
_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
Grid = torch.Tensor | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Inputs:
    """A call's input, checked as far as the host knows it.

    Attributes:
        pixels: `[tokens, …]` of any kind (`kernels.load_inputs.kind_of`), any float dtype, any device.
        grid: `[n, 3]` integers on the tower's device, if the host has yet to read them; else None.
        items: the items of the grid; None until the host has read it.
        padded: pixels are `[images, patches, patch_width]`, and `grid` holds positions `[images, patches, 2]`. After
            `without_padding`, pixels are the same number of rows with padding last, and a row of zeros in the grid
            marks an image whose positions are not row-major.
    """

    pixels: torch.Tensor
    grid: torch.Tensor | None
    items: list[Item] | None
    padded: bool = False

    @property
    def table(self) -> torch.Tensor:
        """The grid that the host has yet to read."""
        assert self.grid is not None, "this call's grid was on the host"
        return self.grid

    def with_rows(self, rows: list[list[int]], spec: VisionSpec) -> tuple[torch.Tensor, list[Item]] | Reason:
        """Pixels and items, given the grid's `rows` that the host has read, or why the original code must run.

        Raises:
            ValueError: see `check_items`.
        """
        if not self.padded:
            told = _items_or_reason(rows, self.pixels.shape[0], spec)
            return told if isinstance(told, Reason) else (self.pixels, told)
        odd = next((i for i, row in enumerate(rows) if not row[0]), None)
        if odd is not None:
            return Reason(ODD_POSITIONS, f"image {odd}")
        items = list(map(Item._make, rows))
        return self.pixels[: sum([item.tokens for item in items])], items


def check_inputs(
    pixel_values: torch.Tensor, grid_thw: Grid, spec: VisionSpec, parameter: torch.Tensor, marked: bool = False
) -> Inputs | Reason:
    """Checks a call's input, or returns why the original code must run; nothing is read back from a GPU.

    Args:
        grid_thw: for towers that take padded images, the positions of patches.
        parameter: a parameter of the tower.
        marked: the pixels came as `BytePixels`, so they may be bytes.

    Raises:
        TypeError, ValueError: see `check_pixels`, `check_grid` and `check_items`, or `check_padded`; nothing was
            launched.
    """
    if spec.padded:
        return check_padded(pixel_values, grid_thw, spec)
    if spec.rows_only and isinstance(pixel_values, torch.Tensor) and pixel_values.layout in _SPARSE:
        return Reason(SPARSE, f"pixel_values are {pixel_values.layout}")  # these towers' original code multiplies them
    device = parameter.device
    pixels = in_memory(check_pixels(pixel_values, spec, marked))
    grid = in_memory(check_grid(grid_thw))
    if is_on_gpu(grid):
        return Inputs(pixels, grid.to(device), None)
    items = _items_or_reason(grid.tolist(), pixels.shape[0], spec)
    return items if isinstance(items, Reason) else Inputs(pixels, None, items)


def check_padded(pixel_values: torch.Tensor, positions: object, spec: VisionSpec) -> Inputs | Reason:
    """Padded images and the positions of their patches; nothing is launched.

    Args:
        pixel_values: `[images, patches, patch_width]` floats from 0 to 1.
        positions: `[images, patches, 2]` integers, the (x, y) of each patch, (-1, -1) for padding.

    Raises:
        TypeError: an argument is not a tensor, or pixels are not floats of at least 16 bits.
        ValueError: a tensor has the wrong shape, or positions are not int64 or int32.
    """
    pixels = check_pixels(pixel_values, spec)
    if pixels.dtype not in (*PIXEL_DTYPES, torch.float64):  # Hugging Face's tower cannot add others either
        raise TypeError(f"fusedvit: pixel_values must be floats of 16, 32 or 64 bits, got {pixels.dtype}")
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"fusedvit: pixel_position_ids must be a tensor, got {type(positions).__name__}")
    _check_dense("pixel_position_ids", positions)
    images, patches, _ = pixels.shape
    if positions.shape != (images, patches, 2) or positions.dtype not in POSITION_DTYPES:
        got = f"{tuple(positions.shape)} of {positions.dtype}"
        raise ValueError(f"fusedvit: pixel_position_ids must be ({images}, {patches}, 2) of int64 or int32, got {got}")
    if patches % spec.merge_unit:
        return Reason(ODD_POSITIONS, f"{patches} patches are not pooled by {spec.merge_size} x {spec.merge_size}")
    return Inputs(in_memory(pixels), in_memory(positions), None, padded=True)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, or a copy if its memory does not hold its values: negative views and zeros without memory.

    Kernels read memory by address. Conjugate views need no check: they are complex, and no input is.
    """
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def without_padding(inputs: Inputs, spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> Inputs | Reason:
    """Converts padded images to a grid and rows of patches on `device`; on a CPU the result has items, not a grid."""
    loaded = load_padded(inputs, spec, device, dtype)
    if is_on_gpu(loaded.table):
        return loaded
    known = loaded.with_rows(loaded.table.tolist(), spec)
    return known if isinstance(known, Reason) else Inputs(known[0], None, known[1])


def load_padded(inputs: Inputs, spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> Inputs:
    """As `without_padding`, but the grid stays unread."""
    ops, merge, (images, patches, width) = ops_for(device), spec.merge_size, inputs.pixels.shape
    pixels = inputs.pixels.detach().to(device).contiguous()
    if device.type != "cpu" and pixels.dtype not in PIXEL_DTYPES:
        pixels = pixels.float()
    grid = torch.empty(images, 3, dtype=torch.int32, device=device)
    ops.patch_grid(inputs.table.to(device), spec.position_side, merge, grid)
    rows = torch.empty(images * patches, width, dtype=dtype, device=device)
    return Inputs(ops.load_patches(pixels, grid, merge, rows), grid, None, padded=True)


def is_on_gpu(grid: torch.Tensor) -> bool:
    """Whether reading `grid` on the host would wait for a device."""
    return grid.device.type != "cpu"


def check_grid(grid_thw: Grid) -> torch.Tensor:
    """`grid_thw` as an integer tensor `[n, 3]` on its device; nothing is read back from a GPU.

    Raises:
        TypeError: `grid_thw` is neither a tensor nor a list of integer triples.
        ValueError: its shape is not (n, 3), its dtype is not an integer, it is not a dense tensor with data, or an int
            is past 64 bits.
    """
    if not isinstance(grid_thw, torch.Tensor):
        if not isinstance(grid_thw, Sequence) or isinstance(grid_thw, str | bytes):
            got = type(grid_thw).__name__
            raise TypeError(f"fusedvit: grid_thw must be a tensor or a list of (t, h, w), got {got}")
        grid_thw = _grid_from_rows(grid_thw)
    _check_dense("grid_thw", grid_thw)
    if grid_thw.ndim != 2 or grid_thw.shape[1] != 3:
        got = f"{tuple(grid_thw.shape)}" + (f": {_LISTS}" if grid_thw.ndim == 1 else "")
        raise ValueError(f"fusedvit: grid_thw must have shape (n, 3), got {got}")
    if grid_thw.dtype not in _INTEGERS:
        raise ValueError(f"fusedvit: grid_thw must be of an integer dtype, got {grid_thw.dtype}")
    return grid_thw


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(f"fusedvit: {name} must have data, got a tensor on the meta device")
    if tensor.is_nested or tensor.layout is not torch.strided:
        got = "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise ValueError(f"fusedvit: {name} must be a dense tensor, got {got}")


def _grid_from_rows(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    for i, row in enumerate(rows):
        if type(row) in (list, tuple) and list(map(type, row)) == _TRIPLE:
            continue
        if not isinstance(row, Sequence) or isinstance(row, str | bytes):
            raise TypeError(f"fusedvit: grid_thw[{i}] must be {_TRIPLE_IN_WORDS}, got {_named(row)}")
        if len(row) != 3:
            raise ValueError(f"fusedvit: grid_thw[{i}] must be {_TRIPLE_IN_WORDS}, got {len(row)} values")
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in row):
            raise TypeError(f"fusedvit: grid_thw[{i}] must hold ints, got {[type(n).__name__ for n in row]}")
    try:
        return torch.tensor([list(row) for row in rows], dtype=torch.int64, device="cpu").reshape(len(rows), 3)
    except (RuntimeError, OverflowError, ValueError):  # which of them depends on torch's version
        bits = max(n.bit_length() + 1 for row in rows for n in row)
        raise ValueError(f"fusedvit: grid_thw must hold ints of at most 64 bits, got one of {bits} bits") from None


def _named(row: object) -> str:
    if isinstance(row, int):
        return f"an int: {_LISTS}"
    return f"a {type(row).__name__}" + (": stack tensors into one of shape (n, 3)" * isinstance(row, torch.Tensor))


def check_pixels(pixel_values: torch.Tensor, spec: VisionSpec, marked: bool = False) -> torch.Tensor:
    """`pixel_values` as float rows `[patches, spec.patch_width]`; padded images keep their shape.

    If `marked`, rows may also be bytes, of all frames or of one. Hugging Face's towers view pixels of any shape as
    `[patches, channels, frames, rows, columns]`, for example a batch of one `[1, patches, width]`, or flat pixels. The
    same shapes are accepted here.

    Raises:
        TypeError: `pixel_values` is not a float tensor (integer pixels are nearly always unnormalised 0-255).
        ValueError: its rows have another width, it has no such view, or it is not dense with data.
    """
    if not isinstance(pixel_values, torch.Tensor):
        raise TypeError(f"fusedvit: pixel_values must be a tensor, got {type(pixel_values).__name__}")
    _check_dense("pixel_values", pixel_values)
    if marked and pixel_values.dtype == torch.uint8:
        return _byte_rows(pixel_values, spec)
    if not pixel_values.dtype.is_floating_point:
        raise TypeError(
            f"fusedvit: pixel_values must be normalised floats, got {pixel_values.dtype}: run the image processor first"
        )
    if pixel_values.ndim != 2 or spec.padded:
        return _as_rows(pixel_values, spec)
    if pixel_values.shape[1] != spec.patch_width:
        raise ValueError(
            f"fusedvit: pixel_values rows must be {spec.patch_width} wide "
            f"({spec.in_channels} x {spec.temporal_patch_size} x {spec.patch_size} x {spec.patch_size}), "
            f"got {pixel_values.shape[1]}"
        )
    return pixel_values


def _byte_rows(pixels: torch.Tensor, spec: VisionSpec) -> torch.Tensor:
    widths = spec.still_width, spec.patch_width
    if pixels.shape[-1] not in widths or (spec.rows_only and pixels.ndim != 2):
        got = tuple(pixels.shape)
        raise ValueError(f"fusedvit: pixel_values must be rows of {widths[0]} or {widths[1]} bytes, got {got}")
    return pixels.reshape(-1, pixels.shape[-1])


def _as_rows(pixel_values: torch.Tensor, spec: VisionSpec) -> torch.Tensor:
    if spec.padded:
        if pixel_values.ndim != 3 or pixel_values.shape[2] != spec.patch_width:
            got = tuple(pixel_values.shape)
            raise ValueError(f"fusedvit: pixel_values must have shape (images, patches, {spec.patch_width}), got {got}")
        return pixel_values
    patch = (spec.in_channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    if not spec.rows_only and pixel_values.numel():
        try:
            return pixel_values.view(-1, *patch).reshape(-1, spec.patch_width)
        except RuntimeError:  # such a view does not exist, for Hugging Face's code either
            pass
    shape = f"(patches, {spec.patch_width})" + ("" if spec.rows_only else f", or be a view of (patches, {patch})")
    raise ValueError(f"fusedvit: pixel_values must have shape {shape}, got {tuple(pixel_values.shape)}")


def check_items(rows: list[list[int]], patches: int, merge_size: int) -> list[Item]:
    """The items of a grid already on the host, checked against `patches` pixel rows.

    Raises:
        ValueError: t is negative, h or w is below 1 or not a multiple of `merge_size`, or the total is not `patches`.
    """
    need = 0
    for i, (t, h, w) in enumerate(rows):
        if t < 0 or h < 1 or w < 1 or h % merge_size or w % merge_size:
            _refuse_row(i, t, h, w, merge_size)
        need += t * h * w
    if need != patches:
        raise ValueError(f"fusedvit: grid_thw needs {need} patch rows, pixel_values has {patches}")
    return list(map(Item._make, rows))


def _items_or_reason(rows: list[list[int]], patches: int, spec: VisionSpec) -> list[Item] | Reason:
    """As `check_items`, or why the original code must run, which also answers rows of zeros: padding of grids.

    With a bicubic position table, Hugging Face's tower takes the size of item k for frame k. After an item without
    frames that is another item's size. With more frames than items Hugging Face's tower raises IndexError, but the
    fused encoder returns outputs.
    """
    try:
        items = check_items(rows, patches, spec.merge_size)
    except ValueError:
        side = spec.merge_size  # of the smallest item, in the place of sides of 0
        sized = [[t, h or side, w or side] if t == 0 else [t, h, w] for t, h, w in rows]
        if sized == rows:
            raise
        check_items(sized, patches, side)
        return Reason(EMPTY_ITEMS, f"grid_thw[{next(i for i, row in enumerate(rows) if row != sized[i])}]")
    if spec.position_taps != 16 or all([item.t for item in items]):
        return items
    frames = [item for item in items for _ in range(item.t)]
    if len(frames) > len(items) or all(f[1:] == item[1:] for f, item in zip(frames, items, strict=False)):
        return items
    return Reason(EMPTY_ITEMS, f"grid_thw[{next(i for i, item in enumerate(items) if not item.t)}]")


def iterated(calls: Iterable[Grid]) -> Iterator[Grid]:
    """`iter(calls)`. Raises TypeError where there is nothing to iterate, as in a tensor without dimensions."""
    try:
        return iter(calls)
    except TypeError:
        raise TypeError(f"fusedvit: calls must be an iterable of grid_thw, got {type(calls).__name__}") from None


def items_of_grid(grid_thw: Grid, merge_size: int) -> list[Item]:
    """The items of a grid without its pixels; waits for the GPU if the grid lies there.

    Raises:
        TypeError, ValueError: as `check_grid` and `check_items`.
    """
    rows = check_grid(grid_thw).tolist()
    return check_items(rows, sum(t * h * w for t, h, w in rows), merge_size)


def _refuse_row(i: int, t: int, h: int, w: int, merge_size: int) -> NoReturn:
    if t < 0:
        raise ValueError(f"fusedvit: grid_thw[{i}] needs t >= 0, got {t}")
    name, n = ("h", h) if h < 1 or h % merge_size else ("w", w)
    if n < 1:
        raise ValueError(f"fusedvit: grid_thw[{i}] needs {name} >= 1, got {n}")
    raise ValueError(f"fusedvit: grid_thw[{i}] needs {name} to be a multiple of the merge size {merge_size}, got {n}")
