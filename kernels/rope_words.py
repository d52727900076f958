"""Rotary factors in the form that a copy engine brings to the Hopper GEMM's epilogue: a word of 32 bits a pair.

    word[t, j] = u(cos) | u(sin) << 16,   u(v) = min(round((v + 1) 32768), 65535),   of pair j mod (head_dim / 2)

Off by 3e-5 at most, an eighth of what fp16 rounds near 1. A chunk of 64 columns has 32 pairs from any on:
the first 32 are repeated at a row's end, so that they are neighbours wherever a chunk begins. One word instead of two
floats, brought as a box instead of loaded value by value, made the epilogue of qkv four times cheaper on an H200.
"""

import torch
import triton
import triton.language as tl

BLOCK = 64
CHUNK = 32  # pairs


def width(head_dim: int) -> int:
    """Words of a row for heads of `head_dim` channels: rows start at multiples of 16 bytes."""
    pairs = head_dim // 2
    return pairs if pairs % CHUNK == 0 else -(-(pairs + CHUNK) // 4) * 4


@triton.jit
def _fixed(v):
    return tl.minimum(v * 32768.0 + 32768.5, 65535.0).to(tl.int32)


@triton.jit
def _rope_words_kernel(
    table_ptr,  # [T, 2, PAIRS] fp32: cos, sin
    words_ptr,  # [T, WIDTH] int32
    num_rows_ptr,  # [1] int32
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    cols = tl.arange(0, LANES)
    mask = (rows < tl.load(num_rows_ptr))[:, None] & (cols < WIDTH)[None, :]
    ptrs = table_ptr + rows[:, None] * (2 * PAIRS) + (cols % PAIRS)[None, :]
    cos = tl.load(ptrs, mask=mask, other=0.0)  # [BLOCK, LANES]
    sin = tl.load(ptrs + PAIRS, mask=mask, other=0.0)
    tl.store(words_ptr + rows[:, None] * WIDTH + cols[None, :], _fixed(cos) | (_fixed(sin) << 16), mask=mask)


def rope_words(table: torch.Tensor, num_rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Fills the first `num_rows` rows of `words`.

    Args:
        table: `[T, 2, head_dim / 2]` fp32, cos and sin.
        num_rows: `[1]` int32 on the device.
        words: `[T, width(head_dim)]` int32.
    """
    (rows, _, pairs), columns = table.shape, words.shape[1]
    assert words.shape == (rows, width(2 * pairs)), f"words {tuple(words.shape)} for a table {tuple(table.shape)}"
    if rows:
        _rope_words_kernel[(triton.cdiv(rows, BLOCK),)](
            table, words, num_rows, PAIRS=pairs, WIDTH=columns, LANES=triton.next_power_of_2(columns), BLOCK=BLOCK
        )
    return words
