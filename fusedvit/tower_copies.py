"""Fused copies of a tower on other devices, which follow its changes."""

import contextlib
import copy
from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedvit.api import call_original, fuse
from fusedvit.checks.change_detection import HANDLE
from fusedvit.checks.ownership import own_class
from fusedvit.checks.recorded import REGISTRIES, content_of
from fusedvit.errors import Reason
from fusedvit.fused_encoder import Answer, FusedEncoder, rows_of_record
from fusedvit.model.items import Item
from fusedvit.outputs.hugging_face import side_by_side
from fusedvit.runtime.inputs import Grid

_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
_NOT_COPIED = frozenset({*REGISTRIES, HANDLE})  # registries of modules and tensors, and the tower's handle
_LIBRARIES = ("transformers.", "accelerate.", "peft.")  # the code of towers and adapters writes to objects of these


class Outcome(NamedTuple):
    """How a call or a share of it ended.

    Attributes:
        rows: `[tokens, (1 + n) * out]`; None if the original code must still run.
        ended: as `FusedEncoder.count` takes it.
    """

    rows: torch.Tensor | None
    ended: list[Item] | Reason | None = None


class TowerCopy:
    """A fused copy of a tower on another device. Its user lets nothing run on it during `update_from`."""

    def __init__(self, tower: nn.Module, leader: FusedEncoder, device: torch.device) -> None:
        self.device = device
        self._leader = leader
        self._streams: set[torch.cuda.Stream] = set()  # of shares since the last `wait`
        self._build(tower)

    @torch.inference_mode(False)  # tensors made in it cannot be written outside
    @torch.no_grad()
    def _build(self, tower: nn.Module) -> None:
        memo: dict[int, object] = {}
        for tensor in _tensors_of(tower):
            moved = tensor.detach().to(self.device, copy=True)
            memo[id(tensor)] = nn.Parameter(moved, False) if isinstance(tensor, nn.Parameter) else moved
        memo |= {id(vars(tower)[name]): type(vars(tower)[name])() for name in _HOOKS & vars(tower).keys()}
        _share_foreign(tower, memo)
        copied = copy.deepcopy(tower, memo)
        self._handle = fuse(copied)
        self._leader.lead(self._handle, self.device)
        self._tower = copied  # last: after an interrupt before this line the next `update_from` builds again

    def wait(self) -> None:
        """Waits until the GPU has done the work of all shares, which end on the host before."""
        while self._streams:
            self._streams.pop().synchronize()

    def update_from(self, tower: nn.Module) -> None:
        """Updates this copy from `tower`: in place if modules and tensor shapes are the same, else by a new copy."""
        self.wait()
        if _structure_of(self._tower) != _structure_of(tower):
            self._build(tower)
        else:
            self._handle.weights.expect_change()
            self._write(tower)
        stream = stream_on(self.device)
        if stream is not None:  # shares may run in other streams
            stream.synchronize()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write(self, tower: nn.Module) -> None:
        pairs = [*zip(self._tower.modules(), tower.modules(), strict=True)]
        memo: dict[int, object] = {id(theirs): mine for mine, theirs in pairs}
        for mine, theirs in zip(_tensors_of(self._tower), _tensors_of(tower), strict=True):
            mine.copy_(theirs)
            memo[id(theirs)] = mine
        _share_foreign(tower, memo)
        for own, other in pairs:
            kept = _NOT_COPIED | _HOOKS if other is tower else _NOT_COPIED
            _copy_attributes(vars(own), nn.Module.__getstate__(other), memo, kept)

    def warm_up(self, calls: Iterable[Grid] | None) -> None:
        """As `FusedEncoder.warmup`, without a progress bar."""
        self._handle.warmup(iter, calls=calls)

    def run(self, pixels: torch.Tensor, grid: torch.Tensor, stream: torch.cuda.Stream | None) -> Outcome:
        """Runs a share whose pixels are on this device in `stream`, the caller's on this device."""
        if stream is not None:
            self._streams.add(stream)
        # without a GPU nothing asks for CUDA, which a forked child may not
        on_stream: Any = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.inference_mode(), on_stream:
            ended: list[Item] | Reason | None = None
            try:  # bypasses hooks on the tower, as the own share does
                found = self._handle.answer_or_reason(self._tower, pixels, grid, {})
                ended = found.items if isinstance(found, Answer) else self._named(found)
            finally:
                self._handle.count(ended, share=True)
            if isinstance(found, Answer):
                return Outcome(side_by_side(found.outputs, self._handle.spec), ended)
            return Outcome(rows_of_record(call_original(self._tower, pixels, grid, return_dict=True)), ended)

    def _named(self, why: Reason) -> Reason:
        """The reason why a share cannot run fused, with the device in its detail."""
        return Reason(why.kind, f"on {self.device}" + (f": {why.detail}" if why.detail else ""))


def _tensors_of(tower: nn.Module) -> list[torch.Tensor]:
    return [*tower.parameters(), *tower.buffers()]


def _structure_of(tower: nn.Module) -> list[object]:
    """Modules, parameters and buffers in order, without content, and numbers that tell which are the same object."""
    numbers: dict[int, int] = {}
    found: list[object] = []
    for path, module in tower.named_modules(remove_duplicate=False):
        classes = (own_class(type(module)), *map(type, (module._parameters, module._buffers, module._modules)))
        found.append((path, classes, numbers.setdefault(id(module), len(numbers))))
        for registry in (module._parameters, module._buffers):
            tensors = {name: t for name, t in registry.items() if t is not None}
            found.append([(n, t.shape, t.dtype, numbers.setdefault(id(t), len(numbers))) for n, t in tensors.items()])
    return found


def _share_foreign(tower: nn.Module, memo: dict[int, object]) -> None:
    """Notes in `memo`, as for `copy.deepcopy`, what a copy shares with `tower`: whatever its attributes hold that is
    not its own, plain, or an object of a library whose code may write to it. A lock or an open file cannot be copied,
    and an application's object may hold a whole model."""
    modules = list(tower.modules())
    seen = set(map(id, modules)) | memo.keys()
    pending = [value for m in modules for name, value in vars(m).items() if name not in _NOT_COPIED]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            pending += value
        elif isinstance(value, MethodType):
            pending.append(value.__self__)
        elif isinstance(value, partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif type(value).__module__.startswith(_LIBRARIES) and not isinstance(value, nn.Module):
            pending += getattr(value, "__dict__", {}).values()
        else:
            memo[id(value)] = value


def _copy_attributes(
    mine: dict[str, Any], theirs: dict[str, Any], memo: dict[int, object], kept: frozenset[str]
) -> None:
    """Copies attributes of an original module to its copy: numbers, flags, an adapter's scale.

    Args:
        mine: attributes of the copy, changed in place.
        theirs: attributes of the original as its `__getstate__` gives them, without what was compiled for the original.
        memo: maps ids of the original's modules and tensors to the copy's, and of what is shared, as for
            `copy.deepcopy`.
        kept: names of attributes that stay as they are.
    """
    for name in mine.keys() - theirs.keys() - kept:
        del mine[name]
    for name in theirs.keys() - kept:
        value = theirs[name]
        if name not in mine or content_of(mine[name]) != content_of(value):
            mine[name] = copy.deepcopy(value, memo)


def stream_on(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
