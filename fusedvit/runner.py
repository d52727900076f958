"""Runs items through the encoder: through captured graphs where they fit, eagerly where they do not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedvit.buffers import Capacity, allocate
from fusedvit.encoder import EncoderOutputs, encode
from fusedvit.graphs.budgets import Limits
from fusedvit.graphs.cost import CostModel
from fusedvit.graphs.manager import CAPTURE_FAILED, GraphManager
from fusedvit.graphs.packing import Batch, Piece, Work, pack
from fusedvit.items import Item
from fusedvit.kernels.configs import Target
from fusedvit.ops import ops_for
from fusedvit.plan import plan_for
from fusedvit.prepared import PreparedWeights
from fusedvit.program import EncoderProgram
from fusedvit.spec import VisionSpec
from fusedvit.weights import ALIGNMENT

NO_GRAPHS = "graphs off"
NO_GPU = "no GPU"
CAPTURING = "inside another capture"


@dataclass(frozen=True)
class Graphs:
    """A tower's graphs on one device, in one dtype."""

    manager: GraphManager
    program: EncoderProgram
    cost: CostModel

    @property
    def limits(self) -> Limits:
        return self.manager.limits


@dataclass(frozen=True)
class Tower:
    """What a run needs to know of a tower.

    Attributes:
        ladder: token budgets (merged tokens, ascending) that an eager run takes its configurations by, so that it gives
            the bits that a replay would; beyond the last, or without any, powers of two.
    """

    spec: VisionSpec
    weights: PreparedWeights
    device: torch.device
    dtype: torch.dtype
    ladder: tuple[int, ...] = ()

    def plan_tokens(self, tokens: int) -> int:
        """The patch-token budget that `tokens` patch tokens fall into."""
        unit = self.spec.merge_unit
        return next((b * unit for b in self.ladder if b * unit >= tokens), tokens)


@dataclass(frozen=True)
class _Rows:
    """Where a piece's rows are: patch rows of the input and of the last hidden state, merged rows of the output."""

    first: int
    count: int


