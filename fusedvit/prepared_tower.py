"""What a fused tower holds on its device: prepared weights, captured graphs and loaded kernels. They are created when a
call needs them, created again when the tower has changed, and released."""

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm

from fusedvit.checks import fallback
from fusedvit.config import SMALL, FuseConfig, check_config
from fusedvit.errors import Reason, WeightsReleased
from fusedvit.forks import is_held
from fusedvit.graphs.limits import Limits
from fusedvit.graphs.manager import MIB
from fusedvit.kernels.launch import KernelMissing
from fusedvit.kernels.load_inputs import BYTES, FLOATS, STILL_BYTES
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.items import Item
from fusedvit.model.normalization import Normalization
from fusedvit.model.ops import TORCH, Ops, ops_for
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime import compiled_kernels
from fusedvit.runtime.captured_encoder import TowerGraphs, limits_for, limits_within, new_graphs
from fusedvit.runtime.compile_service import service_of
from fusedvit.runtime.kernel_loader import KernelLoader, KernelsNotReady, Run
from fusedvit.runtime.meta_runs import MetaRuns
from fusedvit.runtime.runner import Runtime, budgets_of
from fusedvit.runtime.weight_cache import Source, WeightCache

NO_GPU = "no GPU"  # why a fused call runs without graphs, as counted in `stats()`
NO_GRAPHS = "graphs off"
INSIDE_CAPTURE = "inside another capture"
MOVING = "parameters move"  # as under sharding: capturing a graph for each address costs more than it saves
MOST_MOVES = 3  # moves after which no graph is captured until `release`
SMALL_MEMORY = 1.2  # memory held in total, as a multiple of the prepared weights

Progress = Callable[[Iterable[int]], Iterable[int]]
_bar = functools.partial(tqdm, desc="capturing token budgets", unit="graph", disable=None)  # None: only on a terminal
logger = logging.getLogger("fusedvit")


