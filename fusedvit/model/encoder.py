"""The encoder as one function over static buffers, run on any table of operations (`model/ops.py`).

It can be captured in a CUDA graph: nothing here reads from the device, and no shape depends on content.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedvit.kernels.attention import Segments
from fusedvit.kernels.epilogue import Epilogue, HeadNorm, NormFold, Rope, RowStats, Taps
from fusedvit.kernels.metadata import MERGED, TOKENS, WINDOW_TILES
from fusedvit.kernels.norms import NOTHING, After, NextNorm
from fusedvit.model.buffers import EncoderBuffers, OverlapBuffers, rows_over
from fusedvit.model.merger_overlap import BLOCKS, SideStream
from fusedvit.model.ops import Ops
from fusedvit.model.plan import EncoderPlan
from fusedvit.model.spec import VisionSpec
from fusedvit.model.weights import (
    BlockWeights,
    DownsampleWeights,
    EncoderWeights,
    LinearWeights,
    MergerWeights,
    NormWeights,
    PoolWeights,
    SandwichWeights,
    launch_key,
)


@dataclass(frozen=True)
class EncoderOutputs:
    """The outputs of a run.

    Attributes:
        hidden: `[tokens, hidden]`, after the last block and, if there is one, the last norm; in towers with windows,
            in window order within each item. If it is no output of the tower, the caller's tensor has no rows.
        merged: `spec.merged_outputs` separate tensors `[tokens / merge_unit, out]`.
    """

    hidden: torch.Tensor
    merged: tuple[torch.Tensor, ...]

    @property
    def pooled(self) -> torch.Tensor:
        """`[tokens / merge_unit, out]`, after the merger."""
        return self.merged[0]

    @property
    def deepstack(self) -> tuple[torch.Tensor, ...]:
        """One `[tokens / merge_unit, out]` per deepstack merger."""
        return self.merged[1:]

    def deepstack_by_block(self, spec: VisionSpec) -> list[torch.Tensor]:
        """Deepstack features in the order of their blocks."""
        pairs = zip(spec.deepstack, self.deepstack, strict=False)  # a downsampling tail has one more output
        return [features for _, features in sorted(pairs, key=operator.itemgetter(0))]

    def last_hidden_state(self, spec: VisionSpec) -> torch.Tensor:
        """Hugging Face's `last_hidden_state`: `hidden`, or `[tokens / merge_unit, out]` from a downsampling convolution
        or pooling."""
        if spec.tail == "pool":
            return self.merged[0]
        return self.merged[1] if spec.tail == "downsample" else self.hidden


@dataclass(frozen=True)
class _Run:
    """The arguments of one run, bundled to keep the steps below short."""

    spec: VisionSpec
    weights: EncoderWeights
    buffers: EncoderBuffers
    ops: Ops
    plan: EncoderPlan
    numbers: Sequence[int]  # indices of the blocks to run

    def stream(self, width: int, block: int | None = None) -> "_Stream":
        """The buffers for the residual stream, with statistics per `width` channels.

        Args:
            block: the block that writes the stream, if any; if an overlapped merger follows, it gets separate buffers.
        """
        hidden, stats = self.buffers.hidden, self.buffers.stats
        slot = self.overlap_slot(block)
        if slot is not None:
            buffers, index = slot
            hidden, stats = buffers.hidden[index], buffers.stats[index]
        return _Stream(hidden, RowStats.over(stats, hidden.shape[0], hidden.shape[1], width))

    def overlap_slot(self, block: int | None) -> tuple[OverlapBuffers, int] | None:
        """The buffers of overlapped mergers, and the index in them of the merger after `block`.

        None if no merger follows `block`, or it runs in line.
        """
        buffers, mergers = self.buffers.overlap, self.plan.overlapped
        if buffers is None or block not in self.spec.deepstack:
            return None
        merger = self.spec.deepstack.index(block)
        return (buffers, mergers.index(merger)) if merger in mergers else None

    def normalised(
        self, stream: "_Stream", linear: LinearWeights, out: torch.Tensor, which: int = TOKENS
    ) -> tuple[torch.Tensor, NormFold | None]:
        """The input of `linear`, and the norm that its epilogue applies.

        A norm that is not folded into the weights is applied now, into `out`, and then the epilogue applies none.
        """
        x = stream.hidden
        if linear.norm is None:
            return x, NormFold(stream.stats, linear.colsum, self.spec.norm_eps)
        out = out.view(x.shape)
        self.norm(x, linear.norm, which, out, self.spec.norm_eps)
        return out, None

    def linear(
        self, x: torch.Tensor, w: LinearWeights, out: torch.Tensor, config: Any, which: int = TOKENS, **epilogue: Any
    ) -> None:
        """Writes the first `count(which)` rows of `epilogue(x @ w)` to `out`; the epilogue includes w's bias."""
        full = Epilogue(w.bias, scratch=self.buffers.scratch, **epilogue)
        self.ops.linear(x, w.weight, self.buffers.meta.count(which), out, full, config)

    def norm(
        self, x: torch.Tensor, w: NormWeights, which: int, out: torch.Tensor, eps: float, after: After = NOTHING
    ) -> None:
        """Writes the norm of the first `count(which)` rows of x to `out`."""
        count = self.buffers.meta.count(which)
        self.ops.layer_norm(x, w.weight, w.bias, count, out, eps, self.plan.max_programs, after)

    def segments(self, block: int) -> tuple[tuple[Segments, Any], ...]:
        """(segments that `block` attends within, configuration) for each launch of its attention."""
        meta, config = self.buffers.meta, self.plan.window_attention
        if not self.spec.is_windowed(block):
            return self.plan.frames(meta)
        tiles = meta.window_tiles, meta.count(WINDOW_TILES)
        return ((Segments(meta.window_cu_seqlens, *tiles, config.block_m), config),)


