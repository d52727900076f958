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
    return EncoderPlan(
        patch=linear_config(rows, c, dtype, target, wide_epilogue=True),
        qkv=linear_config(rows, 3 * c, dtype, target, wide_epilogue=True),
        attention=attention_config(rows, spec.num_heads, spec.head_dim, dtype, target),
        proj=linear_config(rows, c, dtype, target),
        fc1=linear_config(rows, spec.intermediate_size, dtype, target),
        fc2=linear_config(rows, c, dtype, target),
        merger_fc1=linear_config(merged, spec.merged_size, dtype, target, wide_epilogue=True),
        merger_fc2=linear_config(merged, spec.out_size, dtype, target),
        max_programs=4 * target.num_sms,
    )
