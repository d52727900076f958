"""vLLM's own Qwen3-VL tower and its encoder graphs, with and without our plugin, in one process on the same weights.

vLLM's code is as shipped: tower, `embed_multimodal`, `EncoderCudaGraphManager`, a config from `EngineArgs`. Three
things differ: the language model is not built, weights are random, and `get_max_frames_per_video` is a constant, since
it would need a processor.
"""

import lzma
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusedvit
from fusedvit.bench.towers import GEOMETRIES, Geometry, build, wider
from fusedvit.bench.workloads import Grid
from fusedvit.errors import InputError

_FRAMES = 1  # frames per video under vLLM's default limit of 999 videos per prompt
_PORT = 29541  # of a single process
_TOKENS = 8192  # max_num_batched_tokens of `vllm serve` on an H100
_LIBRARIES = {
    "_vllm_fa2_C.abi3.so": "vllm/vllm_flash_attn",
    "_vllm_fa3_C.abi3.so": "vllm/vllm_flash_attn",
    "cumem_allocator.abi3.so": "vllm",
}
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_PLUGINS": ""}
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Served:
    """Two models of an engine with the same weights: `theirs`, its own, and `ours`, fused by the plugin.

    Attributes:
        config: the engine's config.
        tower, wide: Hugging Face's tower with the same weights, and its copy in the wider dtype.
    """

    config: Any
    theirs: Any
    ours: Any
    tower: nn.Module
    wide: nn.Module
    device: torch.device


def open_site(folder: Path) -> None:
    """Puts vLLM on the path: `folder` is a site-packages that holds it, or holds its packed files (docs/serving.md).

    Raises:
        InputError: `folder` holds neither.
    """
    packed = sorted(folder.glob("vllm-*-py.tar.xz"))
    if not (folder / "vllm" / "__init__.py").is_file() and not packed:
        raise InputError(f"--vllm: {folder} holds neither vllm/ nor vllm-*-py.tar.xz")
    site = _unpacked(folder, packed[0]) if packed else folder
    sys.path.insert(0, str(site))
    os.environ |= _ENVIRONMENT
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]  # vLLM inspects models in processes of their own
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _unpacked(folder: Path, archive: Path) -> Path:
    site = Path(tempfile.gettempdir()) / f"fusedvit-{archive.name.removesuffix('-py.tar.xz')}"
    if site.is_dir():
        return site
    partial = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    with tarfile.open(archive) as tar:
        tar.extractall(partial, filter="data")
    for name, home in _LIBRARIES.items():
        for path in folder.glob(f"{name}*"):
            opened = lzma.open(path) if path.suffix == ".xz" else open(path, "rb")  # noqa: SIM115
            with opened as source, open(partial / home / name, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 22)
    for wheel in sorted((folder / "wheels").glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(partial)
    partial.rename(site)
    return site


def engine_config(geometry: Geometry, dtype: torch.dtype, **more: Any) -> Any:
    """The config of `vllm serve` for a model with this tower, with encoder graphs on."""
    from transformers import Qwen3VLConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    small = {"hidden_size": geometry.numbers["out_hidden_size"], "num_hidden_layers": 1, "vocab_size": 512}
    small |= {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128, "head_dim": 64}
    folder = tempfile.mkdtemp()
    config = Qwen3VLConfig(text_config=small, vision_config=geometry.numbers)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)
    engine = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=32768,
        max_num_batched_tokens=_TOKENS,
        compilation_config={"cudagraph_mm_encoder": True},
        disable_custom_all_reduce=True,
        **more,
    )
    return engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def load_plugin() -> None:
    """Loads the plugin as vLLM does, by its entry point; a repeated call changes nothing."""
    EntryPoint("fusedvit", "fusedvit.serving.vllm:register", "vllm.general_plugins").load()()


