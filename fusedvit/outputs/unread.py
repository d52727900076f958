"""Unread hidden states: a tuple of tensors that are computed when their content is first needed.

Hugging Face's and PyTorch's own code walks over outputs: it makes tuples of records, maps them, and searches them for
tensors that require gradients. All of that works without computing: `requires_grad`, dtype and device are known, and
casts and moves are deferred. Any other operation gets the computed hidden states.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

Hidden = tuple[torch.Tensor | None, ...]
_Conversion = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_T: Any = torch.Tensor
_OF_AUTOGRAD = {getattr(_T, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "_base")}
_OF_LAYOUT = {getattr(_T, name).__get__ for name in ("dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta")}
_OF_LAYOUT |= {torch.is_floating_point, _T.is_floating_point, torch.is_complex, _T.is_complex, _T.is_sparse.__get__}
_CONVERSIONS = {_T.to, _T.cpu, _T.cuda, _T.float, _T.double, _T.half, _T.bfloat16, _T.detach}


class CannotRead(RuntimeError):
    """Hidden states cannot be computed: their input or tower has changed since the call, or a tracer is active."""


class DeferredStates:
    """The hidden states of one call, computed once.

    Attributes:
        count: how many there are; None if the call selects some.
        like: an empty tensor of their dtype and device.
        uniform: whether all of them have this dtype and device; under autocast they may not.
    """

    def __init__(self, compute: Callable[[], Hidden], count: int | None, like: torch.Tensor, uniform: bool) -> None:
        """`compute` returns the hidden states or raises `CannotRead`. It is dropped once it has returned, as it keeps
        the tower alive."""
        self.count, self.like, self.uniform = count, like, uniform
        self._compute: Callable[[], Hidden] | None = compute
        self._lock = threading.Lock()
        self._hidden: Hidden | None = None
        self._converted: list[weakref.ref[UnreadTensor]] = []

    def read(self) -> Hidden:
        """The hidden states.

        Raises:
            CannotRead: they cannot be computed any more.
        """
        with self._lock:  # so that two readers compute them only once
            first = self._hidden is None
            if self._hidden is None:
                assert self._compute is not None, "what computes them is let go when it has"
                self._hidden, self._compute = self._compute(), None
            hidden = self._hidden
        if first:  # deferred conversions run now, so that later writes by readers do not show in them
            converted, self._converted = self._converted, []
            for reference in converted:
                tensor = reference()
                if tensor is not None:
                    tensor.read()
        return hidden

    def unread(self) -> bool:
        """Whether the hidden states have not been computed yet."""
        return self._hidden is None

    def will_convert(self, tensor: "UnreadTensor") -> None:
        """Registers `tensor`, a deferred conversion, to be computed when the hidden states are read."""
        self._converted.append(weakref.ref(tensor))


class UnreadTensor(torch.Tensor):
    """One of the hidden states, perhaps converted; it is computed when its shape or content is needed."""

    _source: DeferredStates
    _index: int | None
    _like: torch.Tensor
    _before: "UnreadTensor | None"
    _conversion: _Conversion | None
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls: Any, source: DeferredStates, index: int | None, like: torch.Tensor) -> "UnreadTensor":
        """The hidden state at `index`; None stands for all of a source that does not know how many it has."""
        self: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, (0,), dtype=like.dtype, device=like.device, dispatch_sizes_strides_policy="sizes"
        )
        self._source, self._index, self._like = source, index, like
        self._before = self._conversion = self._value = None
        return self

    def read(self) -> torch.Tensor:
        """The computed tensor.

        Raises:
            CannotRead: it cannot be computed any more.
            RuntimeError: transformers recorded another number of hidden states than expected for such a tower.
        """
        if self._value is None:
            if self._before is not None and self._conversion is not None:
                function, args, kwargs = self._conversion
                with torch.set_grad_enabled(self._like.requires_grad):
                    self._value = function(self._before.read(), *args, **kwargs)
            else:
                self._value = self._of(self._source.read())
        return self._value

    def _of(self, hidden: Hidden) -> torch.Tensor:
        found = None if self._index is None or len(hidden) != self._source.count else hidden[self._index]
        if found is None:
            raise RuntimeError("fusedvit: these hidden_states can be read from the record alone")
        return found

    def converted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "UnreadTensor":
        """This tensor after a cast or a move, which is deferred until the tensor is read."""
        like = function(self._like, *args, **kwargs)
        if like is self._like:
            return self
        found = UnreadTensor(self._source, self._index, like)
        found._before, found._conversion = self, (function, args, kwargs)
        self._source.will_convert(found)
        return found

    def is_of(self, other: "UnreadTensor") -> bool:
        """Whether this tensor has the source and conversions of `other`."""
        if self._source is not other._source or self._conversion != other._conversion:
            return False
        if self._before is None or other._before is None:
            return self._before is other._before
        return self._before.is_of(other._before)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        this = args[0] if args else None
        if isinstance(this, cls) and this._source.unread():
            if function is _T.__repr__:
                return f"<hidden state {this._index}, computed when first read>"
            if function in _OF_AUTOGRAD or (function in _OF_LAYOUT and this._source.uniform):
                return function(this._like)
            if function in _CONVERSIONS and this._source.uniform and not _has_tensors((args[1:], kwargs)):
                return this.converted(function, args[1:], kwargs)
        return function(*read(args), **read(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is of a function that does nothing
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*read(args), **read(kwargs or {}))


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(value))


def read(value: Any) -> Any:
    """`value`, a function's argument, with all unread hidden states in it replaced by computed ones."""
    if isinstance(value, UnreadTensor | UnreadStates):
        return value.read()
    if type(value) in (list, tuple):
        return type(value)(map(read, value))
    return {name: read(v) for name, v in value.items()} if type(value) is dict else value


