"""Towers are judged once they have weights; what is left to vLLM's own code keeps its graphs and says why."""

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from torch import nn
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import qwen3_vl
from vllm.v1.spec_decode.draft_model import DraftModelProposer

import fusedvit
from fusedvit.bench.towers import random_weights_
from fusedvit.checks.as_built import Built
from fusedvit.checks.change_detection import HANDLE
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.serving import vllm as plugin
from fusedvit.serving import vllm_worker
from fusedvit.serving.plugin import CONFIG, DISABLE
from fusedvit.serving.served import SERVED
from tests.serving.vllm.support import GRIDS, build, config_of, embed, folder_of, left_alone, load, tower_of, under
from tests.serving.vllm.test_vllm_processes import run

QWEN, GEMMA = "Qwen3VLForConditionalGeneration", "Gemma4ForConditionalGeneration"
GRID = GRIDS["images"]
LORA = {"enable_lora": True, "max_lora_rank": 8, "enable_tower_connector_lora": True}
NO_PICTURES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
STEPS: dict[str, Callable[[Any, Any], Any]] = {  # of a start, each before vLLM may build its own graphs
    "V2 loads": lambda config, model: vllm_worker._init_model_state(lambda *_: None, config, model),
    "profile": lambda _, model: vllm_worker._profile(lambda _: None, SimpleNamespace(model=model)),
    "initialize": lambda _, model: vllm_worker._initialize(lambda _: None, worker_of(model)),
}


def worker_of(model: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(model=model))


def stats(model: Any) -> Any:
    return vllm_worker.stats(worker_of(model))


