"""A replay that begins before the host has checked the call: the host checks it and reads the grid while the GPU works.

The shapes of the caller's tensors give the patch tokens and the number of items, and these nearly always determine the
plan: one batch, of the smallest token budget with room, its rows in the caller's order. The device loads the grid
itself, or a copy if the grid is on the host, and runs no item if the grid does not fit this call's pixels
(`kernels.load_inputs`). Once the host has read the grid, `attempt` accepts the replay if the plan is as predicted, or
drops it. A wrong prediction costs a replay, but never a wrong output.

For padded images the device first makes rows and a grid. Outputs have room for the padding, and are copied without it
once the host knows which rows are padding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from fusedvit.errors import Reason
from fusedvit.graphs.packing import sole_budget
from fusedvit.kernels.load_inputs import BYTES, GRID_DTYPES, MAX_ROWS, PIXEL_DTYPES, STILL_BYTES, can_load
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.model.items import Item
from fusedvit.model.spec import VisionSpec
from fusedvit.runtime.captured_encoder import TowerGraphs
from fusedvit.runtime.inputs import Inputs, load_padded, without_padding
from fusedvit.runtime.kernel_loader import Run
from fusedvit.runtime.readback import StreamMark
from fusedvit.runtime.runner import Runtime, run_planned, sole_batch


@dataclass(slots=True)
class SpeculativeReplay:
    """A replay in progress.

    Attributes:
        graphs: the tower's graphs.
        merge_unit: patch tokens that are merged into one.
        rows: patch rows of the call, with padding.
        budget: the token budget whose graph is replayed.
        mark: the point in the caller's stream between loading inputs and the graph; the read of grid and weights waits
            for it.
        weights_version: the version of the prepared weights that the replay runs with.
        outputs: where its outputs will be; None once it is accepted or dropped.
        inputs: padded images without their padding.
    """

    graphs: TowerGraphs
    merge_unit: int
    rows: int
    budget: int
    mark: StreamMark | None
    weights_version: int
    outputs: EncoderOutputs | None
    inputs: Inputs | None = None

    def accept(self, items: Sequence[Item]) -> EncoderOutputs | None:
        """The outputs, if the replay was the plan for `items`; else drops the replay and returns None."""
        outputs, padded = self.outputs, self.inputs is not None
        batch = sole_batch(items, self.merge_unit, self.graphs.limits, self.rows if padded else 0)
        if outputs is None or batch is None or batch.budget != self.budget:
            self.drop()
            return None
        self.outputs = None
        self.graphs.manager.count_replay(batch)
        tokens = sum([item.tokens for item in items])
        if not padded or tokens == self.rows:
            return outputs
        merged = tuple(plane[: tokens // self.merge_unit].clone() for plane in outputs.merged)
        return EncoderOutputs(outputs.hidden[:tokens].clone(), merged)  # a view would keep the padding's memory alive

    def drop(self) -> None:
        """Counts a replay that was not accepted as a misprediction. Its static buffers need no clean-up."""
        if self.outputs is not None:
            self.outputs = None
            self.graphs.manager.count_misprediction()


def begin(runtime: Runtime | None, pixels: object, grid: object, marked: bool = False) -> SpeculativeReplay | None:
    """Enqueues a replay if the shapes of `pixels` and `grid` determine the plan; else returns None.

    The GPU is idle until the replay is launched, so only the conditions of the launch are checked here.

    Args:
        runtime: the runtime of the last fused call; None if there was none.
        pixels, grid: the caller's arguments, unchecked.
        marked: the pixels came as `BytePixels`, so they may be bytes.
    """
    if runtime is None or runtime.graphs is None or not _tells_its_shape(pixels, grid, runtime, marked):
        return None
    assert isinstance(pixels, torch.Tensor)
    graphs, padded, unit = runtime.graphs, runtime.spec.padded, runtime.spec.merge_unit
    rows = pixels.shape[0] * pixels.shape[1] if padded else pixels.shape[0]
    there = grid if type(grid) is torch.Tensor and grid.device == runtime.device else None
    items = _items_of(grid, rows, runtime.spec) if there is None else ()
    limits = graphs.manager.limits
    if there is None:
        batch = sole_batch(items, unit, limits)
        budget = None if batch is None else batch.budget
    else:
        fits = not rows % unit and (not padded or there.shape[0] <= limits.max_frames)
        budget = sole_budget(rows // unit, there.shape[0], limits) if fits else None
    if budget is None:
        return None
    weights = runtime.weights
    found = SpeculativeReplay(graphs, unit, rows, budget, None, weights.version, None)

    def load(budget: int) -> bool:
        on_device = graphs.encoder.grid(items) if there is None else there
        if padded:
            images = Inputs(pixels, on_device, None, padded=True)
            found.inputs = load_padded(images, runtime.spec, runtime.device, runtime.dtype)
            graphs.encoder.load(budget, found.inputs.table, found.inputs.pixels, padded=True)
        else:
            graphs.encoder.load(budget, on_device, pixels)
        # Conditions of the graph, not of loading, are checked here, while the GPU loads inputs.
        if not weights.in_place():  # the graph would read freed memory
            return False
        found.mark = weights.mark()
        return weights.version == found.weights_version

    def store(budget: int) -> None:
        found.outputs = runtime.new_outputs(rows)
        graphs.encoder.store(budget, found.outputs)

    return found if graphs.manager.replay_if_captured(budget, load, store) else None


class Attempt(NamedTuple):
    """The result of one run of a call.

    Attributes:
        outputs: None if the weights changed before there were outputs.
        items: the items of the call.
        weights_version: the version of the prepared weights that the run began with.
        unchanged: the tower still is what these weights were prepared from.
    """

    outputs: EncoderOutputs | None
    items: list[Item]
    weights_version: int
    unchanged: bool


def attempt(
    runtime: Runtime,
    inputs: Inputs,
    replay: SpeculativeReplay | None,
    version: int,
    check_content: bool,
    eager_runs: Counter[str],
) -> Attempt | Reason:
    """Runs a call once, by the replay that was begun or by a planned run; or returns why the original code must run.

    The host reads from the device at most once: after the launches, or before them if the plan depends on the grid.

    Args:
        inputs: the checked inputs.
        version: the version of the weights that the run begins with.
        check_content: whether fingerprints of the parameters are compared.
        eager_runs: counts runs outside a graph, by reason.

    Raises:
        ValueError: the grid does not match the pixels.
        WeightsReleased: the weights were released meanwhile.
    """
    weights, spec, unread = runtime.weights, runtime.spec, inputs.grid is not None
    if unread and replay is None and runtime.kernels is not None:
        runtime.kernels.need([_likely_run(runtime, inputs)], runtime.compile_now)
    if inputs.padded:
        begun = None if replay is None else replay.inputs
        loaded = begun or without_padding(inputs, spec, runtime.device, runtime.dtype)
        if isinstance(loaded, Reason):
            return loaded
        inputs = loaded
    rows = inputs.pixels.shape[0] if inputs.padded else 0
    mark = weights.mark() if replay is None and (check_content or unread) else None
    mark = mark if replay is None else replay.mark
    items, pixels, outputs = inputs.items, inputs.pixels, None
    if items is not None and replay is None:
        outputs = run_planned(runtime, pixels, items, eager_runs)
    found = weights.read_back(mark, check_content, inputs.grid)
    if items is None:
        known = inputs.with_rows(found.rows, spec)
        if isinstance(known, Reason):
            return known
        pixels, items = known
    if replay is not None:
        outputs = replay.accept(items)
    if outputs is None and found.unchanged:
        outputs = run_planned(runtime, pixels, items, eager_runs, rows)
    return Attempt(outputs, items, version, found.unchanged and weights.version == version)


def _likely_run(runtime: Runtime, inputs: Inputs) -> Run:
    """The run that the shapes of a call predict while its grid is unread. See also `runner.sole_batch`."""
    tokens, limits = inputs.pixels.shape[:-1].numel(), runtime.limits
    if runtime.graphs is None or limits is None:
        return Run(runtime.weights.kinds, eager_patch_tokens=runtime.plan_tokens(tokens))
    budget = limits.smallest_for(tokens // runtime.spec.merge_unit) or limits.largest
    return Run(runtime.weights.kinds, graph_budget=budget)


def _tells_its_shape(pixels: object, grid: object, runtime: Runtime, marked: bool) -> bool:
    """Whether `pixels` and `grid` allow a speculative replay.

    Pixels must be a plain tensor of the right shape on the tower's device, which must be current. The grid must lie on
    that device or on the host; positions of padded images must lie on the device. A tensor that a kernel reads must
    have its values in memory, which `encoder.load` checks for plain pixels. Tensor subclasses, tracing, stream captures
    and autograd rule a replay out, as they may act on the operations of a call.
    """
    if type(pixels) is not torch.Tensor or pixels.device != runtime.device or pixels.requires_grad:
        return False
    if pixels.is_nested or pixels.layout is not torch.strided:
        return False
    if type(grid) is torch.Tensor and (  # its memory is read, on the host or by a kernel
        grid.is_nested or grid.layout is not torch.strided or grid.is_neg() or grid._is_zerotensor()
    ):
        return False
    if torch.is_grad_enabled() and runtime.weights.trained():  # a step of training, which takes the original code
        return False
    spec, dtype = runtime.spec, pixels.dtype
    whole = dtype.is_floating_point and pixels.ndim and pixels.shape[-1] == spec.patch_width
    if spec.padded:
        right = pixels.ndim == 3 and whole and dtype in PIXEL_DTYPES and can_load(pixels, runtime.device)
    else:
        right = pixels.ndim == 2 and (whole or (marked and _takes_bytes(pixels, runtime)))
    if type(grid) is torch.Tensor and grid.device == runtime.device:
        # Sizes are compared one by one: slicing a shape takes PyTorch 1 us, 5 us cold.
        triples = grid.shape == (*pixels.shape[:2], 2) if spec.padded else grid.ndim == 2 and grid.shape[1] == 3
        told = triples and grid.dtype in GRID_DTYPES and max(grid.stride()) <= MAX_ROWS
    else:
        told = not spec.padded
    if runtime.device.type == "cuda" and (  # the public functions for these two checks take 2 us more
        runtime.device.index != torch._C._cuda_getDevice() or torch._C._cuda_isCurrentStreamCapturing()
    ):
        return False
    return bool(right and told) and not torch._C._is_tracing()


def _items_of(grid: object, rows: int, spec: VisionSpec) -> tuple[Item, ...]:
    """The items of a grid on the host if `check_items` would accept it; else an empty tuple."""
    if type(grid) is torch.Tensor and grid.device.type == "cpu" and grid.dtype in GRID_DTYPES and grid.ndim == 2:
        grid = grid.tolist()
    if type(grid) is not list or not {*map(type, grid)} <= {list, tuple}:
        return ()
    sides = [*chain.from_iterable(grid)]
    if {*map(len, grid)} != {3} or {*map(type, sides)} != {int} or min(sides) < 1:
        return ()
    items = tuple(map(Item._make, grid))
    whole = not any([h % spec.merge_size or w % spec.merge_size for _, h, w in items])
    return items if whole and sum([t * h * w for t, h, w in items]) == rows else ()


def _takes_bytes(pixels: torch.Tensor, runtime: Runtime) -> bool:
    """Whether `pixels` are bytes in rows as wide as the patches of a kind that the weights take."""
    spec, width = runtime.spec, pixels.shape[1]
    kind = BYTES if width == spec.patch_width else STILL_BYTES if width == spec.still_width else None
    return pixels.dtype == torch.uint8 and kind in runtime.weights.kinds
