"""`fuse` and `unfuse` on Hugging Face models, and `fuse_tower` for the towers that serving engines build.

A tower stays the same module with the same parameters and names. Only its `__class__` changes, to a subclass of the
original class under the same name, whose `forward` runs fused or falls back to the original code.
"""

import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from fusedvit.calls.original_inputs import for_original
from fusedvit.checks import fallback
from fusedvit.checks.accelerate_hooks import OLD, is_of_class
from fusedvit.checks.as_built import Built
from fusedvit.checks.change_detection import HANDLE
from fusedvit.checks.find_tower import derived, find_tower, nothing_in, towers_in
from fusedvit.checks.own_forward import bypass
from fusedvit.checks.ownership import FUSED, ORIGINAL, fused_class, name_of, own_class
from fusedvit.config import FuseConfig, check_config, takes_config
from fusedvit.errors import OF_ODD_OBJECTS, Reason, UnsupportedModel, unnamed
from fusedvit.families.base import Family
from fusedvit.families.registry import family_of
from fusedvit.forks import is_held, renew_in_children
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.model.spec import VisionSpec
from fusedvit.outputs.hugging_face import to_hugging_face
from fusedvit.pixels.processors import (
    as_before_on_error,
    check_processor,
    normalizations_of,
    restore,
    swap,
    swapped_in,
)
from fusedvit.runtime.compiled_kernels import enter_kernels

Given = ParamSpec("Given")
Result = TypeVar("Result")
EngineCall = Callable[..., Any]  # (handle, tower, *args, **kwargs) -> the engine's output, or None to fall back


class _Turn:
    """Lets one thread at a time fuse or unfuse towers: two threads would each give a tower a handle of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        renew_in_children(self)

    def _renew_locks(self) -> None:
        """See `forks`. If a thread of the parent was in `fuse`, the child's copy of that tower is half fused; the next
        `fuse` or `unfuse` repairs it."""
        if is_held(self.lock):
            self.lock = threading.RLock()


_turn = _Turn()


def _in_turn(function: Callable[Given, Result]) -> Callable[Given, Result]:
    @functools.wraps(function)
    def in_turn(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with _turn.lock:
            return function(*args, **kwargs)

    return in_turn


@takes_config
def fuse(model: nn.Module, config: FuseConfig | None = None, *, processor: Any = None) -> FusedEncoder:
    """Fuses the vision tower of `model`, in place.

    Args:
        model: a Hugging Face model that contains one supported tower, at any depth, or the tower itself.
        config: options. On a tower that is already fused, a config replaces its options and None keeps them.
        processor: the model's processor. Its image and video processors return bytes from now on (docs/pixels.md);
            `unfuse` restores them.

    Returns:
        The tower's handle.

    Raises:
        UnsupportedModel: `model` contains no supported tower (the message names all that are) or several (it names
            them). Or `processor` cannot return bytes.
        TypeError: `model` is not a module, `config` not a `FuseConfig`, or `processor` not a processor; or an option
            was given here and not in a `FuseConfig`.
        ValueError: this tower cannot meet an option, which the message names. Or `processor` cuts other patches.
        RuntimeError: with `strict=True`, an attribute `forward` of the tower calls the original code.

    If `fuse` raises, the tower, its options and the processor are as they were before.
    """
    if config is not None:
        check_config(config)
    if processor is not None:
        check_processor(processor)
    tower = find_tower(model)
    known = tower.__dict__.get(HANDLE)
    if config is None and processor is None and known is not None and _is_reached(known, tower):
        return known  # in nobody's turn: whoever has it may wait for a lock that this thread holds
    return _fuse_in_turn(tower, config, processor)


def _is_reached(known: FusedEncoder, tower: nn.Module) -> bool:
    """Whether calls of `tower` reach its handle."""
    there = known.serves(tower) and known.state() == "fused" and fused_class(type(tower)) is not None
    return there and bypass(tower) is None


@_in_turn
def _fuse_in_turn(tower: nn.Module, config: FuseConfig | None, processor: Any) -> FusedEncoder:
    known = tower.__dict__.get(HANDLE)
    with as_before_on_error(processor):
        if known is not None and known.serves(tower):
            if fused_class(type(tower)) is not None and type(known) is FusedEncoder:
                return _fuse_again(known, config, processor)
            unfuse(tower)  # of an interrupted `unfuse`, which no call reaches, or of an earlier import of this package
        return _fuse(tower, config or FuseConfig(), processor)


def _fuse_again(known: FusedEncoder, config: FuseConfig | None, processor: Any) -> FusedEncoder:
    """Gives a fused tower new options and one more processor. If either is refused, neither is applied."""
    options = known.config if config is None else config
    known.prepared.check(options)
    _drop_left_over(known.tower)
    known.check_reached(options.strict)
    if processor is not None:
        _take_bytes(known, processor)
    if options != known.config:
        known.replace_options(options)
    return known


def _take_bytes(handle: FusedEncoder, processor: Any) -> None:
    """Makes the image and video processors in `processor` return bytes, and folds their normalisations into the
    tower's weights."""
    swap(processor)
    found = normalizations_of(processor)
    for normalization in found.values():
        handle.normalizations.check(normalization)
    for still, normalization in found.items():
        handle.normalizations.expect(normalization, still)
    known = set(map(id, handle.processors))
    handle.processors += [part for part in swapped_in(processor) if id(part) not in known]


