"""The vLLM plugin: `pip install fusedvit` beside vLLM, and its vision towers run fused.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It changes classes of vLLM
as their modules are imported, and where our warnings are logged. A tower's constructor fuses the tower, unless vLLM's
options forbid that. Once weights are loaded, the tower is judged. The model runner's profile run first prepares weights
and captures graphs, so that `gpu_memory_utilization` accounts for them; the worker's sleep gives them back. A tower
that cannot run fused runs vLLM's own code, and one log line says why. Switch and options: see `plugin`.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fusedvit.api import fuse_sharded, fuse_tower
from fusedvit.checks.as_built import Built
from fusedvit.checks.fallback import ENGINE
from fusedvit.checks.ownership import name_of
from fusedvit.checks.recorded import version_of
from fusedvit.config import FuseConfig
from fusedvit.errors import OF_ODD_OBJECTS, Reason, attempted, unnamed
from fusedvit.families.base import Family
from fusedvit.families.registry import family_of
from fusedvit.fused_encoder import Answer, FusedEncoder
from fusedvit.graphs.limits import MOST
from fusedvit.model.normalization import Normalization
from fusedvit.model.spec import VisionSpec
from fusedvit.outputs.hugging_face import side_by_side
from fusedvit.pixels.byte_pixels import BytePixels
from fusedvit.runtime.captured_encoder import LARGEST_BUDGET
from fusedvit.serving import vllm_gemma
from fusedvit.serving.agreement import Group, told
from fusedvit.serving.engine_calls import as_rows, counted, encoded, grid_of, nothing_in, waiting_allowed
from fusedvit.serving.plugin import (
    CONFIG,
    HELD,
    VARIABLES,
    check_options,
    disabled,
    install,
    known_classes,
    may_gather,
    note_left,
    options,
    unknown_release,
    wrap,
)
from fusedvit.serving.served import SERVED, judged, serve_whole, served_in, try_to_fuse
from fusedvit.serving.sharded import ShardedTower
from fusedvit.serving.vllm_towers import MODELS, TOWERS, VLLM
from fusedvit.serving.vllm_worker import (
    RUNNERS,
    WORKER,
    ServedTower,
    logger,
    patch_runner,
    patch_worker,
)

RELEASES = ((0, 26), (0, 33))  # first and last that are known
_RAY = "vllm.ray.ray_env"
_TRANSFORMERS = "vllm.model_executor.models.transformers.multimodal"
_ADAPTERS = "vllm.model_executor.models.adapters"  # its subclasses make pooling models of others, with the same tower
_REPLICATED = "ReplicatedLinear"  # whole on every rank, even if its tp_size is not 1
_METHOD = "quant_method"  # attribute of a layer: the object that computes it
_MISSING = "StageMissingLayer"  # vLLM's module in place of a tower that it does not call, and which it holds
_NORMS = ("FusedMMInputNorm", "FusedInputNorm")  # vLLM's modules that normalise bytes in a tower; the latter in 0.30
# Why vLLM never calls a tower: with `strict`, too, such a tower is left alone.
_NO_STAGE = "this pipeline stage encodes nothing"
_NO_PICTURES = "nothing is encoded: no images and no videos are taken (--limit-mm-per-prompt, --language-model-only)"
_DRAFT = "it is a draft model's, which gets the target's embeddings"
_NOT_CALLED = "vLLM does not call it"
_UNUSED = (_NO_STAGE, _NO_PICTURES, _DRAFT, _NOT_CALLED)
_OVERTAKEN = 3  # attempts at a call, each dropped if the normalisation has changed meanwhile


# entry point


def register() -> None:
    """Changes vLLM's classes as they are imported; a repeated call changes nothing.

    Raises:
        ValueError: `FUSEDVIT_CONFIG` holds no valid options.
    """
    install(_PATCHES, "vllm")


# towers


def _patch_towers(module: ModuleType) -> None:
    for cls, family in known_classes(module, TOWERS, _wrong_signature, "vLLM", logger):
        wrap(cls, "__init__", functools.partial(_construct, cls, family))
        wrap(cls, "load_weights", _load)


def _patch_models(module: ModuleType) -> None:
    for cls, family in known_classes(module, MODELS, vllm_gemma.wrong_model, "vLLM", logger):
        wrap(cls, "__init__", functools.partial(_construct_model, cls, family))
        wrap(cls, "load_weights", _load)
        vllm_gemma.replace_methods(cls)


def _wrong_signature(cls: Any) -> str:
    """How a tower's class differs from the known releases; "" if it does not."""
    built, called = inspect.signature(cls.__init__).parameters, inspect.signature(cls.forward).parameters
    if "vision_config" not in built:
        return f"its constructor takes {[*built]}, expected vision_config among them"
    rest = [p for p in called.values() if p.name not in ("self", "x", "grid_thw")]
    if [*called][:3] != ["self", "x", "grid_thw"] or any(p.default is inspect.Parameter.empty for p in rest):
        return f"its forward takes {[*called]}, expected x, grid_thw and options"
    return ""


