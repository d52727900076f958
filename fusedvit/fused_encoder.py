"""The handle of a fused tower: it runs calls fused where they can be, and says why where they cannot."""

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from triton.runtime.cache import triton_key

from fusedvit.checks import fallback, transforms
from fusedvit.checks.as_built import Built
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.config import FuseConfig
from fusedvit.errors import Reason, WeightsReleased
from fusedvit.families.base import Family
from fusedvit.forks import renew_in_children
from fusedvit.graphs.manager import MIB
from fusedvit.kernels.launch import KernelFailed
from fusedvit.kernels.load_inputs import FLOATS, kind_of
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.model.items import Item
from fusedvit.model.normalization import Normalization
from fusedvit.model.spec import VisionSpec
from fusedvit.own_forward import bypass
from fusedvit.pauses import Pause
from fusedvit.pixels.byte_pixels import BytePixels
from fusedvit.pixels.folded_normalizations import FoldedNormalizations
from fusedvit.prepared_tower import CAPTURING, CannotPrepare, PreparedTower, Progress
from fusedvit.runtime import speculative_replay
from fusedvit.runtime.captured_encoder import TowerGraphs
from fusedvit.runtime.compile_service import service_of
from fusedvit.runtime.inputs import Grid, Inputs, check_inputs, items_of_grid
from fusedvit.runtime.kernel_loader import KernelsNotReady, collect_garbage
from fusedvit.runtime.runner import on_device
from fusedvit.runtime.speculative_replay import Attempt, SpeculativeReplay, attempt
from fusedvit.stats import Stats, compiles, describe, describe_ended, logger, of_graphs

OVERTAKEN = 3  # runs of a call before it takes the lock that stops other threads from preparing weights
MOST_RUNS = 8  # with that lock
MOST_REPEATS = 3  # preparations in a row from other parameters of the same values, before calls do without


# What a run on a tower that changes meanwhile may raise: nothing that a signal's handler raises to end a call.
_OF_PYTHON = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
_FAILS = (*_OF_PYTHON, KernelsNotReady, KernelFailed)
_STATES = {"unfused": "unfused, runs its original code", "gone": "its tower is gone"}  # by `state()`


class Answer(NamedTuple):
    """What a fused call gave, and the items that it is of."""

    outputs: EncoderOutputs
    items: list[Item]


