"""What a server does to a model while it runs: reload, sleep, options; and what keeps a tower from running fused."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from torch import nn
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models import qwen3_vl
from vllm.utils import gpu_sync_debug
from vllm.v1.attention.ops import vit_attn_wrappers
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper
from vllm.v1.worker.gpu_worker import Worker

import fusedvit
from fusedvit.checks.change_detection import HANDLE
from fusedvit.errors import UnsupportedModel
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.runtime.captured_encoder import LARGEST_BUDGET
from fusedvit.serving import vllm as plugin
from fusedvit.serving import vllm_worker
from fusedvit.serving.plugin import CONFIG
from tests.serving.vllm.support import GRIDS, Lora, Quantized, close, config_of, embed, load, pixels_of, tower_of, under

GRID = GRIDS["mixed"]
QWEN, GEMMA = "Qwen3VLForConditionalGeneration", "Gemma4ForConditionalGeneration"
RECOMPUTED, SDPA = "maybe_recompute_cu_seqlens", "scaled_dot_product_attention"
every_kind = pytest.mark.parametrize("served", [QWEN, GEMMA], indirect=True)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    config, model = load(getattr(request, "param", QWEN))
    return config, model, fusedvit.fuse(model)


@pytest.fixture
def own(served: tuple[Any, Any, Any]) -> Any:
    """vLLM's own answer, from the same model at that moment."""
    config, model, _ = served
    forward = type(tower_of(model)).__mro__[1].forward

    def answer(grid: Any = GRID) -> torch.Tensor:
        here = tower_of(model)
        handle = vars(here).pop(HANDLE)  # a model that calls parts of its tower goes by it
        cls, here.__class__ = type(here), type(here).__mro__[1]
        try:
            assert type(here).forward is forward
            return embed(config, model, grid)
        finally:
            here.__class__, vars(here)[HANDLE] = cls, handle

    return answer


def fused_calls(handle: Any) -> int:
    return int(handle.stats()["fused"])


def original(handle: Any) -> dict[str, int]:
    return dict(handle.stats()["original"])


# what changes while it runs


def test_its_graphs_are_switched_off_only_where_it_runs_fused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not served[0].compilation_config.cudagraph_mm_encoder
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    config, model = load()
    assert config.compilation_config.cudagraph_mm_encoder
    with pytest.raises(UnsupportedModel):
        fusedvit.fuse(model)


def test_rows_that_an_engines_tower_gives(served: Any) -> None:
    config, model, handle = served
    pixels, grid = pixels_of(model, GRID, torch.float32), torch.tensor(GRID)
    with torch.inference_mode(), under(config):
        assert torch.equal(handle.concatenated(pixels, grid), model.visual(pixels, grid))
        hook = model.visual.blocks[0].register_forward_hook(lambda *_: None)
        rows = handle.concatenated(pixels, grid)
        hook.remove()
        assert torch.equal(rows, type(model.visual).__mro__[1].forward(model.visual, pixels, grid))


def test_metadata_of_its_graphs_passes_through(served: Any) -> None:
    config, model, handle = served
    counted = original(handle).get("engine", 0)
    pixels, grid, before = pixels_of(model, GRID, torch.float32), [list(item) for item in GRID], fused_calls(handle)
    with torch.inference_mode(), under(config):
        want = model.visual(pixels, grid)
        metadata = model.visual.prepare_encoder_metadata(grid)
        got = model.visual(pixels, None, encoder_metadata=metadata)
    assert close(got, want) and fused_calls(handle) == before + 1
    assert original(handle)["engine"] == counted + 1 and "encoder_metadata" in handle.stats()["details"]["engine"]


