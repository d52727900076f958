"""The steps of a GEMM between a tile's fp32 sums and the stored output; `kernels.linear` has the formula.

First come the records that the host passes (`Epilogue` and its parts), then the jit functions that plain Triton's
kernels call. Hopper's GEMMs take the same records and have their own functions (hopper/gemm_epilogue.py).

Row statistics are partial moments: a producing epilogue writes them so that the next GEMM can fold its norm in. A row
of `length` channels is cut into parts of `width`. For each part the mean and M2, the sum of squared deviations, are
kept in fp32; the reader merges them with the pairwise update of Chan, Golub and LeVeque (1979). Unlike sums of squares
this stays exact when one channel is hundreds of times the rest, as in trained towers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

ACTIVATIONS = ("none", "gelu_tanh", "gelu", "quick_gelu", "swiglu", "geglu_tanh")
GATED = ("swiglu", "geglu_tanh")  # two columns of the product to one of the output
HEAD_WIDTH = 64  # columns of a head that an epilogue can normalise: Hopper's processes as many at a time
HEAD = tl.constexpr(HEAD_WIDTH)


@dataclass(frozen=True)
class RowStats:
    """Partial moments of rows.

    Attributes:
        partials: `[rows, parts, 2]` fp32, (mean, M2) of each part.
        width: channels of a part; the last part of each `length` may be narrower.
        length: channels of one producing row. A reader whose rows are several producing rows (a merger) sees
            `parts` grow by that factor: see `merged`.
    """

    partials: torch.Tensor
    width: int
    length: int

    @property
    def parts(self) -> int:
        return self.partials.shape[1]

    @staticmethod
    def over(storage: torch.Tensor, rows: int, length: int, width: int) -> "RowStats":
        """Stats of `rows` rows laid over flat fp32 `storage` (at least `rows * ceil(length / width) * 2` long)."""
        parts = -(-length // width)
        return RowStats(storage[: rows * parts * 2].view(rows, parts, 2), width, length)

    def merged(self, factor: int) -> "RowStats":
        """The same moments for rows that are `factor` consecutive producing rows."""
        rows, parts, _ = self.partials.shape
        return RowStats(self.partials.view(rows // factor, parts * factor, 2), self.width, self.length)


@dataclass(frozen=True)
class NormFold:
    """A norm folded into the weight: LayerNorm as `rstd * (acc - mean * colsum)`, RMSNorm as `acc / rms`.

    Attributes:
        stats: moments of the input rows.
        colsum: `[N]` fp32, row sums of the folded weight; None for an RMSNorm.
        eps: added to the variance, or to the mean square.
    """

    stats: RowStats | None = None
    colsum: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `cols` columns, whose pairs are neighbours (2i, 2i + 1) within each head.

    Attributes:
        table: `[T, 2, head_dim / 2]` fp32, cos and sin of each pair's angle.
        cols: columns to rotate: q and k.
        head_dim: columns of a head.
        packed: `[T, packed_width(head_dim)]` int32, cos and sin in 16 bits each (see positions.py), for operands of 16
            bits.
    """

    table: torch.Tensor | None = None
    cols: int = 0
    head_dim: int = 2
    packed: torch.Tensor | None = None

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, int]:
        """The factors that rotate operands of `dtype`: (`packed`, its columns), or (`table`, 0) for fp32 and wider."""
        if self.packed is None or dtype.itemsize > 2:
            return self.table, 0
        return self.packed, self.packed.shape[1]


@dataclass(frozen=True)
class HeadNorm:
    """An RMSNorm of each head of `HEAD_WIDTH` columns of q and k, perhaps of v, before the rotation.

    Attributes:
        weight: `[parts, HEAD_WIDTH]`, contiguous: the weights of q's norm, of k's, and perhaps of v's.
        eps: added to the mean square.
        clip: `[parts, 2]` fp32, contiguous: least and largest value of q, k and v before they are normalised; None for
            no clamp.
    """

    weight: torch.Tensor
    eps: float
    clip: torch.Tensor | None = None

    @property
    def parts(self) -> int:
        """How many thirds of the columns (q, k, v) are normalised."""
        return self.weight.shape[0]


@dataclass(frozen=True)
class Taps:
    """A weighted sum of rows of a table, added to each row: an interpolated position embedding.

    Attributes:
        table: `[positions, N]`.
        index: `[T, taps]` int32.
        weight: `[T, taps]` fp32.
    """

    table: torch.Tensor | None = None
    index: torch.Tensor | None = None
    weight: torch.Tensor | None = None


