"""The encoder as something that a graph manager captures: static buffers, and a run per token budget."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from fusedvit.buffers import Capacity, EncoderBuffers, allocate
from fusedvit.encoder import encode
from fusedvit.graphs.budgets import Limits
from fusedvit.kernels.admit import DTYPES as GRID_DTYPES
from fusedvit.kernels.configs import Target
from fusedvit.kernels.forms import FormFailed
from fusedvit.kernels.launch import compiling_only
from fusedvit.kernels.metadata import Layout
from fusedvit.ops import Ops
from fusedvit.plan import EncoderPlan, plan_for
from fusedvit.spec import VisionSpec
from fusedvit.weights import EncoderWeights

TABLES_KEPT = 512
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
    ) -> None:
        self._spec = spec
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._weights = weights
        self._whole: EncoderBuffers | None = None
        self._parts: dict[int, EncoderBuffers] = {}
        self._plans: dict[int, EncoderPlan] = {}
        self._max_frames = 0
        self._tables: dict[tuple[tuple[int, int, int], ...], torch.Tensor] = {}  # never written again

    def allocate(self, limits: Limits) -> None:
        """Static buffers of the largest budget, outside any graph's pool; smaller budgets use their first rows."""
        with torch.inference_mode(False):
            tokens = {b: b * self._spec.merge_unit for b in limits.token_budgets}
            plans = self._plan(limits.token_budgets)
            capacities = {b: _capacity(tokens[b], limits, plans[b].layout(self._spec)) for b in limits.token_budgets}
            widest = max(capacities.values(), key=lambda c: (c.tokens, c.tiles))
            widest = replace(widest, short_tiles=max(c.short_tiles for c in capacities.values()))
            self._whole = allocate(self._spec, widest, self._dtype, self._device)
        self._plans = plans
        self._max_frames = limits.max_frames
        self._parts = {b: self._whole.part(c, self._spec.merge_unit) for b, c in capacities.items()}

    def _plan(self, budgets: Iterable[int]) -> dict[int, EncoderPlan]:
        target, unit = Target.of(self._device), self._spec.merge_unit
        return {b: plan_for(self._spec, b * unit, self._dtype, target) for b in budgets}

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
                    encode(self._spec, self._weights(), self._parts[budget], self._ops, self._plans[budget])
                    return
                except FormFailed:  # at its first launch, a rehearsal's; the next plan does without that form
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
        for dtype in GRID_DTYPES:  # a caller's grid may come in either
            self.admit(budget, torch.tensor([[frames, side, side]], dtype=dtype, device=self._device), rows)
        return rows // self._spec.merge_unit

    def admit(self, budget: int, grid: torch.Tensor, rows: int) -> None:
        """Fills the grid table from the device's `grid` of `rows` patch tokens, unread: see `kernels.admit`."""
        self._ops.admit(grid, rows, self._max_frames, self._spec.merge_size, self._parts[budget].grid)

    def load_grid(self, budget: int, rows: tuple[tuple[int, int, int], ...]) -> None:
        """Writes the grid table of a batch, (t, h, w) a piece: one small pinned copy on the current stream."""
        grid = self._parts[budget].grid
        table = self._tables.get(rows)
        if table is None:
            if len(self._tables) >= TABLES_KEPT:
                self._tables.clear()
            padded = [*rows, *[(0, 0, 0)] * (grid.shape[0] - len(rows))]
            table = self._tables[rows] = torch.tensor(padded, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        grid.copy_(table, non_blocking=True)

    def held_bytes(self) -> int:
        return 0 if self._whole is None else self._whole.held_bytes()

    def free(self) -> None:
        self._whole = None
        self._parts = {}
        self._tables = {}


def _capacity(tokens: int, limits: Limits, layout: Layout) -> Capacity:
    """What any batch within `limits` needs, with room for tiles of another form's size."""
    sizes = {name: min(getattr(layout, name), SMALLEST_TILE) for name in ("block_m", "window_block_m")}
    return Capacity.at_most(tokens, limits.max_items, min(limits.max_frames, tokens), replace(layout, **sizes))


def bytes_per_token(spec: VisionSpec, dtype: torch.dtype) -> int:
    """Static-buffer bytes per merged token: what they grow by."""

    def held(merged: int) -> int:
        tokens = merged * spec.merge_unit
        windows = tokens // (spec.merge_unit * spec.window) if spec.window else 0
        capacity = Capacity(tokens, 1, 1, tokens // 32, windows, windows)
        return allocate(spec, capacity, dtype, torch.device("meta")).held_bytes()

    return (held(512) - held(256)) // 256
