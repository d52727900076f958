"""Tensor parallelism: vLLM's sharded tower as it is served, and the same with the plugin, which gathers its shards.

    python -m fusedvit.bench.engines.vllm_sharded FOLDER [--tower NAME] [--ranks N] [--rounds N] [--json PATH]

FOLDER as in `fusedvit bench --vllm`. Without a GPU the ranks are processes on gloo. vLLM's contenders are its eager
tower and its encoder graphs, where these can be captured. The last line is the document; it is written after every
workload.
"""

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from fusedvit.api import fuse
from fusedvit.bench.engines import vllm_models
from fusedvit.bench.engines.vllm_models import (
    Served,
    batches_of,
    build_model,
    engine_config,
    in_grid_order,
    new_manager,
    share_,
    start,
)
from fusedvit.bench.engines.vllm_parallel import embeddings, median_ms
from fusedvit.bench.towers import GEOMETRIES, build, patch_width, verdict_of, wider
from fusedvit.bench.workloads import WORKLOADS, Grid, tokens
from fusedvit.errors import first_line
from fusedvit.runtime.item_shares import shares_of
from fusedvit.serving.vllm import SERVED

NAMES = ("1 x 448 px", "8 x 448 px", "video, 64 frames 448 px", "mixed")
_ROUNDS = 30


def main(argv: list[str] | None = None) -> int:
    """Starts the ranks; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=[*GEOMETRIES])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
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

    geometry, dtype = GEOMETRIES[args.tower], torch.bfloat16 if on_gpu else torch.float32
    config = engine_config(geometry, dtype, tensor_parallel_size=args.ranks)
    document: dict[str, Any] = {"tower": args.tower, "ranks": args.ranks, "device": _device_name(), "workloads": {}}
    with set_current_vllm_config(config):
        start(rank, args.ranks, port, device)
        theirs, ours = build_model(config, device, False), build_model(config, device, True)
        with torch.inference_mode(False):
            tower, wide = build(geometry, dtype, device)
            share_(ours, theirs, tower.state_dict())
        served = Served(config, theirs, ours, tower, wide, device)
        manager = _manager(served, document)
        _warm_up(served)
        for name in NAMES:
            with torch.inference_mode():
                found = _row(served, manager, WORKLOADS[name], args.rounds)
            document["workloads"][name] = found
            if rank == 0:
                print(name, json.dumps(found), flush=True)
                _write(args.json, document)
    stats = fuse(ours).stats()
    holds = all(found["parity"]["passed"] for found in document["workloads"].values())
    document |= {"holds": holds and stats["fused"] == stats["calls"] > 0, "weights_mib": stats["weights_mib"]}
    if rank == 0:
        _write(args.json, document)
        queue.put(document)
    dist.barrier()
    dist.destroy_process_group()


def _warm_up(served: Served) -> None:
    """Gathers, then compiles and captures what this rank's shares replay; others may need longer."""
    handle, rank, ranks = fuse(served.ours), dist.get_rank(), dist.get_world_size()
    sharded = vars(served.ours.visual)[SERVED].sharded
    shares = [shares_of(handle.spec, tokens(WORKLOADS[name]), torch.tensor(WORKLOADS[name]), ranks) for name in NAMES]
    sharded.gather()
    sharded.after(lambda: handle.warmup(iter, calls=[of[rank].grid for of in shares if of and of[rank].pieces]))


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document))


def _manager(served: Served, document: dict[str, Any]) -> Any:
    """vLLM's encoder graphs as served, if every rank can capture them."""
    manager = None
    try:
        manager = new_manager(served) if served.device.type == "cuda" else None
    except Exception as error:  # whatever stands in the way is what a server would meet: its tower runs eager then
        document["its graphs"] = f"{type(error).__name__}: {first_line(error)}"
    captured = torch.tensor(int(manager is not None), device=served.device)
    dist.all_reduce(captured, dist.ReduceOp.MIN)
    return manager if int(captured) else None


def _row(served: Served, manager: Any, grid: Grid, rounds: int) -> dict[str, Any]:
    """Medians of a call on the slowest rank, our answer against Hugging Face's, and how vLLM's compares."""
    generator = torch.Generator(served.device).manual_seed(0)
    shape = tokens(grid), patch_width(served.tower)
    dtype = next(served.tower.parameters()).dtype
    pixels = torch.randn(shape, device=served.device, generator=generator).to(dtype)
    batches, rows = batches_of(grid, pixels), torch.tensor(grid, device=served.device)
    runs = {
        "vLLM eager": lambda: [served.theirs.embed_multimodal(**batch) for batch in batches],
        "ours": lambda: [served.ours.embed_multimodal(**batch) for batch in batches],
    }
    if manager is not None:
        runs["vLLM's graphs"] = lambda: [manager.execute(batch) for batch in batches]
    pt = embeddings(served.tower(pixels, grid_thw=rows))
    ref = embeddings(served.wide(pixels.to(wider(dtype)), grid_thw=rows))
    answers = {name: in_grid_order(grid, run()).clone() for name, run in runs.items()}
    ms = {name: median_ms(run, rounds) for name, run in runs.items()}
    slowest = torch.tensor([*ms.values()], device=served.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ms = dict(zip(ms, slowest.tolist(), strict=True))
    best = min(value for name, value in ms.items() if name != "ours")
    verdicts = {name: verdict_of([answer], [ref], [pt]) for name, answer in answers.items()}
    return {"ms": ms, "speedup": best / ms["ours"], "parity": verdicts.pop("ours"), "theirs": verdicts}


if __name__ == "__main__":
    sys.exit(main())
