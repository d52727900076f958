"""Whole models of vLLM, tiny, with random weights, on a CPU."""

import functools
import json
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext

import fusedvit
from fusedvit.bench.towers import padded_images, random_weights_
from fusedvit.checks.change_detection import HANDLE
from fusedvit.errors import UnsupportedModel
from fusedvit.serving import vllm_worker

Grid = list[tuple[int, int, int]]
GRIDS: dict[str, Grid] = {
    "image": [(1, 8, 12)],
    "images": [(1, 8, 8), (1, 4, 20), (1, 12, 12)],
    "video": [(3, 8, 8)],
    "mixed": [(1, 8, 8), (2, 4, 12), (1, 16, 4), (4, 8, 4)],
}
_TEXT = dict(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=512,
    head_dim=32,
    max_position_embeddings=2048,
)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32)
_QWEN3 = dict(depth=3, hidden_size=144, num_heads=2, intermediate_size=280, out_hidden_size=64)
_QWEN25 = dict(depth=3, hidden_size=160, num_heads=2, intermediate_size=300, out_hidden_size=64)
_GLM = dict(depth=2, hidden_size=160, num_heads=2, intermediate_size=300, out_hidden_size=64, image_size=112)
_GEMMA_TEXT = _TEXT | dict(
    num_hidden_layers=2,
    num_key_value_heads=1,
    global_head_dim=32,
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
)
_GEMMA = dict(
    num_hidden_layers=2,
    hidden_size=144,
    intermediate_size=280,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=72,
    patch_size=4,
    pooling_kernel_size=2,
    position_embedding_size=64,
    use_clipped_linears=True,
    standardize=True,
    default_output_length=280,
)

# architecture -> (config class in transformers, text config, vision config, patch size)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}},
        dict(depth=3, embed_dim=160, hidden_size=64, num_heads=2, mlp_ratio=2),
        14,
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}},
        _QWEN25 | {"fullatt_block_indexes": [1], "window_size": 112},
        14,
    ),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", _TEXT, _QWEN3 | {"deepstack_visual_indexes": [0, 2]}, 16),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        _TEXT | _MOE,
        _QWEN3 | {"deepstack_visual_indexes": [1]},
        16,
    ),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5Config", _TEXT | _LINEAR, _QWEN3, 16),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeConfig", _TEXT | _LINEAR | _MOE, _QWEN3, 16),
    "Glm4vMoeForConditionalGeneration": (
        "Glm4vMoeConfig",
        _TEXT
        | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1)
        | dict(use_qk_norm=False, first_k_dense_replace=0),
        _GLM,
        14,
    ),
    "Glm4vForConditionalGeneration": ("Glm4vConfig", _TEXT, _GLM, 14),
    "Gemma4ForConditionalGeneration": ("Gemma4Config", _GEMMA_TEXT, _GEMMA, 4),
}
# Models that run the methods of one of these.
BORROWING: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "DiffusionGemmaForBlockDiffusion": ("DiffusionGemmaConfig", _GEMMA_TEXT, _GEMMA, 4),
    "EmbeddingGemma2Model": ("EmbeddingGemma2Config", _GEMMA_TEXT, _GEMMA, 4),
}


def folder_of(architecture: str) -> Path:
    """A folder with what vLLM reads of a model: its config and its processor's."""
    name, text, vision, patch = (MODELS | BORROWING)[architecture]
    config = getattr(transformers, name)(text_config=text, vision_config=vision)
    config.architectures = [architecture]
    folder = Path(tempfile.mkdtemp())
    config.save_pretrained(folder)
    processor = dict(
        image_processor_type="Glm4vImageProcessor" if "Glm" in name else "Qwen2VLImageProcessor",
        image_mean=[0.48, 0.46, 0.41],
        image_std=[0.27, 0.26, 0.28],
        do_normalize=True,
        do_rescale=True,
        rescale_factor=1 / 255,
        patch_size=patch,
        temporal_patch_size=2,
        merge_size=2,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def config_of(architecture: str, **options: Any) -> Any:
    """vLLM's config of a tiny model. Its plugins are loaded first, as every process of vLLM does."""
    load_general_plugins()
    engine = EngineArgs(
        model=str(folder_of(architecture)),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=1024,
        enforce_eager=True,
        **{"dtype": "float32", "compilation_config": {"cudagraph_mm_encoder": True}} | options,
    )
    return engine.create_engine_config(usage_context=UsageContext.LLM_CLASS)


def start(rank: int = 0, world: int = 1, port: int | None = None) -> None:
    """vLLM's process groups; those of models depend on the config."""
    if model_parallel_is_initialized():
        destroy_model_parallel()
    else:
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port or free_port()}", rank, "gloo")
    initialize_model_parallel(world)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@functools.cache
