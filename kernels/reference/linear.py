"""Reference of `kernels.linear`: its formula op by op, in fp32 (fp64 for fp64 inputs)."""

import torch
import torch.nn.functional as F
from einops import rearrange

from fusedvit.kernels.epilogue import HEAD_WIDTH, Epilogue, HeadNorm, NormFold, Rope, RowStats, Taps
from fusedvit.kernels.tile_configs import LinearConfig


def wide(t: torch.Tensor) -> torch.Tensor:
    """`t` in the dtype that references compute in."""
    return t if t.dtype == torch.float64 else t.float()


def part_sizes(stats: RowStats) -> torch.Tensor:
    """`[parts]` fp64: channels of each part."""
    per_length = -(-stats.length // stats.width)
    part = torch.arange(stats.parts, device=stats.partials.device) % per_length
    return (stats.length - part * stats.width).clamp(max=stats.width).double()


def moments(stats: RowStats, rows: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / sqrt(var + eps)), each `[rows, 1]` fp64, merged from partial moments."""
    size = part_sizes(stats)
    part_mean, part_m2 = stats.partials[:rows].double().unbind(-1)
    mean = (part_mean * size).sum(1, keepdim=True) / size.sum()
    m2 = (part_m2 + size * (part_mean - mean) ** 2).sum(1, keepdim=True)
    return mean, torch.rsqrt(m2 / size.sum() + eps)


def inverse_rms(stats: RowStats, rows: int, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + eps), `[rows, 1]` fp64, from partial moments."""
    size = part_sizes(stats)
    part_mean, part_m2 = stats.partials[:rows].double().unbind(-1)
    return torch.rsqrt((part_m2 + size * part_mean**2).sum(1, keepdim=True) / size.sum() + eps)


def store_moments(y: torch.Tensor, stats: RowStats) -> None:
    """Writes the partial moments of the rows of `y` `[rows, length]`."""
    for part, columns in enumerate(wide(y).split(stats.width, dim=1)):
        mean = columns.mean(1)
        stats.partials[: y.shape[0], part, 0] = mean
        stats.partials[: y.shape[0], part, 1] = ((columns - mean[:, None]) ** 2).sum(1)


def _norm(acc: torch.Tensor, norm: NormFold) -> torch.Tensor:
    assert norm.stats is not None, "a norm fold needs stats"
    if norm.colsum is None:
        return acc * inverse_rms(norm.stats, acc.shape[0], norm.eps).to(acc.dtype)
    mean, rstd = (m.to(acc.dtype) for m in moments(norm.stats, acc.shape[0], norm.eps))
    return rstd * (acc - mean * norm.colsum.to(acc.dtype))


def add_taps(acc: torch.Tensor, taps: Taps) -> torch.Tensor:
    """`acc` `[rows, N]` plus the weighted rows of the table."""
    assert taps.table is not None and taps.index is not None and taps.weight is not None, "taps need all three"
    rows = acc.shape[0]
    picked = taps.table.to(acc.dtype)[taps.index[:rows].long()]  # [rows, taps, N]
    return acc + (picked * taps.weight[:rows, :, None].to(acc.dtype)).sum(1)


def normalise_heads(acc: torch.Tensor, heads: HeadNorm) -> torch.Tensor:
    """`acc` `[rows, N]` with its heads of q and k, perhaps of v, clamped and normalised."""
    parts = list(acc.chunk(3, 1))
    for i, weight in enumerate(heads.weight.to(acc.dtype)):
        x = parts[i] if heads.clip is None else clamp(parts[i], heads.clip[i])
        x = rearrange(x, "t (h d) -> t h d", d=HEAD_WIDTH)
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + heads.eps) * weight
        parts[i] = rearrange(y, "t h d -> t (h d)")
    return torch.cat(parts, 1)


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The pairs of neighbours of heads `x` `[rows, heads, head_dim]`, rotated by `table` `[T, 2, head_dim / 2]`."""
    cos, sin = table[: x.shape[0]].to(x.dtype).unsqueeze(1).unbind(2)  # [rows, 1, head_dim / 2]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def _rope(acc: torch.Tensor, rope: Rope) -> torch.Tensor:
    assert rope.table is not None, "rope needs a table"
    heads = rearrange(acc[:, : rope.cols], "t (h d) -> t h d", d=2 * rope.table.shape[-1])
    return torch.cat([rotated(heads, rope.table).flatten(1), acc[:, rope.cols :]], dim=1)


def _activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "gelu":
        return F.gelu(x)
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return x


def clamp(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """`x` within `bounds` `[2]`."""
    return x.clamp(*bounds.to(x.dtype))


def _gate(acc: torch.Tensor, e: Epilogue) -> torch.Tensor:
    gate, up, limit = acc[:, 0::2], acc[:, 1::2], e.limit
    if e.activation == "geglu_tanh":
        if e.clip is None:
            return F.gelu(gate, approximate="tanh") * up
        return clamp(F.gelu(clamp(gate, e.clip[0]), approximate="tanh") * clamp(up, e.clip[1]), e.clip[2])
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    config: LinearConfig,
) -> torch.Tensor:
    """See `fusedvit.kernels.linear.linear`. `config` only sets the width of the statistics' parts."""
    e, rows = epilogue, int(num_rows)
    acc = wide(x[:rows]) @ wide(weight).T
    if e.norm is not None:
        acc = _norm(acc, e.norm)
    if e.bias is not None:
        acc = acc + e.bias.to(acc.dtype)
    if e.taps is not None:
        acc = add_taps(acc, e.taps)
    if e.heads is not None:
        acc = normalise_heads(acc, e.heads)
    if e.rope is not None:
        acc = _rope(acc, e.rope)
    acc = _gate(acc, e) if e.gated else _activate(acc, e.activation)
    if e.residual is not None:
        acc = acc + e.residual[:rows].to(acc.dtype)
    out[:rows] = acc.to(out.dtype)
    if e.stats is not None:
        store_moments(out[:rows], e.stats)
    return out
