"""The peers of the fused tower: the tower as an inference engine runs it, varlen attention, torch.compile.

The engine-like peer uses cuBLAS for linear layers, the fastest varlen attention there is, one fused rotary kernel in
place on the packed q | k | v, and torch's LayerNorm, GELU and residual, with everything from patches to mergers in one
CUDA graph of the exact shape. Its times exclude metadata and the interpolated position embedding, which are computed
before, and copies in and out.
"""

import lzma
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedvit.bench.timing import replayed
from fusedvit.bench.towers import shared_copy
from fusedvit.bench.workloads import Grid

# (q, k, v), each `[T, heads, head_dim]` and perhaps a view of a packed buffer -> `[T, heads, head_dim]`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Frames:
    """The attention sequences of a batch.

    Attributes:
        cu_seqlens: `[frames + 1]` int32 on the device.
        lengths: the sequences' lengths, on the host.
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
    """Registers the operators of vLLM's FA3 build; `path` is its shared library, perhaps compressed (`.xz`).

    Raises:
        OSError: there is no such file, or it cannot be loaded here.
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
    """SDPA frame by frame, for devices where nothing better runs (the CPU)."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        done = []
        for frame in zip(*(t.split(frames.lengths) for t in (q, k, v)), strict=True):
            a, b, c = (t.transpose(0, 1)[None] for t in frame)
            done.append(F.scaled_dot_product_attention(a, b, c, scale=scale)[0].transpose(0, 1))
        return torch.cat(done)

    return attend


def available(frames: Frames, with_fa3: bool, short: bool = False) -> dict[str, Attend]:
    """The attentions that can run this layout on this device, by name; `short` leaves torch's out if both others can.

    Torch's (FA2) is the slowest at every measured layout: at best two thirds of cuDNN's speed.
    """
    if not frames.cu_seqlens.is_cuda:
        return {"torch": by_frame(frames)}
    found = {"fa3": fa3(frames)} if with_fa3 else {}
    if frames.are_equal:
        found["cudnn"] = cudnn(frames)
    return found if short and len(found) == 2 else found | {"torch": varlen(frames)}


DEFINED = ("Qwen3VLVisionModel", "Qwen3VLMoeVisionModel")
UNDEFINED = f"it is written for {' and '.join(DEFINED)} alone"


def defined_for(tower: nn.Module) -> bool:
    """Whether `forward` computes the same as the tower."""
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
    """The values that an engine has computed for a batch before its graph runs.

    Attributes:
        positions: `[T, hidden]`, interpolated position embedding.
        cos, sin: `[T, head_dim / 2]` fp32.
    """

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    frames: Frames


def lay_out(tower: nn.Module, grid: Grid, device: torch.device) -> Layout:
    """The layout of `grid`, computed by Hugging Face's own functions."""
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


def prepare(tower: nn.Module, pixels: torch.Tensor, layout: Layout, attend: Attend) -> Callable[[], list[torch.Tensor]]:
    """The tower's call for this shape, as a graph's replay, which writes the same outputs each time."""

    def run() -> list[torch.Tensor]:
        hidden, merged, deepstack = forward(tower, pixels, layout, attend)
        return [hidden, merged, *deepstack]

    return replayed(run, pixels.device)


def compiled(tower: nn.Module) -> dict[str, Callable[..., Any]]:
    """torch.compile of Hugging Face's tower on the same parameters, by name. Each first call compiles for a minute."""
    modes = {"hf compiled": None, "hf compiled, reduce-overhead": "reduce-overhead"}
    return {n: _stepping(torch.compile(shared_copy(tower), mode=mode, dynamic=False)) for n, mode in modes.items()}


def _stepping(module: Callable[..., Any]) -> Callable[..., Any]:
    """`module` with a mark before each call that lets CUDA graphs overwrite the last call's outputs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return module(*args, **kwargs)

    return call


def padded_in_graphs(
    tower: Any, pixel_values: torch.Tensor, pixel_position_ids: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """Hugging Face's Gemma 4 tower in a CUDA graph, once with its blocks as they are and once with compiled blocks.

    The padding that all images share is cut off, and there is no mask, as if all images had one size: no graph of
    Hugging Face's code can be faster. The last step, whose shape depends on its content, is eager.
    """
    patches = int((pixel_position_ids >= 0).all(-1).sum(-1).max())
    images, positions = pixel_values[:, :patches].contiguous(), pixel_position_ids[:, :patches].contiguous()
    found = {}
    for name, mode in {"hf graph": None, "hf compiled graph": "default"}.items():
        blocks = [torch.compile(layer, dynamic=False) if mode else layer for layer in tower.encoder.layers]
        found[name] = _padded_in_a_graph(tower, blocks, images, positions)
    return found


def _padded_in_a_graph(
    tower: Any, blocks: Sequence[Callable[..., torch.Tensor]], images: torch.Tensor, positions: torch.Tensor
) -> Callable[[], torch.Tensor]:
    config, none = tower.config, torch.zeros(positions.shape[:2], dtype=torch.bool, device=images.device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = tower.patch_embedder(images, positions, none)
        rotary = tower.encoder.rotary_emb(hidden, positions)
        for block in blocks:
            hidden = block(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
        length = images.shape[1] // config.pooling_kernel_size**2
        pooled, valid = tower.pooler(hidden, positions, none, length)
        return pooled, valid

    def finish(pooled: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        rows = pooled[valid]
        if config.standardize:
            rows = (rows - tower.std_bias.float()) * tower.std_scale.float()
        return rows.to(images.dtype)

    replay = replayed(run, images.device)

    def call() -> torch.Tensor:
        return finish(*replay())

    torch.testing.assert_close(call(), finish(*run()))
    return call
