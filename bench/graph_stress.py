"""`python -m fusedvit.bench.graph_stress`: whether replayed graphs give right outputs under stress. Needs a GPU.

On a tower of Qwen3-VL-8B's width with four blocks, so that tens of thousands of calls fit in a minute. Each check
returns counts, and of those that count what is wrong every one must be zero.
"""

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse, unfuse
from fusedvit.bench.parity import build, pixels_of
from fusedvit.bench.report import passport
from fusedvit.bench.workloads import Grid, tokens
from fusedvit.config import FuseConfig
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.model.buffers import EncoderBuffers
from fusedvit.model.items import Item
from fusedvit.runtime.runner import Runtime, run_eager

DEVICE = torch.device("cuda")
CONFIG = FuseConfig(token_budgets=(64, 256, 1024), max_items=16, max_frames=64)
FREE_MIB: list[float] = [4096, 256, 128, 64, 32, 16, 8, 4, 2, 2048]


def poison_buffers(buffers: EncoderBuffers) -> None:
    """NaN into every float and fixed garbage into every integer of `buffers`, so that a launch that reads what this run
    did not write shows.

    Counters of split products are left alone: every launch leaves them at zero.
    """
    for name, tensor in buffers.tensors().items():
        if name == "scratch.counters":
            continue
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.random_(-(2**30), 2**30, generator=torch.Generator(tensor.device).manual_seed(0))


def random_grid(rng: random.Random, largest: int = 3000) -> Grid:
    """Images, videos or a mix, at most `largest` patch tokens."""
    grid: Grid = []
    for _ in range(rng.randint(1, 6)):
        t = rng.choice((1, 1, 1, 2, 3, 5))
        row = (t, 2 * rng.randint(1, 14), 2 * rng.randint(1, 14))
        if tokens([*grid, row]) <= largest:
            grid.append(row)
    return grid or [(1, 2, 2)]


def call(tower: nn.Module, pixels: torch.Tensor, grid: Grid | torch.Tensor) -> list[torch.Tensor]:
    """Every tensor of one fused call; a grid that is no tensor goes as one on the CPU."""
    out = tower(pixels, grid_thw=torch.as_tensor(grid))
    return [out.last_hidden_state, out.pooler_output, *out.deepstack_features]


def somewhere(grid: Grid, i: int) -> torch.Tensor:
    """On the GPU for even `i`, on the CPU for odd: the host has not read it when its replay begins, or has."""
    return torch.tensor(grid, device=("cuda", "cpu")[i % 2])


def eager(handle: FusedEncoder, pixels: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    """The same items without a graph, in one batch, with the configurations of the budget they fall into."""
    parameter = next(handle.tower.parameters())
    runtime = Runtime(
        handle.spec, handle.weights, parameter.device, parameter.dtype, handle.graphs(), limits=handle.graphs().limits
    )
    out = run_eager(runtime, pixels, [Item(*row) for row in grid])
    return [out.hidden, *out.merged]


def poison(handle: FusedEncoder) -> None:
    """Poisons the static buffers and free pool memory."""
    poison_buffers(handle.graphs().encoder.whole())
    blocks = [torch.full((2**22,), float("nan"), device=DEVICE) for _ in range(8)]
    del blocks


def graph_equals_eager(tower: nn.Module, handle: FusedEncoder, batches: int) -> dict[str, int]:
    """Random batches, poisoned between replays; small, large, small at the end."""
    rng = random.Random(0)
    grids = [random_grid(rng) for _ in range(batches)] + [[(1, 4, 4)], [(1, 48, 48)], [(1, 4, 4)]]
    wrong = nans = 0
    for i, grid in enumerate(grids):
        pixels = pixels_of(grid, torch.bfloat16, i)
        want = eager(handle, pixels, grid)
        poison(handle)
        got = call(tower, pixels, somewhere(grid, i))
        nans += any(bool(torch.isnan(t).any()) for t in got)
        wrong += not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return {"batches": len(grids), "wrong": wrong, "with_nan": nans}


def held_outputs(tower: nn.Module, calls: int) -> dict[str, int]:
    """Outputs that later calls changed, by checksums right after their call and at the end."""
    rng = random.Random(1)
    held: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    changed = 0
    for i in range(calls):
        grid = random_grid(rng, 400)
        got = call(tower, pixels_of(grid, torch.bfloat16, i), somewhere(grid, i))
        held.append((got, _checksum(got)))
        if len(held) == 500:
            changed += _changed(held)
            held.clear()
    return {"outputs": calls, "changed": changed + _changed(held)}


def _checksum(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.flatten().view(torch.int16).sum(dtype=torch.int64) for t in tensors])


