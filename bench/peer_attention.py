"""Varlen attention as others have it: FA3 from a library file, cuDNN, and torch's own.

All take q, k, v `[T, heads, head_dim]` (views of a packed buffer are fine) and give `[T, heads, head_dim]`.
"""

import lzma
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Frames:
    """Where each attention sequence lies.

    Attributes:
        cu_seqlens: `[frames + 1]` int32 on the device.
        lengths: the same on the host, as lengths.
    """

    cu_seqlens: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def are_equal(self) -> bool:
        return len(set(self.lengths)) == 1


def load_fa3(path: Path) -> None:
    """Registers the operators of vLLM's FA3 build; `path` is its shared library, or that compressed (`.xz`).

    Raises:
        OSError: no such file, or not loadable here.
    """
    if hasattr(torch.ops, "_vllm_fa3_C") and hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return
    if path.suffix != ".xz":
        torch.ops.load_library(str(path))
        return
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        with lzma.open(path) as packed:
            while chunk := packed.read(1 << 24):
                file.write(chunk)
        file.flush()
        torch.ops.load_library(file.name)


def fa3(frames: Frames) -> Attend:
    """FlashAttention 3 through vLLM's operator, as its encoder calls it: no mask, no splits forced."""
    op = torch.ops._vllm_fa3_C.fwd
    cu, longest = frames.cu_seqlens, frames.longest
    later = (1, 0, None)  # context parallelism, in builds that have it

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given: list[Any] = [q, k, v, None, None, None, None, cu, cu, None, None, None, longest, longest]
        given += [None] * 9 + [q.shape[-1] ** -0.5, False, -1, -1, 0.0, True, None, 0, None, 0, None, *later]
        return op(*given[: len(op.default._schema.arguments)])[0]

    return attend


def cudnn(frames: Frames) -> Attend:
    """cuDNN's attention through SDPA; sequences of one length only."""
    length, batch = frames.longest, len(frames.lengths)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)

    return attend


def varlen(frames: Frames) -> Attend:
    """`torch.nn.attention.varlen.varlen_attn` (FA2)."""
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = frames.cu_seqlens, frames.longest

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = varlen_attn(q, k, v, cu, cu, longest, longest)
        return out if isinstance(out, torch.Tensor) else out[0]

    return attend


def by_frame(frames: Frames, scale: float | None = None) -> Attend:
    """SDPA frame by frame: where nothing better runs (the CPU)."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        done = []
        for frame in zip(*(t.split(frames.lengths) for t in (q, k, v)), strict=True):
            a, b, c = (t.transpose(0, 1)[None] for t in frame)
            done.append(F.scaled_dot_product_attention(a, b, c, scale=scale)[0].transpose(0, 1))
        return torch.cat(done)

    return attend


def available(frames: Frames, with_fa3: bool, short: bool = False) -> dict[str, Attend]:
    """What can run this layout on this device, by name; `short`: without torch's where both others can.

    Torch's (FA2) is the slowest at every layout that was measured: at best two thirds of cuDNN's speed.
    """
    if not frames.cu_seqlens.is_cuda:
        return {"torch": by_frame(frames)}
    found = {"fa3": fa3(frames)} if with_fa3 else {}
    if frames.are_equal:
        found["cudnn"] = cudnn(frames)
    return found if short and len(found) == 2 else found | {"torch": varlen(frames)}