def _fuse(tower: nn.Module, config: FuseConfig, processor: Any) -> FusedEncoder:
    original, (family, spec) = own_class(type(tower)), family_and_spec(tower)
    handle, fused = FusedEncoder(tower, family, spec, config), _fused_class(original)
    try:
        tower.__dict__[HANDLE] = handle
        _set_class(tower, _with_base(type(tower), original, fused))
        handle.check_reached(config.strict)
        enter_kernels(handle.weights.first_parameter().device)
        handle.check_early()
        if processor is not None:
            _take_bytes(handle, processor)
    except BaseException:
        unfuse(tower)
        raise
    return handle


def family_and_spec(tower: nn.Module) -> tuple[Family, VisionSpec]:
    """The family of Hugging Face's `tower`, and what its config says. Raises UnsupportedModel if it cannot be fused."""
    original = own_class(type(tower))
    family = family_of(original.__name__)
    if family is None:
        raise UnsupportedModel(f"{name_of(original)} cannot be fused: {derived(original)}")
    try:
        return family, family.spec_from_config(tower.config)
    except OF_ODD_OBJECTS as error:
        raise UnsupportedModel(f"{original.__name__} cannot be fused: {unnamed(error)}") from error


@takes_config
@_in_turn
def fuse_tower(
    tower: nn.Module,
    family: Family,
    spec: VisionSpec,
    config: FuseConfig | None = None,
    *,
    built: Built,
    call: EngineCall,
) -> FusedEncoder:
    """Fuses a serving engine's own tower, in place: the entry point for towers that are not Hugging Face's.

    The tower passes the same checks as Hugging Face's: its code must be what the sources of the engine's packages
    define, its parameters must match `spec`, and its modules and numbers must be as built.

    Args:
        tower: any module.
        family: the engine's variant of a family: the family's record with `names` and `engine` replaced.
        spec: what `family` derives from the engine's config.
        config: options.
        built: `Built.of(tower, family.engine)`, taken when the tower's constructor returned.
        call: the tower's new `forward`. `call(handle, tower, *args, **kwargs)` asks
            `handle.answer(tower, pixels, grid, {})` and returns what the engine's `forward` would return. If it returns
            None, the engine's `forward` runs.

    Returns:
        The tower's handle. `fusedvit.unfuse` restores the tower's class.

    Raises:
        TypeError: an argument has the wrong type; the message names the argument, and the tower is unchanged.
        ValueError: this tower cannot meet an option.
    """
    options = FuseConfig() if config is None else config
    check_config(options)
    _check_seam(tower, call, family=(family, Family), spec=(spec, VisionSpec), built=(built, Built))
    original: Any = type(tower)
    handle = tower.__dict__[HANDLE] = FusedEncoder(tower, family, spec, options, built)
    _set_class(tower, _engine_class(original, call))
    return handle


@_in_turn
def fuse_sharded(tower: nn.Module, handle: FusedEncoder, call: EngineCall) -> None:
    """Makes `tower`, which has only shards of its weights, run through the handle of a fused tower with whole weights.

    Args:
        handle: that of the fused tower with whole weights, which stands for `tower`.
        tower, call: as in `fuse_tower`.

    Raises:
        TypeError: as `fuse_tower`.
    """
    _check_seam(tower, call, handle=(handle, FusedEncoder))
    original: Any = type(tower)
    tower.__dict__[HANDLE] = handle
    _set_class(tower, _engine_class(original, call))


