"""Gluon under one set of names, from Triton 3.6 to 3.9.

Gluon lives in `triton.experimental` and renames things between versions. Kernels of this folder take the names that
changed from here and the others from Triton.

A record is a class of annotated fields inside kernels, built from values in their order. Triton calls it an aggregate,
and up to 3.8 wants its constructor written out. Numbers and strings become compile-time constants and stay so across
`warp_specialize`.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate  # 3.9: the former
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # threads of one partition; 3.6: the latter
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # 3.9: the former
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
NEEDS_MORE_REGISTERS = _VERSION >= (3, 8)  # for the same code, as compiled with 3.9
WHOLE_VIEWS = _VERSION == (3, 8)  # a view of shared memory must be of all its bytes


def built_descriptor(
    base: Any, shape: Sequence[int], strides: Sequence[int], block_shape: list[int], layout: Any
) -> Any:
    """A descriptor for Gluon, without the record's own checks, which cost more than a launch."""
    found = object.__new__(TensorDescriptor)
    found.base, found.shape, found.strides, found.block_shape, found.layout = base, shape, strides, block_shape, layout
    return found


def usable(capability: int) -> bool:
    """Whether kernels in Gluon run on a device of `capability` (90: Hopper); Triton's interpreter runs none."""
    return capability == 90 and not triton.knobs.runtime.interpret


def absent(capability: int, dtype: torch.dtype) -> str:
    """Why kernels in Gluon cannot run on a device of `capability` in `dtype`, or ""."""
    if dtype.itemsize != 2:
        return "bfloat16 and float16 only"
    return "" if usable(capability) else f"Hopper only, not sm_{capability} or the interpreter"


def barrier_offsets(ptx: str) -> list[int | None]:
    """Where in shared memory barriers are initialised; None for one of which that is not seen."""
    base = set(re.findall(r"mov\.[bu]32\s+(%r\d+), global_smem;", ptx))
    at = {name: int(n) for name, of, n in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx) if of in base}
    return [at.get(name) for name in re.findall(r"mbarrier\.init\S+ \[(%r\d+)\]", ptx)]


def misplaced_operands(ptx: str, operand_bytes: int) -> str:
    """Why operands that WGMMAs find by address (`hopper.gemm_swap_ab`, `hopper.attention_consumer`) may not begin where
    shared memory does, or "".

    Whatever else is in shared memory, barriers and what partitions are passed, must lie behind them.
    """
    barriers = [at or 0 for at in barrier_offsets(ptx)]
    passed = [int(n or 0) for n in re.findall(r"\[global_smem(?:\+(\d+))?\]", ptx)]
    first = min(barriers + passed, default=0)
    inside = re.search(r"mbarrier\.init\S+ \[%r\d+\+\d+\]", ptx)  # barriers inside the operands' own array
    behind = first >= operand_bytes and (barriers or inside)
    return "" if behind else f"{operand_bytes} bytes of operands, but something lies at {first}"


def record(cls: type) -> type:
    """`cls` as an aggregate with a constructor that takes its fields in order."""
    names = tuple(cls.__annotations__)

    def __init__(self, *values):
        assert len(values) == len(names), f"{cls.__name__} takes {names}, got {len(values)} values"
        for name, value in zip(names, values, strict=True):
            known = isinstance(value, core.base_value)
            setattr(self, name, value if known else gl.constexpr(value))

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]  # Python, not a kernel's code
    cls.__init__ = __init__  # type: ignore[misc]
    return aggregate(cls)


LISTS_ELEMENTS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # Triton 3.9


@gluon.jit
def indexed(memory, FIRST: gl.constexpr, COUNT: gl.constexpr, i):
    """`memory.index(FIRST + i)` with i < COUNT. Compiling takes Triton 3.9 time for every element that `index` may
    give, so there it is asked for one of COUNT."""
    if LISTS_ELEMENTS:
        return memory.slice(FIRST, COUNT).index(i)
    else:
        return memory.index(FIRST + i)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):  # 3.9

    @gluon.jit
    def reinterpret(memory, dtype, shape, layout):
        """The first bytes of `memory` as another type, shape and layout."""
        return memory.reinterpret(dtype, shape, layout)
elif WHOLE_VIEWS:

    @gluon.constexpr_function
    def _leading(held, held_type, shape, dtype):
        """How long the first dimension is where all bytes are used."""
        bits = math.prod(held) * held_type.primitive_bitwidth
        return bits // (math.prod(shape[1:]) * dtype.primitive_bitwidth)

    @gluon.constexpr_function
    def _is_nvmma(layout):
        return isinstance(layout, gl.NVMMASharedLayout)

    @gluon.jit
    def reinterpret(memory, dtype, shape, layout):
        """The first bytes of `memory` as another type, shape and layout. A view in a layout other than NVMMA is
        longer: it cannot be sliced, and is indexed line by line."""
        ALL: gl.constexpr = _leading(memory.shape, memory.dtype, shape, dtype)
        if len(shape) == 2:
            whole = memory._reinterpret(dtype, [ALL, shape[1]], layout)
        elif len(shape) == 3:
            whole = memory._reinterpret(dtype, [ALL, shape[1], shape[2]], layout)
        else:
            whole = memory._reinterpret(dtype, [ALL, shape[1], shape[2], shape[3]], layout)
        if shape[0] == ALL or not _is_nvmma(layout):
            return whole
        else:
            return whole.slice(0, shape[0])
else:

    @gluon.jit
    def reinterpret(memory, dtype, shape, layout):
        """The first bytes of `memory` as another type, shape and layout."""
        return memory._reinterpret(dtype, shape, layout)
