"""The dimensions and options of a vision tower as a frozen record, independent of Hugging Face."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from fusedvit.kernels.epilogue import HEAD_WIDTH

ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu", "swiglu", "geglu_tanh")
NORMS = ("layer", "rms")
TAILS = ("merger", "downsample", "norm", "pool")
TAPS = (2, 4, 16)
LINEARS = ("patch", "qkv", "proj", "mlp", "merger")
_AT_LEAST_1 = (
    "depth",
    "hidden_size",
    "num_heads",
    "head_dim",
    "intermediate_size",
    "out_size",
    "patch_size",
    "temporal_patch_size",
    "in_channels",
    "merge_size",
)
_AT_LEAST_0 = (
    "glu_limit",
    "norm_eps",
    "merger_eps",
    "rope_theta",
    "attention_scale",
    "position_side",
    "kv_heads",
    "window",
    "merger_size",
)
_EXPECTED: dict[Any, tuple[str, tuple[type, ...]]] = {  # by a field's type: in words, and what passes
    int: ("an int", (int,)),
    float: ("a number", (int, float)),
    float | None: ("a number or None", (int, float, type(None))),
    str: ("a str", (str,)),
    bool: ("True or False", (bool,)),
    tuple[int, ...]: ("a tuple of ints", (int,)),
    tuple[str, ...]: ("a tuple of strs", (str,)),
}


@dataclass(frozen=True)
class VisionSpec:
    """A vision transformer over flattened patches and `grid_thw`, or over padded images and positions of patches.

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
        activation: activation of the MLP, one of `ACTIVATIONS`.
        glu_limit: bound on the two factors of a gated MLP, also in a downsampling merger; None for none.
        norm: norm of the blocks and of the merger's input: "layer" (LayerNorm) or "rms" (RMSNorm, no mean, no bias).
        norm_eps: epsilon of these norms.
        merger_eps: epsilon of a downsampling merger's LayerNorm.
        rope_theta: base of the rotary frequencies.
        rope_axial: each axis rotates its own half of a head, columns the first half, with pairs (i, i + head_dim / 4)
            within a half. Otherwise pairs are (i, i + head_dim / 2).
        attention_scale: factor of q . k before the softmax; 0 for `head_dim ** -0.5`.
        position_side: side of the learned square position table, 0 for none.
        position_taps: how many table entries are interpolated for a position: 4 (bilinear, aligned corners) or 16
            (bicubic, half pixels, as `F.grid_sample`). With 2 there are two tables of `position_side` entries, for
            columns and for rows, and a position is the sum of one entry of each.
        deepstack: blocks after which a deepstack merger reads the residual stream.
        kv_heads: heads of k and v, each shared by `num_heads / kv_heads` heads of q; 0 for as many as q has.
        qk_norm: q and k are normalised per head before they are rotated.
        v_norm: v is normalised per head too, without a weight.
        sandwich: outputs of attention and MLP are normalised before they are added to the residual stream.
        clipped: inputs and outputs of the blocks' linear layers are clamped to bounds of each layer.
        patch_norm: embedded patches are normalised before positions are added.
        window: merged tokens on a side of an attention window, 0 for whole frames.
        full_attention: blocks that attend to whole frames even if there are windows.
        tail: "merger" (norm, merge, MLP), "downsample" (norm, merge by a convolution, projection, gated MLP; the
            convolution gives the last hidden state), "norm" (a norm, no merged tokens) or "pool" (the mean of a merged
            token's patches, times `sqrt(hidden_size)`).
        standardized: pooled tokens are shifted and scaled per channel.
        merger_size: channels of a downsampling merger's MLP.
        without_bias: which of `LINEARS` have no bias.
        rows_only: pixels must be `[patches, patch_width]`; other towers accept any shape that can be viewed as patches.
        padded: pixels are `[images, patches, patch_width]` from 0 to 1, which the tower maps to -1 to 1. A call also
            has the position (x, y) of each patch, (-1, -1) for padding.

    Raises:
        TypeError: a field has the wrong type; the message names it.
        ValueError: a field, or a combination of fields, is not supported; the message names them.
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
    glu_limit: float | None = None
    norm: str = "layer"
    norm_eps: float = 1e-6
    merger_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_axial: bool = False
    attention_scale: float = 0.0
    position_side: int = 0
    position_taps: int = 4
    deepstack: tuple[int, ...] = ()
    kv_heads: int = 0
    qk_norm: bool = False
    v_norm: bool = False
    sandwich: bool = False
    clipped: bool = False
    patch_norm: bool = False
    window: int = 0
    full_attention: tuple[int, ...] = ()
    tail: str = "merger"
    standardized: bool = False
    merger_size: int = 0
    without_bias: tuple[str, ...] = ()
    rows_only: bool = False
    padded: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_heads()
        for name, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("tail", TAILS), ("position_taps", TAPS)):
            if getattr(self, name) not in known:
                raise ValueError(f"fusedvit: {name} must be one of {known}, got {getattr(self, name)!r}")
        self._check_blocks("deepstack", self.deepstack)
        self._check_blocks("full_attention", self.full_attention)
        unknown = sorted(set(self.without_bias) - set(LINEARS))
        if unknown:
            raise ValueError(f"fusedvit: without_bias must be of {LINEARS}, got {unknown}")
        self._check_norms()

    def _check_types(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            expected, types = _EXPECTED[field.type]
            several = expected.startswith("a tuple")
            if (several and type(value) is not tuple) or not {*map(type, value if several else [value])} <= {*types}:
                raise TypeError(f"fusedvit: {field.name} must be {expected}, got {value!r}")

    def _check_ranges(self) -> None:
        for least, names in ((1, _AT_LEAST_1), (0, _AT_LEAST_0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not value >= least:
                    raise ValueError(f"fusedvit: {name} must be at least {least}, got {value}")

    def _check_heads(self) -> None:
        if self.num_heads * self.head_dim != self.hidden_size:
            got = f"{self.hidden_size} and {self.num_heads} * {self.head_dim}"
            raise ValueError(f"fusedvit: hidden_size must be num_heads * head_dim, got {got}")
        if self.head_dim % 4:
            expected = "a multiple of 4 for 2-D rotary embedding"
            raise ValueError(f"fusedvit: head_dim must be {expected}, got {self.head_dim}")
        if self.kv_heads and self.num_heads % self.kv_heads:
            got = f"{self.num_heads} and {self.kv_heads}"
            raise ValueError(f"fusedvit: num_heads must be a multiple of kv_heads, got {got}")

    def _check_norms(self) -> None:
        if self.v_norm > self.qk_norm or self.clipped > self.sandwich or self.sandwich > (self.norm == "rms"):
            needs = "v_norm needs qk_norm, clipped needs sandwich, and that needs RMSNorm"
            raise ValueError(f"fusedvit: {needs}, got one without")
        if self.sandwich and not self.qk_norm:
            raise ValueError("fusedvit: sandwich needs qk_norm, got none")

    def _check_blocks(self, name: str, blocks: tuple[int, ...]) -> None:
        wrong = [i for i in blocks if not 0 <= i < self.depth]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"fusedvit: {name} must name distinct blocks of 0..{self.depth - 1}, got {list(blocks)}")

    def __getstate__(self) -> dict[str, Any]:
        """The fields. Cached properties come with calls, and would change the hash of a pickled model, by which
        `datasets` finds its cached results."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property  # read before a call's first launch, while the GPU is idle
    def patch_width(self) -> int:
        """Values of a flattened patch: channels, frames, rows, columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @cached_property
    def still_width(self) -> int:
        """Values of a flattened patch of one frame."""
        return self.in_channels * self.patch_size**2

    @cached_property
    def norms_heads(self) -> bool:
        """Whether the epilogue of the product for q, k and v normalises heads."""
        return self.qk_norm and self.head_dim == HEAD_WIDTH

    @cached_property
    def merge_unit(self) -> int:
        """Patches of a merged token."""
        return self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Channels of `merge_unit` tokens side by side."""
        return self.hidden_size * self.merge_unit

    @property
    def gated(self) -> bool:
        """Whether the MLP's first layer has two outputs, gate and up, that are multiplied (SwiGLU, GEGLU)."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def returns_hidden(self) -> bool:
        """Whether the residual stream after the last block is an output."""
        return self.tail != "pool"

    @property
    def position_rows(self) -> int:
        """Rows of the learned position table, or of both tables concatenated."""
        return 2 * self.position_side if self.position_taps == 2 else self.position_side**2

    @property
    def merged_outputs(self) -> int:
        """How many output tensors have a row per merged token."""
        if self.tail == "norm":
            return 0
        return 1 + len(self.deepstack) + (self.tail == "downsample")

    def is_windowed(self, block: int) -> bool:
        """Whether `block` attends within windows."""
        return self.window > 0 and block not in self.full_attention


def rope_frequencies(spec: VisionSpec, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """`theta^(-2i / (head_dim / 2))`, i < head_dim / 4, in fp32 for any dtype of the tower.

    It is the content of Hugging Face's `inv_freq`. `shape` is not used.
    """
    half = spec.head_dim // 2
    return 1.0 / (spec.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half))
