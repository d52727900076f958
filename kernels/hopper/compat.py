"""Gluon under one set of names, from Triton 3.6 to 3.9, and whether it is there at all.

Gluon lives in `triton.experimental` and renames things between versions. Kernels of this folder take the names that
changed from here and the others from Triton; they are imported only where `AVAILABLE` (see `usable`).
"""

import triton
from triton.language import core

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language.nvidia.hopper import tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate  # 3.9: the former
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # threads of one partition; 3.6: the latter
    async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # 3.9: the former
    async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    MISSING = ""
except (ImportError, AttributeError) as error:
    gluon = gl = GluonASTSource = TensorDescriptor = aggregate = barrier = async_load = async_store = None
    MISSING = f"Triton {triton.__version__} has no Gluon for Hopper: {error}"

AVAILABLE = not MISSING
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
NEEDS_MORE_REGISTERS = _VERSION >= (3, 8)  # for the same code, as compiled with 3.9
WHOLE_VIEWS = _VERSION == (3, 8)  # a view of shared memory must be of all its bytes


def usable(capability: int) -> bool:
    """Whether kernels in Gluon run on a device of `capability` (90: Hopper); Triton's interpreter runs none."""
    return AVAILABLE and capability == 90 and not triton.knobs.runtime.interpret
