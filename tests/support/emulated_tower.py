"""`python -m tests.support.emulated_tower --tower hd72`: a small tower as an H200 runs it, in bf16, on the emulator.

A process without Triton's interpreter. The plan is an H200's for the budget, every launch is compiled for sm_90 and
emulated: metadata and packed cos/sin, patch embedding, blocks, mergers. Against Hugging Face's module by the rule, then
in buffers that exceed their content, all else NaN: the same bits.
"""

import argparse
from typing import Any

import torch

from fusedvit.kernels.tile_configs import Target, budget
from fusedvit.model import ops
from fusedvit.model.plan import EncoderPlan, plan_for
from tests.emulator.launches import emulated
from tests.support.encoding import Encoder, hugging_face
from tests.support.families import family_tower
from tests.support.towers import Grid, assert_bitwise, assert_rule, copy_of, patches_of, pixels_for

GRID: Grid = [(1, 8, 12), (2, 4, 4), (1, 2, 2)]
IMAGES: Grid = [(1, 8, 12), (1, 8, 4), (1, 2, 2)]  # as many patches; GLM-4V is handed videos frame by frame
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {  # class, what differs from its tiny config
    "hd72": (
        "Qwen3VLVisionModel",
        {
            "hidden_size": 144,
            "intermediate_size": 280,
            "num_heads": 2,
            "depth": 2,
            "deepstack_visual_indexes": [0],
            "out_hidden_size": 64,
        },
    ),
    "windows": (
        "Qwen2_5_VisionTransformerPretrainedModel",
        {"hidden_size": 160, "intermediate_size": 228, "depth": 2, "fullatt_block_indexes": [1]},
    ),
    "hd128": ("Glm4vVisionModel", {"hidden_size": 256, "intermediate_size": 160}),
    "qk_norm": ("Glm5NextVisionModel", {"hidden_size": 128, "intermediate_size": 96}),
    "clipped": ("Gemma4VisionModel", {"hidden_size": 128, "head_dim": 64, "intermediate_size": 96}),
}


class OnHopper(Encoder):
    """With an H200's plans, whatever device its tensors are on."""

    def plan(self, tokens: int) -> EncoderPlan:
        return plan_for(self.spec, tokens, self.dtype, Target())


def check(name: str) -> dict[str, str]:
    """What the plan chose."""
    kind, numbers = TOWERS[name]
    grid = IMAGES if kind == "Glm4vVisionModel" else GRID
    tower = copy_of(family_tower(kind, **numbers), torch.bfloat16)
    pixels = pixels_for(tower, grid).bfloat16()
    encoder = OnHopper(tower, ops.TRITON)
    with emulated(seed=0):
        ours = encoder.answer(grid, pixels)
    assert_rule(
        ours, hugging_face(copy_of(tower, torch.float32), grid, pixels.float()), hugging_face(tower, grid, pixels)
    )
    tokens = patches_of(grid)
    roomy = encoder.buffers(grid, spare=(budget(tokens) - tokens, 3, 5, 7), poisoned=True)
    with emulated(seed=1, promptness=0.05):
        assert_bitwise(encoder.run(roomy, grid, pixels), ours)
    return encoder.plan(tokens).choices()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tower", choices=list(TOWERS), required=True)
    args = parser.parse_args()
    chosen = check(args.tower)
    assert {"hopper"} <= set(chosen.values()), f"no form for Hopper in {chosen}"
    print(f"right: {args.tower}, {chosen}")


if __name__ == "__main__":
    main()
