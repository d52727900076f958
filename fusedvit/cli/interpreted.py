"""`python -m fusedvit.cli.interpreted`: the kernels of a one-block tower in Triton's interpreter, beside the original.

A process of its own: Triton decides between compiler and interpreter when the kernels are imported. Prints one JSON
document: a comparison per output.
"""

import json
import os
import sys
from typing import Any

import torch

from fusedvit.cli.documents import plain
from fusedvit.cli.encoding import encode_once
from fusedvit.cli.towers import TINY
from fusedvit.cli.weights import random_weights_
from fusedvit.families.registry import family_of
from fusedvit.model.ops import TRITON
from fusedvit.runtime.inputs import Item
from fusedvit.tolerance import Comparison, compare

ONE_BLOCK = {**TINY, "depth": 1, "deepstack_visual_indexes": [0]}
ITEMS = (Item(1, 4, 6), Item(2, 2, 4))  # an image and a video of two frames


def one_block() -> dict[str, Comparison]:
    """Every output of the interpreted kernels in fp32 against Hugging Face's module, in fp32 and in fp64."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**ONE_BLOCK)).eval()
    random_weights_(tower)
    tokens = sum(item.tokens for item in ITEMS)
    pixels = torch.rand(tokens, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    ours = _interpreted(tower, pixels)
    pt, ref = _original(tower, pixels), _original(tower.double(), pixels.double())
    return {name: compare(ours[name], ref[name], pt[name]) for name in ours}


def _interpreted(tower: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    family = family_of(type(tower).__name__)
    assert family is not None, "Qwen3-VL is a known family"
    spec = family.spec_from_config(tower.config)
    outputs = encode_once(spec, family, dict(tower.named_parameters()), pixels, ITEMS, TRITON)
    return _named(outputs.pooled, outputs.hidden, outputs.deepstack)


def _original(tower: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        answer = tower(pixels, grid_thw=_grid())
    return _named(answer.pooler_output, answer.last_hidden_state, answer.deepstack_features)


def _named(pooled: torch.Tensor, hidden: torch.Tensor, deepstack: Any) -> dict[str, torch.Tensor]:
    features = {f"deepstack_features[{i}]": feature for i, feature in enumerate(deepstack)}
    return {"pooler_output": pooled, "last_hidden_state": hidden, **features}


def _grid() -> torch.Tensor:
    return torch.tensor([[item.t, item.h, item.w] for item in ITEMS])


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("TRITON_INTERPRET=1 must be set before the kernels are imported")
    print(json.dumps({name: plain(comparison) for name, comparison in one_block().items()}))