def run(
    tower: Tower,
    pixels: torch.Tensor,
    items: Sequence[Item],
    graphs: Graphs | None,
    eager: Counter[str],
    no_graphs: str,
) -> EncoderOutputs:
    """Outputs of `items`, in their order, in memory of the caller's.

    Args:
        pixels: `[tokens, patch_width]`, any float dtype, any device, rows of the items one after another.
        graphs: what to replay; None to run eagerly, counted in `eager` under `no_graphs`.
        eager: counts of eager runs by reason, added to.
    """
    pixels = pixels.detach()
    if graphs is None:
        eager[no_graphs] += 1
        return run_eager(tower, pixels, items)
    unit = tower.spec.merge_unit
    plan = pack(tuple(Work(item.t, item.h * item.w // unit) for item in items), graphs.limits, graphs.cost)
    if not plan.batches:
        eager.update(overflow.reason for overflow in plan.overflow)
        return run_eager(tower, pixels, items)
    job = _Job(tower, pixels, items)
    for batch in plan.batches:
        if not job.replay(graphs, batch):
            eager[CAPTURE_FAILED] += 1
            job.eager(batch.pieces)
    for overflow in plan.overflow:
        eager[overflow.reason] += 1
        job.eager((overflow.piece,))
    return job.outputs


def run_eager(tower: Tower, pixels: torch.Tensor, items: Sequence[Item]) -> EncoderOutputs:
    """The encoder on buffers of exactly the size of `items`."""
    tokens = sum(item.tokens for item in items)
    if tokens == 0:
        return _outputs(tower, items)
    plan = plan_for(tower.spec, tower.plan_tokens(tokens), tower.dtype, Target.of(tower.device))
    capacity = Capacity.of(items, plan.attention.block_m)
    pixels = _aligned(pixels.to(tower.device, tower.dtype))
    buffers = allocate(tower.spec, capacity, tower.dtype, tower.device, pixels)
    _fill_grid(buffers.grid, items)
    with torch.no_grad():
        outputs = encode(tower.spec, tower.weights.get(), buffers, ops_for(tower.device), plan)
    return EncoderOutputs(outputs.hidden, outputs.merged.contiguous())


def _outputs(tower: Tower, items: Sequence[Item]) -> EncoderOutputs:
    tokens, spec, device, dtype = sum(item.tokens for item in items), tower.spec, tower.device, tower.dtype
    shape = (1 + len(spec.deepstack), tokens // spec.merge_unit, spec.out_size)
    return EncoderOutputs(
        torch.empty(tokens, spec.hidden_size, device=device, dtype=dtype),
        torch.empty(shape, device=device, dtype=dtype),
    )


def _fill_grid(grid: torch.Tensor, items: Sequence[Item]) -> None:
    """Writes the grid table; inside somebody's capture value by value, so that no host memory is baked in."""
    rows = [(item.t, item.h, item.w) for item in items]
    if not (grid.is_cuda and torch.cuda.is_current_stream_capturing()):
        grid.copy_(torch.tensor(rows, dtype=torch.int32), non_blocking=True)
        return
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            grid[i, j].fill_(value)


def _aligned(pixels: torch.Tensor) -> torch.Tensor:
    """`pixels` with rows that the copy engine takes: base and pitch a multiple of 16 bytes."""
    size = pixels.element_size()
    if pixels.stride(1) == 1 and pixels.stride(0) * size % ALIGNMENT == 0 and pixels.data_ptr() % ALIGNMENT == 0:
        return pixels
    step = ALIGNMENT // size
    padded = pixels.new_empty(pixels.shape[0], -(-pixels.shape[1] // step) * step)[:, : pixels.shape[1]]
    return padded.copy_(pixels)


class _Job:
    """One call's input and output, and how its pieces map onto them."""

    def __init__(self, tower: Tower, pixels: torch.Tensor, items: Sequence[Item]) -> None:
        self.outputs = _outputs(tower, items)
        self._tower = tower
        self._pixels = pixels
        self._items = items
        self._first = [0]
        for item in items:
            self._first.append(self._first[-1] + item.tokens)

    def replay(self, graphs: Graphs, batch: Batch) -> bool:
        """False where the batch's budget has no graph."""
        runs = self._runs(batch.pieces)

        def load() -> None:
            buffers = graphs.program.buffers(batch.budget)
            graphs.program.load_grid(batch.budget, self._items_of(batch.pieces))
            for there, here in runs:
                buffers.pixels[here.first : here.first + here.count].copy_(
                    self._pixels[there.first : there.first + there.count], non_blocking=True
                )

        def unload() -> None:
            buffers = graphs.program.buffers(batch.budget)
            self._keep(EncoderOutputs(buffers.hidden, buffers.merged), runs)

        return graphs.manager.replay(batch, load, unload)

    def eager(self, pieces: Sequence[Piece]) -> None:
        runs = self._runs(pieces)
        pixels = torch.cat([self._pixels[r.first : r.first + r.count] for r, _ in runs])
        self._keep(run_eager(self._tower, pixels, self._items_of(pieces)), runs)

    def _items_of(self, pieces: Sequence[Piece]) -> list[Item]:
        whole = self._items
        return [Item(piece.frames, whole[piece.item].h, whole[piece.item].w) for piece in pieces]

    def _runs(self, pieces: Sequence[Piece]) -> list[tuple[_Rows, _Rows]]:
        """(rows of the call, rows of the batch) of `pieces`; neighbours in both make one run, and one copy."""
        runs: list[tuple[_Rows, _Rows]] = []
        here = 0
        for piece in pieces:
            item = self._items[piece.item]
            frame = item.h * item.w
            first, count = self._first[piece.item] + piece.first_frame * frame, piece.frames * frame
            if runs and runs[-1][0].first + runs[-1][0].count == first:
                there, begun = runs.pop()
                first, start, total = there.first, begun.first, there.count + count
            else:
                start, total = here, count
            runs.append((_Rows(first, total), _Rows(start, total)))
            here += count
        return runs

    def _keep(self, got: EncoderOutputs, runs: Sequence[tuple[_Rows, _Rows]]) -> None:
        """Copies a batch's rows to where the caller's are."""
        unit = self._tower.spec.merge_unit
        for there, here in runs:
            rows = slice(there.first, there.first + there.count)
            self.outputs.hidden[rows].copy_(got.hidden[here.first : here.first + here.count])
            merged = slice(there.first // unit, (there.first + there.count) // unit)
            kept = got.merged[:, here.first // unit : (here.first + here.count) // unit]
            self.outputs.merged[:, merged].copy_(kept)
