"""`--mm-encoder-tp-mode data` over several GPUs: every rank runs its items fused, and all gather the embeddings.

    python -m fusedvit.bench.engines.vllm_parallel FOLDER [--tower NAME] [--ranks N] [--json PATH]

FOLDER as in `fusedvit bench --vllm`. Without a GPU the ranks are processes on gloo. The last line is the document.
"""

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from fusedvit.api import fuse
from fusedvit.bench.engines import vllm_models
from fusedvit.bench.engines.vllm_models import build_model, engine_config, share_, start
from fusedvit.bench.towers import GEOMETRIES, build, patch_width, verdict_of, wider

_IMAGES = 8
_SIDE = 28  # patches: 448 px
_ROUNDS = 30


def main(argv: list[str] | None = None) -> int:
    """Starts the ranks; 1 if an answer is wrong or a rank did not run fused."""
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
    if args.json:
        args.json.write_text(json.dumps(found))
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
    config = engine_config(geometry, dtype, tensor_parallel_size=args.ranks, mm_encoder_tp_mode="data")
    with set_current_vllm_config(config):
        start(rank, args.ranks, port, device)
        theirs, ours = build_model(config, device, False), build_model(config, device, True)
        tower, wide = build(geometry, dtype, device)
        share_(ours, theirs, tower.state_dict())
        generator = torch.Generator(device).manual_seed(0)
        grid = torch.tensor([(1, _SIDE, _SIDE)] * _IMAGES)
        rows = _IMAGES * _SIDE * _SIDE
        pixels = torch.randn(rows, patch_width(tower), device=device, generator=generator).to(dtype)
        with torch.inference_mode():
            found = _measure(theirs, ours, pixels, grid, args.rounds)
            pt = embeddings(tower(pixels, grid_thw=grid.to(device)))
            ref = embeddings(wide(pixels.to(wider(dtype)), grid_thw=grid.to(device)))
            got = torch.cat(ours.embed_multimodal(pixel_values=pixels, image_grid_thw=grid))
            found["parity"] = verdict_of([got], [ref], [pt])
    stats = fuse(ours).stats()
    fused = torch.tensor(int(stats["fused"] == stats["calls"] > 0), device=device)
    dist.all_reduce(fused)
    found["ranks fused"] = int(fused)
    found["holds"] = found["ranks fused"] == args.ranks and found["same bits"] and found["parity"]["passed"]
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def embeddings(outputs: Any) -> torch.Tensor:
    return torch.cat([outputs.pooler_output, *outputs.deepstack_features], 1)


def _measure(theirs: Any, ours: Any, pixels: torch.Tensor, grid: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Times over all ranks and on one, and whether the bits are one GPU's on the same items."""
    from vllm.model_executor.models.vision import get_load_balance_assignment

    handle, visual, batch = fuse(ours), ours.visual, {"pixel_values": pixels, "image_grid_thw": grid}
    order, counts, _ = get_load_balance_assignment([_SIDE * _SIDE] * len(grid), dist.get_world_size())
    images = pixels.view(len(grid), _SIDE * _SIDE, -1)
    got = ours.embed_multimodal(**batch)
    same, begin = True, 0
    for count in counts:
        chosen = order[begin : begin + count]
        begin += count
        alone = visual(images[chosen].flatten(0, 1), grid[chosen].tolist()).chunk(count)
        same = same and all(torch.equal(got[i], rows) for i, rows in zip(chosen, alone, strict=True))
    one = median_ms(lambda: visual(pixels, grid_thw=grid), rounds)
    several = median_ms(lambda: ours.embed_multimodal(**batch), rounds)
    vllms = median_ms(lambda: theirs.embed_multimodal(**batch), rounds)
    times = {"one rank": one, "all ranks": several, "vLLM's own, all ranks": vllms}
    return {"ms": times, "speedup": one / several, "same bits": same, "budgets": _budgets(handle)}


def _budgets(handle: Any) -> list[int]:
    return [*handle.stats().get("graphs", {}).get("token_budgets", ())][-1:]


def median_ms(run: Callable[[], Any], rounds: int) -> float:
    """The median call, all ranks at once, on this rank's clock."""
    times = []
    for _ in range(rounds + 3):
        synchronize()
        dist.barrier()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