@every_kind
def test_a_call_may_wait_for_the_gpu(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`VLLM_GPU_SYNC_CHECK=error` raises where code waits for the GPU without saying that it may."""
    config, model, _ = served
    allowed, answer = list[int](), FusedEncoder.answer_or_reason

    def noted(*given: Any) -> Any:
        allowed.append(gpu_sync_debug._allow_depth.get())
        return answer(*given)

    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(FusedEncoder, "answer_or_reason", noted)
    embed(config, model, GRID)
    assert allowed and set(allowed) == {1} and gpu_sync_debug._allow_depth.get() == 0


@pytest.mark.parametrize("architecture", [QWEN, "Qwen2_5_VLForConditionalGeneration", GEMMA])
def test_a_hook_that_comes_and_goes_leaves_prepared_weights(architecture: str) -> None:
    config, model = load(architecture)
    handle, (*_, last) = fusedvit.fuse(model), tower_of(model).modules()
    before = embed(config, model, GRID)
    for _ in range(2):
        hook = last.register_forward_hook(lambda *_: None)
        assert close(embed(config, model, GRID), before)
        hook.remove()
        assert torch.equal(embed(config, model, GRID), before)
    assert handle.stats()["refreshes"] == 1 and original(handle).keys() == {"hooks"}


@every_kind
def test_reload(served: Any, own: Any) -> None:
    config, model, handle = served
    tower = tower_of(model)
    before = embed(config, model, GRID)
    kept = [p.detach().clone() for p in tower.parameters()]
    for parameter in tower.parameters():
        parameter.data.copy_(parameter * 0.9)
    after = embed(config, model, GRID)
    assert close(after, own()) and not close(after, before)
    prefix, loader = ("", tower) if hasattr(tower, "load_weights") else ("model.vision_tower.", model)
    state = {prefix + name: value * 1.1 for name, value in tower.named_parameters()}
    assert loader.load_weights(state.items())
    assert close(embed(config, model, GRID), own())
    for parameter, value in zip(tower.parameters(), kept, strict=True):
        parameter.data.copy_(value)
    assert torch.equal(embed(config, model, GRID), before) and not original(handle)


@pytest.mark.parametrize("architecture", [QWEN, GEMMA])
@pytest.mark.parametrize("how", ["load_weights", "reload_weights", "fails"])
def test_what_vllm_writes_is_prepared_again_whatever_fingerprints_say(
    architecture: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the hook, as a few elements may change between the fingerprint's, and `watch_data` may be off."""
    monkeypatch.setenv(CONFIG, '{"watch_data": false}')
    config, model = load(architecture)
    handle, tower, worker = fusedvit.fuse(model), tower_of(model), worker_of(model)
    before = embed(config, model, GRID)

    def write(*_: Any) -> None:
        for parameter in tower.parameters():
            parameter.data.mul_(0.9)
        if how == "fails":
            raise InterruptedError

    if how == "load_weights":
        prefix, loader = ("", tower) if hasattr(tower, "load_weights") else ("model.vision_tower.", model)
        assert loader.load_weights([(prefix + name, value * 0.9) for name, value in tower.named_parameters()])
    elif how == "fails":
        with pytest.raises(InterruptedError):
            vllm_worker._reload(write, worker)
    else:
        vllm_worker._reload(write, worker)
    got, prepared = embed(config, model, GRID), handle.stats()["refreshes"]
    handle.refresh()
    assert torch.equal(got, embed(config, model, GRID)) and not close(got, before)
    assert prepared == 2 and not original(handle)


@pytest.mark.parametrize("how", ["reset_weights", "part of an update", "part that fails", "discard"])
def test_other_writers_of_vllms_worker(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `watch_data` off, as only the hooks tell."""
    monkeypatch.setenv(CONFIG, '{"watch_data": false}')
    config, model = load()
    handle, tower, worker = fusedvit.fuse(model), tower_of(model), worker_of(model)
    before = embed(config, model, GRID)

    def receive(info: Any) -> None:
        for parameter in list(tower.parameters())[:20]:
            parameter.data.mul_(1.3)
        if info == "part that fails":
            raise InterruptedError

    if how == "reset_weights":
        worker.model_runner.get_model = lambda: model
        worker.reset_weights()
    elif how == "discard":
        monkeypatch.setattr(Worker, "sleep_mode_backend", SimpleNamespace(discard=lambda tags: receive(tags)))
        worker.discard(("kv_cache", "weights"))
    else:
        engine = SimpleNamespace(update_weights=receive, reset_weight_update_target=lambda: None)
        worker.weight_transfer_engine, worker._weight_update_active = engine, True
        worker._weight_update_is_draft = False
        with pytest.raises(InterruptedError) if how == "part that fails" else contextlib.nullcontext():
            worker.update_weights(how)
    got = embed(config, model, GRID)
    handle.refresh()
    assert torch.equal(got, embed(config, model, GRID)) and not close(got, before)
    assert not original(handle)


def worker_of(model: Any) -> Any:
    """vLLM's worker with nothing but this model and a sleep that leaves memory where it is."""
    worker: Any = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(model=model, shutdown=lambda: None)
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    worker.get_draft_model = lambda: None
    worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=[])
    worker._sleep_saved_parameters = worker._sleep_saved_buffers = worker._sleep_saved_draft_buffers = {}
    return worker


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Levels and tags that vLLM's backend was told."""
    told: list[Any] = []
    backend = SimpleNamespace(suspend=told.append, resume=told.append)
    monkeypatch.setattr(Worker, "sleep_mode_backend", backend)
    monkeypatch.setattr(Worker, "synchronize_device", lambda self: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1, 2))
    yield told


