"""Output records whose hidden states are computed when they are first read.

Embedding models ask every tower for `output_hidden_states`, but read only those of the language model. The fused
encoder keeps no hidden states, so reading them from its record runs the tower's original code. The record's class is a
subclass of Hugging Face's, and becomes Hugging Face's own when hidden states are read or replaced.
"""

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from fusedvit.checks.recorded import version_of
from fusedvit.outputs.gradients import with_gradients
from fusedvit.outputs.unread import CannotRead, DeferredStates, Hidden, UnreadStates

HIDDEN_STATES = "hidden_states"
# Packages that read every field of a record to search or copy it: they get hidden states that are still unread.
_WALKING = ("torch.distributed", "torch.nn.parallel", "dataclasses", "accelerate", "deepspeed")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CLOSE = {torch.float64: 1e-3, torch.float32: 1e-3}  # limit of the relative error in the 2-norm; for other dtypes:
_CLOSE_OF_HALF = 0.1
_CHANGED = "fusedvit: hidden_states of {} cannot be computed any more: {} since the call that asked for them ({})"
_BREAKS = "fusedvit computes hidden states when they are first read, between graphs: read them before fullgraph=True"
_TRACED = "fusedvit: hidden_states of {} cannot be computed while {} traces: read them before that"
_ADVICE = "read them before that, or ask for them in a call of their own"


@dataclass(frozen=True)
class TensorState:
    """The state of a tensor at one moment.

    Attributes:
        tensor: the tensor.
        layout: its address, shape, strides and dtype.
        version: the version of its content; None for an inference tensor, which has no version.
        checksums: sums of its bits by row and by column, on its device; for integers, a copy. They reveal writes that
            bypass the version. Nothing waits for them until they are compared.
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
        columns = tuple(range(bits.ndim - 1))  # sums of rows alone would not notice values swapped within a row
        return (bits.sum(-1), bits.sum(columns)) if columns else (bits.clone(),)


@dataclass(frozen=True)
class Ambient:
    """PyTorch's ambient state that the result of a call depends on.

    Attributes:
        inference: whether inference mode is on; autograd does not accept its tensors.
        dtype: the default dtype.
        device: the device set by `with torch.device(…)` or `torch.set_default_device`; None for neither.
        autocast: the device type, and the dtype that autocast uses on it, None if autocast is off.
    """

    inference: bool
    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[str, torch.dtype | None]

    @staticmethod
    def now(device_type: str) -> "Ambient":
        """The caller's state, for computing on devices of type `device_type`."""
        modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
        device = next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
        cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        return Ambient(torch.is_inference_mode_enabled(), torch.get_default_dtype(), device, (device_type, cast))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which this state is set and no function or dispatch mode is active, as in the original call."""
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
            if dtype != self.dtype:  # set only if needed, as the default dtype is shared with other threads
                torch.set_default_dtype(self.dtype)
                stack.callback(torch.set_default_dtype, dtype)
            yield


@dataclass(frozen=True)
class HiddenStates:
    """How to compute the hidden states of one call.

    Attributes:
        tower: name of the tower's class, for messages.
        run: runs the tower's original code on the call's input and returns Hugging Face's record.
        inputs: the state of pixels and grid at the call.
        ambient: PyTorch's ambient state at the call.
        changed: returns what about the tower has changed since the call, for messages; "" for nothing.
        last: the call's last hidden state, which `run` must reproduce, and its version.
        count: how many hidden states there are; None if the call selects some.
        marked: whether they require gradients; see `outputs.gradients`.
    """

    tower: str
    run: Callable[[], Any]
    inputs: tuple[TensorState, ...]
    ambient: Ambient
    changed: Callable[[], str]
    last: tuple[torch.Tensor, int | None]
    count: int | None
    marked: bool

    def compute(self) -> Hidden:
        """The hidden states.

        Raises:
            CannotRead: the input or the tower has changed since the call, or a tracer would record the computation.
        """
        tracer = _tracing()
        if tracer:
            raise CannotRead(_TRACED.format(self.tower, tracer))
        with self.ambient.restored():
            found = self._compute()
            return self._with_gradients(found) if self.marked else found

    def _with_gradients(self, hidden: Hidden) -> Hidden:
        new = [t for t in hidden if t is not None and t is not self.last[0]]
        marked = dict(zip(map(id, new), with_gradients(new) if new else (), strict=True))
        return tuple(marked.get(id(t), t) for t in hidden)

    def _compute(self) -> Hidden:
        if not all(state.unchanged() for state in self.inputs):
            raise _cannot_read(self.tower, "pixel_values or grid_thw have changed")
        what = self.changed()
        if what:
            raise _cannot_read(self.tower, what)
        found = self.run()
        last, version = self.last
        hidden: Hidden = found.hidden_states
        if version is None or version_of(last) != version:  # `last` was written to, or has no version to tell
            return hidden
        if not _close(last, found.last_hidden_state):
            raise _cannot_read(self.tower, "its input or the tower have changed")
        if hidden and hidden[-1] is found.last_hidden_state:
            hidden = (*hidden[:-1], last)  # the same tensor object, as in Hugging Face's record
        return hidden


def _tracing() -> str:
    """The tracer that records operations now and cannot be suspended; "" if there is none."""
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    if torch.compiler.is_compiling():
        return "torch.export"
    if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
        return "torch.fx or make_fx"
    functorch: Any = torch._C._functorch
    transforms = functorch.get_interpreter_stack() or ()
    functionalizes = any(t.key() == functorch.TransformType.Functionalize for t in transforms)
    return "torch.func.functionalize" if functionalizes else ""


def _cannot_read(tower: str, what: str) -> CannotRead:
    return CannotRead(_CHANGED.format(tower, what, _ADVICE))


def _close(ours: torch.Tensor, ref: torch.Tensor) -> bool:
    if ours.shape != ref.shape:
        return False
    limit = _CLOSE.get(ours.dtype, _CLOSE_OF_HALF)
    error, norm = (ours.float() - ref.float()).norm(), ref.float().norm()
    return not bool(error > limit * norm)  # NaN is no difference


def with_lazy_hidden_states(record: Any, hidden: HiddenStates) -> Any:
    """`record`, a new output record of Hugging Face's, with hidden states that are computed when first read."""
    like = hidden.last[0].detach().new_empty(0)
    like = with_gradients([like])[0] if hidden.marked else like
    uniform = hidden.ambient.autocast[1] is None
    return _become_lazy(record, UnreadStates.of(DeferredStates(hidden.compute, hidden.count, like, uniform)))


