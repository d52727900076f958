"""`python -m fusedvit.bench.beside`: deepstack mergers in line, beside the blocks and beside the last one, in several
ways, or launches that begin before the last has ended or when it is their turn, by a replay of the whole tower. Every
graph must give the bits that its own launches give in line. Needs a GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from fusedvit.bench import towers
from fusedvit.bench.passport import passport
from fusedvit.bench.poison import poison_buffers
from fusedvit.bench.timing import Contender, in_turns, spread
from fusedvit.bench.workloads import WORKLOADS, Grid, tokens
from fusedvit.graphs.capture import CudaCapture
from fusedvit.graphs.limits import check_limits
from fusedvit.graphs.manager import GraphManager
from fusedvit.graphs.side_stream import PRIORITY, CapturedSideStream
from fusedvit.kernels.launch import compiling_only
from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.model.merger_overlap import MERGER, SMS, on_sms
from fusedvit.model.ops import TRITON
from fusedvit.model.paired import paired
from fusedvit.model.plan import EncoderPlan, chosen_for, plan_for
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import EncoderWeights
from fusedvit.runtime.captured_encoder import EncoderProgram

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
FEW = ("1 x 224 px", "1 x 448 px", "video, 8 frames 224 px", "1 x 576 px")  # patches, so that mergers weigh
GRIDS: dict[str, Grid] = {name: WORKLOADS[name] for name in FEW} | {
    "320 patches": [(1, 16, 20)],
    "512 patches": [(1, 16, 32)],
    "1024 patches": [(1, 32, 32)],
    "2048 patches": [(1, 32, 64)],
}
# Of which some launches begin when it is their turn.
LONG: dict[str, Grid] = {"2560 patches": [(1, 40, 64)], "3072 patches": [(1, 48, 64)]}
LONG |= {name: WORKLOADS[name] for name in ("1 x 1024 px", "8 x 448 px", "1 x 2048 px", "video, 64 frames 448 px")}
SMALLEST, BATCHES = 64, 5  # merged tokens; batches that bits are compared on
LOW, HIGH = (0, -1), (PRIORITY, 0)  # priorities of (mergers, blocks)


class Planned(Protocol):
    """What a `Line` is made by; `priorities` of the mergers and of the blocks."""

    @property
    def priorities(self) -> tuple[int, int]: ...

    def plan(self, spec: VisionSpec, rows: int, dtype: torch.dtype, target: Target) -> EncoderPlan: ...


@dataclass(frozen=True)
class Way:
    """One way to run the mergers, or the blocks.

    Attributes:
        sms: theirs; None for what is planned, 0 for all that there are, whoever else wants them.
        mergers: which of them; None for those that are planned.
        priorities: of the mergers and of the blocks.
        tiles_stay: blocks beside a merger run as all others do.
        paired: the last merger that is in line then may run beside the tower's last one.
        early, late: operations of blocks that begin before the last launch has ended, or not, whatever is planned.
    """

    sms: int | None = None
    mergers: tuple[int, ...] | None = None
    priorities: tuple[int, int] = HIGH
    tiles_stay: bool = False
    paired: bool = True
    early: tuple[str, ...] = ()
    late: tuple[str, ...] = ()

    def plan(self, spec: VisionSpec, rows: int, dtype: torch.dtype, target: Target) -> EncoderPlan:
        """As `plan_for`, but for what this way says."""
        plan = plan_for(spec, rows, dtype, target)
        beside = plan.beside
        chosen = chosen_for(spec, rows, dtype, target)
        if self.sms is not None:
            found = on_sms(spec, chosen, dtype, target, self.sms or SMS[0], True)
            beside = None if found is None else found[1]
        if beside is not None and self.mergers is not None:
            kept = [pair for pair in zip(beside.mergers, beside.blocks, strict=True) if pair[0] in self.mergers]
            beside = replace(beside, mergers=tuple(m for m, _ in kept), blocks=tuple(b for _, b in kept))
        if beside is not None and self.sms == 0:
            fc1, fc2 = (_alone(chosen[name][1]) for name in MERGER)
            beside = replace(beside, sms=0, fc1=fc1, fc2=fc2)
        if beside is not None and (self.sms == 0 or self.tiles_stay):
            beside = replace(beside, chain=())
        beside = beside if beside is not None and beside.mergers else None
        pair = paired(spec, chosen, dtype, target, beside) if self.paired else None
        return self._begun(replace(plan, beside=beside, paired=pair))

    def _begun(self, plan: EncoderPlan) -> EncoderPlan:
        """`plan` with `early` and `late`, beside mergers too."""
        begin = dict.fromkeys(self.early, True) | dict.fromkeys(self.late, False)
        changed = {name: replace(getattr(plan, name), pdl=early) for name, early in begin.items()}
        hidden = plan.beside
        if hidden is not None:
            chain = [(name, replace(c, pdl=begin[name]) if name in begin else c) for name, c in hidden.chain]
            changed["beside"] = replace(hidden, chain=tuple(chain))
        return replace(plan, **changed)


def _alone(config: Any) -> Any:
    """Begun when it is its turn, in one part of K."""
    return replace(config, pdl=False, **({"splits": 1} if hasattr(config, "splits") else {}))


ALL = (0, 1, 2)
WAYS = {
    "in line": Way(mergers=(), paired=False),
    "planned": Way(),
    "planned, last in line": Way(paired=False),
    "last paired": Way(mergers=()),
    "planned, equal": Way(priorities=(0, 0)),
    "planned, after blocks": Way(priorities=LOW),
    "planned, tiles stay": Way(tiles_stay=True),
    "all SMs, after blocks": Way(0, ALL, LOW),
    "all SMs, equal": Way(0, ALL, (0, 0)),
    "6 SMs, first two": Way(6, (0, 1), paired=False),
    "6 SMs, tiles stay": Way(6, (0, 1), tiles_stay=True, paired=False),
    "24 SMs": Way(24, ALL),
}
BLOCK = ("qkv", "attention", "proj", "fc1", "fc2")
SOME = {"all": BLOCK, "all but qkv": BLOCK[1:], "proj and fc2": ("proj", "fc2")} | {op: (op,) for op in BLOCK}
BEGUN = {f"{of} early": Way(early=ops) for of, ops in SOME.items()} | {
    f"{of} late": Way(late=ops) for of, ops in SOME.items()
}


class Line:
    """A way's graph for one size, over buffers of its own."""

    def __init__(self, spec: VisionSpec, weights: EncoderWeights, way: Planned, grid: Grid) -> None:
        merged = budget(max(SMALLEST * spec.merge_unit, tokens(grid))) // spec.merge_unit
        side, blocks = way.priorities
        branch = CapturedSideStream(DEVICE, side)
        self.program = EncoderProgram(spec, TRITON, DTYPE, DEVICE, lambda: weights, branch, way.plan)
        self.manager = GraphManager(check_limits((merged,), 8, 64), self.program, CudaCapture(DEVICE, blocks))
        self.budget, self.grid, self.rows = merged, grid, tokens(grid)
        self.plan = way.plan(spec, merged * spec.merge_unit, DTYPE, Target.of(DEVICE))

    def compile(self) -> None:
        """Under `compiling_only`."""
        self.program.allocate(self.manager.limits)
        self.program.rehearse(self.budget, 1)
        self.program.run(self.budget)

    def capture(self) -> Callable[[], None]:
        """The graph's replay, a batch in its buffers."""
        if not self.manager.ready(self.budget):
            raise RuntimeError("capture failed, see the warning")
        self.load(0)
        return self.manager.graph(self.budget).replay

    def load(self, seed: int) -> None:
        """A random batch, everything else poison."""
        part = self.program.buffers(self.budget)
        poison_buffers(part)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        part.pixels[: self.rows].normal_(generator=generator)
        self.program.load_grid(self.budget, tuple(self.grid))

    def answer(self, run: Callable[[], None]) -> list[torch.Tensor]:
        """What `run` leaves in the buffers, copied."""
        run()
        part = self.program.buffers(self.budget)
        merged = part.merged[:, : self.rows // (part.hidden.shape[0] // part.merged.shape[1])]
        return [part.hidden[: self.rows].clone(), merged.clone()]

    def wrong(self, replay: Callable[[], None], batches: int = BATCHES) -> int:
        """Of so many batches, each after poison, those on which graph and launches in line differ or hold NaN."""
        count = 0
        for seed in range(batches):
            self.load(seed)
            ours = self.answer(replay)
            self.load(seed)
            theirs = self.answer(lambda: self.program.run(self.budget))
            count += not all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(ours, theirs, strict=True))
        return count


