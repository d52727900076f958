"""Tensor descriptors of the Hopper attention kernel: what the copy engine brings of q | k | v, box by box.

Boxes of keys and values are cut off at the end of the frame by the copy engine itself: their descriptor has a row
dimension twice, (a, b) -> row a + b - BLOCK_N with b < BLOCK_N, both of pitch W. A box that starts at (a, b) reads
rows a + b - BLOCK_N ... a - 1 and zeros behind them, so a = end of the block and no neighbour's NaN gets in.

The tail of a head of 72 is 8 columns in a box of 16. Of queries the copy engine fills it up with zeros, which takes it
longer; of keys and values the box holds the next head's first 8 columns, which meet zeros in q . k and are not stored
of P V. Where these are infinite or NaN, so are the sums, and the tile is redone without them. Where a tail leaves its
columns to ones (attention_spare.py), boxes of keys and values have 8 columns, and queries' have 16, of which half are
read.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fusedvit.kernels.attention import split_head
from fusedvit.kernels.hopper.compat import TensorDescriptor, gl
from fusedvit.kernels.hopper.configs import MAX_HEAD, QUERIES, HopperAttentionConfig


@dataclass(frozen=True)
class _Ahead:
    """A tensor as if it began `bytes_ahead` earlier, to a descriptor that never reads what lies there."""

    tensor: torch.Tensor
    bytes_ahead: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.bytes_ahead


def _descriptor(base: torch.Tensor | _Ahead, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    """Made without the record's own checks, which cost more than the launch (see descriptor.py)."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = base, shape, strides, box
    descriptor.layout = _layout(tuple(box), base.dtype)
    return descriptor


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def boxes(qkv: torch.Tensor, heads: int, head_dim: int, config: HopperAttentionConfig) -> tuple[Any, ...]:
    """q, q's tail, keys and values, their tail; of a head that is a power of two the tails are the others again."""
    (rows, pitch), block_n = qkv.shape, config.block_n
    head, tail = split_head(head_dim, MAX_HEAD)
    ahead = block_n * pitch * qkv.element_size()
    q = _descriptor(qkv, [rows, pitch], [pitch, 1], [QUERIES, head])
    kv, kv_tail = (
        _descriptor(_Ahead(qkv, ahead), [rows + 1, block_n, pitch], [pitch, pitch, 1], [1, block_n, width])
        for width in (head, 8 if config.spare(head_dim) else tail or head)
    )
    if tail == 0:
        return q, q, kv, kv_tail
    if config.spare(head_dim):
        return q, _descriptor(qkv, [rows, pitch], [pitch, 1], [QUERIES, tail]), kv, kv_tail
    shape, strides = [rows, 3 * heads, head_dim - head], [pitch, head_dim, 1]
    return q, _descriptor(qkv[:, head:], shape, strides, [QUERIES, 1, tail]), kv, kv_tail
