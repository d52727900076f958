"""SGLang's models without their language models, tiny, with random weights, on a CPU."""

import importlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.utils.hf_transformers_utils import get_config

from fusedvit.bench.towers import random_weights_

Grid = list[tuple[int, int, int]]
GRIDS: dict[str, Grid] = {
    "image": [(1, 8, 12)],
    "images": [(1, 8, 8), (1, 4, 20), (1, 12, 12)],
    "video": [(3, 8, 8)],
    "mixed": [(1, 8, 8), (2, 4, 12), (1, 16, 4), (4, 8, 4)],
}
_TEXT = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=512)
_TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}
_AUDIO = dict(d_model=16, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=16)
_QWEN3 = dict(depth=3, hidden_size=144, num_heads=2, intermediate_size=280, out_hidden_size=64)
_QWEN25 = dict(depth=3, hidden_size=160, num_heads=2, intermediate_size=300, out_hidden_size=64)
_WINDOWS = {"fullatt_block_indexes": [1], "window_size": 112}
QWEN3, QWEN25 = "Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"

# architecture -> (its module, config class in transformers, vision config)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    QWEN3: ("qwen3_vl", "Qwen3VLConfig", _QWEN3 | {"deepstack_visual_indexes": [0, 2]}),
    "Qwen3VLMoeForConditionalGeneration": (
        "qwen3_vl_moe",
        "Qwen3VLMoeConfig",
        _QWEN3 | {"deepstack_visual_indexes": [1]},
    ),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "Qwen3_5Config", _QWEN3 | {"deepstack_visual_indexes": []}),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5", "Qwen3_5MoeConfig", _QWEN3 | {"deepstack_visual_indexes": []}),
    "Qwen3OmniMoeForConditionalGeneration": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeConfig",
        _QWEN3 | {"deepstack_visual_indexes": [0, 2]},
    ),
    QWEN25: ("qwen2_5_vl", "Qwen2_5_VLConfig", _QWEN25 | _WINDOWS),
}


def start(rank: int = 0, ranks: int = 1, meeting: Path | None = None, **options: Any) -> None:
    """A process of SGLang's as far as models need it: its options, its groups, its plugins."""
    get_context().override_server_args(device="cpu", tp_size=ranks, **options).install()
    meeting = meeting or Path(tempfile.mkdtemp()) / "meeting"
    init_distributed_environment(
        backend="gloo", world_size=ranks, rank=rank, local_rank=rank, distributed_init_method=f"file://{meeting}"
    )
    one = dict.fromkeys(("pp_size", "attn_dp_size", "attn_dcp_size", "moe_ep_size", "moe_dp_size"), 1)
    none = dict.fromkeys(("pp_rank", "attn_dp_rank", "attn_cp_rank", "moe_ep_rank"), 0)
    sizes = {"attn_tp_size": ranks, "moe_tp_size": ranks, "tp_rank": rank, "attn_tp_rank": rank}
    get_parallel().override_permanently(**one, **none, **sizes)
    initialize_model_parallel()
    load_plugins()


def build(architecture: str = QWEN3, **vision: Any) -> Any:
    """A model as SGLang's loader constructs it, with random weights of a size at which errors show."""
    module, name, config = MODELS[architecture]
    parts: dict[str, Any] = {"text_config": _TEXT, "vision_config": config | vision}
    if "Omni" in name:
        parts = {"thinker_config": parts | {"audio_config": _AUDIO}, "enable_audio_output": False}
    given = getattr(transformers, name)(**parts)
    given.architectures = [architecture]
    folder = tempfile.mkdtemp()
    given.save_pretrained(folder)
    config = get_config(folder, trust_remote_code=False)
    for part in (config, getattr(config, "thinker_config", config)):
        part.encoder_only, part.language_only = True, False
    model = getattr(importlib.import_module(f"sglang.srt.models.{module}"), architecture)(config).eval()
    random_weights_(tower_of(model))
    return model


def tower_of(model: Any) -> Any:
    return getattr(model, "thinker", model).visual


def loaded(model: Any) -> Any:
    """What SGLang's model runner does once a model is loaded."""
    ModelRunner.maybe_precompile_model_kernels_after_loading(SimpleNamespace(model=model, device="cpu"))
    return model


def pixels_of(tower: Any, grid: Grid, seed: int = 0) -> torch.Tensor:
    rows, width = sum(t * h * w for t, h, w in grid), tower.patch_embed.proj.weight[0].numel()
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def embed(tower: Any, grid: Grid, seed: int = 0, as_list: bool = False) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = tower(pixels_of(tower, grid, seed), grid_thw=grid if as_list else torch.tensor(grid))
    return found.clone()


def own(tower: Any, grid: Grid, seed: int = 0) -> torch.Tensor:
    """SGLang's own answer."""
    with torch.inference_mode():
        found: torch.Tensor = type(tower).__mro__[1].forward(tower, pixels_of(tower, grid, seed), torch.tensor(grid))
    return found.clone()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within fp32's rounding of the same function."""
    return bool(got.shape == want.shape and want.norm() > 0 and (got - want).norm() <= 1e-5 * want.norm())