def _check_seam(tower: object, call: object, **others: tuple[object, type]) -> None:
    """Raises TypeError if `tower` is not a module, `call` is not callable, or one of `others` has the wrong type."""
    for name, (value, expected) in {"tower": (tower, nn.Module), **others}.items():
        if not isinstance(value, expected):
            raise TypeError(f"fusedvit: {name} must be a {expected.__name__}, got {type(value).__name__}")
    if not callable(call):
        raise TypeError(f"fusedvit: call must be a function, got {type(call).__name__}")


@_in_turn
def unfuse(model: nn.Module, *, processor: Any = None) -> nn.Module:
    """Restores the class of every tower of `model`, frees prepared weights and graphs, and returns `model`.

    Processors that were given to `fuse`, and `processor`, get their classes back too. A call that is running meanwhile
    ends as it began or in the original code.

    Raises:
        UnsupportedModel: `model` contains no supported tower.
        TypeError: `model` is not a module, or `processor` not a processor; the towers are unchanged.
    """
    if processor is not None:
        check_processor(processor)
    towers = towers_in(model)
    if not towers:
        raise UnsupportedModel(nothing_in(model))
    for tower in towers.values():
        handle, original = tower.__dict__.get(HANDLE), own_class(type(tower))
        _set_class(tower, _with_base(type(tower), fused_class(type(tower)) or original, original))
        if handle is not None and handle.serves(tower):
            for given in handle.processors:
                restore(given)
            handle.end()
        tower.__dict__.pop(HANDLE, None)  # last: after an interrupt, the next `fuse` or `unfuse` finds what to end
    if processor is not None:
        restore(processor)
    return model


_rebuilt: weakref.WeakValueDictionary[tuple[weakref.ref[type], ...], type] = weakref.WeakValueDictionary()


def _with_base(cls: Any, old: type, new: type) -> Any:
    """`cls` with `new` in place of `old`, which is `cls` itself or one of its bases.

    While the class built for these arguments is in use, it is returned again.
    """
    if cls is old:
        return new
    if old not in cls.__mro__ or new in cls.__mro__[: cls.__mro__.index(old)]:
        return cls
    key = tuple(map(weakref.ref, (cls, old, new)))
    known = _rebuilt.get(key)
    if known is None:
        body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        known = type(cls)(cls.__name__, tuple(_with_base(base, old, new) for base in cls.__bases__), body)
        known = _rebuilt.setdefault(key, known)
    return known


def _drop_left_over(tower: nn.Module) -> None:
    """Removes an attribute `forward` that is the class's own method, or the original one. Libraries that wrap `forward`
    leave the method that they found: accelerate's hooks, offloading by compressed-tensors (LLM Compressor)."""
    own, original = tower.__dict__.get("forward"), own_class(type(tower))
    if is_of_class(own, tower) or is_of_class(own, tower, original):
        del tower.__dict__["forward"]


def _set_class(tower: nn.Module, cls: type) -> None:
    _drop_left_over(tower)
    hooked = is_of_class(tower.__dict__.get(OLD), tower)
    tower.__class__ = cls
    if hooked:  # accelerate's wrapper calls the method that it found when it was installed
        tower.__dict__[OLD] = types.MethodType(cls.forward, tower)  # type: ignore[attr-defined]


