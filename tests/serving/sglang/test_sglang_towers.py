"""Towers of SGLang's models, found by the plugin's entry point, against the same towers' own code."""

import contextlib
import logging
import sys
import types
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
import sglang.version
import torch
from sglang.srt.environ import envs
from sglang.srt.layers import layernorm_sp
from sglang.srt.layers.attention import vision
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA, ColumnParallelLinearWithLoRA
from sglang.srt.models import qwen2_5_vl, qwen3_vl
from sglang.srt.runtime_context import get_context

import fusedvit
from fusedvit.checks.as_built import Built
from fusedvit.fused_encoder import FusedEncoder
from fusedvit.serving import sglang as plugin
from fusedvit.serving.plugin import left_in
from tests.serving.sglang.support import GRIDS, MODELS, QWEN25, build, close, embed, loaded, own, pixels_of, tower_of

IMAGES = GRIDS["images"]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "sglang.fusedvit")
    return caplog


def handle_of(tower: Any) -> Any:
    return vars(tower)["_fusedvit"]


def test_the_plugin_is_found() -> None:
    (found,) = (point for point in entry_points(group="sglang.srt.plugins") if point.name == "fusedvit")
    assert found.value == "fusedvit.serving.sglang:register"


@pytest.mark.parametrize("architecture", MODELS)
def test_answers_are_sglangs(architecture: str, log: pytest.LogCaptureFixture) -> None:
    tower = tower_of(loaded(build(architecture)))
    assert "runs fused" in log.text
    for name, grid in GRIDS.items():
        want = own(tower, grid)
        assert close(embed(tower, grid), want), name
        if architecture != QWEN25:  # which takes no lists in SGLang
            assert close(embed(tower, grid, as_list=True), want), name
    stats = handle_of(tower).stats()
    left = 2 if architecture == QWEN25 else 0  # videos: its full attention spans a whole clip in SGLang
    calls = len(GRIDS) * (1 if architecture == QWEN25 else 2)
    assert (stats["calls"], stats["fused"], sum(stats["original"].values())) == (calls, calls - left, left)


@pytest.mark.parametrize("architecture", ("Qwen3VLForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"))
@pytest.mark.parametrize("blocks", ([2, 0], [1, 1]), ids=str)
def test_deepstack_blocks_that_do_not_ascend_are_left_alone(
    blocks: list[int], architecture: str, log: pytest.LogCaptureFixture
) -> None:
    """SGLang gives the first merger to the first such block that runs, others the one at the block's own index."""
    tower = tower_of(loaded(build(architecture, deepstack_visual_indexes=blocks)))
    assert "_fusedvit" not in vars(tower) and f"got {blocks}" in log.text
    assert "runs SGLang's own code: deepstack" in log.text


def test_widths_that_sglang_rounds_up() -> None:
    tower = tower_of(loaded(build(QWEN25, intermediate_size=341)))
    assert tower.blocks[0].mlp.gate_up_proj.weight.shape[0] == 2 * 344
    assert close(embed(tower, IMAGES), own(tower, IMAGES)) and handle_of(tower).stats()["fused"] == 1


def test_unfused_is_as_before() -> None:
    model = build()
    tower, before = tower_of(model), type(tower_of(model))
    loaded(model)
    answer = embed(tower, IMAGES)
    fusedvit.unfuse(model)
    assert type(tower) is before and close(answer, embed(tower, IMAGES))


def outcome(call: Callable[[], torch.Tensor]) -> Any:
    with torch.inference_mode():
        try:
            return call()
        except Exception as error:  # whatever it is: both must raise it
            return type(error), str(error)


