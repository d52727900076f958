"""vLLM's vision towers as dialects of our families: the same weights under vLLM's modules and parameter names."""

from dataclasses import replace
from functools import partial

from fusedvit.families.base import Family
from fusedvit.families.engine import HUGGING_FACE, PLAIN_LAYERS, Engine, rotary_table
from fusedvit.families.registry import dialect, family_of
from fusedvit.model.param_names import DownsampleNames, WeightNames

_MODELS = "vllm.model_executor.models."

VLLM = Engine(
    name="vLLM",
    towers=(_MODELS,),
    packages=("vllm.", "transformers."),
    libraries=("einops.",),
    decorators=("vllm.compilation.decorators", "contextlib", "torch.utils._contextlib"),
    activations={
        "gelu_tanh": (("GELU",), "tanh"),
        "gelu": (("GELU",), None),  # vLLM's own class
        "quick_gelu": (("QuickGELU",), None),
        "swiglu": (("SiluAndMul",), None),
    },
    values={"fp8_enabled": False, "tp_size": 1, "is_neox_style": True, "pass_weight": True, **PLAIN_LAYERS},
    objects={"quant_method": frozenset({"vllm.model_executor.layers.linear.UnquantizedLinearMethod"})},
    buffers={"cos_sin_cache": rotary_table},
    tolerance=1e-2,  # the table is in the tower's dtype; a frequency's last bit is 1e-3 of an angle at position 8191
    outside=("input_norm.",),
)

# Hugging Face's own tower inside vLLM's model, with vLLM's linear layers. These are whole on every rank, though their
# tp_size is that of the language model.
_HUGGING_FACE_INSIDE = replace(
    HUGGING_FACE,
    name="vLLM",
    packages=VLLM.packages,
    decorators=(*HUGGING_FACE.decorators, *VLLM.decorators),
    values={"attention_scaling": 1.0, **PLAIN_LAYERS},
    objects=VLLM.objects,
)


def _merged(names: WeightNames) -> WeightNames:
    """vLLM merges gate and up into one layer, and q, k and v into another."""
    if len(names.fc1) == 2:
        names = replace(names, fc1=("blocks.{}.mlp.gate_up_proj",))
    if isinstance(names.merger, DownsampleNames):
        merger = replace(names.merger, fc1=("merger.gate_up_proj",), proj_act="merger.extra_activation_func")
        names = replace(names, merger=merger)
    return replace(names, qkv=("blocks.{}.attn.qkv",))


_dialect = partial(dialect, engine=VLLM, renamed=_merged)


# (module, tower class) -> the dialect. Qwen3-VL's tower serves its MoE, Qwen3.5 and 3.6, InternS1-Pro and others too.
TOWERS: dict[tuple[str, str], Family] = {
    (_MODELS + "qwen2_vl", "Qwen2VisionTransformer"): _dialect("Qwen2VisionTransformerPretrainedModel"),
    (_MODELS + "qwen2_5_vl", "Qwen2_5_VisionTransformer"): _dialect("Qwen2_5_VisionTransformerPretrainedModel"),
    (_MODELS + "qwen3_vl", "Qwen3_VisionTransformer"): _dialect("Qwen3VLVisionModel"),
    (_MODELS + "glm4_1v", "Glm4vVisionTransformer"): _dialect("Glm4vVisionModel"),
}

_GEMMA = family_of("Gemma4VisionModel")
assert _GEMMA is not None
# (module, model class) -> the dialect of the tower that the model holds and calls part by part, see vllm_gemma
MODELS: dict[tuple[str, str], Family] = {
    (_MODELS + module, name): replace(_GEMMA, engine=_HUGGING_FACE_INSIDE)
    for module, name in (
        ("gemma4_mm", "Gemma4ForConditionalGeneration"),
        ("diffusion_gemma", "DiffusionGemmaForConditionalGeneration"),
        ("embedding_gemma2", "EmbeddingGemma2Model"),
    )
}
