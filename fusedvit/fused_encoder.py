"""The handle of a fused tower: it keeps prepared weights true to the parameters, and runs the encoder."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fusedvit.checks import fallback
from fusedvit.checks.change_detection import reason_of_tower
from fusedvit.config import FuseConfig
from fusedvit.families.base import Family
from fusedvit.graphs.manager import MIB
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime import speculative_replay as guesses
from fusedvit.runtime.inputs import Grid, Item, check_grid, check_items, check_pixels
from fusedvit.runtime.readback import lies_on_gpu, on_device
from fusedvit.runtime.runner import CAPTURING, NO_GPU, NO_GRAPHS, Graphs, Tower, budgets_of, run
from fusedvit.runtime.tower_graphs import capture_budgets, new_graphs
from fusedvit.runtime.weight_cache import PreparedWeights
from fusedvit.stats import Stats, compiles, describe


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
        self._graphs: Graphs | None = None
        self._graphs_for: tuple[torch.device, torch.dtype] | None = None
        self._last: guesses.Guess | None = None
        self.prepared = PreparedWeights(self.tower, self.family, self.spec, self._weights_moved)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tower", "family", "spec", "config")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # what a user calls

    def stats(self) -> dict[str, Any]:
        """Counters as plain values: calls, by path and reason, items, tokens, graphs, and MiB held by what.

        `compiles` counts kernels compiled in this process; `graphs` is there once the tower has run on a GPU.
        """
        graphs = self._graphs
        more: dict[str, Any] = {
            "refreshes": self.prepared.made,
            "compiles": compiles(),
            "weights_mib": self.prepared.held_bytes() / MIB,
        }
        if graphs is not None:
            more["graphs"] = graphs.manager.stats.as_dict() | {
                "token_budgets": graphs.limits.token_budgets,
                "max_items": graphs.limits.max_items,
                "max_frames": graphs.limits.max_frames,
                "buffers_mib": graphs.program.held_bytes() / MIB,
                "held_mib": graphs.manager.held_bytes() / MIB,
            }
        return self._stats.as_dict() | more

    def report(self) -> str:
        """What is fused, on which operations, what memory it holds, and why anything is not."""
        reason = reason_of_tower(self.tower, self.family, self.spec)
        return describe(self.tower, self.family.name, self.spec, self.stats(), reason)

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
        parameter = next(self.tower.parameters())
        wanted = None if calls is None else [self._items_of(grid) for grid in calls]
        with self._lock, on_device(parameter.device):
            self._make_true(parameter)
            graphs, _ = self._graphs_on(parameter)
            if graphs is not None:
                only = None if wanted is None else budgets_of(graphs, wanted, self.spec.merge_unit)
                capture_budgets(graphs, progress, only)

    def _items_of(self, grid_thw: Grid) -> list[Item]:
        rows = check_grid(grid_thw).tolist()
        return check_items(rows, sum(t * h * w for t, h, w in rows), self.spec.merge_size)

    def refresh(self) -> None:
        """Makes the prepared weights again from the tower's parameters, at once.

        Raises:
            RuntimeError: the tower as it stands cannot run fused; the message says why.
        """
        reason = self.prepared.reason()
        if reason is not None:
            raise RuntimeError(f"the tower cannot run fused: {reason} ({fallback.ADVICE[reason]})")
        with on_device(next(self.tower.parameters()).device):
            self._make()

    def reconfigure(self, config: FuseConfig) -> None:
        """Takes new options; graphs are given back and captured again by them."""
        with self._lock:
            self.release()
            self.config = config
            self._graphs = self._graphs_for = None

    def release(self) -> None:
        """Gives back graphs and static buffers; they are captured again when next needed."""
        with self._lock:
            if self._graphs is not None:
                self._graphs.manager.release()

    def drop_graphs(self) -> None:
        """Forgets captured graphs and failed captures, and keeps the static buffers."""
        if self._graphs is not None:
            self._graphs.manager.drop_graphs()

    def graphs(self) -> Graphs:
        """The tower's graphs, for measuring and testing.

        Raises:
            RuntimeError: there are none (no GPU, or `graphs=False`).
        """
        if self._graphs is None:
            raise RuntimeError("this tower has no graphs: it has not run on a GPU, or graphs are off")
        return self._graphs

    # a call

    def __call__(self, pixel_values: torch.Tensor, grid_thw: Grid, extra: dict[str, Any]) -> EncoderOutputs | None:
        """Runs fused, or returns None where the call must take the original code: counted, warned of once.

        Args:
            pixel_values: `[patches, patch_width]` of any float dtype, on any device.
            grid_thw: `[items, 3]` integers (t, h, w) in patches: a tensor on any device, or a list.
            extra: the call's other arguments.

        Raises:
            RuntimeError: `strict`, and the call must take the original code.
            TypeError, ValueError: see `fusedvit.runtime.inputs`; nothing has been launched then, or only a replay of no items.
        """
        if torch.compiler.is_compiling():  # which knows no way back into what follows
            self._stats.add(calls=1)
            return self._checked(pixel_values, grid_thw, extra, None)
        made, watch = self.prepared.made, self.config.watch_data
        guess = guesses.begin_again(self._last, self._graphs, pixel_values, grid_thw, made, watch)
        try:
            self._stats.add(calls=1)
            return self._checked(pixel_values, grid_thw, extra, guess)
        finally:
            if guess is not None:
                guess.drop()

    def _checked(
        self, pixel_values: torch.Tensor, grid_thw: Grid, extra: dict[str, Any], guess: guesses.Guess | None
    ) -> EncoderOutputs | None:
        reason = fallback.reason_of_call(self.tower, pixel_values, grid_thw, extra)
        if reason is None and not self.prepared.fits(self.prepared.parameter()):
            reason = self.prepared.reason()
        while reason is None:
            outputs, items, made, true = self._run(pixel_values, grid_thw, self.prepared.parameter(), guess)
            if self.prepared.made != made:
                continue  # another thread made them anew meanwhile: this run may have used either
            if true:
                self._stats.add(fused=1, items=len(items), tokens=sum(item.tokens for item in items))
                return outputs
            reason = self.prepared.reason()
            if reason is None:
                self._make()
        self._last = None
        if self.config.strict:
            raise RuntimeError(f"strict: this call would run the original code: {reason} ({fallback.ADVICE[reason]})")
        self._stats.count_original(reason, type(self.tower).__name__)
        return None

    def _run(
        self, pixel_values: torch.Tensor, grid_thw: Grid, parameter: torch.Tensor, guess: guesses.Guess | None
    ) -> tuple[EncoderOutputs, list[Item], int, bool]:
        """One run, which making of the weights it began with, and whether the tower is what these were made from: they
        are known to be true then if that making is still the last.

        At most one host read: after the launches, or before them of a grid of which nothing can be guessed.
        """
        check_pixels(pixel_values, self.spec)
        grid = check_grid(grid_thw)
        unread = lies_on_gpu(grid)
        items = [] if unread else check_items(grid.tolist(), pixel_values.shape[0], self.spec.merge_size)
        with on_device(parameter.device):
            self._make_true(parameter)
            return self._run_begun(pixel_values, grid.to(parameter.device) if unread else items, parameter, guess)

    def _run_begun(
        self,
        pixels: torch.Tensor,
        grid: torch.Tensor | list[Item],
        parameter: torch.Tensor,
        guess: guesses.Guess | None,
    ) -> tuple[EncoderOutputs, list[Item], int, bool]:
        """With `grid` on the parameter's device: what it probably holds is launched, if not yet, then it is read.

        The tower is walked over when the GPU works.
        """
        watching = self._watching(parameter.device)
        graphs, _ = self._graphs_on(parameter)
        tower, made = self._tower(parameter), self.prepared.made
        guess, begun, made = guesses.begun(guess, tower, pixels, grid, graphs, made, watching)
        outputs, items, same, true = guesses.settled(guess, tower, begun, grid, pixels.shape[0], watching)
        if outputs is None and same:
            outputs = self._launch(pixels, items, parameter)
        if watching and items is grid:
            same, _, true = self.prepared.look(begun, True, None).done(self.prepared.true)
        if outputs is None or not same:
            self._make()
            made, outputs, true = self.prepared.made, self._launch(pixels, items, parameter), self.prepared.true()
        elif true is None:
            true = self.prepared.true()
        self._last = guess
        return outputs, items, made, true

    def _tower(self, parameter: torch.Tensor) -> Tower:
        ladder = () if self._graphs is None else self._graphs.limits.token_budgets
        return Tower(self.spec, self.prepared, parameter.device, parameter.dtype, ladder)

    def _launch(self, pixels: torch.Tensor, items: list[Item], parameter: torch.Tensor) -> EncoderOutputs:
        graphs, why_not = self._graphs_on(parameter)
        return run(self._tower(parameter), pixels, items, graphs, self._stats.eager, why_not)

    def _watching(self, device: torch.device) -> bool:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self.config.watch_data and not capturing

    def _make_true(self, parameter: torch.Tensor) -> None:
        if not self.prepared.fits(parameter):
            with self._lock:  # threads that come together make them once
                if not self.prepared.fits(parameter):
                    self._make()

    def _make(self) -> None:
        """Prepares weights while nothing runs on the old ones."""
        graphs = self._graphs
        with graphs.manager.exclusive() if graphs is not None else self._lock:
            if graphs is not None:
                graphs.manager.wait()
            self.prepared.make()

    def _weights_moved(self) -> None:
        if self._graphs is not None:
            self._graphs.manager.drop_graphs()

    def _graphs_on(self, parameter: torch.Tensor) -> tuple[Graphs | None, str]:
        """The graphs to replay, or None and why."""
        device = parameter.device
        if device.type != "cuda":
            return None, NO_GPU
        if not self.config.graphs:
            return None, NO_GRAPHS
        if torch.cuda.is_current_stream_capturing():
            return None, CAPTURING
        with self._lock:
            if self._graphs_for != (device, parameter.dtype):
                self.release()
                self._graphs = new_graphs(self.spec, self.config, self.prepared.get, device, parameter.dtype)
                self._graphs_for = (device, parameter.dtype)
        return self._graphs, ""