JUDGED: dict[str, Callable[[], Any]] = {
    "an image without rows": lambda: torch.tensor([*IMAGES, (1, 0, 4)]),
    "floats": lambda: torch.tensor(IMAGES, dtype=torch.float32),
    "too many": lambda: torch.tensor([*IMAGES, (1, 4, 4)]),
    "one row": lambda: torch.tensor(IMAGES[0]),
    "two columns": lambda: torch.tensor([[8, 8]]),
    "three dimensions": lambda: torch.tensor(IMAGES)[None],
    "strings": lambda: [["1", "8", "8"]],
    "nothing": lambda: None,
    "no patches, no images": lambda: torch.zeros(0, 3, dtype=torch.int64),
    "no patches, an image": lambda: torch.tensor([(0, 4, 4)]),
    "no patches, its grid": lambda: torch.tensor(IMAGES),
}


@pytest.mark.parametrize("architecture", [QWEN25, "Qwen3VLForConditionalGeneration"])
@pytest.mark.parametrize("name", JUDGED)
def test_grids_that_are_sglangs_to_judge(name: str, architecture: str) -> None:
    """What the fused encoder refuses SGLang answers, or refuses in its own way."""
    tower, grid = tower_of(loaded(build(architecture))), JUDGED[name]()
    pixels, forward = pixels_of(tower, IMAGES), type(tower).__mro__[1].forward
    pixels = pixels[:0] if name.startswith("no patches") else pixels
    got = outcome(lambda: tower(pixels, grid_thw=grid))
    want = outcome(lambda: forward(tower, pixels, grid))
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    stats = handle_of(tower).stats()
    assert stats["original"] == {"engine": 1} and stats["calls"] == 1


@pytest.mark.parametrize("kind", ["array", "list of tensors"])
def test_grids_that_are_no_tensor(kind: str) -> None:
    tower = tower_of(loaded(build()))
    grid: Any = np.array(IMAGES) if kind == "array" else [torch.tensor(row) for row in IMAGES]
    with torch.inference_mode():
        assert close(tower(pixels_of(tower, IMAGES), grid_thw=grid), own(tower, IMAGES))
    assert handle_of(tower).stats()["fused"] == 1


def _hook(tower: Any) -> None:
    tower.blocks[1].register_forward_hook(lambda *args: None)


def _lora(tower: Any) -> None:
    mlp = tower.blocks[0].mlp
    layer = ColumnParallelLinearWithLoRA.__new__(ColumnParallelLinearWithLoRA)  # its constructor pins memory of a GPU
    BaseLayerWithLoRA.__init__(layer, mlp.linear_fc1, None)
    mlp.linear_fc1 = layer


