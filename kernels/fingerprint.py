"""A sampled fingerprint of many tensors, to notice writes that leave pointer and version alone (`p.data.copy_`).

    hash(p) = sum_i mix(word(p, i) + golden * (i + 1))   mod 2^32, over SAMPLES groups of four words, spread evenly

One launch for all tensors; nothing is read back here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fusedvit.kernels.launch import launch

SAMPLES = 256


@dataclass(frozen=True)
class Watched:
    """Tensors to fingerprint and where they lie.

    Attributes:
        tensors: dense tensors of one device, 2 bytes an element or more.
        pointers: `[P]` int64 on their device, addresses.
        words: `[P]` int64 on their device, sizes in 16-bit words.
    """

    tensors: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    words: torch.Tensor

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "Watched":
        """Watches `tensors` (detached; their storage must outlive this)."""
        kept = tuple(t.detach() for t in tensors)
        device = kept[0].device if kept else torch.device("cpu")
        pointers = torch.tensor([t.data_ptr() for t in kept], dtype=torch.int64, device=device)
        words = torch.tensor([t.numel() * t.element_size() // 2 for t in kept], dtype=torch.int64, device=device)
        return Watched(kept, pointers, words)


@triton.jit
def _fingerprint_kernel(
    out_ptr,  # [P] int32
    pointers_ptr,  # [P] int64, addresses
    words_ptr,  # [P] int64, 16-bit words of each
    SAMPLES: tl.constexpr,
):
    pid = tl.program_id(0)
    base = tl.load(pointers_ptr + pid).to(tl.pointer_type(tl.int16))
    words = tl.load(words_ptr + pid)
    s = tl.arange(0, SAMPLES)
    # Four neighbouring words a sample: of a wider type, the low words alone may be 0 in every value.
    first = s.to(tl.int64) * words // SAMPLES // 4 * 4
    total = s.to(tl.int64) * 0
    for i in tl.static_range(4):
        word = tl.load(base + first + i, mask=first + i < words, other=0)
        x = word.to(tl.int32) + (4 * s + i + 1) * -1640531527  # 2^32 / golden ratio, as a signed word
        x = (x ^ ((x >> 16) & 0xFFFF)) * 0x45D9F3B
        x = (x ^ ((x >> 16) & 0xFFFF)) * 0x45D9F3B
        total += (x ^ ((x >> 16) & 0xFFFF)).to(tl.int64)  # the interpreter's sums do not wrap
    tl.store(out_ptr + pid, tl.sum(total, 0).to(tl.int32))


def fingerprint(watched: Watched, out: torch.Tensor) -> torch.Tensor:
    """Hashes the watched tensors into `out` `[P]` int32, on their device or in pinned memory of the host."""
    if out.numel():
        pointers = (out, watched.pointers, watched.words)
        launch(_fingerprint_kernel, out.numel(), (), pointers, {"SAMPLES": SAMPLES}, {"num_warps": 4})
    return out
