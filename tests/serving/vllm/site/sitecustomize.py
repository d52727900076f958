"""What vLLM's wheel, which is built for CUDA, misses beside a CPU build of torch. On PYTHONPATH of every process: vLLM
inspects models in one of its own.

torchvision's operators and some of vLLM's are compiled for a GPU, yet they are asked for by name as modules are
imported. None of them is called in a vision tower on a CPU, but the activation, which is given in torch.
"""

import importlib.abc
import sys


class _Operators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _define_operators()
        return None


def _define_operators():
    import torch

    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    kept.append(torch.library.Library("torchvision", "FRAGMENT"))
    kept[-1].define(f"nms{boxes}")
    kept[-1].define(f"qnms{boxes}")
    kept.append(torch.library.Library("_C", "FRAGMENT"))
    kept[-1].define("gelu_quick(Tensor(a!) out, Tensor input) -> ()")
    kept[-1].impl("gelu_quick", lambda out, x: [out.copy_(x * torch.sigmoid(1.702 * x))].clear(), "CPU")
    kept[-1].define("prepack_moe_weight(Tensor weight, Tensor(a!) out, str isa) -> ()")
    kept[-1].impl("prepack_moe_weight", lambda weight, out, isa: [out.copy_(weight)].clear(), "CPU")
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.get_memory_info = lambda *_: (1 << 33, 1 << 34)


kept = []
sys.meta_path.insert(0, _Operators())
