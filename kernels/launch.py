"""Launching a kernel twice costs half as much the second time.

Triton's own launcher works out an argument's specialisation at every launch, 20 us on the host; an encoder call makes
140 launches. What decides the machine code is known here in a few words, so a compiled kernel is kept under them and
called directly (10 us), as Triton itself keeps compiled kernels per function.
"""

from typing import Any

import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: JITFunction,
    programs: int,
    boxes: tuple[TensorDescriptor | torch.Tensor | None, ...],
    pointers: tuple[torch.Tensor | None, ...],
    constants: dict[str, Any],
    options: dict[str, int],
) -> None:
    """Launches `kernel` on a one-dimensional grid.

    Args:
        kernel: its parameters are `boxes`, `pointers` and `constants`, in this order.
        programs: size of the grid.
        boxes: tensor descriptors, whose dtype and box decide the code, or tensors (see `descriptor.box`).
        pointers: tensors; dtype and alignment to 16 bytes decide the code.
        constants: compile-time arguments by name, in the kernel's order.
        options: `num_warps`, `num_stages`.
    """
    key = (
        kernel,
        pointers[-1].device if pointers[-1] is not None else None,
        *((b.base.dtype, *b.block_shape) if isinstance(b, TensorDescriptor) else _pointer_key(b) for b in boxes),
        *(_pointer_key(p) for p in pointers),
        *constants.values(),
        *options.values(),
    )
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*boxes, *pointers, *constants.values())
        return
    names = kernel.arg_names[len(boxes) + len(pointers) :]
    assert list(constants) == list(names), f"{kernel.__name__} takes {names}, got {list(constants)}"
    # Fused multiply-adds are asked for: versions of Triton differ in what they default to.
    compiled = kernel[(programs,)](*boxes, *pointers, **constants, **options, enable_fp_fusion=True)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled


def _pointer_key(t: torch.Tensor | None) -> tuple[torch.dtype, bool] | None:
    return None if t is None else (t.dtype, t.data_ptr() % 16 == 0)
