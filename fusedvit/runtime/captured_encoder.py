"""The encoder as the graph manager captures it: static buffers shared by all token budgets, and one run per budget.

Budgets count merged tokens; buffers count patch tokens.
"""

import bisect
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from fusedvit.graphs.capture import CudaCapture
from fusedvit.graphs.limits import Limits, infer_limits
from fusedvit.graphs.manager import MIB, GraphManager
from fusedvit.graphs.side_stream import CapturedSideStream
from fusedvit.kernels import load_inputs
from fusedvit.kernels.backends import BackendFailed
from fusedvit.kernels.load_inputs import BYTES, FLOATS, STILL_BYTES, centred, kind_of
from fusedvit.kernels.metadata import Layout
from fusedvit.kernels.tile_configs import DENSE, Target
from fusedvit.model.buffers import Capacity, EncoderBuffers, allocate
from fusedvit.model.encoder import EncoderOutputs, encode
from fusedvit.model.merger_overlap import SideStream
from fusedvit.model.ops import Ops, ops_for
from fusedvit.model.plan import EncoderPlan, known_plan
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights

logger = logging.getLogger("fusedvit")

Rows = tuple[tuple[int, int, int], ...]
SMALLEST_BUDGET, LARGEST_BUDGET = 64, 16384  # merged tokens
SHARE_OF_FREE_MEMORY = 0.1  # upper limit for static buffers
GRAPH_BYTES = 5 * 2**17  # estimate for one captured graph: 0.52 to 0.6 MiB on an H100 for 27 blocks
GRIDS_KEPT = 512
MAX_GRID_ROWS = 2**16  # rows of all kept grids together: 768 KiB
SMALLEST_TILE = 64  # queries of an attention tile in 16 bits


def _not_allocated(budget: int) -> EncoderBuffers:
    raise KeyError(f"token budget {budget}: buffers are allocated with the first capture")