def _known_config(architecture: str) -> Any:
    return config_of(architecture)


def load(
    architecture: str = "Qwen3VLForConditionalGeneration", config: Any = None, rank_and_world: tuple[int, int] = (0, 1)
) -> tuple[Any, Any]:
    """(config, model) with random weights of a size at which errors show, as vLLM's model runner takes it over."""
    config = config or _known_config(architecture)
    config.compilation_config.cudagraph_mm_encoder = True
    model = build(config, rank_and_world)
    random_weights_(tower_of(model))
    vllm_worker._init_model_state(lambda *_: None, config, model)
    return config, model.eval()


def build(config: Any, rank_and_world: tuple[int, int] = (0, 1)) -> Any:
    """The model as vLLM loads it, whatever it holds in place of a tower."""
    config.compilation_config.static_forward_context.clear()  # names of layers, once in a process
    with under(config):
        start(*rank_and_world)
        return get_model(vllm_config=config)


def under(config: Any) -> AbstractContextManager[Any]:
    """Inference as vLLM's model runner sets it up."""
    return set_current_vllm_config(config)


def tower_of(model: Any) -> Any:
    return model.visual if hasattr(model, "visual") else model.vision_tower


def pixels_of(model: Any, grid: Grid, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Bytes, or what is normalised already."""
    tower = tower_of(model)
    weight = tower.patch_embed.proj.weight if hasattr(tower, "patch_embed") else tower.patch_embedder.input_proj.weight
    rows, width = sum(t * h * w for t, h, w in grid), weight[0].numel()
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=generator)
    return torch.randn(rows, width, generator=generator).to(dtype)


def calls_of(model: Any, grid: Grid, dtype: torch.dtype = torch.uint8, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of `embed_multimodal`, images and videos together."""
    if hasattr(model, "vision_tower"):
        return padded_calls_of(model, grid, seed)
    pixels = pixels_of(model, grid, dtype, seed).split([t * h * w for t, h, w in grid])
    found: dict[str, torch.Tensor] = {}
    for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        chosen = [i for i, (t, _, _) in enumerate(grid) if (t > 1) == (modality == "video")]
        if chosen:
            found[name] = torch.cat([pixels[i] for i in chosen])
            found[f"{modality}_grid_thw"] = torch.tensor([grid[i] for i in chosen])
    return found


def padded_calls_of(model: Any, grid: Grid, seed: int) -> dict[str, torch.Tensor]:
    """As `calls_of`, of Gemma 4: images padded to one size, floats from 0 to 1, frames as images."""
    merge, pixels = model.vision_tower.config.pooling_kernel_size, pixels_of(model, grid, torch.float32, seed)
    images, positions = padded_images(pixels.clamp(-1, 1), grid, merge)
    still = torch.tensor([t == 1 for t, _, _ in grid for _ in range(t)])
    counts = torch.tensor([t for t, _, _ in grid if t > 1])
    found = {"pixel_values": images[still], "pixel_position_ids": positions[still]} if still.any() else {}
    if len(counts):
        found |= {"pixel_values_videos": images[~still], "pixel_position_ids_videos": positions[~still]}
        found["video_frame_counts"] = counts
    return found


def embed(config: Any, model: Any, grid: Grid, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    """Embeddings of all items, one after another."""
    with torch.inference_mode(), under(config):
        return torch.cat(model.embed_multimodal(**calls_of(model, grid, dtype, seed))).clone()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within fp32's rounding of the same function."""
    return bool(got.shape == want.shape and (got - want).norm() <= 3e-5 * want.norm())


def outcome(call: Callable[..., Any], *given: Any) -> Any:
    """What it returns, or the error that it raises."""
    try:
        return call(*given)
    except Exception as error:  # whatever it is: both must raise it
        return type(error), str(error)


def same(got: Any, want: Any) -> bool:
    """Whether one `outcome` is the other, to the bit."""
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    return torch.equal(got, want) if isinstance(want, torch.Tensor) else bool(got == want)


def left_alone(heard: Callable[..., str], config: Any, part: str = "runs vLLM's own code") -> tuple[Any, str]:
    """A model that is not fused as it is loaded, which keeps vLLM's graphs and answers; and the line that says so."""
    config, model = load(config=config)
    assert HANDLE not in vars(tower_of(model)) and config.compilation_config.cudagraph_mm_encoder
    assert torch.isfinite(embed(config, model, GRIDS["mixed"])).all()
    if hasattr(model, "visual"):  # Gemma's is Hugging Face's
        with pytest.raises(UnsupportedModel):
            fusedvit.fuse(model)
    return model, heard(part)


class Lora(nn.Module):
    """As `vllm.lora.layers` stands around a layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x)


class Quantized(LinearMethodBase):
    """A method of a quantised layer."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight.round(decimals=1), bias)
