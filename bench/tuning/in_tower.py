"""Whether tuned choices make whole towers faster: each at its budget, and all together on the nine workloads.

A kernel that is faster alone may be slower between its neighbours, as the launch before it determines the state of
caches and SMs. So a budget's entries are timed in graph replays of the whole tower: none, all, and all but one.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from fusedvit.bench.timing import Contender, captured, interleaved
from fusedvit.bench.towers import Geometry, family_and_spec
from fusedvit.graphs.side_stream import CapturedSideStream
from fusedvit.kernels import backends, tuning_table
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.kernels.tuning_table import Entry, Table
from fusedvit.model.buffers import Capacity, allocate
from fusedvit.model.encoder import encode
from fusedvit.model.items import Item
from fusedvit.model.ops import ops_for
from fusedvit.model.param_names import buffer_shapes, parameter_shapes
from fusedvit.model.plan import EncoderPlan, plan_for, tasks
from fusedvit.model.prepare_weights import prepare
from fusedvit.model.spec import VisionSpec

LEAST = 0.003  # share of a tower's time at a budget that an entry must save, as it costs a kernel to compile
WORTH = 0.01  # share of a tower's time on the workloads that its entries must gain in every round
ROUNDS, ROUND_S, BUDGET_S = 2, 1.5, 0.4
LARGEST_IMAGE, FRAME = 8192, 784  # patches; a larger budget holds an image and a video, for both lists of frames
HEURISTICS, TUNED = "heuristics", "tuned"


class WholeTower:
    """A tower with random weights, which times its graph replays by plan."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        family, self.spec = family_and_spec(geometry)
        self.dtype, self.device = dtype, device
        shapes = dict(parameter_shapes(family.names, self.spec)) | dict(buffer_shapes(family.names, self.spec))

        def source(name: str) -> torch.Tensor:
            bound = {"_min": -1e4, "_max": 1e4}.get(name[-4:])
            random = torch.randn(shapes[name], dtype=dtype, device=device).mul_(0.02)
            return random if bound is None else random.fill_(bound)

        self._weights = prepare(self.spec, family.names, source)
        self._side = CapturedSideStream(device) if device.type == "cuda" else None

    def plan(self, rows: int, entries: Sequence[Entry]) -> EncoderPlan:
        """The plan for `rows` patch tokens by `entries`, and by the heuristics for operations without an entry."""
        return plan_for(self.spec, rows, self.dtype, Target.of(self.device), table_of(entries))

    def ms(self, items: Sequence[Item], plans: Mapping[str, EncoderPlan], seconds: float) -> dict[str, list[float]]:
        """Milliseconds of a replay for `items` by each plan: interleaved, one median per round of `seconds`."""
        contenders = [Contender(name, self._replay(items, plan), "gpu") for name, plan in plans.items()]
        rounds = [interleaved(contenders, self.device, seconds) for _ in range(ROUNDS)]
        return {name: [statistics.median(times[name]) for times in rounds] for name in plans}

    def _replay(self, items: Sequence[Item], plan: EncoderPlan) -> Callable[[], object]:
        capacity = Capacity.of(items, plan.layout(self.spec))
        room = len(plan.overlapped), capacity.tokens  # without it mergers would run in line, on few SMs
        buffers = allocate(self.spec, capacity, self.dtype, self.device, overlap=room)
        buffers.pixels.normal_()
        buffers.grid.copy_(torch.tensor([list(item) for item in items], dtype=torch.int32))
        run = functools.partial(encode, self.spec, self._weights, buffers, ops_for(self.device), plan, self._side)
        return captured(lambda _: run(), 1, self.device)


def proven(
    tower: WholeTower, entries: Sequence[Entry], step: Callable[[str, int, int], None] = lambda text, done, total: None
) -> list[Entry]:
    """The `entries` without which the tower takes more than `LEAST` longer at their budget, in every round.

    Args:
        step: called with (what is timed, number of budgets done, number of budgets).
    """
    budgets, kept = _by_budget(tower.spec, tower.dtype, entries), list[Entry]()
    for done, (rows, of) in enumerate(sorted(budgets.items())):
        step(f"whole tower, {rows} patches", done, len(budgets))
        kept += _proven_at(tower, rows, of)
    return kept


def entries_of(spec: VisionSpec, dtype: torch.dtype, entries: Sequence[Entry]) -> list[Entry]:
    """The `entries` that belong to a tower's operations."""
    return [entry for of in _by_budget(spec, dtype, entries).values() for entry in of.values()]


