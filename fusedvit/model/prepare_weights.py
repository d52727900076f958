"""Prepares a tower's weights for the kernels, once, from the original parameters.

LayerNorm into the next product : W' = round(W * gamma),  colsum = sum_k W'[:, k],  b' = b + W beta;  not in fp32
RMSNorm                         : W' = round(W * gamma)
softmax in base 2               : q is scaled by `query_scale`, through its weights or its norm's weights
rotary pairs                    : rows of q and k within a head go from (i, i + d/2) to (2i, 2i + 1); where each axis
                                  has half of a head, from (i, i + d/4) of the rows' half, then of the columns' half
shared heads of k and v         : repeated, once for each head of q
gated MLP                       : rows of gate and up interleaved, so that both factors are in one tile
convolution [N, C, m, m]        : [N, m m C], for tokens that lie side by side in merge-block order
bytes, x = f byte + s a channel : W' = round(128 f W),  b' = b + sum_k W'[:, k] (1 + s / (128 f))[k]
                                  for u = (byte - 128) / 128, since x = 128 f (u + 1 + s / (128 f))
frames of a still image         : equal, so W' is rounded after the sum over frames

b' is computed from the rounded W' and stays in fp32, so the mean, which all pixels have in common, cancels exactly.
A product that fp16 cannot hold raises an error: see `fp16_range.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from einops import rearrange, repeat

from fusedvit.kernels.attention import query_scale
from fusedvit.kernels.hopper.gluon_compat import absent
from fusedvit.kernels.load_inputs import CENTRE
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.fp16_range import Products
from fusedvit.model.normalization import Normalization
from fusedvit.model.param_names import (
    BOUNDS,
    DownsampleNames,
    LastNormNames,
    MergerNames,
    PoolNames,
    TailNames,
    WeightNames,
    bound_of,
)
from fusedvit.model.spec import VisionSpec, rope_frequencies
from fusedvit.model.weights import (
    ALIGNMENT,
    UNFOLDED,
    BlockWeights,
    DownsampleWeights,
    EncoderWeights,
    LinearWeights,
    MergerWeights,
    NormWeights,
    PoolWeights,
    SandwichWeights,
    TensorSource,
    in_lines,
    lies_in_lines,
    pitch_of,
    rewrite,
)


def prepare(
    spec: VisionSpec,
    names: WeightNames,
    source: TensorSource,
    reuse: EncoderWeights | None = None,
    own: frozenset[str] = frozenset(),
    normalizations: Mapping[bool, Normalization] | None = None,
    inv_freq: torch.Tensor | None = None,
    products: Products | None = None,
) -> EncoderWeights:
    """Prepared weights from `source(name) -> tensor`.

    Args:
        own: names whose tensors are new, not the tower's: adapters were folded in, or the layout was made contiguous.
        reuse: earlier weights of the same tower. Prepared copies are rewritten in place if shape, dtype and device
            agree, so that captured graphs stay valid.
        normalizations: normalisations of the byte pixels that the tower must take; the key says whether of stills.
        inv_freq: the tower's rotary frequencies `[head_dim / 4]`; those of the spec if None.
        products: products that `source` has rounded already, to be judged with those rounded here.

    Raises:
        BeyondFp16: fp16 cannot hold a product; `reuse` is unchanged.
    """
    maker, by_still = _Maker(spec, source, own, products or Products()), normalizations or {}
    device = source(f"{names.patch}.weight").device
    frequencies = rope_frequencies(spec) if inv_freq is None else inv_freq.detach()
    with torch.no_grad():
        prepared = EncoderWeights(
            patch=maker.patch(names.patch),
            patch_norm=maker.norm(names.patch_norm) if names.patch_norm else None,
            position=maker.position(names.position) if names.position and spec.position_side else None,
            blocks=tuple(maker.block(names, i) for i in range(spec.depth)),
            merger=maker.tail(names.merger),
            deepstack=tuple(maker.folded_merger(names.deepstack, i) for i in range(len(spec.deepstack))),
            inv_freq=frequencies.to(device, torch.float32, copy=True),
            byte_patch=maker.byte_patch(names.patch, by_still[False], False) if False in by_still else None,
            still_patch=maker.byte_patch(names.patch, by_still[True], True) if True in by_still else None,
            own=("inv_freq", "position") if f"{names.position}.weight" in own else ("inv_freq",),
        )
        maker.products.check()
        return prepared if reuse is None else rewrite(reuse, prepared)


@dataclass(frozen=True)
class _Maker:
    spec: VisionSpec
    source: TensorSource
    given: frozenset[str] = frozenset()
    products: Products = field(default_factory=Products)

    def norm(self, name: str, layer: bool | None = None) -> NormWeights:
        """A norm's vectors, always copied: see `_plain`."""
        layer = self.spec.norm == "layer" if layer is None else layer
        bias = self.source(f"{name}.bias").detach().clone() if layer else None
        return NormWeights(self.source(f"{name}.weight").detach().clone(), bias, own=("weight", "bias"))

    def position(self, name: str) -> torch.Tensor:
        """The position table, or both tables concatenated, without padding rows that an engine added."""
        return self.source(f"{name}.weight").detach().flatten(0, -2)[: self.spec.position_rows]

    def plain(self, name: str, part: str) -> LinearWeights:
        return self._plain(self.source(f"{name}.weight").detach(), name, part)

    def _plain(self, weight: torch.Tensor, name: str, part: str) -> LinearWeights:
        """`weight` in rows aligned for TMA, marked as a prepared copy if it is not the original tensor.

        The bias is always copied: before a replay the host compares the addresses of borrowed tensors, and vectors
        would double their number.
        """
        original = self.source(f"{name}.weight")
        weight = _pitched(weight)
        copied = weight.device.type != "meta" and weight.data_ptr() != original.data_ptr()
        copied = copied or f"{name}.weight" in self.given
        bias = None if part in self.spec.without_bias else self.source(f"{name}.bias").detach().clone()
        return LinearWeights(weight, bias, own=("weight", "bias") if copied else ("bias",))

    def patch(self, name: str) -> LinearWeights:
        """The patch embedding as a product, which a convolution is if its kernel equals its stride."""
        weight = self.source(f"{name}.weight").detach()
        linear = self._plain(weight.reshape(weight.shape[0], -1), name, "patch")
        return _with_bias(linear)

    def byte_patch(self, name: str, normalization: Normalization, still: bool) -> LinearWeights:
        """The patch embedding of centred bytes; every tensor is a prepared copy."""
        spec, weight = self.spec, self.source(f"{name}.weight").detach()
        factor, shift = (t.to(weight.device) for t in normalization.affine())
        shape = len(weight), spec.in_channels, spec.temporal_patch_size, spec.patch_size**2
        exact = CENTRE * factor[:, None, None] * weight.reshape(shape).double()
        if still:
            exact = exact.sum(2, keepdim=True)
        rounded = exact.to(weight.dtype)
        offset = 1 + shift / (CENTRE * factor)
        common = (rounded.double().sum((2, 3)) * offset).sum(1)
        if "patch" not in spec.without_bias:
            common += self.source(f"{name}.bias").double()
        self.products.add(f"{name}.weight times the scale of bytes", exact, rounded, common)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return LinearWeights(_pitched(rounded.flatten(1), own=True), common.to(wide), None, ("weight", "bias"))

    def joined(self, names: tuple[str, ...], part: str) -> LinearWeights:
        """Linear layers concatenated along their outputs."""
        parts = [self.plain(name, part) for name in names]
        if len(parts) == 1:
            return parts[0]
        biases = [p.bias for p in parts if p.bias is not None]
        return LinearWeights(torch.cat([p.weight for p in parts]), torch.cat(biases) if biases else None)

    def behind_norm(self, norm: str, linear: LinearWeights, factor: torch.Tensor | None = None) -> LinearWeights:
        """`linear` after a norm of the blocks' kind, with outputs times `factor` `[N]`.

        In fp32 and fp64 a LayerNorm stays a separate step. A folded one subtracts the mean after the product, whose
        rounding errors grow with the mean: if a row's mean is ten deviations from 0, they are twice Hugging Face's.
        """
        if self.spec.norm == "layer" and linear.weight.dtype in UNFOLDED:
            return self._scaled(linear, factor, self.norm(norm))
        return self.folded(norm, linear, factor)

    def folded(self, norm: str, linear: LinearWeights, factor: torch.Tensor | None = None) -> LinearWeights:
        """`linear` with the norm before it folded in and outputs times `factor` `[N]`; all tensors are copies."""
        weight, bias = linear.weight, linear.bias
        gamma = self.source(f"{norm}.weight")
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        exact = weight.to(wide) * gamma.to(wide)
        if factor is not None:
            factor = factor.to(exact)
            exact *= factor.unsqueeze(1)
        scaled = _pitched(exact.to(weight.dtype), own=True)
        colsum = None
        if self.spec.norm == "layer":
            # No matrix product: the first call would wait for cuBLAS to load one of doubles, 35 ms on an H200.
            shift = (weight.double() * self.source(f"{norm}.bias").double()).sum(1)
            bias = shift if bias is None else bias.double() + shift
            colsum = scaled.double().sum(1).to(wide)
        if bias is not None:
            bias = (bias if factor is None else bias * factor).to(wide, copy=True)
        self.products.add(f"{norm}.weight times the weights behind it", exact, scaled, bias)
        return LinearWeights(scaled, bias, colsum, ("weight", "bias", "colsum"))

    def _scaled(self, linear: LinearWeights, factor: torch.Tensor | None, norm: NormWeights) -> LinearWeights:
        """`linear` after an unfolded `norm`, with outputs times `factor`."""
        if factor is None:
            return replace(linear, norm=norm)
        factor = factor.to(linear.weight)
        bias = None if linear.bias is None else linear.bias * factor
        weight = _pitched(linear.weight * factor.unsqueeze(1), own=True)
        return LinearWeights(weight, bias, None, ("weight", "bias"), norm)

    def block(self, names: WeightNames, i: int) -> BlockWeights:
        qkv = self.joined(tuple(name.format(i) for name in names.qkv), "qkv")
        fc1 = self.joined(tuple(name.format(i) for name in names.fc1), "mlp")
        if self.spec.sandwich:
            return self._sandwich(names, i, qkv, fc1)
        factor = None if names.qk_norm else query_factor(self.spec, len(qkv.weight))
        return BlockWeights(
            qkv=_rows(self.behind_norm(names.norm1.format(i), qkv, factor), rotary_rows(self.spec)),
            proj=self.plain(names.proj.format(i), "proj"),
            fc1=_lined(_first(self.behind_norm(names.norm2.format(i), fc1), self.spec.gated)),
            fc2=_second(self.plain(names.fc2.format(i), "mlp")),
            qk_norm=self.qk_norm(tuple(name.format(i) for name in names.qk_norm)) if names.qk_norm else None,
        )

    def _sandwich(self, names: WeightNames, i: int, qkv: LinearWeights, fc1: LinearWeights) -> BlockWeights:
        """A block with sandwich norms. None is folded, as they share launches with residual additions."""
        first, second = names.post_norms
        norms = [self.norm(name.format(i)) for name in (names.norm1, first, names.norm2, second)]
        clips = self.clips(names, i) if self.spec.clipped else None
        return BlockWeights(
            qkv=_with_bias(_rows(qkv, rotary_rows(self.spec))),
            proj=_with_bias(self.plain(names.proj.format(i), "proj")),
            fc1=_lined(_first(fc1, self.spec.gated)),
            fc2=_with_bias(_second(self.plain(names.fc2.format(i), "mlp"))),
            qk_norm=self.qk_norm(tuple(name.format(i) for name in names.qk_norm)),
            sandwich=SandwichWeights(norms[0], norms[1], norms[2], norms[3], clips),
        )

    def clips(self, names: WeightNames, i: int) -> torch.Tensor:
        """The bounds `[11, 2]` of `SandwichWeights`, rounded to the tower's dtype as `torch.clamp` rounds them."""
        dtype = self.source(f"{names.proj.format(i)}.weight").dtype
        layers = [name.format(i) for name in (*names.qkv, names.proj, *names.fc1, names.fc2)]
        bounds = torch.stack([self.source(bound_of(layer, bound)).detach() for layer in layers for bound in BOUNDS])
        bounds = bounds.to(dtype).to(torch.promote_types(dtype, torch.float32))
        into, out = bounds.view(7, 2, 2).unbind(1)
        return torch.stack([into[0], *out[:3], into[3], out[3], into[4], out[4], out[5], into[6], out[6]])

    def qk_norm(self, names: tuple[str, ...]) -> torch.Tensor:
        """Weights of the norms of q, k and v, at least in fp32, so that q's factor is not rounded further."""
        spec = self.spec
        both = torch.stack([self.source(f"{name}.weight").detach() for name in names])
        both = both.to(torch.promote_types(both.dtype, torch.float32))
        both[0] *= query_scale(spec.head_dim, spec.attention_scale)
        both = both[:, rotary_channels(spec).to(both.device)]
        return torch.cat([both, torch.ones_like(both[:1])]) if spec.v_norm else both

    def tail(self, names: TailNames) -> MergerWeights | DownsampleWeights | NormWeights | PoolWeights:
        if isinstance(names, DownsampleNames):
            return self._downsample(names)
        if isinstance(names, PoolNames):
            return self._pool(names) if self.spec.standardized else PoolWeights()
        if isinstance(names, LastNormNames):
            return self.norm(names.norm)
        return MergerWeights(self.norm(names.norm), self.plain(names.fc1, "merger"), self.plain(names.fc2, "merger"))

    def folded_merger(self, names: MergerNames | None, i: int) -> MergerWeights:
        assert names is not None, "a spec with deepstack blocks belongs to a family with deepstack mergers"
        at = names.at(i)
        fc1 = self.behind_norm(at.norm, self.plain(at.fc1, "merger"))
        return MergerWeights(None, fc1, self.plain(at.fc2, "merger"))

    def _pool(self, names: PoolNames) -> PoolWeights:
        bias, scale = (self.source(name).detach() for name in (names.bias, names.scale))
        wide = torch.promote_types(bias.dtype, torch.float32)
        return PoolWeights(bias.to(wide, copy=True), scale.to(wide, copy=True))

    def _downsample(self, names: DownsampleNames) -> DownsampleWeights:
        kernel = self.source(f"{names.downsample}.weight").detach()
        turned = rearrange(kernel, "n c h w -> n (h w c)")
        fc1 = self.joined(names.fc1, "merger")
        return DownsampleWeights(
            norm=self.norm(names.norm),
            downsample=self._plain(turned, names.downsample, "downsample"),
            proj=self.plain(names.proj, "merger"),
            proj_norm=self.norm(names.proj_norm, layer=True),
            fc1=_first(fc1, gated=True),
            fc2=_second(self.plain(names.fc2, "merger")),
        )


