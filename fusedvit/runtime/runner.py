"""A planned run: items packed into token budgets and replayed, or run eagerly with a counted reason."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from fusedvit.graphs.limits import Limits
from fusedvit.graphs.manager import CAPTURE_FAILED
from fusedvit.graphs.packing import TOKEN_BUDGET, Batch, ItemSize, Piece, pack
from fusedvit.kernels.backends import BackendFailed
from fusedvit.kernels.load_inputs import FLOATS, centred, kind_of
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.model.buffers import Capacity, allocate
from fusedvit.model.encoder import EncoderOutputs, encode
from fusedvit.model.items import Item
from fusedvit.model.ops import ops_for
from fusedvit.model.plan import known_plan
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import ALIGNMENT
from fusedvit.runtime.captured_encoder import TowerGraphs
from fusedvit.runtime.kernel_loader import KernelLoader, KernelsNotReady, Run
from fusedvit.runtime.weight_cache import WeightCache

LAYOUTS_KEPT = 512


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which `device`, if it is a GPU, is current and autocast is off for the torch operations."""
    if device.type in ("cuda", "cpu") and torch.is_autocast_enabled(device.type):
        stack = contextlib.ExitStack()
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        return stack
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Runtime:
    """What a tower runs on: one device and one dtype.

    Attributes:
        graphs: the graphs to replay; None to run eagerly.
        no_graphs: why there are no graphs; "" if there are.
        kernels: knows which runs have their kernels compiled; None where nothing is compiled.
        compile_now: wait for kernels that are missing.
        limits: the token budgets by which eager runs choose configurations, for the same bits as a replay; None if
            there never were graphs.
    """

    spec: VisionSpec
    weights: WeightCache
    device: torch.device
    dtype: torch.dtype
    graphs: TowerGraphs | None = None
    no_graphs: str = ""
    limits: Limits | None = None
    kernels: KernelLoader | None = None
    compile_now: bool = False

    def plan_tokens(self, tokens: int) -> int:
        """The patch-token budget by which an eager run of `tokens` patch tokens chooses its configurations.

        It is the budget of the graph that would replay the run. Beyond the largest graph, or without graphs, it is
        `tile_configs.budget(tokens)`.
        """
        unit = self.spec.merge_unit
        merged = None if self.limits is None else self.limits.smallest_for(-(-tokens // unit))
        return budget(tokens) if merged is None else merged * unit

    def new_outputs(self, tokens: int) -> EncoderOutputs:
        """Uninitialised outputs of `tokens` patch tokens; each is a separate tensor that the caller owns."""
        spec, device, dtype = self.spec, self.device, self.dtype
        rows = tokens if spec.returns_hidden else 0
        hidden = torch.empty(rows, spec.hidden_size, device=device, dtype=dtype)
        shape = (tokens // spec.merge_unit, spec.out_size)
        merged = [torch.empty(shape, device=device, dtype=dtype) for _ in range(spec.merged_outputs)]
        return EncoderOutputs(hidden, tuple(merged))


class Span(NamedTuple):
    """`length` consecutive patch rows, from row `source` in the call's tensors and row `target` in the batch's."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Step:
    """A batch that is replayed, or an item that runs eagerly because of `reason`.

    Attributes:
        rows: (t, h, w) of each piece.
        spans: where the pieces' patch rows are.
    """

    batch: Batch | None
    reason: str
    rows: tuple[tuple[int, int, int], ...]
    spans: tuple[Span, ...]


@lru_cache(maxsize=LAYOUTS_KEPT)
def plan_steps(items: tuple[Item, ...], unit: int, limits: Limits, rows: int = 0) -> tuple[Step, ...]:
    """How `items` are run within `limits`. A pure function; plans of recent layouts are cached.

    Args:
        unit: patch tokens that are merged into one.
        rows: patch rows with padding. The budget of a call's only batch has room for all of them: it then follows from
            shapes alone, and a replay can begin before the host knows which rows are padding.
    """
    plan = pack([ItemSize(item.t, item.h * item.w // unit) for item in items], limits)
    if len(plan.batches) == 1:
        sole = plan.batches[0]
        padded = limits.smallest_for(rows // unit) or 0
        plan = replace(plan, batches=(replace(sole, budget=max(sole.budget, padded)),))
    first = [0, *itertools.accumulate(item.tokens for item in items)]

    def step(batch: Batch | None, reason: str, pieces: Sequence[Piece]) -> Step:
        rows = tuple((piece.frames, items[piece.item].h, items[piece.item].w) for piece in pieces)
        return Step(batch, reason, rows, _spans(pieces, rows, first))

    batches = [step(batch, "", batch.pieces) for batch in plan.batches]
    return (*batches, *(step(None, TOKEN_BUDGET, (piece,)) for piece in plan.overflow))


def _spans(pieces: Sequence[Piece], rows: Sequence[tuple[int, int, int]], first: Sequence[int]) -> tuple[Span, ...]:
    """The spans of `pieces`. Pieces that are consecutive in the call and in the batch share one span, thus one copy."""
    spans: list[Span] = []
    target = 0
    for piece, (frames, h, w) in zip(pieces, rows, strict=True):
        source, length = first[piece.item] + piece.first_frame * h * w, frames * h * w
        if spans and spans[-1].source + spans[-1].length == source:
            last = spans.pop()
            spans.append(Span(last.source, last.target, last.length + length))
        else:
            spans.append(Span(source, target, length))
        target += length
    return tuple(spans)


def sole_batch(items: Sequence[Item], unit: int, limits: Limits, rows: int = 0) -> Batch | None:
    """The only batch of `items`, if it holds every item whole and in the caller's order; see `plan_steps`.

    `graphs.packing.sole_budget` predicts its budget from counts alone; `speculative_replay._likely_run` predicts the
    kernels that a call needs.
    """
    steps = plan_steps(tuple(items), unit, limits, rows)
    alone = len(steps) == 1 and len(steps[0].spans) == 1 and len(steps[0].rows) == len(items)
    return steps[0].batch if alone else None


def budgets_of(calls: Iterable[Sequence[Item]], unit: int, limits: Limits) -> set[int]:
    """The token budgets that `calls`, each given by its items, replay; `unit` patch tokens are merged into one."""
    steps = (step for items in calls for step in plan_steps(tuple(items), unit, limits))
    return {step.batch.budget for step in steps if step.batch is not None}


def run_planned(
    runtime: Runtime, pixels: torch.Tensor, items: Sequence[Item], eager: Counter[str], rows: int = 0
) -> EncoderOutputs:
    """The outputs of `items`, in their order, in fresh tensors.

    Args:
        pixels: of any kind (`kernels.load_inputs.kind_of`), on any device, the items' rows one after another.
        eager: counts of eager runs by reason; this run adds to them.
        rows: patch rows that the caller gave, with padding.

    Raises:
        KernelsNotReady: kernels are still being compiled and the runtime does not wait, or they cannot be compiled.
            Nothing has changed.
    """
    pixels = pixels.detach()
    graphs = runtime.graphs
    steps = () if graphs is None else plan_steps(tuple(items), runtime.spec.merge_unit, graphs.limits, rows)
    if runtime.kernels is None:
        return _launch_steps(runtime, pixels, items, steps, eager, rows)
    runs = _new_runs(runtime, max(_tokens(items), rows), steps)
    if not runs:
        return _launch_steps(runtime, pixels, items, steps, eager, rows)
    runtime.kernels.need(runs, runtime.compile_now)
    if runtime.compile_now:
        with runtime.kernels.compiling():
            return _launch_steps(runtime, pixels, items, steps, eager, rows)
    with runtime.kernels.guard(runs):
        captures = [run.graph_budget for run in runs if run.graph_budget]
        if graphs is not None and len(captures) > 1:  # a call has time for one capture only
            graphs.manager.ready(captures[0])
            raise KernelsNotReady("")
        return _launch_steps(runtime, pixels, items, steps, eager, rows)


def _new_runs(runtime: Runtime, tokens: int, steps: Sequence[Step]) -> list[Run]:
    """The runs of `steps` whose graph is not captured or that run eagerly; without graphs, an eager run of `tokens`."""
    graphs, kinds = runtime.graphs, runtime.weights.kinds
    if graphs is None:
        return [Run(kinds, eager_patch_tokens=runtime.plan_tokens(tokens))]
    runs: dict[Run, None] = {}
    for step in steps:
        if step.batch is None:
            runs[Run(kinds, eager_patch_tokens=runtime.plan_tokens(sum([t * h * w for t, h, w in step.rows])))] = None
        elif not graphs.manager.is_settled(step.batch.budget):
            runs[Run(kinds, graph_budget=step.batch.budget)] = None
    return list(runs)


def _launch_steps(
    runtime: Runtime, pixels: torch.Tensor, items: Sequence[Item], steps: Sequence[Step], eager: Counter[str], rows: int
) -> EncoderOutputs:
    if runtime.graphs is None:
        eager[runtime.no_graphs] += 1
        return run_eager(runtime, pixels, items, rows)
    if len(steps) == 1 and steps[0].batch is None:
        eager[steps[0].reason] += 1
        return run_eager(runtime, pixels, items)
    unit = runtime.spec.merge_unit
    # The call's outputs, allocated at the first use: the GPU then works on the first batch already.
    outputs = cache(lambda: runtime.new_outputs(_tokens(items)))
    for step in steps:
        if step.batch is not None and _replay(runtime.graphs, step, step.batch, pixels, outputs, unit):
            continue
        eager[step.reason or CAPTURE_FAILED] += 1
        parts = [pixels[source : source + length] for source, _, length in step.spans]
        part = parts[0] if len(parts) == 1 else torch.cat(parts)
        room = 0 if step.batch is None else step.batch.budget * unit
        found = run_eager(runtime, part, [Item(*row) for row in step.rows], room)
        for source, target, length in step.spans:
            mine, theirs = _rows_of(outputs(), source, length, unit), _rows_of(found, target, length, unit)
            for to, rows_of_run in zip((mine.hidden, *mine.merged), (theirs.hidden, *theirs.merged), strict=True):
                to.copy_(rows_of_run)
    return outputs()


def _replay(
    graphs: TowerGraphs,
    step: Step,
    batch: Batch,
    pixels: torch.Tensor,
    outputs: Callable[[], EncoderOutputs],
    unit: int,
) -> bool:
    """Replays one batch into its rows of what `outputs` gives; returns False if its budget has no graph."""
    encoder = graphs.encoder

    def load(budget: int) -> None:
        if len(step.spans) == 1:
            source, _, length = step.spans[0]
            whole = length == pixels.shape[0]
            encoder.load(budget, encoder.grid(step.rows), pixels if whole else pixels[source : source + length])
            return
        encoder.load_grid(budget, step.rows, pixels)
        for source, target, length in step.spans:
            encoder.load_pixels(budget, pixels[source : source + length], target)

    def store(budget: int) -> None:
        for source, target, length in step.spans:
            encoder.store(budget, _rows_of(outputs(), source, length, unit), target)

    return graphs.manager.replay(batch, load, store)


def _rows_of(outputs: EncoderOutputs, first: int, length: int, unit: int) -> EncoderOutputs:
    """Views of `length` patch rows of `outputs` from `first` on."""
    merged = tuple(plane[first // unit : (first + length) // unit] for plane in outputs.merged)
    return EncoderOutputs(outputs.hidden[first : first + length], merged)


def run_eager(runtime: Runtime, pixels: torch.Tensor, items: Sequence[Item], rows: int = 0) -> EncoderOutputs:
    """Runs the encoder on buffers of exactly the size of `items`, with the plan for `rows` patch rows if `rows` is
    larger."""
    items = [item for item in items if item.tokens]
    if not items:
        return runtime.new_outputs(0)
    while True:
        try:
            return _encode(runtime, pixels, items, rows)
        except BackendFailed:  # at a backend's first launch; the next plan avoids the backend
            continue


def _encode(runtime: Runtime, pixels: torch.Tensor, items: Sequence[Item], rows: int) -> EncoderOutputs:
    spec, device, dtype = runtime.spec, runtime.device, runtime.dtype
    plan = known_plan(spec, runtime.plan_tokens(max(_tokens(items), rows)), dtype, Target.of(device))
    kind, capacity = kind_of(pixels, spec.patch_width), Capacity.of(items, plan.layout(spec))
    floats = _aligned(pixels.to(device, dtype)) if kind == FLOATS else None
    buffers = allocate(spec, capacity, dtype, device, floats)
    if floats is None:
        buffers.pixels[:, : pixels.shape[1]].copy_(centred(pixels.to(device), dtype))
    buffers.row_counts[kind, 0].fill_(capacity.tokens)
    _fill_grid(buffers.grid, items)
    with torch.no_grad():
        outputs = encode(spec, runtime.weights.get(), buffers, ops_for(device), plan)
    hidden = outputs.hidden if spec.returns_hidden else outputs.hidden[:0].clone()
    return EncoderOutputs(hidden, tuple(plane.contiguous() for plane in outputs.merged))


def _tokens(items: Sequence[Item]) -> int:
    return sum([item.tokens for item in items])


def _fill_grid(grid: torch.Tensor, items: Sequence[Item]) -> None:
    """Writes the grid table. Inside a stream capture it is written value by value, so that the graph does not read host
    memory."""
    rows = [(item.t, item.h, item.w) for item in items]
    if not (grid.is_cuda and torch.cuda.is_current_stream_capturing()):
        grid.copy_(torch.tensor(rows, dtype=torch.int32, device="cpu"), non_blocking=True)
        return
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            grid[i, j].fill_(value)


def _aligned(pixels: torch.Tensor) -> torch.Tensor:
    """`pixels`, or a copy, with base address and row pitch a multiple of 16 bytes, as tensor descriptors require."""
    size = pixels.element_size()
    rows = pixels.stride(1) == 1 and pixels.stride(0) >= pixels.shape[1]  # separate rows, unlike those of `expand`
    if rows and pixels.stride(0) * size % ALIGNMENT == 0 and pixels.data_ptr() % ALIGNMENT == 0:
        return pixels
    step = ALIGNMENT // size
    padded = pixels.new_empty(pixels.shape[0], -(-pixels.shape[1] // step) * step)[:, : pixels.shape[1]]
    return padded.copy_(pixels)
