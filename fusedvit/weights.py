"""A tower's weights as the kernels want them, made once from the original parameters.

    LayerNorm into the next product : W' = round(W * gamma),  colsum = sum_k W'[:, k],  b' = b + W beta
    rotary pairs                    : rows of q and k within a head go from (i, i + d/2) to (2i, 2i + 1)

What needs no change is a reference to the original parameter, which stays the truth and keeps its name.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from einops import rearrange

from fusedvit.spec import VisionSpec

TensorSource = Callable[[str], torch.Tensor]
ALIGNMENT = 16  # bytes; what the copy engine asks of bases and row pitches


@dataclass(frozen=True)
class MergerNames:
    """Where a merger's parameters are, without `.weight` / `.bias`."""

    norm: str
    fc1: str
    fc2: str


@dataclass(frozen=True)
class WeightNames:
    """A family's parameter names. `{}` in block and deepstack names stands for the index."""

    patch: str
    position: str
    norm1: str
    qkv: str
    proj: str
    norm2: str
    fc1: str
    fc2: str
    merger: MergerNames
    deepstack: MergerNames


@dataclass(frozen=True)
class LinearWeights:
    """`weight` `[N, K]`, `bias` `[N]`; `colsum` `[N]` fp32 where a LayerNorm was folded in.

    `copied` says that `weight` is a copy for its pitch alone, and `bias` the parameter itself.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    colsum: torch.Tensor | None = None
    copied: bool = False


@dataclass(frozen=True)
class BlockWeights:
    qkv: LinearWeights
    proj: LinearWeights
    fc1: LinearWeights
    fc2: LinearWeights


@dataclass(frozen=True)
class MergerWeights:
    """A merger; `norm` is None where it was folded into `fc1`."""

    norm: LinearWeights | None
    fc1: LinearWeights
    fc2: LinearWeights


@dataclass(frozen=True)
class EncoderWeights:
    """All of a tower. `position` is `[side * side, hidden]` or None; `inv_freq` `[head_dim / 4]` fp32."""

    patch: LinearWeights
    position: torch.Tensor | None
    blocks: tuple[BlockWeights, ...]
    merger: MergerWeights
    deepstack: tuple[MergerWeights, ...]
    inv_freq: torch.Tensor

    def pointers(self) -> tuple[int, ...]:
        """Addresses of every tensor: what captured launches hold."""
        tensors = [t for linear in _linears(self) for t in (linear.weight, linear.bias, linear.colsum) if t is not None]
        tensors += [t for t in (self.position, self.inv_freq) if t is not None]
        if self.merger.norm is not None:
            tensors += [self.merger.norm.weight, self.merger.norm.bias]
        return tuple(t.data_ptr() for t in tensors)

    def held_bytes(self) -> int:
        """Bytes of prepared copies that the original parameters do not already hold."""
        return self.inv_freq.nbytes + sum(_folded_bytes(linear) for linear in _linears(self))


def prepare(
    spec: VisionSpec, names: WeightNames, source: TensorSource, reuse: EncoderWeights | None = None
) -> EncoderWeights:
    """Prepared weights from `source(name) -> tensor`.

    Args:
        reuse: earlier weights of the same tower: prepared copies are rewritten in place where shape, dtype and
            device agree, so that captured graphs stay valid.
    """
    maker = _Maker(spec, source)
    with torch.no_grad():
        made = EncoderWeights(
            patch=maker.patch(names.patch),
            position=source(f"{names.position}.weight").detach() if spec.position_side else None,
            blocks=tuple(maker.block(names, i) for i in range(spec.depth)),
            merger=maker.merger(names.merger, fold=False),
            deepstack=tuple(maker.merger(_at(names.deepstack, i), fold=True) for i in range(len(spec.deepstack))),
            inv_freq=rope_frequencies(spec).to(source(f"{names.patch}.weight").device),
        )
        return made if reuse is None else _rewrite(reuse, made)


def rope_frequencies(spec: VisionSpec) -> torch.Tensor:
    """`theta^(-2i / (head_dim / 2))`, i < head_dim / 4, fp32: computed in fp32 whatever the tower's dtype is."""
    half = spec.head_dim // 2
    return 1.0 / (spec.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))


