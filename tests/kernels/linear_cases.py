"""One linear layer of a tower, written twice: as PyTorch writes it (LayerNorm, Linear, rotate_half, ...) and as the
kernels take it (norm folded into the weight, rotary pairs made neighbours)."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange

from fusedvit.kernels.epilogue import GATED, Epilogue, HeadNorm, NormFold, Rope, RowStats, Scratch, Taps
from fusedvit.kernels.launch import from_cache
from fusedvit.kernels.positions import packed_width
from fusedvit.kernels.reference.linear import store_moments
from fusedvit.kernels.reference.positions import packed_cos_sin
from fusedvit.kernels.tile_configs import LinearConfig
from tests.kernels.support import NAN, assert_nothing_behind, count, padded, random

EPS = 1e-6
Op = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer's shape and what follows its product.

    Attributes:
        rows, k, n: the product.
        norm: a norm comes first.
        rms: it is an RMSNorm.
        merged: rows of x are this many producing rows (a deepstack merger's).
        part: channels of a part of x's statistics.
        heads: rotary heads of q | k | v, 0 for none; n is then 3 * heads * head_dim.
        taps: a four-tap position embedding is added.
        massive: one channel of x is 200 times the rest, as in trained towers.
        limit: of swiglu's factors; None for none.
        clipped: geglu_tanh's factors and output are clamped, or q, k and v before their heads are normalised.
        normed: how many of q, k and v have their heads, of 64 columns, normalised.
    """

    rows: int
    k: int
    n: int
    bias: bool = True
    norm: bool = False
    rms: bool = False
    merged: int = 1
    part: int = 32
    heads: int = 0
    taps: bool = False
    activation: str = "none"
    residual: bool = False
    stats: bool = False
    massive: bool = False
    limit: float | None = None
    clipped: bool = False
    normed: int = 0

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def bounds(self) -> torch.Tensor | None:
        return torch.tensor([[-0.8, 0.9], [-1.1, 0.7], [-0.3, 0.5]]) if self.clipped else None

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.n // 2 if self.gated else self.n