NUMBERS = {"attn.softmax_scale": 0.5, "attn.qkv_backend.scale": 0.5, "mlp.linear_fc1.skip_bias_add": True}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_a_tower_was_built_with(
    name: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """They are judged by the tower's config: SGLang has no second tower to compare with."""
    built = Built.of

    def of(tower: Any, engine: Any) -> Built:
        module, _, attribute = name.rpartition(".")
        setattr(tower.blocks[1].get_submodule(module), attribute, NUMBERS[name])
        return built(tower, engine)

    monkeypatch.setattr(Built, "of", of)
    loaded(build())
    assert f"blocks.1.{name} is {NUMBERS[name]}, expected " in log.text


def test_a_constructor_that_is_replaced(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    theirs = vision.VisionAttention.__init__
    monkeypatch.setattr(vision.VisionAttention, "__init__", lambda self, *a, **k: theirs(self, *a, **k))
    loaded(build())
    assert "runs SGLang's own code" in log.text and "vision.VisionAttention.__init__ is " in log.text


PATCHES: dict[str, Callable[[Any], object]] = {
    "hook": _hook,
    "lora": _lora,
    "quantised": lambda v: setattr(
        v.blocks[0].mlp.linear_fc1, "quant_method", Fp8LinearMethod.__new__(Fp8LinearMethod)
    ),
    "kernel": lambda v: setattr(v.patch_embed.proj, "_forward_method", v.patch_embed.proj._forward_conv),
    "number": lambda v: setattr(v.blocks[0].norm1, "eps", 1e-3),
    "method": lambda v: setattr(v.blocks[0].mlp, "forward", v.blocks[1].mlp.forward),
    "class": lambda v: setattr(v.blocks[0].mlp, "act", torch.nn.SiLU()),
    "parameter": lambda v: setattr(
        v.merger.linear_fc2, "weight", torch.nn.Parameter(v.merger.linear_fc2.weight[:32], requires_grad=False)
    ),
}
LATE: dict[str, Callable[[Any], object]] = PATCHES | {"dtype": lambda v: v.merger.norm.bfloat16()}


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("late", (False, True), ids=("before", "after"))
def test_a_changed_tower_runs_its_own_code(patch: str, late: bool, log: pytest.LogCaptureFixture) -> None:
    model = build()
    tower = tower_of(model)
    if late:
        loaded(model)
        embed(tower, IMAGES)
        PATCHES[patch](tower)
        with torch.inference_mode(), contextlib.suppress(Exception):  # SGLang's own error, where it has one
            tower(pixels_of(tower, IMAGES), grid_thw=torch.tensor(IMAGES))
        stats = handle_of(tower).stats()
        assert stats["fused"] == 1 and sum(stats["original"].values()) == 1
    else:
        before = type(tower)
        PATCHES[patch](tower)
        loaded(model)
        assert type(tower) is before and log.text.count("runs SGLang's own code") == 1


@pytest.mark.parametrize("strict", (True, False))
@pytest.mark.parametrize("patch", LATE)
def test_what_is_left_alone_is_refused_or_reported(
    patch: str, strict: bool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEDVIT_CONFIG", f'{{"strict": {str(strict).lower()}}}')
    model = build()
    LATE[patch](tower_of(model))
    with pytest.raises(RuntimeError, match="^fusedvit: .*cannot run fused: ") if strict else contextlib.nullcontext():
        loaded(model)
    runner = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
    plugin.report(types.SimpleNamespace(tp_worker=runner))
    assert log.text.count("visual: {'state': \"SGLang's own code: ") == 1


def test_strict_where_a_constructor_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(qwen3_vl.Qwen3VLMoeVisionModel):  # type: ignore[misc]
        pass

    monkeypatch.setenv("FUSEDVIT_CONFIG", '{"strict": true}')
    with monkeypatch.context() as given, pytest.raises(RuntimeError, match="cannot run fused: it is a subclass"):
        given.setattr(qwen3_vl, "Qwen3VLMoeVisionModel", Other)
        build()
    monkeypatch.setattr(sglang.version, "__version__", "0.6.0")
    with pytest.raises(RuntimeError, match="cannot run fused: SGLang 0.6.0 is not known"):
        build()


def test_calls_that_fall_back_are_in_sglangs_log(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("sglang"), "handlers", [handler])
    tower = tower_of(loaded(build()))
    said.clear()
    _hook(tower)
    embed(tower, IMAGES)
    assert len(said) == 1 and "hooks: on blocks.1" in said[0]


def _longer(theirs: Any) -> Any:
    return lambda self, length: [part * 1.5 for part in theirs(self, length)]


REPLACED: dict[str, tuple[Any, str, Callable[[Any], Any], bool]] = {  # and whether the answer is another one
    "a function": (vision, "apply_rotary_pos_emb", lambda _: lambda q, k, cos, sin: (q, k), True),
    "a method that the tower's code calls": (RotaryEmbedding, "get_cos_sin", _longer, True),
    # `layernorm_sp.column_parallel_g_matmul(...)`, in SGLang's linear layers
    "what code finds in a module": (layernorm_sp, "column_parallel_g_matmul", lambda _: lambda *_: None, False),
}


@pytest.mark.parametrize("what", REPLACED)
def test_replaced_code_is_called(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, (owner, name, replacement, differs) = tower_of(loaded(build())), REPLACED[what]
    before = embed(tower, IMAGES)
    monkeypatch.setattr(owner, name, replacement(getattr(owner, name)))
    got = embed(tower, IMAGES)
    assert close(got, own(tower, IMAGES)) and close(got, before) is not differs
    assert handle_of(tower).stats()["fused"] == 1 and name in str(handle_of(tower).reason())


@pytest.mark.parametrize("name", ("bf16_gemm_dispatch", "fused_inplace_qknorm"))
def test_an_operator_stands_for_its_function_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.21 and 0.5.22 keep operators where 0.5.23 keeps the functions that it makes them of."""
    tower = tower_of(loaded(build()))
    monkeypatch.setattr(unquant, "bf16_gemm_dispatch", getattr(torch.ops.sglang, name))
    found = str(handle_of(tower).reason())
    assert ("unquant.bf16_gemm_dispatch is an object" in found) == (name != "bf16_gemm_dispatch"), found


COMPILED: dict[str, tuple[Callable[[Any], Any], bool]] = {  # whether it computes what the function does
    "by torch": (torch.compile, True),
    "by a backend": (lambda function: torch.compile(function, backend=lambda graph, _: graph), False),
    "with a pass": (
        lambda function: torch.compile(function, options={"post_grad_custom_post_pass": lambda graph: None}),
        False,
    ),
    "never": (torch.compiler.disable, True),
    "as one node": (torch._dynamo.nonstrict_trace, False),
}


@pytest.mark.parametrize("how", COMPILED)
def test_a_function_that_is_compiled(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, (decorate, same) = tower_of(loaded(build())), COMPILED[how]
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with torch._dynamo.config.patch(disable=False):
        monkeypatch.setattr(vision, "apply_rotary_pos_emb", decorate(vision.apply_rotary_pos_emb))
    found = str(handle_of(tower).reason())
    assert found == "None" if same else "apply_rotary_pos_emb is wrapped by torch._dynamo." in found


@pytest.mark.parametrize("release", ("0.5.20", "0.6.0", "1.0rc1"))
def test_an_unknown_release_is_left_alone(
    release: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang.version, "__version__", release)
    model = build()
    before = type(tower_of(model))
    loaded(model)
    assert type(tower_of(model)) is before and log.text.count(f"SGLang {release} is not known") == 1


def test_another_signature_is_left_alone(log: pytest.LogCaptureFixture) -> None:
    class Other(torch.nn.Module):
        def __init__(self, vision_config: Any) -> None:
            super().__init__()

        def forward(self, x: Any, grid_thw: Any, mask: Any) -> None:
            pass

    module = types.ModuleType("sglang.srt.models.qwen3_vl")
    module.Qwen3VLMoeVisionModel = Other  # type: ignore[attr-defined]
    plugin._patch_towers(module)
    assert type(Other(None)) is Other and "its forward takes ['self', 'x', 'grid_thw', 'mask']" in log.text


@pytest.mark.parametrize("option", ({"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}), ids=str)
def test_deterministic_inference_is_left_alone(option: dict[str, Any], log: pytest.LogCaptureFixture) -> None:
    model = build()
    with get_context().override_server_args(device="cpu", **option):
        loaded(model)
    assert "deterministic inference is on" in log.text and "_fusedvit" not in vars(tower_of(model))


@pytest.mark.parametrize(
    "text", ('{"token_budget": [64]}', '{"max_items": 100000}', "{", pytest.param("[" * 100_000, id="deep"))
)
def test_wrong_options_end_the_start(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs what a plugin raises, and goes on until it builds a tower."""
    changed: list[str] = []
    with contextlib.suppress(ValueError), monkeypatch.context() as given:
        given.setenv("FUSEDVIT_CONFIG", text)
        given.setattr(plugin, "_IMPORTED", {"sglang": lambda module: changed.append(module.__name__)})
        given.setattr(sys, "meta_path", [*sys.meta_path])
        plugin.register()
    assert changed == ["sglang"]
    monkeypatch.setenv("FUSEDVIT_CONFIG", text)
    with pytest.raises(ValueError, match="^fusedvit: FUSEDVIT_CONFIG"):
        build()


def _unforeseen(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("what nobody foresaw")


UNFORESEEN: dict[str, tuple[Any, str]] = {
    "as it is fused": (FusedEncoder, "reason"),
    "as it is noted": (Built, "of"),
    "as the engine is asked": (plugin, "_ranks"),
}


@pytest.mark.parametrize("where", UNFORESEEN)
def test_sglang_starts_whatever_happens(
    where: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(*UNFORESEEN[where], _unforeseen)
    model = build()
    tower, want = tower_of(model), embed(tower_of(model), IMAGES)
    loaded(model)
    assert torch.equal(embed(tower, IMAGES), want) and not {"_fusedvit", "_fusedvit_served"} & vars(tower).keys()
    assert "runs SGLang's own code: KeyError: 'what nobody foresaw'" in log.text


def test_a_loader_with_other_names_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def patch(module: types.ModuleType) -> str:
        return str(module.NoSuchClass)

    monkeypatch.setitem(plugin._LOADERS, "sglang.srt.model_executor.model_runner", patch)
    assert "_fusedvit" not in vars(tower_of(loaded(build()))) and "has no attribute 'NoSuchClass'" in log.text


def test_a_stage_that_encodes_nothing(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    """SGLang builds the tower on every pipeline stage, and runs it on the first."""
    model = build()
    stage = types.SimpleNamespace(pp_group=types.SimpleNamespace(is_first_rank=False), tp_rank=0, tp_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: stage)
    monkeypatch.setenv("FUSEDVIT_CONFIG", '{"strict": true}')
    loaded(model)
    assert "_fusedvit" not in vars(tower_of(model)) and "this pipeline stage encodes nothing" in log.text


SERVERS: list[tuple[dict[str, Any], bool]] = [
    ({"disaggregation_mode": "decode"}, False),
    ({"disaggregation_mode": "decode", "enable_pd_role_switch": True}, True),
    ({"disaggregation_mode": "prefill"}, True),
    ({"language_only": True}, False),
    ({"language_only": True, "enable_adaptive_dispatch_to_encoder": True}, True),
]


@pytest.mark.parametrize(("options", "encodes"), SERVERS, ids=str)
def test_servers_that_others_encode_for(
    options: dict[str, Any], encodes: bool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """SGLang builds the tower there, too. Prepared, it would take the KV pool's memory for calls that never come."""
    monkeypatch.setenv("FUSEDVIT_CONFIG", '{"strict": true}')
    with get_context().override_server_args(device="cpu", **options):
        tower = tower_of(loaded(build()))
    assert ("_fusedvit" in vars(tower)) is encodes and ("this server encodes nothing" in log.text) is not encodes


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDVIT_CONFIG", '{"token_budget": 64}')
    with pytest.raises(ValueError, match="unknown option 'token_budget'"):
        plugin.register()
    monkeypatch.setenv("FUSEDVIT_DISABLE", "1")
    plugin.register()
    assert "FUSEDVIT_DISABLE is set" in left_in(loaded(build()), "SGLang")["visual"]["state"], (
        "in a process that lives on"
    )


def test_graphs_of_sglangs_own_are_off_where_we_run() -> None:
    with envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.override(True):
        tower = tower_of(loaded(build()))
        assert not envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get()
        assert handle_of(tower).stats()["state"] == "fused"
    with envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.override(True):
        model = build()
        _hook(tower_of(model))
        loaded(model)
        assert envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get()


def test_window_towers_get_their_graphs_back_where_they_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = object()
    monkeypatch.setattr(qwen2_5_vl, "_is_cuda", True)
    monkeypatch.setattr(qwen2_5_vl, "ViTCudaGraphRunner", lambda tower: runner)
    for changed in (False, True):
        with envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.override(True):
            model = build(QWEN25)
        tower = tower_of(model)
        if changed:
            _hook(tower)
        loaded(model)
        assert (tower.enable_cg, tower.cuda_graph_runner) == ((True, runner) if changed else (False, None))
