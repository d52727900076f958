"""What `sglang_bench` measures: SGLang's own tower against the same tower with our plugin. Importing this needs SGLang.

SGLang's code is as shipped: model class, `load_weights`, the hook after loading, its graphs, its weight updater. Two
things differ: the language model is not built, and weights are random.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang
import torch
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from torch import nn

from fusedvit.api import fuse
from fusedvit.bench.engines.vllm_models import Served, hugging_face
from fusedvit.bench.records import passport, write
from fusedvit.bench.timing import Contender, interleaved, spread
from fusedvit.bench.towers import GEOMETRIES, Geometry, build, pixels_for, verdict_of
from fusedvit.bench.workloads import WORKLOADS, Grid, tokens

EAGER, GRAPH, OURS = "SGLang eager", "SGLang's graph", "ours"
NAMES = ("1 x 224 px", "1 x 448 px", "1 x 1024 px", "8 x 448 px", "video, 8 frames 224 px", "mixed")
_SMALL: dict[str, Grid] = {
    "image": [(1, 8, 12)],
    "video": [(4, 8, 8)],
    "mixed": [(1, 8, 8), (2, 4, 12), (1, 16, 4), (4, 8, 4)],
}
_TEXT = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}


def measure(args: argparse.Namespace) -> int:
    """Writes the document; 1 if one of our answers is wrong or a call did not run fused."""
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda:0" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    _start(device)
    served = _serve(GEOMETRIES[args.tower], device, dtype)
    grids = {name: WORKLOADS[name] for name in NAMES} if on_gpu else _SMALL
    options = {"--tower": args.tower, "--seconds": args.seconds}
    document: dict[str, Any] = {
        "passport": passport("python -m fusedvit.bench.engines.sglang_bench", options, args.commit),
        "sglang": sglang.__version__,
        "attention": served.theirs.visual.blocks[0].attn.qkv_backend_name,
        "workloads": {},
    }
    for name, grid in grids.items():
        document["workloads"][name] = row = _row(served, grid, args.seconds)
        print(name, {which: round(ms["median"], 3) for which, ms in row["ms"].items()}, row["parity"], flush=True)
    document["checks"] = _after_changes(served, grids["mixed"])
    stats = fuse(served.ours).stats()
    document["checks"]["every call ran fused"] = stats["fused"] == stats["calls"] > 0 and not stats["original"]
    right = [gate["passed"] for row in document["workloads"].values() for gate in row["parity"].values()]
    document["holds"] = all(right) and all(document["checks"].values())
    write(args.json, document)
    print(document["checks"], "holds" if document["holds"] else "DOES NOT HOLD", flush=True)
    return not document["holds"]


# SGLang


def _start(device: torch.device) -> None:
    """Sets up this process as an SGLang process, as far as models need it: its options and groups."""
    get_context().override_server_args(device=device.type, tp_size=1).install()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    backend = "nccl" if device.type == "cuda" else "gloo"
    init_distributed_environment(
        backend=backend, world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{meeting}"
    )
    one = dict.fromkeys(("pp_size", "attn_dp_size", "attn_dcp_size", "moe_ep_size", "moe_dp_size"), 1)
    none = dict.fromkeys(("pp_rank", "attn_dp_rank", "attn_cp_rank", "moe_ep_rank", "tp_rank", "attn_tp_rank"), 0)
    get_parallel().override_permanently(**one, **none, attn_tp_size=1, moe_tp_size=1)
    initialize_model_parallel()


def _serve(geometry: Geometry, device: torch.device, dtype: torch.dtype) -> Served:
    """Builds SGLang's own model first, then loads the plugin, which changes the whole process, and builds ours."""
    tower, wide = build(geometry, dtype, device)
    theirs = _model(geometry, device, dtype)
    theirs.load_weights(_named(tower))
    load_plugins()
    ours = _model(geometry, device, dtype)
    ours.load_weights(_named(tower))
    ModelRunner.maybe_precompile_model_kernels_after_loading(SimpleNamespace(model=ours, device=device.type))
    return Served(ours.config, theirs, ours, tower, wide, device)


def _model(geometry: Geometry, device: torch.device, dtype: torch.dtype) -> Any:
    """The model as SGLang's loader constructs it for an encoder server, which has no language model."""
    from transformers import Qwen3VLConfig

    numbers = dict(geometry.numbers)
    text = _TEXT | _ROPE | {"hidden_size": numbers["out_hidden_size"]}
    given = Qwen3VLConfig(text_config=text, vision_config=numbers)
    given.architectures = [Qwen3VLForConditionalGeneration.__name__]
    with tempfile.TemporaryDirectory() as folder:
        given.save_pretrained(folder)
        config = get_config(folder, trust_remote_code=False)
    config.encoder_only, config.language_only = True, False
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Qwen3VLForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(before)


