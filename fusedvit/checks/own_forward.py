"""Checks a `forward` in the tower's own `__dict__`: whether calls still reach the fused `forward` through it.

`Accelerator.prepare` under mixed precision, `tower.forward = torch.compile(tower.forward)` and other wrappers keep the
method that the tower had when they were installed. Installed after `fuse`, they call the fused method. Installed
before, they call the original code, whatever the tower's class is.
"""

import gc
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from fusedvit.checks import accelerate_hooks, fallback
from fusedvit.checks.change_detection import HANDLE
from fusedvit.checks.ownership import FUSED, described_call, foreign_class, fused_class
from fusedvit.checks.source_code import UnreadSource
from fusedvit.errors import Reason

_MOST = 5000  # objects that are searched: more than any wrapper holds


def bypass(tower: nn.Module) -> Reason | None:
    """Why calls of a fused tower do not reach the fused `forward`, or None: judged by what its attribute `forward`
    holds, or else that of the class that `fuse` gave it, which is where `type(tower).forward = …` puts it."""
    own, fused = vars(tower).get("forward"), fused_class(type(tower))
    if fused is None:
        if HANDLE not in vars(tower) or foreign_class(tower):  # it is unfused, or its class is told of as foreign code
            return None
        return Reason(fallback.BYPASSED, "somebody set its `__class__` to the original one")
    called = fused.forward if own is None else own  # type: ignore[attr-defined]
    try:
        if _leads_to(vars(fused)[FUSED], called, tower):
            return None
    except UnreadSource as why:
        return Reason(fallback.UNREAD, str(why))
    where = "its class's" if own is None else "its attribute"
    return Reason(fallback.BYPASSED, f"{where} `forward` is {described_call(called)}")


def _leads_to(fused: object, own: object, tower: nn.Module) -> bool:
    """Whether `own` is `fused`, or holds it directly or indirectly."""
    seen, rest = {id(tower)}, [own]
    while rest and len(seen) < _MOST:
        held = rest.pop()
        if held is fused:
            return True
        if id(held) not in seen:
            seen.add(id(held))
            rest += _held_by(held, tower)
    return False


def _held_by(value: Any, tower: nn.Module) -> Iterator[Any]:
    """Objects that `value` may call: what it is bound to, wraps or closes over, its arguments and its attributes."""
    if type(value) is FunctionType:
        yield from (value.__closure__ or (), value.__defaults__, value.__kwdefaults__, vars(value))
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (v for v in named if isinstance(v, FunctionType | MethodType | partial))
    elif not isinstance(value, type | ModuleType | nn.Module):
        yield from (*gc.get_referents(value), getattr(value, "__wrapped__", None))  # also what slots and cells hold
        if isinstance(value, partial) and accelerate_hooks.wraps(value, tower):  # it looks its target up at each call
            yield vars(tower).get(accelerate_hooks.OLD)