@every_kind
def test_sleep_and_wake(served: Any, own: Any, asleep: list[Any]) -> None:
    config, model, handle = served
    worker, before = worker_of(model), embed(config, model, GRID)
    worker.sleep(1)
    assert handle.stats()["weights_mib"] == 0
    worker.wake_up(["kv_cache"])
    assert handle.stats()["weights_mib"] == 0
    worker.wake_up(["weights"])
    assert handle.stats()["weights_mib"] > 0 and torch.equal(embed(config, model, GRID), before)
    kept = [p.detach().clone() for p in tower_of(model).parameters()]
    worker.sleep(level=2)
    for parameter in tower_of(model).parameters():
        parameter.data.fill_(torch.nan)
    worker.wake_up()
    assert handle.stats()["weights_mib"] == 0, "nothing is prepared of weights that are lost"
    worker.model_runner.reload_weights = lambda: [
        p.data.copy_(v) for p, v in zip(tower_of(model).parameters(), kept, strict=True)
    ]
    worker.vllm_config = config
    worker.reload_weights()
    assert handle.stats()["weights_mib"] > 0
    assert torch.equal(embed(config, model, GRID), before) and close(before, own())
    assert asleep == [1, ["kv_cache"], ["weights"], 2, None]


@pytest.mark.parametrize("architecture, family", [(QWEN, "Qwen3-VL"), (GEMMA, "Gemma 4")])
def test_the_profile_run_prepares_first(architecture: str, family: str, heard: Callable[..., str]) -> None:
    config, model = load(architecture)
    handle, seen = fusedvit.fuse(model), []
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    runner.model = model
    runner.supports_mm_inputs = False
    runner.cache_config = SimpleNamespace(kv_cache_memory_bytes=1 << 30)

    def stop(*args: Any, **kwargs: Any) -> None:
        seen.append(handle.stats()["weights_mib"])
        raise InterruptedError

    runner.max_num_tokens, runner._dummy_run = 1, stop
    with pytest.raises(InterruptedError):
        runner.profile_run()
    assert seen and seen[0] > 0, "memory is taken before the run that is measured"
    line = heard("runs fused")
    assert f"({family})" in line and "MiB" in line
    assert "must leave room" in heard("size of the KV cache is given"), "vLLM measures nothing then"


@pytest.mark.parametrize("wrapper", [CUDAGraphWrapper, BreakableCUDAGraphWrapper, UBatchWrapper])
def test_a_model_that_vllm_captures_is_found(served: Any, asleep: list[Any], wrapper: Any) -> None:
    """With its defaults vLLM keeps the model in such a wrapper, whose constructors want a GPU."""
    _, model, handle = served
    worker = worker_of(model)
    worker.model_runner.model = wrapper.__new__(wrapper)
    worker.model_runner.model.runnable = model
    assert worker.fusedvit_stats() == {"visual": handle.stats()}
    worker.sleep(1)
    vllm_worker._profile(lambda runner: None, worker.model_runner)
    assert handle.stats()["weights_mib"] > 0
    worker.sleep(1)
    assert handle.stats()["weights_mib"] == 0
    worker.wake_up()
    assert handle.stats()["weights_mib"] > 0


@every_kind
def test_stats_of_a_worker(served: Any, heard: Callable[..., str]) -> None:
    _, model, handle = served
    worker = worker_of(model)
    (path,) = (name for name, module in model.named_modules() if module is tower_of(model))
    assert worker.fusedvit_stats() == {path: handle.stats()}
    worker.profiler, worker.weight_transfer_engine = None, None
    worker.elastic_ep_executor = SimpleNamespace(shutdown=lambda: None)
    worker.shutdown()
    assert heard(f"{path}: {{'calls':")


