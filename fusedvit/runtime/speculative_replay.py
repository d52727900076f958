"""A replay begun before the host has checked the call: it checks, and reads the grid, while the GPU works.

The shapes of the caller's tensors give the patch tokens and the number of items, and these nearly always give the plan:
one batch, of the smallest token budget with room, its rows in the caller's order. The device loads the grid itself, the
caller's or a copy of one on the host, and runs no item where that is no grid of this call (`kernels.load_inputs`). Once
the host has read it, `attempt` accepts the replay if the plan says the same, or drops it. A wrong prediction costs a
replay and never an answer.

Padded images are made rows and a grid on the device first. Outputs have room for the padding, and are copied without it
once the host knows where that is.
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
    """A replay under way.

    Attributes:
        graphs: what it runs on.
        merge_unit: patch tokens that are merged into one.
        rows: patch rows of the call, with padding.
        budget: whose graph is replayed.
        mark: the point in the caller's stream between its inputs and the graph, for the read of grid and weights.
        weights_version: the prepared weights that it runs with.
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
        """The outputs, if what ran is the plan for `items`; else None, and the replay is dropped."""
        outputs, padded = self.outputs, self.inputs is not None
        batch = sole_batch(items, self.merge_unit, self.graphs.limits, self.rows if padded else 0)
        if outputs is None or batch is None or batch.budget != self.budget:
            self.drop()
            return None
        self.outputs = None
        self.graphs.manager.count_replay(batch)
        tokens = sum([item.tokens for item in items])
        return self._without_padding(outputs, tokens) if padded and tokens < self.rows else outputs

    def _without_padding(self, outputs: EncoderOutputs, tokens: int) -> EncoderOutputs:
        """Copies, as who keeps an output shall not keep the padding's rows as well."""
        merged = tuple(plane[: tokens // self.merge_unit].clone() for plane in outputs.merged)
        return EncoderOutputs(outputs.hidden[:tokens].clone(), merged)

    def drop(self) -> None:
        """Counts a replay that was not accepted as a misprediction. Its buffers are ours alone: nothing else to do."""
        if self.outputs is not None:
            self.outputs = None
            self.graphs.manager.count_misprediction()


def begin(runtime: Runtime | None, pixels: object, grid: object, marked: bool = False) -> SpeculativeReplay | None:
    """Enqueues a replay where the shapes of `pixels` and `grid` tell the plan; None where they do not.

    Until the replay is launched the GPU has nothing to do, so only what decides the launch is asked here.

    Args:
        runtime: what the last fused call ran on; None where there was none.
        pixels, grid: what the caller gave, unchecked.
        marked: the pixels came under a mark, so that they may be bytes.
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
        # What the graph needs and its inputs do not: the GPU loads these meanwhile.
        if not weights.in_place():  # the graph would read memory that was freed
            return False
        found.mark = weights.mark()
        return weights.version == found.weights_version

    def store(budget: int) -> None:
        found.outputs = runtime.new_outputs(rows)
        graphs.encoder.store(budget, found.outputs)

    return found if graphs.manager.replay_if_captured(budget, load, store) else None


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


def attempt(
    runtime: Runtime,
    inputs: Inputs,
    replay: SpeculativeReplay | None,
    version: int,
    check_content: bool,
    eager_runs: Counter[str],
) -> Attempt | Reason:
    """One run of a call, or why the original code must run: the replay that was begun, or a planned run.

    The host reads once at most: behind the launches, or before them where the plan hangs on the grid.

    Args:
        inputs: checked.
        version: of the weights that the run begins with.
        check_content: fingerprints of the parameters are compared, too.
        eager_runs: counts runs outside a graph, by reason.

    Raises:
        ValueError: the grid says other than `inputs` do.
        WeightsReleased: somebody gave the weights back meanwhile.
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
    """What a call whose grid nobody has read runs, as far as its shapes tell."""
    tokens, limits = inputs.pixels.shape[:-1].numel(), runtime.limits
    if runtime.graphs is None or limits is None:
        return Run(runtime.plan_tokens(tokens), False, runtime.weights.kinds)
    budget = limits.smallest_for(tokens // runtime.spec.merge_unit) or limits.largest
    return Run(budget, True, runtime.weights.kinds)


def _tells_its_shape(pixels: object, grid: object, runtime: Runtime, marked: bool) -> bool:
    """Whether these are plain pixels of the right shape on the tower's device, which is current, and a grid for them
    that lies there or on the host; of padded images positions that lie there. What kernels read has its values in its
    memory; of plain pixels `encoder.load` asks that.

    A subclass may act on what is done to it, and so may what traces, captures or differentiates.
    """
    if type(pixels) is not torch.Tensor or pixels.device != runtime.device or pixels.requires_grad:
        return False
    if pixels.is_nested or pixels.layout is not torch.strided:
        return False
    if type(grid) is torch.Tensor and (  # its memory is read, here or by a kernel
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
        # Of sizes one by one: PyTorch takes 1 us, cold 5, for a part of a shape.
        triples = grid.shape == (*pixels.shape[:2], 2) if spec.padded else grid.ndim == 2 and grid.shape[1] == 3
        told = triples and grid.dtype in GRID_DTYPES and max(grid.stride()) <= MAX_ROWS
    else:
        told = not spec.padded
    if runtime.device.type == "cuda" and (  # torch's own names of these two questions take 2 us more
        runtime.device.index != torch._C._cuda_getDevice() or torch._C._cuda_isCurrentStreamCapturing()
    ):
        return False
    return bool(right and told) and not torch._C._is_tracing()


def _items_of(grid: object, rows: int, spec: VisionSpec) -> tuple[Item, ...]:
    """The items of a grid on the host, as `check_items` takes them; none where it would not."""
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
    """Whether these are bytes, rows of them as wide as patches of a kind that the weights take."""
    spec, width = runtime.spec, pixels.shape[1]
    kind = BYTES if width == spec.patch_width else STILL_BYTES if width == spec.still_width else None
    return pixels.dtype == torch.uint8 and kind in runtime.weights.kinds
