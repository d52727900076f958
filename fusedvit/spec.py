"""What a vision tower is, in numbers: a frozen record that knows nothing of Hugging Face."""

from dataclasses import dataclass

ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu")


@dataclass(frozen=True)
class VisionSpec:
    """One vision transformer over flattened patches and `grid_thw`.

    Attributes:
        depth: number of blocks.
        hidden_size: channels of the residual stream.
        num_heads: attention heads.
        head_dim: channels of a head, a multiple of 4.
        intermediate_size: channels of the MLP.
        out_size: channels of a merged (output) token.
        patch_size: pixels on a side of a patch.
        temporal_patch_size: frames of a patch.
        in_channels: image channels.
        merge_size: patches on a side of a merged token.
        activation: of the MLP, one of `ACTIVATIONS`.
        norm_eps: epsilon of every LayerNorm.
        rope_theta: base of the rotary frequencies.
        position_side: side of the learned square position table, 0 for none; interpolated bilinearly with aligned
            corners.
        deepstack: blocks after which a deepstack merger reads the residual stream.
    """

    depth: int
    hidden_size: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    out_size: int
    patch_size: int
    temporal_patch_size: int = 2
    in_channels: int = 3
    merge_size: int = 2
    activation: str = "gelu_tanh"
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    position_side: int = 0
    deepstack: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads * self.head_dim != self.hidden_size:
            got = f"{self.hidden_size} and {self.num_heads} * {self.head_dim}"
            raise ValueError(f"hidden_size must be num_heads * head_dim, got {got}")
        if self.head_dim % 4:
            raise ValueError(f"head_dim must be a multiple of 4 for 2-D rotary embedding, got {self.head_dim}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {self.activation!r}")
        wrong = [i for i in self.deepstack if not 0 <= i < self.depth]
        if wrong or len(set(self.deepstack)) != len(self.deepstack):
            raise ValueError(f"deepstack must name distinct blocks of 0..{self.depth - 1}, got {list(self.deepstack)}")

    @property
    def patch_width(self) -> int:
        """Values of a flattened patch: channels, frames, rows, columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches of a merged token."""
        return self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Channels of `merge_unit` tokens side by side."""
        return self.hidden_size * self.merge_unit
