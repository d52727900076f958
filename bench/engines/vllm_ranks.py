"""vLLM's tower over several GPUs, one process each: `--mm-encoder-tp-mode data`, or `weights`, which shards it.

    python -m fusedvit.bench.engines.vllm_ranks FOLDER data|weights [--tower NAME] [--ranks N] [--json PATH]

FOLDER is as in `fusedvit bench --vllm`. Without a GPU the ranks are processes on gloo. With `data` every rank runs its
items and all gather the embeddings; times and bits of several ranks are compared with those of one. With `weights` the
plugin gathers the shards; vLLM's contenders are its eager tower and, if they can be captured, its encoder graphs. The
last line is the document; it is written after every workload.
"""

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from fusedvit.api import fuse
from fusedvit.bench.engines import vllm_models
from fusedvit.bench.engines.vllm_models import Served, batches_of, hugging_face, in_grid_order, new_manager
from fusedvit.bench.records import arguments, need_gpus, passport, run_program, write
from fusedvit.bench.towers import GEOMETRIES, pixels_for, verdict_of
from fusedvit.bench.workloads import WORKLOADS, Grid
from fusedvit.errors import first_line
from fusedvit.runtime.item_shares import shares_of
from fusedvit.serving.served import SERVED
from fusedvit.serving.sharded import divided

NAMES = ("1 x 448 px", "8 x 448 px", "video, 64 frames 448 px", "mixed")
IMAGES = WORKLOADS["8 x 448 px"]
Keep = Callable[[dict[str, Any]], None]


def main(argv: list[str] | None = None) -> int:
    """Starts the ranks; returns 1 if an answer is wrong or a rank did not run fused."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("mode", choices=["data", "weights"])
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=[*GEOMETRIES])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args(argv)
    if torch.cuda.is_available():
        need_gpus(args.ranks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm_models.open_site(args.folder)
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_rank, (args, port, queue), nprocs=args.ranks)
    found = queue.get()
    print(json.dumps(found))
    return 0 if found["holds"] else 1


def _rank(rank: int, args: argparse.Namespace, port: int, queue: Any) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    vllm_models.open_site(args.folder)
    from vllm.config import set_current_vllm_config

    given = {args.mode: True, "--tower": args.tower, "--ranks": args.ranks, "--json": args.json}
    of = passport("python -m fusedvit.bench.engines.vllm_ranks FOLDER", given, args.commit)
    head = {"passport": of, "tower": args.tower, "mode": args.mode, "ranks": args.ranks}

    def keep(found: dict[str, Any]) -> None:
        if rank == 0:
            write(args.json, head | found)

    dtype = torch.bfloat16 if on_gpu else torch.float32
    served = vllm_models.serve(args.tower, device, dtype, rank, args.ranks, port, mm_encoder_tp_mode=args.mode)
    with set_current_vllm_config(served.config):
        document = head | (_data_parallel if args.mode == "data" else _sharded)(served, args.rounds, keep)
    keep(document)
    if rank == 0:
        queue.put(document)
    dist.barrier()
    dist.destroy_process_group()


# data parallel


def _data_parallel(served: Served, rounds: int, keep: Keep) -> dict[str, Any]:
    pixels, grid = pixels_for(served.tower, IMAGES), torch.tensor(IMAGES)
    with torch.inference_mode():
        found = _one_and_several(served, pixels, grid, rounds)
        got = torch.cat(served.ours.embed_multimodal(pixel_values=pixels, image_grid_thw=grid))
        found["parity"] = verdict_of([got], *hugging_face(served, pixels, IMAGES))
    stats = fuse(served.ours).stats()
    fused = torch.tensor(int(stats["fused"] == stats["calls"] > 0), device=served.device)
    dist.all_reduce(fused)
    holds = int(fused) == dist.get_world_size() and found["same bits"] and found["parity"]["passed"]
    return found | {"ranks fused": int(fused), "holds": holds}


def _one_and_several(served: Served, pixels: torch.Tensor, grid: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Times on all ranks and on one, and whether the bits equal those of one GPU for the same items."""
    from vllm.model_executor.models.vision import get_load_balance_assignment

    visual, batch = served.ours.visual, {"pixel_values": pixels, "image_grid_thw": grid}
    order, counts, _ = get_load_balance_assignment(grid.prod(1).tolist(), dist.get_world_size())
    images = pixels.view(len(grid), -1, pixels.shape[1])
    got = served.ours.embed_multimodal(**batch)
    same, begin = True, 0
    for count in counts:
        chosen = order[begin : begin + count]
        begin += count
        alone = visual(images[chosen].flatten(0, 1), grid[chosen].tolist()).chunk(count)
        same = same and all(torch.equal(got[i], rows) for i, rows in zip(chosen, alone, strict=True))
    one = _median_ms(lambda: visual(pixels, grid_thw=grid), rounds)
    several = _median_ms(lambda: served.ours.embed_multimodal(**batch), rounds)
    vllms = _median_ms(lambda: served.theirs.embed_multimodal(**batch), rounds)
    times = {"one rank": one, "all ranks": several, "vLLM's own, all ranks": vllms}
    return {"ms": times, "speedup": one / several, "same bits": same}


