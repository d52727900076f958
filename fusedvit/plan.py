"""Which launch configuration each operation of the encoder takes for a token budget."""

from dataclasses import dataclass

import torch

from fusedvit.kernels.configs import (
    AttentionConfig,
    LinearConfig,
    Target,
    attention_config,
    budget,
    linear_config,
)
from fusedvit.spec import VisionSpec


@dataclass(frozen=True)
class EncoderPlan:
    """One configuration per operation; equal for every call of one token budget."""

    patch: LinearConfig
    qkv: LinearConfig
    attention: AttentionConfig
    proj: LinearConfig
    fc1: LinearConfig
    fc2: LinearConfig
    merger_fc1: LinearConfig
    merger_fc2: LinearConfig
    max_programs: int


def plan_for(spec: VisionSpec, tokens: int, dtype: torch.dtype, target: Target) -> EncoderPlan:
    """The plan of the token budget that `tokens` patch tokens fall into. Pure: the same arguments, the same plan."""
    rows = budget(tokens)
    merged = max(1, rows // spec.merge_unit)
    c = spec.hidden_size

    def linear(n: int, k: int, *, widest: int = 256, rows: int = rows) -> LinearConfig:
        return linear_config(rows, n, k, dtype, target, max_block_n=widest)

    return EncoderPlan(
        patch=linear(c, spec.patch_width, widest=64 if spec.position_side else 128),
        qkv=linear(3 * c, c, widest=128),
        attention=attention_config(rows, spec.num_heads, spec.head_dim, dtype, target),
        proj=linear(c, c, widest=128),
        fc1=linear(spec.intermediate_size, c, widest=128 if spec.activation == "gelu" else 256),
        fc2=linear(c, spec.intermediate_size, widest=128),
        merger_fc1=linear(spec.merged_size, spec.merged_size, widest=128, rows=merged),
        merger_fc2=linear(spec.out_size, spec.merged_size, rows=merged),
        max_programs=4 * target.num_sms,
    )
