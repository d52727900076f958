"""vLLM's worker and its fused towers: it prepares them when it profiles, initialises the KV cache, wakes or reloads
weights, and gives their memory back when it sleeps."""

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusedvit.model.normalization import Normalization
from fusedvit.serving.plugin import left_in, wrap
from fusedvit.serving.served import Served, prepare_awake, served_in, stats_of, writing, writing_part

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
WORKER = "vllm.v1.worker.gpu_worker"
_LAST_LEVEL = 2  # of sleep: weights lose their content and are loaded again
# Steps of elastic EP that write to no tower, in vLLM 0.26 and 0.33; any other may receive another worker's weights.
_WRITING_NOTHING = frozenset(
    {
        *("create_standby_groups", "transfer_weights", "broadcast_expert_mapping", "start_async", "clear_async"),
        *("receive_expert_mapping", "warmup_new_worker", "switch_and_prepare", "switch_and_remove"),
        *("perform_eplb_reshuffle", "perform_scale_down_eplb_reshuffle", "rewarm_workspace"),
        *("commit_scale_up", "commit_scale_down"),
    }
)

logger = logging.getLogger("vllm.fusedvit")  # a child of vLLM's logger, whose handlers print it


@dataclass
class ServedTower(Served):
    """A fused tower of this process. `lost`: it sleeps on level 2, or has woken from it without loaded weights.

    Attributes:
        normalization: vLLM's normalisation of bytes, to fold into the weights; None where vLLM's own module runs.
        read_from: the state of the buffers when `normalization` was read from them; see `vllm._state_of`.
        judge: given the tower, decides once it has weights whether it runs fused; None afterwards.
    """

    normalization: Normalization | None = None
    read_from: tuple[Any, ...] = ()
    judge: Callable[[nn.Module], None] | None = None


def stats(worker: Any) -> dict[str, Any]:
    """What each tower of a worker does, by its path: `llm.collective_rpc("fusedvit_stats")`."""
    model = _model_of(_runner_of(worker))
    return left_in(model, "vLLM") | stats_of(model)


def _profile(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares fused towers before a model runner's profile run, so that it measures their memory, too."""
    model = _model_of(runner)
    _judge_loaded(model)
    prepare_awake(served_in(model), logger)
    if served_in(model) and getattr(getattr(runner, "cache_config", None), "kv_cache_memory_bytes", None):
        logger.info(
            "fusedvit: the size of the KV cache is given, by --kv-cache-memory-bytes or a start-up plan: "
            "it must leave room for what the tower holds"
        )
    return original(runner, *args, **kwargs)


def _initialize(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares the remaining towers before the KV cache's initialisation, a step of every start. Profiling is not:
    models without a KV cache, instances that only encode and workers that join by elastic EP skip it."""
    _judge_loaded(_model_of(_runner_of(worker)))
    prepare_awake(_served_in(worker), logger)
    return original(worker, *args, **kwargs)


def _init_model_state(original: Callable[..., Any], vllm_config: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Judges towers before the model runner V2 builds its state of a loaded model, vLLM's encoder graphs among it."""
    _judge_loaded(model)
    return original(vllm_config, model, *args, **kwargs)


def _judge_loaded(model: Any) -> None:
    """Decides about the towers of a model runner's model, now that weights are loaded."""
    for _, tower, served in served_in(model):
        if isinstance(served, ServedTower) and served.judge is not None:
            judge, served.judge = served.judge, None
            judge(tower)


def _sleep(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives graphs and prepared weights back; on level 2 the tower's own weights lose their content."""
    level = inspect.signature(original).bind(worker, *args, **kwargs).arguments.get("level", 1)
    for *_, served in _served_in(worker):
        served.give_back("woken", level >= _LAST_LEVEL)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return original(worker, *args, **kwargs)


def _wake_up(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares woken towers again, except those whose weights have lost their content."""
    tags = inspect.signature(original).bind(worker, *args, **kwargs).arguments.get("tags")
    towers = _served_in(worker) if tags is None or "weights" in tags else []
    with writing([served for *_, served in towers if not served.ready and not served.lost], "woken"):
        found = original(worker, *args, **kwargs)
    prepare_awake(towers, logger)
    return found


def _reload(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares towers at once after vLLM has written new content to their parameters; none is `lost` any more."""
    towers = [served for *_, served in _served_in(worker)]
    with writing(towers, "reloaded"):
        found = original(worker, *args, **kwargs)
    for served in towers:
        served.lost = False
    prepare_awake(_served_in(worker), logger)
    return found


def _update(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """One part of a weight update. Whether more parts follow is unknown, so the next call prepares."""
    with writing_part([served for *_, served in _served_in(worker)], "updated"):
        return original(worker, *args, **kwargs)


def _scale(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """A step of elastic EP: some steps write to the weights of a worker that joins, and count as an update."""
    step = inspect.signature(original).bind(worker, *args, **kwargs).arguments["execute_method"]
    run = original if step in _WRITING_NOTHING else functools.partial(_update, original)
    return run(worker, *args, **kwargs)


def _discard(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """If weights are among what vLLM discards, they lose their content, as on the last level of sleep."""
    tags = inspect.signature(original).bind(worker, *args, **kwargs).arguments.get("tags", ())
    for *_, served in _served_in(worker) if "weights" in tags else ():
        served.give_back("discarded", lost=True)
    return original(worker, *args, **kwargs)


def _shut_down(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    for path, found in stats(worker).items():
        logger.info("fusedvit: %s: %s", path, {name: value for name, value in found.items() if name != "graphs"})
    return original(worker, *args, **kwargs)


def _runner_of(worker: Any) -> Any:
    return getattr(worker, "model_runner", None)


def _model_of(runner: Any) -> Any:
    """A model runner's model, unwrapped: by default a `CUDAGraphWrapper`, which is no module, captures the language
    model."""
    model: Any = getattr(runner, "model", None)
    return model.unwrap() if hasattr(type(model), "unwrap") else model


def _served_in(worker: Any) -> list[tuple[str, nn.Module, Served]]:
    return served_in(_model_of(_runner_of(worker)))


def patch_runner(module: ModuleType) -> None:
    runner = vars(module).get("GPUModelRunner")
    if runner is not None:  # every known release has it
        wrap(runner, "profile_run", _profile)
        wrap(module, "init_model_state", _init_model_state)


def patch_worker(module: ModuleType) -> None:
    worker = vars(module).get("Worker")
    if worker is None:
        return
    for name, around in (
        ("initialize_from_config", _initialize),
        ("sleep", _sleep),
        ("wake_up", _wake_up),
        ("reload_weights", _reload),
        ("finish_weight_update", _reload),
        ("reset_weights", _reload),
        ("update_weights", _update),
        ("elastic_ep_execute", _scale),
        ("discard", _discard),
        ("shutdown", _shut_down),
    ):
        wrap(worker, name, around)
    worker.fusedvit_stats = stats
