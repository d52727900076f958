"""How vLLM starts: with a memory profile or without, in an elastic group, quantised, without pictures."""

import contextlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.engine.core as core
import vllm.v1.worker.gpu_worker as gpu_worker
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLVisionModel
from vllm.distributed.elastic_ep import elastic_execute
from vllm.model_executor.layers.activation import GELU
from vllm.model_executor.model_loader.tensorizer import meta_tensor_mode
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models.transformers import multimodal
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

import fusedvit
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.serving import vllm_worker
from fusedvit.serving.served import SERVED, Served
from tests.serving.vllm import support
from tests.serving.vllm.support import GRIDS, close, config_of, embed, load, tower_of, under
from tests.serving.vllm.test_vllm_processes import oldest

QWEN, EMBEDDING = "Qwen3VLForConditionalGeneration", "EmbeddingGemma2Model"
GRID = GRIDS["image"]


class Runner(GPUModelRunner):  # type: ignore[misc]
    """vLLM's model runner with a model, and no device."""

    def __init__(self, config: Any, model: Any) -> None:
        self.model, self.vllm_config, self.cache_config = model, config, config.cache_config
        self.supports_mm_inputs, self.encoder_cache, self.max_num_tokens = False, None, 8
        self.is_last_pp_rank, self.pooling_runner = False, None

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        return torch.empty(0), torch.empty(0)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        pass


def worker_of(config: Any, model: Any) -> Any:
    worker: Any = Worker.__new__(Worker)
    worker.model_runner, worker.vllm_config, worker.cache_config = Runner(config, model), config, config.cache_config
    worker._maybe_get_memory_pool_context = lambda tag: contextlib.nullcontext()
    return worker