def _become_lazy(record: Any, unread: UnreadStates) -> Any:
    OrderedDict.__setitem__(record, HIDDEN_STATES, None)  # its position among the keys
    record.__dict__[HIDDEN_STATES] = unread
    plain: Any = type(record)
    object.__setattr__(record, "__class__", _lazy_class(plain))
    return record


class _Incomplete:
    """The behaviour of a record without computed hidden states; it precedes Hugging Face's class among the bases.

    Reading, replacing or copying hidden states makes the record a plain one. Anything else leaves them uncomputed, and
    so does code of `_WALKING` that reads every field: it must not fail if they cannot be computed any more. For code
    that `torch.compile` compiles, they are computed between two graphs: Dynamo guards on values, and must not see
    unread ones.
    """

    __slots__ = ()
    _fusedvit_plain: Any
    _fusedvit_uncompiled: Callable[..., Any]  # calls a function outside compiled code

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Initialises a record that is rebuilt from its class, as `torch.utils._pytree` does, with hidden states that
        may still be unread."""
        if torch.compiler.is_dynamo_compiling():
            self._fusedvit_uncompiled(_Incomplete.__init__, self, *args, **kwargs)
            return
        record = _become_plain(self)
        record.__init__(*args, **kwargs)
        found = record.__dict__.get(HIDDEN_STATES)
        if isinstance(found, UnreadStates):
            _become_lazy(record, found)

    @property
    def hidden_states(self) -> Any:
        return _read(self)

    def __getitem__(self, key: Any) -> Any:
        names = list(self.keys())  # type: ignore[attr-defined]
        if isinstance(key, slice):
            return self.to_tuple()[key]
        name = key if isinstance(key, str) else names[key]
        record: Any = self
        return _read(record) if name == HIDDEN_STATES else dict.__getitem__(record, name)

    def _unread(self) -> dict[str, Any]:
        record: Any = self
        if torch.compiler.is_dynamo_compiling():
            return self._fusedvit_uncompiled(_completed, record)
        pending = _pending(record)
        known = {name: dict.__getitem__(record, name) for name in OrderedDict.keys(record)}
        if pending is not None:
            known[HIDDEN_STATES] = pending if pending.unread() else _complete(record).hidden_states
        return known

    def items(self) -> Any:
        return self._unread().items()

    def values(self) -> Any:
        return self._unread().values()

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self._unread().values())

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == HIDDEN_STATES:
            _replaced(self, value)
        else:
            super().__setitem__(key, value)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == HIDDEN_STATES:
            _replaced(self, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        known = [f.name for f in fields(self) if f.name != HIDDEN_STATES]  # type: ignore[arg-type]
        shown = [f"{name}={getattr(self, name)!r}" for name in known]
        return f"{type(self).__qualname__}({', '.join(shown)}, {HIDDEN_STATES}=<computed when first read>)"

    __hash__ = None  # type: ignore[assignment]  # as any dictionary


def _completing(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._fusedvit_uncompiled(method, self, *args, **kwargs)
        return getattr(_complete(self), name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in ("copy", "popitem", "__reduce__", "__reduce_ex__", "__eq__", "__ne__", "__or__", "__ror__"):
    setattr(_Incomplete, _name, _completing(_name))


def _pending(record: Any) -> UnreadStates | None:
    """What stands in the `__dict__` of an incomplete record for its hidden states; None once it is complete."""
    found = record.__dict__.get(HIDDEN_STATES)
    return found if isinstance(found, UnreadStates) else None


def _complete(record: Any) -> Any:
    """Computes the hidden states of `record`, which becomes a plain record, and returns it.

    Raises:
        CannotRead: the hidden states cannot be computed any more.
    """
    pending = _pending(record)
    if pending is not None:
        hidden = pending.read()
        if _pending(record) is not None:  # otherwise another thread has replaced them meanwhile
            record[HIDDEN_STATES] = hidden
    return record


def _completed(record: Any) -> dict[str, Any]:
    """All fields of `record` by name, with computed hidden states. Raises CannotRead, as `_complete`."""
    complete = _complete(record)
    return {name: dict.__getitem__(complete, name) for name in OrderedDict.keys(complete)}


def _read(record: Any) -> Any:
    """The hidden states of `record`; left unread if the reader is one of `_WALKING`."""
    if torch.compiler.is_dynamo_compiling():
        return record._fusedvit_uncompiled(_completed, record)[HIDDEN_STATES]
    pending = _pending(record)
    if pending is not None and pending.unread() and _reader().startswith(_WALKING):
        return pending
    return dict.__getitem__(_complete(record), HIDDEN_STATES)


def _reader() -> str:
    """The name of the module that reads a record: the first caller outside this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _replaced(record: Any, value: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        record._fusedvit_uncompiled(_replace, record, value)
    else:
        _replace(record, value)


def _replace(record: Any, value: Any) -> None:
    """Sets the hidden states to `value`. If `value` is unread, perhaps converted, the record stays incomplete."""
    if isinstance(value, UnreadStates) and value.unread():
        record.__dict__[HIDDEN_STATES] = value
    else:  # the class before the attribute, as an interrupt may arrive in between
        OrderedDict.__setitem__(record, HIDDEN_STATES, value)
        _become_plain(record).__dict__[HIDDEN_STATES] = value


def _become_plain(record: Any) -> Any:
    """Gives a record Hugging Face's own class."""
    object.__setattr__(record, "__class__", record._fusedvit_plain)
    return record


@functools.cache
def _lazy_class(plain: Any) -> Any:
    """The subclass of the output class `plain` for incomplete records, under the same name."""
    body = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    outside = staticmethod(torch.compiler.disable(_call, reason=_BREAKS))  # not at import, which it would slow down
    return type(
        plain.__name__, (_Incomplete, plain), body | {"_fusedvit_plain": plain, "_fusedvit_uncompiled": outside}
    )


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
