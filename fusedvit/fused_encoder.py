"""The handle of a fused tower: it runs calls fused where they can be, and says why where they cannot."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedvit.checks import fallback
from fusedvit.checks.checked_tower import CheckedTower
from fusedvit.config import FuseConfig
from fusedvit.families.base import Family
from fusedvit.graphs.limits import Limits
from fusedvit.graphs.manager import MIB
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.model.items import Item
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime import speculative_replay
from fusedvit.runtime.captured_encoder import TowerGraphs, limits_for, new_graphs
from fusedvit.runtime.inputs import Grid, Inputs, check_grid, check_inputs, check_items
from fusedvit.runtime.runner import Runtime, budgets_of, on_device, run
from fusedvit.runtime.speculative_replay import SpeculativeReplay
from fusedvit.runtime.weight_cache import WeightCache
from fusedvit.stats import Stats, compiles, describe

NO_GPU = "no GPU"  # why a fused call runs without graphs, as counted in `stats()`
NO_GRAPHS = "graphs off"
CAPTURING = "inside another capture"


class Attempt(NamedTuple):
    """What one run of a call gave.

    Attributes:
        outputs: None where the weights changed before there were any.
        weights_version: of the prepared weights that it began with.
        unchanged: they are those of the tower as it stands.
    """

    outputs: EncoderOutputs | None
    items: list[Item]
    weights_version: int
    unchanged: bool


class FusedEncoder:
    """One fused tower: what `fusedvit.fuse` returns.

    Copies and pickles keep the configuration and make their own weights, graphs and counters.
    """

    def __init__(self, tower: nn.Module, family: Family, spec: VisionSpec, config: FuseConfig) -> None:
        self.tower = tower
        self.family = family
        self.spec = spec
        self.config = config
        self._start()

    def _start(self) -> None:
        self._stats = Stats()
        self._lock = threading.RLock()
        self._runtime: Runtime | None = None
        self._source = CheckedTower(self.tower, self.family, self.spec)
        self.weights = WeightCache(self._source, self.drop_graphs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tower", "family", "spec", "config")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        state = self._source.reason()
        where = self.weights.first_parameter()
        how = "runs fused" if state is None else f"runs its original code: {state}"
        return (
            f"<FusedEncoder of {type(self.tower).__name__} ({self.family.name}), {where.dtype} on {where.device}: "
            f"{how}; {self._stats.fused} of {self._stats.calls} calls fused>"
        )

    # what a user calls

    def stats(self) -> dict[str, Any]:
        """Counters as plain values: calls, by path and reason, items, tokens, graphs, and MiB held by what.

        `compiles` counts kernels compiled in this process; `graphs` is there once the tower has run on a GPU.
        """
        more: dict[str, Any] = {
            "refreshes": self.weights.version,
            "compiles": compiles(),
            "weights_mib": self.weights.held_bytes() / MIB,
        }
        graphs = self._graphs()
        if graphs is not None:
            more["graphs"] = graphs.manager.stats.as_dict() | {
                "token_budgets": graphs.limits.token_budgets,
                "max_items": graphs.limits.max_items,
                "max_frames": graphs.limits.max_frames,
                "buffers_mib": graphs.encoder.held_bytes() / MIB,
                "held_mib": graphs.manager.held_bytes() / MIB,
            }
        return self._stats.as_dict() | more

    def report(self) -> str:
        """What is fused, on which operations, what memory it holds, and why anything is not: at most 25 lines."""
        return describe(self.tower, self.family.name, self.spec, self.stats(), self._source.reason())

    def warmup(
        self,
        progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
        *,
        calls: Iterable[Grid] | None = None,
    ) -> None:
        """Prepares weights, and compiles and captures every token budget, the largest first; else the first calls do.

        Args:
            progress: wraps the iterable of budgets, as `tqdm.tqdm` or `rich.progress.track` do; a bar on a terminal's
                standard error if None.
            calls: the `grid_thw` of calls to come, if they are known: the budgets that these replay are captured now,
                any other by the first call that needs it.

        Raises:
            RuntimeError: the tower as it stands cannot run fused.
            TypeError, ValueError: one of `calls` is no grid.
        """
        wanted = None if calls is None else [self._items_of(grid) for grid in calls]
        parameter = self.weights.first_parameter()
        with self._lock, on_device(parameter.device):
            self._raise_if(self._ensure_weights(parameter))
            graphs = self._runtime_on(parameter).graphs
            if graphs is not None:
                unit = self.spec.merge_unit
                graphs.capture(progress, None if wanted is None else budgets_of(wanted, unit, graphs.limits))

    def _items_of(self, grid_thw: Grid) -> list[Item]:
        rows = check_grid(grid_thw).tolist()
        return check_items(rows, sum(t * h * w for t, h, w in rows), self.spec.merge_size)

    def refresh(self) -> None:
        """Prepares the weights again from the tower's parameters, at once.

        Raises:
            RuntimeError: the tower as it stands cannot run fused; the message says why.
        """
        with on_device(self.weights.first_parameter().device):
            self._raise_if(self._prepare_weights(self.weights.version))

    def _raise_if(self, reason: str | None) -> None:
        if reason is not None:
            raise RuntimeError(f"the tower cannot run fused: {reason} ({fallback.ADVICE[reason]})")

    def reconfigure(self, config: FuseConfig) -> None:
        """Takes new options; graphs are given back and captured again by them."""
        with self._lock:
            self.release()
            self.config = config
            self._runtime = None

    def release(self) -> None:
        """Gives back graphs and static buffers; they are captured again when next needed."""
        with self._lock:
            graphs = self._graphs()
            if graphs is not None:
                graphs.manager.release()

    def drop_graphs(self) -> None:
        """Forgets captured graphs and failed captures, and keeps the static buffers."""
        graphs = self._graphs()
        if graphs is not None:
            graphs.manager.drop_graphs()

    def graphs(self) -> TowerGraphs:
        """The tower's graphs, for measuring and testing.

        Raises:
            RuntimeError: there are none (no GPU, or `graphs=False`).
        """
        graphs = self._graphs()
        if graphs is None:
            raise RuntimeError("this tower has no graphs: it has not run on a GPU, or graphs are off")
        return graphs

    def limits(self, dtype: torch.dtype, free_bytes: int) -> Limits:
        """The budgets that this tower has in `dtype` where `free_bytes` of device memory are free."""
        options = self.config
        return limits_for(self.spec, dtype, free_bytes, options.token_budgets, options.max_items, options.max_frames)

    # a call

    def __call__(self, pixel_values: torch.Tensor, grid_thw: Grid, extra: dict[str, Any]) -> EncoderOutputs | None:
        """Runs fused, or returns None where the call must take the original code: counted, warned of once.

        Args:
            pixel_values: `[patches, patch_width]` of any float dtype, on any device.
            grid_thw: `[items, 3]` integers (t, h, w) in patches: a tensor on any device, or a list.
            extra: the call's other arguments.

        Raises:
            RuntimeError: `strict`, and the call must take the original code.
            TypeError, ValueError: see `runtime.inputs`; nothing was launched, or only a replay without items.
        """
        if torch.compiler.is_compiling():  # the graph break that follows must not see what comes below
            self._stats.add(calls=1)
            return self._fall_back(fallback.COMPILING)
        replay = speculative_replay.begin(self._runtime, pixel_values, grid_thw)
        try:
            self._stats.add(calls=1)
            return self._checked_call(pixel_values, grid_thw, extra, replay)
        finally:
            if replay is not None:
                replay.drop()

    def _checked_call(
        self, pixel_values: torch.Tensor, grid_thw: Grid, extra: dict[str, Any], replay: SpeculativeReplay | None
    ) -> EncoderOutputs | None:
        """Checks the call and runs it until a run began and ended with the weights that the tower has."""
        reason = fallback.reason_of_call(self.tower, pixel_values, grid_thw, extra)
        if reason is not None:
            return self._fall_back(reason)
        parameter = self.weights.first_parameter()
        with on_device(parameter.device):
            reason = self._ensure_weights(parameter)
            if reason is not None:
                return self._fall_back(reason)
            inputs = check_inputs(pixel_values, grid_thw, self.spec, parameter.device)
            while True:
                done = self._run(inputs, self._runtime_on(parameter), replay)
                if done.unchanged:
                    break
                reason = self._prepare_weights(done.weights_version)
                if reason is not None:
                    return self._fall_back(reason)
                parameter, replay = self.weights.first_parameter(), None
        self._stats.add(fused=1, items=len(done.items), tokens=sum([item.tokens for item in done.items]))
        return done.outputs

    def _run(self, inputs: Inputs, runtime: Runtime, replay: SpeculativeReplay | None) -> Attempt:
        """One run, and one host read at most: behind the launches, or before them where the plan hangs on the grid."""
        weights, unread = self.weights, inputs.grid is not None
        check_content = self.config.watch_data and runtime.no_graphs != CAPTURING
        if replay is not None:
            version, mark = replay.weights_version, replay.mark
        else:
            version, mark = weights.version, weights.mark() if check_content or unread else None
        items, outputs = inputs.items, None
        if items is not None:
            outputs = run(runtime, inputs.pixels, items, self._stats.eager)
        found = weights.read_back(mark, check_content, inputs.grid)
        if items is None:
            items = check_items(found.rows, inputs.pixels.shape[0], self.spec.merge_size)
            outputs = None if replay is None else replay.accept(items)
            if outputs is None and found.unchanged:
                outputs = run(runtime, inputs.pixels, items, self._stats.eager)
        return Attempt(outputs, items, version, found.unchanged and weights.version == version)

    def _fall_back(self, reason: str) -> EncoderOutputs | None:
        """Counts a call that takes the original code.

        Raises:
            RuntimeError: `strict`.
        """
        if self.config.strict:
            raise RuntimeError(f"strict: this call would run the original code: {reason} ({fallback.ADVICE[reason]})")
        self._stats.count_original(reason, type(self.tower).__name__)
        return None

    # weights and graphs

    def _ensure_weights(self, parameter: torch.Tensor) -> str | None:
        """Prepares weights if there are none for the device and dtype of `parameter`; says why there can be none."""
        version = self.weights.version
        return None if self.weights.fits(parameter) else self._prepare_weights(version)

    def _prepare_weights(self, version: int) -> str | None:
        """Prepares weights while nothing runs on the old ones, unless another thread has since `version`."""
        graphs = self._graphs()
        with graphs.manager.exclusive() if graphs is not None else self._lock:
            if self.weights.version != version:
                return None
            if graphs is not None:
                graphs.manager.wait()
            return self.weights.prepare()

    def _graphs(self) -> TowerGraphs | None:
        return None if self._runtime is None else self._runtime.graphs

    def _runtime_on(self, parameter: torch.Tensor) -> Runtime:
        """What to run on: with graphs on a GPU, unless they are off or somebody else captures."""
        device, dtype = parameter.device, parameter.dtype
        known = self._runtime
        if known is None or known.device != device or known.dtype != dtype:
            known = self._new_runtime(device, dtype)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return replace(known, graphs=None, no_graphs=CAPTURING)
        return known

    def _new_runtime(self, device: torch.device, dtype: torch.dtype) -> Runtime:
        with self._lock:
            known = self._runtime
            if known is not None and known.device == device and known.dtype == dtype:
                return known
            self.release()
            if device.type != "cuda" or not self.config.graphs:
                why_not = NO_GPU if device.type != "cuda" else NO_GRAPHS
                self._runtime = Runtime(self.spec, self.weights, device, dtype, no_graphs=why_not)
                return self._runtime
            limits = self.limits(dtype, torch.cuda.mem_get_info(device)[0])
            graphs = new_graphs(self.spec, limits, self.weights.get, device, dtype)
            self._runtime = Runtime(self.spec, self.weights, device, dtype, graphs, limits=limits)
            return self._runtime
