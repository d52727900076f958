"""`python -m fusedvit.bench.graph_stress`: whether replayed graphs give right outputs under stress. Needs a GPU.

It runs a tower of Qwen3-VL-8B's width with four blocks, so that tens of thousands of calls fit in a minute. Each check
returns counts; those named in `BAD` count faults and must be zero. The document is written after each check, so that a
check that stops loses none of the others. `--two-gpus` runs the checks that need two.
"""

import contextlib
import copy
import functools
import json
import random
import statistics
import tempfile
import threading
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse
from fusedvit.bench.records import arguments, need_gpus, passport, run_program, today, write
from fusedvit.bench.towers import GEOMETRIES, build, pixels_for
from fusedvit.bench.workloads import Grid, tokens
from fusedvit.config import FuseConfig
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.model.buffers import EncoderBuffers
from fusedvit.model.items import Item
from fusedvit.runtime.runner import Runtime, run_eager

DEVICE = torch.device("cuda")
FOUR_BLOCKS = GEOMETRIES["Qwen3-VL-8B"].but(depth=4, deepstack_visual_indexes=[0])
CONFIG = FuseConfig(token_budgets=(64, 256, 1024), max_items=16, max_frames=64, compile="now")
BAD = ("wrong", "with_nan", "changed", "wrongly_answered", "not_right", "compiles")  # counts of faults: 0 each
CLOSE = 0.02  # relative difference of two budgets' graphs, by norms: several times bf16's rounding
FREE_MIB: list[float] = [4096, 256, 128, 64, 32, 16, 8, 4, 2, 2048]


def poison_buffers(buffers: EncoderBuffers) -> None:
    """Fills floats of `buffers` with NaN and integers with fixed garbage: a launch that reads values which this run did
    not write then gives wrong outputs.

    Counters of split-K are left alone: every launch leaves them at zero.
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
    """Every tensor of one fused call; a grid that is no tensor becomes one on the CPU."""
    out = tower(pixels, grid_thw=torch.as_tensor(grid))
    return [out.last_hidden_state, out.pooler_output, *out.deepstack_features]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """Whether two calls gave the same bits."""
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def somewhere(grid: Grid, i: int) -> torch.Tensor:
    """`grid` on the GPU for even `i`, where the host has not read it when the replay begins; on the CPU for odd `i`."""
    return torch.tensor(grid, device=("cuda", "cpu")[i % 2])


def eager(handle: FusedEncoder, pixels: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    """Outputs of the same items without a graph, in one batch, with the configurations of their budget."""
    parameter = next(handle.tower.parameters())
    runtime = Runtime(
        handle.spec, handle.weights, parameter.device, parameter.dtype, handle.graphs(), limits=handle.graphs().limits
    )
    out = run_eager(runtime, pixels, [Item(*row) for row in grid])
    return [out.hidden, *out.merged]


def random_cases(tower: nn.Module, handle: FusedEncoder, rng: random.Random, count: int, largest: int) -> list[Any]:
    """(grid on the GPU or the CPU, its pixels, the eager outputs), `count` times."""
    cases = []
    for i in range(count):
        grid = random_grid(rng, largest)
        pixels = pixels_for(tower, grid, i)
        cases.append((somewhere(grid, i), pixels, eager(handle, pixels, grid)))
    return cases


def at_once(work: Callable[[int], None], threads: int) -> None:
    """Runs `work(0)` to `work(threads - 1)`, each on a thread of its own."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def poison(handle: FusedEncoder) -> None:
    """Poisons the static buffers and free pool memory."""
    poison_buffers(handle.graphs().encoder.whole())
    blocks = [torch.full((2**22,), float("nan"), device=DEVICE) for _ in range(8)]
    del blocks


def graph_equals_eager(tower: nn.Module, handle: FusedEncoder, batches: int) -> dict[str, int]:
    """Random batches, with buffers poisoned between replays; at the end a small, a large and a small one."""
    rng = random.Random(0)
    grids = [random_grid(rng) for _ in range(batches)] + [[(1, 4, 4)], [(1, 48, 48)], [(1, 4, 4)]]
    wrong = nans = 0
    for i, grid in enumerate(grids):
        pixels = pixels_for(tower, grid, i)
        want = eager(handle, pixels, grid)
        poison(handle)
        got = call(tower, pixels, somewhere(grid, i))
        nans += any(bool(torch.isnan(t).any()) for t in got)
        wrong += not same(got, want)
    return {"batches": len(grids), "wrong": wrong, "with_nan": nans}