@dataclass(frozen=True)
class _Stream:
    """The residual stream `[tokens, hidden]` in its current buffer, and the moments of its rows."""

    hidden: torch.Tensor
    stats: RowStats


def encode(
    spec: VisionSpec,
    weights: EncoderWeights,
    buffers: EncoderBuffers,
    ops: Ops,
    plan: EncoderPlan,
    side: SideStream | None = None,
    rehearsal: bool = False,
) -> EncoderOutputs:
    """Runs the tower on `buffers.pixels` and `buffers.grid`.

    Args:
        spec: the tower.
        weights: prepared weights, on the buffers' device and of their dtype.
        buffers: inputs filled; every other field is overwritten.
        ops: the table of operations.
        plan: launch configurations; statistics are written per tile of their widths.
        side: where mergers of `plan.overlap` are launched, if `buffers` has room for them; else, or if None, they run
            in line.
        rehearsal: run only `distinct_blocks`, which launch every kernel; the outputs are meaningless.
    """
    numbers = distinct_blocks(spec, weights, plan) if rehearsal else range(len(weights.blocks))
    run = _Run(spec, weights, buffers, ops, plan, numbers)
    ops.vision_metadata(buffers.grid, weights.inv_freq, buffers.meta, plan.layout(spec))
    try:
        _blocks(run, side if buffers.overlap is not None else None)
        _tail(run)
    finally:
        if side is not None:
            side.join()
    return EncoderOutputs(buffers.hidden, buffers.merged)


def distinct_blocks(spec: VisionSpec, weights: EncoderWeights, plan: EncoderPlan) -> list[int]:
    """Indices of the first block of each kind; together these blocks launch every kernel of all blocks.

    A block's kind determines its launches: its position, the layout of its weights, its segments, whether a merger is
    overlapped with it or with the block before (whose statistics it reads), and the merger after it.
    """
    of_kinds: dict[Any, int] = {}
    for i, block in enumerate(weights.blocks):
        mergers = [(m in plan.overlapped, launch_key(weights.deepstack[m]))
                   for m, after in enumerate(spec.deepstack) if after == i]  # fmt: skip
        position = i == 0, i + 1 == len(weights.blocks), i - 1 in spec.deepstack
        overlapped = [has_merger_overlapped(spec, plan, at) for at in (i - 1, i)]
        kind = position, launch_key(block), spec.is_windowed(i), *overlapped, tuple(mergers)
        of_kinds.setdefault(kind, i)
    return list(of_kinds.values())


