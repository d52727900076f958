"""One operation of the encoder at a time beside the Hugging Face modules it stands for, on the same inputs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import nn

from fusedvit.kernels.attention import query_scale
from fusedvit.kernels.epilogue import Epilogue, NormFold, Rope, RowStats
from fusedvit.kernels.metadata import MERGED, TOKENS
from fusedvit.kernels.reference.linear import store_moments
from fusedvit.kernels.reference.metadata import vision_metadata
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.buffers import Capacity, EncoderBuffers, allocate
from fusedvit.model.encoder import encode
from fusedvit.model.ops import Ops
from fusedvit.model.plan import EncoderPlan, plan_for
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights, MergerWeights
from fusedvit.runtime.inputs import Item


@dataclass(frozen=True)
class Stage:
    """ours, and Hugging Face's own modules in the working dtype (pt) and in fp32 (ref), on equal inputs."""

    name: str
    ours: torch.Tensor
    pt: torch.Tensor
    ref: torch.Tensor


@dataclass(frozen=True)
class Setting:
    """A workload laid out for the operations."""

    spec: VisionSpec
    weights: EncoderWeights
    buffers: EncoderBuffers
    plan: EncoderPlan
    ops: Ops


def lay_out(
    spec: VisionSpec, weights: EncoderWeights, ops: Ops, grid: list[tuple[int, int, int]], pixels: torch.Tensor
) -> Setting:
    """Runs the encoder once, so that metadata is there; its other buffers are then free to use.

    The twin's first, for the rotary table that Hugging Face's side reads: the kernel writes words alone.
    """
    items = [Item(*row) for row in grid]
    plan = plan_for(spec, pixels.shape[0], pixels.dtype, Target.of(pixels.device))
    buffers = allocate(spec, Capacity.of(items, plan.layout(spec)), pixels.dtype, pixels.device, pixels)
    buffers.grid.copy_(torch.tensor(grid))
    vision_metadata(buffers.grid, weights.inv_freq, buffers.meta, plan.layout(spec))
    encode(spec, weights, buffers, ops, plan)
    return Setting(spec, weights, buffers, plan, ops)


def stages(setting: Setting, hf: Any, hf32: Any, hidden: torch.Tensor, layer: int) -> Iterator[Stage]:
    """Every kernel of block `layer` and of the merger, each fed with what Hugging Face's previous step gives.

    Args:
        hf: the tower in the working dtype.
        hf32: the same weights in fp32.
        hidden: `[T, hidden]`, the block's input in the working dtype.
    """
    block, block32 = hf.blocks[layer], hf32.blocks[layer]
    qkv, pt, ref = _qkv(setting, hf, hf32, hidden, layer)
    yield Stage("qkv + norm + rope", qkv, pt, ref)
    context, context_pt, context_ref = _attention(setting, pt)
    yield Stage("attention", context, context_pt, context_ref)
    yield _residual(setting, "proj + residual", layer, "proj", context_pt, hidden, (block.attn.proj, block32.attn.proj))
    inner = _inner(setting, block, block32, hidden, layer)
    yield inner
    fc2 = (block.mlp.linear_fc2, block32.mlp.linear_fc2)
    yield _residual(setting, "fc2 + residual", layer, "fc2", inner.pt, hidden, fc2)
    yield from _mergers(setting, hf, hf32, hidden)


def _stats(setting: Setting, hidden: torch.Tensor) -> RowStats:
    stats = RowStats.over(setting.buffers.stats, hidden.shape[0], hidden.shape[1], 128)
    store_moments(hidden, stats)
    return stats


