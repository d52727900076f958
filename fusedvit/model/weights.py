"""The records that prepared weights are kept in: made by `prepare_weights.py`, read by the encoder.

What needs no change is a reference to the original parameter, which stays the truth and keeps its name; `own` names
the fields of a record that are prepared copies.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from fusedvit.kernels.tma import rows_behind

TensorSource = Callable[[str], torch.Tensor]
ALIGNMENT = 16  # bytes; what the copy engine asks of bases and row pitches
UNFOLDED = (torch.float32, torch.float64)  # dtypes in which a LayerNorm is not folded into the product behind it
BOX_ROWS = 64  # of a tensor that the copy engine brings at once; the fewest, of which others are multiples
LINE = 128  # bytes: a copy of 128 bytes that straddles two lines of the cache costs the GPU two requests


def pitch_of(cols: int, dtype: torch.dtype) -> int:
    """Columns from row to row so that rows start at multiples of 16 bytes."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    return -(-cols // step) * step


def row_pitch(cols: int, dtype: torch.dtype) -> int:
    """Columns from row to row: as `pitch_of`, and rows of many lines start at a line's start."""
    line = LINE // dtype.itemsize
    return -(-cols // line) * line if cols >= 16 * line else pitch_of(cols, dtype)


def in_lines(weight: torch.Tensor) -> torch.Tensor:
    """A copy of `weight` `[N, K]` for the copy engine: rows `row_pitch` apart, and memory behind them for whole boxes
    of `BOX_ROWS`, as boxes past the last row take it longer (`kernels.descriptor.rows_behind`)."""
    n, k = weight.shape
    return weight.new_zeros(-(-n // BOX_ROWS) * BOX_ROWS, row_pitch(k, weight.dtype))[:n, :k].copy_(weight)


def lies_in_lines(weight: torch.Tensor, own: bool) -> bool:
    """Whether it lies as `in_lines` lays it out; of rows behind the last that is asked of `own` copies alone."""
    n, k = weight.shape
    whole = not own or rows_behind(weight, BOX_ROWS) % BOX_ROWS == 0
    return weight.stride(0) == row_pitch(k, weight.dtype) and whole


@dataclass(frozen=True)
class LinearWeights:
    """`weight` `[N, K]`, `bias` `[N]` or None; `colsum` `[N]` fp32 where a LayerNorm was folded in; `norm` where one
    comes before it and was not.

    Rows of a gated MLP's first layer are gate and up interleaved.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    colsum: torch.Tensor | None = None
    own: tuple[str, ...] = ()
    norm: "NormWeights | None" = None


@dataclass(frozen=True)
class NormWeights:
    """`weight` `[C]`; `bias` `[C]`, None for an RMSNorm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    own: tuple[str, ...] = ()


CLIPPED = ("x", "q", "k", "v", "context", "proj", "mlp_x", "gate", "up", "inner", "fc2")


@dataclass(frozen=True)
class SandwichWeights:
    """The norms of a block with norms before and after attention and MLP; none of them is folded.

    `clips` `[11, 2]` fp32: least and largest value of what `CLIPPED` names, in its order; None for a block that clamps
    nothing.
    """

    norm1: NormWeights
    post1: NormWeights
    norm2: NormWeights
    post2: NormWeights
    clips: torch.Tensor | None = None
    own: tuple[str, ...] = ("clips",)

    def clip(self, first: str, last: str = "") -> torch.Tensor | None:
        """The bounds `[2]` of `first`, or `[n, 2]` of those from `first` to `last`; None where nothing is clamped."""
        if self.clips is None:
            return None
        i = CLIPPED.index(first)
        return self.clips[i : CLIPPED.index(last) + 1] if last else self.clips[i]


@dataclass(frozen=True)
class BlockWeights:
    """A block. What makes q scales it by `kernels.attention.query_scale`: `qkv`, or the norms of q and k if there are
    any, `qk_norm` `[2, head_dim]`, fp32 or wider, pairs made neighbours; with ones for v `[3, head_dim]`."""

    qkv: LinearWeights
    proj: LinearWeights
    fc1: LinearWeights
    fc2: LinearWeights
    qk_norm: torch.Tensor | None = None
    sandwich: SandwichWeights | None = None
    own: tuple[str, ...] = ("qk_norm",)


@dataclass(frozen=True)
class MergerWeights:
    """A merger; `norm` is None where it was folded into `fc1`."""

    norm: NormWeights | None
    fc1: LinearWeights
    fc2: LinearWeights


@dataclass(frozen=True)
class DownsampleWeights:
    """A downsampling merger; the convolution is a product over `merge_unit` tokens side by side."""

    norm: NormWeights
    downsample: LinearWeights
    proj: LinearWeights
    proj_norm: NormWeights
    fc1: LinearWeights
    fc2: LinearWeights


@dataclass(frozen=True)
class PoolWeights:
    """What standardises pooled tokens, `[hidden]` fp32 or wider each: (x - bias) * scale; None if nothing does."""

    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    own: tuple[str, ...] = ("bias", "scale")


@dataclass(frozen=True)
class EncoderWeights:
    """All of a tower. `position` is `[position_rows, hidden]` or None; `inv_freq` `[head_dim / 4]` fp32.

    `byte_patch` and `still_patch` are the patch embedding for centred bytes, of all frames and of still images, where
    somebody brings them: see `prepare_weights`.
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
        """The patch embedding of each kind of pixels (`kernels.load_inputs.KINDS`); None where nobody brings any."""
        return self.patch, self.byte_patch, self.still_patch

    def pointers(self) -> tuple[int, ...]:
        """Addresses of every tensor: what captured launches hold."""
        return tuple(tensor.data_ptr() for tensor, _ in _tensors(self))

    def borrowed(self) -> tuple[torch.Tensor, ...]:
        """Tensors in the memory of the tower's parameters, which others may move or free."""
        return tuple(tensor for tensor, own in _tensors(self) if not own)

    def lent(self, addresses: Iterable[int], parameters: Mapping[int, torch.Tensor]) -> "EncoderWeights":
        """These weights, with what is borrowed taken from `parameters` by the address that it had, one after another
        as `borrowed` lists them: parameters have moved since."""
        left = iter(addresses)

        def taken(old: torch.Tensor) -> torch.Tensor:
            parameter = parameters[next(left)].data
            return parameter.as_strided(old.shape, old.stride(), parameter.storage_offset())

        found: EncoderWeights = _with_borrowed(self, taken)
        return found

    def copies(self) -> tuple[torch.Tensor, ...]:
        """Prepared copies, each as all of its memory, flat: rows of some lie apart."""
        found = {t.untyped_storage().data_ptr(): t for t, own in _tensors(self) if own}
        return tuple(t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0) for t in found.values())

    def held_bytes(self) -> int:
        """Bytes of prepared copies that the original parameters do not already hold."""
        return sum(tensor.untyped_storage().nbytes() for tensor, own in _tensors(self) if own)


def layout_of(record: Any) -> Any:
    """What decides which kernels run on a record's tensors: equal for records that launch the same."""
    if isinstance(record, torch.Tensor):
        return record.dtype, record.shape, record.stride(), record.data_ptr() % ALIGNMENT
    return tuple(layout_of(getattr(record, f.name)) for f in fields(record)) if is_dataclass(record) else record


def rewrite(old: Any, new: Any) -> Any:
    """`new`, a record of weights, with its prepared copies living in `old`'s memory where they fit."""
    if isinstance(new, tuple):
        return tuple(rewrite(o, n) for o, n in zip(old, new, strict=True))
    if not is_dataclass(new) or isinstance(new, type) or type(old) is not type(new):
        return new
    kept: dict[str, Any] = {}
    for f in fields(new):
        before, now = getattr(old, f.name), getattr(new, f.name)
        if isinstance(now, torch.Tensor):
            own = f.name in getattr(new, "own", ()) and f.name in getattr(old, "own", ())
            kept[f.name] = before.copy_(now) if own and _fits(before, now) else now
        elif f.name != "own":
            kept[f.name] = rewrite(before, now)
    return replace(new, **kept)


def _with_borrowed(record: Any, taken: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`record` with `taken(tensor)` in place of every tensor that is not a prepared copy."""
    if isinstance(record, tuple):
        return tuple(_with_borrowed(part, taken) for part in record)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "own"}
    own = getattr(record, "own", ())
    return replace(
        record,
        **{
            name: _with_borrowed(value, taken)
            if not isinstance(value, torch.Tensor)
            else value
            if name in own
            else taken(value)
            for name, value in values.items()
        },
    )


def _tensors(record: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Every tensor of a record, in a fixed order, and whether it is a prepared copy."""
    if isinstance(record, tuple):
        for part in record:
            yield from _tensors(part)
    elif is_dataclass(record):
        for f in fields(record):
            value = getattr(record, f.name)
            if isinstance(value, torch.Tensor):
                yield value, f.name in getattr(record, "own", ())
            else:
                yield from _tensors(value)


def _fits(old: torch.Tensor | None, new: torch.Tensor) -> bool:
    return old is not None and old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