def _changed(held: list[tuple[list[torch.Tensor], torch.Tensor]]) -> int:
    return sum(not torch.equal(_checksum(tensors), before) for tensors, before in held)


def equal_totals(tower: nn.Module, handle: FusedEncoder, pairs: int) -> dict[str, int]:
    """Two layouts with one total, one after the other: neither may get the other's boundaries."""
    rng = random.Random(2)
    wrong = 0
    for i in range(pairs):
        first, second = _equal_pair(rng)
        pixels = pixels_of(first, torch.bfloat16, i)
        for grid in (first, second):
            got, want = call(tower, pixels, somewhere(grid, i)), eager(handle, pixels, grid)
            wrong += not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return {"pairs": pairs, "wrong": wrong}


def _equal_pair(rng: random.Random) -> tuple[Grid, Grid]:
    h, w, t = 2 * rng.randint(1, 9), 2 * rng.randint(1, 9), rng.randint(2, 4)
    other: Grid = [(1, 2 * rng.randint(1, 8), 2 * rng.randint(1, 8))]
    return rng.choice(
        (
            ([(1, h, w), *other], [(1, w, h), *other]),
            ([(t, h, w)], [(1, h, w)] * t),
            ([(1, h, w), *other], [*other, (1, h, w)]),
            ([(t, h, w)], [(1, t * h, w)]),
        )
    )


def threads_and_streams(
    tower: nn.Module, handle: FusedEncoder, threads: int, streams: int, calls: int
) -> dict[str, int]:
    """Threads that call at once, each cycling through its own streams, against outputs computed before."""
    rng = random.Random(3)
    cases = []
    for i in range(16):
        grid = random_grid(rng, 900)
        pixels = pixels_of(grid, torch.bfloat16, i)
        cases.append((somewhere(grid, i), pixels, eager(handle, pixels, grid)))
    torch.cuda.synchronize()
    wrong = [0] * threads

    def work(me: int) -> None:
        mine = [torch.cuda.Stream() for _ in range(streams)]
        order = random.Random(me)
        with torch.inference_mode():
            for i in range(calls):
                grid, pixels, want = order.choice(cases)
                with torch.cuda.stream(mine[i % streams]):
                    got = call(tower, pixels, grid)
                    if order.random() < 0.05:
                        torch.cuda._sleep(order.randint(1, 200_000))
                    same = torch.stack([(a == b).all() for a, b in zip(got, want, strict=True)]).all()
                    wrong[me] += not bool(same)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"calls": threads * calls, "wrong": sum(wrong)}


def captures_under_load(tower: nn.Module, handle: FusedEncoder, captures: int) -> dict[str, int]:
    """Captures while another thread allocates, copies and pins."""
    stop = threading.Event()
    done = [0]

    def disturb() -> None:
        stream = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(stream):
                host = torch.randn(1024, pin_memory=True)
                block = torch.empty(random.randint(1024, 2**22), device=DEVICE)
                block[:1024].copy_(host, non_blocking=True)
                stream.synchronize()
                done[0] += 1

    other = threading.Thread(target=disturb)
    other.start()
    pixels, grid = pixels_of([(1, 8, 8)], torch.bfloat16, 0), [(1, 8, 8)]
    want = eager(handle, pixels, grid)
    right = 0
    before = handle.stats()["graphs"]["captures"]
    for _ in range(captures):
        handle.drop_graphs()
        right += all(torch.equal(a, b) for a, b in zip(call(tower, pixels, grid), want, strict=True))
    stop.set()
    other.join()
    captured = handle.stats()["graphs"]["captures"] - before
    return {"captures": captured, "right": right, "disturbances": done[0]}