@functools.cache
def _fused_class(original: Any) -> Any:
    """The fused subclass of a tower class. It has its parent's names, which accelerate and transformers read."""

    def forward(self: nn.Module, hidden_states: Any, grid_thw: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            chosen = uncompiled if may_break(original.__name__, _is_strict(self)) else in_original
            return chosen(self, hidden_states, grid_thw, **kwargs)
        # Without a handle the tower was created by this class's `from_pretrained`, or unfused since the call began.
        handle: FusedEncoder | None = self.__dict__.get(HANDLE)
        found = None if handle is None else handle.answer(self, hidden_states, grid_thw, kwargs)
        if handle is None or found is None:
            return in_original(self, hidden_states, grid_thw, **kwargs)
        return to_hugging_face(original, self, handle, found.outputs, (hidden_states, grid_thw, kwargs))

    call = getattr(family_of(original.__name__), "call", None)  # families that have one take positions, not a grid
    in_original = functools.partial(_call_original, original, call is not None)
    uncompiled = torch.compiler.disable(_of_own_code(forward))  # runs at a graph break, between two graphs
    may_break = torch.compiler.assume_constant_result(_graph_may_break)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        if type(self) is not fused:  # a user's subclass
            return original.__reduce_ex__(self, protocol)
        return _rebuild, (original,), self.__dict__.copy()

    def set_state(self: nn.Module, state: Any) -> None:
        original.__setstate__(self, state)
        handle = self.__dict__.get(HANDLE)
        if handle is not None and not handle.serves(self):  # a shallow copy
            self.__dict__[HANDLE] = handle.of_copy(self)

    # By position alone: a keyword of a parent may be called `grid_thw`, which such a tower's code does not read.
    taking = forward if call is None else call(_of_own_code(forward, co_posonlyargcount=3))
    fused = _subclass(original, taking, __reduce_ex__=reduce, __setstate__=set_state)
    return fused


def _subclass(original: Any, forward: Any, **methods: Any) -> Any:
    """A subclass of a tower's class that has its names, another `forward`, and `methods`."""
    body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    fused = _in_place_of(original.forward, forward)
    body |= {"forward": fused, FUSED: fused, ORIGINAL: original, **methods}
    return type(original)(original.__name__, (original,), body)


def _in_place_of(original: Any, forward: Any) -> Any:
    """Gives `forward` the names, the documentation and the signature of `original`, which it replaces.

    It gets no `__wrapped__`: accelerate's `unwrap_model` installs the last function that this attribute leads to, so
    that calls would go past the fused encoder.
    """
    functools.update_wrapper(forward, original)
    forward.__signature__ = inspect.signature(original)
    del forward.__wrapped__
    return forward


def call_original(tower: nn.Module, pixels: Any, grid: Any, /, **kwargs: Any) -> Any:
    """Runs the original `forward` of a fused tower that takes a grid, past the handle's counters."""
    return _call_original(own_class(type(tower)), False, tower, pixels, grid, **kwargs)


def _call_original(original: Any, padded: bool, tower: nn.Module, pixels: Any, grid: Any, /, **kwargs: Any) -> Any:
    return original.forward(tower, *for_original(tower, pixels, grid, padded), **kwargs)


def _of_own_code(function: Any, **changes: int) -> Any:
    """A copy of `function` with its own code object, which differs by `changes`. Under some stances of `torch.compile`,
    such as `eager_on_recompile`, a disabled function runs what was compiled from its code object; that compiled code
    would call the disabled function again."""
    code = function.__code__.replace(**changes)
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def _rebuild(original: Any) -> nn.Module:
    """An empty fused tower, for copy and pickle to fill."""
    return nn.Module.__new__(_fused_class(original))


@functools.cache
def _engine_class(original: Any, call: EngineCall) -> Any:
    """The fused subclass of an engine's tower class, under the same names."""

    refuse = torch.compiler.assume_constant_result(_refuse_compiled)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle: FusedEncoder | None = self.__dict__.get(HANDLE)
        if torch.compiler.is_dynamo_compiling() and _is_strict(self):
            refuse(original.__name__)
        if handle is None or torch.compiler.is_dynamo_compiling():
            return original.forward(self, *args, **kwargs)
        found = call(handle, self, *args, **kwargs)
        return original.forward(self, *args, **kwargs) if found is None else found

    return _subclass(original, forward)


def _graph_may_break(name: str, strict: bool) -> bool:
    """Whether the code being compiled may have graph breaks: not with `fullgraph=True`, and not in an export.

    Runs while `torch.compile` traces; the result is a constant in the compiled code. Raises as `_refuse_compiled` where
    a call of a `strict` tower of the class `name` could not run fused.
    """
    translator = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator
    tracing = translator.current_tx()
    whole = tracing.one_graph or getattr(tracing, "error_on_graph_break", False)
    if whole and strict:
        _refuse_compiled(name)
    return not whole


def _is_strict(tower: nn.Module) -> bool:
    """Whether a call that would run the original code must raise. `torch.compile` traces this: a tower that becomes
    strict is compiled again."""
    handle: FusedEncoder | None = tower.__dict__.get(HANDLE)
    return handle is not None and handle.prepared.config.strict


def _refuse_compiled(name: str) -> None:
    """Raises RuntimeError while `torch.compile` traces a call into the original code of the tower class `name`."""
    state = "cannot run fused inside torch.compile(fullgraph=True) or an export"
    raise RuntimeError(fallback.message(name, Reason(fallback.COMPILING), state))
