"""`fuse` and `unfuse` on Hugging Face models: the one place of the core that knows their classes.

A tower keeps its module, parameters and names; only its `__class__` becomes a subclass of its own class, under the
same name, whose `forward` runs fused or falls back to the original.
"""

import functools
import operator
import sys
import types
from typing import Any

from torch import nn

from fusedvit.config import FuseConfig
from fusedvit.errors import UnsupportedModel
from fusedvit.families.registry import FAMILIES, family_of
from fusedvit.families.unsupported import UNSUPPORTED
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.model.encoder import EncoderOutputs

_HANDLE = "_fusedvit"  # in a fused tower's __dict__
_ORIGINAL = "_fusedvit_original"  # on its class


def fuse(model: nn.Module, config: FuseConfig | None = None) -> FusedEncoder:
    """Fuses the vision tower of `model`, in place.

    Args:
        model: a Hugging Face model that holds one supported tower, wherever it hangs, or the tower itself.
        config: options; fusing a fused tower again replaces them if given.

    Returns:
        The tower's handle.

    Raises:
        UnsupportedModel: no supported tower, or several; the message names what is supported.
    """
    tower = find_tower(model)
    handle = tower.__dict__.get(_HANDLE)
    if handle is not None:
        if config is not None and config != handle.config:
            handle.reconfigure(config)
        return handle
    family = family_of(type(tower).__name__)
    assert family is not None, "find_tower returns towers of known families"
    try:
        spec = family.spec_from_config(tower.config)
    except ValueError as error:
        raise UnsupportedModel(f"{type(tower).__name__} cannot be fused: {error}") from error
    handle = FusedEncoder(tower, family, spec, config or FuseConfig())
    tower.__dict__[_HANDLE] = handle
    original: Any = type(tower)
    _set_class(tower, _fused_class(original))
    return handle


def unfuse(model: nn.Module) -> nn.Module:
    """Gives the tower of `model` its own class back and frees what was prepared; returns `model`.

    Raises:
        UnsupportedModel: no supported tower, or several.
    """
    tower = find_tower(model)
    if _HANDLE in tower.__dict__:
        tower.__dict__.pop(_HANDLE).release()
        _set_class(tower, getattr(type(tower), _ORIGINAL))
    return model


def find_tower(model: nn.Module) -> nn.Module:
    """The one supported tower in `model`.

    Raises:
        UnsupportedModel: none, or several; the message names what is supported.
    """
    found = {id(m): (name, m) for name, m in model.named_modules() if family_of(type(m).__name__) is not None}
    if len(found) == 1:
        return next(iter(found.values()))[1]
    if not found:
        raise UnsupportedModel(_nothing_in(model))
    names = ", ".join(repr(name) for name, _ in found.values())
    raise UnsupportedModel(f"{type(model).__name__} holds {len(found)} vision towers ({names}): fuse each by itself")


def _nothing_in(model: nn.Module) -> str:
    """Why nothing in `model` can be fused, and what could."""
    known = "; ".join(f"{family.name} ({', '.join(family.class_names)})" for family in FAMILIES)
    held = dict.fromkeys(name for name in (type(m).__name__ for m in model.modules()) if name in UNSUPPORTED)
    why = "".join(f" {name} is not: {UNSUPPORTED[name]}." for name in held)
    return f"{type(model).__name__} holds no supported vision tower.{why} Supported: {known}"


def _set_class(tower: nn.Module, cls: type) -> None:
    left = tower.__dict__.get("forward")  # accelerate's remove_hook_from_module leaves a bound method
    if isinstance(left, types.MethodType) and left.__self__ is tower and left.__func__ is type(tower).forward:
        del tower.__dict__["forward"]
    tower.__class__ = cls
    if "_old_forward" in tower.__dict__:  # accelerate's wrapper calls what it found when it was put on
        tower.__dict__["_old_forward"] = types.MethodType(cls.forward, tower)  # type: ignore[attr-defined]


@functools.cache
def _fused_class(original: Any) -> Any:
    """The fused subclass of a tower class. It bears its parent's names: accelerate and transformers go by them."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, hidden_states: Any, grid_thw: Any = None, **kwargs: Any) -> Any:
        handle: FusedEncoder = self.__dict__[_HANDLE]
        found = handle(hidden_states, grid_thw, kwargs)
        if found is None:
            return original.forward(self, hidden_states, grid_thw, **kwargs)
        outputs = _to_hugging_face(original, handle, found)
        wants_dict = kwargs.get("return_dict", getattr(self.config, "return_dict", True))
        return outputs.to_tuple() if wants_dict is False else outputs

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (original,), self.__dict__.copy()

    body = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        _ORIGINAL: original,
    }
    return type(original.__name__, (original,), body)


def _rebuild(original: Any) -> nn.Module:
    """An empty fused tower, for copy and pickle to fill."""
    cls = _fused_class(original)
    return cls.__new__(cls)


def _to_hugging_face(original: type, handle: FusedEncoder, outputs: EncoderOutputs) -> Any:
    """The output record that the tower's own forward returns, from its own module."""
    record = getattr(sys.modules[original.__module__], handle.family.output_class)
    last = outputs.last_hidden_state(handle.spec)
    fields: dict[str, Any] = {"last_hidden_state": last}
    if handle.spec.merged_outputs:
        fields["pooler_output"] = outputs.pooled
    if handle.family.has_deepstack:
        pairs = sorted(zip(handle.spec.deepstack, outputs.deepstack, strict=True), key=operator.itemgetter(0))
        fields["deepstack_features"] = [features for _, features in pairs]  # Hugging Face lists them by block
    return record(**fields)