def _named(tower: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A Hugging Face tower's weights by their names in a checkpoint."""
    return [(f"model.visual.{name}", value.detach()) for name, value in tower.named_parameters()]


def _call(tower: Any, grid: Grid, pixels: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = tower(pixels, grid_thw=torch.tensor(grid))
        return found


# what is measured


def _row(served: Served, grid: Grid, seconds: float) -> dict[str, Any]:
    """One workload: our answer against both peers', SGLang's graph against its eager code, and times."""
    pixels = pixels_for(served.tower, grid, tokens(grid))
    runs: dict[str, Callable[[], torch.Tensor]] = {EAGER: lambda: _call(served.theirs.visual, grid, pixels)}
    if served.device.type == "cuda":
        runs[GRAPH] = lambda: _in_graph(served.theirs.visual, grid, pixels)
    runs[OURS] = lambda: _call(served.ours.visual, grid, pixels)
    answers = {name: run().clone() for name, run in runs.items()}
    found: dict[str, Any] = {"grid": grid, "tokens": tokens(grid), "parity": _judged(served, grid, pixels, answers)}
    if GRAPH in answers:
        own = answers[EAGER].float()
        found["graph_of_eager"] = float((answers[GRAPH].float() - own).norm() / own.norm())
    times = interleaved([Contender(name, run) for name, run in runs.items()], served.device, seconds)
    ms = {name: asdict(spread(taken)) for name, taken in times.items()}
    return found | {"ms": ms, "ratio": {name: of["median"] / ms[OURS]["median"] for name, of in ms.items()}}


def _in_graph(tower: Any, grid: Grid, pixels: torch.Tensor) -> torch.Tensor:
    with envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.override(True):
        return _call(tower, grid, pixels)


def _judged(
    served: Served, grid: Grid, pixels: torch.Tensor, answers: dict[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    with torch.inference_mode():
        wanted, exact = hugging_face(served, pixels, grid)
    peers = {EAGER: [answers[EAGER]], "Hugging Face": exact}
    return {name: verdict_of([answers[OURS]], wanted, peer) for name, peer in peers.items()}


# weights that change, and memory that is given back


def _after_changes(served: Served, grid: Grid) -> dict[str, bool]:
    """Whether answers follow SGLang's weight updater, and have the same bits after memory was released and resumed."""
    pixels = pixels_for(served.tower, grid, tokens(grid))
    visual, manager = served.ours.visual, _manager(served)
    before = _call(visual, grid, pixels).clone()
    changed = [(name, value * 1.25) for name, value in _named(served.tower)]
    manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all"))
    done, _ = manager.tp_worker.model_runner.weight_updater.update_weights_from_tensor(changed, load_format=None)
    manager.end_weight_update(EndWeightUpdateReqInput())
    served.theirs.load_weights(changed)
    with torch.no_grad():
        for tower in (served.tower, served.wide):
            for value in tower.parameters():
                value.mul_(1.25)
    answers = {EAGER: _call(served.theirs.visual, grid, pixels), OURS: _call(visual, grid, pixels).clone()}
    follows = done and not torch.equal(answers[OURS], before)
    right = all(gate["passed"] for gate in _judged(served, grid, pixels, answers).values())

    held = fuse(served.ours).stats()["weights_mib"]
    manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights", "cuda_graph"]))
    gone = held > 0 and not fuse(served.ours).stats()["weights_mib"]
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["cuda_graph"]))
    manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["weights"]))
    again = torch.equal(_call(visual, grid, pixels), answers[OURS])
    return {
        "answers follow an update": follows and right,
        "prepared weights are given back": gone,
        "the same bits after memory is taken again": again,
    }


def _manager(served: Served) -> Any:
    """SGLang's scheduler component for weights, on the fused model, without a scheduler."""
    unused = dict.fromkeys(("update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    updater = WeightUpdater(
        tp_rank=0,
        device=served.device.type,
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: served.ours,
        **unused,
    )
    runner = SimpleNamespace(model=served.ours, weight_updater=updater)
    worker = SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)])
    return SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=None,
        memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
        flush_cache=lambda **kwargs: True,
        is_fully_idle=lambda **kwargs: True,
    )
