"""Patches as bytes, under a mark that says how Hugging Face's processor would have normalised them.

A fused tower takes the bytes as they are and folds the normalisation into its weights: an eighth of the bytes of fp32
patches for a still image, a quarter for video. Hugging Face's models cast, move, split and concatenate pixels before
the tower sees them. Operations that move whole rows keep bytes and mark; casts are recorded and not carried out; any
operation that would compute with the bytes raises TypeError, lest 0 to 255 be taken for normalised values.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fusedvit.model.normalization import Normalization
from fusedvit.pixels.arguments import kind_of_argument

_ACCESSES = {"__get__": ".", "__set__": "setting ", "__delete__": "deleting "}
_OPERATORS = "add,sub,mul,truediv,floordiv,mod,pow,matmul,and,or,xor,lshift,rshift"
_FLOATS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


class BytePixels(torch.Tensor):
    """uint8 patches `[…, width]` with their normalisation: all frames, or the one frame of still images.

    `mark` creates them. `is_floating_point()` is True, as for the normalised pixels, so that code which casts only
    floats casts these, too.

    Attributes:
        normalization: the normalisation that Hugging Face's processor would have applied.
        still: a row holds one frame, `[channels, patch, patch]`, which stands for all frames of the patch.
        casts: the dtypes that the pixels were cast to since, in order.
    """

    normalization: Normalization
    still: bool
    casts: tuple[torch.dtype, ...]
    _bytes: torch.Tensor

    @staticmethod
    def mark(
        patches: torch.Tensor,
        normalization: Normalization,
        still: bool = False,
        casts: tuple[torch.dtype, ...] = (),
    ) -> "BytePixels":
        """`patches`, marked; the memory is shared.

        Args:
            patches: `[…, normalization.width(still)]` uint8, any device, any strides.
            normalization: what turns the bytes into the tower's pixels.
            still: each row holds one frame.
            casts: dtypes of floats that the pixels were cast to, in order.

        Raises:
            TypeError: `patches` is not a tensor of uint8, or another argument has another type.
            ValueError: rows of another width, or a cast to a dtype that is not one of floats.
        """
        if not isinstance(patches, torch.Tensor) or patches.dtype != torch.uint8:
            got = patches.dtype if isinstance(patches, torch.Tensor) else type(patches).__name__
            raise TypeError(f"fusedvit: patches must be a tensor of torch.uint8, got {got}")
        if not isinstance(normalization, Normalization):
            raise TypeError(f"fusedvit: normalization must be a Normalization, got {kind_of_argument(normalization)}")
        if not isinstance(still, bool):
            raise TypeError(f"fusedvit: still must be a bool, got {kind_of_argument(still)}")
        _check_casts(casts)
        width = normalization.width(still)
        if patches.ndim == 0 or patches.shape[-1] != width:
            raise ValueError(f"fusedvit: rows of patches must be {width} bytes, got shape {tuple(patches.shape)}")
        with _plainly():
            marked: BytePixels = torch.Tensor._make_subclass(BytePixels, patches)
            marked._bytes = patches if type(patches) is torch.Tensor else patches.as_subclass(torch.Tensor)
        marked.normalization, marked.still, marked.casts = normalization, still, casts
        return marked

    def unmarked(self) -> torch.Tensor:
        """The bytes, a plain uint8 tensor in the same memory."""
        return self._bytes  # a view of it would take the tower's call 5 us

    def pixels(self) -> torch.Tensor:
        """Normalised pixels, bit for bit those of Hugging Face's processor and the casts since; fp32 without casts.

        Returns:
            `[…, channels · temporal_patch · patch · patch]`, a plain tensor.
        """
        pixels = self.normalization.apply(self.unmarked(), self.still)
        for dtype in self.casts:
            pixels = pixels.to(dtype)
        return pixels

    def all_frames(self) -> "BytePixels":
        """The same patches with every frame: those of still images are repeated."""
        if not self.still:
            return self
        n = self.normalization
        rows = self.unmarked().unflatten(-1, (n.channels, 1, n.patch**2))
        rows = rows.expand(*rows.shape[:-2], n.temporal_patch, -1).flatten(-3)
        return BytePixels.mark(rows, n, False, self.casts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        frames = "one frame" if self.still else f"{self.normalization.temporal_patch} frames"
        return f"BytePixels(shape={tuple(self.shape)}, device={self.device}, {frames}, {self.normalization})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return BytePixels.mark, (self.unmarked(), self.normalization, self.still, self.casts)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BytePixels":
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        copied: BytePixels = memo[id(self)]
        return copied

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, _name_of(func)
        found = _fact if name.startswith((".is_", "_is_")) else _RULES.get(name)
        if found is None:
            raise _refused(name)
        with _plainly():
            return found(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        """Refuses operations that bypass `__torch_function__`: `torch.as_tensor`, `torch.tensor`, vmap, C++ code."""
        raise _refused(str(func))


def _check_casts(casts: Any) -> None:
    """Raises TypeError or ValueError unless `casts` is a tuple of dtypes of floats."""
    if not isinstance(casts, tuple) or not all(isinstance(dtype, torch.dtype) for dtype in casts):
        got = [kind_of_argument(each) for each in casts] if isinstance(casts, tuple) else kind_of_argument(casts)
        raise TypeError(f"fusedvit: casts must be a tuple of torch.dtype, got {got}")
    if not all(dtype.is_floating_point for dtype in casts):
        raise ValueError(f"fusedvit: casts must be to dtypes of floats, got {casts}")


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Within, operations see plain tensors of bytes."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        yield


def as_floats(pixels: Any) -> Any:
    """The normalised pixels of marked bytes; anything else as it is."""
    return pixels.pixels() if isinstance(pixels, BytePixels) else pixels


def _refuse_operators() -> None:
    """Defines Python's operators, since torch turns a TypeError inside its own into Python's default: `x == y` is
    False."""
    names = [f"__{side}{name}__" for name in _OPERATORS.split(",") for side in ("", "r", "i")]
    for name in (*names, *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "divmod", "rdivmod"))):

        def operator(self: BytePixels, other: object, _name: str = name) -> Any:
            raise _refused(_name)

        setattr(BytePixels, name, operator)
    BytePixels.__hash__ = torch.Tensor.__hash__  # type: ignore[method-assign]  # as `__eq__` was set


def _name_of(func: Any) -> str:
    """A function's name; ".name" where an attribute is read, "setting name" or "deleting name" where it is changed."""
    name: str = getattr(func, "__name__", str(func))
    if name not in _ACCESSES:
        return name
    attribute: Any = func.__self__
    return _ACCESSES[name] + getattr(attribute, "fget", attribute).__name__


