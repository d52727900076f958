"""Tensor descriptors for the copy engine, made cheaply: an encoder call makes several hundred.

Devices without one (before sm_90) get the tensor itself and its row pitch as a constant. Their kernels make the
descriptor, which the compiler turns into masked loads; of one that came from the host it would know neither pitch nor
alignment, and load element by element.
"""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def box(t: torch.Tensor, rows: int, cols: int, copy_engine: bool = True) -> TensorDescriptor | torch.Tensor:
    """A descriptor over `t` `[T, C]`, read and written `[rows, cols]` at a time; without a copy engine `t` itself.

    Skips the record's own checks, which cost more than the launch: buffers and prepared weights have bases and row
    pitches that are multiples of 16 bytes (`weights.pitch_of`, `folding.prepare`), and the driver refuses others.
    """
    if not copy_engine:
        return t
    descriptor = object.__new__(TensorDescriptor)  # its other fields have defaults, which live on the class
    descriptor.base = t
    descriptor.shape = t.shape
    descriptor.strides = t.stride()
    descriptor.block_shape = [rows, cols]
    return descriptor


def rows_behind(t: torch.Tensor, tile: int) -> int:
    """How many rows a descriptor over `t` `[T, C]` may have for reading whole tiles of `tile` rows: T, and up to a
    whole tile of what lies behind `t` in its memory.

    The copy engine fills in zeros past a descriptor's last row, which takes it longer than rows that are there (H200: a
    product 21.3 us instead of 17.4). What is read so must decide nothing.
    """
    rows, pitch = t.shape[0], t.stride(0)
    held = (t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()) // max(1, pitch)
    return max(rows, min(-(-rows // tile) * tile, held))
