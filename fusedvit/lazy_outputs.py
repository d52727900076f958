"""Output records whose hidden states are computed when they are first read.

Embedding models ask for `output_hidden_states` of every tower that they hold and read those of the language model. The
fused encoder keeps no hidden states, so the record that it returns runs the tower's original code if somebody reads
them. The record is an instance of Hugging Face's class, and becomes a plain one of it when they are read or replaced.
"""

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from fusedvit.checks.recorded import version_of

HIDDEN_STATES = "hidden_states"
_PENDING = "_fusedvit_pending"  # in the `__dict__` of a record that is yet to be completed
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CLOSE = {torch.float64: 1e-3, torch.float32: 1e-3}  # relative error in the 2-norm; of other dtypes:
_CLOSE_OF_HALF = 0.1
_CHANGED = "fusedvit: hidden_states of {} cannot be computed any more: {} since the call that asked for them ({})"
_ADVICE = "read them before that, or ask for them in a call of their own"


@dataclass(frozen=True)
class TensorState:
    """A tensor as it is at one moment.

    Attributes:
        tensor: itself.
        layout: its address, shape, strides and dtype.
        version: of its content; None for an inference tensor, which has none.
        checksums: of the bits of its rows and of its columns, on its device, or a copy of few integers: they find
            writes past the version. Nothing waits for them until they are compared.
    """

    tensor: torch.Tensor
    layout: tuple[Any, ...]
    version: int | None
    checksums: tuple[torch.Tensor, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> "TensorState":
        return TensorState(tensor, _layout(tensor), version_of(tensor), _checksums(tensor))

    def unchanged(self) -> bool:
        """Whether the tensor is still as it was; waits for its device."""
        t = self.tensor
        if _layout(t) != self.layout or version_of(t) != self.version:
            return False
        return all(map(torch.equal, _checksums(t), self.checksums))


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def _checksums(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        if not t.is_floating_point():
            return (t.detach().clone(),)
        bits = t.detach().resolve_neg().view(_INTEGERS[t.element_size()])
        columns = tuple(range(bits.ndim - 1))  # a row's sum is the same in any order
        return (bits.sum(-1), bits.sum(columns)) if columns else (bits.clone(),)


@dataclass(frozen=True)
class Ambient:
    """What a thread or the process has set beside the arguments of a call, and its answer hangs on.

    Attributes:
        inference: inference mode, whose tensors autograd does not take.
        dtype: the default one.
        device: of `with torch.device(…)` or `torch.set_default_device`; None for neither.
        autocast: the device type, and the dtype that it casts to; None where nothing autocasts.
    """

    inference: bool
    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[str, torch.dtype | None]

    @staticmethod
    def now(device_type: str) -> "Ambient":
        """That of the caller, for computing on devices of this type."""
        modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
        device = next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
        cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        return Ambient(torch.is_inference_mode_enabled(), torch.get_default_dtype(), device, (device_type, cast))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, it is as it was, and no mode sees what is done: none did when it was taken."""
        device_type, cast = self.autocast
        dtype = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            for _ in range(torch._C._len_torch_function_stack()):
                stack.enter_context(_pop_mode_temporarily())
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(device_type, cast, enabled=cast is not None))
            if self.device is not None:
                stack.enter_context(self.device)
            if dtype != self.dtype:  # the process's: other threads see it
                torch.set_default_dtype(self.dtype)
                stack.callback(torch.set_default_dtype, dtype)
            yield


@dataclass(frozen=True)
class HiddenStates:
    """How to compute the hidden states of one call.

    Attributes:
        tower: name of the tower's class, for messages.
        run: the original code on the call's input: gives Hugging Face's record.
        inputs: pixels and grid as they were.
        ambient: what the call ran in.
        changed: what of the tower has changed since the call, for messages; "" for nothing.
        last: the call's last hidden state and its version: what `run` must give again.
        lock: two readers compute them once.
    """

    tower: str
    run: Callable[[], Any]
    inputs: tuple[TensorState, ...]
    ambient: Ambient
    changed: Callable[[], str]
    last: tuple[torch.Tensor, int | None]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def compute(self) -> tuple[torch.Tensor | None, ...]:
        """The hidden states.

        Raises:
            RuntimeError: the input or the tower has changed since the call.
        """
        with self.ambient.restored():
            return self._compute()

    def _compute(self) -> tuple[torch.Tensor | None, ...]:
        if not all(state.unchanged() for state in self.inputs):
            raise self._changed("pixel_values or grid_thw have changed")
        what = self.changed()
        if what:
            raise self._changed(what)
        found = self.run()
        last, version = self.last
        hidden: tuple[torch.Tensor | None, ...] = found.hidden_states
        if version is None or version_of(last) != version:  # written to by the caller, or no telling
            return hidden
        if not _close(last, found.last_hidden_state):
            raise self._changed("its input or the tower have changed")
        if hidden and hidden[-1] is found.last_hidden_state:
            hidden = (*hidden[:-1], last)  # one tensor, as in Hugging Face's record
        return hidden

    def _changed(self, what: str) -> RuntimeError:
        return RuntimeError(_CHANGED.format(self.tower, what, _ADVICE))


def _close(ours: torch.Tensor, ref: torch.Tensor) -> bool:
    if ours.shape != ref.shape:
        return False
    limit = _CLOSE.get(ours.dtype, _CLOSE_OF_HALF)
    error, norm = (ours.float() - ref.float()).norm(), ref.float().norm()
    return not bool(error > limit * norm)  # NaN is no difference


def with_lazy_hidden_states(record: Any, hidden: HiddenStates) -> Any:
    """`record`, a fresh output record of Hugging Face's, with hidden states that are yet to be computed."""
    record.__dict__.pop(HIDDEN_STATES, None)
    OrderedDict.__setitem__(record, HIDDEN_STATES, None)  # its position among the keys
    record.__dict__[_PENDING] = hidden
    plain: Any = type(record)
    object.__setattr__(record, "__class__", _lazy_class(plain))
    return record


class _Incomplete:
    """What a record does until its hidden states are there; it comes before Hugging Face's class among the bases.

    Reading, replacing or copying them makes the record a plain one; anything else leaves them uncomputed.
    """

    __slots__ = ()
    _fusedvit_plain: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Of a record built anew from its class, as `torch.utils._pytree` does: it is complete."""
        _become_plain(self).__init__(*args, **kwargs)

    @property
    def hidden_states(self) -> Any:
        return _complete(self).hidden_states

    def __getitem__(self, key: Any) -> Any:
        names = list(self.keys())  # type: ignore[attr-defined]
        wanted = [key] if isinstance(key, str) else names[key] if isinstance(key, slice) else [names[key]]
        if HIDDEN_STATES in wanted:
            return _complete(self)[key]
        record: Any = self
        values = tuple(dict.__getitem__(record, name) for name in wanted)
        return values if isinstance(key, slice) else values[0]

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == HIDDEN_STATES:
            _become_plain(self)[key] = value
        else:
            super().__setitem__(key, value)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == HIDDEN_STATES:
            setattr(_become_plain(self), name, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        known = [f.name for f in fields(self) if f.name != HIDDEN_STATES]  # type: ignore[arg-type]
        shown = [f"{name}={getattr(self, name)!r}" for name in known]
        return f"{type(self).__qualname__}({', '.join(shown)}, {HIDDEN_STATES}=<computed when first read>)"

    __hash__ = None  # type: ignore[assignment]  # as any dictionary


def _completing(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_complete(self), name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in ("items", "values", "to_tuple", "copy", "popitem", "__reduce__", "__reduce_ex__", "__eq__", "__ne__"):
    setattr(_Incomplete, _name, _completing(_name))
for _name in ("__or__", "__ror__"):
    setattr(_Incomplete, _name, _completing(_name))


def _complete(record: Any) -> Any:
    """`record` with its hidden states, a plain one from now on."""
    pending: HiddenStates | None = record.__dict__.get(_PENDING)
    if pending is not None:
        with pending.lock:
            if _PENDING in record.__dict__:
                record[HIDDEN_STATES] = pending.compute()
    return record


def _become_plain(record: Any) -> Any:
    object.__setattr__(record, "__class__", record._fusedvit_plain)
    record.__dict__.pop(_PENDING, None)
    return record


@functools.cache
def _lazy_class(plain: Any) -> Any:
    """The subclass of an output class `plain` that its incomplete records have, under the same name."""
    body = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (_Incomplete, plain), body | {"_fusedvit_plain": plain})