def _refused(name: str, why: str = "") -> TypeError:
    return TypeError(
        f"fusedvit: {name.lstrip('.')} on BytePixels{why}: they are bytes for a tower fused by fusedvit, and keep rows "
        "whole; `.pixels()` gives what Hugging Face's processor makes, `.unmarked()` the bytes"
    )


_Rule = Callable[[Any, Any, dict[str, Any]], Any]


def _marked(result: Any, like: BytePixels, casts: tuple[torch.dtype, ...] | None = None) -> Any:
    """`result`, tensors of whole rows, with the mark of `like`."""
    if not isinstance(result, torch.Tensor):
        return type(result)(_marked(part, like) for part in result)
    return BytePixels.mark(result, like.normalization, like.still, like.casts if casts is None else casts)


def _first(name: str, args: Any) -> BytePixels:
    """The tensor that a function is called on. Raises TypeError if it is not marked: then another argument is."""
    if not args or not isinstance(args[0], BytePixels):
        raise _refused(name, " as its argument")
    return args[0]


def _fact(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Facts that do not depend on pixel values: shapes, addresses, flags."""
    return func(*args, **kwargs)


def _without_gradient(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`requires_grad = False`, which reentrant checkpointing sets on detached inputs. True is refused: bytes have no
    gradient."""
    name = _name_of(func)
    x = _first(name, args)
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if wanted:
        raise _refused(name, f" to {wanted}")
    return x


def _moved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copies and views of the whole tensor."""
    return _marked(func(*args, **kwargs), _first(_name_of(func), args))


def _cast(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`to`, `type`, `float`, …: moves the bytes and records the dtype."""
    name = _name_of(func)
    x = _first(name, args)
    if name == "type" and len(args) == 1 and not kwargs:
        return func(x)
    dtype, device, flags = _FLOATS.get(name), kwargs.get("device"), []
    for given in (*args[1:], kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(given, torch.Tensor):
            device, dtype = given.device, _pixel_dtype(given)
        elif isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, bool):
            flags.append(given)
        elif given is not None and name == "to":
            device = given
        elif given is not None:
            raise _refused(name, f" to {given!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise _refused(name, f" to {dtype}")
    how: dict[str, Any] = dict(zip(("non_blocking", "copy"), flags, strict=False))
    how |= {key: kwargs[key] for key in ("non_blocking", "copy") if key in kwargs}
    casts = x.casts if dtype is None or dtype == _pixel_dtype(x) else (*x.casts, dtype)
    return _marked(torch.Tensor.to(x, device=x.device if device is None else device, **how), x, casts)


def _pixel_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of the pixels that `x` stands for."""
    if not isinstance(x, BytePixels):
        return x.dtype
    return x.casts[-1] if x.casts else torch.float32


def _shaped(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Changes of the leading dimensions. A result with rows of the same width still has whole rows."""
    x = _first(_name_of(func), args)
    if any(isinstance(given, torch.dtype) for given in (*args, *kwargs.values())):
        raise _refused(_name_of(func), " to another dtype")
    result = func(*args, **kwargs)
    if result.dtype != torch.uint8 or result.ndim == 0 or result.shape[-1] != x.shape[-1]:
        raise _refused(_name_of(func), f" to shape {tuple(result.shape)}")
    return _marked(result, x)


def _along(position: int, default: int | None = 0) -> _Rule:
    """The rule of functions along a dimension, their argument at `position`; the last dimension is refused."""

    def rule(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = _name_of(func)
        x = _first(name, args)
        dim = args[position] if len(args) > position else kwargs.get("dim", default)
        if type(dim) is not int or dim % x.ndim == x.ndim - 1:
            raise _refused(name, f" along dimension {dim}")
        return _marked(func(*args, **kwargs), x)

    return rule


def _joined(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`cat`, `stack`, `pad_sequence`: of marked tensors alone, with the same mark."""
    name = _name_of(func)
    parts = list(args[0] if args else kwargs.pop("tensors"))
    like = _first(name, parts)
    if any(not isinstance(part, BytePixels) or part.normalization != like.normalization for part in parts):
        raise _refused(name, " with pixels that are normalised otherwise, or already")
    if any(part.still != like.still for part in parts):
        parts = [part.all_frames() for part in parts]
        like = parts[0]
    if any(part.casts != like.casts for part in parts):
        raise _refused(name, " with pixels that were cast otherwise")
    if kwargs.get("padding_value", args[2] if name == "pad_sequence" and len(args) > 2 else 0) != 0:
        raise _refused(name, " with other bytes than 0 between")
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    ndim = like.ndim + (name == "stack")
    if name != "pad_sequence" and (type(dim) is not int or dim % ndim == ndim - 1):
        raise _refused(name, f" along dimension {dim}")
    return _marked(func(parts, *args[1:], **kwargs), like)


def _padded(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`functional.pad` with whole rows of zero bytes, which the caller cuts off again."""
    x, given = _first("pad", args), dict(zip(("pad", "mode", "value"), args[1:], strict=False)) | kwargs
    if tuple(given["pad"][:2]) != (0, 0) or given.get("mode", "constant") != "constant" or given.get("value"):
        raise _refused("pad", f" by {given}")
    return _marked(func(*args, **kwargs), x)


def _indexed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`x[index]` with an index that keeps the last dimension whole."""
    x, index = _first("indexing", args), args[1]
    parts = list(index) if isinstance(index, tuple) or _is_tuple_to_torch(index) else [index]
    rest = [slice(None)] * (x.ndim - sum(map(_dims_of, parts)))
    at = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    parts[at : at + 1] = rest
    width = x.shape[-1]
    if not parts or type(parts[-1]) is not slice or parts[-1].indices(width) != (0, width, 1):
        raise _refused("indexing", " within rows")
    return _marked(func(x, tuple(parts)), x)


def _is_tuple_to_torch(index: Any) -> bool:
    """Whether `index` is a list that torch treats as a tuple."""
    kinds = torch.Tensor | Sequence | slice | type(None) | type(...)
    return isinstance(index, list) and any(isinstance(part, kinds) for part in index)


def _dims_of(part: Any) -> int:
    """How many dimensions one part of an index consumes."""
    if part is None or part is ... or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


_FACTS = (
    *("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset", "data_ptr"),
    *("is_contiguous", "element_size", "get_device", "is_pinned", "is_shared", "is_inference", "is_same_size"),
    *("is_complex", "is_conj", "is_neg", "__hash__", "untyped_storage", "record_stream", "new"),
    *(".shape", ".dtype", ".device", ".ndim", ".layout", ".itemsize", ".nbytes", "._version", "._base", ".names"),
    *(".requires_grad", ".retains_grad", ".grad", ".grad_fn", ".is_leaf", ".output_nr"),
)
_COPIES = ("clone", "detach", "contiguous", "cuda", "cpu", "pin_memory", "alias", "share_memory_", ".data")
_SHAPES = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "repeat", "view_as")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_FACTS, _fact),
    "is_floating_point": lambda func, args, kwargs: True,
    **dict.fromkeys(_COPIES, _moved),
    **dict.fromkeys(("to", "type", "type_as", *_FLOATS), _cast),
    **dict.fromkeys(_SHAPES, _shaped),
    **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "chunk"), _along(2)),
    **dict.fromkeys(("index_select", "narrow", "select", "unbind"), _along(1)),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack", "pad_sequence"), _joined),
    "repeat_interleave": _along(2, None),
    **dict.fromkeys(("setting requires_grad", "requires_grad_"), _without_gradient),
    "pad": _padded,
    "__getitem__": _indexed,
    "__iter__": lambda func, args, kwargs: iter(_along(1)(torch.unbind, args, kwargs)),
}
_refuse_operators()