def start(rank: int, world: int, port: int, device: torch.device) -> None:
    """Starts vLLM's process groups."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    init_distributed_environment(
        world_size=world,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        backend="nccl" if device.type == "cuda" else "gloo",
    )
    initialize_model_parallel(world)


def build_model(config: Any, device: torch.device, fused: bool) -> Any:
    """`Qwen3VLForConditionalGeneration` with its tower, fused by the plugin or not, without its language model."""
    load_plugin()
    from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer, Qwen3VLForConditionalGeneration
    from vllm.utils.torch_utils import set_default_torch_dtype

    class Model(Qwen3VLForConditionalGeneration):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            model = config.model_config
            self.config, self.model_config, self.multimodal_config = model.hf_config, model, model.multimodal_config
            self.use_data_parallel = model.multimodal_config.mm_encoder_tp_mode == "data"
            self.video_pruning_rate, self.is_multimodal_pruning_enabled = None, False
            with set_default_torch_dtype(model.dtype), torch.device(device):
                self.visual = Qwen3_VisionTransformer(
                    model.hf_config.vision_config,
                    norm_eps=getattr(model.hf_config, "rms_norm_eps", 1e-6),
                    quant_config=config.quant_config,
                    prefix="visual",
                )

        def get_max_frames_per_video(self) -> int:
            return _FRAMES

    model = Model().eval()
    for module in model.modules():  # as the loader does; on CUDA it does nothing for plain layers
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    if fused:
        fusedvit.fuse(model)  # raises if the plugin has not fused it; the plugin's log line says why
    else:
        fusedvit.unfuse(model)
    return model


def share_(ours: Any, theirs: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Loads a Hugging Face tower's weights by vLLM's loader, and makes both models share the memory."""
    loaded = theirs.visual.load_weights(state.items())
    assert loaded == set(state), f"not loaded: {sorted(set(state) - loaded)[:3]}"
    for mine, other in zip(ours.visual.parameters(), theirs.visual.parameters(), strict=True):
        mine.data = other.data


def new_manager(served: Served, budgets: tuple[int, ...] = (), items: int = 0, frames: int | None = None) -> Any:
    """vLLM's graph manager with these limits (by default those that it infers), with its graphs captured."""
    from vllm.distributed.parallel_state import graph_capture
    from vllm.platforms import current_platform
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    limits = served.config.compilation_config
    limits.encoder_cudagraph_token_budgets = list(budgets)
    limits.encoder_cudagraph_max_vision_items_per_batch = items
    limits.encoder_cudagraph_max_frames_per_batch = frames
    manager = EncoderCudaGraphManager(
        vllm_config=served.config,
        device=served.device,
        dtype=served.config.model_config.dtype,
        model=served.theirs,
    )
    with torch.inference_mode(), graph_capture(device=served.device):
        manager.capture(graph_pool=current_platform.graph_pool_handle())
        torch.cuda.synchronize()
    return manager


def batches_of(grid: Grid, pixels: torch.Tensor) -> list[Batch]:
    """The model runner's batches: one per modality, with grids on the CPU."""
    rows: dict[str, list[tuple[tuple[int, int, int], torch.Tensor]]] = {"image": [], "video": []}
    at = 0
    for t, h, w in grid:
        rows["video" if t > 1 else "image"].append(((t, h, w), pixels[at : at + t * h * w]))
        at += t * h * w
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    return [
        {
            names[modality]: torch.cat([part for _, part in found]).contiguous(),
            f"{modality}_grid_thw": torch.tensor([item for item, _ in found]),
        }
        for modality, found in rows.items()
        if found
    ]


def in_grid_order(grid: Grid, outputs: list[Any]) -> torch.Tensor:
    """The outputs of the batches of `batches_of`, given item by item, in the order of `grid`."""
    flat = [item for batch in outputs for item in batch]
    images = iter(flat[: sum(t == 1 for t, _, _ in grid)])
    videos = iter(flat[sum(t == 1 for t, _, _ in grid) :])
    return torch.cat([next(videos) if t > 1 else next(images) for t, _, _ in grid])


def hugging_face(served: Served, pixels: torch.Tensor, grid: Grid) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hugging Face's embeddings in the wider dtype and in the dtype of `pixels`, for `verdict_of`, in the layout of
    engines."""
    rows, found = torch.tensor(grid, device=served.device), []
    for tower, dtype in ((served.wide, wider(pixels.dtype)), (served.tower, pixels.dtype)):
        outputs = tower(pixels.to(dtype), grid_thw=rows)
        found.append([torch.cat([outputs.pooler_output, *outputs.deepstack_features], 1)])
        del outputs
    return found[0], found[1]


def serve(
    name: str, device: torch.device, dtype: torch.dtype, rank: int = 0, ranks: int = 1, port: int = _PORT, **more: Any
) -> Served:
    """Both models of a Qwen3-VL geometry with the random weights of Hugging Face's tower, in this process.

    Args:
        port: where `ranks` processes meet, of which this is number `rank`.
        more: options of the engine.

    Raises:
        InputError: `name` is a tower of another family.
    """
    from vllm.config import set_current_vllm_config

    geometry = GEOMETRIES[name]
    if geometry.model != "qwen3_vl":
        raise InputError(f"--vllm: {name} is of another family, expected one of Qwen3-VL")
    config = engine_config(geometry, dtype, tensor_parallel_size=ranks, **more)
    with torch.inference_mode(False):
        tower, wide = build(geometry, dtype, device)
        with set_current_vllm_config(config):
            start(rank, ranks, port, device)
            theirs, ours = build_model(config, device, False), build_model(config, device, True)
        share_(ours, theirs, tower.state_dict())
    return Served(config, theirs, ours, tower, wide, device)