def has_merger_overlapped(spec: VisionSpec, plan: EncoderPlan, block: int) -> bool:
    """Whether an overlapped merger follows one of the `BLOCKS` blocks before `block`."""
    return any(0 < block - spec.deepstack[m] <= BLOCKS for m in plan.overlapped)


def _blocks(run: _Run, side: SideStream | None) -> None:
    """Patch embedding, blocks and deepstack mergers. Blocks that a merger is overlapped with use fewer programs."""
    overlapped = replace(run, plan=run.plan.of_overlapped_block())
    stream = _patch_embed(run)
    if run.spec.sandwich:
        _sandwich_blocks(run)
        return
    for i in run.numbers:
        before, of_block = (overlapped if has_merger_overlapped(run.spec, run.plan, at) else run for at in (i - 1, i))
        if i:  # the buffers of the block before, computed as a rehearsal may leave that block out
            stream = before.stream(before.plan.fc2.block_n, i - 1)
        stream = _block(of_block, i, run.weights.blocks[i], stream)
        if i not in run.spec.deepstack:
            continue
        merger = functools.partial(_deepstack, run, i, stream)
        if side is not None and run.spec.deepstack.index(i) in run.plan.overlapped:
            side.fork(merger)
        else:
            merger()


def _tail(run: _Run) -> None:
    """The last merger, or the norm or pooling in its place."""
    weights = run.weights
    if isinstance(weights.merger, DownsampleWeights):
        _downsample(run, weights.merger)
    elif isinstance(weights.merger, MergerWeights):
        _merger(run, weights.merger)
    elif isinstance(weights.merger, PoolWeights):
        _pool(run, weights.merger)
    else:
        hidden = run.buffers.hidden
        run.norm(hidden, weights.merger, TOKENS, hidden, run.spec.norm_eps)


def _patch_embed(run: _Run) -> _Stream:
    """Embeds pixels into the residual stream, in window order if there are windows, and adds positions."""
    b, w = run.buffers, run.weights
    tokens, pixels = b.meta.count(TOKENS), b.pixels
    if run.spec.window:
        pixels = b.rows_of_wide(*b.pixels.shape)
        run.ops.gather_rows(b.pixels, b.meta.order, tokens, pixels, run.spec.merge_unit, run.plan.max_programs)
    taps = None if w.position is None else Taps(w.position, b.meta.tap_index, b.meta.tap_weight)
    if w.patch_norm is None:
        stream = run.stream(run.plan.patch.least_n)  # the narrowest tiles that a small batch uses
        stats = None if run.spec.sandwich else stream.stats
        _embed(run, pixels, stream.hidden, Epilogue(taps=taps, stats=stats, scratch=b.scratch))
        return stream
    _embed(run, pixels, b.hidden, Epilogue(scratch=b.scratch))
    stream = run.stream(run.spec.hidden_size)
    run.norm(b.hidden, w.patch_norm, TOKENS, stream.hidden, run.spec.norm_eps, After(taps=taps, stats=stream.stats))
    return stream


def _embed(run: _Run, pixels: torch.Tensor, out: torch.Tensor, epilogue: Epilogue) -> None:
    """One launch for each kind of pixels that the tower takes; kinds that this call does not have count no rows."""
    patches = [(kind, linear) for kind, linear in enumerate(run.weights.patches()) if linear is not None]
    for kind, linear in patches:
        width = linear.weight.shape[1]
        tokens = run.buffers.row_counts[kind, :1] if len(patches) > 1 else run.buffers.meta.count(TOKENS)
        full = replace(epilogue, bias=linear.bias)
        run.ops.linear(pixels[:, :width], linear.weight, tokens, out, full, run.plan.of_patch(width))