@pytest.fixture
def used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` finds there, as a tower is built: as fp16, 0 to 1.8e-5, whose prepared weights overflow."""
    create = UnquantizedLinearMethod.create_weights

    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        create(self, layer, *args, **kwargs)
        layer.weight.data.view(torch.int16 if layer.weight.dtype == torch.float16 else torch.int32).random_(0, 300)

    monkeypatch.setattr(UnquantizedLinearMethod, "create_weights", create_weights)


@pytest.mark.parametrize("architecture", [QWEN, "Qwen2_5_VLForConditionalGeneration", "Glm4vForConditionalGeneration"])
def test_what_fp16_cannot_hold_is_judged_of_loaded_weights(architecture: str, used_memory: None) -> None:
    config, model = load(architecture, config_of(architecture, dtype="float16"))
    assert not config.compilation_config.cudagraph_mm_encoder
    embed(config, model, GRID)
    assert stats(model)["visual"]["fused"] == 1


@pytest.mark.parametrize("step", STEPS)
def test_its_graphs_stay_where_loaded_weights_cannot_run_fused(step: str) -> None:
    config = config_of(QWEN, dtype="float16")
    model = build(config)
    tower = tower_of(model)
    random_weights_(tower)
    tower.blocks[1].norm1.weight.data[5] = 3e3
    tower.blocks[1].attn.qkv.weight.data[:, 5] = 30.0
    STEPS[step](config, model)
    assert config.compilation_config.cudagraph_mm_encoder and SERVED not in vars(tower)
    assert stats(model)["visual"].keys() == {"state"}
    assert stats(model)["visual"]["state"].startswith("vLLM's own code: beyond fp16")
    assert embed(config, model, GRID).shape, "by vLLM's own code"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("architecture", [QWEN, GEMMA])
def test_its_graphs_are_off_before_vllm_may_build_them(architecture: str, step: str) -> None:
    config = config_of(architecture)
    model = build(config).eval()
    random_weights_(tower_of(model))
    build(config)  # of a model that no runner serves
    assert config.compilation_config.cudagraph_mm_encoder, "nothing is decided without weights"
    STEPS[step](config, model)
    assert not config.compilation_config.cudagraph_mm_encoder


def test_a_draft_models_tower_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, '{"strict": true}')
    draft = {"model": str(folder_of(QWEN)), "method": "draft_model", "num_speculative_tokens": 2}
    config = config_of(QWEN, speculative_config=draft)
    target = build(config)
    proposer: Any = DraftModelProposer.__new__(DraftModelProposer)
    proposer.vllm_config, proposer.speculative_config = config, config.speculative_config
    given = proposer._create_draft_vllm_config()
    assert given.compilation_config is config.compilation_config
    with under(given):
        model = get_model(vllm_config=given, prefix="draft_model")
    assert SERVED in vars(target.visual) and SERVED not in vars(model.visual)
    assert config.compilation_config.cudagraph_mm_encoder and "a draft model's" in stats(model)["visual"]["state"]


def test_a_draft_that_is_the_target() -> None:
    """As n-grams are drafted."""
    both = SimpleNamespace()
    spec = SimpleNamespace(draft_model_config=both, target_model_config=both)
    assert not plugin._of_draft(SimpleNamespace(model_config=both, speculative_config=spec))
    assert not plugin._of_draft(SimpleNamespace(model_config=both, speculative_config=None))


# strict


def subclass(patch: pytest.MonkeyPatch) -> None:
    class Mine(qwen3_vl.Qwen3_VisionTransformer):  # type: ignore[misc]
        pass

    patch.setattr(qwen3_vl, "Qwen3_VisionTransformer", Mine)


def late(patch: pytest.MonkeyPatch) -> None:
    """A weight that arrives in another dtype."""
    judge = vllm_worker._judge_loaded

    def of_two_dtypes(model: Any) -> None:
        norm = model.visual.merger.norm.bfloat16()
        judge(model)
        norm.float()

    patch.setattr(vllm_worker, "_judge_loaded", of_two_dtypes)


def constructor(patch: pytest.MonkeyPatch) -> None:
    """One that leaves other numbers, which vLLM's tower itself has only from there."""
    theirs = MMEncoderAttention.__init__

    def other(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        self.scale *= 2

    patch.setattr(MMEncoderAttention, "__init__", other)


def invariant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)


def unforeseen(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise KeyError("what nobody foresaw")

    patch.setattr(FusedEncoder, "reason", fail)


def other_names(patch: pytest.MonkeyPatch) -> None:
    """Of what the plugin asks for in a known release, an unknown one may have nothing."""
    patch.setattr(vllm, "__version__", "0.40.0")
    patch.delattr(plugin, "_config")


def release(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(vllm, "__version__", name)


# architecture, options, what is changed, what the line names
REFUSED: dict[str, tuple[str, dict[str, Any], Callable[[pytest.MonkeyPatch], None] | None, str]] = {
    "LoRA": (QWEN, LORA, None, "LoRA"),
    "LoRA of Gemma": (GEMMA, LORA, None, "LoRA"),
    "offloaded": (QWEN, {"cpu_offload_gb": 1}, None, "offloaded"),
    "offloaded in part": (QWEN, {"cpu_offload_gb": 1, "cpu_offload_params": {"attn"}}, None, "offloaded"),
    "a subclass": (QWEN, {}, subclass, "it is a subclass of Qwen3_VisionTransformer"),
    "an older release": (QWEN, {}, release("0.25.1"), "0.25.1"),
    "a newer release": (QWEN, {}, release("0.34.0"), "0.34.0"),
    "one of another kind": (QWEN, {}, release("1.0.0rc1"), "1.0.0rc1"),
    "one that is none": (QWEN, {}, release("dev"), "dev"),
    "one with other names": (QWEN, {}, other_names, "0.40.0"),
    "a newer release with Gemma": (GEMMA, {}, release("0.34.0"), "0.34.0"),
    "a constructor": (QWEN, {}, constructor, "MMEncoderAttention.__init__"),
    "batch invariant": (QWEN, {}, invariant, "VLLM_BATCH_INVARIANT"),
    "what nobody foresaw": (QWEN, {}, unforeseen, "KeyError: 'what nobody foresaw'"),
    "found once it has weights": (QWEN, {}, late, "several dtypes"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_left_alone(name: str, strict: bool, heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, options, change, part = REFUSED[name]
    monkeypatch.setenv(CONFIG, json.dumps({"strict": strict}))
    config = config_of(architecture, **options)
    if change:
        change(monkeypatch)
    if strict:
        with pytest.raises(RuntimeError, match=f"^fusedvit: .* cannot run fused: .*{part}"):
            load(config=config)
    else:
        model, line = left_alone(heard, config)
        (found,) = stats(model).values()
        assert found.keys() == {"state"} and found["state"].startswith("vLLM's own code: ") and part in found["state"]
        assert part in line and (GEMMA if architecture == GEMMA else type(tower_of(model)).__name__) in line


def test_names_that_a_release_has_not() -> None:
    for name in (vllm_worker.WORKER, *vllm_worker.RUNNERS):
        plugin._PATCHES[name](ModuleType(name))


@pytest.mark.parametrize("architecture", [QWEN, GEMMA])
@pytest.mark.parametrize(
    "options",
    [
        {"cpu_offload_gb": 1, "cpu_offload_params": {"experts"}},
        {"enable_lora": True, "max_lora_rank": 8},  # of the language model alone
        {"runner": "pooling", "convert": "embed"},  # by subclasses that leave the tower alone
        {"runner": "pooling", "convert": "classify"},
    ],
    ids=str,
)
def test_options_that_leave_the_tower_as_it_is(architecture: str, options: dict[str, Any]) -> None:
    assert fusedvit.fuse(load(config=config_of(architecture, **options))[1]).reason() is None


NUMBERS: dict[str, tuple[str, str, Any]] = {  # architecture, path of a module and its attribute, value
    "scale": (QWEN, "blocks.1.attn.attn.scale", 0.5),
    "size of a head": (QWEN, "blocks.1.attn.hidden_size_per_attention_head", 36),
    "bias that is skipped": (QWEN, "blocks.1.mlp.linear_fc1.skip_bias_add", True),
    "part of a norm": ("Qwen2_5_VLForConditionalGeneration", "blocks.1.norm1.variance_size_override", 80),
    "weight of a norm": ("Qwen2_5_VLForConditionalGeneration", "blocks.1.norm1.pass_weight", False),
    "Gemma's scale": (GEMMA, "encoder.layers.1.self_attn.scaling", 0.5),
    "Gemma's pooling": (GEMMA, "pooler.root_hidden_size", 10.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_a_tower_was_built_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are judged by the tower's config: vLLM has no second tower to compare with."""
    architecture, path, value = NUMBERS[name]

    def of(tower: Any, engine: Any) -> Built:
        module, _, attribute = path.rpartition(".")
        setattr(tower.get_submodule(module), attribute, value)
        return built(tower, engine)

    built = Built.of
    monkeypatch.setattr(Built, "of", of)
    (found,) = stats(load(architecture)[1]).values()
    assert f"{path} is {value}, expected " in found["state"]


@pytest.mark.parametrize("architecture", [QWEN, GEMMA])
def test_a_strict_server_that_encodes_nothing_starts(
    architecture: str, heard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG, '{"strict": true}')
    assert "no images and no videos" in str(stats(build(config_of(architecture, **NO_PICTURES, **LORA))))
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: SimpleNamespace(is_first_rank=False))
    model, _ = left_alone(heard, config_of(architecture), "this pipeline stage")
    assert "this pipeline stage" in str(stats(model))


def test_another_class(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tower(nn.Module):
        def __init__(self, vision_config: Any) -> None:
            super().__init__()

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels

    module = SimpleNamespace(__name__=qwen3_vl.__name__, Qwen3_VisionTransformer=Tower)
    monkeypatch.setitem(sys.modules, qwen3_vl.__name__, module)
    plugin.register()
    assert "pixels" in heard("runs vLLM's own code")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cannot run fused: its forward takes"):
        patch.setenv(CONFIG, '{"strict": true}')
        Tower(None)
    tower = Tower(None)
    assert type(tower) is Tower and HANDLE not in vars(tower)
    assert "its forward takes" in stats(tower)[""]["state"]


def test_a_process_that_was_switched_off_between_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a variable that its children inherit with the changed classes, where vLLM forks them."""
    monkeypatch.setenv(CONFIG, '{"strict": true}')
    load()
    monkeypatch.setenv(DISABLE, "1")
    config, model = load(config=config_of(QWEN))
    assert stats(model)["visual"]["state"] == "vLLM's own code: FUSEDVIT_DISABLE is set"
    assert config.compilation_config.cudagraph_mm_encoder


# where it says so


def test_calls_that_fall_back_are_in_vllms_log(heard: Any) -> None:
    config, model = load()
    model.visual.blocks[1].register_forward_hook(lambda *_: None)
    embed(config, model, GRID)
    assert "hooks: on blocks.1" in heard()


LOGGERS = """
import logging, sys
if sys.argv[1:]:
    logging.getLogger("fusedvit").addHandler(logging.NullHandler())
from vllm.plugins import load_general_plugins
load_general_plugins()
import fusedvit.serving.vllm
fusedvit.serving.vllm.register()
print(logging.getLogger("fusedvit").parent.name)
"""


def test_where_it_logs() -> None:
    """An application that has handlers of its own for fusedvit keeps them alone."""
    assert run("-c", LOGGERS).split()[-1] == "vllm"
    assert run("-c", LOGGERS, "application").split()[-1] == "root"
    assert run("-c", LOGGERS, FUSEDVIT_DISABLE="1").split()[-1] == "root"
