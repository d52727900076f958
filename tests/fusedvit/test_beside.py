"""Deepstack mergers beside the blocks: which, on what memory, and that their place in time changes nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch

from fusedvit.aot import QWEN3_VL_8B
from fusedvit.bench.poison import poison_buffers
from fusedvit.beside import Beside
from fusedvit.buffers import Capacity, EncoderBuffers, allocate
from fusedvit.encoder import encode
from fusedvit.graphs.branch import Branch, Serial
from fusedvit.graphs.budgets import check_limits
from fusedvit.graphs.manager import GraphManager
from fusedvit.graphs.packing import Batch
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.configs import Target
from fusedvit.kernels.epilogue import Epilogue
from fusedvit.kernels.hopper import compat
from fusedvit.kernels.tables import Table
from fusedvit.ops import TORCH, Ops
from fusedvit.plan import EncoderPlan, plan_for
from fusedvit.program import EncoderProgram
from fusedvit.spec import VisionSpec
from tests.fusedvit.encoding import Encoder, Outputs
from tests.fusedvit.towers import GRIDS, Grid, assert_bitwise, items_of, patches_of, pixels_for, vision_tower
from tests.graphs.stand_in import CpuCapture

CPU, BF16 = torch.device("cpu"), torch.bfloat16
H200, A100 = Target(name="NVIDIA H200"), Target(80, 108, 163 * 1024)
DEEPSTACK = [3, 0, 2, 4]  # of five blocks, not in their order; after the last one nothing is left to be beside of


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


def beside_of(plan: EncoderPlan, mergers: tuple[int, ...]) -> EncoderPlan:
    """`plan` with these mergers beside two blocks each, which other configurations run then."""
    narrow = replace(plan.fc2, max_programs=1, block_n=32)
    made = Beside(mergers, (2,) * len(mergers), 4, (("fc2", narrow),), plan.merger_fc1, plan.merger_fc2)
    return replace(plan, beside=made)


def planner(mergers: tuple[int, ...]) -> Callable[..., EncoderPlan]:
    return lambda spec, tokens, dtype, target: beside_of(plan_for(spec, tokens, dtype, target), mergers)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(vision_tower(depth=5, deepstack_visual_indexes=DEEPSTACK), TORCH)


def buffers_for(encoder: Encoder, grid: Grid, mergers: int) -> EncoderBuffers:
    layout = encoder.plan(patches_of(grid)).layout(encoder.spec)
    capacity = Capacity.of(items_of(grid), layout)
    made = allocate(encoder.spec, capacity, torch.float32, CPU, apart=(mergers, capacity.tokens))
    poison_buffers(made)
    return made


def outputs(encoder: Encoder, buffers: EncoderBuffers, plan: EncoderPlan, branch: Branch, ops: Ops = TORCH) -> Outputs:
    with torch.no_grad():
        made = encode(encoder.spec, encoder.weights, buffers, ops, plan, branch)
    return {"hidden": made.hidden.clone(), "merged": made.merged.clone()}


@pytest.mark.parametrize("grid", [GRIDS["mix"], GRIDS["one row"]], ids=["mix", "one row"])
@pytest.mark.parametrize("mergers", [(1, 2, 0), (2,)], ids=["all", "one"])
def test_when_a_merger_runs_changes_no_bit(encoder: Encoder, mergers: tuple[int, ...], grid: Grid) -> None:
    """At once, one fork behind, or at the very end: all between these is what a GPU may do. And in line."""
    plan = beside_of(encoder.plan(patches_of(grid)), mergers)
    pixels = pixels_for(vision_tower(), grid)
    answers = []
    for branch in (Serial(), Late(1), Late()):
        for room in (len(mergers), 0):  # without memory of their own they are in line, whatever the branch
            buffers = buffers_for(encoder, grid, room)
            encoder.load(buffers, grid, pixels)
            answers.append(outputs(encoder, buffers, plan, branch))
        assert isinstance(branch, Serial) or branch.forks == len(mergers)
    assert all(bool(answer["merged"].isfinite().all()) for answer in answers)
    for answer in answers[1:]:
        assert_bitwise(answer, answers[0])


# memory

Span = tuple[int, int]


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


class Watch:
    """Notes what each operation touches, and which operations are beside each other."""

    def __init__(self) -> None:
        self.open: list[tuple[list[Span], list[Span]]] = []  # of forks, until the join
        self.forking = False
        self.conflicts: list[str] = []
        names = [f.name for f in fields(Ops) if f.name != "name"]
        self.ops = Ops("watched", *(self._noted(name, getattr(TORCH, name)) for name in names))

    def _noted(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            reads, writes = ([span(t) for t in tensors if t.numel()] for tensors in touched(name, given))
            if self.forking:
                self.open.append((reads, writes))
            else:
                self.conflicts += [name for theirs in self.open if _meet(theirs, (reads, writes))]
            return run(*given)

        return call

    def fork(self, launches: Callable[[], None]) -> None:
        self.forking = True
        launches()
        self.forking = False

    def join(self) -> None:
        self.open.clear()


def _meet(a: tuple[list[Span], list[Span]], b: tuple[list[Span], list[Span]]) -> bool:
    """Whether one writes what the other reads or writes."""
    pairs = [(w, t) for w in a[1] for t in (*b[0], *b[1])] + [(w, t) for w in b[1] for t in (*a[0], *a[1])]
    return any(w[0] < t[1] and t[0] < w[1] for w, t in pairs)


def watched(encoder: Encoder, spoil: Callable[[EncoderBuffers], EncoderBuffers]) -> list[str]:
    grid, mergers = GRIDS["mix"], (1, 2, 0)
    buffers, watch = spoil(buffers_for(encoder, grid, len(mergers))), Watch()
    encoder.load(buffers, grid, pixels_for(vision_tower(), grid))
    outputs(encoder, buffers, beside_of(encoder.plan(patches_of(grid)), mergers), watch, watch.ops)
    assert not watch.open, "joined"
    return watch.conflicts


def test_what_is_concurrent_shares_no_memory(encoder: Encoder) -> None:
    assert watched(encoder, lambda buffers: buffers) == []


@pytest.mark.parametrize("name", ["hidden", "stats", "inner"])
def test_shared_memory_would_be_seen(encoder: Encoder, name: str) -> None:
    def spoil(b: EncoderBuffers) -> EncoderBuffers:
        assert b.apart is not None
        common = {"hidden": b.hidden.expand(3, *b.hidden.shape), "stats": b.stats.expand(3, -1), "inner": b.wide}
        return replace(b, apart=replace(b.apart, **{name: common[name]}))

    assert watched(encoder, spoil) != []


# in a graph


def test_graphs_of_several_budgets_in_the_same_buffers(encoder: Encoder) -> None:
    """On the stand-in for capture; whose replays come late, as on a GPU, and are none the worse for it."""
    branch, spec = Late(), encoder.spec
    programs = [EncoderProgram(spec, TORCH, torch.float32, CPU, lambda: encoder.weights, branch, planner((1, 2, 0)))]
    programs.append(EncoderProgram(spec, TORCH, torch.float32, CPU, lambda: encoder.weights))
    managers = [GraphManager(check_limits((4, 16, 64), 4, 8), program, CpuCapture()) for program in programs]
    grids: list[Grid] = [[(1, 8, 8)], [(1, 2, 2)], [(3, 4, 6)], [(1, 4, 4)], [(1, 16, 16)], [(1, 2, 4)]]
    for seed, grid in enumerate(grids):
        tokens = patches_of(grid)
        budget = next(b for b in (4, 16, 64) if 4 * b >= tokens)
        got = []
        for program, manager in zip(programs, managers, strict=True):

            def load(program: EncoderProgram = program) -> None:
                program.load_grid(budget, tuple(grid))  # noqa: B023
                program.buffers(budget).pixels[:tokens] = pixels_for(vision_tower(), grid, seed=seed)  # noqa: B023

            def unload(program: EncoderProgram = program) -> None:
                part = program.buffers(budget)  # noqa: B023
                merged = part.merged[:, : tokens // 4].clone()  # noqa: B023
                got.append({"hidden": part.hidden[:tokens].clone(), "merged": merged})  # noqa: B023

            assert manager.replay(Batch(budget, ()), load, unload)
        assert_close(*got)
    assert branch.forks == 3 * (len(grids) + 2 * 3), "each budget's rehearsal and capture too"
    more = managers[0].held_bytes() - managers[1].held_bytes()
    whole = programs[0].whole()
    assert whole.apart is not None and whole.apart.hidden.shape == (3, 256, spec.hidden_size)
    assert more == sum(t.nbytes for t in vars(whole.apart).values()) > 3 * whole.hidden.nbytes
    assert programs[0].buffers(4).apart is not None and programs[1].whole().apart is None


def assert_close(a: Outputs, b: Outputs) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4)


# what is planned


def planned(rows: int, spec: VisionSpec = QWEN3_VL_8B, dtype: torch.dtype = BF16, target: Target = H200) -> EncoderPlan:
    return plan_for(spec, rows, dtype, target, Table())


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a Hopper GPU; the interpreter, which runs no Gluon, is not asked."""
    monkeypatch.setattr(compat, "usable", lambda capability: capability == 90)


