"""Partial row moments: what a producing epilogue writes so that the next product can fold its normalisation in.

A row of `length` channels is cut into parts of `width`; of each part the mean and the sum of squared deviations (M2)
are kept in fp32 and merged by the reader with the pairwise update of Chan, Golub and LeVeque (1979). Unlike sums of
squares this stays exact when a channel is hundreds of times the rest, as trained towers have.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class RowStats:
    """Partial moments of rows.

    Attributes:
        partials: `[rows, parts, 2]` fp32, (mean, M2) of each part.
        width: channels of a part; the last part of each `length` may be narrower.
        length: channels of one producing row. A reader whose rows are several producing rows (a merger) sees
            `parts` grow by that factor: see `merged`.
    """

    partials: torch.Tensor
    width: int
    length: int

    @property
    def parts(self) -> int:
        return self.partials.shape[1]

    @staticmethod
    def over(storage: torch.Tensor, rows: int, length: int, width: int) -> "RowStats":
        """Stats of `rows` rows laid over flat fp32 `storage` (at least `rows * ceil(length / width) * 2` long)."""
        parts = -(-length // width)
        return RowStats(storage[: rows * parts * 2].view(rows, parts, 2), width, length)

    def merged(self, factor: int) -> "RowStats":
        """The same moments for rows that are `factor` producing rows side by side."""
        rows, parts, _ = self.partials.shape
        return RowStats(self.partials.view(rows // factor, parts * factor, 2), self.width, self.length)


@triton.jit
def _merge_moments(
    stats_ptr,  # [T, PARTS, 2] fp32
    rows,  # [BLOCK_M] int64
    mask_m,  # [BLOCK_M]
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """(mean, 1 / sqrt(var + eps)) of each row, merged from its parts CHUNK at a time."""
    PER_LENGTH: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    offs = tl.arange(0, CHUNK)
    count = 0.0
    mean = tl.zeros([rows.shape[0]], tl.float32)
    m2 = tl.zeros([rows.shape[0]], tl.float32)
    for start in tl.static_range(0, PARTS, CHUNK):
        part = start + offs
        size = tl.minimum(LENGTH - (part % PER_LENGTH) * WIDTH, WIDTH)
        size = tl.where(part < PARTS, size, 0).to(tl.float32)
        ptrs = stats_ptr + rows[:, None] * (2 * PARTS) + 2 * part[None, :]
        mask = mask_m[:, None] & (part < PARTS)[None, :]
        part_mean = tl.load(ptrs, mask=mask, other=0.0)  # [BLOCK_M, CHUNK]
        part_m2 = tl.load(ptrs + 1, mask=mask, other=0.0)
        chunk_count = tl.sum(size, 0)
        chunk_mean = tl.sum(part_mean * size[None, :], 1) / chunk_count
        spread = part_mean - chunk_mean[:, None]
        chunk_m2 = tl.sum(part_m2 + size[None, :] * spread * spread, 1)
        total = count + chunk_count
        delta = chunk_mean - mean
        mean += delta * (chunk_count / total)
        m2 += chunk_m2 + delta * delta * (count * chunk_count / total)
        count = total
    return mean, 1.0 / tl.sqrt(m2 / count + eps)


@triton.jit
def _merge_squares(
    stats_ptr,  # [T, PARTS, 2] fp32
    rows,  # [BLOCK_M] int64
    mask_m,  # [BLOCK_M]
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """1 / sqrt(mean of squares + eps) of each row: a part's sum of squares is M2 + size mean^2, all of one sign."""
    PER_LENGTH: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    offs = tl.arange(0, CHUNK)
    squares = tl.zeros([rows.shape[0]], tl.float32)
    for start in tl.static_range(0, PARTS, CHUNK):
        part = start + offs
        size = tl.minimum(LENGTH - (part % PER_LENGTH) * WIDTH, WIDTH).to(tl.float32)
        ptrs = stats_ptr + rows[:, None] * (2 * PARTS) + 2 * part[None, :]
        mask = mask_m[:, None] & (part < PARTS)[None, :]
        mean = tl.load(ptrs, mask=mask, other=0.0)  # [BLOCK_M, CHUNK]
        squares += tl.sum(tl.load(ptrs + 1, mask=mask, other=0.0) + size[None, :] * mean * mean, 1)
    return 1.0 / tl.sqrt(squares / (PARTS // PER_LENGTH * LENGTH) + eps)


@triton.jit
def _store_moments(
    y,  # [BLOCK_M, BLOCK_N] fp32, the rounded output
    stats_ptr,  # [T, PARTS, 2] fp32
    rows,  # [BLOCK_M] int64
    mask_m,
    mask_n,
    part,
    size,  # columns of this part
    PARTS: tl.constexpr,
):
    """Writes (mean, M2) of this tile's columns for each row."""
    mean = tl.sum(tl.where(mask_n[None, :], y, 0.0), 1) / size
    spread = tl.where(mask_n[None, :], y - mean[:, None], 0.0)
    ptrs = stats_ptr + rows * (2 * PARTS) + 2 * part
    tl.store(ptrs, mean, mask=mask_m)
    tl.store(ptrs + 1, tl.sum(spread * spread, 1), mask=mask_m)
