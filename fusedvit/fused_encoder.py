"""The handle of a fused tower: it runs calls fused, or reports the reason why a call cannot run fused."""

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedvit.calls.attempts import Attempts
from fusedvit.checks import fallback, transforms
from fusedvit.checks.as_built import Built, gathers_shards, wrong_parameters
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.checks.own_forward import bypass
from fusedvit.config import FuseConfig, takes_config
from fusedvit.errors import Reason
from fusedvit.families.base import Family
from fusedvit.forks import renew_in_children
from fusedvit.graphs.manager import MIB
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.model.items import Item
from fusedvit.model.spec import VisionSpec
from fusedvit.pixels.byte_pixels import BytePixels
from fusedvit.pixels.folded_normalizations import FoldedNormalizations
from fusedvit.prepared_tower import CannotPrepare, PreparedTower, Progress
from fusedvit.runtime import speculative_replay
from fusedvit.runtime.captured_encoder import TowerGraphs
from fusedvit.runtime.compile_service import hash_compiler, service_of
from fusedvit.runtime.inputs import Grid, items_of_grid, iterated
from fusedvit.runtime.kernel_loader import collect_garbage
from fusedvit.runtime.runner import on_device
from fusedvit.stats import Stats, compiles, describe, describe_ended, logger, of_graphs

_STATES = {"unfused": "unfused, runs its original code", "gone": "its tower is gone"}  # by `state()`
PUBLIC = (  # what `dir` of a handle lists
    *("config", "family", "normalizations", "processors", "spec", "tower"),
    *("concatenated", "drop_graphs", "graphs", "reason", "reconfigure", "refresh", "release", "report", "state"),
    *("stats", "warmup", "answer", "leave"),
)


class Answer(NamedTuple):
    """The outputs of a fused call, and the items that it encoded."""

    outputs: EncoderOutputs
    items: list[Item]


