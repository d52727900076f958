"""The encoder as something that a graph manager captures: static buffers, and a run per token budget."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from fusedvit.graphs.limits import Limits
from fusedvit.graphs.side_stream import CapturedSideStream, NoSideStream, SideStream
from fusedvit.kernels import load_inputs
from fusedvit.kernels.backends import BackendFailed
from fusedvit.kernels.launch import compiling_only
from fusedvit.kernels.metadata import Layout
from fusedvit.kernels.tile_configs import Target
from fusedvit.model.buffers import Capacity, EncoderBuffers, allocate
from fusedvit.model.encoder import EncoderOutputs, encode
from fusedvit.model.ops import Ops
from fusedvit.model.plan import EncoderPlan, plan_for
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights

Rows = tuple[tuple[int, int, int], ...]
TABLES_KEPT = 512
MOST_TABLE_ROWS = 2**16  # of them all: 768 KiB
SMALLEST_TILE = 64  # queries of an attention tile in 16 bits
REHEARSED_FRAME = 256  # merged tokens: an image of 512 pixels


class EncoderProgram:
    """Implements `graphs.manager.Program`. Budgets count merged tokens; buffers count patch tokens."""

    def __init__(
        self,
        spec: VisionSpec,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        weights: Callable[[], EncoderWeights],
        branch: SideStream | None = None,
        planner: Callable[[VisionSpec, int, torch.dtype, Target], EncoderPlan] = plan_for,
    ) -> None:
        self._spec = spec
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._weights = weights
        self._planner = planner
        self._branch = branch or (CapturedSideStream(device) if device.type == "cuda" else NoSideStream())
        self._whole: EncoderBuffers | None = None
        self._parts: dict[int, EncoderBuffers] = {}
        self._plans: dict[int, EncoderPlan] = {}
        self._max_frames = 0
        self._slots = torch.empty(0, 0, 3, dtype=torch.int32, device=device)
        self._tables: dict[Rows, torch.Tensor] = {}  # in the slots

    def allocate(self, limits: Limits) -> None:
        """Static buffers of the largest budget, outside any graph's pool; smaller budgets use their first rows."""
        with torch.inference_mode(False):
            tokens = {b: b * self._spec.merge_unit for b in limits.token_budgets}
            plans = self._plan(limits.token_budgets)
            capacities = {b: _capacity(tokens[b], limits, plans[b].layout(self._spec)) for b in limits.token_budgets}
            widest = max(capacities.values(), key=lambda c: (c.tokens, c.tiles))
            widest = replace(widest, short_tiles=max(c.short_tiles for c in capacities.values()))
            room = _room_apart({tokens[b]: plan for b, plan in plans.items()})
            self._whole = allocate(self._spec, widest, self._dtype, self._device, apart=room)
            slots = max(1, min(TABLES_KEPT, MOST_TABLE_ROWS // limits.max_items))
            self._slots = torch.zeros(slots, limits.max_items, 3, dtype=torch.int32, device=self._device)
        self._plans = plans
        self._max_frames = limits.max_frames
        unit = self._spec.merge_unit
        self._parts = {b: self._whole.part(c, unit, bool(plans[b].apart)) for b, c in capacities.items()}

    def _plan(self, budgets: Iterable[int]) -> dict[int, EncoderPlan]:
        target, unit = Target.of(self._device), self._spec.merge_unit
        return {b: self._planner(self._spec, b * unit, self._dtype, target) for b in budgets}

    def whole(self) -> EncoderBuffers:
        """The static buffers of the largest budget."""
        assert self._whole is not None, "buffers are allocated with the first capture"
        return self._whole

    def buffers(self, budget: int) -> EncoderBuffers:
        """The static buffers as `budget` sees them."""
        return self._parts[budget]

    def run(self, budget: int) -> None:
        with torch.no_grad():
            while True:
                try:
                    plan, part = self._plans[budget], self._parts[budget]
                    encode(self._spec, self._weights(), part, self._ops, plan, self._branch)
                    return
                except BackendFailed:  # at its first launch, a rehearsal's; the next plan does without that form
                    self._plans |= self._plan((budget,))

    def compile(self, budgets: Sequence[int]) -> None:
        """Compiles what `run` launches for `budgets`, on all cores."""
        with compiling_only():
            for budget in budgets:
                self.rehearse(budget, 1)
                self.run(budget)

    def rehearse(self, budget: int, tokens: int) -> int:
        """One video of square frames. No random numbers, whose generator a failed capture may upset."""
        part = self._parts[budget]
        frames = min(part.meta.cu_seqlens.shape[0] - 1, max(1, tokens // REHEARSED_FRAME))
        side = math.isqrt(tokens // frames)
        rows = frames * side * side * self._spec.merge_unit
        part.pixels[:rows].fill_(0.5)
        side *= self._spec.merge_size
        self._admit_all(budget, [[frames, side, side]], rows)
        self._hand_over_one(budget)
        return rows // self._spec.merge_unit

    def _admit_all(self, budget: int, grid: list[list[int]], rows: int) -> None:
        """`load_inputs` of everything that a call may bring: kernels are compiled by that. The first pixels are 0.5 again."""
        frames, merge, part = self._max_frames, self._spec.merge_size, self._parts[budget]
        for dtype in load_inputs.GRID_DTYPES:
            table = torch.tensor(grid, dtype=dtype, device=self._device)
            self._ops.load_inputs(table, rows, frames, merge, part.grid)
            for given in load_inputs.PIXEL_DTYPES if part.pixels.is_contiguous() else ():
                pixels = torch.full((1, self._spec.patch_width), 0.5, dtype=given, device=self._device)
                self._ops.load_inputs(table, rows, frames, merge, part.grid, pixels, part.pixels)

    def _hand_over_one(self, budget: int) -> None:
        """A merged token's outputs, whatever they are: the kernel is compiled by that."""
        part, unit = self._parts[budget], self._spec.merge_unit
        hidden, merged = (t.new_empty(t.shape) for t in (part.hidden[:unit], part.merged[:, :1]))
        self.store_outputs(budget, EncoderOutputs(hidden, merged))

    def load_inputs(self, budget: int, grid: torch.Tensor, pixels: torch.Tensor) -> None:
        """Fills the grid table from the device's `grid` of these pixels, unread, and takes them over: `kernels.load_inputs`.

        Args:
            pixels: `[rows, patch_width]`, any float dtype, any device.
        """
        part, rows = self._parts[budget], pixels.shape[0]
        arguments = (grid, rows, self._max_frames, self._spec.merge_size, part.grid)
        if part.pixels.is_contiguous() and load_inputs.can_load(pixels, self._device):
            self._ops.load_inputs(*arguments, pixels, part.pixels)
            return
        self._ops.load_inputs(*arguments)
        part.pixels[:rows].copy_(pixels, non_blocking=True)

    def store_outputs(self, budget: int, outputs: EncoderOutputs) -> None:
        """Copies the first rows of `budget`'s outputs to `outputs`, which say how many."""
        part = self._parts[budget]
        self._ops.store_outputs(part.hidden, part.merged, outputs.hidden, outputs.merged)

    def table(self, rows: Rows) -> torch.Tensor:
        """`[n, 3]` int32 on the device: (t, h, w) of each piece of a batch.

        To be read, as the static buffers are, by what is launched on the current stream until they are in other hands:
        a later batch's table may be written to the same place.
        """
        table = self._tables.get(rows)
        if table is None:
            if len(self._tables) == len(self._slots):
                self._tables.clear()
            host = torch.tensor(rows, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            table = self._tables[rows] = self._slots[len(self._tables), : len(rows)]
            table.copy_(host, non_blocking=True)
        return table

    def load_grid(self, budget: int, rows: Rows) -> None:
        """Writes the grid table of a batch, (t, h, w) a piece."""
        tokens = sum([t * h * w for t, h, w in rows])
        self._ops.load_inputs(
            self.table(rows), tokens, self._max_frames, self._spec.merge_size, self._parts[budget].grid
        )

    def held_bytes(self) -> int:
        return 0 if self._whole is None else self._whole.held_bytes() + self._slots.nbytes

    def free(self) -> None:
        self._whole = None
        self._parts = {}
        self._slots = self._slots[:0].clone()
        self._tables = {}


def _capacity(tokens: int, limits: Limits, layout: Layout) -> Capacity:
    """What any batch within `limits` needs, with room for tiles of another form's size."""
    sizes = {name: min(getattr(layout, name), SMALLEST_TILE) for name in ("block_m", "window_block_m")}
    return Capacity.at_most(tokens, limits.max_items, min(limits.max_frames, tokens), replace(layout, **sizes))


def _room_apart(plans: dict[int, EncoderPlan]) -> tuple[int, int]:
    """Mergers beside the blocks or the last one and tokens, at most, in plans by their tokens."""
    some = [(len(plan.apart), tokens) for tokens, plan in plans.items() if plan.apart]
    return max((mergers for mergers, _ in some), default=0), max((tokens for _, tokens in some), default=0)


def bytes_per_token(spec: VisionSpec, dtype: torch.dtype) -> int:
    """Static-buffer bytes per merged token: what they grow by."""

    def held(merged: int) -> int:
        tokens = merged * spec.merge_unit
        windows = tokens // (spec.merge_unit * spec.window) if spec.window else 0
        capacity = Capacity(tokens, 1, 1, tokens // 32, windows, windows)
        return allocate(spec, capacity, dtype, torch.device("meta")).held_bytes()

    return (held(512) - held(256)) // 256