def _qkv(
    s: Setting, hf: Any, hf32: Any, hidden: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    w, d = s.weights.blocks[layer].qkv, s.spec.head_dim
    fold = NormFold(_stats(s, hidden), w.colsum, s.spec.norm_eps)
    rope = Rope(s.buffers.meta.rope, 2 * s.spec.hidden_size, d, s.buffers.meta.packed_cos_sin)
    out = hidden.new_empty(hidden.shape[0], 3 * s.spec.hidden_size)
    s.ops.linear(hidden, w.weight, s.buffers.meta.count(TOKENS), out, Epilogue(w.bias, fold, rope=rope), s.plan.qkv)
    q, k, v = rearrange(out, "t (three h d) -> three t h d", three=3, d=d)
    q, k = (rearrange(x, "t h (p half) -> t h (half p)", half=2) for x in (q, k))
    ours = torch.stack([q.float() / query_scale(d), k.float(), v.float()], 1)  # q as rounded, no more
    return ours, _hf_qkv(hf.blocks[layer], hidden, s), _hf_qkv(hf32.blocks[layer], hidden.float(), s)


def _hf_qkv(block: Any, x: torch.Tensor, s: Setting) -> torch.Tensor:
    """`[T, 3, heads, head_dim]`, rotated as Hugging Face does: in fp32, rounded before and after."""
    q, k, v = block.attn.qkv(block.norm1(x)).view(x.shape[0], 3, s.spec.num_heads, -1).unbind(1)
    cos, sin = (t.repeat(1, 2).unsqueeze(1) for t in s.buffers.meta.rope.unbind(1))
    q, k = ((t.float() * cos + _rotate_half(t.float()) * sin).to(x.dtype) for t in (q, k))
    return torch.stack([q, k, v], 1)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def _attention(s: Setting, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.unbind(1)
    qkv = torch.stack([q * query_scale(s.spec.head_dim), k, v], 1)
    packed = qkv.flatten(1).contiguous()
    out = packed.new_empty(packed.shape[0], s.spec.hidden_size)
    for segments, config in s.plan.frames(s.buffers.meta):
        s.ops.attention(packed, segments, out, s.spec.num_heads, s.spec.head_dim, config)
    bounds = s.buffers.meta.cu_seqlens.tolist()
    return out, _hf_attention(qkv, bounds), _hf_attention(qkv.float(), bounds)


def _hf_attention(qkv: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    frames = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        q, k, v = rearrange(qkv[begin:end], "t three h d -> three 1 h t d")
        frame = nn.functional.scaled_dot_product_attention(q, k, v, scale=math.log(2))  # of q as `query_scale` has it
        frames.append(rearrange(frame, "1 h t d -> t (h d)"))
    return torch.cat(frames)


def _residual(
    s: Setting, name: str, layer: int, which: str, x: torch.Tensor, hidden: torch.Tensor, hf: tuple[Any, Any]
) -> Stage:
    w, config = getattr(s.weights.blocks[layer], which), getattr(s.plan, which)
    out = hidden.clone()
    stats = RowStats.over(s.buffers.stats, hidden.shape[0], hidden.shape[1], config.block_n)
    epilogue = Epilogue(w.bias, residual=out, stats=stats, scratch=s.buffers.scratch)
    s.ops.linear(x.contiguous(), w.weight, s.buffers.meta.count(TOKENS), out, epilogue, config)
    return Stage(name, out, hidden + hf[0](x), hidden.float() + hf[1](x.float()))


def _inner(s: Setting, block: Any, block32: Any, hidden: torch.Tensor, layer: int) -> Stage:
    w = s.weights.blocks[layer].fc1
    fold = NormFold(_stats(s, hidden), w.colsum, s.spec.norm_eps)
    out = hidden.new_empty(hidden.shape[0], s.spec.intermediate_size)
    epilogue = Epilogue(w.bias, fold, activation=s.spec.activation)
    s.ops.linear(hidden, w.weight, s.buffers.meta.count(TOKENS), out, epilogue, s.plan.fc1)
    pt, ref = (b.mlp.act_fn(b.mlp.linear_fc1(b.norm2(x))) for b, x in ((block, hidden), (block32, hidden.float())))
    return Stage("fc1 + norm + activation", out, pt, ref)


def _mergers(s: Setting, hf: Any, hf32: Any, hidden: torch.Tensor) -> Iterator[Stage]:
    merged, config = s.buffers.meta.count(MERGED), s.plan.merger_fc1
    side = hidden.view(-1, s.spec.merged_size)
    w = s.weights.merger
    assert isinstance(w, MergerWeights) and w.norm is not None, "Qwen3-VL's merger, whose norm is not folded"
    normed = torch.empty_like(hidden)
    tokens = s.buffers.meta.count(TOKENS)
    s.ops.layer_norm(hidden, w.norm.weight, w.norm.bias, tokens, normed, s.spec.norm_eps, s.plan.max_programs)
    yield Stage("merger norm", normed, hf.merger.norm(hidden), hf32.merger.norm(hidden.float()))
    for i, w in enumerate(s.weights.deepstack[:1]):
        fold = NormFold(_stats(s, hidden).merged(s.spec.merge_unit), w.fc1.colsum, s.spec.norm_eps)
        out = torch.empty_like(side)
        epilogue = Epilogue(w.fc1.bias, fold, activation="gelu", scratch=s.buffers.scratch)
        s.ops.linear(side, w.fc1.weight, merged, out, epilogue, config)
        pairs = ((hf.deepstack_merger_list[i], side), (hf32.deepstack_merger_list[i], side.float()))
        pt, ref = (m.act_fn(m.linear_fc1(m.norm(x))) for m, x in pairs)
        yield Stage("deepstack fc1 + norm + gelu", out, pt, ref)
