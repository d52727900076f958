"""A replay begun before the host has checked the call: it checks, and reads the grid, while the GPU works.

The shapes of the caller's tensors give the patch tokens and the number of items, and these nearly always give the plan:
one batch, of the smallest token budget with room, its rows in the caller's order. The device loads the grid itself and
runs no item where that is no grid of this call (`kernels.load_inputs`). Once the host has read the grid, the replay is
accepted if the plan says the same, or dropped. A wrong prediction costs a replay and never an answer.

Padded images are made rows and a grid on the device first. Outputs have room for the padding, and end before it once
the host knows where that is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedvit.graphs.packing import sole_budget
from fusedvit.kernels.load_inputs import BYTES, GRID_DTYPES, MAX_ROWS, PIXEL_DTYPES, POSITION_DTYPES, STILL_BYTES
from fusedvit.model.encoder import EncoderOutputs
from fusedvit.model.items import Item
from fusedvit.runtime.captured_encoder import TowerGraphs
from fusedvit.runtime.inputs import Inputs, load_padded
from fusedvit.runtime.readback import StreamMark
from fusedvit.runtime.runner import Runtime, sole_batch


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
        outputs = self.outputs
        batch = sole_batch(items, self.merge_unit, self.graphs.limits, self.rows)
        if outputs is None or batch is None or batch.budget != self.budget:
            self.drop()
            return None
        self.outputs = None
        self.graphs.manager.count_replay(batch)
        return outputs if self.inputs is None else self._without_padding(outputs, sum([item.tokens for item in items]))

    def _without_padding(self, outputs: EncoderOutputs, tokens: int) -> EncoderOutputs:
        merged = tuple(plane[: tokens // self.merge_unit] for plane in outputs.merged)
        return EncoderOutputs(outputs.hidden[:tokens], merged)

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
    assert isinstance(pixels, torch.Tensor) and isinstance(grid, torch.Tensor)
    graphs, spec, unit = runtime.graphs, runtime.spec, runtime.spec.merge_unit
    rows = pixels.shape[0] * (pixels.shape[1] if spec.padded else 1)
    budget = None if rows % unit else sole_budget(rows // unit, grid.shape[0], graphs.manager.limits)
    if budget is None:
        return None
    weights = runtime.weights
    found = SpeculativeReplay(graphs, unit, rows, budget, None, weights.version, None)

    def load(budget: int) -> bool:
        if spec.padded:
            images = load_padded(Inputs(pixels, grid, None, padded=True), spec, runtime.device, runtime.dtype)
            assert images.grid is not None
            graphs.encoder.load(budget, images.grid, images.pixels, padded=True)
            found.inputs = images
        else:
            graphs.encoder.load(budget, grid, pixels)
        # What the graph needs and its inputs do not: the GPU loads these meanwhile.
        if not weights.in_place():  # the graph would read memory that was freed
            return False
        found.mark = weights.mark()
        return weights.version == found.weights_version

    def store(budget: int) -> None:
        found.outputs = runtime.new_outputs(rows)
        graphs.encoder.store(budget, found.outputs)

    return found if graphs.manager.replay_if_captured(budget, load, store) else None


def _tells_its_shape(pixels: object, grid: object, runtime: Runtime, marked: bool) -> bool:
    """Whether these are plain tensors of the right shapes on the tower's device, which is current.

    A subclass may act on what is done to it, and so may what traces, captures or differentiates.
    """
    if type(pixels) is not torch.Tensor or type(grid) is not torch.Tensor:
        return False
    device = runtime.device
    if pixels.device != device or grid.device != device or pixels.requires_grad:
        return False
    if runtime.spec.padded:
        return _is_padded(pixels, grid, runtime) and _is_current(device) and not torch._C._is_tracing()
    full = runtime.spec.patch_width
    return (
        pixels.ndim == 2
        and (pixels.shape[1] == full if pixels.dtype.is_floating_point else marked and _takes_bytes(pixels, runtime))
        and grid.shape[1:] == (3,)
        and grid.dtype in GRID_DTYPES
        and max(grid.stride()) <= MAX_ROWS
        and _is_current(device)
        and not torch._C._is_tracing()
    )


def _is_padded(pixels: torch.Tensor, positions: torch.Tensor, runtime: Runtime) -> bool:
    """Whether these are padded images that can be pooled, and as many positions."""
    spec, limits = runtime.spec, runtime.limits
    return (
        pixels.ndim == 3
        and pixels.shape[2] == spec.patch_width
        and pixels.dtype in PIXEL_DTYPES
        and pixels.is_contiguous()
        and positions.shape == (*pixels.shape[:2], 2)
        and positions.dtype in POSITION_DTYPES
        and pixels.shape[1] % spec.merge_unit == 0
        and limits is not None
        and pixels.shape[0] <= limits.max_frames
    )


def _takes_bytes(pixels: torch.Tensor, runtime: Runtime) -> bool:
    """Whether these are bytes, rows of them as wide as patches of a kind that the weights take."""
    spec, width = runtime.spec, pixels.shape[1]
    kind = BYTES if width == spec.patch_width else STILL_BYTES if width == spec.still_width else None
    return pixels.dtype == torch.uint8 and kind in runtime.weights.kinds


def _is_current(device: torch.device) -> bool:
    """Whether what is launched now goes to `device`, and is run there and not captured."""
    if device.type != "cuda":
        return True
    here = device.index == torch._C._cuda_getDevice()  # torch's own names of these two take 2 us more
    return here and not torch._C._cuda_isCurrentStreamCapturing()