def out_of_memory(tower: nn.Module, handle: FusedEncoder, free_mib: list[float]) -> Iterator[dict[str, Any]]:
    """Calls with only so many MiB of memory free: the output is right, or the call raises for want of memory.

    Afterwards, with memory back, the output must be right, and the tower must hold nothing more than before.
    """
    grid: Grid = [(1, 16, 16), (2, 8, 8)]
    pixels = pixels_of(grid, torch.bfloat16, 0)
    want = eager(handle, pixels, grid)
    for room in free_mib:
        handle.graphs().manager.release()  # weights stay prepared
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        with _only(room):
            answer = _try(tower, pixels, grid, want)
            captured = handle.stats()["graphs"]["held_mib"] > 0
        handle.graphs().manager.release()  # weights stay prepared
        torch.cuda.synchronize()
        leak = (torch.cuda.memory_allocated() - base) / 2**20
        after = _try(tower, pixels, grid, want)
        yield {"room_mib": room, "answer": answer, "captured": captured, "afterwards": after, "leak_mib": leak}


def _try(tower: nn.Module, pixels: torch.Tensor, grid: Grid, want: list[torch.Tensor]) -> str:
    try:
        got = call(tower, pixels, grid)
    except torch.cuda.OutOfMemoryError:
        return "refused"
    return "right" if all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) else "wrong"


@contextlib.contextmanager
def _only(room: float) -> Iterator[None]:
    """Leaves `room` MiB free: limits the process, and allocates everything under the limit but that."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + (room + 256) * 2**20) / total))
    hogs = []
    try:
        for size in (64, 16, 4, 2):
            while True:
                try:
                    hogs.append(torch.empty(size * 2**20, dtype=torch.uint8, device=DEVICE))
                except torch.cuda.OutOfMemoryError:
                    break
        freed = 0.0
        while hogs and freed < room:
            freed += hogs.pop(0).nbytes / 2**20
        torch.cuda.empty_cache()
        yield
    finally:
        hogs.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def stress(scale: float = 1.0) -> dict[str, Any]:
    """Every check, and what each took in seconds; `scale` shortens them all."""
    tower, _ = build(4, torch.bfloat16, False)
    handle = fuse(tower, CONFIG)
    handle.warmup()

    def times(n: int) -> int:
        return max(1, int(n * scale))

    checks: dict[str, Callable[[], Any]] = {
        "graph_equals_eager": lambda: graph_equals_eager(tower, handle, times(500)),
        "equal_totals": lambda: equal_totals(tower, handle, times(2000)),
        "held_outputs": lambda: held_outputs(tower, times(10_000)),
        "threads_and_streams": lambda: threads_and_streams(tower, handle, 8, 4, times(1250)),
        "captures_under_load": lambda: captures_under_load(tower, handle, times(100)),
        "out_of_memory": lambda: list(out_of_memory(tower, handle, FREE_MIB)),
    }
    report: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name, check in checks.items():
        begin = time.perf_counter()
        report[name] = check()
        seconds[name] = time.perf_counter() - begin
    unfuse(tower)
    return report | {"took_s": seconds}


def wrong_in(found: dict[str, Any]) -> int:
    """Wrong outputs of all checks."""
    wrong = sum(found[name]["wrong"] for name in ("graph_equals_eager", "equal_totals", "threads_and_streams"))
    wrong += found["held_outputs"]["changed"]
    wrong += found["captures_under_load"]["captures"] - found["captures_under_load"]["right"]
    return wrong + sum(row["answer"] == "wrong" or row["afterwards"] != "right" for row in found["out_of_memory"])


def main(argv: list[str] | None = None) -> int:
    """Writes the counts as JSON; the exit code is 1 where an output was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", required=True)
    parser.add_argument("--commit", default="", help="recorded as it is; read from git when left out")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the repetitions")
    args = parser.parse_args(argv)
    given = {"--scale": args.scale, "--json": Path(args.json)}
    with torch.inference_mode():
        found = stress(args.scale)
    print(json.dumps(found, indent=1))
    document = {"passport": passport("python -m fusedvit.bench.graph_stress", given, args.commit), "trust": found}
    Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(wrong_in(found) > 0)


if __name__ == "__main__":
    sys.exit(main())
