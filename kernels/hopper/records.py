"""Two things that Gluon has under other names in every version: records inside kernels, and views of shared memory.

A record is a class of annotated fields, made from values in their order. Triton calls it an aggregate, and up to 3.8
wants its constructor written out. Numbers and strings become compile-time constants and stay so across
`warp_specialize`.
"""

from triton.language import core

from fusedvit.kernels.hopper.compat import aggregate, gl, gluon


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


if hasattr(gl.shared_memory_descriptor, "reinterpret"):  # 3.9

    @gluon.jit
    def reinterpret(memory, dtype, shape, layout):
        """`memory` as another type, shape and layout of as many bytes."""
        return memory.reinterpret(dtype, shape, layout)
else:

    @gluon.jit
    def reinterpret(memory, dtype, shape, layout):
        """`memory` as another type, shape and layout of as many bytes."""
        return memory._reinterpret(dtype, shape, layout)
