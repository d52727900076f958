"""Reference of the packed cos/sin of `kernels.positions`, for a whole table."""

import torch


def packed_cos_sin(table: torch.Tensor, num_rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Fills the first `num_rows` rows of `packed`.

    Args:
        table: `[T, 2, head_dim / 2]` fp32, cos and sin.
        num_rows: `[1]` int32.
        packed: `[T, packed_width(head_dim)]` int32.
    """
    rows, pairs = int(num_rows), table.shape[2]
    fixed_point = (table[:rows] * 32768.0 + 32768.5).clamp(max=65535.0).int()  # [rows, 2, pairs]
    both = fixed_point[:, 0] | fixed_point[:, 1] << 16
    packed[:rows] = both[:, torch.arange(packed.shape[1], device=packed.device) % pairs]
    return packed
