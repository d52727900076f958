"""What PTX computes with the registers of a warp, 32 lanes at a time, where numpy has no function for it.

bf16 and fp16 are bit patterns in uint16; results are rounded to nearest, ties to even, as the hardware does. Functions
that it approximates are computed exactly and rounded to fp32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
u16, u32, i32, u64, i64, f32, f64 = np.uint16, np.uint32, np.int32, np.uint64, np.int64, np.float32, np.float64


def from_bf16(bits: Array) -> Array:
    return (bits.astype(u32) << u32(16)).view(f32)


def to_bf16(x: Array) -> Array:
    bits = np.ascontiguousarray(x, f32).view(u32)
    rounded = ((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)).astype(u16)
    nan = (bits & u32(0x7FFFFFFF)) > u32(0x7F800000)
    if nan.any():
        rounded[nan] = 0x7FFF
    return rounded


def from_f16(bits: Array) -> Array:
    return np.ascontiguousarray(bits, u16).view(np.float16).astype(f32)


def to_f16(x: Array) -> Array:
    return x.astype(np.float16).view(u16)


NARROW: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "bf16": (from_bf16, to_bf16),
    "f16": (from_f16, to_f16),
}


def low(x: Array) -> Array:
    return x.astype(u16)


def high(x: Array) -> Array:
    return (x >> u32(16)).astype(u16)


def pair(low_half: Array, high_half: Array) -> Array:
    return low_half.astype(u32) | (high_half.astype(u32) << u32(16))


def words(low_word: Array, high_word: Array) -> Array:
    return low_word.astype(u64) | (high_word.astype(u64) << u64(32))


def in_halves(kind: str, op: Callable[..., Array], *operands: Array) -> Array:
    """`op` in fp32 on 16-bit numbers, rounded once."""
    widen, narrow = NARROW[kind]
    return narrow(op(*(widen(x) for x in operands)))


def in_pairs(kind: str, op: Callable[..., Array], *operands: Array) -> Array:
    """The same of both halves of 32-bit words."""
    return pair(*(in_halves(kind, op, *(half(x) for x in operands)) for half in (low, high)))


def rounded_pair(kind: str, first: Array, second: Array) -> Array:
    """`cvt.rn.bf16x2.f32 d, first, second`: the first is the upper half."""
    narrow = NARROW[kind][1]
    return pair(narrow(second), narrow(first))


def fma(a: Array, b: Array, c: Array) -> Array:
    """Rounded once but for ties that fp64 does not see."""
    return (a.astype(f64) * b + c).astype(f32)


def shl(x: Array, n: Array) -> Array:
    """Zero from as many bits on as there are."""
    bits = 8 * x.dtype.itemsize
    n = np.asarray(n)
    return np.where(n < bits, np.left_shift(x, np.minimum(n, bits - 1).astype(x.dtype)), 0).astype(x.dtype)


def shr(x: Array, n: Array) -> Array:
    """Of a signed type the sign comes in."""
    bits = 8 * x.dtype.itemsize
    n = np.asarray(n)
    held = np.right_shift(x, np.minimum(n, bits - 1).astype(x.dtype))
    return held if x.dtype.kind == "i" else np.where(n < bits, held, 0).astype(x.dtype)


def bfe(x: Array, at: Array, length: Array) -> Array:
    """`length` bits of `x` from `at` on, with their sign where `x` has one."""
    mask = (i64(1) << length.astype(i64)) - 1
    field = (x.astype(i64) >> at.astype(i64)) & mask
    if x.dtype.kind == "i":
        sign = (i64(1) << length.astype(i64)) >> 1
        field = (field ^ sign) - sign
    return field.astype(x.dtype)


def mul_hi(a: Array, b: Array) -> Array:
    wide = i64 if a.dtype.kind == "i" else u64
    return ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)


def mul_wide(a: Array, b: Array) -> Array:
    wide = {"i4": i64, "u4": u64, "i2": i32, "u2": u32}[f"{a.dtype.kind}{a.dtype.itemsize}"]
    return a.astype(wide) * b.astype(wide)


def div(a: Array, b: Array) -> Array:
    """Towards zero."""
    return np.where(b == 0, -1, np.trunc(a.astype(np.longdouble) / np.where(b == 0, 1, b))).astype(a.dtype)


def rem(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))).astype(a.dtype)


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes of the eight of (b, a), as the selector's nibbles say."""
    both = words(a, b)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> u32(4 * i)) & u32(15)
        byte = (both >> ((nibble & u32(7)).astype(u64) * u64(8))) & u64(255)
        byte = np.where(nibble & u32(8), np.where(byte & u64(128), 255, 0), byte).astype(u32)
        out |= byte << u32(8 * i)
    return out


def larger(a: Array, b: Array) -> Array:
    """`max.f32`: of a number and a NaN the number."""
    return np.fmax(a, b)


def smaller(a: Array, b: Array) -> Array:
    return np.fmin(a, b)


def to_integer(x: Array, kind: str) -> Array:
    """Whole numbers, held to the type's range, NaN to 0."""
    limits = np.iinfo(kind)
    return np.clip(np.nan_to_num(x.astype(f64)), limits.min, limits.max).astype(kind)


def shuffled(x: Array, lanes: Array) -> Array:
    """Each lane's value of another lane; its own where that is none of the warp's."""
    own = np.arange(32)
    return x[np.where((lanes >= 0) & (lanes < 32), lanes, own)]
