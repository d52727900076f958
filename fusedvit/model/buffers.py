"""The memory of an encoder run, allocated once for given capacities and never resized."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusedvit.kernels.epilogue import Scratch
from fusedvit.kernels.load_inputs import KINDS
from fusedvit.kernels.metadata import Layout, Metadata
from fusedvit.kernels.positions import packed_width
from fusedvit.kernels.tile_configs import MAX_COUNTERS, MAX_SUMS
from fusedvit.model.items import Item
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import UNFOLDED, row_pitch, tensors_of, with_tensors

NARROWEST_TILE = 32  # columns of the narrowest tile, which bounds the number of partial row statistics


@dataclass(frozen=True)
class Capacity:
    """Upper limits of a run: patch tokens, images and videos, frames, attention tiles, windows and their tiles, and
    tiles of short frames if these have a separate list."""

    tokens: int
    items: int
    frames: int
    tiles: int
    windows: int = 0
    window_tiles: int = 0
    short_tiles: int = 0

    @staticmethod
    def of(items: Sequence[Item], layout: Layout) -> "Capacity":
        """The exact capacity for `items`."""
        side, block_m = layout.window, layout.window_block_m
        return Capacity(
            sum(item.tokens for item in items),
            len(items),
            sum(item.t for item in items),
            sum(item.tiles(layout.block_m) for item in items if item.h * item.w > layout.short),
            sum(item.windows(side) for item in items) if side else 0,
            sum(item.window_tiles(side, block_m) for item in items) if side else 0,
            sum(item.tiles(layout.short_block_m) for item in items if item.h * item.w <= layout.short),
        )

    @staticmethod
    def at_most(tokens: int, items: int, frames: int, layout: Layout) -> "Capacity":
        """The capacity for any batch within these limits.

        Every frame adds at most one attention tile that is not full; all frames may be in the same list. The worst case
        for windows are frames that are one merged token high: then each window holds `window / merge` merged tokens,
        except for one per frame, which may hold fewer.
        """
        tiles = -(-tokens // layout.block_m) + frames
        short = -(-tokens // layout.short_block_m) + frames if layout.short else 0
        if not layout.window:
            return Capacity(tokens, items, frames, tiles, short_tiles=short)
        windows = -(-tokens // (layout.merge * layout.window)) + frames
        split = layout.window_block_m < layout.window**2
        window_tiles = windows + split * (tokens // layout.window_block_m)
        return Capacity(tokens, items, frames, tiles, windows, window_tiles, short)


def rows_over(flat: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """A view `[rows, cols]` of the beginning of `flat`, with rows `row_pitch` apart."""
    pitch = row_pitch(cols, flat.dtype)
    return flat[: rows * pitch].view(rows, pitch)[:, :cols]


@dataclass(frozen=True)
class OverlapBuffers:
    """Separate buffers of deepstack mergers that are overlapped with blocks.

    Attributes:
        hidden: `[mergers, tokens, hidden]`, the residual stream that each merger reads.
        stats: `[mergers, …]` fp32, row moments of `hidden`.
        inner: flat, between a merger's two layers; shared, as mergers run one after another on the side stream.
        normalised: `[tokens, hidden]` if the mergers' norm is not folded; else without rows.
    """

    hidden: torch.Tensor
    stats: torch.Tensor
    inner: torch.Tensor
    normalised: torch.Tensor


@dataclass(frozen=True)
class EncoderBuffers:
    """Inputs, intermediates and outputs of a run. Rows past the true token count are undefined and never read.

    Attributes:
        pixels: `[tokens, patch_width]`, input.
        grid: `[items, 3]` int32, input; rows past the last item are zeros.
        row_counts: `[3, 4]` int32, input; column 0 holds the patch tokens of each kind of pixels
            (`kernels.load_inputs.KINDS`): all tokens for one kind, 0 for the others.
        meta: metadata, filled on the device from `grid`.
        hidden: `[tokens, hidden]`, the residual stream; the last hidden state at the end.
        wide: flat, shared over time by pixels in window order, q | k | v, and hidden layers of MLPs and mergers.
        context: `[tokens, hidden]`, attention's output; the merger's normalised rows at the end.
        stats: flat fp32, partial row moments.
        merged: each `[tokens / merge_unit, out]`, output: the merger's rows, then each deepstack merger's, or the
            downsampling convolution's.
        scratch: where parts of split products are summed; empty if no backend splits products.
        overlap: buffers of mergers that are overlapped with blocks; if None they run in line.
    """

    pixels: torch.Tensor
    grid: torch.Tensor
    row_counts: torch.Tensor
    meta: Metadata
    hidden: torch.Tensor
    wide: torch.Tensor
    context: torch.Tensor
    stats: torch.Tensor
    merged: tuple[torch.Tensor, ...]
    scratch: Scratch
    overlap: OverlapBuffers | None = None

    def rows_of_wide(self, rows: int, cols: int, after: int = 0) -> torch.Tensor:
        """A view `[rows, cols]` of `wide` with rows `row_pitch` apart, after `rows` rows of `after` columns."""
        return rows_over(self.wide[rows * row_pitch(after, self.wide.dtype) :], rows, cols)

    def part(self, spec: VisionSpec, capacity: Capacity, overlapped: int = 0) -> "EncoderBuffers":
        """Views of the beginning of every tensor, for a smaller capacity and `overlapped` mergers."""
        overlap = overlapped, capacity.tokens
        like = allocate(spec, capacity, self.hidden.dtype, torch.device("meta"), overlap=overlap)
        shapes = {path: t.shape for path, t, _ in tensors_of(like)}
        whole = self if like.overlap is not None else replace(self, overlap=None)
        part: EncoderBuffers = with_tensors(whole, lambda path, t, _: t[tuple(map(slice, shapes[path]))])
        return part

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name; nested ones as "meta.tiles", "overlap.stats", "merged.0"."""
        return {path[1:]: t for path, t, _ in tensors_of(self)}

    def held_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors().values())