# sharded


def _sharded(served: Served, rounds: int, keep: Keep) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    manager, missing = _manager(served)
    document = {"workloads": rows} | ({"its graphs": missing} if missing else {})
    _warm_up(served)
    for name in NAMES:
        with torch.inference_mode():
            rows[name] = _row(served, manager, WORKLOADS[name], rounds)
        if dist.get_rank() == 0:
            print(name, json.dumps(rows[name]), flush=True)
        keep(document)
    stats = fuse(served.ours).stats()
    right = all(found["parity"]["passed"] for found in rows.values())
    holds = right and stats["fused"] == stats["calls"] > 0
    return document | {"holds": holds, "weights_mib": stats["weights_mib"]}


def _warm_up(served: Served) -> None:
    """Gathers the shards, then compiles and captures the graphs of this rank's shares; waits for the other ranks."""
    handle, rank, ranks = fuse(served.ours), dist.get_rank(), dist.get_world_size()
    sharded = vars(served.ours.visual)[SERVED].sharded
    grids = [torch.tensor(WORKLOADS[name]) for name in NAMES]
    shares = [shares_of(handle.spec, int(grid.prod(1).sum()), grid, ranks) for grid in grids]
    mine = [of[rank % len(of)] for of in map(divided, filter(None, shares))]
    sharded.gather()
    sharded.after(lambda: handle.warmup(iter, calls=[share.grid for share in mine if share.pieces]))


def _manager(served: Served) -> tuple[Any, str]:
    """vLLM's encoder graphs as served, if every rank can capture them, and why this rank cannot."""
    manager, missing = None, ""
    try:
        manager = new_manager(served) if served.device.type == "cuda" else None
    except Exception as error:  # a server would meet the same error and run its tower eagerly
        missing = f"{type(error).__name__}: {first_line(error)}"
    captured = torch.tensor(int(manager is not None), device=served.device)
    dist.all_reduce(captured, dist.ReduceOp.MIN)
    return manager if int(captured) else None, missing


def _row(served: Served, manager: Any, grid: Grid, rounds: int) -> dict[str, Any]:
    """Medians of a call on the slowest rank, and verdicts on our answer and vLLM's against Hugging Face's."""
    pixels = pixels_for(served.tower, grid)  # the same on every rank
    batches = batches_of(grid, pixels)
    runs = {
        "vLLM eager": lambda: [served.theirs.embed_multimodal(**batch) for batch in batches],
        "ours": lambda: [served.ours.embed_multimodal(**batch) for batch in batches],
    }
    if manager is not None:
        runs["vLLM's graphs"] = lambda: [manager.execute(batch) for batch in batches]
    wanted = hugging_face(served, pixels, grid)
    answers = {name: in_grid_order(grid, run()).clone() for name, run in runs.items()}
    slowest = torch.tensor([_median_ms(run, rounds) for run in runs.values()], device=served.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ms = dict(zip(runs, slowest.tolist(), strict=True))
    best = min(value for name, value in ms.items() if name != "ours")
    verdicts = {name: verdict_of([answer], *wanted) for name, answer in answers.items()}
    return {"ms": ms, "speedup": best / ms["ours"], "parity": verdicts.pop("ours"), "theirs": verdicts}


# both


def _median_ms(run: Callable[[], Any], rounds: int) -> float:
    """Milliseconds of the median call, on this rank's clock; all ranks call at once."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(rounds + 3):
        wait()
        dist.barrier()
        begin = time.perf_counter()
        run()
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


if __name__ == "__main__":
    run_program(main)