def _by_budget(spec: VisionSpec, dtype: torch.dtype, entries: Sequence[Entry]) -> dict[int, dict[str, Entry]]:
    """Entries by the budget's patch tokens, and by operation."""
    found: dict[int, dict[str, Entry]] = {}
    by_key = {tuning_table.key_of(entry, "new entry"): entry for entry in entries}
    for rows in sorted({budget(at) for key in by_key for at in (key.rows, key.rows * spec.merge_unit)}):
        of = {task.name: by_key[task.key] for task in tasks(spec, rows, dtype) if task.key in by_key}
        if of:
            found[rows] = of
    return found


def _proven_at(tower: WholeTower, rows: int, of: Mapping[str, Entry]) -> list[Entry]:
    items = content_of(tower.spec, rows)
    sets: dict[str, list[Entry]] = {HEURISTICS: [], TUNED: [*of.values()]}
    if len(of) > 1:
        sets |= {name: [entry for other, entry in of.items() if other != name] for name in of}
    ms = _timed(tower, rows, items, sets)
    needed = [entry for name, entry in of.items() if _saves(ms.get(name, ms[HEURISTICS]), ms[TUNED])]
    if 0 < len(needed) < len(of):
        ms = _timed(tower, rows, items, {HEURISTICS: [], TUNED: needed})
    return needed if _saves(ms[HEURISTICS], ms[TUNED]) else []


def _timed(
    tower: WholeTower, rows: int, items: Sequence[Item], sets: Mapping[str, Sequence[Entry]]
) -> dict[str, list[float]]:
    return tower.ms(items, {name: tower.plan(rows, entries) for name, entries in sets.items()}, BUDGET_S)


def _saves(without: Sequence[float], using: Sequence[float]) -> bool:
    return all(a > (1 + LEAST) * b for a, b in zip(without, using, strict=True))


def content_of(spec: VisionSpec, rows: int) -> list[Item]:
    """Items that nearly fill a budget of `rows` patch tokens, and fit no smaller one: an image; for a large budget an
    image of half of it, and frames of a video."""
    frames = rows // 2 // FRAME if rows > LARGEST_IMAGE else 0
    video = [_largest(spec, frames, FRAME, lambda item: True)] if frames else []
    left = rows - sum(item.tokens for item in video)
    return [_largest(spec, 1, left, lambda item: budget(rows - left + item.tokens) == rows), *video]


def _largest(spec: VisionSpec, frames: int, patches: int, fits: Callable[[Item], bool]) -> Item:
    """The squarest item of `frames` frames, of at most `patches` each, that fits; if none fits, the largest."""
    unit = spec.merge_size
    heights = range(max(math.isqrt(patches) // unit, 1), max(math.isqrt(patches) // unit // 3, 0), -1)
    found = [Item(frames, unit * h, unit * max(patches // (unit * unit * h), 1)) for h in heights]
    return next(filter(fits, found), max(found, key=lambda item: item.tokens))


def table_of(entries: Sequence[Entry]) -> Table:
    """A table of `entries` alone, without the shipped tables and the user's."""
    found = {}
    for entry in entries:
        key = tuning_table.key_of(entry, "new entry")
        backend = backends.backend_named(key.op, entry["backend"])
        assert backend is not None, f"an entry of {entry['backend']}, which is no backend of {key.op}"
        found[key] = tuning_table.config_of(backend, entry["config"], "new entry")
    return Table(found)


def tower_gains(
    tower: WholeTower, entries: Sequence[Entry], grids: Mapping[str, Sequence[Sequence[int]]]
) -> dict[str, list[float]]:
    """By workload, the whole tower's time with heuristics alone over that with `entries`: interleaved graph replays,
    one ratio per round. Workloads for which both plans are equal are left out."""
    found = dict[str, list[float]]()
    for name, grid in grids.items():
        items = [Item(*row) for row in grid]
        rows = sum(item.tokens for item in items)
        plans = {HEURISTICS: tower.plan(rows, []), TUNED: tower.plan(rows, entries)}
        if plans[HEURISTICS] == plans[TUNED]:
            continue
        ms = tower.ms(items, plans, ROUND_S)
        found[name] = [a / b for a, b in zip(ms[HEURISTICS], ms[TUNED], strict=True)]
    return found


def worth_it(gains: Mapping[str, Sequence[float]]) -> bool:
    """Whether a tower is faster by more than `WORTH`, in geometric mean over workloads, in every round. True if no
    workload's plan has entries: these were proven at their own budgets."""
    return all(statistics.geometric_mean(ratios) > 1 + WORTH for ratios in zip(*gains.values(), strict=True))