def _first(fc1: LinearWeights, gated: bool) -> LinearWeights:
    """An MLP's first layer: gate and up interleaved if gated, padded with zero rows to a multiple of 16 bytes.

    Padding gives channels of zeros, which `_second` multiplies by zeros.
    """
    rows = torch.arange(fc1.weight.shape[0], device="cpu")
    if gated:
        rows = rearrange(rows, "(two n) -> (n two)", two=2)
    factors = 2 if gated else 1
    channels = len(rows) // factors
    missing = factors * (pitch_of(channels, fc1.weight.dtype) - channels)
    if not missing:
        return _rows(fc1, rows) if gated else fc1
    padded = {name: getattr(fc1, name) for name in ("weight", "bias", "colsum") if getattr(fc1, name) is not None}
    padded = {name: torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for name, t in padded.items()}
    return _rows(replace(fc1, **padded), torch.cat([rows, torch.arange(len(rows), len(rows) + missing, device="cpu")]))


def _second(fc2: LinearWeights) -> LinearWeights:
    """An MLP's second layer, with the padding of its rows included as columns."""
    n, k = fc2.weight.shape
    pitch = pitch_of(k, fc2.weight.dtype)
    if pitch != k:  # such rows are in a copy, with zeros after each (`_pitched`)
        fc2 = replace(fc2, weight=fc2.weight.as_strided((n, pitch), (pitch, 1)))
    return _lined(fc2)