def allocate(
    spec: VisionSpec,
    capacity: Capacity,
    dtype: torch.dtype,
    device: torch.device,
    pixels: torch.Tensor | None = None,
    overlap: tuple[int, int] = (0, 0),
) -> EncoderBuffers:
    """Buffers for `capacity`.

    Args:
        pixels: used as the input buffer instead of a new one, if given.
        overlap: (number of mergers overlapped with blocks, most patch tokens with overlap).
    """
    tokens, merged = capacity.tokens, capacity.tokens // spec.merge_unit

    halves = dtype.itemsize == 2  # products are only split in 16 bits

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def aligned(rows: int, cols: int) -> torch.Tensor:
        pitch = row_pitch(cols, dtype)
        return empty(rows, cols) if pitch == cols else empty(rows, pitch)[:, :cols]

    merger = (spec.out_size, spec.merger_size) if spec.tail == "downsample" else (spec.merged_size,)
    widest = max(
        tokens * row_pitch(3 * spec.hidden_size, dtype),
        tokens * row_pitch(spec.intermediate_size, dtype),
        tokens * row_pitch(spec.patch_width, dtype),
        merged * sum(row_pitch(cols, dtype) for cols in merger),
    )
    return EncoderBuffers(
        pixels=aligned(tokens, spec.patch_width) if pixels is None else pixels,
        grid=torch.zeros(capacity.items, 3, dtype=torch.int32, device=device),
        row_counts=torch.zeros(len(KINDS), 4, dtype=torch.int32, device=device),
        meta=_allocate_meta(spec, capacity, dtype, device),
        hidden=empty(tokens, spec.hidden_size),
        wide=empty(widest),
        context=empty(tokens, spec.hidden_size),
        stats=torch.empty(_stats_size(spec, tokens), dtype=torch.float32, device=device),
        merged=tuple(aligned(merged, spec.out_size) for _ in range(spec.merged_outputs)),
        scratch=Scratch.zeros(halves * MAX_SUMS, halves * MAX_COUNTERS, device),
        overlap=_allocate_overlap(spec, *overlap, dtype, device) if all(overlap) else None,
    )


def _stats_size(spec: VisionSpec, tokens: int) -> int:
    return tokens * -(-spec.hidden_size // NARROWEST_TILE) * 2


def _allocate_overlap(
    spec: VisionSpec, mergers: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> OverlapBuffers:
    inner = tokens // spec.merge_unit * row_pitch(spec.merged_size, dtype)
    return OverlapBuffers(
        hidden=torch.empty(mergers, tokens, spec.hidden_size, dtype=dtype, device=device),
        stats=torch.empty(mergers, _stats_size(spec, tokens), dtype=torch.float32, device=device),
        inner=torch.empty(inner, dtype=dtype, device=device),
        normalised=torch.empty(tokens if dtype in UNFOLDED else 0, spec.hidden_size, dtype=dtype, device=device),
    )


def _allocate_meta(spec: VisionSpec, capacity: Capacity, dtype: torch.dtype, device: torch.device) -> Metadata:
    taps = spec.position_taps if spec.position_side else 0
    # no packed cos/sin in 32 bits, where factors are not rounded, or if rotation is not in a product's epilogue
    turns = not spec.qk_norm or spec.norms_heads
    words = packed_width(spec.head_dim) if dtype.itemsize == 2 and turns else 0
    ordered, windows = (capacity.tokens // spec.merge_unit, capacity.windows + 1) if spec.window else (0, 0)
    return Metadata(
        counts=torch.zeros(7, 4, dtype=torch.int32, device=device),
        rope=torch.empty(capacity.tokens, 2, spec.head_dim // 2, dtype=torch.float32, device=device),
        packed_cos_sin=torch.empty(capacity.tokens, words, dtype=torch.int32, device=device),
        tap_index=torch.empty(capacity.tokens, taps, dtype=torch.int32, device=device),
        tap_weight=torch.empty(capacity.tokens, taps, dtype=torch.float32, device=device),
        cu_seqlens=torch.empty(capacity.frames + 1, dtype=torch.int32, device=device),
        tiles=torch.empty(capacity.tiles, 4, dtype=torch.int32, device=device),
        order=torch.empty(ordered, dtype=torch.int32, device=device),
        window_cu_seqlens=torch.empty(windows, dtype=torch.int32, device=device),
        window_tiles=torch.empty(capacity.window_tiles, 4, dtype=torch.int32, device=device),
        short_tiles=torch.empty(capacity.short_tiles, 4, dtype=torch.int32, device=device),
    )
