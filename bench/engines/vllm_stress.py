"""Correctness inside vLLM: no NaN in random batches, and the same answers after many calls, a reload and sleep.

    python -m fusedvit.bench.engines.vllm_stress FOLDER --json PATH [--tower NAME] [--batches N] [--calls N]

FOLDER is as in `fusedvit bench --vllm`. Sleep runs through vLLM's `Worker.sleep` and `wake_up` with vLLM's allocator if
FOLDER has its library. Otherwise sleep is simulated: level 2 overwrites the weights. The document is written after each
part.
"""

import random
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse
from fusedvit.bench.engines import vllm_models
from fusedvit.bench.engines.vllm_models import Served, batches_of, build_model, load_plugin
from fusedvit.bench.records import arguments, passport, run_program, write
from fusedvit.bench.towers import GEOMETRIES, pixels_for
from fusedvit.bench.workloads import Grid, tokens

_WORKER = "vllm.v1.worker.gpu_worker"
_SIDES = (2, 4, 6, 8, 10, 14, 16, 20, 28, 36, 48, 64)
_COMPARED = 100  # one in this many batches is compared with vLLM's own answer
_FAR = 0.05  # bound on the relative 2-norm error between two bf16 towers that compute the same


def main(argv: list[str] | None = None) -> int:
    """Runs every part, even if another fails; returns 1 if one does not hold."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=[*GEOMETRIES])
    parser.add_argument("--batches", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=10_000)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    vllm_models.open_site(args.folder)
    from vllm.config import set_current_vllm_config

    served = vllm_models.serve(args.tower, device, dtype)
    found: dict[str, Any] = {}
    given = {"--tower": args.tower, "--batches": args.batches, "--calls": args.calls, "--json": args.json}
    of = passport(f"python -m fusedvit.bench.engines.vllm_stress {args.folder.name}", given, args.commit)
    with set_current_vllm_config(served.config), torch.inference_mode():
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "random batches": lambda: random_batches(served, args.batches),
            "calls": lambda: many_calls(served, args.calls),
            "sleep": lambda: sleeping(served),
        }
        for name, part in parts.items():
            try:
                found[name] = part()
            except Exception as error:  # vLLM may raise anything; the other parts must still run
                found[name] = {"holds": False, "error": f"{type(error).__name__}: {error}"[:800]}
            print(name, found[name], flush=True)
            write(args.json, {"passport": of, "parts": found})
    return 0 if all(part["holds"] for part in found.values()) else 1


def random_batches(served: Served, count: int) -> dict[str, Any]:
    """Counts NaN and Inf in the answers to `count` random batches, and compares some answers with vLLM's own."""
    draw = random.Random(0)
    bad = torch.zeros((), dtype=torch.long, device=served.device)
    furthest = 0.0
    for i in range(count):
        grid, pixels = _random(served, draw)
        for batch in batches_of(grid, pixels):
            got = torch.cat(served.ours.embed_multimodal(**batch))
            bad += (~torch.isfinite(got)).any()
            if i % _COMPARED == 0:
                want = torch.cat(served.theirs.embed_multimodal(**batch)).double()
                furthest = max(furthest, ((got.double() - want).norm() / want.norm()).item())
    stats = fuse(served.ours).stats()
    holds = not bad.item() and furthest < _FAR and stats["fused"] == stats["calls"]
    counted = {"batches": count, "not finite": int(bad), "furthest from vLLM's": furthest}
    return {"holds": holds, **counted, "calls": stats["calls"], "original": stats["original"]}


def _random(served: Served, draw: random.Random) -> tuple[Grid, torch.Tensor]:
    """One to six images and videos of at most 6,000 patches together."""
    grid: Grid = []
    for _ in range(draw.randint(1, 6)):
        item = (draw.choice((1, 1, 1, 2, 4, 8)), draw.choice(_SIDES), draw.choice(_SIDES))
        if not grid or tokens([*grid, item]) <= 6000:
            grid.append(item)
    return grid, pixels_for(served.tower, grid, draw.randrange(2**31))


def _fixed(served: Served, model: Any) -> torch.Tensor:
    grid: Grid = [(1, 16, 20), (4, 8, 8), (1, 28, 28)]
    batches = batches_of(grid, pixels_for(served.tower, grid, 1))
    return torch.cat([torch.cat(model.embed_multimodal(**batch)) for batch in batches])


