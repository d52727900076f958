"""Where a family keeps its parameters and activations. `{}` in a name stands for a block's or merger's index."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MergerNames:
    """A Qwen merger; linear layers and norms without `.weight` / `.bias`."""

    norm: str
    fc1: str
    fc2: str
    act: str

    def at(self, i: int) -> "MergerNames":
        """The i-th of several."""
        return MergerNames(*(getattr(self, name).format(i) for name in ("norm", "fc1", "fc2", "act")))


@dataclass(frozen=True)
class DownsampleNames:
    """A GLM merger: norm, downsampling convolution, projection, its LayerNorm and GELU, gated MLP."""

    norm: str
    downsample: str
    proj: str
    proj_norm: str
    proj_act: str
    fc1: tuple[str, str]
    fc2: str
    act: str


@dataclass(frozen=True)
class LastNormNames:
    """No merger: a norm of the last block's states."""

    norm: str


@dataclass(frozen=True)
class WeightNames:
    """A family's parameter names.

    Attributes:
        qkv: one fused linear layer, or those of q, k and v.
        fc1: one linear layer, or gate and up of a gated MLP.
        act: the MLP's activation module.
        merger: what follows the blocks.
        position: None for a family without a learned position table.
        patch_norm: norm of the embedded patches, if there is one.
        qk_norm: norms of q and k, if there are any.
    """

    patch: str
    norm1: str
    qkv: tuple[str, ...]
    proj: str
    norm2: str
    fc1: tuple[str, ...]
    fc2: str
    act: str
    merger: MergerNames | DownsampleNames | LastNormNames
    deepstack: MergerNames | None = None
    position: str | None = None
    patch_norm: str | None = None
    qk_norm: tuple[str, ...] = ()
