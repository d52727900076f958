"""The encoder, once: values in, values out, on whichever table of operations it is given.

Safe to capture: nothing here reads from the device, and no shape depends on content.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fusedvit.buffers import EncoderBuffers
from fusedvit.kernels.attention import Segments
from fusedvit.kernels.epilogue import Epilogue, NormFold, Rope, Taps
from fusedvit.kernels.metadata import MERGED, TILES, TOKENS
from fusedvit.kernels.row_stats import RowStats
from fusedvit.ops import Ops
from fusedvit.plan import EncoderPlan
from fusedvit.spec import VisionSpec
from fusedvit.weights import BlockWeights, EncoderWeights, LinearWeights, MergerWeights


@dataclass(frozen=True)
class EncoderOutputs:
    """What a run gives.

    Attributes:
        hidden: `[tokens, hidden]`, after the last block.
        merged: `[1 + deepstack mergers, tokens / merge_unit, out]`.
    """

    hidden: torch.Tensor
    merged: torch.Tensor

    @property
    def pooled(self) -> torch.Tensor:
        """`[tokens / merge_unit, out]`, after the merger."""
        return self.merged[0]

    @property
    def deepstack(self) -> tuple[torch.Tensor, ...]:
        """One `[tokens / merge_unit, out]` per deepstack merger."""
        return self.merged[1:].unbind(0)


@dataclass(frozen=True)
class _Run:
    """One run's arguments together, so that the steps below read as the model does."""

    spec: VisionSpec
    weights: EncoderWeights
    buffers: EncoderBuffers
    ops: Ops
    plan: EncoderPlan

    def stats(self, config: Any) -> RowStats:
        """Row statistics in the width that `config`'s tiles write; one is alive at a time."""
        hidden = self.buffers.hidden
        return RowStats.over(self.buffers.stats, hidden.shape[0], hidden.shape[1], config.block_n)

    def fold(self, stats: RowStats, linear: LinearWeights) -> NormFold:
        return NormFold(stats, linear.colsum, self.spec.norm_eps)


def encode(
    spec: VisionSpec, weights: EncoderWeights, buffers: EncoderBuffers, ops: Ops, plan: EncoderPlan
) -> EncoderOutputs:
    """Runs the tower on `buffers.pixels` and `buffers.grid`.

    Args:
        spec: the tower.
        weights: prepared weights, on the buffers' device and of their dtype.
        buffers: inputs filled; every other field is overwritten.
        ops: what to run on.
        plan: launch configurations; statistics are written in their tile widths.
    """
    run = _Run(spec, weights, buffers, ops, plan)
    meta = ops.vision_metadata(
        buffers.grid, weights.inv_freq, buffers.meta, spec.merge_size, spec.head_dim, spec.position_side,
        plan.attention.block_m,
    )  # fmt: skip
    segments = Segments(meta.cu_seqlens, meta.tiles, meta.count(TILES), plan.attention.block_m)
    stats = _patch_embed(run)
    for i, block in enumerate(weights.blocks):
        stats = _block(run, block, segments, stats)
        if i in spec.deepstack:
            _deepstack(run, spec.deepstack.index(i), stats)
    _merger(run)
    return EncoderOutputs(buffers.hidden, buffers.merged)


def _patch_embed(run: _Run) -> RowStats:
    b, w, config = run.buffers, run.weights, run.plan.patch
    taps = None if w.position is None else Taps(w.position, b.meta.tap_index, b.meta.tap_weight)
    stats = run.stats(config)
    epilogue = Epilogue(bias=w.patch.bias, taps=taps, stats=stats)
    run.ops.linear(b.pixels, w.patch.weight, b.meta.count(TOKENS), b.hidden, epilogue, config)
    return stats


def _block(run: _Run, w: BlockWeights, segments: Segments, stats: RowStats) -> RowStats:
    """hidden += proj(attention(rope(qkv(norm(hidden))))); hidden += fc2(act(fc1(norm(hidden))))."""
    b, spec, plan, ops = run.buffers, run.spec, run.plan, run.ops
    rows, c = b.hidden.shape
    tokens = b.meta.count(TOKENS)

    qkv = b.rows_of_wide(rows, 3 * c)
    rope = Rope(b.meta.rope, 2 * c, spec.head_dim)
    ops.linear(b.hidden, w.qkv.weight, tokens, qkv, Epilogue(w.qkv.bias, run.fold(stats, w.qkv), rope=rope), plan.qkv)
    ops.attention(qkv, segments, b.context, spec.num_heads, spec.head_dim, plan.attention)
    stats = run.stats(plan.proj)
    epilogue = Epilogue(w.proj.bias, residual=b.hidden, stats=stats)
    ops.linear(b.context, w.proj.weight, tokens, b.hidden, epilogue, plan.proj)

    inner = b.rows_of_wide(rows, spec.intermediate_size)
    epilogue = Epilogue(w.fc1.bias, run.fold(stats, w.fc1), activation=spec.activation)
    ops.linear(b.hidden, w.fc1.weight, tokens, inner, epilogue, plan.fc1)
    stats = run.stats(plan.fc2)
    epilogue = Epilogue(w.fc2.bias, residual=b.hidden, stats=stats)
    ops.linear(inner, w.fc2.weight, tokens, b.hidden, epilogue, plan.fc2)
    return stats


def _deepstack(run: _Run, index: int, stats: RowStats) -> None:
    """A deepstack merger: it normalises after the tokens are put side by side, so that its norm folds too."""
    b, spec, w = run.buffers, run.spec, run.weights.deepstack[index]
    merged = b.hidden.view(-1, spec.merged_size)
    norm = run.fold(stats.merged(spec.merge_unit), w.fc1)
    _merger_mlp(run, w, merged, norm, b.merged[1 + index])


def _merger(run: _Run) -> None:
    """The merger: it normalises each token, then puts them side by side."""
    b, w = run.buffers, run.weights.merger
    assert w.norm is not None, "the merger's norm is not folded"
    run.ops.layer_norm(
        b.hidden, w.norm.weight, w.norm.bias, b.meta.count(TOKENS), b.context, run.spec.norm_eps, run.plan.max_programs
    )
    _merger_mlp(run, w, b.context.view(-1, run.spec.merged_size), None, b.merged[0])


def _merger_mlp(run: _Run, w: MergerWeights, x: torch.Tensor, norm: NormFold | None, out: torch.Tensor) -> None:
    merged = run.buffers.meta.count(MERGED)
    inner = run.buffers.rows_of_wide(x.shape[0], run.spec.merged_size)
    epilogue = Epilogue(w.fc1.bias, norm, activation="gelu")
    run.ops.linear(x, w.fc1.weight, merged, inner, epilogue, run.plan.merger_fc1)
    run.ops.linear(inner, w.fc2.weight, merged, out, Epilogue(w.fc2.bias), run.plan.merger_fc2)
