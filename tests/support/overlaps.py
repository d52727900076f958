"""Stand-ins for a side stream, and plans and buffers with overlapped mergers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from fusedvit.bench.graph_stress import poison_buffers
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.tile_configs import Target
from fusedvit.kernels.tuning_table import Table
from fusedvit.model.buffers import Capacity, EncoderBuffers, allocate
from fusedvit.model.encoder import encode
from fusedvit.model.merger_overlap import MergerOverlap, SideStream
from fusedvit.model.ops import TORCH, Ops
from fusedvit.model.plan import EncoderPlan, plan_for
from fusedvit.model.spec import VisionSpec
from tests.support.encoding import Encoder, Outputs
from tests.support.specs import QWEN3_VL_8B
from tests.support.towers import Grid, items_of, patches_of

BF16 = torch.bfloat16
H200, A100 = Target(name="NVIDIA H200"), Target(80, 108, 163 * 1024)
Span = tuple[int, int]


def planned(rows: int, spec: VisionSpec = QWEN3_VL_8B, dtype: torch.dtype = BF16, target: Target = H200) -> EncoderPlan:
    """As where nothing is tuned."""
    return plan_for(spec, rows, dtype, target, Table())


@dataclass
class Late:
    """Keeps forks for later: until the join, or until `at_most` wait."""

    at_most: int = 99
    waiting: list[Callable[[], None]] = field(default_factory=list)
    forks: int = 0

    def fork(self, launches: Callable[[], None]) -> None:
        self.forks += 1
        self.waiting.append(launches)
        while len(self.waiting) > self.at_most:
            self.waiting.pop(0)()

    def join(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def overlapping(plan: EncoderPlan, mergers: tuple[int, ...]) -> EncoderPlan:
    """`plan` with `mergers` overlapped with blocks, which run with other configurations then."""
    narrow = replace(plan.fc2, max_programs=1, block_n=32)
    fc1, fc2 = (replace(config, max_programs=2) for config in (plan.merger_fc1, plan.merger_fc2))
    return replace(plan, overlap=MergerOverlap(mergers, (("fc2", narrow),), fc1, fc2))


def buffers_for(encoder: Encoder, grid: Grid, mergers: int) -> EncoderBuffers:
    layout = encoder.plan(patches_of(grid)).layout(encoder.spec)
    capacity = Capacity.of(items_of(grid), layout)
    made = allocate(encoder.spec, capacity, torch.float32, torch.device("cpu"), overlap=(mergers, capacity.tokens))
    poison_buffers(made)
    return made


def outputs(
    encoder: Encoder, buffers: EncoderBuffers, plan: EncoderPlan, side: SideStream | None, ops: Ops = TORCH
) -> Outputs:
    with torch.no_grad():
        made = encode(encoder.spec, encoder.weights, buffers, ops, plan, side)
    return {"hidden": made.hidden.clone(), "merged": torch.stack(made.merged)}


def span(t: torch.Tensor) -> Span:
    """Addresses from its first to past its last element."""
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def touched(name: str, given: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(What an operation of these arguments reads, what it writes) of a run's buffers."""
    if name == "linear":
        x, _, count, out, e = given[:5]
        assert isinstance(e, Epilogue)
        own = [] if e.scratch is None else [e.scratch.sums, e.scratch.counters]
        read = [x, count, *([] if e.residual is None else [e.residual])]
        read += [] if e.norm is None or e.norm.stats is None else [e.norm.stats.partials]
        return [*read, *own], [out, *([] if e.stats is None else [e.stats.partials]), *own]
    if name == "layer_norm":
        return [given[0], given[3]], [given[4]]
    if name == "attention":
        assert isinstance(given[1], Segments)
        return [given[0], given[1].tiles, given[1].num_tiles], [given[2]]
    assert name == "vision_metadata", f"{name} is not known here"
    return [given[0]], list(vars(given[2]).values())


class Forks:
    """Launches forks at once, and knows while it does."""

    forking = False

    def fork(self, launches: Callable[[], None]) -> None:
        self.forking = True
        launches()
        self.forking = False

    def join(self) -> None:
        assert not self.forking


class Recorder(Forks):
    """Notices what each operation touches, and which operations are overlapped with each other."""

    def __init__(self) -> None:
        self.open: list[tuple[list[Span], list[Span]]] = []  # of forks, until the join
        self.conflicts: list[str] = []
        names = [f.name for f in fields(Ops) if f.name != "name"]
        self.ops = Ops("recorded", *(self._noted(name, getattr(TORCH, name)) for name in names))

    def _noted(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            reads, writes = ([span(t) for t in tensors if t.numel()] for tensors in touched(name, given))
            if self.forking:
                self.open.append((reads, writes))
            else:
                self.conflicts += [name for theirs in self.open if _meet(theirs, (reads, writes))]
            return run(*given)

        return call

    def join(self) -> None:
        super().join()
        self.open.clear()


def _meet(a: tuple[list[Span], list[Span]], b: tuple[list[Span], list[Span]]) -> bool:
    """Whether one writes what the other reads or writes."""
    pairs = [(w, t) for w in a[1] for t in (*b[0], *b[1])] + [(w, t) for w in b[1] for t in (*a[0], *a[1])]
    return any(w[0] < t[1] and t[0] < w[1] for w, t in pairs)