def _block(run: _Run, i: int, w: BlockWeights, at: _Stream) -> _Stream:
    """hidden += proj(attention(rope(qkv(norm(hidden))))); hidden += fc2(act(fc1(norm(hidden))))."""
    b, spec, plan = run.buffers, run.spec, run.plan

    hidden, fold = run.normalised(at, w.qkv, b.context)
    qkv = _qkv(run, w, hidden, fold)
    for segments, config in run.segments(i):
        run.ops.attention(qkv, segments, b.context, spec.num_heads, spec.head_dim, config)
    y = run.stream(plan.proj.block_n)
    run.linear(b.context, w.proj, y.hidden, plan.proj, residual=at.hidden, stats=y.stats)

    inner = b.rows_of_wide(b.hidden.shape[0], w.fc2.weight.shape[1])
    x, fold = run.normalised(y, w.fc1, b.context)
    run.linear(x, w.fc1, inner, plan.fc1, norm=fold, activation=spec.activation, limit=spec.glu_limit)
    z = run.stream(plan.fc2.block_n, i)
    run.linear(inner, w.fc2, z.hidden, plan.fc2, residual=y.hidden, stats=z.stats)
    return z


def _sandwich_blocks(run: _Run) -> None:
    """Blocks with norms before and after attention and MLP; `b.context` holds the input of the next attention or MLP.

    The norm of an output, the residual addition and the next input's norm are one launch. So a block has seven
    launches, or eight if the epilogue of q, k and v does not normalise heads.
    """
    blocks = run.weights.blocks
    _add_and_norm(run, None, None, _input_norm(run, blocks[0]) if blocks else None)
    for i in run.numbers:
        _sandwich_block(run, i, blocks[i], _input_norm(run, blocks[i + 1]) if i + 1 < len(blocks) else None)


def _sandwich_block(run: _Run, i: int, w: BlockWeights, following: NextNorm | None) -> None:
    """hidden += post1(proj(attention(qkv(norm1(hidden))))); hidden += post2(fc2(act(fc1(norm2(hidden)))))."""
    b, spec, plan, ops, norms = run.buffers, run.spec, run.plan, run.ops, _sandwich_of(w)
    rows, c = b.hidden.shape

    qkv, heads = _qkv(run, w, b.context, None, norms.clip("q", "v")), spec.num_heads
    for segments, config in run.segments(i):
        ops.attention(qkv, segments, b.context, heads, spec.head_dim, config, norms.clip("context"))
    y = b.rows_of_wide(rows, c)
    run.linear(b.context, w.proj, y, plan.proj)
    before_mlp = NextNorm(norms.norm2.weight, b.context, norms.clip("mlp_x"), plan.fc1.pdl)
    _add_and_norm(run, y, norms.post1, before_mlp, norms.clip("proj"))

    inner = b.rows_of_wide(rows, w.fc2.weight.shape[1])
    run.linear(b.context, w.fc1, inner, plan.fc1, activation=spec.activation, clip=norms.clip("gate", "inner"))
    run.linear(inner, w.fc2, b.context, plan.fc2)
    _add_and_norm(run, b.context, norms.post2, following, norms.clip("fc2"))


def _add_and_norm(
    run: _Run,
    y: torch.Tensor | None,
    norm: NormWeights | None,
    following: NextNorm | None,
    clip: torch.Tensor | None = None,
) -> None:
    """hidden += norm(clamp(y)), then the following norm in the same launch."""
    b, weight = run.buffers, None if norm is None else norm.weight
    tokens, programs = b.meta.count(TOKENS), run.plan.max_programs
    run.ops.residual_norm(y, weight, b.hidden, tokens, run.spec.norm_eps, programs, following, clip)


def _input_norm(run: _Run, w: BlockWeights) -> NextNorm:
    norms = _sandwich_of(w)
    return NextNorm(norms.norm1.weight, run.buffers.context, norms.clip("x"), run.plan.qkv.pdl)


def _sandwich_of(w: BlockWeights) -> SandwichWeights:
    assert w.sandwich is not None, "a spec with sandwich norms has weights of them"
    return w.sandwich


