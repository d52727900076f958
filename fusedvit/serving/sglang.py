"""The SGLang plugin: `pip install fusedvit` beside SGLang, and its vision towers run fused.

SGLang calls `register` in its processes (entry point group `sglang.srt.plugins`). The plugin notes what a tower's
constructor builds, and fuses the tower once SGLang has loaded its weights: in the model runner and in the encoder
server, before the KV pool takes the remaining memory. A tower that cannot run fused runs SGLang's own code, and one log
line says why. Switch and options: see `plugin`.
"""

import copyreg
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusedvit.api import fuse_sharded, fuse_tower
from fusedvit.checks.as_built import Built
from fusedvit.checks.fallback import ENGINE
from fusedvit.errors import OF_ODD_OBJECTS, Reason, unnamed
from fusedvit.families.base import Family
from fusedvit.fused_encoder import Answer, FusedEncoder
from fusedvit.outputs.hugging_face import side_by_side
from fusedvit.serving.agreement import Group, told
from fusedvit.serving.engine_calls import counted, encoded, grid_of, nothing_in
from fusedvit.serving.plugin import (
    check_options,
    disabled,
    install,
    known_classes,
    left_in,
    may_gather,
    note_left,
    options,
    unknown_release,
    wrap,
)
from fusedvit.serving.served import (
    SERVED,
    Served,
    judged,
    prepare_awake,
    serve_whole,
    served_in,
    stats_of,
    try_to_fuse,
    writing,
    writing_part,
)
from fusedvit.serving.sglang_towers import SGLANG, TOWERS
from fusedvit.serving.sharded import ShardedTower

RELEASES = ((0, 5, 21), (0, 5, 23))  # first and last that are known
_BUILT = "_fusedvit_built"  # in a tower's __dict__
_DATA_PARALLEL = "use_data_parallel"  # of a tower's constructor: whole weights
_LOADED = "maybe_precompile_model_kernels_after_loading"  # called after loading, before the KV pool
_SHARDED = "its weights are sharded over {} GPUs; with --mm-enable-dp-encoder every GPU runs it fused"
_NO_STAGE = "this pipeline stage encodes nothing"
_ELSEWHERE = "this server encodes nothing (--disaggregation-mode decode, --language-only)"
_UNUSED = (_NO_STAGE, _ELSEWHERE)  # why SGLang never calls a tower: with `strict`, too, such a tower is left alone
_WEIGHTS, _GRAPHS = "weights", "cuda_graph"  # kinds of memory that SGLang gives back and takes again
_READING = frozenset({"snapshot", "compare", "checksum"})  # actions of `check_weights`; another one resets weights

logger = logging.getLogger("sglang.fusedvit")


@dataclass(frozen=True)
class Noted:
    """Facts about a tower, noted when its constructor returned.

    Attributes:
        family: SGLang's dialect of the tower's family.
        config: its vision config.
        built: its structure; None where `wrong` says why it has none.
        graphs: original values of the attributes that switch SGLang's own CUDA graphs on; `_note` switches them off.
        whole: builds the same tower with whole weights, not loaded yet; None where SGLang cannot.
    """

    family: Family
    config: Any
    built: Built | None
    wrong: str
    graphs: Mapping[str, Any]
    whole: Callable[[], Any] | None


def register() -> None:
    """Changes SGLang's towers as they are imported; a repeated call changes nothing.

    Raises:
        ValueError: `FUSEDVIT_CONFIG` holds no options. SGLang logs it and goes on; a tower's constructor raises it too.
    """
    install(_IMPORTED, "sglang")


def report(scheduler: Any) -> None:
    """Logs what each tower of a scheduler does: `engine.collective_rpc("fusedvit_report")`."""
    for model in _models_of(scheduler):
        for path, found in (left_in(model, "SGLang") | stats_of(model)).items():
            logger.info("fusedvit: %s: %s", path, found)


# processes


class _Call:
    """Where it is unpickled, it is what `function(*given)` returns there."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        self._function, self._given = function, given

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._given

    def __call__(self, *given: Any) -> Any:  # by `copy`, which pickles nothing
        return self._function(*self._given)(*given)


def _patch_options(module: ModuleType) -> None:
    """Lets SGLang's options load plugins where they are unpickled.

    The processes of an encoder server but the first, and Ray's actors, get options and load no plugins; a rank with the
    plugin would wait for the others in vain.
    """
    copyreg.pickle(module.ServerArgs, _reduced)


def _reduced(options: Any) -> tuple[Any, ...]:
    from sglang.srt.plugins import load_plugins

    make, *rest = options.__reduce_ex__(2)
    return (_Call(itemgetter(1), (_Call(load_plugins), make)), *rest)


# construction


def _patch_towers(module: ModuleType) -> None:
    for cls, family in known_classes(module, TOWERS, _wrong_signature, "SGLang", logger):
        wrap(cls, "__init__", functools.partial(_construct, cls, family))


def _wrong_signature(cls: Any) -> str:
    """How a tower's class differs from the known releases; "" if it does not."""
    built, called = inspect.signature(cls.__init__).parameters, inspect.signature(cls.forward).parameters
    if not {"vision_config", "config"} & built.keys():
        return f"its constructor takes {[*built]}, expected vision_config or config among them"
    if [*called] != ["self", "x", "grid_thw"]:
        return f"its forward takes {[*called]}, expected x and grid_thw"
    return ""