def measured(lines: dict[str, Line], seconds: float) -> Iterator[dict[str, Any]]:
    """Each way of one size, the first of which the others are compared with."""
    replays = {name: line.capture() for name, line in lines.items()}
    wrong = {name: line.wrong(replays[name]) for name, line in lines.items()}
    times = in_turns([Contender(name, replay, "gpu") for name, replay in replays.items()], DEVICE, seconds)
    first = spread(next(iter(times.values()))).median
    for name, line in lines.items():
        found = spread(times[name])
        apart = {"beside": line.plan.beside, "paired": line.plan.paired}
        planned = {key: None if value is None else asdict(value) for key, value in apart.items()}
        saved = 1e3 * (first - found.median)
        yield {"way": name, "wrong": wrong[name], "ms": asdict(found), "saved_us": saved} | planned
        line.manager.release()


def _print(row: dict[str, Any]) -> None:
    beside, pair = row["beside"], row["paired"]
    what = [f"{len(beside['mergers'])} on {beside['sms'] or 'all'}"] if beside else []
    what += [f"{pair['merger']} with the last"] if pair else []
    verdict = "" if not row["wrong"] else f"  WRONG on {row['wrong']} of {BATCHES}"
    where, ms = ", ".join(what) or "in line", row["ms"]["median"]
    print(f"{row['size']:24} {row['way']:24} {where:26} {ms:8.4f} ms {row['saved_us']:8.1f} us{verdict}")


