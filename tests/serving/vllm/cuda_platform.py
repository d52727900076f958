"""Whether towers would run fused on CUDA, asked without a GPU: `python cuda_platform.py CUSTOM_OPS`, vLLM on the path.

vLLM chooses code by platform as a tower is built: FlashAttention, Triton kernels, its custom operations. Here it finds
an H100 that is not there; towers are built on the CPU and judged, never run. Prints a line of JSON: a reason a tower.
"""

import importlib
import json
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

for name in ("vllm._C_stable_libtorch", *(f"vllm.vllm_flash_attn._vllm_fa{i}_C" for i in (2, 3))):
    sys.modules[name] = types.ModuleType(name)  # compiled for CUDA, and not called here
operators = torch.library.Library("_C", "FRAGMENT")
for name in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "scaled_mm_supports_fp4"):
    operators.define(f"cutlass_{name}(int capability) -> bool")
    operators.impl(f"cutlass_{name}", lambda capability: False, "CompositeImplicitAutograd")
for name in ("cutlass_group_gemm_supported", "cutlass_sparse_scaled_mm_supported"):
    operators.define(f"{name}(int capability) -> bool")
    operators.impl(name, lambda capability: False, "CompositeImplicitAutograd")
for name in ("silu_and_mul", "gelu_new", "gelu_fast"):
    operators.define(f"{name}(Tensor(a!) out, Tensor input) -> ()")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
import vllm  # noqa: E402
import vllm.platforms as platforms  # noqa: E402
import vllm.triton_utils as triton_utils  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class H100(NonNvmlCudaPlatform):
    """An H100 for those who ask."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30


H100.__module__ = NonNvmlCudaPlatform.__module__  # a platform of somebody else's would be replaced code
platforms._current_platform = H100()
triton_utils.HAS_TRITON, triton_utils.triton, triton_utils.tl = True, triton, tl
torch.cuda.device_count = lambda: 1

from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig  # noqa: E402
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel  # noqa: E402
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig, Glm4vVisionConfig  # noqa: E402
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig  # noqa: E402
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig  # noqa: E402
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.models.transformers.utils import recursive_replace_linear  # noqa: E402

import fusedvit  # noqa: E402
from fusedvit.checks.as_built import Built  # noqa: E402
from fusedvit.errors import UnsupportedModel  # noqa: E402
from fusedvit.serving import vllm as plugin  # noqa: E402
from fusedvit.serving import vllm_gemma  # noqa: E402
from fusedvit.serving.vllm_towers import MODELS, TOWERS  # noqa: E402

SIZES = {"depth": 2, "num_heads": 2}
QWEN3 = {**SIZES, "hidden_size": 144, "deepstack_visual_indexes": [1]}
# module -> what its towers are called in the answer, beside their class -> arguments
ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_vl": {"": {"vision_config": Qwen2VLVisionConfig(**SIZES, embed_dim=160, hidden_size=96)}},
    "qwen2_5_vl": {"": {"vision_config": Qwen2_5_VLVisionConfig(**SIZES, hidden_size=160, fullatt_block_indexes=[1])}},
    "qwen3_vl": {
        "": {"vision_config": Qwen3VLVisionConfig(**QWEN3)},
        ", GELU": {"vision_config": Qwen3VLVisionConfig(**QWEN3, hidden_act="gelu")},
    },
    "glm4_1v": {
        "": {
            "vision_config": Glm4vVisionConfig(**SIZES, hidden_size=160),
            "text_config": Glm4vTextConfig(),
            "norm_eps": 1e-5,
        }
    },
}


def gemma(clipped: bool) -> str:
    """The reason of Hugging Face's tower as vLLM's model puts its own linear layers in."""
    config = Gemma4VisionConfig(num_hidden_layers=2, use_clipped_linears=clipped, standardize=not clipped)
    tower, family = Gemma4VisionModel._from_config(config), next(iter(MODELS.values()))
    recursive_replace_linear(tower, None)
    spec, built = family.spec_from_config(config), Built.of(tower, family.engine)
    return str(fusedvit.fuse_tower(tower, family, spec, built=built, call=vllm_gemma.run).reason())


def main() -> None:
    config = VllmConfig()
    config.compilation_config.custom_ops = [sys.argv[1]]
    plugin.register()
    torch.set_default_dtype(torch.bfloat16)
    found: dict[str, Any] = {"vllm": vllm.__version__, "backend": ""}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1)
        for home, name in TOWERS:
            module = importlib.import_module(home)
            for label, given in ARGUMENTS[home.rpartition(".")[2]].items():
                tower = getattr(module, name)(**given)
                found["backend"] = str(tower.attn_backend)
                try:
                    found[name + label] = str(fusedvit.fuse(tower).reason())
                except UnsupportedModel:
                    found[name + label] = "left alone"
        found |= {f"Gemma 4, clipped: {clipped}": gemma(clipped) for clipped in (False, True)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