def start(config: Any, worker: Any, specs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that vLLM's own engine core takes of a start with these layers in a KV cache."""
    steps: list[str] = []

    def step(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (steps.append(name), run(*args))[1]

    executor = SimpleNamespace(
        get_kv_cache_specs=lambda: [specs],
        get_supported_kv_cache_layouts=list,
        set_kv_cache_layout=lambda name, *_: gpu_worker.record_kv_cache_layout(config.cache_config, name),
        determine_available_memory=step("profile", lambda: worker.model_runner.profile_run() or [1 << 28]),
        initialize_from_config=step("initialize", lambda found: worker.initialize_from_config(found[0])),
        compile_or_warm_up_model=step("warm up", lambda: None),
    )
    engine = SimpleNamespace(
        model_executor=executor,
        vllm_config=config,
        collective_rpc=lambda *args, **kwargs: None,
        available_gpu_memory_for_kv_cache=1 << 28,
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(core, "resolve_kv_cache_layout", lambda *_: SimpleNamespace(name="NHD"))
    with under(config):
        core.EngineCore._initialize_kv_caches(engine, config)
    return steps


def specs_of(config: Any) -> dict[str, Any]:
    layers = config.compilation_config.static_forward_context.items()
    sizes: dict[str, Any] = dict(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return {name: FullAttentionSpec(**sizes) for name, layer in layers if type(layer).__name__ == "Attention"}


STARTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "profiled": (QWEN, {}, ["profile", "initialize", "warm up"]),
    "encoder-only": (QWEN, {"mm_encoder_only": True}, ["initialize", "warm up"]),
    "without a KV cache": (EMBEDDING, {}, ["initialize", "warm up"]),
    "elastic": (QWEN, {}, ["initialize"]),
}


@pytest.mark.parametrize("how", STARTS)
def test_every_start_prepares_once(how: str, heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, options, expected = STARTS[how]
    monkeypatch.setattr(core.envs, "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", how == "elastic", raising=False)
    config = config_of(architecture, **options)
    config, model = load(architecture, config)
    handle, asked, prepare = fusedvit.fuse(model), list[str](), Served.prepare

    def counted(served: Served, *args: Any) -> None:
        asked.append("prepare")
        prepare(served, *args)

    monkeypatch.setattr(Served, "prepare", counted)
    profiled = expected[0] == "profile" or how == "elastic"
    steps = start(config, worker_of(config, model), specs_of(config) if profiled else {}, monkeypatch)
    assert steps == expected and heard("runs fused")
    assert asked == ["prepare"] and handle.stats()["refreshes"] == 1
    embed(config, model, GRID)
    assert handle.stats()["refreshes"] == 1 and handle.stats()["fused"] == 1, "the first request prepares nothing"


@pytest.mark.parametrize("first", ["initialize", "profile"])
def test_what_is_ready_when_a_step_comes_is_left(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU worker profiles after it has a KV cache."""
    config, model = load()
    worker, asked = worker_of(config, model), list[str]()
    served = vars(tower_of(model))[SERVED]
    monkeypatch.setattr(Served, "prepare", lambda *_: (asked.append(first), setattr(served, "ready", True)))
    steps = [
        lambda: vllm_worker._initialize(lambda _: None, worker),
        lambda: vllm_worker._profile(lambda _: None, worker.model_runner),
    ]
    for step in steps if first == "initialize" else steps[::-1]:
        step()
    assert asked == [first]
    served.give_back("slept", lost=True)
    steps[0]()
    assert asked == [first], "weights that are lost are not prepared"


@pytest.mark.parametrize("step", ["receive_weights", "prepare_new_worker", "a step to come", "commit_scale_up"])
def test_steps_of_an_elastic_group(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `watch_data` off: only the hook tells."""
    monkeypatch.setenv("FUSEDVIT_CONFIG", '{"watch_data": false}')
    config, model = load()
    handle, worker = fusedvit.fuse(model), worker_of(config, model)
    before, writes = embed(config, model, GRID), step != "commit_scale_up"

    def execute(name: str, *args: Any) -> None:
        assert name == step and args == (1,)
        for parameter in tower_of(model).parameters() if writes else ():
            parameter.data.mul_(0.9)

    worker.elastic_ep_executor = SimpleNamespace(execute=execute)
    worker.elastic_ep_execute(step, 1)
    got = embed(config, model, GRID)
    assert torch.equal(got, before) is not writes and handle.stats()["refreshes"] == 1 + writes
    handle.refresh()
    assert torch.equal(got, embed(config, model, GRID))


def test_steps_that_write_nothing_are_known() -> None:
    """Each is one of either release; those that bring weights are not among them."""
    old = (oldest() / "vllm/distributed/elastic_ep/elastic_execute.py").read_text(encoding="utf-8")
    names = {*vars(elastic_execute.ElasticEPScalingExecutor), *re.findall(r"    def (\w+)\(", old)}
    writing = {"load_model", "receive_weights", "prepare_new_worker"}
    assert names >= vllm_worker._WRITING_NOTHING | writing and not vllm_worker._WRITING_NOTHING & writing


# load formats that build the model without weights

FORMATS: dict[str, Callable[[], Any]] = {
    "tensorizer": meta_tensor_mode,
    "ipc_cache": lambda: torch.device("meta"),
}


def built_without_weights(config: Any, plain: Any, how: str) -> Any:
    """The model as such a format leaves it: with the tensors of `plain` in place of its own."""
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.cudagraph_mm_encoder = True
    with under(config):
        support.start()
    with set_default_torch_dtype(torch.float32), FORMATS[how]():
        model = initialize_model(vllm_config=config, model_config=config.model_config)
    modules = dict(model.named_modules())
    for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        found, own = tensor.detach().clone(), modules[owner]
        parameter = own._parameters.pop(leaf, None) is not None
        own._buffers.pop(leaf, None)
        if parameter:
            own.register_parameter(leaf, nn.Parameter(found, requires_grad=False))
        else:
            own.register_buffer(leaf, found, persistent=False)
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model.eval()


@pytest.mark.parametrize("architecture", [QWEN, "Gemma4ForConditionalGeneration"])
@pytest.mark.parametrize("how", FORMATS)
def test_a_load_format_that_builds_without_weights(how: str, architecture: str) -> None:
    config, plain = load(architecture, config_of(architecture))
    want = embed(config, plain, GRIDS["mixed"])
    model = built_without_weights(config, plain, how)
    assert config.compilation_config.cudagraph_mm_encoder, "not settled yet"
    worker = worker_of(config, model)
    vllm_worker._initialize(lambda _: None, worker)
    assert not config.compilation_config.cudagraph_mm_encoder
    handle = fusedvit.fuse(model)
    assert handle.stats()["refreshes"] == 1
    assert close(embed(config, model, GRIDS["mixed"]), want)
    assert handle.stats()["fused"] == handle.stats()["calls"] > 0 and handle.stats()["refreshes"] == 1


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("wrong", ["a hook", "what nobody foresaw"])
def test_what_cannot_run_fused_once_it_has_weights(
    wrong: str, how: str, heard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runner V2 asks for vLLM's own encoder graphs as soon as it has loaded the model."""
    config, plain = load(config=config_of(QWEN))
    model = built_without_weights(config, plain, how)
    if wrong == "a hook":
        model.visual.blocks[1].register_forward_hook(lambda *_: None)
    else:
        monkeypatch.setattr(FusedEncoder, "reason", unforeseen)
    assert hasattr(model_runner.init_model_state, "__wrapped__"), "by the plugin"
    vllm_worker._init_model_state(lambda *_: None, config, model)
    line = heard()
    assert ("blocks.1" if wrong == "a hook" else wrong) in line and config.compilation_config.cudagraph_mm_encoder
    assert not {"_fusedvit", SERVED} & vars(model.visual).keys()
    assert torch.isfinite(embed(config, model, GRID)).all()


def unforeseen(*_: Any, **__: Any) -> Any:
    raise KeyError("what nobody foresaw")


# what is left alone, and why


def test_layers_that_are_quantised_while_they_load(heard: Any) -> None:
    """Their weights are on no device yet when the tower is judged."""
    config = config_of(QWEN, quantization="fp8_per_tensor", dtype="bfloat16")
    with contextlib.suppress(Exception):  # vLLM has no FP8 kernels on this CPU; the tower was built before
        support.build(config)
    line = heard()
    assert re.search(r"its layers are quantised \(\w*Fp8\w*\)$", line), line


@pytest.mark.parametrize(
    "architecture, options",
    [
        (QWEN, {"limit_mm_per_prompt": {"image": 0, "video": 0}}),
        (QWEN, {"language_model_only": True, "compilation_config": {}}),  # vLLM refuses its graphs then
        ("Gemma4ForConditionalGeneration", {"limit_mm_per_prompt": {"image": 0, "video": 0}}),
    ],
)
def test_a_server_that_takes_no_pictures(architecture: str, options: dict[str, Any], heard: Any) -> None:
    support.build(config_of(architecture, **options))
    assert "no images and no videos are taken" in heard()
    assert ("Qwen3_VisionTransformer" if architecture == QWEN else "Gemma4VisionModel") in heard()


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_server_that_takes_one_kind_of_pictures(kind: str) -> None:
    config = config_of(QWEN, limit_mm_per_prompt={kind: 0})
    assert fusedvit.fuse(load(config=config)[1]).reason() is None


def test_hugging_faces_model_inside_vllms(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(self: Any, **_: Any) -> None:
        nn.Module.__init__(self)
        with torch.device("meta"):
            self.model = nn.ModuleDict({"visual": Qwen3VLVisionModel(Qwen3VLConfig().vision_config)})

    class Model(multimodal.MultiModalMixin):  # type: ignore[misc]
        pass

    monkeypatch.setattr(multimodal.Base, "__init__", build)
    Model(vllm_config=None)
    line = heard()
    assert "Qwen3VLVisionModel" in line and "transformers" in line


# activations


def test_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own class, which has no `approximate`."""
    name, text, vision, patch = support.MODELS[QWEN]
    monkeypatch.setitem(support.MODELS, QWEN, (name, text, vision | {"hidden_act": "gelu"}, patch))
    config, model = load(config=config_of(QWEN))
    assert type(model.visual.blocks[0].mlp.act_fn) is GELU
    handle = fusedvit.fuse(model)
    got = embed(config, model, GRIDS["mixed"])
    assert handle.stats()["fused"] == handle.stats()["calls"]
    fusedvit.unfuse(model)
    assert close(got, embed(config, model, GRIDS["mixed"]))