def _construct(cls: Any, family: Family, original: Callable[..., None], tower: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a tower's constructor and notes what it built before any other code has a reference to the tower.

    Raises:
        ValueError: as `plugin.check_options`.
        RuntimeError: as `_say`.
    """
    original(tower, *args, **kwargs)
    bound = inspect.signature(original).bind(tower, *args, **kwargs)
    given = bound.arguments
    config = given.get("vision_config", given.get("config"))
    check_options(family, config)
    wrong = _wrong_loaders()
    if type(tower) is not cls:
        if (type(tower).__module__, type(tower).__name__) in TOWERS:  # which is noted by its own patch
            return
        wrong = f"it is a subclass of {cls.__name__}, and may compute something else"
    if wrong:
        _say(tower, wrong)
        return
    again = (
        functools.partial(_build_whole, cls, original, bound) if _DATA_PARALLEL in bound.signature.parameters else None
    )
    vars(tower)[_BUILT] = _note(tower, family, config, again)


def _say(tower: nn.Module, why_not: str, rank: int = 0) -> None:
    """Logs, on rank 0, and notes why a tower runs SGLang's own code.

    Raises:
        RuntimeError: this process encodes, and the options are strict.
    """
    name = type(tower).__name__
    note_left(tower, name, why_not, is_used=why_not not in _UNUSED)
    if rank == 0:
        logger.info("fusedvit: %s runs SGLang's own code: %s", name, why_not)


def _wrong_loaders() -> str:
    """How SGLang's release, or one of its modules that load weights, differs from the known ones; "" if none does."""
    import sglang.version

    wrong = unknown_release("SGLang", sglang.version.__version__, RELEASES)
    for module, patch in _LOADERS.items():  # fully imported by now, unlike when plugins load
        if module in sys.modules and not wrong:
            try:
                wrong = patch(sys.modules[module])
            except AttributeError as error:
                wrong = unnamed(error)
    return wrong


def _build_whole(cls: Any, original: Any, bound: inspect.BoundArguments) -> Any:
    whole = cls.__new__(cls)
    bound.arguments |= {"self": whole, _DATA_PARALLEL: True}
    original(*bound.args, **bound.kwargs)
    return whole


def _note(tower: Any, family: Family, config: Any, whole: Callable[[], Any] | None = None) -> Noted:
    graphs = {name: vars(tower)[name] for name in ("enable_cg", "cuda_graph_runner") if name in vars(tower)}
    if graphs.get("enable_cg"):
        tower.enable_cg, tower.cuda_graph_runner = False, None
    try:
        for module in tower.modules():  # as SGLang does at the first call; a process settles its kernels once
            if vars(module).get("_forward_method", module) is None:
                module._forward_method = module._resolve_forward_method()
        built, wrong = Built.of(tower, SGLANG), ""
    except Exception as error:  # SGLang must start, whatever a tower holds that we did not foresee
        built, wrong = None, told(error)
    return Noted(family, config, built, wrong, graphs, whole)


# loading


def _after_loading(original: Callable[..., Any], holder: Any, *args: Any, **kwargs: Any) -> Any:
    """`holder`: the encoder server's model, or a model runner."""
    found = original(holder, *args, **kwargs)
    fuse_towers(holder if isinstance(holder, nn.Module) else holder.model)
    return found


def fuse_towers(model: nn.Module) -> None:
    """Fuses the towers of a model whose weights are loaded, prepares them and captures their graphs.

    Raises:
        RuntimeError: another rank did not come, or shards could not be gathered; or as `_say`.
    """
    for tower in [module for module in model.modules() if _BUILT in vars(module)]:
        noted: Noted = vars(tower).pop(_BUILT)
        name = type(tower).__name__
        why_not = try_to_fuse(tower, _fuse_whole, noted)
        if not why_not and _ranks(tower) > 1:
            why_not = _fuse_sharded(tower, noted)
        why_not = why_not or judged(tower)
        if why_not:
            vars(tower).update(noted.graphs)
            _say(tower, why_not, _rank())
        else:
            _turn_off_graphs()
            vars(tower)[SERVED].prepare(name, logger)


def _fuse_whole(tower: nn.Module, noted: Noted) -> str:
    """Fuses a tower with whole weights; returns why it cannot run fused, whole or sharded, or ""."""
    why_not = _reason_of_engine(tower, noted)
    if why_not or _ranks(tower) > 1:
        return why_not
    return noted.wrong or _fuse(tower, noted)


def _ranks(tower: nn.Module) -> int:
    """How many GPUs the tower's weights are sharded over."""
    return max(getattr(module, "tp_size", 1) for module in tower.modules() if module is not tower)


def _reason_of_engine(tower: nn.Module, noted: Noted) -> str:
    """Why SGLang's options keep a tower from running fused, the same on every rank; "" if they do not."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    if not get_parallel().pp_group.is_first_rank:
        return _NO_STAGE
    if _encodes_elsewhere():
        return _ELSEWHERE
    ranks = _ranks(tower)
    if ranks > 1 and (noted.whole is None or get_parallel().tp_size != ranks):
        return _SHARDED.format(ranks)
    deterministic = get_exec().deterministic
    if deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target is not None:
        return (
            "deterministic inference is on, and what the fused kernels give depends on the batch and is not a trainer's"
        )
    return ""


def _encodes_elsewhere() -> bool:
    """Whether other servers encode for this one. SGLang builds the tower all the same: prepared, it would take memory
    from the KV pool."""
    from sglang.srt.runtime_context import get_disagg

    disagg = get_disagg()
    decodes = disagg.disaggregation_mode == "decode" and not disagg.enable_pd_role_switch
    return decodes or (disagg.language_only and not disagg.enable_adaptive_dispatch_to_encoder)


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _fuse(tower: nn.Module, noted: Noted) -> str:
    """Fuses a tower, whose weights may be gathered later; returns why it cannot run fused, or ""."""
    if disabled():
        return disabled()
    try:
        spec = noted.family.spec_from_config(noted.config)
    except OF_ODD_OBJECTS as error:
        return unnamed(error)
    assert noted.built is not None, "asked for only where nothing was wrong"
    handle = fuse_tower(tower, noted.family, spec, options(), built=noted.built, call=run)
    vars(tower)[SERVED] = Served(handle)
    return ""


def _fuse_sharded(tower: nn.Module, noted: Noted) -> str:
    """Lets a whole copy run in the sharded tower's place; returns why it cannot, or ""."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    def make() -> tuple[Any, str]:
        assert noted.whole is not None, "asked before"
        if not may_gather():  # asked where ranks agree on the outcome: each has an environment of its own
            return None, _SHARDED.format(_ranks(tower))
        parameter, default = next(tower.parameters()), torch.get_default_dtype()
        torch.set_default_dtype(parameter.dtype)
        try:
            with parameter.device:
                whole = noted.whole().eval()
        finally:
            torch.set_default_dtype(default)
        vars(whole).pop(_BUILT, None)
        of_whole = _note(whole, noted.family, noted.config)
        return whole, of_whole.wrong or _fuse(whole, of_whole)

    encode = functools.partial(encoded, _answer)
    attach = functools.partial(fuse_sharded, tower, call=run)
    return serve_whole(tower, noted.built or noted.wrong, Group.of(get_tp_group()), make, encode, attach, logger)


def _grid_of(handle: FusedEncoder, grid_thw: Any) -> torch.Tensor | Reason:
    grid = grid_of(grid_thw)
    if not handle.spec.window or isinstance(grid, Reason) or not len(grid) or int(grid[:, 0].max()) <= 1:
        return grid
    return Reason(ENGINE, "several frames: SGLang's full attention spans them")


def _turn_off_graphs() -> None:
    """Makes calls that fall back run SGLang's eager code: SGLang's own graphs place positions elsewhere."""
    from sglang.srt.environ import envs

    if envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get():
        envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.set(False)
        logger.info("fusedvit: SGLANG_VIT_ENABLE_CUDA_GRAPH is off: the fused tower has graphs of its own")


def run(handle: FusedEncoder, tower: nn.Module, x: torch.Tensor, grid_thw: Any) -> torch.Tensor | None:
    """A fused tower's `forward`: `[tokens, (1 + deepstack) * out]`; None runs SGLang's own. Of a sharded tower every
    rank encodes a share and returns all rows.

    Args:
        x: `[patches, patch_width]`, normalised.
        grid_thw: `[items, 3]`: a tensor, an array or a list of triples. A grid that the encoder refuses goes to
            SGLang's code, which accepts it or raises its own error.
    """
    sharded: ShardedTower | None = vars(tower)[SERVED].sharded
    left = nothing_in(x)
    if sharded is not None:
        return sharded(x, left or _grid_of(handle, grid_thw))
    found = counted(handle, lambda: left or _answer(handle, tower, x, _grid_of(handle, grid_thw)))
    return None if found is None else side_by_side(found.outputs, handle.spec)


def _answer(handle: FusedEncoder, tower: nn.Module, x: torch.Tensor, grid: torch.Tensor | Reason) -> Answer | Reason:
    return grid if isinstance(grid, Reason) else handle.answer_or_reason(tower, x, grid, {})


# memory


def _release(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives prepared weights and graphs back when SGLang gives back its own weights or graphs."""
    from sglang.srt.runtime_context import get_exec

    found = original(manager, *args, **kwargs)
    away = {_WEIGHTS, _GRAPHS} & manager.offload_tags
    features = get_exec().features
    loses = features.enable_memory_saver and not features.enable_weights_cpu_backup
    for *_, served in _served_of(manager) if away else ():
        served.give_back("woken", served.lost or (_WEIGHTS in away and loses))
    if away and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _resume(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares resumed towers again, except those whose weights were given back without a copy."""
    found = original(manager, *args, **kwargs)
    _prepare_awake(manager)
    return found


def _updated(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares towers at once after SGLang has written new content to their parameters; success ends `lost`."""
    towers = [served for *_, served in _served_of(manager)]
    with writing(towers, "updated"):
        found = original(manager, *args, **kwargs)
    for served in towers:
        served.lost = served.lost and not found.success
        if served.lost and served.sharded is not None and _is_awake(manager):  # ranks with success gather now
            served.sharded.failed(RuntimeError(found.message))
    _prepare_awake(manager)
    return found


def _updated_in_part(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """One part of a weight update. Whether more parts follow is unknown, so the next call prepares."""
    with writing_part([served for *_, served in _served_of(manager)], "updated"):
        return original(manager, *args, **kwargs)


def _checked(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """SGLang's check of weights, which compares them or resets them before others are loaded."""
    run = original if recv_req.action in _READING else functools.partial(_updated_in_part, original)
    return run(manager, recv_req)


def _prepare_awake(manager: Any) -> None:
    if _is_awake(manager):
        prepare_awake(_served_of(manager), logger)


def _is_awake(manager: Any) -> bool:
    return not {_WEIGHTS, _GRAPHS} & manager.offload_tags


def _served_of(manager: Any) -> list[tuple[str, nn.Module, Served]]:
    """Fused towers of the served model, and of a draft model with a tower of its own, each tower once."""
    found = [each for model in _models_of(manager) for each in served_in(model)]
    return [each for i, each in enumerate(found) if all(each[-1] is not before for *_, before in found[:i])]


def _models_of(manager: Any) -> list[Any]:
    draft = getattr(manager, "draft_worker", None)
    runners: list[Any] = getattr(draft, "weight_update_runners", list)()
    return [manager.tp_worker.model_runner.model, *(runner.model for _, runner in runners)]


# the functions of SGLang that are replaced


def _patch_updater(module: ModuleType) -> str:
    updates = dict.fromkeys(("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update"), _updated)
    parts = ("begin_weight_update", "update_weights_from_tensor", "update_weights_from_distributed")
    updates |= dict.fromkeys(parts, _updated_in_part) | {"check_weights": _checked}
    memory = {"release_memory_occupation": _release, "resume_memory_occupation": _resume}
    return _hooked(module.SchedulerWeightUpdaterManager, memory | updates)


def _patch_scheduler(module: ModuleType) -> str:
    module.Scheduler.fusedvit_report = report
    return ""


def _hooked(owner: Any, around: Mapping[str, Callable[..., Any]]) -> str:
    """Replaces functions of `owner`; returns which of them is missing, or ""."""
    missing = [name for name, replacement in around.items() if not wrap(owner, name, replacement)]
    return f"{owner.__name__} has no {missing[0]}" if missing else ""


_IMPORTED: dict[str, Callable[[ModuleType], None]] = {module: _patch_towers for module, _ in TOWERS}
_IMPORTED["sglang.srt.server_args"] = _patch_options
_LOADERS: dict[str, Callable[[ModuleType], str]] = {
    "sglang.srt.model_executor.model_runner": lambda module: _hooked(module.ModelRunner, {_LOADED: _after_loading}),
    "sglang.srt.disaggregation.encoder.server": lambda module: _hooked(module, {_LOADED: _after_loading}),
    "sglang.srt.managers.scheduler_components.weight_updater": _patch_updater,
    "sglang.srt.managers.scheduler": _patch_scheduler,
}
