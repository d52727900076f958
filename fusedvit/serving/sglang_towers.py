"""SGLang's vision towers as dialects of our families: the same weights under SGLang's modules and parameter names."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fusedvit.families.base import Family
from fusedvit.families.engine import PLAIN_LAYERS, Engine, rotary_table
from fusedvit.families.registry import dialect
from fusedvit.model.param_names import WeightNames
from fusedvit.model.spec import VisionSpec, rope_frequencies

_MODELS = "sglang.srt.models."
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant."
_ROWS = 8  # SGLang rounds the width of Qwen2.5-VL's MLP up to a multiple of this

SGLANG = Engine(
    name="SGLang",
    towers=(_MODELS,),
    packages=("sglang.", "transformers."),
    libraries=(
        "einops.",
        "flashinfer.",
        "sgl_kernel.",
        "sglang.kernels.",
        "sglang.srt.distributed.",
        "sglang.srt.environ",
        "sglang.srt.runtime_context",
        "sglang.srt.utils",
    ),
    renamed={"apply_rotary_pos_emb": "apply_rotary_pos_emb_native"},
    decorators=(
        "sglang.kernels.kernel_api_logging",
        "sglang.srt.utils.custom_op",
        "contextlib",
        "torch._dynamo.",
        "torch.utils._contextlib",
    ),
    activations={
        "gelu_tanh": (("GELUTanh",), None),
        "gelu": (("GELUActivation",), None),
        "quick_gelu": (("QuickGELUActivation",), None),
        "swiglu": (("SiluAndMul",), None),
    },
    values={
        **{"is_neox_style": True, "softmax_scale": None, "sinks": None, "dropout": 0.0, "disable_merger_proj": False},
        **{"qk_normalization": False, "qk_normalization_by_head_size": False},
        **{"customized_position_embedding_applier": None, **PLAIN_LAYERS},
    },
    objects={
        "quant_method": frozenset(
            _UNQUANTIZED + kind for kind in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
        )
    },
    buffers={"cos_sin_cache": rotary_table, "inv_freq": rope_frequencies},
    tolerance=1e-2,  # the table may be in the tower's dtype; a last bit is 1e-3 of an angle at position 8191
    position_rows=64,
)


def _renamed(names: WeightNames) -> WeightNames:
    """SGLang names the attention's merged layer `qkv_proj` and an MLP's activation `act`; it merges gate and up."""
    if len(names.fc1) == 2:
        names = replace(names, fc1=("blocks.{}.mlp.gate_up_proj",))
    return replace(names, qkv=("blocks.{}.attn.qkv_proj",), act="blocks.{}.mlp.act")


def _rounded(spec_from_config: Callable[[Any], VisionSpec]) -> Callable[[Any], VisionSpec]:
    def rounded(config: Any) -> VisionSpec:
        spec = spec_from_config(config)
        return replace(spec, intermediate_size=-(-spec.intermediate_size // _ROWS) * _ROWS)

    return rounded


def _in_order(family: Family) -> Family:
    """SGLang takes deepstack mergers in the order of blocks, others by the block's index in the list: these agree only
    where the list ascends."""

    def spec_from_config(config: Any) -> VisionSpec:
        spec = family.spec_from_config(config)
        if list(spec.deepstack) != sorted(spec.deepstack):
            expected = "ascending blocks, as SGLang takes its mergers in the order of blocks,"
            raise ValueError(f"fusedvit: deepstack_visual_indexes: {expected} expected, got {list(spec.deepstack)}")
        return spec

    return replace(family, spec_from_config=spec_from_config)


_dialect = partial(dialect, engine=SGLANG, renamed=_renamed)
_QWEN2_5 = _dialect("Qwen2_5_VisionTransformerPretrainedModel")

# (module, tower class) -> the dialect. Qwen3-VL's tower serves its MoE, Qwen3.5 and Qwen4-Exp too.
TOWERS: dict[tuple[str, str], Family] = {
    (_MODELS + "qwen3_vl", "Qwen3VLMoeVisionModel"): _in_order(_dialect("Qwen3VLVisionModel")),
    (_MODELS + "qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder"): _in_order(_dialect("Qwen3OmniMoeVisionEncoder")),
    (_MODELS + "qwen2_5_vl", "Qwen2_5_VisionTransformer"): replace(
        _QWEN2_5, spec_from_config=_rounded(_QWEN2_5.spec_from_config)
    ),
}