def _with_bias(linear: LinearWeights) -> LinearWeights:
    """`linear`, with a bias of zeros if it has none: if nothing is between a product and its rounding to fp16, ptxas
    serialises the product (C7514, Triton 3.7)."""
    if linear.bias is not None:
        return linear
    return replace(linear, bias=linear.weight.new_zeros(linear.weight.shape[0]))


def _lined(linear: LinearWeights) -> LinearWeights:
    """`linear` with its weights laid out by `in_lines`, in a copy if needed, if that is known to be faster."""
    weight, own = linear.weight, "weight" in linear.own
    if lies_in_lines(weight, own) or not _wants_lines(weight):
        return linear
    return replace(linear, weight=in_lines(weight), own=linear.own if own else (*linear.own, "weight"))


def _wants_lines(weight: torch.Tensor) -> bool:
    """Whether `in_lines` pays: on Hopper a product of 784 rows by 4304 columns was a fifth faster (docs/kernels.md)."""
    return weight.is_cuda and not absent(Target.of(weight.device).capability, weight.dtype)


def query_factor(spec: VisionSpec, rows: int) -> torch.Tensor:
    """`[rows]`: the factors for the outputs of the original q | k | v."""
    factor = torch.ones(rows, dtype=torch.float64, device="cpu")
    factor[: spec.num_heads * spec.head_dim] = query_scale(spec.head_dim, spec.attention_scale)
    return factor


