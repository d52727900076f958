"""Runs items through the encoder: through captured graphs where they fit, eagerly where they do not."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fusedvit.graphs.limits import Limits
from fusedvit.graphs.manager import CAPTURE_FAILED, GraphManager
from fusedvit.graphs.packing import Batch, Piece, Work, pack
from fusedvit.kernels.backends import BackendFailed
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.model.buffers import Capacity, allocate
from fusedvit.model.encoder import EncoderOutputs, encode
from fusedvit.model.ops import ops_for
from fusedvit.model.plan import plan_for
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import ALIGNMENT
from fusedvit.runtime.captured_encoder import EncoderProgram
from fusedvit.runtime.inputs import Item
from fusedvit.runtime.weight_cache import PreparedWeights

NO_GRAPHS = "graphs off"
NO_GPU = "no GPU"
CAPTURING = "inside another capture"
LAYOUTS_KEPT = 512


class Read(NamedTuple):
    """What a grid on the host holds: patch tokens, items, and the budget if they are one batch as they are."""

    rows: int
    items: tuple[Item, ...]
    budget: int | None


@dataclass(frozen=True)
class Graphs:
    """A tower's graphs on one device, in one dtype.

    Attributes:
        layouts: how recent calls were run, by their items.
        guesses: the budget of recent calls that were one batch, by (patch tokens, items); None for other calls.
        read: recent grids on the host, by their content.
    """

    manager: GraphManager
    program: EncoderProgram
    layouts: dict[tuple[Item, ...], tuple["Step", ...]] = field(default_factory=dict, compare=False, repr=False)
    guesses: dict[tuple[int, int], int | None] = field(default_factory=dict, compare=False, repr=False)
    read: dict[object, Read] = field(default_factory=dict, compare=False, repr=False)

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
        return next((b * unit for b in self.ladder if b * unit >= tokens), budget(tokens))


class _Run(NamedTuple):
    """Neighbouring rows: `length` patch rows from `there` in the call's tensors are rows from `here` in the batch's."""

    there: int
    here: int
    length: int


@dataclass(frozen=True)
class Step:
    """A batch, or a piece that runs eagerly because of `reason`.

    Attributes:
        rows: (t, h, w) of each piece.
        runs: where the pieces' rows are.
    """

    batch: Batch | None
    reason: str
    rows: tuple[tuple[int, int, int], ...]
    runs: tuple[_Run, ...]


def steps_of(graphs: Graphs, items: tuple[Item, ...], unit: int) -> tuple[Step, ...]:
    """How `items` are run, `unit` patch tokens merged into one.

    The same layouts come again and again; the last few hundred are kept.
    """
    known = graphs.layouts.get(items)
    if known is None:
        if len(graphs.layouts) >= LAYOUTS_KEPT:
            graphs.layouts.clear()
        known = graphs.layouts[items] = _plan(items, unit, graphs.limits)
    return known


def _plan(items: tuple[Item, ...], unit: int, limits: Limits) -> tuple[Step, ...]:
    plan = pack(tuple(Work(item.t, item.h * item.w // unit) for item in items), limits)
    first = [0, *itertools.accumulate(item.tokens for item in items)]

    def step(batch: Batch | None, reason: str, pieces: Sequence[Piece]) -> Step:
        rows = tuple((piece.frames, items[piece.item].h, items[piece.item].w) for piece in pieces)
        return Step(batch, reason, rows, _runs(pieces, rows, first))

    batches = [step(batch, "", batch.pieces) for batch in plan.batches]
    return (*batches, *(step(None, overflow.reason, (overflow.piece,)) for overflow in plan.overflow))


def _runs(pieces: Sequence[Piece], rows: Sequence[tuple[int, int, int]], first: Sequence[int]) -> tuple[_Run, ...]:
    """Pieces that are neighbours in the call and in the batch make one run, and one copy."""
    runs: list[_Run] = []
    here = 0
    for piece, (frames, h, w) in zip(pieces, rows, strict=True):
        there, count = first[piece.item] + piece.first_frame * h * w, frames * h * w
        if runs and runs[-1].there + runs[-1].length == there:
            last = runs.pop()
            runs.append(_Run(last.there, last.here, last.length + count))
        else:
            runs.append(_Run(there, here, count))
        here += count
    return tuple(runs)


def budgets_of(graphs: Graphs, calls: Iterable[Sequence[Item]], unit: int) -> set[int]:
    """The token budgets that calls of these items replay; `unit` patch tokens are merged into one."""
    steps = (step for items in calls for step in steps_of(graphs, tuple(items), unit))
    return {step.batch.budget for step in steps if step.batch is not None}


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
    steps = steps_of(graphs, tuple(items), tower.spec.merge_unit)
    if all(step.batch is None for step in steps):
        eager.update(step.reason for step in steps)
        return run_eager(tower, pixels, items)
    answer = _Answer(tower, items)
    for step in steps:
        if step.batch is not None and _replay(pixels, graphs, step, step.batch, answer):
            continue
        eager[step.reason or CAPTURE_FAILED] += 1
        rows = torch.cat([pixels[run.there : run.there + run.length] for run in step.runs])
        answer.keep(run_eager(tower, rows, [Item(*row) for row in step.rows]), step.runs)
    return answer.outputs()


def _replay(pixels: torch.Tensor, graphs: Graphs, step: Step, batch: Batch, answer: "_Answer") -> bool:
    """Replays one batch; False where no graph can hold it."""
    program = graphs.program

    def load(budget: int) -> None:
        static = program.buffers(budget).pixels
        program.load_grid(budget, step.rows)
        for there, here, length in step.runs:
            rows = pixels if length == pixels.shape[0] else pixels[there : there + length]
            static[here : here + length].copy_(rows, non_blocking=True)

    def unload(budget: int) -> None:
        static = program.buffers(budget)
        answer.keep(EncoderOutputs(static.hidden, static.merged), step.runs)

    return graphs.manager.replay(batch, load, unload)


class _Answer:
    """A call's outputs, collected batch by batch. Allocated with the first: the GPU works by then."""

    def __init__(self, tower: Tower, items: Sequence[Item]) -> None:
        self._tower = tower
        self._items = items
        self._outputs: EncoderOutputs | None = None

    def outputs(self) -> EncoderOutputs:
        if self._outputs is None:
            self._outputs = new_outputs(self._tower, _tokens(self._items))
        return self._outputs

    def keep(self, got: EncoderOutputs, runs: Sequence[_Run]) -> None:
        """Copies a batch's rows to where the caller's are."""
        outputs, unit = self.outputs(), self._tower.spec.merge_unit
        for there, here, length in runs:
            outputs.hidden[there : there + length].copy_(got.hidden[here : here + length])
            merged = outputs.merged[:, there // unit : (there + length) // unit]
            merged.copy_(got.merged[:, here // unit : (here + length) // unit])


def run_eager(tower: Tower, pixels: torch.Tensor, items: Sequence[Item]) -> EncoderOutputs:
    """The encoder on buffers of exactly the size of `items`."""
    items = [item for item in items if item.tokens]
    if not items:
        return new_outputs(tower, 0)
    while True:
        try:
            return _encode(tower, pixels, items)
        except BackendFailed:  # at its first launch; the next plan does without that form
            continue


def _encode(tower: Tower, pixels: torch.Tensor, items: Sequence[Item]) -> EncoderOutputs:
    tokens = _tokens(items)
    plan = plan_for(tower.spec, tower.plan_tokens(tokens), tower.dtype, Target.of(tower.device))
    pixels = _aligned(pixels.to(tower.device, tower.dtype))
    buffers = allocate(tower.spec, Capacity.of(items, plan.layout(tower.spec)), tower.dtype, tower.device, pixels)
    _fill_grid(buffers.grid, items)
    with torch.no_grad():
        outputs = encode(tower.spec, tower.weights.get(), buffers, ops_for(tower.device), plan)
    return EncoderOutputs(outputs.hidden, outputs.merged.contiguous())


def _tokens(items: Sequence[Item]) -> int:
    return sum([item.tokens for item in items])


def new_outputs(tower: Tower, tokens: int) -> EncoderOutputs:
    """Memory for the outputs of `tokens` patch tokens; nothing in it yet."""
    spec, device, dtype = tower.spec, tower.device, tower.dtype
    shape = (spec.merged_outputs, tokens // spec.merge_unit, spec.out_size)
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
