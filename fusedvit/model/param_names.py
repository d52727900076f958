"""Parameter and activation names of a tower, as `named_parameters()` gives them; `{}` stands for an index."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MergerNames:
    """A Qwen merger: norm, linear, activation, linear. Names without `.weight` and `.bias`."""

    norm: str
    fc1: str
    fc2: str
    act: str

    def at(self, i: int) -> "MergerNames":
        """The names of merger `i`."""
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
    """No merger: a norm of the last block's output."""

    norm: str


@dataclass(frozen=True)
class WeightNames:
    """All parameter names of a tower.

    Attributes:
        qkv: one fused linear layer, or those of q, k and v.
        fc1: one linear layer, or gate and up of a gated MLP.
        act: the MLP's activation module.
        merger: what follows the blocks.
        deepstack: the deepstack mergers, if there are any.
        position: the learned position table, if there is one.
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