def rotary_channels(spec: VisionSpec) -> torch.Tensor:
    """`[head_dim]`: the original channel of a head of q or k for each of the kernels' channels.

    Rotary pairs are adjacent, and pairs that rotate by the row come first.
    """
    channels = torch.arange(spec.head_dim, device="cpu")
    if spec.rope_axial:
        return rearrange(channels, "(half two p) -> half (p two)", half=2, two=2).flip(0).flatten()
    return rearrange(channels, "(half p) -> (p half)", half=2)


def rotary_rows(spec: VisionSpec) -> torch.Tensor:
    """`[3 hidden]`: the original row of q, k and v for each of the kernels' rows.

    Rotary pairs become adjacent, which does not change q . k; shared heads of k and v are repeated.
    """
    kv_heads, d = spec.kv_heads or spec.num_heads, spec.head_dim
    order = torch.arange((spec.num_heads + 2 * kv_heads) * d, device="cpu")
    q, k, v = order.split([spec.num_heads * d, kv_heads * d, kv_heads * d])
    turned = [part.view(-1, d)[:, rotary_channels(spec)] for part in (q, k)]
    shared = [repeat(part, "h d -> (h r) d", r=spec.num_heads // kv_heads) for part in (turned[1], v.view(kv_heads, d))]
    return torch.cat([turned[0].flatten(), *(part.flatten() for part in shared)])


def _rows(linear: LinearWeights, order: torch.Tensor) -> LinearWeights:
    """`linear` with its rows in another order; all tensors are copies."""
    at = order.to(linear.weight.device)
    bias = None if linear.bias is None else linear.bias[at]
    colsum = None if linear.colsum is None else linear.colsum[at]
    own = ("weight", "bias", "colsum")
    return replace(linear, weight=_pitched(linear.weight[at], own=True), bias=bias, colsum=colsum, own=own)


def _pitched(weight: torch.Tensor, own: bool = False) -> torch.Tensor:
    """`weight` `[N, K]`, or a padded copy if its base address or row pitch is not a multiple of 16 bytes.

    `own` says that the tensor is already a contiguous copy.
    """
    aligned = weight.stride(-1) == 1 and weight.stride(0) == pitch_of(weight.stride(0), weight.dtype)
    if aligned and (own or weight.data_ptr() % ALIGNMENT == 0):
        return weight
    padded = weight.new_zeros(weight.shape[0], pitch_of(weight.shape[1], weight.dtype))[:, : weight.shape[1]]
    return padded.copy_(weight)