def held_outputs(tower: nn.Module, calls: int) -> dict[str, int]:
    """Outputs that later calls changed: checksums are compared right after the call and after up to 500 calls."""
    rng = random.Random(1)
    held: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    changed = 0
    for i in range(calls):
        grid = random_grid(rng, 400)
        got = call(tower, pixels_for(tower, grid, i), somewhere(grid, i))
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
    """Two layouts with the same total, one after the other: neither may get the other's boundaries."""
    rng = random.Random(2)
    wrong = 0
    for i in range(pairs):
        first, second = _equal_pair(rng)
        pixels = pixels_for(tower, first, i)
        for grid in (first, second):
            got, want = call(tower, pixels, somewhere(grid, i)), eager(handle, pixels, grid)
            wrong += not same(got, want)
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
    """Threads that call at once, each cycling through its own streams; outputs are compared with earlier ones."""
    cases = random_cases(tower, handle, random.Random(3), 16, 900)
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
                    equal = torch.stack([(a == b).all() for a, b in zip(got, want, strict=True)]).all()
                    wrong[me] += not bool(equal)

    at_once(work, threads)
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
    pixels, grid = pixels_for(tower, [(1, 8, 8)]), [(1, 8, 8)]
    want = eager(handle, pixels, grid)
    right = 0
    before = handle.stats()["graphs"]["captures"]
    for _ in range(captures):
        handle.drop_graphs()
        right += same(call(tower, pixels, grid), want)
    stop.set()
    other.join()
    captured = handle.stats()["graphs"]["captures"] - before
    return {"captures": captured, "right": right, "wrong": captures - right, "disturbances": done[0]}


def out_of_memory(tower: nn.Module, handle: FusedEncoder, free_mib: list[float]) -> dict[str, Any]:
    """Calls with only `free_mib` MiB of memory free: the output must be right, or the call raises out of memory.

    Afterwards, with memory back, the output must be right, and less than 1 MiB held more than before (`leak_mib`).
    """
    grid: Grid = [(1, 16, 16), (2, 8, 8)]
    pixels = pixels_for(tower, grid)
    want, rows = eager(handle, pixels, grid), []
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
        rows.append({"room_mib": room, "answer": answer, "captured": captured, "afterwards": after, "leak_mib": leak})
    wrong = sum(row["answer"] == "wrong" or row["afterwards"] != "right" or row["leak_mib"] >= 1 for row in rows)
    return {"rooms": len(rows), "wrong": wrong, "rows": rows}


def _try(tower: nn.Module, pixels: torch.Tensor, grid: Grid, want: list[torch.Tensor]) -> str:
    try:
        got = call(tower, pixels, grid)
    except torch.cuda.OutOfMemoryError:
        return "refused"
    return "right" if same(got, want) else "wrong"


@contextlib.contextmanager
def _only(room: float) -> Iterator[None]:
    """Leaves `room` MiB free: limits the process's memory, and allocates all but that under the limit."""
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


