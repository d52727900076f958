"""The peer that matters: the tower as inference engines run it, as fast as that gets.

cuBLAS linears, the best varlen attention there is, one fused rotary kernel in place on the packed q | k | v, torch's
LayerNorm, GELU and residual, everything from patches to mergers in one CUDA graph of the exact shape. Metadata and the
interpolated position embedding are made outside and not counted, and so is copying in and out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from fusedvit.bench.peer_attention import Attend, Frames
from fusedvit.bench.workloads import Grid

DEFINED = ("Qwen3VLVisionModel", "Qwen3VLMoeVisionModel")
UNDEFINED = f"it is written for {' and '.join(DEFINED)} alone"


def defined_for(tower: nn.Module) -> bool:
    """Whether `forward` computes what the tower does."""
    return type(tower).__name__ in DEFINED


@triton.jit
def _rotate_kernel(
    qkv_ptr,  # [T, 3, HEADS, 2 * HALF], q and k rotated in place
    cos_ptr,  # [T, HALF] fp32
    sin_ptr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # q's and k's, one after another
    cols = tl.arange(0, BLOCK_C)
    cos = tl.load(cos_ptr + row * HALF + cols, mask=cols < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + cols, mask=cols < HALF, other=0.0)
    mask = (heads < 2 * HEADS)[:, None] & (cols < HALF)[None, :]
    ptrs = qkv_ptr + row * (6 * HEADS * HALF) + heads[:, None] * (2 * HALF) + cols[None, :]  # [BLOCK_H, BLOCK_C]
    a = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptrs, (a * cos - b * sin).to(qkv_ptr.dtype.element_ty), mask=mask)
    tl.store(ptrs + HALF, (b * cos + a * sin).to(qkv_ptr.dtype.element_ty), mask=mask)


def rotate_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> None:
    """Rotary embedding of q and k in place: `[T, 3 * heads * head_dim]`, cos and sin `[T, head_dim / 2]` fp32."""
    rows, half = cos.shape
    block_h = min(16, triton.next_power_of_2(2 * heads))
    grid = (rows, triton.cdiv(2 * heads, block_h))
    _rotate_kernel[grid](
        qkv, cos, sin, HEADS=heads, HALF=half, BLOCK_H=block_h, BLOCK_C=triton.next_power_of_2(half), num_warps=2
    )


@dataclass(frozen=True)
class Layout:
    """What an engine knows of a batch before its graph runs.

    Attributes:
        positions: `[T, hidden]`, interpolated position embedding.
        cos, sin: `[T, head_dim / 2]` fp32.
    """

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    frames: Frames


def lay_out(tower: nn.Module, grid: Grid, device: torch.device) -> Layout:
    """Computed by Hugging Face's own functions."""
    from transformers import vision_utils

    hf: Any = tower
    dtype = next(tower.parameters()).dtype
    grid_thw = torch.tensor(grid, device=device)
    merge = hf.config.spatial_merge_size
    index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
        grid_thw, num_grid_per_side=int(hf.pos_embed.num_embeddings**0.5), mode="bilinear", align_corners=True,
        spatial_merge_size=merge,
    )  # fmt: skip
    positions = (hf.pos_embed(index) * weight[:, :, None]).sum(1).to(dtype)
    cos, sin = hf.rotary_pos_emb(positions.float(), vision_utils.get_vision_position_ids(grid_thw, merge))
    half = cos.shape[-1] // 2
    lengths = tuple(h * w for t, h, w in grid for _ in range(t))
    frames = Frames(vision_utils.get_vision_cu_seqlens(grid_thw).int(), lengths)
    return Layout(positions, cos[:, :half].float().contiguous(), sin[:, :half].float().contiguous(), frames)


def forward(
    tower: nn.Module, pixels: torch.Tensor, layout: Layout, attend: Attend
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(last hidden state, merged, deepstack features), on Hugging Face's own parameters."""
    hf: Any = tower
    patch = hf.patch_embed.proj
    rows, heads = pixels.shape[0], hf.config.num_heads
    h = F.linear(pixels, patch.weight.flatten(1), patch.bias) + layout.positions
    deepstack: list[torch.Tensor] = []
    for i, block in enumerate(hf.blocks):
        qkv = block.attn.qkv(block.norm1(h))
        rotate_(qkv, layout.cos, layout.sin, heads)
        q, k, v = qkv.view(rows, 3, heads, -1).unbind(1)
        h = h + block.attn.proj(attend(q, k, v).reshape(rows, -1))
        h = h + block.mlp(block.norm2(h))
        if i in hf.deepstack_visual_indexes:
            deepstack.append(hf.deepstack_merger_list[len(deepstack)](h))
    return h, hf.merger(h), deepstack


@dataclass(frozen=True)
class EngineLike:
    """One shape, ready to run: `run` replays the graph (on a CPU: runs), `outputs` holds what it gives.

    `held`: what a graph reads, as it keeps no memory alive by itself.
    """

    run: Callable[[], Any]
    outputs: list[torch.Tensor]
    held: tuple[Any, ...]


def prepare(tower: nn.Module, pixels: torch.Tensor, layout: Layout, attend: Attend) -> EngineLike:
    """Captures the tower for this shape; on a CPU there is nothing to capture."""

    def run() -> list[torch.Tensor]:
        hidden, merged, deepstack = forward(tower, pixels, layout, attend)
        return [hidden, merged, *deepstack]

    if not pixels.is_cuda:
        return EngineLike(run, run(), ())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return EngineLike(graph.replay, outputs, (pixels, layout, attend))