class UnreadStates(tuple[Any, ...]):
    """The tuple of hidden states. Code that iterates over it, C code too, gets tensors that are computed on use.

    The constructor returns an `UnreadStates` only if the items are all the unread tensors of one source, in order and
    with equal conversions; otherwise it returns a plain tuple.
    """

    _source: DeferredStates

    @staticmethod
    def __new__(cls: Any, items: Iterable[Any]) -> Any:
        found = tuple(items)
        first = found[0] if found else None
        if not isinstance(first, UnreadTensor) or len(found) != (first._source.count or 1):
            return found
        alike = (isinstance(t, UnreadTensor) and t.is_of(first) for t in found)
        if not all(alike) or [t._index for t in found] not in ([None], [*range(len(found))]):
            return found
        self = tuple.__new__(cls, found)
        self._source = first._source
        return self

    @staticmethod
    def of(source: DeferredStates) -> "UnreadStates":
        """The hidden states of `source`, unconverted."""
        indices = [None] if source.count is None else range(source.count)
        found: UnreadStates = UnreadStates(UnreadTensor(source, index, source.like) for index in indices)
        return found

    def tensors(self) -> tuple[UnreadTensor, ...]:
        """The unread tensors, as C code finds them in the tuple."""
        return tuple(tuple.__iter__(self))

    def unread(self) -> bool:
        """Whether the hidden states have not been computed yet."""
        return self._source.unread()

    def read(self) -> Hidden:
        """The hidden states in a plain tuple.

        Raises:
            CannotRead: they cannot be computed any more.
        """
        tensors = self.tensors()
        if tensors[0]._before is None:
            return self._source.read()
        return tuple(tensor.read() for tensor in tensors)

    def walked(self) -> tuple[Any, ...]:
        """The items for code that searches outputs for tensors: each is computed, or raises `CannotRead`, on use."""
        if self.unread() and self._source.count is not None:
            return self.tensors()
        try:
            return self.read()
        except CannotRead:
            return self.tensors()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.walked())

    def __len__(self) -> int:
        return len(self.read()) if self._source.count is None else self._source.count

    def __repr__(self) -> str:
        return "(<computed when first read>)" if self.unread() else repr(self.read())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return tuple, (list(self.read()),)


def _reading(name: str) -> Callable[..., Any]:
    def method(self: UnreadStates, *args: Any) -> Any:
        return getattr(self.read(), name)(*read(args))

    method.__name__ = name
    return method


for _name in ("getitem", "contains", "hash", "eq", "ne", "lt", "le", "gt", "ge", "add", "mul", "rmul"):
    setattr(UnreadStates, f"__{_name}__", _reading(f"__{_name}__"))
for _name in ("count", "index", "__getnewargs__"):
    setattr(UnreadStates, _name, _reading(_name))
UnreadStates.__radd__ = lambda self, other: other + self.read()  # type: ignore[attr-defined]  # a tuple has none


def _leaves(states: UnreadStates) -> tuple[list[Any], None]:
    return list(states.walked()), None


_pytree.register_pytree_node(
    UnreadStates,
    _leaves,
    lambda leaves, _: UnreadStates(leaves),
    serialized_type_name="fusedvit.outputs.unread.UnreadStates",
)