def _construct(cls: Any, family: Family, original: Callable[..., None], tower: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a tower's constructor, then fuses the tower before any other code has a reference to it."""
    original(tower, *args, **kwargs)
    if type(tower) is not cls:
        _say(type(tower), tower, f"it is a subclass of {cls.__name__}, and may compute something else")
        return
    config = inspect.signature(original).bind(tower, *args, **kwargs).arguments["vision_config"]
    check_options(family, config)
    why_not = try_to_fuse(tower, _fuse_whole, family, config)
    if not why_not and _ranks(tower) > 1:
        why_not = _fuse_sharded(tower, functools.partial(_whole, tower, family, original, config, args, kwargs))
    _say(cls, tower, why_not)


def _construct_model(
    cls: Any, family: Family, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any
) -> None:
    """As `_construct`, for a model that holds Hugging Face's tower."""
    original(model, *args, **kwargs)
    held: Any = getattr(model, vllm_gemma.TOWER, None)
    tower = vars(held).get(HELD) if type(held).__name__ == _MISSING else held
    if type(tower).__name__ not in family.class_names:
        return
    if tower is not held:
        _say(type(tower), tower, _unused(tower) or _NOT_CALLED)
        return
    mro = type(model).__mro__
    if any(sub.__module__ != _ADAPTERS for sub in mro[: mro.index(cls)]):
        _say(type(model), tower, f"it is a subclass of {cls.__name__}, and may compute something else")
        return
    check_options(family, tower.config)
    _say(cls, tower, try_to_fuse(tower, _fuse_whole, family, tower.config))


def _construct_hugging_faces(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Runs the constructor of a Hugging Face model inside vLLM, then logs each tower of a known family as not fused."""
    original(model, *args, **kwargs)
    why_not = "its model is Hugging Face's (model_impl=\"transformers\"), not one of vLLM's own"
    for tower in [module for module in model.modules() if family_of(type(module).__name__) is not None]:
        _say(type(tower), tower, _unused(tower) or why_not)


def _fuse_whole(tower: Any, family: Family, config: Any) -> str:
    """Fuses a tower with whole weights; returns why it cannot run fused, whole or sharded, or ""."""
    why_not = _reason_of_engine(tower)
    return _fuse(tower, family, config) if not why_not and _ranks(tower) == 1 else why_not


def _judge(cls: type, config: Any, tower: nn.Module) -> None:
    """Decides whether a fused tower of the served model runs fused, now that it has weights, and turns vLLM's encoder
    graphs off where it does: their manager, which vLLM has not built yet, would capture what we replace."""
    why_not = judged(tower, functools.partial(_expect_bytes, tower, vars(tower)[SERVED].handle))
    _say(cls, tower, why_not)
    if not why_not and config is not None:
        config.compilation_config.cudagraph_mm_encoder = False


def _say(cls: type, tower: nn.Module, why_not: str) -> None:
    """Logs and notes why a tower runs vLLM's own code, unless `why_not` is "".

    Raises:
        RuntimeError: vLLM will call the tower, and the options are strict.
    """
    if not why_not:
        return
    note_left(tower, cls.__name__, why_not, is_used=why_not not in _UNUSED)
    if _rank_of(tower) == 0:
        logger.info("fusedvit: %s runs vLLM's own code: %s", cls.__name__, why_not)


def _unused(tower: nn.Module) -> str:
    """Why vLLM never calls the tower, as far as its options say; "" for no such reason."""
    found = try_to_fuse(tower, _reason_of_engine)
    return found if found in _UNUSED else ""


def _reason_of_engine(tower: nn.Module) -> str:
    """Why vLLM's options or release keep a tower from running fused, the same on every rank; "" if they do not."""
    import vllm

    unknown = unknown_release("vLLM", vllm.__version__, RELEASES)
    if unknown:  # first: what follows reads attributes of known releases
        return unknown
    from vllm import envs

    config = _config()
    if not _encodes():
        return _NO_STAGE
    if _text_only(config):
        return _NO_PICTURES
    if _of_draft(config):
        return _DRAFT
    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return "VLLM_BATCH_INVARIANT is set, and fused kernels' results depend on the batch"
    lora = getattr(config, "lora_config", None)
    if getattr(lora, "enable_tower_connector_lora", False):
        return "LoRA of the vision tower is on (enable_tower_connector_lora)"
    method = _quantised_by(tower)
    if method:
        return f"its layers are quantised ({method})"
    return "its weights are offloaded to the CPU" if _offloaded(tower, config) else ""


def _encodes() -> bool:
    """Whether this rank is of the pipeline stage that runs encoders."""
    from vllm.distributed import get_pp_group

    return bool(get_pp_group().is_first_rank)


def _text_only(config: Any) -> bool:
    """Whether vLLM takes neither images nor videos: it then builds the tower on no device and discards it."""
    modes = getattr(getattr(config, "model_config", None), "multimodal_config", None)
    return modes is not None and all(modes.get_limit_per_prompt(kind) == 0 for kind in ("image", "video"))


def _of_draft(config: Any) -> bool:
    """Whether the model being built is a draft model of its own, for speculative decoding."""
    given: Any = getattr(config, "speculative_config", None)
    draft, target = (getattr(given, f"{name}_model_config", None) for name in ("draft", "target"))
    return draft is not None and config.model_config is draft is not target


def _quantised_by(tower: nn.Module) -> str:
    """The name of a `quant_method` class in the tower that is not vLLM's unquantised one; "" for none. Some of these
    classes hold weights on no device until the weights are loaded."""
    methods = (type(m) for m in (vars(module).get(_METHOD) for module in tower.modules()) if m is not None)
    known = VLLM.objects[_METHOD]
    return next((cls.__name__ for cls in methods if name_of(cls) not in known), "")


def _offloaded(tower: nn.Module, config: Any) -> bool:
    """Whether vLLM will move weights of the tower to the CPU after it has built the model."""
    given: Any = getattr(config, "offload_config", None)
    uva, prefetch = getattr(given, "uva", None), getattr(given, "prefetch", None)
    if uva is None or not uva.cpu_offload_gb:
        return False
    backend, group = given.offload_backend, getattr(prefetch, "offload_group_size", 0)
    if backend == "prefetch" or (backend == "auto" and group):  # of the language model's layers alone
        return False
    from vllm.model_executor.offloader.uva import UVAOffloader

    if not getattr(UVAOffloader, "supports_tower_offload", False):  # releases that offload language models alone
        return False
    names = [f".visual.{vllm_gemma.TOWER}.{name}." for name, _ in tower.named_parameters()]
    parts = uva.cpu_offload_params  # of names; none for all
    return not parts or any(f".{part}." in name for part in parts for name in names)


def _config() -> Any:
    """vLLM's configuration that the tower is being built under; None if there is none."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _rank_of(tower: nn.Module) -> int:
    ranks = (getattr(module, "tp_rank", None) for module in tower.modules())
    return next((rank for rank in ranks if isinstance(rank, int)), 0)


def _ranks(tower: nn.Module) -> int:
    """How many GPUs the tower's weights are sharded over."""
    return max(getattr(m, "tp_size", None) or 1 for m in tower.modules() if type(m).__name__ != _REPLICATED)


def _whole(tower: Any, family: Family, original: Any, vision_config: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
    """Builds and fuses a tower like `tower` with whole weights, not loaded yet. The text says why it cannot be."""
    if not may_gather():  # asked where ranks agree on the outcome: each has an environment of its own
        how = "with --mm-encoder-tp-mode data every GPU runs it fused"
        return None, f"its weights are sharded over several GPUs, and {CONFIG} forbids to gather them; {how}"
    cls: Any = type(tower)
    whole, mode = cls.__new__(cls), _config().model_config.multimodal_config
    kept = mode.mm_encoder_tp_mode
    mode.mm_encoder_tp_mode = "data"
    try:
        with _device_of(tower), _disable_current_modes(), torch.inference_mode(False):  # modes that vLLM builds in
            original(whole, *args, **kwargs)
            return whole, _fuse(whole, family, vision_config)
    finally:
        mode.mm_encoder_tp_mode = kept


def _device_of(tower: nn.Module) -> torch.device:
    """The device on which a tower's weights are, or will be loaded."""
    device = next(tower.parameters()).device
    return device if device.type != "meta" else torch.device(_config().device_config.device)


def _fuse_sharded(tower: nn.Module, make: Callable[[], tuple[Any, str]]) -> str:
    """Lets a whole copy run in the sharded tower's place; returns why it cannot, or ""."""
    from vllm.distributed import get_tp_group

    try:
        built: Built | str = Built.of(tower, VLLM)
    except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, whatever it is
        built = told(error)
    encode = functools.partial(encoded, _answer)
    attach = functools.partial(fuse_sharded, tower, call=run)
    return serve_whole(tower, built, Group.of(get_tp_group()), make, encode, attach, logger)


def _load(original: Callable[..., Any], tower: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs `load_weights` of a tower, or of a model that holds one, and has the written weights prepared again."""
    try:
        return original(tower, *args, **kwargs)
    finally:
        for *_, served in served_in(tower):
            served.changed("loaded")


def _fuse(tower: nn.Module, family: Family, vision_config: Any) -> str:
    """Fuses a tower, which may have no weights yet; returns why it cannot run fused, or ""."""
    if disabled():
        return disabled()
    try:
        built = Built.of(tower, family.engine)
        spec = family.spec_from_config(vision_config)
    except OF_ODD_OBJECTS as error:
        return unnamed(error)
    cls, config = type(tower), _config()
    call = vllm_gemma.run if spec.padded else run
    handle = fuse_tower(tower, family, spec, _limited(options(), config, spec), built=built, call=call)
    vars(tower)[SERVED] = ServedTower(handle, judge=functools.partial(_judge, cls, config))
    return ""


def _expect_bytes(tower: nn.Module, handle: FusedEncoder) -> None:
    """Has weights prepared for bytes before the first call, if vLLM normalises pixels on the device."""
    normalization = _normalization(tower)
    if normalization is not None:
        handle.normalizations.expect(normalization, still=False)


def _limited(given: FuseConfig, config: Any, spec: VisionSpec) -> FuseConfig:
    """Fills limits that the user left open from vLLM's scheduler and its own encoder graphs.

    A limit of vLLM's is changed where it contradicts the user's or exceeds what a tower can have. With `memory`, which
    chooses limits itself, none is taken.
    """
    if config is None or given.memory is not None:
        return given
    graphs = config.compilation_config
    budgets, items, frames = (
        getattr(graphs, f"encoder_cudagraph_{name}", None)
        for name in ("token_budgets", "max_vision_items_per_batch", "max_frames_per_batch")
    )
    sizes = given.token_budgets
    if sizes is None:  # buffers grow with the largest budget; larger batches are split
        theirs = budgets or (min(config.scheduler_config.max_num_encoder_input_tokens, LARGEST_BUDGET),)
        room = max(*theirs, given.max_items or 1)
        sizes = sorted({min(size, MOST // spec.merge_unit) for size in (*theirs, room)})
    items = given.max_items or (min(items, sizes[-1], given.max_frames or items) if items else None)
    frames = given.max_frames or (min(max(frames, items or 1), MOST) if frames else None)
    return replace(given, token_budgets=sizes, max_items=items, max_frames=frames)


def run(handle: FusedEncoder, tower: nn.Module, x: torch.Tensor, grid_thw: Any, **more: Any) -> torch.Tensor | None:
    """A fused tower's `forward`: `[tokens, (1 + deepstack) * out]`; None runs vLLM's own. Of a sharded tower every rank
    encodes a share and returns all rows.

    Args:
        x: `[patches, patch_width]`, normalised, or bytes where vLLM normalises on the device.
        grid_thw: `[items, 3]`: a tensor, an array or a list of triples. A grid that the encoder refuses goes to vLLM's
            code, which accepts it or raises its own error.
        more: `encoder_metadata`, which vLLM's own graphs pass.
    """
    sharded: ShardedTower | None = vars(tower)[SERVED].sharded
    left = _of_graphs(more) or nothing_in(x)
    with waiting_allowed():
        if sharded is not None:
            return sharded(x, left or grid_of(grid_thw))
        found = counted(handle, lambda: left or _answer(handle, tower, x, as_rows(grid_thw)))
    return None if found is None else side_by_side(found.outputs, handle.spec)


def _of_graphs(more: dict[str, Any]) -> Reason | None:
    given = [name for name, value in more.items() if value is not None]
    return Reason(ENGINE, f"{given[0]}, which vLLM's own graphs pass") if given else None


def _answer(handle: FusedEncoder, tower: nn.Module, x: torch.Tensor, rows: Any) -> Answer | Reason:
    """As `FusedEncoder.answer_or_reason`, on one state of the tower's normalisation."""
    for _ in range(_OVERTAKEN):
        pixels = _pixels(tower, x)
        found = handle.answer_or_reason(tower, pixels, rows, {})
        # The same buffers may have new content all the same: the call's own fingerprints have found it then.
        if isinstance(found, Reason) or type(pixels) is not BytePixels or _normalization(tower) == pixels.normalization:
            return found
    return Reason(ENGINE, "somebody writes to input_norm all the time")


def _pixels(tower: Any, x: torch.Tensor) -> torch.Tensor:
    """Bytes marked with the normalisation to fold into the weights; else normalised pixels, as vLLM computes them."""
    norm = tower._modules.get("input_norm")
    if norm is None:
        return x
    normalization = _normalization(tower) if x.dtype == torch.uint8 else None
    if normalization is not None:
        return BytePixels.mark(x, normalization)
    pixels: torch.Tensor = norm(x.to(device=tower.device, non_blocking=True), tower.dtype)
    return pixels


def _normalization(tower: nn.Module) -> Normalization | None:
    """vLLM's normalisation of bytes, read from the buffers on the device again if these may have changed."""
    norm, served = tower._modules.get("input_norm"), vars(tower)[SERVED]
    state = _state_of(norm, served.handle)
    if not _same_state(state, served.read_from):
        served.normalization, served.read_from = _read_normalization(norm, served.handle), state
    normalization: Normalization | None = served.normalization
    return normalization


def _state_of(norm: nn.Module | None, handle: FusedEncoder) -> tuple[Any, ...]:
    """Facts that stay equal until the buffers of `norm` may have changed; collecting them waits for no GPU.

    An assigned buffer is a new object, perhaps of the same version; buffers made in inference mode have no version.
    Writes that bypass both (`.data`) change the fingerprints that each call takes, and weights are prepared again:
    therefore the number of preparations is part of the state.
    """
    buffers = (getattr(norm, "weight", None), getattr(norm, "bias", None))
    facts = [(t.data_ptr(), version_of(t), t.dtype) for t in buffers if isinstance(t, torch.Tensor)]
    return norm, *buffers, (getattr(norm, "channel", None), handle.weights.preparations, *facts)


def _same_state(now: tuple[Any, ...], then: tuple[Any, ...]) -> bool:
    return len(now) == len(then) and all(map(is_, now[:-1], then[:-1])) and now[-1] == then[-1]


def _read_normalization(norm: Any, handle: FusedEncoder) -> Normalization | None:
    """vLLM's `byte * weight + bias` per channel, in fp32, as mean and std; None where it computes anything else."""
    spec = handle.spec
    if type(norm).__name__ not in _NORMS or norm.channel != spec.in_channels:
        return None
    buffers = (norm.weight, norm.bias)  # None in vLLM 0.30 where it normalises nothing
    if any(t is None or t.dtype != torch.float32 or t.shape != (norm.channel,) or t.is_meta for t in buffers):
        return None  # vLLM would compute in the buffers' own dtype, if it accepts them at all
    weight, bias = norm.weight.double().cpu(), norm.bias.double().cpu()
    mean, std = -bias / weight, 1 / weight
    layout = spec.patch_size, spec.temporal_patch_size, spec.in_channels
    found = attempted(lambda: Normalization(None, tuple(mean.tolist()), tuple(std.tolist()), *layout), ValueError)
    return None if isinstance(found, Exception) or not (std > 0).all() else found


def _patch_transformers(module: ModuleType) -> None:
    mixin = vars(module).get("MultiModalMixin")
    if mixin is not None:
        wrap(mixin, "__init__", _construct_hugging_faces)


def _patch_ray(module: ModuleType) -> None:
    prefixes = vars(module).get("DEFAULT_ENV_VAR_PREFIXES")  # Ray passes such variables to actors on other nodes
    if isinstance(prefixes, set):
        prefixes.add(VARIABLES)


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    **{module: _patch_towers for module, _ in TOWERS},
    **{module: _patch_models for module, _ in MODELS},
    **{module: patch_runner for module in RUNNERS},
    WORKER: patch_worker,
    _TRANSFORMERS: _patch_transformers,
    _RAY: _patch_ray,
}
