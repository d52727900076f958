"""The records of prepared weights: built by `prepare_weights.py`, read by the encoder.

A tensor that needs no change refers to the original parameter, which stays authoritative. A record's field `own` names
the fields that are prepared copies.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from fusedvit.kernels.tma import rows_behind

TensorSource = Callable[[str], torch.Tensor]
ALIGNMENT = 16  # bytes; TMA's alignment of base addresses and row pitches
UNFOLDED = (torch.float32, torch.float64)  # dtypes in which a LayerNorm is not folded into the product after it
BOX_ROWS = 64  # rows of the smallest box that TMA copies; other boxes have a multiple of it
LINE = 128  # bytes of a cache line: a copy of 128 bytes that straddles two lines costs the GPU two requests


def pitch_of(cols: int, dtype: torch.dtype) -> int:
    """Columns from row to row, so that rows start at multiples of 16 bytes."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    return -(-cols // step) * step


def row_pitch(cols: int, dtype: torch.dtype) -> int:
    """Columns from row to row: as `pitch_of`, but rows of at least 16 cache lines start at a line."""
    line = LINE // dtype.itemsize
    return -(-cols // line) * line if cols >= 16 * line else pitch_of(cols, dtype)


def in_lines(weight: torch.Tensor) -> torch.Tensor:
    """A copy of `weight` `[N, K]` laid out for TMA: rows `row_pitch` apart, and memory after them for whole boxes of
    `BOX_ROWS` rows, as TMA is slower for boxes that exceed the tensor (`kernels.tma.rows_behind`)."""
    n, k = weight.shape
    return weight.new_zeros(-(-n // BOX_ROWS) * BOX_ROWS, row_pitch(k, weight.dtype))[:n, :k].copy_(weight)


def lies_in_lines(weight: torch.Tensor, own: bool) -> bool:
    """Whether `weight` is laid out as by `in_lines`; rows after the last are only required of `own` copies."""
    n, k = weight.shape
    whole = not own or rows_behind(weight, BOX_ROWS) % BOX_ROWS == 0
    return weight.stride(0) == row_pitch(k, weight.dtype) and whole


@dataclass(frozen=True)
class LinearWeights:
    """A linear layer: `weight` `[N, K]`, and `bias` `[N]` or None.

    `colsum` `[N]` fp32 is set if a LayerNorm was folded in; `norm` is set if the norm before the layer was not folded.
    In a gated MLP's first layer, rows of gate and up are interleaved.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    colsum: torch.Tensor | None = None
    own: tuple[str, ...] = ()
    norm: "NormWeights | None" = None


@dataclass(frozen=True)
class NormWeights:
    """A norm: `weight` `[C]`, and `bias` `[C]` or None for an RMSNorm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    own: tuple[str, ...] = ()


CLIPPED = ("x", "q", "k", "v", "context", "proj", "mlp_x", "gate", "up", "inner", "fc2")


@dataclass(frozen=True)
class SandwichWeights:
    """The norms of a block with norms before and after attention and MLP; none of them is folded.

    `clips` `[11, 2]` fp32 holds the least and largest value of each tensor in `CLIPPED`; None if nothing is clamped.
    """

    norm1: NormWeights
    post1: NormWeights
    norm2: NormWeights
    post2: NormWeights
    clips: torch.Tensor | None = None
    own: tuple[str, ...] = ("clips",)

    def clip(self, first: str, last: str = "") -> torch.Tensor | None:
        """The bounds `[2]` of `first`, or `[n, 2]` of tensors from `first` to `last`; None if nothing is clamped."""
        if self.clips is None:
            return None
        i = CLIPPED.index(first)
        return self.clips[i : CLIPPED.index(last) + 1] if last else self.clips[i]


@dataclass(frozen=True)
class BlockWeights:
    """The weights of a block.

    `qk_norm` `[2, head_dim]`, fp32 or wider, holds the norm weights of q and k with rotary pairs adjacent; it is
    `[3, head_dim]` with ones for v if v is normalised. q is scaled by `kernels.attention.query_scale`, which is folded
    into `qk_norm` if there is one, else into `qkv`.
    """

    qkv: LinearWeights
    proj: LinearWeights
    fc1: LinearWeights
    fc2: LinearWeights
    qk_norm: torch.Tensor | None = None
    sandwich: SandwichWeights | None = None
    own: tuple[str, ...] = ("qk_norm",)


@dataclass(frozen=True)
class MergerWeights:
    """The weights of a merger; `norm` is None if it belongs to `fc1`, folded or not."""

    norm: NormWeights | None
    fc1: LinearWeights
    fc2: LinearWeights


@dataclass(frozen=True)
class DownsampleWeights:
    """The weights of a downsampling merger; its convolution is a product over `merge_unit` tokens side by side."""

    norm: NormWeights
    downsample: LinearWeights
    proj: LinearWeights
    proj_norm: NormWeights
    fc1: LinearWeights
    fc2: LinearWeights


@dataclass(frozen=True)
class PoolWeights:
    """Standardises pooled tokens by (x - bias) * scale, each `[hidden]` in fp32 or wider; None if they are not."""

    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    own: tuple[str, ...] = ("bias", "scale")


@dataclass(frozen=True)
class EncoderWeights:
    """All weights of a tower. `position` is `[position_rows, hidden]` or None; `inv_freq` is `[head_dim / 4]` fp32.

    `byte_patch` and `still_patch` are the patch embedding for centred bytes, of all frames and of still images. They
    are None unless calls bring such bytes: see `prepare_weights`.
    """

    patch: LinearWeights
    patch_norm: NormWeights | None
    position: torch.Tensor | None
    blocks: tuple[BlockWeights, ...]
    merger: MergerWeights | DownsampleWeights | NormWeights | PoolWeights
    deepstack: tuple[MergerWeights, ...]
    inv_freq: torch.Tensor
    own: tuple[str, ...] = ("inv_freq",)
    byte_patch: LinearWeights | None = None
    still_patch: LinearWeights | None = None

    def patches(self) -> tuple[LinearWeights | None, ...]:
        """The patch embedding of each kind of pixels (`kernels.load_inputs.KINDS`); None for unused kinds."""
        return self.patch, self.byte_patch, self.still_patch

    def pointers(self) -> tuple[int, ...]:
        """The addresses of all tensors, which captured launches hold."""
        return tuple(tensor.data_ptr() for _, tensor, _ in tensors_of(self))

    def borrowed(self) -> tuple[torch.Tensor, ...]:
        """Tensors in the memory of the tower's parameters, which other code may move or free."""
        return tuple(tensor for _, tensor, own in tensors_of(self) if not own)

    def lent(self, addresses: Iterable[int], parameters: Mapping[int, torch.Tensor]) -> "EncoderWeights":
        """These weights with borrowed tensors replaced, after parameters have moved.

        Args:
            addresses: the old address of each tensor, in the order of `borrowed`.
            parameters: old address -> parameter.
        """
        left = iter(addresses)

        def taken(path: str, old: torch.Tensor, own: bool) -> torch.Tensor:
            if own:
                return old
            parameter = parameters[next(left)].data
            return parameter.as_strided(old.shape, old.stride(), parameter.storage_offset())

        found: EncoderWeights = with_tensors(self, taken)
        return found

    def copies(self) -> tuple[torch.Tensor, ...]:
        """Prepared copies, each as a flat view of its whole storage, as rows may have gaps between them."""
        found = {t.untyped_storage().data_ptr(): t for _, t, own in tensors_of(self) if own}
        return tuple(t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0) for t in found.values())

    def held_bytes(self) -> int:
        """Bytes of prepared copies that the original parameters do not already hold."""
        return sum(tensor.untyped_storage().nbytes() for _, tensor, own in tensors_of(self) if own)


def launch_key(record: Any) -> Any:
    """The properties of a record's tensors that decide which kernels run; equal for records with equal launches."""
    if isinstance(record, torch.Tensor):
        return record.dtype, record.shape, record.stride(), record.data_ptr() % ALIGNMENT
    return tuple(launch_key(getattr(record, f.name)) for f in fields(record)) if is_dataclass(record) else record


def rewrite(old: EncoderWeights, new: EncoderWeights) -> EncoderWeights:
    """`new`, with its prepared copies written into `old`'s memory where they fit."""
    before = {path: tensor for path, tensor, own in tensors_of(old) if own}

    def kept(path: str, now: torch.Tensor, own: bool) -> torch.Tensor:
        memory = before.get(path)
        return memory.copy_(now) if own and memory is not None and _fits(memory, now) else now

    found: EncoderWeights = with_tensors(new, kept)
    return found


def with_tensors(
    record: Any, of: Callable[[str, torch.Tensor, bool], torch.Tensor], path: str = "", own: bool = False
) -> Any:
    """`record` with `of(path, tensor, own)` in place of every tensor, called in the order of `tensors_of`."""
    if isinstance(record, torch.Tensor):
        return of(path, record, own)
    if isinstance(record, tuple):
        return tuple(with_tensors(part, of, f"{path}.{i}", own) for i, part in enumerate(record))
    if not is_dataclass(record) or isinstance(record, type):
        return record
    parts, copies = {f.name: getattr(record, f.name) for f in fields(record)}, getattr(record, "own", ())
    new = {name: with_tensors(part, of, f"{path}.{name}", name in copies) for name, part in parts.items()}
    return replace(record, **new)


def tensors_of(record: Any, path: str = "", own: bool = False) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every tensor of a record, in a fixed order: its path (".blocks.0.qkv.weight"), itself, and whether the record
    names it as its own, which is a prepared copy."""
    if isinstance(record, torch.Tensor):
        yield path, record, own
    elif isinstance(record, tuple):
        for i, part in enumerate(record):
            yield from tensors_of(part, f"{path}.{i}", own)
    elif is_dataclass(record):
        for f in fields(record):
            yield from tensors_of(getattr(record, f.name), f"{path}.{f.name}", f.name in getattr(record, "own", ()))


def _fits(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