@dataclass(frozen=True)
class Tensors:
    """What a layer reads, rounded to the working dtype but for angles and tap weights, which are fp32 everywhere."""

    x: torch.Tensor  # [rows, k]
    weight: torch.Tensor  # [n, k]
    bias: torch.Tensor  # [n]
    gamma: torch.Tensor  # [k]
    beta: torch.Tensor  # [k]
    angle: torch.Tensor  # [rows, head_dim / 2]
    table: torch.Tensor  # [9, n]
    index: torch.Tensor  # [rows, 4]
    tap: torch.Tensor  # [rows, 4]
    residual: torch.Tensor  # [rows, n]
    head: torch.Tensor  # [3, head_dim]

    def to(self, dtype: torch.dtype) -> "Tensors":
        """The same numbers in another dtype."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        return Tensors(**{k: t.to(dtype) if t.is_floating_point() else t for k, t in kept.items()})


def tensors(layer: Layer, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensors:
    """Random tensors for `layer`; outputs are of order 1."""

    def draw(*shape: int, n: int, scale: float = 1.0) -> torch.Tensor:
        return random(*shape, seed=100 * seed + n, scale=scale, device=device)

    x = draw(layer.rows, layer.k, n=0)
    if layer.massive:
        x[:, layer.k // 3] = 200.0
        x[:, layer.k // 2] = -200.0
    half = max(1, layer.n // (6 * layer.heads)) if layer.heads else 1
    rounded = Tensors(
        x=x,
        weight=draw(layer.n, layer.k, n=1, scale=layer.k**-0.5),
        bias=draw(layer.n, n=2),
        gamma=1 + draw(layer.k, n=3, scale=0.2),
        beta=draw(layer.k, n=4, scale=0.2),
        angle=draw(layer.rows, half, n=5, scale=3.0),
        table=draw(9, layer.n, n=6),
        index=draw(layer.rows, 4, n=7).abs().mul(3).long().clamp(max=8),
        tap=draw(layer.rows, 4, n=8).softmax(1),
        residual=draw(layer.rows, layer.width, n=9),
        head=1 + draw(3, 2 * half, n=10, scale=0.2),
    ).to(dtype)
    return replace(rounded, angle=draw(layer.rows, half, n=5, scale=3.0), tap=draw(layer.rows, 4, n=8).softmax(1))


def plain(layer: Layer, t: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """The layer op by op in `dtype`, each op rounding as Hugging Face's does; columns in the kernels' order."""
    angle, tap = t.angle, t.tap
    t = t.to(dtype)
    x = _normed(layer, t)
    y = F.linear(x, t.weight, t.bias if layer.bias else None)
    if layer.taps:
        y = y + (t.table[t.index] * tap.to(dtype)[:, :, None]).sum(1)
    if layer.normed:
        y = _with_normed_heads(layer, t, y)
    if layer.heads:
        y = pair_columns(_rotate_q_and_k(y, angle, layer.heads), layer.heads)
    y = _gate(layer, y) if layer.gated else _activations()[layer.activation](y)
    return t.residual + y if layer.residual else y


def _normed(layer: Layer, t: Tensors) -> torch.Tensor:
    if not layer.norm:
        return t.x
    return _rms_norm(t.x, t.gamma) if layer.rms else F.layer_norm(t.x, (layer.k,), t.gamma, t.beta, EPS)


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # as Hugging Face: rounded, then scaled
    return gamma * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _with_normed_heads(layer: Layer, t: Tensors, y: torch.Tensor) -> torch.Tensor:
    parts, bounds = list(y.chunk(3, 1)), layer.bounds
    for i, gamma in enumerate(t.head[: layer.normed]):
        part = parts[i] if bounds is None else parts[i].clamp(*bounds[i].tolist())
        parts[i] = _rms_norm(part.unflatten(1, (layer.heads, -1)), gamma).flatten(1)
    return torch.cat(parts, 1)


def _gate(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    """Columns alternate: gate, up."""
    gate, up = y[:, 0::2], y[:, 1::2]
    if layer.activation == "geglu_tanh":
        if layer.bounds is None:
            return F.gelu(gate, approximate="tanh") * up
        of_gate, of_up, of_both = layer.bounds.tolist()
        return (F.gelu(gate.clamp(*of_gate), approximate="tanh") * up.clamp(*of_up)).clamp(*of_both)
    if layer.limit is not None:
        gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
    return F.silu(gate) * up


def _activations() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        "none": lambda y: y,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
    }


def _rotate_q_and_k(y: torch.Tensor, angle: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary embedding with pairs (i, i + head_dim / 2), in fp32 or wider, as `apply_rotary_pos_emb_vision`."""
    wide = torch.promote_types(y.dtype, torch.float32)
    emb = torch.cat([angle, angle], dim=-1).to(wide)[:, None]  # [rows, 1, head_dim]
    q, k, v = rearrange(y, "t (three h d) -> three t h d", three=3, h=heads)

    def rotated(z: torch.Tensor) -> torch.Tensor:
        a, b = z.to(wide).chunk(2, dim=-1)
        return (z.to(wide) * emb.cos() + torch.cat([-b, a], dim=-1) * emb.sin()).to(y.dtype)

    return rearrange([rotated(q), rotated(k), v], "three t h d -> t (three h d)")


def pair_columns(y: torch.Tensor, heads: int) -> torch.Tensor:
    """Columns of q and k from (i, i + d / 2) to neighbours; v as it is."""
    q, k, v = rearrange(y, "t (three h d) -> three t h d", three=3, h=heads)
    q, k = (rearrange(z, "t h (half p) -> t h (p half)", half=2) for z in (q, k))
    return rearrange([q, k, v], "three t h d -> t (three h d)")