class CapturedEncoder:
    """Implements `graphs.manager.Program`: static buffers, the captured run, loading inputs and storing outputs.

    Attributes:
        buffers: returns the static buffers as a budget sees them: views that are created at the first call for it.
    """

    def __init__(
        self,
        spec: VisionSpec,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        weights: Callable[[], EncoderWeights],
        side: SideStream | None = None,
        planner: Callable[[VisionSpec, int, torch.dtype, Target], EncoderPlan] = known_plan,
    ) -> None:
        self._spec = spec
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._weights = weights
        self._planner = planner
        self._side = side or (CapturedSideStream(device) if device.type == "cuda" else None)
        self._whole: EncoderBuffers | None = None
        self.buffers: Callable[[int], EncoderBuffers] = _not_allocated
        self._plans: dict[int, EncoderPlan] = {}
        self._max_frames = 0
        self._grid_slots = torch.empty(0, 0, 3, dtype=torch.int32, device=device)
        self._grids: dict[Rows, torch.Tensor] = {}  # in the slots

    # buffers

    def allocate(self, limits: Limits) -> None:
        """Allocates static buffers for the largest budget, outside any graph's pool. Smaller budgets use their first
        rows."""
        unit = self._spec.merge_unit
        plans = self._plan(limits.token_budgets)
        capacities = {b: _capacity(b * unit, limits, plan.layout(self._spec)) for b, plan in plans.items()}
        widest = max(capacities.values(), key=lambda c: (c.tokens, c.tiles))
        widest = replace(widest, short_tiles=max(c.short_tiles for c in capacities.values()))
        room = _overlap_room({b * unit: plan for b, plan in plans.items()})
        with torch.inference_mode(False):
            self._whole = allocate(self._spec, widest, self._dtype, self._device, overlap=room)
            slots = max(1, min(GRIDS_KEPT, MAX_GRID_ROWS // limits.max_items))
            self._grid_slots = torch.zeros(slots, limits.max_items, 3, dtype=torch.int32, device=self._device)
        self._plans = plans
        self._max_frames = limits.max_frames
        whole, spec = self._whole, self._spec
        self.buffers = functools.cache(lambda b: whole.part(spec, capacities[b], len(plans[b].overlapped)))

    def _plan(self, budgets: Iterable[int]) -> dict[int, EncoderPlan]:
        target, unit = Target.of(self._device), self._spec.merge_unit
        return {b: self._planner(self._spec, b * unit, self._dtype, target) for b in budgets}

    def whole(self) -> EncoderBuffers:
        """The static buffers of the largest budget."""
        assert self._whole is not None, "buffers are allocated with the first capture"
        return self._whole

    def held_bytes(self) -> int:
        return 0 if self._whole is None else self._whole.held_bytes() + self._grid_slots.nbytes

    def free(self) -> None:
        self._whole = None
        self.buffers = _not_allocated
        self._grid_slots = self._grid_slots[:0].clone()
        self._grids = {}

    # what is captured

    def run(self, budget: int) -> None:
        self._encode(budget)

    def _encode(self, budget: int, rehearsal: bool = False) -> None:
        with torch.no_grad():
            while True:
                try:
                    plan, part = self._plans[budget], self.buffers(budget)
                    encode(self._spec, self._weights(), part, self._ops, plan, self._side, rehearsal)
                    return
                except BackendFailed:  # at a backend's first launch, in a rehearsal; the next plan avoids the backend
                    self._plans |= self._plan((budget,))
                    if self._plans[budget] == plan:
                        raise

    def rehearse(self, budget: int) -> None:
        """Loads one image of one merged token, then launches every kernel of a run, of loading and of storing.

        It uses no random numbers, as a failed capture may disturb their generator.
        """
        part, unit, side = self.buffers(budget), self._spec.merge_unit, self._spec.merge_size
        part.pixels[:unit].fill_(0.5)  # for every kind of pixels: the loads below fill only one row
        self._rehearse_loads(budget, [[1, side, side]], unit)
        if self._spec.padded:
            rehearse_padded(self._spec, self._ops, self._dtype, self._device)
        self._encode(budget, rehearsal=True)
        rows = unit if self._spec.returns_hidden else 0
        hidden, *merged = [t.new_empty(t.shape) for t in (part.hidden[:rows], *(plane[:1] for plane in part.merged))]
        self.store(budget, EncoderOutputs(hidden, tuple(merged)))

    def _rehearse_loads(self, budget: int, grid: list[list[int]], rows: int) -> None:
        """Launches `load` for every kind and dtype of pixels that a call may have; the first row ends up as 0.5."""
        kinds = {BYTES: (torch.uint8,), STILL_BYTES: (torch.uint8,), FLOATS: load_inputs.PIXEL_DTYPES}
        kinds = {kind: dtypes for kind, dtypes in kinds.items() if self._weights().patches()[kind] is not None}
        for dtype, kind in itertools.product(load_inputs.GRID_DTYPES, kinds):
            table = torch.tensor(grid, dtype=dtype, device=self._device)
            self._load(budget, table, rows, kind)
            for given in kinds[kind]:
                width = self._spec.still_width if kind == STILL_BYTES else self._spec.patch_width
                pixels = torch.full((1, width), 0.5, device=self._device).to(given)
                self._load(budget, table, rows, kind, pixels)

    # loading inputs and storing outputs

    def load(self, budget: int, grid: torch.Tensor, pixels: torch.Tensor, padded: bool = False) -> None:
        """Fills the grid and the pixels of `budget`, in one launch if the pixels are on the GPU.

        The host may not have read the grid yet. If it does not fit the pixels, the kernel loads no items.

        Args:
            grid: `[n, 3]` int64 or int32 on the device.
            pixels: of any kind (`kernels.load_inputs.kind_of`), on any device.
            padded: rows of padding may follow the rows that the grid counts.
        """
        rows, kind = pixels.shape[0], FLOATS
        if pixels.dtype == torch.uint8:
            kind = kind_of(pixels, self._spec.patch_width)
            pixels = pixels if pixels.device == self._device else pixels.to(self._device, non_blocking=True)
        if load_inputs.can_load(pixels, self._device):
            self._load(budget, grid, rows, kind, pixels, padded)
            return
        self._load(budget, grid, rows, kind, padded=padded)
        self.load_pixels(budget, pixels)

    def load_grid(self, budget: int, rows: Rows, pixels: torch.Tensor) -> None:
        """Fills only the grid, with the `(t, h, w)` of a batch's pieces in `rows`, for the kind of `pixels`."""
        kind = kind_of(pixels, self._spec.patch_width)
        self._load(budget, self.grid(rows), sum([t * h * w for t, h, w in rows]), kind)

    def load_pixels(self, budget: int, pixels: torch.Tensor, first: int = 0) -> None:
        """Fills rows of pixels, from row `first` on, by torch's copies."""
        into = self.buffers(budget).pixels[first : first + pixels.shape[0], : pixels.shape[1]]
        if pixels.dtype == torch.uint8:
            pixels = centred(pixels.to(self._device, non_blocking=True), self._dtype)
        into.copy_(pixels, non_blocking=True)

    def _load(
        self,
        budget: int,
        grid: torch.Tensor,
        rows: int,
        kind: int,
        pixels: torch.Tensor | None = None,
        padded: bool = False,
    ) -> None:
        part, spec = self.buffers(budget), self._spec
        into = None if pixels is None else part.pixels
        out, counts, frames = part.grid, part.row_counts, self._max_frames
        self._ops.load_inputs(grid, rows, frames, spec.merge_size, out, pixels, into, counts, kind, padded)

    def grid(self, rows: Rows) -> torch.Tensor:
        """`[n, 3]` int32 on the device: (t, h, w) of each piece of a batch. Recent grids are kept on the device.

        Valid for launches on the current stream until the static buffers have another user, as a later batch's grid may
        be written to the same slot.
        """
        grid = self._grids.get(rows)
        if grid is None:
            if len(self._grids) == len(self._grid_slots):
                self._grids.clear()
            host = torch.tensor(rows, dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
            grid = self._grids[rows] = self._grid_slots[len(self._grids), : len(rows)]
            grid.copy_(host, non_blocking=True)
        return grid

    def store(self, budget: int, outputs: EncoderOutputs, first: int = 0) -> None:
        """Copies rows of `budget`'s outputs, from patch row `first` on, to `outputs`, whose size gives their number."""
        hidden, merged = self.buffers(budget).hidden, self.buffers(budget).merged
        if first:
            hidden, merged = hidden[first:], tuple(plane[first // self._spec.merge_unit :] for plane in merged)
        self._ops.store_outputs(hidden, merged, outputs.hidden, outputs.merged)


@dataclass(frozen=True)
class TowerGraphs:
    """The graphs of a tower on one device in one dtype, and the encoder that they capture."""

    manager: GraphManager
    encoder: CapturedEncoder

    @property
    def limits(self) -> Limits:
        return self.manager.limits


def new_graphs(
    spec: VisionSpec, limits: Limits, weights: Callable[[], EncoderWeights], device: torch.device, dtype: torch.dtype
) -> TowerGraphs:
    """The graphs of a tower, with nothing captured or allocated yet."""
    encoder = CapturedEncoder(spec, ops_for(device), dtype, device, weights)
    return TowerGraphs(GraphManager(limits, encoder, CudaCapture(device)), encoder)


def rehearse_padded(spec: VisionSpec, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
    """Launches the kernels that make a grid and rows of padded images, for every dtype that a call may have."""
    unit, merge = spec.merge_unit, spec.merge_size
    grid = torch.empty(1, 3, dtype=torch.int32, device=device)
    rows = torch.empty(unit, spec.patch_width, dtype=dtype, device=device)
    for kind in load_inputs.POSITION_DTYPES:
        ops.patch_grid(torch.zeros(1, unit, 2, dtype=kind, device=device), spec.position_side, merge, grid)
    for kind in load_inputs.PIXEL_DTYPES:
        ops.load_patches(torch.zeros(1, unit, spec.patch_width, dtype=kind, device=device), grid, merge, rows)


def limits_for(
    spec: VisionSpec,
    dtype: torch.dtype,
    free_bytes: int,
    token_budgets: Sequence[int] | None = None,
    max_items: int | None = None,
    max_frames: int | None = None,
) -> Limits:
    """The budgets of a tower if `free_bytes` of device memory are free; options that are None are inferred.

    Raises:
        TypeError, ValueError: an option is invalid; the message names it.
    """
    limits = infer_limits(
        smallest=SMALLEST_BUDGET,
        largest=LARGEST_BUDGET,
        dense=[rows // spec.merge_unit for rows in DENSE],
        bytes_per_token=bytes_per_token(spec, dtype),
        free_bytes=free_bytes,
        share=SHARE_OF_FREE_MEMORY,
        token_budgets=token_budgets,
        max_items=max_items,
        max_frames=max_frames,
    )
    if limits.largest > load_inputs.MAX_ROWS // spec.merge_unit:
        most = load_inputs.MAX_ROWS // spec.merge_unit
        raise ValueError(f"fusedvit: token_budgets must be at most {most} for this tower, got {limits.largest}")
    return limits


def limits_within(
    spec: VisionSpec, dtype: torch.dtype, room: int, max_items: int | None = None, max_frames: int | None = None
) -> Limits:
    """The largest budgets whose static buffers and graphs fit in `room` bytes, but at least one budget.

    Raises:
        TypeError, ValueError: as `limits_for`.
    """

    def up_to(largest: int) -> Limits:
        return limits_for(spec, dtype, 0, (largest,), max_items, max_frames)

    ladder = [budget for budget in up_to(LARGEST_BUDGET).token_budgets if budget >= (max_items or 1)]
    fit = bisect.bisect_right(ladder, room, key=lambda largest: _held_by(spec, dtype, up_to(largest)))
    found = up_to(ladder[max(0, fit - 1)])
    held = _held_by(spec, dtype, found)
    if held > room:
        short = math.ceil((held - room) / MIB)
        logger.warning(
            "fusedvit: FuseConfig(memory=…) is too small for this tower by %d MiB: its smallest token budget holds "
            "%d MiB of buffers and graphs, and the prepared weights leave %d MiB. It is held all the same; "
            "raise memory by %d",
            short,
            math.ceil(held / MIB),
            room // MIB,
            short,
        )
    return found


def _held_by(spec: VisionSpec, dtype: torch.dtype, limits: Limits) -> int:
    """Bytes of the static buffers and graphs of `limits`."""
    device = torch.device("meta")
    encoder = CapturedEncoder(spec, ops_for(device), dtype, device, lambda: None)  # type: ignore[arg-type, return-value]
    encoder.allocate(limits)
    return encoder.held_bytes() + len(limits.token_budgets) * GRAPH_BYTES


def _capacity(tokens: int, limits: Limits, layout: Layout) -> Capacity:
    """Capacity for any batch within `limits`, with room for another backend's smaller tiles."""
    sizes = {name: min(getattr(layout, name), SMALLEST_TILE) for name in ("block_m", "window_block_m")}
    return Capacity.at_most(tokens, limits.max_items, min(limits.max_frames, tokens), replace(layout, **sizes))


def _overlap_room(plans: dict[int, EncoderPlan]) -> tuple[int, int]:
    """The most overlapped mergers, and the most patch tokens with any; `plans` are by patch tokens."""
    some = [(len(plan.overlapped), tokens) for tokens, plan in plans.items() if plan.overlapped]
    return max((mergers for mergers, _ in some), default=0), max((tokens for _, tokens in some), default=0)


def bytes_per_token(spec: VisionSpec, dtype: torch.dtype) -> int:
    """Bytes by which static buffers grow with each merged token."""

    def held(merged: int) -> int:
        tokens = merged * spec.merge_unit
        windows = tokens // (spec.merge_unit * spec.window) if spec.window else 0
        capacity = Capacity(tokens, 1, 1, tokens // 32, windows, windows)
        return allocate(spec, capacity, dtype, torch.device("meta")).held_bytes()

    return (held(512) - held(256)) // 256