# what falls back


def _wrap_lora(visual: Any) -> tuple[Any, str, Any]:
    return visual.blocks[1].attn, "proj", Lora(visual.blocks[1].attn.proj)


def _attention(visual: Any, block: int) -> Any:
    return visual.blocks[block].attn.attn


CHANGES: dict[str, Any] = {
    "LoRA around a layer": _wrap_lora,
    "quantised": lambda v: (v.blocks[0].mlp.linear_fc1, "quant_method", Quantized()),
    "FP8 attention": lambda v: (v.blocks[0].attn.attn, "fp8_enabled", True),
    "another scale": lambda v: (v.blocks[2].attn.attn, "scale", 0.5),
    "another epsilon": lambda v: (v.blocks[0].norm1, "eps", 1e-2),
    "another activation": lambda v: (v.blocks[0].mlp, "act_fn", nn.ReLU()),
    "another method": lambda v: (v.blocks[0].attn.attn, "_forward_method", v.blocks[0].attn.attn._forward_sdpa),
    "another module's method": lambda v: (_attention(v, 0), "_forward_method", _attention(v, 1)._forward_method),
    "another merger": lambda v: (v, "merger", v.deepstack_merger_list[0]),
    "a block less": lambda v: (v, "blocks", v.blocks[:2]),
    "sharded": lambda v: (v.blocks[0].attn.qkv, "tp_size", 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changes_is_noticed(served: Any, own: Any, change: str) -> None:
    """Before or after a fused call, the next one runs vLLM's own code, and the reason names the place."""
    config, model, handle = served
    embed(config, model, GRID)
    before, counted = fused_calls(handle), sum(original(handle).values())
    owner, name, value = CHANGES[change](model.visual)
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        reason = handle.reason()
        assert reason is not None and reason.detail, change
        assert change != "another module's method" or "another object" in str(reason)
        try:
            got = embed(config, model, GRID)
        except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError):
            pass  # as vLLM's own code does with such a module
        else:
            assert close(got.nan_to_num(), own().nan_to_num()), (got - own()).abs().max()
        assert fused_calls(handle) == before and sum(original(handle).values()) > counted
    finally:
        setattr(owner, name, kept)
    assert handle.reason() is None and close(embed(config, model, GRID), own())


def scaled(theirs: Any) -> Any:
    def other(*args: Any, **kwargs: Any) -> Any:
        found = theirs(*args, **kwargs)
        return tuple(part * 1.5 for part in found) if isinstance(found, tuple) else found * 1.5

    return other


def derived(theirs: Any) -> Any:
    """Under the name by which the tower's module imports it; the tower's modules keep their class."""
    return type("Mine", (theirs,), {"maybe_recompute_cu_seqlens": whole(theirs.maybe_recompute_cu_seqlens)})


def whole(theirs: Any) -> Any:
    """Of the sums of lengths only the ends."""
    return staticmethod(lambda *args, **kwargs: theirs(*args, **kwargs)[[0, -1]])


def but_for(function: str) -> Callable[[Any], Any]:
    """Another module, with the same content but for one function."""

    def make(theirs: Any) -> Any:
        other = sys.modules["other"] = ModuleType("other")
        vars(other).update({key: value for key, value in vars(theirs).items() if not key.startswith("__")})
        setattr(other, function, scaled(getattr(theirs, function)))
        return other

    return make


@contextlib.contextmanager
def _low_precision() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


REPLACED: dict[str, tuple[Any, str, Callable[[Any], Any], str]] = {  # and what the reason names
    "a forward": (qwen3_vl.Qwen3_VisionBlock, "forward", scaled, "forward"),
    # Python's wrapper around a function is the engine's own only where the engine's source applies it.
    "a context": (qwen3_vl.Qwen3_VisionMLP, "forward", lambda f: _low_precision()(f), "Qwen3_VisionMLP.forward"),
    "a method of the tower": (qwen3_vl.Qwen3_VisionTransformer, "rot_pos_emb", scaled, "rot_pos_emb"),
    "a function of its module": (qwen3_vl, "pos_embed_interpolate_native", scaled, "pos_embed_interpolate_native"),
    "attention on this platform": (MMEncoderAttention, "_forward_sdpa", scaled, "_forward_sdpa"),
    "what a linear layer runs": (UnquantizedLinearMethod, "apply", scaled, "apply"),
    "a method of a module that the tower's code calls": (RotaryEmbeddingBase, "get_cos_sin", scaled, "get_cos_sin"),
    "a method of a class that the tower's code calls": (MMEncoderAttention, RECOMPUTED, whole, RECOMPUTED),
    "a class by one derived from it": (qwen3_vl, "MMEncoderAttention", derived, "qwen3_vl.MMEncoderAttention is "),
    "a module": (vit_attn_wrappers, "F", but_for(SDPA), "vit_attn_wrappers.F is module other"),
    "a package": (vit_attn_wrappers, "einops", but_for("rearrange"), "vit_attn_wrappers.einops is module other"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_replaced_code_is_noticed(served: Any, own: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model, handle = served
    embed(config, model, GRID)
    owner, name, replacement, said = REPLACED[what]
    before = fused_calls(handle)
    monkeypatch.setitem(sys.modules, "other", ModuleType("other"))  # gone afterwards
    monkeypatch.setattr(owner, name, replacement(getattr(owner, name)))
    assert torch.equal(embed(config, model, GRID), own()) and fused_calls(handle) == before
    assert said in str(handle.reason())


def _in_inference_mode(norm: Any) -> None:
    with torch.inference_mode():
        norm.bias = norm.bias * 2


NORMALISATIONS: dict[str, Callable[[Any], Any]] = {
    "a buffer replaced": lambda n: setattr(n, "bias", n.bias * 2),
    "past its version": lambda n: n.bias.data.mul_(2),
    "of inference mode": _in_inference_mode,
    "rounded": lambda n: n.to(torch.bfloat16).to(torch.float32),
    "in bf16": lambda n: n.to(torch.bfloat16),
    "nothing is left of bytes": lambda n: n.weight.data.zero_(),
    "halved": lambda n: n.weight.mul_(0.5),
    "negated": lambda n: n.weight.mul_(-1),
}


@pytest.mark.parametrize("change", NORMALISATIONS)
def test_normalisation_is_what_its_buffers_hold(served: Any, own: Any, change: str) -> None:
    """Whichever way they came to hold it."""
    config, model, handle = served
    norm = model.visual.input_norm
    kept = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    embed(config, model, GRID)
    before, plain = fused_calls(handle), own()
    NORMALISATIONS[change](norm)
    try:
        got, want = embed(config, model, GRID), own()
        assert close(got, want) and not torch.equal(want, plain)
        assert fused_calls(handle) > before and not original(handle).get("engine")
        twice = fused_calls(handle)
        assert close(embed(config, model, GRID), want) and fused_calls(handle) == twice + 2  # images, videos: once each
    finally:
        for name, buffer in kept.items():
            setattr(norm, name, buffer)
    assert close(embed(config, model, GRID), plain)


def test_normalisation_of_vllm_0_30(served: Any) -> None:
    """A module of another name, whose buffers are None where it normalises nothing."""
    _, model, handle = served
    norm, older = model.visual.input_norm, type("FusedInputNorm", (nn.Module,), {"channel": 3})()
    for name in ("weight", "bias"):
        older.register_buffer(name, getattr(norm, name))
    found = plugin._read_normalization(older, handle)
    assert found is not None and found == plugin._read_normalization(norm, handle)
    older.weight = older.bias = None
    assert plugin._read_normalization(older, handle) is None


def test_normalisation_that_is_written_to_all_the_time(served: Any, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model, handle = served
    bias = model.visual.input_norm.bias
    kept, answer = bias.clone(), FusedEncoder.answer_or_reason

    def overtaken(self: Any, *arguments: Any) -> Any:
        found = answer(self, *arguments)
        bias.add_(1e-3)
        return found

    monkeypatch.setattr(FusedEncoder, "answer_or_reason", overtaken)
    before, calls = original(handle).get("engine", 0), handle.stats()["calls"]
    try:
        got = embed(config, model, GRIDS["image"])
        assert original(handle)["engine"] == before + 1 and torch.equal(got, own(GRIDS["image"]))
        assert handle.stats()["calls"] == calls + 1
    finally:
        bias.copy_(kept)


def test_a_model_that_is_loaded_in_inference_mode() -> None:
    """Its tensors have no versions; the fingerprints notice what is written to them."""
    with torch.inference_mode():
        config, model = load()
    tower, handle = model.visual, fusedvit.fuse(model)
    assert tower.input_norm.bias.is_inference()

    def answers() -> tuple[torch.Tensor, torch.Tensor]:
        got = embed(config, model, GRID)
        cls, kept = type(tower), vars(tower).pop(HANDLE)
        tower.__class__ = cls.__mro__[1]
        want = embed(config, model, GRID)
        tower.__class__, vars(tower)[HANDLE] = cls, kept
        return got, want

    assert close(*answers())
    with torch.inference_mode():
        tower.input_norm.bias.mul_(2)
    assert close(*answers())
    with torch.inference_mode():
        tower.blocks[0].norm1.weight.mul_(2)
    assert close(*answers())
    assert fused_calls(handle) and not original(handle)


# options


def _encoder(**limits: Any) -> dict[str, Any]:
    return {f"encoder_cudagraph_{name}": value for name, value in limits.items()}


USER = {"token_budgets": [256], "watch_data": False, "max_items": 3}
LIMITS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [  # the user's, vLLM's, what is taken
    (
        {},
        _encoder(token_budgets=[512, 128], max_vision_items_per_batch=4, max_frames_per_batch=32),
        {"token_budgets": (128, 512), "max_items": 4, "max_frames": 32},
    ),
    ({}, _encoder(max_vision_items_per_batch=8, max_frames_per_batch=1), {"max_items": 8, "max_frames": 8}),
    ({}, _encoder(max_vision_items_per_batch=1 << 16), {"max_items": "its budget", "max_frames": None}),
    ({"max_frames": 100}, _encoder(max_vision_items_per_batch=128), {"max_items": 100}),
    ({"max_items": 300}, _encoder(token_budgets=[64, 128]), {"token_budgets": (64, 128, 300)}),
    ({"memory": "small"}, _encoder(max_vision_items_per_batch=20000), {"max_items": None, "token_budgets": None}),
    ({}, _encoder(max_frames_per_batch=1 << 32), {"max_frames": 2**31 - 1}),
    ({}, _encoder(token_budgets=[64, 1 << 32]), {"token_budgets": (64, (2**31 - 1) // 4)}),
    ({"max_items": 9}, _encoder(max_frames_per_batch=3), {"max_frames": 9}),
    ({"token_budgets": [32]}, _encoder(max_vision_items_per_batch=64), {"max_items": 32}),
    (USER, {}, {}),
]


@pytest.mark.parametrize("ours, theirs, expected", LIMITS, ids=str)
def test_limits(ours: Any, theirs: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's, as far as they may be ours, where the user gives none."""
    monkeypatch.setenv(CONFIG, json.dumps(ours))
    compilation = {"cudagraph_mm_encoder": True, **theirs}
    found = fusedvit.fuse(load(config=config_of(QWEN, compilation_config=compilation))[1]).config
    for name, value in expected.items():
        assert getattr(found, name) == (found.token_budgets[-1] if value == "its budget" else value), name
    assert all(getattr(found, name) == (tuple(v) if isinstance(v, list) else v) for name, v in ours.items())


def test_limits_by_default(served: Any) -> None:
    config, _, handle = served
    assert tuple(handle.config.token_budgets) == (config.scheduler_config.max_num_encoder_input_tokens,)
    found = fusedvit.fuse(load(config=config_of(QWEN, max_num_batched_tokens=1 << 17))[1]).config
    assert (*found.token_budgets,) == (LARGEST_BUDGET,), "buffers take as much as by default, not the KV cache's room"


@pytest.mark.parametrize("text", ['{"max_items": 100000}', '{"token_budgets": [999999999]}'])
def test_options_that_the_tower_cannot_meet(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, text)
    with pytest.raises(ValueError, match=f"^fusedvit: {CONFIG}: .*at most"):
        load()


def test_variables_reach_actors_on_other_nodes() -> None:
    from vllm.ray import ray_env

    assert "FUSEDVIT_" in ray_env.DEFAULT_ENV_VAR_PREFIXES


@pytest.mark.parametrize("text", ["[1]", "{", '{"budgets": [1]}', '{"token_budgets": [4, 2]}', '{"strict": 1}'])
def test_wrong_options(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, text)
    with pytest.raises(ValueError, match=f"^fusedvit: {CONFIG}="):
        plugin.register()
