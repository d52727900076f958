"""Torch twin of `kernels.packed_cos_sin`: words of a whole table."""

import torch


def packed_cos_sin(table: torch.Tensor, num_rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Fills the first `num_rows` rows of `words`.

    Args:
        table: `[T, 2, head_dim / 2]` fp32, cos and sin.
        num_rows: `[1]` int32.
        words: `[T, width(head_dim)]` int32.
    """
    rows, pairs = int(num_rows), table.shape[2]
    halves = (table[:rows] * 32768.0 + 32768.5).clamp(max=65535.0).int()  # [rows, 2, pairs]
    packed = halves[:, 0] | halves[:, 1] << 16
    words[:rows] = packed[:, torch.arange(words.shape[1], device=words.device) % pairs]
    return words