class FusedEncoder:
    """One fused tower: what `fusedvit.fuse` returns.

    The tower keeps its handle, and the handle knows the tower weakly: who keeps a handle keeps no model. Copies and
    pickles of a tower keep the configuration and make their own weights, graphs and counters.

    Attributes:
        processors: Hugging Face's, changed so that they give bytes for this tower.
        normalizations: of bytes, that its weights have.
    """

    def __init__(
        self, tower: nn.Module, family: Family, spec: VisionSpec, config: FuseConfig, built: Built | None = None
    ) -> None:
        """A handle of `tower`; `built` is its structure as an engine built it, None for Hugging Face's towers."""
        self.family = family
        self.spec = spec
        self.built = built
        self._start(tower, config)

    def _start(self, tower: nn.Module, config: FuseConfig) -> None:
        self._name, family, spec = type(tower).__name__, self.family, self.spec
        this = weakref.ref(self)  # below nothing holds the handle: it and its weights go with the last user's reference
        self._ran_fused = True  # the last call
        self._trained = False  # by a call that we know of
        self._pause = Pause()
        self._stats = Stats()
        self.processors: list[Any] = []
        self.normalizations = FoldedNormalizations(spec, family.name)
        known = self.normalizations.known
        self._source = functools.partial(_source_of, weakref.ref(tower), self._name, family, spec, self.built, known)
        self.prepared = PreparedTower(spec, config, self._source, known)
        self.weights = self.prepared.weights
        self._tower = weakref.ref(tower, functools.partial(_end_of, this))  # when there is what it ends
        self._stands_for: Callable[[], nn.Module | None] = self._tower
        renew_in_children(self)

    # a call

    def __call__(
        self, tower: nn.Module, pixel_values: torch.Tensor, grid_thw: Grid, extra: dict[str, Any]
    ) -> EncoderOutputs | None:
        """Runs fused, or returns None where the call must take the original code: counted, warned of once.

        Args:
            tower: whose `forward` was called: the handle's own, or a copy that shares its attributes.
            pixel_values: `[patches, patch_width]` of any float dtype, or `BytePixels`, on any device.
            grid_thw: `[items, 3]` integers (t, h, w) in patches: a tensor on any device, or a list.
            extra: the call's other arguments.

        Raises:
            RuntimeError: `strict`, and the call must take the original code.
            TypeError, ValueError: see `runtime.inputs`; nothing was launched, or only a replay without items.
        """
        found = self.answer(tower, pixel_values, grid_thw, extra)
        return None if found is None else found.outputs

    def answer(
        self, tower: nn.Module, pixel_values: torch.Tensor, grid_thw: Grid, extra: dict[str, Any]
    ) -> Answer | None:
        """As a call, with the items that its outputs are of. Every call is counted, whatever it ends in."""
        marked, replay = type(pixel_values) is BytePixels, None
        try:
            pixels = self.normalizations.taken(pixel_values) if marked else pixel_values  # type: ignore[arg-type]
            reason = transforms.active(pixels, grid_thw)
            if self._tower() is not tower:
                what = f"this {type(tower).__name__} is a copy of the one that was fused"
                reason = Reason(fallback.ANOTHER_TOWER, what)
            if reason is not None:
                self._fall_back(reason)
                return None
            runtime = self.prepared.runtime if self._ran_fused else None  # who falls back once does so again, mostly
            replay = speculative_replay.begin(runtime, pixels, grid_thw, marked)
            reason = fallback.reason_of_call(tower, pixel_values, grid_thw, extra) or self._pause.take()
            found = reason or self._attempt_as_ready(pixels, grid_thw, replay, marked)
        finally:
            self._stats.add(calls=1)  # not before: until a replay has begun, the GPU has nothing to do
            if replay is not None:
                replay.drop()
        self._ran_fused = not isinstance(found, Reason)
        if isinstance(found, Reason):
            self._fall_back(found)
            return None
        self._stats.add(fused=1, items=len(found.items), patch_tokens=sum([item.tokens for item in found.items]))
        assert found.outputs is not None, "a run on unchanged weights has outputs"
        return Answer(found.outputs, found.items)

    def _attempt_as_ready(
        self, pixels: torch.Tensor, grid_thw: Grid, replay: SpeculativeReplay | None, marked: bool
    ) -> Attempt | Reason:
        """What a call gives, or why it cannot run fused, kernels that are still missing among that."""
        before = self.weights.prepared
        try:
            found = self._attempt_until_unchanged(pixels, grid_thw, replay, marked)
            self._note_preparations(found, self.weights.prepared != before)
        except (KernelsNotReady, KernelFailed) as why:
            return Reason(fallback.NOT_READY, str(why))
        return found

    def _attempt_until_unchanged(
        self, pixels: torch.Tensor, grid_thw: Grid, replay: SpeculativeReplay | None, marked: bool
    ) -> Attempt | Reason:
        """Runs a call until a run began and ended with the weights that the tower has, or says why it cannot.

        Whoever refreshes in a loop would overtake every run: the last ones keep others out.
        """
        prepared, parameter, again = self.prepared, self.weights.first_parameter(), self._pause.again
        with on_device(parameter.device):
            kind = kind_of(pixels, self.spec.patch_width) if marked else FLOATS
            reason = prepared.ensure_weights(parameter, kind)
            if reason is not None:
                return reason
            inputs = check_inputs(pixels, grid_thw, self.spec, parameter, marked)
            if isinstance(inputs, Reason):
                return inputs
            for _ in range(1 if again else OVERTAKEN):
                found = self._attempt_once(inputs, replay)
                if isinstance(found, Reason) or found.unchanged:
                    return found
                replay, reason = None, prepared.prepare(found.weights_version)
                if reason is not None:
                    return reason
            with prepared.nothing_launched():
                for _ in range(1 if again else MOST_RUNS):
                    found = self._attempt_once(inputs, None)
                    if isinstance(found, Reason) or found.unchanged:
                        return found
                    reason = prepared.prepare_now(found.weights_version)
                    if reason is not None:
                        return reason
        runs = 2 if again else OVERTAKEN + MOST_RUNS
        return Reason(fallback.CHANGING, f"other weights after each of {runs} runs than before it")

    def _attempt_once(self, inputs: Inputs, replay: SpeculativeReplay | None) -> Attempt | Reason:
        """One run; one that loses its weights to `release` meanwhile counts as one on changed weights, and so does one
        that fails because something has changed."""
        version = self.weights.version if replay is None else replay.weights_version
        try:
            runtime = self.prepared.runtime_on(self.weights.first_parameter())
            check_content = (self.prepared.config.watch_data or self._trained) and runtime.no_graphs != CAPTURING
            return attempt(runtime, inputs, replay, version, check_content, self._stats.eager_runs)
        except WeightsReleased:
            return Attempt(None, [], version, unchanged=False)
        except _FAILS:
            if self.weights.host_unchanged():
                raise
            return Attempt(None, [], version, unchanged=False)

    def _note_preparations(self, found: Attempt | Reason, prepared: bool) -> None:
        """Begins a pause after a call that prepared weights in vain, as those before it did.

        Args:
            found: what the call gave.
            prepared: it prepared weights, or another thread did meanwhile.
        """
        if not isinstance(found, Reason) and not prepared:
            self.weights.repeats = 0
            self._pause.holds()
            return
        if self.prepared.config.strict:
            return
        each = self._pause.prepares(self.weights.changes)
        if isinstance(found, Reason) and found.kind == fallback.CHANGING:
            self._pause.begin(found)
        elif self.weights.repeats >= (1 if self._pause.again else MOST_REPEATS):
            self._pause.begin(Reason(fallback.REPLACED, "other objects of the same values at each call"))
            self.prepared.release()  # whoever offloads a tower wants its memory
        elif each:
            self._pause.begin(Reason(fallback.CHANGED, "new values or adapters at each call"))

    def _fall_back(self, reason: Reason) -> None:
        """Counts a call that takes the original code.

        Raises:
            RuntimeError: `strict`.
        """
        if self.prepared.config.strict:
            raise RuntimeError(fallback.message(self._name, reason))
        if not self._trained and torch.is_grad_enabled():  # optimizers with fused=True write and count no version
            tower = self._tower()
            self._trained = tower is not None and any(p.requires_grad for p in tower.parameters())
        self._stats.count_original(reason, self._name)

    def leave(self, why: str, counted: bool = False) -> None:
        """Counts a call that an engine's adapter leaves to the original code.

        Args:
            counted: `answer` has counted it as a call, before it refused its input.

        Raises:
            RuntimeError: `strict`.
        """
        if not counted:
            self._stats.add(calls=1)
        self._fall_back(Reason(fallback.ENGINE, why))

    # what a user calls

    def stats(self) -> dict[str, Any]:
        """Counters as plain values, and MiB held by what; docs/using.md has the unit of each.

        `compiles` counts kernels compiled in this process; `graphs` is there once the tower has run on a GPU; `state`
        is that of `state()`, or "paused" and why, for how many calls, and what ends that.
        """
        state, paused = self.state(), self._pause.lasts()
        more: dict[str, Any] = {
            "state": f"paused: {paused}" if state == "fused" and paused is not None else state,
            "refreshes": self.weights.prepared,
            "compiles": compiles(),
            "weights_mib": self.weights.held_bytes() / MIB,
        }
        graphs = self.prepared.graphs()
        if graphs is not None:
            more["graphs"] = of_graphs(graphs, self._stats.eager_runs.total())
        return self._stats.as_dict() | more

    def reason(self, pauses: bool = True) -> Reason | None:
        """Why the next call of the tower as it stands would not run fused, or None; waits for the GPU.

        Args:
            pauses: a pause, which passes, counts too.

        Raises:
            RuntimeError: the tower is gone.
        """
        paused = self._pause.lasts() if pauses else None
        found = bypass(self.tower) or transforms.active(None) or paused
        if found is not None:
            return found
        source = self._source()
        found = source.reason()
        return source.refusal() if found is None and not self.weights.host_unchanged() else found

    def report(self) -> str:
        """What is fused, on which operations, what memory it holds, and why anything is not: at most 25 lines."""
        stats = self.stats()
        if stats["state"] in _STATES:  # it serves no tower any more
            return describe_ended(f"{self._name} ({self.family.name}): {_STATES[stats['state']]}", stats)
        parameter = self.weights.first_parameter()
        return describe(self.tower, parameter, self.family.name, self.spec, stats, self.reason())

    def warmup(self, progress: Progress | None = None, *, calls: Iterable[Grid] | None = None) -> None:
        """Prepares weights, and compiles and captures every token budget, the largest first; else the first calls do.

        Args:
            progress: wraps the iterable of budgets, as `tqdm.tqdm` or `rich.progress.track` do; a bar on a terminal's
                standard error if None.
            calls: the `grid_thw` of calls to come, if they are known: the budgets that these replay are captured now,
                any other by the first call that needs it.

        Raises:
            RuntimeError: the tower as it stands cannot run fused, was unfused, or is gone; or kernels cannot be
                compiled.
            TypeError, ValueError: one of `calls` is no grid.
        """
        self._live_tower()
        if calls is not None and not isinstance(calls, Iterable):
            raise TypeError(f"fusedvit: calls must be an iterable of grid_thw, got {type(calls).__name__}")
        self._pause.end()
        wanted = None if calls is None else [items_of_grid(grid, self.spec.merge_size) for grid in calls]
        with on_device(self.weights.first_parameter().device), self._raising():
            self.prepared.warm_up(progress, wanted)

    def refresh(self) -> None:
        """Prepares the weights again from the tower's parameters, at once.

        Raises:
            RuntimeError: the tower as it stands cannot run fused, was unfused, or is gone; the message says why.
        """
        self._live_tower()
        self._pause.end()
        with on_device(self.weights.first_parameter().device), self._raising():
            self.prepared.refresh()

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        """Makes an error for the caller of why the tower was not prepared."""
        try:
            yield
        except CannotPrepare as why:
            raise RuntimeError(fallback.message(self._name, why.reason, "cannot run fused")) from why.__cause__

    def reconfigure(self, config: FuseConfig) -> None:
        """Takes new options; graphs are given back and captured again by them.

        Raises:
            RuntimeError: the tower was unfused, or is gone.
            ValueError: an option that it cannot meet.
        """
        self._live_tower()
        self._pause.end()
        self.prepared.reconfigure(config)

    def release(self) -> None:
        """Gives back all memory: graphs, static buffers, prepared weights, and parameters of before that moved away.

        What the next call needs is prepared and captured again then.
        """
        self._pause.end()
        self.prepared.release()

    def drop_graphs(self) -> None:
        """Forgets captured graphs and failed captures, and keeps the static buffers."""
        self.prepared.drop_graphs()

    def concatenated(self, pixel_values: torch.Tensor, grid_thw: Grid) -> torch.Tensor:
        """What serving engines hand to a language model: `[tokens, (1 + n) * out]`, n the deepstack features.

        Of each merged token the merger's row, then that of each deepstack merger by its block: the tower's
        `pooler_output` and `deepstack_features` side by side, by whichever code the tower runs.

        Args:
            pixel_values, grid_thw: as the tower takes them; of padded images the positions instead of a grid.

        Raises:
            RuntimeError: the tower was unfused, or is gone.
            TypeError, ValueError: as a call of the tower.
        """
        return rows_of(self._live_tower()(pixel_values, grid_thw, return_dict=True))

    def graphs(self) -> TowerGraphs:
        """The tower's graphs, for measuring and testing.

        Raises:
            RuntimeError: there are none (no GPU, or `graphs=False`).
        """
        graphs = self.prepared.graphs()
        if graphs is None:
            raise RuntimeError("fusedvit: this tower has no graphs: it has not run on a GPU, or graphs are off")
        return graphs

    # whose handle it is

    @property
    def config(self) -> FuseConfig:
        """Its options; `reconfigure` replaces them."""
        return self.prepared.config

    @property
    def tower(self) -> nn.Module:
        """The tower.

        Raises:
            RuntimeError: nobody holds it any more.
        """
        return _held(self._tower, self._name)

    def serves(self, tower: nn.Module) -> bool:
        """Whether it is the handle of this very tower, and not of one that this is a copy of."""
        if "_tower" not in self.__dict__:  # a copy before its `__setstate__`: `tower` is what that brings
            return True
        return self._tower() is tower or self._stands_for() is tower

    def of_copy(self, tower: nn.Module) -> "FusedEncoder":
        """A new handle with the options of this one."""
        return FusedEncoder(tower, self.family, self.spec, self.config, self.built)

    def stand_for(self, tower: nn.Module) -> None:
        """It is the handle of `tower` too, whose weights its own tower has whole."""
        self._stands_for = weakref.ref(tower)

    def _live_tower(self) -> nn.Module:
        """The tower, if this handle still serves it.

        Raises:
            RuntimeError: it is gone, or was unfused.
        """
        tower = self.tower
        if self.prepared.ended:
            raise RuntimeError(f"fusedvit: {self._name} was unfused: fuse it again and use the handle that this gives")
        return tower

    def state(self) -> str:
        """ "fused", "unfused", or "gone" if nobody holds the tower any more."""
        return "gone" if self._tower() is None else "unfused" if self.prepared.ended else "fused"

    def end(self) -> None:
        """Gives everything back for good: the tower was unfused, or is gone."""
        self.processors.clear()
        self.prepared.end()

    def check_reached(self) -> None:
        """Warns if calls of the tower go past the fused encoder, by a `forward` that somebody put on it.

        Raises:
            RuntimeError: `strict`, and they do.
        """
        why = bypass(self.tower)
        if why is not None and self.config.strict:
            raise RuntimeError(fallback.message(self._name, why))
        if why is not None:
            logger.warning("%s", fallback.message(self._name, why))

    def check_early(self) -> None:
        """Does now, for a tower on a GPU, what the first call would have to do on the host for 0.3 to 0.8 s: reads the
        code that the tower runs, hashes Triton's where its cache has kernels, and collects garbage."""
        if self.weights.first_parameter().device.type == "cuda" and self.config.compile == "background":
            if service_of(os.getpid()).is_idle_with_cache():  # else the first call waits for no key
                triton_key()  # each kernel's key begins with it, and Triton keeps it: 0.4 s, 1 s from a cold disk
            self._source().reason()  # whose answers about code are kept for the first call
            collect_garbage()

    def renew_locks(self) -> None:
        """See `forks`."""
        self._stats.renew_locks()
        self.prepared.renew_locks()

    def __copy__(self) -> "FusedEncoder":
        return self  # a tower has one handle

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("tower", "family", "spec", "config", "built")}
        return state | {"ended": self.prepared.ended}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tower, config, ended = state.pop("tower"), state.pop("config"), state.pop("ended")
        self.__dict__.update(state)
        self._start(tower, config)
        self.prepared.ended = ended

    def __repr__(self) -> str:
        state, counted = self.state(), f"{self._stats.fused} of {self._stats.calls} calls fused"
        if state != "fused":
            return f"<FusedEncoder of {self._name} ({self.family.name}): {_STATES[state]}; {counted}>"
        reason = self.reason()
        where = self.weights.first_parameter()
        how = "runs fused" if reason is None else f"runs its original code: {reason}"
        return f"<FusedEncoder of {self._name} ({self.family.name}), {where.dtype} on {where.device}: {how}; {counted}>"


def rows_of(record: Any) -> torch.Tensor:
    """The rows of a record of Hugging Face's, `[tokens, (1 + n) * out]`: see `FusedEncoder.concatenated`."""
    rows = getattr(record, "pooler_output", None)
    rows = record.last_hidden_state if rows is None else rows
    return torch.cat([rows, *getattr(record, "deepstack_features", ())], dim=1)


def _held(tower: weakref.ref[nn.Module], name: str) -> nn.Module:
    alive = tower()
    if alive is None:
        raise RuntimeError(f"fusedvit: {name} of this handle is gone: a handle does not keep its model")
    return alive


def _source_of(
    tower: weakref.ref[nn.Module],
    name: str,
    family: Family,
    spec: VisionSpec,
    built: Built | None,
    normalizations: dict[bool, Normalization],
) -> CheckedTower:
    return CheckedTower(_held(tower, name), family, spec, built, normalizations)


def _end_of(
    handle: weakref.ref[FusedEncoder], _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> None:
    """Called when the tower goes; with the whole process there is nothing to give back."""
    alive = None if is_finalizing() else handle()  # kept as a default: at that time this module's own names may be gone
    if alive is not None:
        alive.end()
