"""Tensor descriptors for TMA, the copy engine of sm_90 and later, built cheaply: an encoder call takes several hundred.

Without TMA a kernel gets the tensor itself, and its row pitch as a constant. It builds the descriptor, which the
compiler turns into masked loads. A descriptor from the host would tell the compiler neither pitch nor alignment, and
the kernel would load element by element.
"""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def descriptor(t: torch.Tensor, rows: int, cols: int, copy_engine: bool = True) -> TensorDescriptor | torch.Tensor:
    """A descriptor over `t` `[T, C]`, read and written in blocks of `[rows, cols]`; without a copy engine `t` itself.

    Skips the checks of `TensorDescriptor`, which take longer than the launch: buffers and prepared weights have bases
    and row pitches that are multiples of 16 bytes (`model.weights.row_pitch`), and the driver refuses others.
    """
    if not copy_engine:
        return t
    built = object.__new__(TensorDescriptor)  # its other fields have defaults, which live on the class
    built.base = t
    built.shape = t.shape
    built.strides = t.stride()
    built.block_shape = [rows, cols]
    return built


def rows_behind(t: torch.Tensor, tile: int) -> int:
    """Rows of a descriptor over `t` `[T, C]` that lets whole tiles of `tile` rows be read: T rounded up to a tile, as
    far as the memory behind `t` reaches.

    TMA fills rows past a descriptor's last one with zeros, which takes longer than reading memory (H200: a GEMM of 21.3
    us instead of 17.4). No result may depend on the rows past T.
    """
    rows, pitch = t.shape[0], t.stride(0)
    held = (t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()) // max(1, pitch)
    return max(rows, min(-(-rows // tile) * tile, held))
