"""Torch twin of `kernels.rope_words`."""

import torch


def rope_words(table: torch.Tensor, num_rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """See `fusedvit.kernels.rope_words.rope_words`."""
    rows, pairs = int(num_rows), table.shape[2]
    halves = (table[:rows] * 32768.0 + 32768.5).clamp(max=65535.0).int()  # [rows, 2, pairs]
    packed = halves[:, 0] | halves[:, 1] << 16
    words[:rows] = packed[:, torch.arange(words.shape[1], device=words.device) % pairs]
    return words