@dataclass(frozen=True)
class Scratch:
    """Memory of a split-K GEMM: the partial sums of its parts. One launch at a time may use it.

    Attributes:
        sums: flat fp32.
        counters: `[tiles]` int32, zeros before and after each launch.
    """

    sums: torch.Tensor
    counters: torch.Tensor

    @staticmethod
    def zeros(sums: int, counters: int, device: torch.device) -> "Scratch":
        """Room for so many partial sums and counters."""
        return Scratch(
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Epilogue:
    """Applied in this order: norm, bias, taps, heads, rope, activation, residual; then rounding and statistics.

    Attributes:
        bias: `[N]`, any float dtype.
        activation: one of `ACTIVATIONS`. "swiglu" takes columns in pairs (gate, up) and gives silu(gate) * up, half as
            many columns; "geglu_tanh" gives gelu_tanh(gate) * up.
        limit: clamps swiglu's factors first: gate to at most `limit`, up to at most `limit` in absolute value; None for
            no clamp.
        clip: for geglu_tanh, `[3, 2]` fp32, contiguous: least and largest value of gate, of up, and of the result; None
            for no clamp.
        residual: `[T, N]`; may be the output itself.
        stats: where moments of the rounded output rows go.
        scratch: for configurations that split K; others ignore it.
        heads: norms of heads.

    Raises:
        ValueError: an unknown activation; a gated one with a residual or statistics; a clip with any but geglu_tanh;
            norms of heads of another width, or together with a LayerNorm or a norm with another eps.
    """

    bias: torch.Tensor | None = None
    norm: NormFold | None = None
    taps: Taps | None = None
    rope: Rope | None = None
    activation: str = "none"
    limit: float | None = None
    clip: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    stats: RowStats | None = None
    scratch: Scratch | None = None
    heads: HeadNorm | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {self.activation!r}")
        if self.gated and (self.residual is not None or self.stats is not None):
            raise ValueError(f"{self.activation} takes neither residual nor statistics, got one")
        if self.clip is not None and self.activation != "geglu_tanh":
            raise ValueError(f"expected a clip of geglu_tanh, got one of {self.activation}")
        if self.heads is not None:
            self._check_heads(self.heads)

    def _check_heads(self, heads: HeadNorm) -> None:
        norm = self.norm or NormFold(eps=heads.eps)
        if heads.weight.shape[1] != HEAD_WIDTH or norm.colsum is not None or norm.eps != heads.eps:
            got = f"{heads.weight.shape[1]} columns, eps {heads.eps} beside {norm.eps}"
            raise ValueError(
                f"norms are of heads of {HEAD_WIDTH} columns, beside an RMSNorm of the same eps, got {got}"
            )

    @property
    def gated(self) -> bool:
        """Whether the output has one column for two of the product."""
        return self.activation in GATED

    @property
    def bounds(self) -> torch.Tensor | None:
        """The bounds that a kernel clamps by: `clip`, or the clip of the heads."""
        return self.clip if self.heads is None else self.heads.clip

    def vectors(self) -> tuple[torch.Tensor | None, ...]:
        """(bias, colsum, partial moments of the input): what a kernel reads for a tile's columns and rows."""
        norm = self.norm or _NO_NORM
        return self.bias, norm.colsum, None if norm.stats is None else norm.stats.partials

    def tap_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """(table, index, weight) of the taps."""
        return (None, None, None) if self.taps is None else (self.taps.table, self.taps.index, self.taps.weight)

    def moments_out(self) -> torch.Tensor | None:
        """Where partial moments of the output go."""
        return None if self.stats is None else self.stats.partials

    def constants(self, n: int, k: int) -> dict[str, Any]:
        """Compile-time arguments of a kernel of `n` output and `k` input features, in its order."""
        norm, rope = self.norm or _NO_NORM, self.rope or _NO_ROPE
        stats = norm.stats
        return {
            "N": n,
            "K": k,
            "EPS": norm.eps if self.heads is None else self.heads.eps,
            "IN_PARTS": 0 if stats is None else stats.parts,
            "IN_WIDTH": 1 if stats is None else stats.width,
            "IN_LENGTH": 1 if stats is None else stats.length,
            "ROPE_COLS": rope.cols,
            "HEAD_DIM": rope.head_dim,
            "HEAD_PARTS": 0 if self.heads is None else self.heads.parts,
            "TAPS": 0 if self.taps is None or self.taps.index is None else self.taps.index.shape[1],
            "ACT": self.activation,
            "LIMIT": self.limit,
        }


_NO_NORM, _NO_ROPE = NormFold(), Rope()


# ── jit functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def merge_moments(
    stats_ptr,  # [T, PARTS, 2] fp32
    rows,  # [BLOCK_M] int64
    mask_m,  # [BLOCK_M]
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """(mean, 1 / sqrt(var + eps)) of each row, merged from its parts CHUNK at a time."""
    PER_LENGTH: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    offs = tl.arange(0, CHUNK)
    count = 0.0
    mean = tl.zeros([rows.shape[0]], tl.float32)
    m2 = tl.zeros([rows.shape[0]], tl.float32)
    for start in tl.static_range(0, PARTS, CHUNK):
        part = start + offs
        size = tl.minimum(LENGTH - (part % PER_LENGTH) * WIDTH, WIDTH)
        size = tl.where(part < PARTS, size, 0).to(tl.float32)
        ptrs = stats_ptr + rows[:, None] * (2 * PARTS) + 2 * part[None, :]
        mask = mask_m[:, None] & (part < PARTS)[None, :]
        part_mean = tl.load(ptrs, mask=mask, other=0.0)  # [BLOCK_M, CHUNK]
        part_m2 = tl.load(ptrs + 1, mask=mask, other=0.0)
        chunk_count = tl.sum(size, 0)
        chunk_mean = tl.sum(part_mean * size[None, :], 1) / chunk_count
        spread = part_mean - chunk_mean[:, None]
        chunk_m2 = tl.sum(part_m2 + size[None, :] * spread * spread, 1)
        total = count + chunk_count
        delta = chunk_mean - mean
        mean += delta * (chunk_count / total)
        m2 += chunk_m2 + delta * delta * (count * chunk_count / total)
        count = total
    return mean, 1.0 / tl.sqrt(m2 / count + eps)


@triton.jit
def merge_squares(
    stats_ptr,  # [T, PARTS, 2] fp32
    rows,  # [BLOCK_M] int64
    mask_m,  # [BLOCK_M]
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """1 / sqrt(mean of squares + eps) of each row: a part's sum of squares is M2 + size mean^2, all of one sign."""
    PER_LENGTH: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    offs = tl.arange(0, CHUNK)
    squares = tl.zeros([rows.shape[0]], tl.float32)
    for start in tl.static_range(0, PARTS, CHUNK):
        part = start + offs
        size = tl.minimum(LENGTH - (part % PER_LENGTH) * WIDTH, WIDTH).to(tl.float32)
        ptrs = stats_ptr + rows[:, None] * (2 * PARTS) + 2 * part[None, :]
        mask = mask_m[:, None] & (part < PARTS)[None, :]
        mean = tl.load(ptrs, mask=mask, other=0.0)  # [BLOCK_M, CHUNK]
        squares += tl.sum(tl.load(ptrs + 1, mask=mask, other=0.0) + size[None, :] * mean * mean, 1)
    return 1.0 / tl.sqrt(squares / (PARTS // PER_LENGTH * LENGTH) + eps)


@triton.jit
def add_taps(
    acc, table_ptr, tap_index_ptr, tap_weight_ptr, rows, mask_m, cols, mask_n, N: tl.constexpr, TAPS: tl.constexpr
):
    """acc [BLOCK_M, BLOCK_N] + sum_i tap_weight[t, i] table[tap_index[t, i], n]."""
    for i in tl.static_range(TAPS):
        index = tl.load(tap_index_ptr + rows * TAPS + i, mask=mask_m, other=0).to(tl.int64)  # [BLOCK_M]
        weight = tl.load(tap_weight_ptr + rows * TAPS + i, mask=mask_m, other=0.0)
        mask = mask_m[:, None] & mask_n[None, :]
        row = tl.load(table_ptr + index[:, None] * N + cols[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_N]
        acc += weight[:, None] * row.to(tl.float32)
    return acc


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation on fp32 values. gelu_tanh(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))."""
    if ACT == "gelu_tanh":
        return x / (1.0 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "quick_gelu":
        return x / (1.0 + tl.exp2(-2.45546696 * x))
    else:
        return x


@triton.jit
def clamp(x, least, most):
    """x within bounds; NaN stays, as with `torch.clamp`."""
    x = tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def normalise_heads(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    weight_ptr,  # [PARTS, HEAD]
    clip_ptr,  # [PARTS, 2] fp32 or None
    col0,
    N: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,  # thirds of the N columns that are normalised; the rest is left alone
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """clamp(x) / sqrt(mean of squares + eps) * weight, a head of HEAD columns at a time."""
    x = tl.reshape(acc, (BLOCK_M, BLOCK_N // HEAD, HEAD))
    head = col0 // HEAD + tl.arange(0, BLOCK_N // HEAD)
    part = head // (N // (3 * HEAD))
    inside = part < PARTS
    if clip_ptr is not None:
        least = tl.load(clip_ptr + 2 * part, mask=inside, other=0.0)
        x = clamp(x, least[None, :, None], tl.load(clip_ptr + 2 * part + 1, mask=inside, other=0.0)[None, :, None])
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 2) * (1.0 / HEAD) + EPS)
    at = weight_ptr + part.to(tl.int64)[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    weight = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    y = tl.reshape(x * rstd[:, :, None] * weight[None, :, :], (BLOCK_M, BLOCK_N))
    cols = col0 + tl.arange(0, BLOCK_N)
    return tl.where((cols < PARTS * (N // 3))[None, :], y, acc)


@triton.jit
def gate_pairs(acc, clip_ptr, ACT: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] of (gate, up) pairs -> silu(gate) up or gelu_tanh(gate) up, [BLOCK_M, BLOCK_N / 2]."""
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
    if ACT == "geglu_tanh":
        if clip_ptr is None:
            return activate(gate, "gelu_tanh") * up
        else:
            gate = clamp(gate, tl.load(clip_ptr), tl.load(clip_ptr + 1))
            up = clamp(up, tl.load(clip_ptr + 2), tl.load(clip_ptr + 3))
            return clamp(activate(gate, "gelu_tanh") * up, tl.load(clip_ptr + 4), tl.load(clip_ptr + 5))
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + tl.exp2(-1.4426950408889634 * gate)) * up


@triton.jit
def _unpack_cos_sin(word):
    """(cos, sin) fp32 from the two 16-bit halves u of `word`: u / 32768 - 1, exact in fp32.

    u becomes the mantissa of the float 2^23 + u. Integer-to-float conversions have a quarter of the other instructions'
    throughput: with them the qkv GEMM was 5 % slower.
    """
    cos = ((word & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
    sin = (((word >> 16) & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
    return cos * (1.0 / 32768) - 257.0, sin * (1.0 / 32768) - 257.0


@triton.jit
def rotate_pairs(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    rope_ptr,  # [T, PACKED_COLS] int32, packed cos and sin of a pair (positions.py); or [T, 2, HEAD_DIM / 2] fp32
    rows,  # [BLOCK_M] int64
    mask_m,
    col0,
    ROPE_COLS: tl.constexpr,  # q and k columns; the rest (v) is left alone
    HEAD_DIM: tl.constexpr,
    PACKED_COLS: tl.constexpr,  # 0: cos and sin in fp32
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rotates the neighbouring columns (a, b) of q and k: (a cos - b sin, b cos + a sin)."""
    a, b = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
    pair = col0 // 2 + tl.arange(0, BLOCK_N // 2)
    rotated = (pair < ROPE_COLS // 2)[None, :]
    mask = mask_m[:, None] & rotated
    if PACKED_COLS > 0:
        word = tl.load(rope_ptr + rows[:, None] * PACKED_COLS + (pair % (HEAD_DIM // 2))[None, :], mask=mask, other=0)
        cos, sin = _unpack_cos_sin(word)
        if ROPE_COLS % BLOCK_N != 0:
            cos, sin = tl.where(rotated, cos, 1.0), tl.where(rotated, sin, 0.0)
    else:
        ptrs = rope_ptr + rows[:, None] * HEAD_DIM + (pair % (HEAD_DIM // 2))[None, :]
        cos = tl.load(ptrs, mask=mask, other=1.0)
        sin = tl.load(ptrs + HEAD_DIM // 2, mask=mask, other=0.0)
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK_M, BLOCK_N))


@triton.jit
def store_moments(
    y,  # [BLOCK_M, BLOCK_N] fp32, the rounded output
    stats_ptr,  # [T, PARTS, 2] fp32
    rows,  # [BLOCK_M] int64
    mask_m,
    mask_n,
    part,
    size,  # columns of this part
    PARTS: tl.constexpr,
):
    """Writes (mean, M2) of this tile's columns for each row."""
    mean = tl.sum(tl.where(mask_n[None, :], y, 0.0), 1) / size
    spread = tl.where(mask_n[None, :], y - mean[:, None], 0.0)
    ptrs = stats_ptr + rows * (2 * PARTS) + 2 * part
    tl.store(ptrs, mean, mask=mask_m)
    tl.store(ptrs + 1, tl.sum(spread * spread, 1), mask=mask_m)
