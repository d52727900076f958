"""Names of a tower's parameters and activation modules, and the parameters' shapes for a spec.

In a name, `{}` stands for the index of a block or merger.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fusedvit.model.spec import VisionSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class MergerNames:
    """A Qwen merger: norm, linear, activation, linear. Names are without `.weight` and `.bias`."""

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
    fc1: tuple[str, ...]  # gate and up, or both merged
    fc2: str
    act: str


@dataclass(frozen=True)
class LastNormNames:
    """No merger: a norm of the last block's output."""

    norm: str


@dataclass(frozen=True)
class PoolNames:
    """No merger: merged tokens are means of patches. The names of the buffers that standardise them, if any."""

    bias: str
    scale: str


TailNames = MergerNames | DownsampleNames | LastNormNames | PoolNames


@dataclass(frozen=True)
class WeightNames:
    """All parameter names of a tower.

    Attributes:
        qkv: one fused linear layer, or three layers for q, k and v.
        fc1: one linear layer, or gate and up of a gated MLP. An engine may merge gate and up into one, gate first.
        act: the MLP's activation module.
        merger: the merger, norm or pooling after the blocks.
        deepstack: the deepstack mergers, if there are any.
        position: the learned position table, if there is one.
        patch_norm: norm of the embedded patches, if there is one.
        qk_norm: norms of q and k, if there are any.
        post_norms: norms of the outputs of attention and MLP, if there are any.
    """

    patch: str
    norm1: str
    qkv: tuple[str, ...]
    proj: str
    norm2: str
    fc1: tuple[str, ...]
    fc2: str
    act: str
    merger: TailNames
    deepstack: MergerNames | None = None
    position: str | None = None
    patch_norm: str | None = None
    qk_norm: tuple[str, ...] = ()
    post_norms: tuple[str, ...] = ()


BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def parameter_shapes(names: WeightNames, spec: VisionSpec) -> Shapes:
    """Every parameter's name and shape; the patch embedding counts as a matrix `[hidden, patch_width]`."""
    c = spec.hidden_size
    yield from _linear(names.patch, c, spec.patch_width, "patch" not in spec.without_bias)
    if spec.position_side:
        axes = (2, spec.position_side, c)
        yield f"{names.position}.weight", axes if spec.position_taps == 2 else (spec.position_rows, c)
    if spec.patch_norm:
        yield from _norm(f"{names.patch_norm}", c, spec.norm)
    for i in range(spec.depth):
        for name, shape in _block_shapes(names, spec):
            yield name.format(i), shape
    if isinstance(names.merger, DownsampleNames):
        yield from _downsample_shapes(names.merger, spec)
    elif isinstance(names.merger, LastNormNames):
        yield from _norm(names.merger.norm, c, spec.norm)
    elif isinstance(names.merger, MergerNames):
        yield from _merger_shapes(names.merger, spec, c)
    for i in range(len(spec.deepstack)):
        assert names.deepstack is not None, "deepstack blocks and no deepstack mergers"
        yield from _merger_shapes(names.deepstack.at(i), spec, spec.merged_size)


def buffer_shapes(names: WeightNames, spec: VisionSpec) -> Shapes:
    """Name and shape of every buffer that a tower computes with and whose content the config does not determine."""
    if spec.standardized and isinstance(names.merger, PoolNames):
        yield names.merger.bias, (spec.hidden_size,)
        yield names.merger.scale, (spec.hidden_size,)
    if spec.clipped:
        layers = (*names.qkv, names.proj, *names.fc1, names.fc2)
        for i in range(spec.depth):
            yield from ((bound_of(layer.format(i), bound), ()) for layer in layers for bound in BOUNDS)


def bound_of(linear: str, bound: str) -> str:
    """The buffer's name for a bound of a clipped layer; the buffer belongs to the parent of the linear layer."""
    return f"{linear.removesuffix('.linear')}.{bound}"


def _block_shapes(names: WeightNames, spec: VisionSpec) -> Shapes:
    c, inner = spec.hidden_size, spec.intermediate_size
    kv = (spec.kv_heads or spec.num_heads) * spec.head_dim
    qkv = (c + 2 * kv,) if len(names.qkv) == 1 else (c, kv, kv)
    bias = {part: part not in spec.without_bias for part in ("qkv", "proj", "mlp")}
    yield from _norm(names.norm1, c, spec.norm)
    for name, rows in zip(names.qkv, qkv, strict=True):
        yield from _linear(name, rows, c, bias["qkv"])
    for name in names.qk_norm:
        yield from _norm(name, spec.head_dim, "rms")
    yield from _linear(names.proj, c, c, bias["proj"])
    for name in names.post_norms:
        yield from _norm(name, c, spec.norm)
    yield from _norm(names.norm2, c, spec.norm)
    for name in names.fc1:
        yield from _linear(name, inner * (2 if spec.gated else 1) // len(names.fc1), c, bias["mlp"])
    yield from _linear(names.fc2, c, inner, bias["mlp"])


def _merger_shapes(m: MergerNames, spec: VisionSpec, width: int) -> Shapes:
    yield from _norm(m.norm, width, spec.norm)
    yield from _linear(m.fc1, spec.merged_size, spec.merged_size, True)
    yield from _linear(m.fc2, spec.out_size, spec.merged_size, True)


def _downsample_shapes(m: DownsampleNames, spec: VisionSpec) -> Shapes:
    out, bias = spec.out_size, "merger" not in spec.without_bias
    yield from _norm(m.norm, spec.hidden_size, spec.norm)
    yield f"{m.downsample}.weight", (out, spec.hidden_size, spec.merge_size, spec.merge_size)
    yield f"{m.downsample}.bias", (out,)
    yield from _linear(m.proj, out, out, bias)
    yield from _norm(m.proj_norm, out, "layer")
    for name in m.fc1:
        yield from _linear(name, 2 * spec.merger_size // len(m.fc1), out, bias)
    yield from _linear(m.fc2, out, spec.merger_size, bias)


def _linear(name: str, out: int, cols: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (out, cols)
    if bias:
        yield f"{name}.bias", (out,)


def _norm(name: str, width: int, kind: str) -> Shapes:
    yield f"{name}.weight", (width,)
    if kind == "layer":
        yield f"{name}.bias", (width,)
