"""A sampled fingerprint of many tensors: finds writes that change neither pointer nor version (`p.data.copy_`).

    group(i) = i,                                                     tensors of up to SAMPLES groups: all are read
             = floor(i G / SAMPLES) + a random number below the distance to the next,     of G groups
    hash(p)  = sum_i mix(mix(low(group(i)) + golden * (i + 1)) ^ high(group(i)))   mod 2^32

A group is four neighbouring 16-bit words; words after the last whole group are added one by one. Positions are spread
evenly and random within their share, so that they have no step in common with rows, columns, heads or blocks: a write
to a fraction f of a tensor, in any pattern, stays unnoticed with a probability of (1 - f)^SAMPLES, 1e-9 for 1 %. A
write to single elements may stay unnoticed.

One launch hashes all tensors and copies the rows of a grid, which the host reads with the hashes. Nothing is read here.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fusedvit.kernels.launch import Loaded, launch

SAMPLES = 2048
GROUP = 4  # words: in wider types the low words may be 0 in every value


@dataclass(frozen=True)
class FingerprintSources:
    """Tensors to fingerprint, and their addresses and sizes.

    Attributes:
        tensors: `P` dense tensors of one device, 2 bytes an element or more.
        pointers: `[P]` int64 on their device, addresses.
        words: `[P]` int64 on their device, sizes in 16-bit words.
    """

    tensors: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    words: torch.Tensor

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "FingerprintSources":
        """The sources of `tensors`, held as aliases; their storage must outlive this record."""
        kept = tuple(t.data for t in tensors)  # `detach` gives no views of some inference tensors
        device = kept[0].device if kept else torch.device("cpu")
        pointers = torch.tensor([t.data_ptr() for t in kept], dtype=torch.int64, device=device)
        words = torch.tensor([t.numel() * t.element_size() // 2 for t in kept], dtype=torch.int64, device=device)
        return FingerprintSources(kept, pointers, words)


GOLDEN: tl.constexpr = tl.constexpr(-1640531527)  # 2^32 / golden ratio, as a signed word


@triton.jit
def _mix(x):
    """Every bit of the result hangs on every bit of `x`, int32."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x45D9F3B
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x45D9F3B
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _sampled(s, groups, SAMPLES: tl.constexpr):
    """Which group sample `s` reads: its own in a small tensor, else one of its share at random."""
    begin = s.to(tl.int64) * groups // SAMPLES
    share = (s + 1).to(tl.int64) * groups // SAMPLES - begin
    drawn = (_mix(s * GOLDEN + groups.to(tl.int32)) & 0x7FFFFFFF).to(tl.int64)
    return tl.where(groups > SAMPLES, begin + (drawn * share >> 31), s.to(tl.int64))


@triton.jit
def _pair(pointers, mask):
    """Two 16-bit words as one of 32."""
    first = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    second = tl.load(pointers + 1, mask=mask, other=0).to(tl.int32)
    return (first & 0xFFFF) | (second << 16)


@triton.jit(
    do_not_specialize=["num_sources", "items", "item_pitch", "side_pitch"],
    do_not_specialize_on_alignment=["grid_ptr"],
)
def _fingerprint_kernel(
    grid_ptr,  # [items, 3] int64 or int32
    rows_ptr,  # [items or more, 3] int64
    out_ptr,  # [num_sources] int32
    pointers_ptr,  # [num_sources] int64, addresses
    words_ptr,  # [num_sources] int64, 16-bit words of each
    num_sources,
    items,
    item_pitch,
    side_pitch,
    SAMPLES: tl.constexpr,
):
    pid = tl.program_id(0)
    s = tl.arange(0, SAMPLES)
    if pid < num_sources:
        address = tl.load(pointers_ptr + pid)
        words = tl.load(words_ptr + pid)
        groups = words // 4
        group = _sampled(s, groups, SAMPLES)
        mask = group < groups
        if address % 8 == 0:
            both = tl.load(address.to(tl.pointer_type(tl.int64)) + group, mask=mask, other=0)
            low, high = both.to(tl.int32), (both >> 32).to(tl.int32)
        else:
            low = _pair(address.to(tl.pointer_type(tl.int16)) + 4 * group, mask)
            high = _pair(address.to(tl.pointer_type(tl.int16)) + 4 * group + 2, mask)
        hashed = _mix(_mix(low + (s + 1) * GOLDEN) ^ high)
        total = tl.sum(tl.where(mask, hashed, 0).to(tl.int64), 0)  # the interpreter's sums do not wrap
        i = tl.arange(0, 4)
        left = 4 * groups + i
        last = tl.load(address.to(tl.pointer_type(tl.int16)) + left, mask=left < words, other=0)
        total += tl.sum(tl.where(left < words, _mix(last.to(tl.int32) + (i - 4) * GOLDEN), 0).to(tl.int64), 0)
        tl.store(out_ptr + pid, total.to(tl.int32))
    else:
        at = (pid - num_sources).to(tl.int64) * SAMPLES + s
        item = at // 3
        here = item < items
        side = tl.load(grid_ptr + item * item_pitch + (at % 3) * side_pitch, mask=here)
        tl.store(rows_ptr + at, side.to(tl.int64), mask=here)


_loaded: dict[tuple[Any, ...], Loaded] = {}  # by what determines the code: a shorter key than `launch`'s


def fingerprint(
    sources: FingerprintSources,
    out: torch.Tensor,
    grid: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
) -> torch.Tensor:
    """Hashes the tensors of `sources` into `out`, and copies `grid` to `rows`; one launch.

    Args:
        sources: `P` tensors.
        out: `[P]` int32, on the tensors' device or in pinned host memory; empty to hash none of them.
        grid: `[n, 3]` int64 or int32 on their device; pitches below 2^31.
        rows: `[n or more, 3]` int64, contiguous, on the device or in pinned memory.
        stream: where to launch it; None for the current stream.
    """
    count, items = out.numel(), 0 if grid is None else grid.shape[0]
    programs = count - (-3 * items // SAMPLES)
    if not programs:
        return out
    if grid is None or rows is None:  # stand-ins that are not read, so that the kernel is the same
        grid, rows = sources.words, sources.words
    pitches = (0, 0) if items == 0 else grid.stride()
    pointers = grid, rows, out, sources.pointers, sources.words
    addresses = [p.data_ptr() for p in pointers]
    aligned = not any([address % 16 for address in addresses[1:]])
    key = sources.words.device, grid.dtype, aligned
    loaded = _loaded.get(key)
    if loaded is not None:
        loaded.launch(programs, (*addresses, count, items, *pitches), stream)
        return out
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        constants, options = {"SAMPLES": SAMPLES}, {"num_warps": 8}
        loaded = launch(_fingerprint_kernel, programs, (), pointers, constants, options, (count, items, *pitches))
    if loaded is not None and aligned and sources.words.is_cuda:
        _loaded[key] = loaded
    return out