@dataclass(frozen=True)
class Fused:
    """Arguments of `linear` but for the output; rows past `num_rows` of everything are NaN."""

    layer: Layer
    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor
    epilogue: Epilogue
    num_rows: torch.Tensor

    def run(self, op: Op, config: Any, scratch: Scratch | None = None) -> tuple[torch.Tensor, RowStats | None]:
        """`op`'s whole output buffer, and the statistics it wrote. The residual is the output, as in the encoder.

        Args:
            scratch: of earlier runs; None for one of its own where it needs one.
        """
        kept = self.residual if self.layer.residual else self.residual[:0]
        out = padded(kept, self.residual.shape[0])
        stats = None
        if self.layer.stats:
            room = out.shape[0] * -(-self.layer.n // config.block_n) * 2
            storage = torch.full((room,), NAN, device=out.device)
            stats = RowStats.over(storage, out.shape[0], self.layer.n, config.block_n)
        scratch = scratch or scratch_for(config, out.shape[0], self.layer.n, out.device)
        epilogue = replace(self.epilogue, residual=out if self.layer.residual else None, stats=stats, scratch=scratch)
        op(self.x, self.weight, self.num_rows, out, epilogue, config)
        if not (from_cache() is not None or (out.is_cuda and torch.cuda.is_current_stream_capturing())):
            assert_nothing_behind(out)
        return out, stats


def scratch_for(config: Any, rows: int, n: int, device: torch.device) -> Scratch | None:
    """Scratch memory of split-K, poisoned."""
    if not isinstance(config, LinearConfig) or config.splits == 1:
        return None
    scratch = Scratch.zeros(*config.scratch_sizes(rows, n), device)
    scratch.sums.fill_(NAN)
    return scratch


def fused(layer: Layer, t: Tensors, capacity: int | None = None, wide: torch.dtype | None = None) -> Fused:
    """`layer` as the kernels take it, in buffers of `capacity` rows.

    Args:
        wide: after folding and rounding as for t's own dtype, the dtype to compute in.
    """
    rows = layer.rows if capacity is None else capacity
    weight, bias, colsum = _prepared(layer, t)
    dtype = t.x.dtype if wide is None else wide
    norm = None
    if layer.norm:
        norm = NormFold(_stats_of(layer, t, rows), None if layer.rms else colsum, EPS)
    rope = taps = None
    if layer.heads:
        table = torch.stack([t.angle.cos(), t.angle.sin()], dim=1)
        head_dim = layer.n // (3 * layer.heads)
        packed = torch.empty(layer.rows, packed_width(head_dim), dtype=torch.int32, device=table.device)
        packed_cos_sin(table.float(), count(layer.rows, table.device), packed)
        rope = Rope(_poisoned(table, rows), 2 * layer.n // 3, head_dim, _poisoned(packed, rows))
    if layer.taps:
        taps = Taps(t.table.to(dtype), _poisoned(t.index.int(), rows), _poisoned(t.tap, rows))
    if wide is not None:
        bias, colsum = bias.to(wide), colsum.to(wide)
    weight = padded(weight.to(dtype), layer.n)
    bias = bias if layer.bias else None
    clip = None if layer.bounds is None else layer.bounds.to(t.x.device)
    heads = None
    if layer.normed:
        spread = t.head.repeat_interleave(layer.heads, 0).reshape(1, -1).to(dtype)
        paired = pair_columns(spread, layer.heads).reshape(3, layer.heads, -1)[: layer.normed, 0].contiguous()
        heads, clip = HeadNorm(paired, EPS, None if clip is None else clip[: layer.normed].contiguous()), None
    epilogue = Epilogue(bias, norm, taps, rope, layer.activation, layer.limit, clip, heads=heads)
    return Fused(
        layer,
        padded(t.x.to(dtype), rows),
        weight,
        padded(t.residual.to(dtype), rows),
        epilogue,
        count(layer.rows, t.x.device),
    )


def _prepared(layer: Layer, t: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight, bias, colsum) with the norm folded in and rotary pairs made neighbours."""
    weight, bias = t.weight, t.bias
    if layer.norm:
        weight = (t.weight.double() * t.gamma.double()).to(t.x.dtype)
        if not layer.rms:
            bias = (t.bias.double() + t.weight.double() @ t.beta.double()).float()
    if layer.heads:
        weight, bias = pair_columns(weight.T, layer.heads).T, pair_columns(bias[None], layer.heads)[0]
    return weight, bias, weight.double().sum(1).float()


def _stats_of(layer: Layer, t: Tensors, capacity: int) -> RowStats:
    """Statistics of x as its producer would have written them."""
    length = layer.k // layer.merged
    rows = capacity * layer.merged
    storage = torch.full((rows * -(-length // layer.part) * 2,), NAN, device=t.x.device)
    stats = RowStats.over(storage, rows, length, layer.part)
    store_moments(t.x.reshape(-1, length), stats)
    return stats.merged(layer.merged)


def _poisoned(t: torch.Tensor, rows: int) -> torch.Tensor:
    """`t` with rows up to `rows`: NaN, or an index out of bounds."""
    rest = t.new_full((rows - t.shape[0], *t.shape[1:]), NAN if t.is_floating_point() else 2**30)
    return torch.cat([t, rest])
