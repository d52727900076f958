"""What follows a linear layer's product, as frozen records shared by the kernel and its torch twin."""

from dataclasses import dataclass

import torch

from fusedvit.kernels.row_stats import RowStats

ACTIVATIONS = ("none", "gelu_tanh", "gelu", "quick_gelu", "swiglu")


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
        words: `[T, W]` int32, the same in 16 bits each, for operands of 16 bits (see rope_words.py).
    """

    table: torch.Tensor | None = None
    cols: int = 0
    head_dim: int = 2
    words: torch.Tensor | None = None

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, int]:
        """What operands of `dtype` are turned by, and its words a row: the table, and 0, if more than 16 bits count."""
        if self.words is None or dtype.itemsize > 2:
            return self.table, 0
        return self.words, self.words.shape[1]


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
    """Where the parts of a split product meet (see both linear_split.py). One launch at a time may use it.

    Attributes:
        sums: flat fp32.
        counters: `[4, tiles]` int32, zeros at first. The first row is plain Triton's, which leaves zeros; the others
            are Hopper's, one for each power of two of parts, and count for ever.
    """

    sums: torch.Tensor
    counters: torch.Tensor

    @staticmethod
    def zeros(sums: int, counters: int, device: torch.device) -> "Scratch":
        """Room for so many partial sums and counters."""
        return Scratch(
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.zeros(4, counters, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Epilogue:
    """Applied in this order: norm, bias, taps, rope, activation, residual; then rounding and statistics.

    Attributes:
        bias: `[N]`, any float dtype.
        activation: one of `ACTIVATIONS`. "swiglu" takes columns in pairs (gate, up) and gives silu(gate) * up, half as
            many columns.
        limit: swiglu's factors are clamped before: gate to at most this, up to this in absolute value; 0 for not at
            all.
        residual: `[T, N]`; may be the output itself.
        stats: where moments of the rounded output rows go.
        scratch: for forms that split a product; others leave it alone.
    """

    bias: torch.Tensor | None = None
    norm: NormFold | None = None
    taps: Taps | None = None
    rope: Rope | None = None
    activation: str = "none"
    limit: float = 0.0
    residual: torch.Tensor | None = None
    stats: RowStats | None = None
    scratch: Scratch | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {self.activation!r}")
        if self.gated and (self.residual is not None or self.stats is not None):
            raise ValueError("swiglu has neither residual nor statistics behind it")

    @property
    def gated(self) -> bool:
        """The output has one column for two of the product."""
        return self.activation == "swiglu"