class FusedEncoder:
    """One fused tower: what `fusedvit.fuse` returns.

    The tower holds its handle, and the handle references the tower weakly, so that keeping a handle does not keep the
    model alive. Copies and pickles of a tower keep the configuration, and build their own weights, graphs and counters.

    `dir` lists what users and engines' adapters call (`PUBLIC`); other methods and attributes without an underscore are
    for other modules of this package.

    Attributes:
        family: the tower's family, or an engine's variant of it.
        spec: what the tower's config says.
        processors: Hugging Face's image and video processors that `fuse` changed to return bytes for this tower.
        normalizations: the normalisations of byte pixels that are folded into the tower's weights.
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
        this = weakref.ref(self)  # weak, so that the handle and its weights are freed with the user's last reference
        self._ran_fused = True  # whether the last call did
        # Whether a call with gradients enabled fell back while a parameter required them: then fingerprints are
        # compared even with watch_data=False.
        self._trained = False
        self._stats = Stats()
        self._calling: set[int] = set()  # threads in a call, where a signal's handler may find its own
        self._postponed: set[int] = set()  # those of them whose handler has asked for `release`
        self._copies: dict[weakref.ref[FusedEncoder], torch.device] = {}
        self.processors: list[Any] = []
        self.normalizations = FoldedNormalizations(spec, family.name)
        known = self.normalizations.known
        held, name, built = weakref.ref(tower), self._name, self.built
        self._source = lambda: CheckedTower(_held(held, name), family, spec, built, known)
        self.prepared = PreparedTower(spec, config, self._source, known)
        self.weights = self.prepared.weights
        self._attempts = Attempts(self.prepared, self._stats.eager_runs)
        self._pause = self._attempts.pause
        self._tower = weakref.ref(tower, functools.partial(_end_of, this))  # last: `_end_of` needs the rest
        self._served_tower: Callable[[], nn.Module | None] = self._tower
        self._judge_sharded: Callable[[], Reason | None] | None = None  # of a sharded tower that this handle serves
        renew_in_children(self)

    # a call

    def answer(
        self, tower: nn.Module, pixel_values: torch.Tensor, grid_thw: Grid, extra: dict[str, Any]
    ) -> Answer | None:
        """Runs a call of `tower` fused: what the `forward` of a fused tower calls, and an engine's adapter.

        Every call is counted, however it ends. One exception: a call is left out if a signal's handler raises while the
        call is counted.

        Args:
            tower: the module whose `forward` was called: the handle's tower, or a copy that shares its attributes.
            pixel_values: `[patches, patch_width]` of any float dtype, or `BytePixels`, on any device.
            grid_thw: `[items, 3]` integers (t, h, w) in patches: a tensor on any device, or a list.
            extra: the call's other arguments.

        Returns:
            None if the call must take the original code, of which the first call for each reason warns.

        Raises:
            RuntimeError: with `strict=True`, the call must take the original code.
            TypeError, ValueError: see `runtime.inputs`; nothing was launched, or only a replay without items.
        """
        found: Answer | Reason | None = None
        try:
            found = self.answer_or_reason(tower, pixel_values, grid_thw, extra)
        finally:  # at the end: until a replay has begun, the GPU is idle
            self.count(found.items if isinstance(found, Answer) else found)
        return found if isinstance(found, Answer) else None

    def answer_or_reason(
        self, tower: nn.Module, pixel_values: torch.Tensor, grid_thw: Grid, extra: dict[str, Any]
    ) -> Answer | Reason:
        """As `answer`, or returns the reason why the original code must run. The caller counts the call, by `count`."""
        mine, marked, replay = threading.get_ident(), type(pixel_values) is BytePixels, None
        if mine in self._calling:  # the static buffers may be in use, and locks of this thread do not stop it
            if self.weights.first_parameter().is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"fusedvit: a signal's handler called {self._name} while its thread captures a graph"
                )
            return Reason(fallback.INTERRUPTING)
        try:
            self._calling.add(mine)  # within `try`, as an interrupt may follow
            pixels = self.normalizations.encoder_input(pixel_values) if marked else pixel_values  # type: ignore[arg-type]
            reason = transforms.active(pixels, grid_thw)
            if self._tower() is not tower:
                what = f"this {type(tower).__name__} is a copy of the one that was fused"
                reason = Reason(fallback.ANOTHER_TOWER, what)
            if reason is not None:
                return reason
            runtime = self.prepared.runtime if self._ran_fused else None  # after one fallback the next call mostly does
            replay = speculative_replay.begin(runtime, pixels, grid_thw, marked)
            called = self._served_tower() or tower
            reason = fallback.reason_of_call(called, pixel_values, grid_thw, extra) or self._pause.skip_call()
            check_content = self._judge_sharded is None and self.checks_content()
            found = reason or self._attempts.of_call(pixels, grid_thw, replay, marked, check_content)
        finally:
            self._calling.discard(mine)  # first, as an interrupt may follow
            if replay is not None:
                replay.drop()
            if mine in self._postponed:
                self._postponed.discard(mine)
                self.release()
        self._ran_fused = not isinstance(found, Reason)
        if isinstance(found, Reason):
            return found
        assert found.outputs is not None, "a run on unchanged weights has outputs"
        return Answer(found.outputs, found.items)

    def count(self, ended: Sequence[Item] | Reason | None, share: bool = False, strict: bool = False) -> None:
        """Counts a call that has ended.

        Args:
            ended: the items, if they ran fused; the reason, if the original code runs; None if the call raised.
            share: the call is a share of another handle's call. That handle warns and raises, this one only counts.
            strict: the call is shared with other processes, and the handle of one of them is strict.

        Raises:
            RuntimeError: `strict`, or with `strict=True`, and the original code must run.
        """
        if ended is None:
            self._stats.add(raised=1)
        elif not isinstance(ended, Reason):
            self._stats.add(fused=1, items=len(ended), patch_tokens=sum([item.tokens for item in ended]))
        elif share:
            self._stats.count_original(ended)
        else:
            self._fall_back(ended, strict)

    def _fall_back(self, reason: Reason, strict: bool) -> None:
        """Counts a call that takes the original code.

        Raises:
            RuntimeError: `strict`, or with `strict=True`.
        """
        if strict or self.prepared.config.strict:
            self._stats.add(raised=1)
            raise fallback.refused(self._name, reason)
        if not self._trained and torch.is_grad_enabled():  # optimizers with fused=True write without counting a version
            tower = self._served_tower()
            self._trained = tower is not None and any(p.requires_grad for p in tower.parameters())
        self._stats.count_original(reason, self._name)

    def checks_content(self) -> bool:
        """Whether calls compare the content of the tower's parameters."""
        return self.prepared.config.watch_data or self._trained

    def leave(self, why: str) -> None:
        """Counts a call that an engine's adapter leaves to the original code.

        Raises:
            RuntimeError: with `strict=True`.
        """
        self.count(Reason(fallback.ENGINE, why))

    # what a user calls

    def stats(self) -> dict[str, Any]:
        """Counters as plain values, and the MiB held by weights and graphs; docs/using.md gives the unit of each.

        `compiles` counts kernels compiled or loaded in this process. `graphs` is present once the tower has run on a
        GPU. `state` is the value of `state()`; during a pause it says why, for how many calls, and what ends the pause.
        `copies` is a list with such a dictionary for each copy on another device, and its `device`.
        """
        state, paused = self.state(), self._pause.lasts()
        more: dict[str, Any] = {
            "state": f"paused: {paused}" if state == "fused" and paused is not None else state,
            "refreshes": self.weights.preparations,
            "compiles": compiles(),
            "weights_mib": self.weights.held_bytes() / MIB,
            "copies": [{"device": str(device)} | copied.stats() for copied, device in self._living_copies()],
        }
        graphs = self.prepared.graphs()
        if graphs is not None:
            more["graphs"] = of_graphs(graphs, self._stats.eager_runs.total())
        return self._stats.as_dict() | more

    def reason(self, pauses: bool = True) -> Reason | None:
        """Why the tower as it stands cannot run fused, or None; waits for the GPU. `state` says whether it is fused.

        Args:
            pauses: whether a pause, which is temporary, counts as a reason.

        Raises:
            RuntimeError: the tower is gone.
        """
        paused = self._pause.lasts() if pauses else None
        found = (
            bypass(self.tower)
            or transforms.active(None)
            or fallback.reason_of_global_hooks()
            or paused
            or (self._judge_sharded and self._judge_sharded())
        )
        if found is not None:
            return found
        source = self._source()
        if gathers_shards(self.tower):
            return replace(source, wrong_parameters=functools.partial(wrong_parameters, shards=True)).reason()
        found = source.reason()
        return source.reason_of_fp16() if found is None and not self.weights.host_unchanged() else found

    def report(self) -> str:
        """In at most 25 lines: what is fused, on which operations, the memory held, and why anything is not fused."""
        stats = self.stats()
        if stats["state"] in _STATES:  # the handle serves no tower any more
            return describe_ended(f"{self._name} ({self.family.name}): {_STATES[stats['state']]}", stats)
        parameter = self.weights.first_parameter()
        strict = self.config.strict
        return describe(self.tower, parameter, self.family.name, self.spec, stats, self.reason(), strict)

    def warmup(self, progress: Progress | None = None, *, calls: Iterable[Grid] | None = None) -> None:
        """Prepares weights, and compiles and captures every token budget, the largest first.

        Without a warm-up the first calls do this work.

        Args:
            progress: wraps the iterable of budgets, as `tqdm.tqdm` or `rich.progress.track` do. None: a progress bar if
                standard error is a terminal.
            calls: the `grid_thw` of future calls, if known. Only the budgets that these calls replay are captured now;
                the first call that needs another budget captures it.

        Raises:
            RuntimeError: the tower as it stands cannot run fused, was unfused, or is gone; or kernels cannot be
                compiled.
            TypeError, ValueError: one of `calls` is not a grid.
        """
        self._live_tower()
        grids = None if calls is None else iterated(calls)
        self._pause.end()
        wanted = None if grids is None else [items_of_grid(grid, self.spec.merge_size) for grid in grids]
        with on_device(self.weights.first_parameter().device), self._preparing():
            self.prepared.warm_up(progress, wanted)

    def refresh(self) -> None:
        """Prepares the weights again from the tower's parameters, at once; those of a sharded tower at its next call,
        which every rank comes to.

        Raises:
            RuntimeError: the tower as it stands cannot run fused, was unfused, or is gone; the message says why.
        """
        self._live_tower()
        self._pause.end()
        if self._judge_sharded is not None:
            self.weights.outdate()
            reason = self._judge_sharded()
            if reason is not None:
                raise fallback.refused(self._name, reason)
            return
        with on_device(self.weights.first_parameter().device), self._preparing():
            self.prepared.refresh()

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        """A context in which weights are prepared at the caller's request.

        Raises:
            RuntimeError: the tower cannot run fused, or not in the caller's context: a mode or a transform of torch's
                would change what is prepared, and every later call would compute with it.
        """
        reason = transforms.active(None)
        if reason is not None:
            raise fallback.refused(self._name, reason)
        try:
            yield
        except CannotPrepare as why:
            raise fallback.refused(self._name, why.reason) from why.__cause__

    @takes_config
    def reconfigure(self, config: FuseConfig) -> None:
        """Replaces the options. Graphs are released, and captured again with the new options.

        Raises:
            RuntimeError: the tower was unfused, or is gone; or, with `strict=True`, an attribute `forward` of it calls
                the original code. The options are as they were.
            TypeError: `config` is not a `FuseConfig`.
            ValueError: the tower cannot meet an option.
        """
        self._live_tower()
        self.prepared.check(config)
        self.check_reached(config.strict)
        self.replace_options(config)

    def replace_options(self, config: FuseConfig) -> None:
        """As `reconfigure`, with options that were checked."""
        self._pause.end()
        for prepared in self._each_prepared():
            prepared.reconfigure(config)

    def release(self) -> None:
        """Releases all memory: graphs, static buffers, prepared weights, and old parameters that the tower replaced.

        The next call prepares and captures again what it needs. What a signal's handler asks for while its thread is in
        a call is done at the end of that call.
        """
        self._pause.end()
        mine = threading.get_ident()
        if mine in self._calling:
            self._postponed.add(mine)
            return
        for prepared in self._each_prepared():
            prepared.release()

    def drop_graphs(self) -> None:
        """Forgets captured graphs and failed captures, and keeps the static buffers."""
        for prepared in self._each_prepared():
            prepared.drop_graphs()

    def __call__(self, pixel_values: torch.Tensor, grid_thw: Grid) -> torch.Tensor:
        """As `concatenated`, and as a call of a `DataParallelEncoder`."""
        return self.concatenated(pixel_values, grid_thw)

    def concatenated(self, pixel_values: torch.Tensor, grid_thw: Grid) -> torch.Tensor:
        """The embeddings that serving engines give to a language model: `[tokens, (1 + n) * out]`, n deepstack mergers.

        Each merged token's row is the merger's output, followed by the output of each deepstack merger in the order of
        their blocks: the tower's `pooler_output` and `deepstack_features` side by side. An engine's tower returns these
        rows itself. The tower may run fused or its original code.

        Args:
            pixel_values, grid_thw: as the tower takes them; for padded images, positions instead of a grid.

        Raises:
            RuntimeError: the tower was unfused, or is gone.
            TypeError, ValueError: as a call of the tower.
        """
        asked = {"return_dict": True} if self.built is None else {}  # which an engine's own `forward` does not take
        found = self._live_tower()(pixel_values, grid_thw, **asked)
        return found if isinstance(found, torch.Tensor) else rows_of_record(found)

    def graphs(self) -> TowerGraphs:
        """The tower's graphs, for measuring and testing.

        Raises:
            RuntimeError: there are none (no GPU, or `graphs=False`).
        """
        graphs = self.prepared.graphs()
        if graphs is None:
            raise RuntimeError("fusedvit: this tower has no graphs: it has not run on a GPU, or graphs are off")
        return graphs

    # the tower behind the handle

    @property
    def config(self) -> FuseConfig:
        """The tower's options; `reconfigure` replaces them."""
        return self.prepared.config

    @property
    def tower(self) -> nn.Module:
        """The tower.

        Raises:
            RuntimeError: the tower was freed.
        """
        return _held(self._served_tower, self._name)

    def serves(self, tower: nn.Module) -> bool:
        """Whether this is the handle of `tower` itself, rather than of a tower that `tower` is a copy of."""
        if "_tower" not in self.__dict__:  # a copy of a handle before its `__setstate__`, which will bring `tower`
            return True
        return self._tower() is tower or self._served_tower() is tower

    def of_copy(self, tower: nn.Module) -> "FusedEncoder":
        """A new handle for `tower`, a copy of this handle's tower, with the same options."""
        return FusedEncoder(tower, self.family, self.spec, self.config, self.built)

    def serve_sharded(self, tower: nn.Module, judge: Callable[[], Reason | None]) -> None:
        """Makes this the handle of `tower`, whose weights are shards of those that this handle's own tower has.

        No other code writes to this handle's own tower, so calls do not compare its content.

        Args:
            tower: the engine's own; it is held weakly.
            judge: why `tower` as it stands cannot run fused, or None. It must not keep `tower` alive.
        """
        self._served_tower, self._judge_sharded = weakref.ref(tower), judge

    def lead(self, copied: "FusedEncoder", device: torch.device) -> None:
        """From now on `copied` takes the options of this handle, and frees memory and ends when this one does.

        Args:
            copied: the handle of a copy of the tower; it is held weakly.
            device: the copy's device.
        """
        self._copies[weakref.ref(copied, self._copies.pop)] = device
        if copied.config != self.config:  # replaced since the copy was made
            copied.prepared.reconfigure(self.config)
        if self.prepared.ended:
            copied.prepared.end()

    def _living_copies(self) -> list[tuple["FusedEncoder", torch.device]]:
        copies = self._copies.copy()  # not by an iteration, in which the garbage collector may take one away
        held = [(copied(), device) for copied, device in copies.items()]
        return [(copied, device) for copied, device in held if copied is not None]

    def _each_prepared(self) -> list[PreparedTower]:
        """What is prepared of this tower, and then of its copies on other devices."""
        return [self.prepared, *(copied.prepared for copied, _ in self._living_copies())]

    def _live_tower(self) -> nn.Module:
        """The tower, if this handle still serves it.

        Raises:
            RuntimeError: the tower is gone, or was unfused.
        """
        tower = self.tower
        if self.prepared.ended:
            raise RuntimeError(f"fusedvit: {self._name} was unfused: fuse it again and use the handle that this gives")
        return tower

    def state(self) -> str:
        """ "fused", "unfused", or "gone" if the tower was freed."""
        return "gone" if self._tower() is None else "unfused" if self.prepared.ended else "fused"

    def end(self) -> None:
        """Releases everything for good, because the tower was unfused or is gone."""
        self.processors.clear()
        for prepared in self._each_prepared():
            prepared.end()

    def check_reached(self, strict: bool) -> None:
        """Warns if an attribute `forward` of the tower makes calls bypass the fused encoder.

        Raises:
            RuntimeError: they do, and `strict`.
        """
        why = bypass(self.tower)
        if why is not None and strict:
            raise fallback.refused(self._name, why)
        if why is not None:
            logger.warning("%s", fallback.message(self._name, why))

    def check_early(self) -> None:
        """For a tower on a GPU, does host work now that would cost the first call 0.3 to 0.8 s: reads the code that the
        tower runs, hashes Triton's code (in a thread if Triton's cache is empty), and collects garbage."""
        if self.weights.first_parameter().device.type == "cuda" and self.config.compile == "background":
            service = service_of(os.getpid())
            if service.is_idle_with_cache():
                hash_compiler()
            else:
                service.hash_early()
            self._source().reason()  # keeps what it finds out about code for the first call
            collect_garbage()

    def _renew_locks(self) -> None:
        """See `forks`."""
        self._postponed.clear()
        self._calling.clear()  # a thread of the child may have the number of one that only the parent has
        self._stats._renew_locks()
        self.prepared._renew_locks()

    def __dir__(self) -> list[str]:
        return [*PUBLIC, *(name for name in super().__dir__() if name.startswith("_"))]

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
        otherwise = "cannot run fused" if self.config.strict else "runs its original code"
        how = "runs fused" if reason is None else f"{otherwise}: {reason}"
        return f"<FusedEncoder of {self._name} ({self.family.name}), {where.dtype} on {where.device}: {how}; {counted}>"


def rows_of_record(record: Any) -> torch.Tensor:
    """The rows of Hugging Face's output `record`, `[tokens, (1 + n) * out]`: see `FusedEncoder.concatenated`."""
    rows = getattr(record, "pooler_output", None)
    rows = record.last_hidden_state if rows is None else rows
    return torch.cat([rows, *getattr(record, "deepstack_features", ())], dim=1)


def _held(tower: Callable[[], nn.Module | None], name: str) -> nn.Module:
    alive = tower()
    if alive is None:
        raise RuntimeError(f"fusedvit: {name} of this handle is gone: a handle does not keep its model")
    return alive


def _end_of(
    handle: weakref.ref[FusedEncoder], _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> None:
    """Ends the handle of a tower that is being freed; nothing is left to do while the interpreter shuts down."""
    alive = None if is_finalizing() else handle()  # a default argument: at shutdown module globals may be gone
    if alive is not None:
        alive.end()