def tower_of(name: str) -> tuple[VisionSpec, EncoderWeights]:
    """One of `towers.GEOMETRIES` with random weights, prepared."""
    tower, _ = towers.build(towers.GEOMETRIES[name], DTYPE, DEVICE)
    return towers.prepared(tower)


def main() -> int:
    """Prints a table and a JSON line; exit code 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH", required=True)
    parser.add_argument("--commit", default="", help="recorded as it is; read from git when left out")
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=sorted(set(towers.GEOMETRIES) - {"tiny"}))
    ways, grids = WAYS | BEGUN, GRIDS | LONG
    parser.add_argument("--size", nargs="*", default=list(GRIDS), choices=list(grids))
    parser.add_argument("--way", nargs="*", default=list(WAYS), choices=list(ways), help="the first is compared with")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each size")
    args = parser.parse_args()
    begin = time.perf_counter()
    spec, weights = tower_of(args.tower)
    lines = {s: {way: Line(spec, weights, ways[way], grids[s]) for way in args.way} for s in args.size}
    with compiling_only():
        for line in (line for of_size in lines.values() for line in of_size.values()):
            line.compile()
    compiled = time.perf_counter()
    found = []
    for size, of_size in lines.items():
        for row in measured(of_size, args.seconds):
            found.append({"size": size} | row)
            _print(found[-1])
    document: dict[str, Any] = {"passport": passport("beside", sys.argv[1:], args.commit), "tower": args.tower}
    document |= {"rows": found, "compiled_s": compiled - begin, "took_s": time.perf_counter() - begin}
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
    print(json.dumps({"took_s": document["took_s"], "wrong": sum(row["wrong"] for row in found)}))
    return int(any(row["wrong"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