def many_calls(served: Served, count: int) -> dict[str, Any]:
    """Compares bits before and after `count` calls of one batch, after a reload of the weights, and after a release."""
    first, handle = _fixed(served, served.ours).clone(), fuse(served.ours)
    grid: Grid = [(1, 14, 14)]
    (batch,) = batches_of(grid, pixels_for(served.tower, grid, 2))
    for _ in range(count):
        served.ours.embed_multimodal(**batch)
    same = {"after the calls": torch.equal(first, _fixed(served, served.ours))}
    kept = [p.detach().clone() for p in served.ours.visual.parameters()]
    _copy_(served.ours.visual, [torch.zeros_like(p) for p in kept])
    changed = not torch.equal(first, _fixed(served, served.ours))
    _copy_(served.ours.visual, kept)
    same["after a reload"] = changed and torch.equal(first, _fixed(served, served.ours))
    handle.release()
    same["after a release"] = torch.equal(first, _fixed(served, served.ours))
    return {"holds": all(same.values()), "calls": count, **same, "weights_mib": handle.stats()["weights_mib"]}


def _copy_(module: nn.Module, values: list[torch.Tensor]) -> None:
    """Writes parameters as vLLM's loaders do: without changing their version counters."""
    for parameter, value in zip(module.parameters(), values, strict=True):
        parameter.data.copy_(value)


def sleeping(served: Served) -> dict[str, Any]:
    """Whether answers are the same after sleep levels 1 and 2, and memory is given back meanwhile."""
    pool, how = _pool(served)
    with torch.inference_mode(False), pool:
        model = build_model(served.config, served.device, True)
        model.visual.load_weights(served.tower.state_dict().items())
    worker = _worker(served, model, how)
    first = _fixed(served, model).clone()
    same: dict[str, Any] = {"allocator": how, "the same model": torch.equal(first, _fixed(served, served.ours))}
    for level in (1, 2):
        held, free = fuse(model).stats()["weights_mib"], _free_mib()
        worker.sleep(level)
        same[f"level {level} gives back"] = held > 0 and fuse(model).stats()["weights_mib"] == 0
        same[f"level {level} freed MiB"] = round(_free_mib() - free)
        worker.wake_up()
        if level == 2:
            for name, parameter in model.visual.named_parameters():
                parameter.data.copy_(served.tower.get_parameter(name))
        same[f"after level {level}"] = torch.equal(first, _fixed(served, model))
    return {"holds": all(value is not False for value in same.values()), **same}


def _free_mib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**20 if torch.cuda.is_available() else 0.0


def _pool(served: Served) -> tuple[AbstractContextManager[Any], str]:
    """The memory pool for weights: vLLM's sleep allocator if its library is there, and the name of the allocator."""
    if served.device.type == "cuda":
        try:
            from vllm.device_allocator.cumem import CuMemAllocator

            return CuMemAllocator.get_instance().use_memory_pool(tag="weights"), "vLLM's own"
        except (ImportError, AssertionError, AttributeError, OSError) as error:
            print(f"sleep is simulated: {error}", file=sys.stderr)
    return nullcontext(), "simulated"


def _worker(served: Served, model: Any, how: str) -> Any:
    """A vLLM worker that holds only this model; or, if `how` is "simulated", a stand-in for it."""
    runner = types.SimpleNamespace(model=model, post_kv_cache_wake_up=lambda: None)
    if how == "simulated":
        return _simulated(runner)
    from vllm.v1.worker.gpu_worker import Worker

    worker: Any = Worker.__new__(Worker)
    worker.model_runner, worker.vllm_config, worker.get_draft_model = runner, served.config, lambda: None
    worker.model_config = served.config.model_config
    worker.model_config.enable_sleep_mode = True
    worker._sleep_mode_backend, worker._sleep_saved_buffers = None, {}
    worker._sleep_rebuild_draft_metadata_buffers = False
    return worker


def _simulated(runner: Any) -> Any:
    """A stand-in under the name of vLLM's worker, so that the plugin patches it like the original."""

    class Worker:
        model_runner = runner

        def sleep(self, level: int = 1) -> None:
            if level == 2:
                _copy_(runner.model.visual, [torch.full_like(p, torch.nan) for p in runner.model.visual.parameters()])

        def wake_up(self, tags: list[str] | None = None) -> None:
            pass

    module: Any = types.ModuleType(_WORKER)
    module.Worker = Worker
    before = sys.modules.get(_WORKER)
    sys.modules[_WORKER] = module
    try:
        load_plugin()
    finally:
        sys.modules.pop(_WORKER)
        if before is not None:
            sys.modules[_WORKER] = before
    return Worker()


if __name__ == "__main__":
    run_program(main)