def _qkv(
    run: _Run, w: BlockWeights, x: torch.Tensor, norm: NormFold | None, clip: torch.Tensor | None = None
) -> torch.Tensor:
    """q | k | v `[tokens, 3 hidden]`: clamped and normalised if the tower does so, q and k rotated, q scaled.

    One launch, or two if heads are normalised and the product's epilogue does not support their width.
    """
    b, spec = run.buffers, run.spec
    rows, c = b.hidden.shape
    qkv = b.rows_of_wide(rows, 3 * c)
    if w.qk_norm is not None and not spec.norms_heads:
        run.linear(x, w.qkv, qkv, run.plan.qkv, norm=norm)
        tokens, heads, programs = b.meta.count(TOKENS), spec.num_heads, run.plan.max_programs
        return run.ops.head_norm_rope(qkv, w.qk_norm, b.meta.rope, tokens, heads, spec.norm_eps, programs, clip)
    rope = Rope(b.meta.rope, 2 * c, spec.head_dim, b.meta.packed_cos_sin)
    norms = None if w.qk_norm is None else HeadNorm(w.qk_norm, spec.norm_eps, clip)
    run.linear(x, w.qkv, qkv, run.plan.qkv, norm=norm, rope=rope, heads=norms)
    return qkv


def _deepstack(run: _Run, block: int, x: _Stream) -> None:
    """A deepstack merger. It normalises merged rows (tokens side by side), so its norm can be folded too."""
    b, spec = run.buffers, run.spec
    index, slot = spec.deepstack.index(block), run.overlap_slot(block)
    w = run.weights.deepstack[index]
    rows = _Stream(x.hidden.view(-1, spec.merged_size), x.stats.merged(spec.merge_unit))
    merged, norm = run.normalised(rows, w.fc1, b.context if slot is None else slot[0].normalised, MERGED)
    inner = b.wide if slot is None else slot[0].inner
    run = replace(run, plan=run.plan.of_deepstack(index))  # the same plan if it runs in line, for the same bits
    _merger_mlp(run, w, merged, norm, inner, b.merged[1 + index])


def _normalised(run: _Run, w: NormWeights) -> torch.Tensor:
    """`[tokens / merge_unit, merged_size]`: normalised tokens side by side, back in the caller's order."""
    b, spec = run.buffers, run.spec
    after = After(order=b.meta.order, unit=spec.merge_unit) if spec.window else NOTHING
    run.norm(b.hidden, w, TOKENS, b.context, spec.norm_eps, after)
    return b.context.view(-1, spec.merged_size)


def _merger(run: _Run, w: MergerWeights) -> None:
    assert w.norm is not None, "the merger's norm is not folded"
    _merger_mlp(run, w, _normalised(run, w.norm), None, run.buffers.wide, run.buffers.merged[0])


def _merger_mlp(
    run: _Run, w: MergerWeights, x: torch.Tensor, norm: NormFold | None, between: torch.Tensor, out: torch.Tensor
) -> None:
    """fc2(gelu(fc1(x))), with the inner activations in the memory of `between`."""
    inner = rows_over(between, x.shape[0], run.spec.merged_size)
    run.linear(x, w.fc1, inner, run.plan.merger_fc1, MERGED, norm=norm, activation="gelu")
    run.linear(inner, w.fc2, out, run.plan.merger_fc2, MERGED)


def _downsample(run: _Run, w: DownsampleWeights) -> None:
    """fc2(swiglu(fc1(gelu(norm(proj(x)))))), where x is the convolution of normalised tokens side by side."""
    b, spec, plan, (pooled, last) = run.buffers, run.spec, run.plan, run.buffers.merged
    run.linear(_normalised(run, w.norm), w.downsample, last, plan.downsample, MERGED)
    projected = b.rows_of_wide(last.shape[0], spec.out_size)
    run.linear(last, w.proj, projected, plan.merger_proj, MERGED)
    run.norm(projected, w.proj_norm, MERGED, projected, spec.merger_eps, After(activation="gelu"))
    inner = b.rows_of_wide(last.shape[0], w.fc2.weight.shape[1], after=spec.out_size)
    run.linear(projected, w.fc1, inner, plan.merger_fc1, MERGED, activation="swiglu", limit=spec.glu_limit)
    run.linear(inner, w.fc2, pooled, plan.merger_fc2, MERGED)


def _pool(run: _Run, w: PoolWeights) -> None:
    """Means over the patches of each merged token, standardised if the tower does so."""
    b, spec = run.buffers, run.spec
    merged, programs = b.meta.count(MERGED), run.plan.max_programs
    run.ops.pool_rows(b.hidden, w.bias, w.scale, merged, b.merged[0], spec.merge_unit, programs)