def soak(tower: nn.Module, handle: FusedEncoder, calls: int) -> dict[str, Any]:
    """Random calls in one process: device and host memory, latency and compiles over time.

    Every 16th output is compared with an eager run's. Memory is sampled at the end of every tenth but the first, in
    which allocators settle; a slope is the last sample less the first, per 1,000 calls. The drift is the relative rise
    of the 99th percentile from the second tenth to the last.
    """
    rng = random.Random(4)
    cases = random_cases(tower, handle, rng, 96, 700)
    wrong, memory = 0, []
    took = array("q", bytes(8 * calls))  # as large at the first call as at the last
    compiles = handle.stats()["compiles"]
    for i in range(calls):
        table, pixels, want = rng.choice(cases)
        begin = time.perf_counter_ns()
        got = call(tower, pixels, table)
        torch.cuda.synchronize()
        took[i] = time.perf_counter_ns() - begin
        if i % 16 == 0:
            wrong += not same(got, want)
        if i % max(1, calls // 10) == calls // 10 - 1 and i > calls // 10:
            del got
            memory.append((torch.cuda.memory_allocated() / 1024, _resident_kib()))
    thousands = max(1e-3, (len(memory) - 1) * (calls // 10) / 1000)
    tenths = [took[i * calls // 10 : (i + 1) * calls // 10] for i in range(10)]
    p99 = [statistics.quantiles(tenth, n=100)[98] / 1e3 for tenth in tenths]
    return {
        "calls": calls,
        "wrong": wrong,
        "compiles": handle.stats()["compiles"] - compiles,
        "device_kib_per_1000_calls": (memory[-1][0] - memory[0][0]) / thousands,
        "host_kib_per_1000_calls": (memory[-1][1] - memory[0][1]) / thousands,
        "p50_us": statistics.median(took) / 1e3,
        "p99_us_by_tenth": p99,
        "p99_drift": p99[-1] / p99[1] - 1,
    }


def _resident_kib() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4.0


def hostile_grids(tower: nn.Module, handle: FusedEncoder, grids: int) -> dict[str, int]:
    """Grids with one entry replaced, on the GPU or the CPU: a grid that does not fit its pixels must raise, and the
    next call must be right."""
    rng = random.Random(5)
    entries = (0, -1, -2, 1, 3, 2**31 - 1, 2**31, 2**32 + 2, 2**62, -(2**63))
    refused = answered = wrongly_answered = not_right = 0
    for i in range(grids):
        good = random_grid(rng, 400)
        pixels = pixels_for(tower, good, i)
        rows = [list(row) for row in good]
        rows[rng.randrange(len(rows))][rng.randrange(3)] = rng.choice(entries)
        try:
            call(tower, pixels, somewhere([(t, h, w) for t, h, w in rows], i))
            answered += 1
            wrongly_answered += not _is_grid(rows, len(pixels))
        except ValueError:
            refused += 1
            not_right += _is_grid(rows, len(pixels))
        got, want = call(tower, pixels, somewhere(good, i)), eager(handle, pixels, good)
        not_right += not same(got, want)
    counts = {"refused": refused, "answered": answered, "wrongly_answered": wrongly_answered, "not_right": not_right}
    return {"grids": grids} | counts


def _is_grid(rows: list[list[int]], patches: int) -> bool:
    each = all(t >= 0 and h > 0 and w > 0 and h % 2 == w % 2 == 0 for t, h, w in rows)
    return each and sum(t * h * w for t, h, w in rows) == patches


def bad_pixels(tower: nn.Module, handle: FusedEncoder, batches: int) -> dict[str, int]:
    """NaN or Inf in one item of several: every other item must keep its bits. Buffers are poisoned before the call."""
    rng = random.Random(6)
    wrong = 0
    for i in range(batches):
        grid: Grid = [(rng.randint(1, 3), 2 * rng.randint(1, 6), 2 * rng.randint(1, 6)) for _ in range(4)]
        pixels, bad = pixels_for(tower, grid, i), rng.randrange(4)
        ends = [sum(t * h * w for t, h, w in grid[: j + 1]) for j in range(4)]
        first, last = ([0, *ends])[bad], ends[bad]
        broken = pixels.clone()
        broken[rng.randrange(first, last)] = rng.choice((float("nan"), float("inf")))
        want = call(tower, pixels, somewhere(grid, i))
        poison(handle)
        got = call(tower, broken, somewhere(grid, i))
        for a, b in zip(got, want, strict=True):
            unit = len(pixels) // len(a)
            rest = [slice(0, first // unit), slice(last // unit, None)]
            wrong += not all(torch.equal(a[part], b[part]) for part in rest)
    return {"batches": batches, "wrong": wrong}


def repeats(tower: nn.Module, calls: int) -> dict[str, int]:
    """Repeated calls, interleaved with others in the same graphs, must give the same bits."""
    rng = random.Random(7)
    grids = [random_grid(rng) for _ in range(8)]
    cases = [(grid, pixels_for(tower, grid, i)) for i, grid in enumerate(grids)]
    first = [call(tower, pixels, grid) for grid, pixels in cases]
    wrong = 0
    for i in range(calls):
        j = rng.randrange(len(cases))
        got = call(tower, cases[j][1], somewhere(cases[j][0], i))
        wrong += not same(got, first[j])
    return {"calls": calls, "wrong": wrong}


def long_videos(tower: nn.Module, frames: tuple[int, ...]) -> dict[str, Any]:
    """Videos that repeat a clip, cut into several graphs: each clip must be right. Also reports peak memory in MiB.

    The reference, the clip alone in a smaller graph, is compared by norms: graphs of two budgets round differently.
    """
    clip = pixels_for(tower, [(16, 8, 8)])
    want = call(tower, clip, [(16, 8, 8)])
    wrong, peaks = 0, {}
    for count in frames:
        torch.cuda.reset_peak_memory_stats()
        pixels = clip.repeat(count // 16, 1)
        before = torch.cuda.memory_allocated()
        got = call(tower, pixels, [(count, 8, 8)])
        torch.cuda.synchronize()
        peaks[str(count)] = (torch.cuda.max_memory_allocated() - before) / 2**20
        for a, b in zip(got, want, strict=True):
            errors = (a.view(-1, *b.shape).float() - b.float()).flatten(1).norm(dim=1) / b.float().norm()
            wrong += int((~(errors < CLOSE)).sum())
        del pixels, got
    return {"videos": len(frames), "clips": sum(frames) // 16, "wrong": wrong, "peak_mib_by_frames": peaks}


# two GPUs


def towers_on_two(calls: int) -> dict[str, int]:
    """A tower on each GPU, called from one thread with either device current, then from two threads at once."""
    towers = [build(FOUR_BLOCKS, torch.bfloat16, DEVICE)[0]]
    towers.append(copy.deepcopy(towers[0]).to("cuda:1"))
    handles = [fuse(tower, CONFIG) for tower in towers]
    rng, wrong = random.Random(8), [0, 0]
    cases = []
    for i in range(8):
        grid = random_grid(rng, 900)
        pixels = pixels_for(towers[0], grid, i)
        cases.append((grid, pixels, call(towers[0], pixels, grid)))

    def work(me: int, current: int) -> None:
        with torch.inference_mode(), torch.cuda.device(current):
            for _ in range(calls):
                grid, pixels, want = cases[rng.randrange(len(cases))]
                got = call(towers[me], pixels.to(f"cuda:{me}"), torch.tensor(grid, device=f"cuda:{me}"))
                wrong[me] += not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))

    for me in (0, 1):
        for current in (0, 1):
            work(me, current)
    at_once(lambda me: work(me, me), 2)
    fused = sum(handle.stats()["fused"] for handle in handles)
    return {"calls": 6 * calls + len(cases), "fused": fused, "wrong": sum(wrong)}


def data_parallel(calls: int) -> dict[str, int]:
    """`nn.DataParallel` over a fused tower: replicas take the original code, on either GPU."""
    tower, _ = build(FOUR_BLOCKS, torch.bfloat16, DEVICE)
    grid: Grid = [(1, 8, 8)] * 4
    pixels, table = pixels_for(tower, grid), torch.tensor(grid, device=DEVICE)
    want = [tower(pixels[i : i + 128], grid_thw=table[:2]).pooler_output for i in (0, 128)]
    handle = fuse(tower, CONFIG)
    replicas = nn.DataParallel(_Pooled(tower), device_ids=[0, 1])
    wrong = sum(not torch.allclose(replicas(pixels, table), torch.cat(want), atol=0.05) for _ in range(calls))
    return {"calls": calls, "wrong": wrong, "original": sum(handle.stats()["original"].values())}


class _Pooled(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tower(pixels, grid_thw=grid).pooler_output
        return found


def sharded(calls: int) -> dict[str, Any]:
    """FSDP2 over NCCL, one process per GPU, with parameters freed between uses: towers that are sharded whole, whose
    calls run fused, and towers with sharded blocks, whose hooks make every call run the original code."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sharded_rank, (folder, calls), nprocs=2)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    return {name: sum(counts[name] for counts in found) for name in ("calls", "fused", "original", "wrong")}


def _sharded_rank(rank: int, folder: str, calls: int) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    counts: Counter[str] = Counter()
    for of_blocks in (False, True):
        counts.update(_calls_of_shards(of_blocks, calls))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(counts), encoding="utf-8")
    torch.distributed.destroy_process_group()


def _calls_of_shards(of_blocks: bool, calls: int) -> dict[str, int]:
    """Counts of calls of one sharded tower, whose shards are written to once, as an optimizer does."""
    from torch.distributed.fsdp import fully_shard

    tower, _ = build(FOUR_BLOCKS, torch.bfloat16, DEVICE)
    plain, handle = copy.deepcopy(tower), fuse(tower, CONFIG)
    grid: Grid = [(1, 8, 8), (2, 4, 6)]
    pixels, table = pixels_for(tower, grid), torch.tensor(grid, device=DEVICE)
    blocks: Any = tower.blocks
    for block in blocks if of_blocks else ():
        fully_shard(block)
    fully_shard(tower)
    wrong = 0
    with torch.no_grad():
        for _ in range(2):
            want = plain(pixels, grid_thw=table).pooler_output
            for _ in range(calls):
                error = (tower(pixels, grid_thw=table).pooler_output - want).float().norm()
                wrong += not error <= CLOSE * want.float().norm()  # NaN is not
            for parameter in (*tower.parameters(), *plain.parameters()):
                parameter.mul_(1.25)
    stats = handle.stats()
    original = sum(stats["original"].values())
    return {"calls": stats["calls"], "fused": stats["fused"], "original": original, "wrong": wrong}


# the program


def on_one_gpu(scale: float) -> dict[str, Callable[[], Any]]:
    """Every check for one GPU by name, on one fused tower; `scale` shortens them all."""

    def times(n: int) -> int:
        return max(1, int(n * scale))

    tower, _ = build(FOUR_BLOCKS, torch.bfloat16, DEVICE)
    handle = fuse(tower, CONFIG)
    handle.warmup()
    one = functools.partial
    return {
        "graph_equals_eager": one(graph_equals_eager, tower, handle, times(500)),
        "equal_totals": one(equal_totals, tower, handle, times(2000)),
        "held_outputs": one(held_outputs, tower, times(10_000)),
        "repeats": one(repeats, tower, times(1000)),
        "bad_pixels": one(bad_pixels, tower, handle, times(200)),
        "hostile_grids": one(hostile_grids, tower, handle, times(2000)),
        "long_videos": one(long_videos, tower, (64, 512, 4096, 8192)),
        "threads_and_streams": one(threads_and_streams, tower, handle, 8, 4, times(1250)),
        "captures_under_load": one(captures_under_load, tower, handle, times(100)),
        "out_of_memory": one(out_of_memory, tower, handle, FREE_MIB),
        "soak": one(soak, tower, handle, max(100, times(100_000))),
    }


def on_two_gpus(scale: float) -> dict[str, Callable[[], Any]]:
    """Every check that needs two GPUs."""
    calls = max(1, int(100 * scale))
    return {
        "towers_on_two": functools.partial(towers_on_two, calls),
        "data_parallel": functools.partial(data_parallel, calls),
        "sharded": functools.partial(sharded, calls),
    }


def run(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The counts of a check and how long it took; `error` if it raised."""
    begin = time.perf_counter()
    try:
        with torch.inference_mode():
            found = check()
        torch.cuda.synchronize()
    except Exception:  # of any kind: the document records it, and the other checks still run
        found = {"error": traceback.format_exc()}
    return found | {"took_s": time.perf_counter() - begin}


def wrong_in(found: dict[str, dict[str, Any]]) -> int:
    """The faults of all checks; a check that raised counts as one."""
    return sum("error" in part or sum(part.get(name, 0) for name in BAD) for part in found.values())


def main(argv: list[str] | None = None) -> int:
    """Writes the counts as JSON; the exit code is 1 if there was any fault."""
    parser = arguments(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the repetitions")
    parser.add_argument("--only", nargs="*", metavar="CHECK", help="these checks alone")
    parser.add_argument("--two-gpus", action="store_true", help="the checks that need two GPUs")
    args = parser.parse_args(argv)
    need_gpus(2 if args.two_gpus else 1)
    given = {"--scale": args.scale, "--two-gpus": args.two_gpus, "--json": args.json}
    found: dict[str, dict[str, Any]] = {}
    document = {
        "passport": passport("python -m fusedvit.bench.graph_stress", given, args.commit),
        "date": today(),
        "trust": found,
    }
    checks = on_two_gpus(args.scale) if args.two_gpus else on_one_gpu(args.scale)
    for name in args.only or checks:
        found[name] = run(checks[name])
        print(name, json.dumps(found[name]), flush=True)
        write(args.json, document)
    return int(wrong_in(found) > 0)


if __name__ == "__main__":
    run_program(main)