@dataclass(frozen=True)
class _Maker:
    spec: VisionSpec
    source: TensorSource

    def plain(self, name: str) -> LinearWeights:
        weight = self.source(f"{name}.weight").detach()
        return self._plain(weight, weight, name)

    def _plain(self, parameter: torch.Tensor, weight: torch.Tensor, name: str) -> LinearWeights:
        weight = _pitched(weight)
        copied = weight.device.type != "meta" and weight.data_ptr() != parameter.data_ptr()
        return LinearWeights(weight, self.source(f"{name}.bias").detach(), copied=copied)

    def patch(self, name: str) -> LinearWeights:
        """The patch embedding as a product: a convolution whose kernel is its stride is one."""
        weight = self.source(f"{name}.weight").detach()
        return self._plain(weight, weight.reshape(weight.shape[0], -1), name)

    def folded(self, norm: str, name: str) -> LinearWeights:
        weight, bias = self.source(f"{name}.weight"), self.source(f"{name}.bias")
        gamma, beta = self.source(f"{norm}.weight"), self.source(f"{norm}.bias")
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        scaled = _pitched((weight.to(wide) * gamma.to(wide)).to(weight.dtype), own=True)
        shifted = bias.double() + weight.double() @ beta.double()
        return LinearWeights(scaled, shifted.to(wide), scaled.double().sum(1).to(wide))

    def block(self, names: WeightNames, i: int) -> BlockWeights:
        qkv = self.folded(names.norm1.format(i), names.qkv.format(i))
        return BlockWeights(
            qkv=_pair_rotary(qkv, self.spec),
            proj=self.plain(names.proj.format(i)),
            fc1=self.folded(names.norm2.format(i), names.fc1.format(i)),
            fc2=self.plain(names.fc2.format(i)),
        )

    def merger(self, names: MergerNames, fold: bool) -> MergerWeights:
        if fold:
            return MergerWeights(None, self.folded(names.norm, names.fc1), self.plain(names.fc2))
        norm = LinearWeights(self.source(f"{names.norm}.weight").detach(), self.source(f"{names.norm}.bias").detach())
        return MergerWeights(norm, self.plain(names.fc1), self.plain(names.fc2))


def _pair_rotary(qkv: LinearWeights, spec: VisionSpec) -> LinearWeights:
    """Rows of q and k reordered so that a rotary pair are neighbours; q . k does not change."""
    order = torch.arange(3 * spec.hidden_size, device=qkv.weight.device)
    parts = rearrange(order, "(three h d) -> three h d", three=3, h=spec.num_heads)
    turned = rearrange(parts[:2], "two h (half p) -> two h (p half)", half=2)
    order = torch.cat([turned.flatten(), parts[2].flatten()])
    assert qkv.colsum is not None, "qkv is always folded"
    return LinearWeights(_pitched(qkv.weight[order], own=True), qkv.bias[order], qkv.colsum[order])


def _pitched(weight: torch.Tensor, own: bool = False) -> torch.Tensor:
    """`weight` `[N, K]` with base and row pitch a multiple of 16 bytes; a padded copy only where they are not.

    `own` says that the tensor is ours and contiguous already.
    """
    step = ALIGNMENT // weight.element_size()
    aligned = weight.stride(-1) == 1 and weight.stride(0) % step == 0
    if aligned and (own or weight.data_ptr() % ALIGNMENT == 0):
        return weight
    pitch = -(-weight.shape[1] // step) * step
    padded = weight.new_zeros(weight.shape[0], pitch)[:, : weight.shape[1]]
    return padded.copy_(weight)


def _at(names: MergerNames, i: int) -> MergerNames:
    return MergerNames(names.norm.format(i), names.fc1.format(i), names.fc2.format(i))


def _linears(weights: EncoderWeights) -> list[LinearWeights]:
    """Every linear layer, in a fixed order."""
    linears = [weights.patch]
    for block in weights.blocks:
        linears += [block.qkv, block.proj, block.fc1, block.fc2]
    for merger in (weights.merger, *weights.deepstack):
        linears += [merger.fc1, merger.fc2]
    return linears


def _folded_bytes(linear: LinearWeights) -> int:
    if linear.colsum is None:
        return linear.weight.untyped_storage().nbytes() if linear.copied else 0
    return linear.weight.nbytes + linear.bias.nbytes + linear.colsum.nbytes


def _rewrite(old: EncoderWeights, new: EncoderWeights) -> EncoderWeights:
    """`new`, with its folded tensors living in `old`'s memory where they fit."""
    kept = {id(n): _rewrite_linear(o, n) for o, n in zip(_linears(old), _linears(new), strict=True)}
    blocks = tuple(
        BlockWeights(**{f.name: kept[id(getattr(block, f.name))] for f in fields(block)}) for block in new.blocks
    )
    mergers = [MergerWeights(m.norm, kept[id(m.fc1)], kept[id(m.fc2)]) for m in (new.merger, *new.deepstack)]
    return EncoderWeights(
        patch=kept[id(new.patch)],
        position=new.position,
        blocks=blocks,
        merger=mergers[0],
        deepstack=tuple(mergers[1:]),
        inv_freq=old.inv_freq if _fits(old.inv_freq, new.inv_freq) else new.inv_freq,
    )


def _rewrite_linear(old: LinearWeights, new: LinearWeights) -> LinearWeights:
    if (old.colsum is None, old.copied) != (new.colsum is None, new.copied) or not _fits(old.weight, new.weight):
        return new
    if old.colsum is None or new.colsum is None:
        return replace(new, weight=old.weight.copy_(new.weight)) if new.copied else new
    old.weight.copy_(new.weight)
    old.bias.copy_(new.bias)
    old.colsum.copy_(new.colsum)
    return old


def _fits(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