@pytest.mark.skipif(not compat.AVAILABLE, reason=compat.MISSING)
@pytest.mark.parametrize("rows", [256, 768, 896, 1024])
def test_small_budgets_of_a_deepstack_tower_have_mergers_beside(rows: int, on_hopper: None) -> None:
    plan = planned(rows)
    assert plan.beside is not None and plan.beside.mergers[0] == 0
    narrow = plan.narrowed()
    for name, config in plan.beside.chain:
        assert getattr(narrow, name) == config
        if "attention" in name:
            assert config.block_m == getattr(plan, name).block_m, "one list of tiles"
            assert config.max_programs <= config.ctas * (H200.num_sms - plan.beside.sms)
        elif config.splits == 1:
            assert config.max_programs <= H200.num_sms - plan.beside.sms
    for config in (plan.beside.fc1, plan.beside.fc2):
        assert config.max_programs == plan.beside.sms and config.splits == 1 and not config.overlap
    assert plan == planned(rows) and plan.choices() == replace(plan, beside=None).choices()
    ends = [QWEN3_VL_8B.deepstack[m] + 1 + n for m, n in zip(plan.beside.mergers, plan.beside.blocks, strict=True)]
    assert all(end <= QWEN3_VL_8B.depth for end in ends)


@pytest.mark.skipif(not compat.AVAILABLE, reason=compat.MISSING)
@pytest.mark.parametrize(
    "other",
    [
        {"rows": 4096},
        {"spec": replace(QWEN3_VL_8B, deepstack=())},
        {"spec": replace(QWEN3_VL_8B, deepstack=(26,))},
        {"dtype": torch.float32},
        {"target": A100},
    ],
    ids=["many rows", "no deepstack", "after the last block", "fp32", "another GPU"],
)
def test_else_all_are_in_line(other: dict[str, Any], on_hopper: None) -> None:
    plan = planned(**({"rows": 256} | other))
    assert plan.beside is None and plan.narrowed() is plan