class CannotPrepare(Exception):
    """A tower cannot be prepared, because of `reason`."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class PreparedTower:
    """One tower's weights, graphs and kernels, and the locks that order their use.

    Attributes:
        config: options; `reconfigure` replaces them.
        weights: prepared weights, kept in step with the tower's parameters.
        runtime: the runtime of the last call; None before the first call, and after `reconfigure`.
        normalizations: normalisations of byte pixels that are folded into the weights; the key says whether for still
            images.
        ended: the tower was unfused, or is gone: nothing is prepared any more.
        in_graphs_of_others: a call ran inside somebody's capture: that CUDA graph reads these weights.
    """

    def __init__(
        self,
        spec: VisionSpec,
        config: FuseConfig,
        source: Callable[[], Source],
        normalizations: dict[bool, Normalization],
    ) -> None:
        """
        Args:
            source: returns the tower that weights are prepared from; references it weakly.

        Raises:
            ValueError: this tower cannot meet an option.
        """
        self.spec = spec
        self.config = config
        self.check(config)
        self.normalizations = normalizations
        self.runtime: Runtime | None = None
        self.ended = self.in_graphs_of_others = False
        self._lock = threading.RLock()
        self._turn = threading.RLock()
        this = weakref.ref(self)  # weak, so that this object and its weights are freed with the user's last reference
        self.weights = WeightCache(
            source,
            functools.partial(_call_living, this, PreparedTower._weights_moved),
            functools.partial(_call_living, this, PreparedTower._release_graphs),
            functools.partial(_loaded_ops, this),
            functools.partial(_call_living, this, PreparedTower.expect_kernels),
        )

    def _renew_locks(self) -> None:
        """See `forks`. If a thread of the parent held the lock, weights may be half prepared and are prepared again."""
        if is_held(self._lock):
            self._lock = threading.RLock()
            self.weights.outdate()
        if is_held(self._turn):
            self._turn = threading.RLock()

    # options

    def check(self, options: FuseConfig) -> None:
        """Checks that `options` give this tower valid limits, whatever memory is free.

        Raises ValueError, which names the option, if they do not, and TypeError unless `options` is a `FuseConfig`.
        """
        check_config(options)
        self._limits(options, torch.float32, 0)

    def limits(self, dtype: torch.dtype, free_bytes: int) -> Limits:
        """The budgets of this tower in `dtype` if `free_bytes` of device memory are free."""
        options = self.config
        if options.memory is None:
            return self._limits(options, dtype, free_bytes)
        weights = self.weights.held_bytes()
        most = int(SMALL_MEMORY * weights) if options.memory == SMALL else int(options.memory) * MIB
        return limits_within(self.spec, dtype, most - weights, options.max_items, options.max_frames)

    def _limits(self, options: FuseConfig, dtype: torch.dtype, free_bytes: int) -> Limits:
        return limits_for(self.spec, dtype, free_bytes, options.token_budgets, options.max_items, options.max_frames)

    def reconfigure(self, config: FuseConfig) -> None:
        """Replaces the options. Graphs are released, and captured again with the new options.

        Raises:
            TypeError: `config` is not a `FuseConfig`.
            ValueError: this tower cannot meet an option.
        """
        self.check(config)
        with self._lock:
            self._release_graphs()
            self._drop_runtime()  # first, so that an interrupt in between leaves no runtime of the old options
            self.config = config

    # releasing

    def release(self) -> None:
        """Releases all memory: graphs, static buffers, prepared weights, and old parameters that the tower replaced."""
        with self._lock:
            self._tell_of_graphs_of_others()
            self._release_graphs()
            self.weights.release()
            runtime = self.runtime
            if runtime is not None and runtime.no_graphs == MOVING:
                self.runtime = None

    def end(self) -> None:
        """Releases everything for good."""
        self.ended = True
        self.release()
        self._drop_runtime()

    def drop_graphs(self) -> None:
        """Forgets captured graphs and failed captures, and keeps the static buffers."""
        graphs = self.graphs()
        if graphs is not None:
            graphs.manager.drop_graphs()

    def _release_graphs(self) -> None:
        """Releases graphs and static buffers."""
        graphs = self.graphs()
        if graphs is not None:
            graphs.manager.release()

    def _drop_runtime(self) -> None:
        """Drops the runtime and cancels its compilations; the next call creates another."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None and runtime.kernels is not None:
            runtime.kernels.cancel()

    def _tell_of_graphs_of_others(self) -> None:
        """Warns, before memory of weights is freed, of CUDA graphs that read it and are not ours to forget."""
        if self.in_graphs_of_others:
            self.in_graphs_of_others = False
            logger.warning(
                "fusedvit: a CUDA graph that you captured of this tower reads prepared weights, which are freed now: "
                "do not replay it, capture it again"
            )

    def _weights_moved(self) -> None:
        """Forgets graphs, which read the old addresses of weights; after `MOST_MOVES` moves, for good."""
        self._tell_of_graphs_of_others()
        if self.weights.moves <= MOST_MOVES:
            self.drop_graphs()
            return
        self._release_graphs()
        self.runtime = None

    # weights

    def ensure_weights(self, parameter: torch.Tensor, kind: int) -> Reason | None:
        """Ensures that there are weights for pixels of `kind`, on the device and in the dtype of `parameter`; returns
        the reason if they cannot be prepared."""
        version = self.weights.version
        if self.weights.fits(parameter, kind):
            return None
        return self.weights.refusal() or self.prepare(version)

    def prepare(self, version: int) -> Reason | None:
        """Prepares weights while nothing runs on the old ones, unless another thread has prepared them since
        `version`."""
        with self.nothing_launched():
            return self.prepare_now(version)

    def prepare_now(self, version: int) -> Reason | None:
        """As `prepare`, within `nothing_launched`."""
        weights, kinds = self.weights, self._kinds()
        if self.ended:
            return Reason(fallback.RELEASED)
        if (weights.version != version and self._fits(kinds)) or weights.follow(kinds):
            return None
        return weights.prepare()

    def _kinds(self) -> tuple[int, ...]:
        """Every kind of pixels that weights must take; a kind is in `normalizations` before its pixels arrive."""
        return FLOATS, *(STILL_BYTES if still else BYTES for still in tuple(self.normalizations))

    def _fits(self, kinds: Iterable[int]) -> bool:
        """Whether weights are prepared for pixels of all of `kinds`."""
        parameter = self.weights.first_parameter()
        return all(self.weights.fits(parameter, kind) for kind in kinds)

    def refresh(self) -> None:
        """Prepares weights, even if they are up to date.

        Raises:
            CannotPrepare: the tower as it stands cannot run fused.
        """
        with self.nothing_launched():
            self.weights.outdate()
            _raise_if(self.weights.prepare())

    @contextlib.contextmanager
    def nothing_launched(self) -> Iterator[None]:
        """A context in which no other thread prepares weights or launches graphs, and nothing launched still runs.

        A waiting thread holds `_turn`, so that a thread which refreshes in a loop lets it in.
        """
        try:
            held = self._lock._is_owned()  # type: ignore[attr-defined]  # whoever waits with `_turn` waits for this thread
            with contextlib.nullcontext() if held else self._turn:
                self._lock.acquire()  # inside `try`, as an interrupt may arrive when `acquire` returns
            graphs = self.graphs()
            if graphs is None:
                yield
                return
            with graphs.manager.exclusive():
                graphs.manager.wait()
                yield
        finally:
            with contextlib.suppress(RuntimeError):  # if interrupted while waiting, this thread does not hold the lock
                self._lock.release()

    # what a call runs on

    def graphs(self) -> TowerGraphs | None:
        """The tower's graphs; None if there are none, or none yet."""
        runtime = self.runtime  # read once, as `reconfigure` may drop it meanwhile
        return None if runtime is None else runtime.graphs

    def runtime_on(self, parameter: torch.Tensor) -> Runtime:
        """The runtime for the device and dtype of `parameter`: with graphs on a GPU, unless they are off or the current
        stream is being captured."""
        device, dtype = parameter.device, parameter.dtype
        known = self.runtime
        if known is None or known.device != device or known.dtype != dtype:
            known = self._new_runtime(device, dtype)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.in_graphs_of_others = True
            return replace(known, graphs=None, no_graphs=INSIDE_CAPTURE, compile_now=True)
        return known

    def _new_runtime(self, device: torch.device, dtype: torch.dtype) -> Runtime:
        with self._lock:
            known = self.runtime
            if known is not None and known.device == device and known.dtype == dtype:
                return known
            self._release_graphs()
            compiled_kernels.enter_kernels(device)
            why_not = NO_GPU if device.type != "cuda" else "" if self.config.graphs else NO_GRAPHS
            if not why_not and self.weights.moves > MOST_MOVES:
                why_not = MOVING
            limits = None if why_not else self.limits(dtype, torch.cuda.mem_get_info(device)[0])
            graphs = None
            if limits is not None:
                graphs = new_graphs(self.spec, limits, self.weights.get, device, dtype)
            kernels = None if device.type != "cuda" else self._new_loader(device, dtype, limits)
            now = self.config.strict or self.config.compile == "now"
            self.runtime = Runtime(self.spec, self.weights, device, dtype, graphs, why_not, limits, kernels, now)
            return self.runtime

    def _new_loader(self, device: torch.device, dtype: torch.dtype, limits: Limits | None) -> KernelLoader:
        runs = MetaRuns(self.spec, dtype, limits, functools.partial(Target.of, device))
        ladder = limits.token_budgets if limits is not None else ()
        return KernelLoader(runs.launch, self.weights.get, ladder, service_of(os.getpid()), device)

    def expect_kernels(self, device: torch.device) -> None:
        """Starts the compiling process before the first weights are prepared, as kernels may be missing."""
        if device.type == "cuda" and self.runtime is None:
            compiled_kernels.enter_kernels(device)
            service_of(os.getpid()).start_early()

    # before the first call

    def warm_up(self, progress: Progress | None, calls: Sequence[Sequence[Item]] | None) -> None:
        """Prepares weights, then compiles and captures the budgets that `calls` replay, or all budgets for None.

        Raises:
            CannotPrepare: the tower as it stands cannot run fused, or kernels cannot be compiled.
            TypeError: `progress` is not callable.
        """
        if progress is not None and not callable(progress):
            raise TypeError(f"fusedvit: progress must be a function, as tqdm.tqdm is, got {type(progress).__name__}")
        with self.nothing_launched():
            if not self._fits(self._kinds()):
                _raise_if(self.prepare_now(self.weights.version))
            runtime = self.runtime_on(self.weights.first_parameter())
            budgets = _budgets_of(runtime, calls)
        runs = [Run(self.weights.kinds, graph_budget=budget) for budget in budgets]
        if runtime.kernels is None:
            self._capture(runtime, progress, budgets)
            return
        try:
            with runtime.kernels.cached(runs):  # if the kernels of the largest are cached, the others' mostly are too
                self._capture(runtime, iter, sorted(budgets)[-1:])
                self._capture(runtime, progress, budgets)
        except KernelMissing:
            self._compile_and_capture(runtime, runtime.kernels, runs, progress)

    def _compile_and_capture(
        self, runtime: Runtime, kernels: KernelLoader, runs: Collection[Run], progress: Progress | None
    ) -> None:
        try:
            kernels.need(runs, wait=True)  # without the lock: other threads may call while this one waits
            with kernels.compiling():
                self._capture(runtime, progress, [run.graph_budget for run in runs])
        except KernelsNotReady as why:
            raise CannotPrepare(Reason(fallback.NOT_READY, str(why))) from why

    def _capture(self, runtime: Runtime, progress: Progress | None, budgets: Collection[int]) -> None:
        """Captures graphs one by one, the largest first. `progress` runs under no lock: it may wait for threads that
        use the tower."""
        self._capture_one(runtime, None)
        if runtime.graphs is not None:
            for budget in (progress or _bar)(tuple(sorted(budgets, reverse=True))):
                self._capture_one(runtime, budget)

    def _capture_one(self, runtime: Runtime, budget: int | None) -> None:
        """Prepares weights again if the tower has changed, and captures the graph of `budget`, if one is given. Does
        nothing for it once the tower was unfused or its options were replaced."""
        with self.nothing_launched():
            graphs = self.graphs()
            if budget is not None and (self.ended or graphs is not runtime.graphs):
                return
            if not self._unchanged():
                _raise_if(self.prepare_now(self.weights.version))
            if budget is not None and graphs is not None:
                graphs.manager.ready(budget)

    def _unchanged(self) -> bool:
        try:
            return self.weights.read_back(self.weights.mark(), True, None).unchanged
        except WeightsReleased:
            return False


def _raise_if(reason: Reason | None) -> None:
    if reason is not None:
        raise CannotPrepare(reason)


def _budgets_of(runtime: Runtime, calls: Sequence[Sequence[Item]] | None) -> Collection[int]:
    """The token budgets that calls of these items replay, or all budgets for None."""
    if runtime.graphs is None:
        return ()
    limits = runtime.graphs.limits
    return limits.token_budgets if calls is None else budgets_of(calls, runtime.spec.merge_unit, limits)


def _loaded_ops(prepared: weakref.ref[PreparedTower], device: torch.device) -> Ops:
    """Operations on `device` that need no compiler: PyTorch's own until the kernels are ready."""
    alive = prepared()
    runtime = None if alive is None else alive.runtime
    ready = runtime is not None and runtime.kernels is not None and runtime.kernels.ready
    return ops_for(device) if ready else TORCH


def _call_living(prepared: weakref.ref[PreparedTower], method: Callable[..., None], *given: object) -> None:
    """Calls `method` of a `PreparedTower`, unless it was freed; its own parts reference it weakly."""
    alive = prepared()
    if alive is not None:
        method(alive, *given)
