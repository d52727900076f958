"""Division of offsets and sizes, which are never negative."""

import triton
import triton.language as tl


@triton.jit
def _divide(a, b):
    """(quotient, remainder) of int32: unsigned, it is two thirds of the instructions."""
    quotient = (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)
    return quotient, a - quotient * b
